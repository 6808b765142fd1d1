"""Real processes, frozen, killed and starved: what the others do, and how they come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 300.0
"""Bound of one story on a busy machine; on an idle one it takes a twentieth."""
PAUSE = 0.1

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms")]


def story(name: str, out: Path) -> dict[str, Any]:
    command = [sys.executable, str(ROOT / "tests/integration/stories.py"), name, str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(json.loads(done.stdout))


def whole(told: dict[str, Any]) -> bool:
    """Everybody who is judged finished with one root, and the log proves it."""
    assert told["problems"] == []
    assert told["convicted"] == []
    return told["status"] == "finished" and len(told["roots"]) == 1 and told["verified"]


def until(reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(PAUSE)


def test_c16_a_frozen_node_delays_rounds_by_their_deadline_only_and_catches_up(
    tmp_path: Path,
) -> None:
    told = story("freeze", tmp_path / "run")
    assert whole(told), told
    assert told["thawed"] >= told["frozen"] + 3, "no round ended while one node was frozen"
    assert told["own_rounds_while_frozen"] <= told["frozen"] + 1
    assert len(told["finished"]) == 4


def test_c10_all_processes_are_killed_at_once_and_the_run_goes_on(tmp_path: Path) -> None:
    told = story("kill_all", tmp_path / "run")
    assert whole(told), told
    assert told["killed"] == 2
    assert all(restarts >= 2 for restarts in told["restarts"])
    assert len(told["finished"]) == 4


def test_a_full_disk_stops_one_peer_with_one_clear_line_and_not_the_others(tmp_path: Path) -> None:
    told = story("fill_disk", tmp_path / "run")
    assert told["verified"], told["problems"]
    assert len(told["finished"]) == 3
    assert len(told["roots"]) == 1
    errors = {line for line in told["log"].splitlines() if line.startswith("error:")}
    assert errors, told["log"]
    for error in errors:
        assert "writing a record failed: File too large" in error
        assert "/peers/peer-3/" in error
    assert "Traceback" not in told["log"]


def test_control_c_stops_a_local_swarm_and_leaves_no_process(tmp_path: Path) -> None:
    out = tmp_path / "run"
    script = "import sys; from torchbft.cli.main import main; sys.exit(main())"
    options = ("up", "--peers", "4", "--rounds", "400", "--out", str(out), "--json")
    process = subprocess.Popen(
        [sys.executable, "-c", script, *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        cwd=ROOT,
    )
    try:
        traces = [out / "peers" / f"peer-{number}" / "trace.jsonl" for number in range(1, 5)]
        until(
            lambda: all(t.exists() and b'"type":"round"' in t.read_bytes() for t in traces),
            "no round ended",
        )
        process.send_signal(signal.SIGINT)
        stdout, stderr = process.communicate(timeout=SECONDS)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    result = json.loads(stdout)
    assert process.returncode == 3, stderr[-2000:]  # it was stopped before its end
    assert result["ledger_verified"], result["problems"]
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
