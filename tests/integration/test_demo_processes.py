"""Whole swarms in processes of their own: what `torchbft demo` promises, on small runs."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchbft.report.verify import verify

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 240
"""Bound of one swarm on a busy machine; on an idle one it takes a twentieth."""
FLIPS = 24

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms")]


def demo(out: Path, *options: str) -> tuple[int, dict[str, Any]]:
    command = [
        *(sys.executable, "-c", "import sys; from torchbft.cli.main import main; sys.exit(main())"),
        *("demo", "--no-references", "--json", "--out", str(out), *options),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    assert done.stdout, done.stderr[-2000:]
    return done.returncode, json.loads(done.stdout)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A run of four peers of which one equivocates."""
    out = tmp_path_factory.mktemp("demo") / "run"
    code, result = demo(
        out, "--peers", "4", "--byzantine", "1", "--rounds", "6", "--attack", "equivocator"
    )
    assert code == 0, result
    return out, result


def test_honest_peers_end_with_one_model_and_the_equivocator_is_convicted(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    _, result = finished
    assert result["honest_roots_equal"]
    assert result["ledger_verified"], result["problems"]
    assert not result["finalized_wrong"]
    assert result["named"] == result["convicted"] == result["liars"]
    assert result["accuracy"] > 80


def test_c07_a_sign_flipper_is_held_down_and_nobody_honest_is_named(tmp_path: Path) -> None:
    options = ("--peers", "4", "--byzantine", "1", "--rounds", "6", "--attack", "sign_flip")
    code, result = demo(tmp_path / "run", *options)
    assert code == 0, result
    assert result["honest_roots_equal"]
    assert result["named"] == []
    assert result["down_weighted"] == result["liars"]
    assert result["accuracy"] > 80


def test_a_withholder_is_suspected_and_never_named(tmp_path: Path) -> None:
    options = ("--peers", "4", "--byzantine", "1", "--rounds", "4", "--attack", "withholder")
    code, result = demo(tmp_path / "run", *options)
    assert code == 0, result
    assert result["honest_roots_equal"]
    assert result["named"] == result["convicted"] == []
    assert result["suspected"] == result["liars"]


@pytest.mark.parametrize("attack", ["withholder", "nan", "double_voter"])
def test_beyond_f_the_run_halts_voids_or_convicts_and_finalizes_nothing_wrong(
    attack: str, tmp_path: Path
) -> None:
    options = ("--peers", "4", "--byzantine", "2", "--rounds", "4", "--attack", attack)
    code, result = demo(tmp_path / "run", *options)
    assert code != 0
    assert not result["finalized_wrong"]
    halted_or_void = result["status"] != "finished" or result["rounds_counted"] == 0
    assert halted_or_void or len(result["convicted"]) >= 2
    assert set(result["named"]) <= set(result["liars"])


def test_any_flipped_byte_of_a_log_or_payload_is_found_and_placed(
    finished: tuple[Path, dict[str, Any]],
) -> None:
    out, _ = finished
    assert verify(out).ok
    files = [
        p for p in sorted(out.glob("peers/*/*.log")) if p.stem in ("blocks", "votes", "statements")
    ]
    files += [p for p in sorted(out.glob("peers/*/payloads/*/*")) if p.is_file()]
    draw = random.Random("flips")
    for path in draw.sample(files, min(FLIPS, len(files))):
        before = path.read_bytes()
        place = draw.randrange(len(before))
        path.write_bytes(before[:place] + bytes([before[place] ^ 0x10]) + before[place + 1 :])
        verdict = verify(out)
        path.write_bytes(before)
        assert not verdict.ok, f"{path} at {place}"
        assert any(str(path) in problem.where for problem in verdict.problems), (path, place)


def test_killed_peers_return_with_the_same_root_and_sign_nothing_twice() -> None:
    command = [sys.executable, "benchmarks/kill.py", "--kills", "4", "--peers", "4"]
    command += ["--rounds", "15", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    result = json.loads(done.stdout)
    assert done.returncode == 0, result
    assert result["kills"] >= 1
    assert result["roots_equal"]
    assert result["signed_twice"] == []
