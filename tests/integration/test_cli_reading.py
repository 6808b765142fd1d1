"""status, report, verify and sim as a user starts them: output, pipes and exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torchbft.cli.main import main
from torchbft.cli.sim import parse_seeds
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.trace import (
    Evaluated,
    Record,
    Refusal,
    RoundEnded,
    RunEnded,
    RunStarted,
    TraceWriter,
)

Torchbft = Callable[..., Any]
NAMES = ("a", "b", "c", "d")


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def data(self) -> Any:
        return json.loads(self.stdout)


@pytest.fixture
def torchbft(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ran]:
    """The program in this process: starting it costs a second of imports."""

    def run(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(int(code), captured.out, captured.err)

    return run


def in_a_process(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torchbft.cli.main", *map(str, arguments)]
    env = {**os.environ, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def trace(peer: str, status: str) -> list[Record]:
    started = RunStarted(
        at=1e9, peer=peer, run_id="ab" * 32, name="tiny", members=NAMES, validators=4,
        contributors=4, f=1, quorum=3, rule="mean", codec="float32", engine="embedded",
        inner_steps=5, batch_size=8, encrypted=True, parameters=10, machine="m", versions={},
    )  # fmt: skip
    refused = Refusal("d", "unopened", "no-opening")
    rounds: list[Record] = []
    for number in range(2):
        rounds.append(RoundEnded(
            at=1e9 + number, round=number, void=False, accepted=("a", "b", "c"),
            refusals=(refused,), root="ee" * 32, blocks=3, train_seconds=0.2,
            consensus_seconds=0.05,
        ))  # fmt: skip
        rounds.append(Evaluated(at=1e9 + number, round=number, loss=0.5, accuracy=0.9))
    return [started, *rounds, RunEnded(at=1e9 + 3, status=status, reason="why", rounds=2)]


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return traced(tmp_path, "finished")


def traced(run_dir: Path, status: str) -> Path:
    for peer in NAMES:
        folder = run_dir / "peers" / peer
        folder.mkdir(parents=True)
        writer = TraceWriter(folder / "trace.jsonl")
        for record in trace(peer, status):
            writer.write(record)
        writer.close()
    return run_dir


def test_status_for_people_and_machines(torchbft: Torchbft, run_dir: Path) -> None:
    shown = torchbft("status", run_dir)
    assert shown.returncode == 0
    assert "quorum 3 of 4, f = 1" in shown.stdout
    assert "UU" in shown.stdout
    data = json.loads(torchbft("status", run_dir, "--json").stdout)
    assert data["phase"] == "finished"
    assert data["rounds"] == 2
    assert data["peers"]["a"]["accuracy"] == 0.9
    assert data["last_round"]["accepted"] == ["a", "b", "c"]


def test_status_in_a_terminal_without_unicode(run_dir: Path) -> None:
    shown = in_a_process("status", run_dir, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.isascii()
    assert "quorum 3 of 4" in shown.stdout


def test_status_of_a_halted_run_ends_with_three(torchbft: Torchbft, tmp_path: Path) -> None:
    assert torchbft("status", traced(tmp_path, "halted"), "--json").returncode == 3


def test_status_without_a_run_is_one_line(torchbft: Torchbft, tmp_path: Path) -> None:
    done = torchbft("status", tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {tmp_path}: holds no run")


def test_report_writes_a_page_and_gives_figures(
    torchbft: Torchbft, run_dir: Path, tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    done = torchbft("report", run_dir, "--out", page, "--no-verify", "--json")
    assert done.returncode == 0, done.stderr
    data = json.loads(done.stdout)
    assert data["page"] == str(page)
    assert data["matrix"]["d"]["1"]["outcome"] == "unopened"
    assert data["rounds"][0]["consensus"] == 0.05
    assert page.read_text().startswith("<!doctype html>")
    assert "wrote" in done.stderr


def test_report_on_an_unproven_run_says_so(torchbft: Torchbft, run_dir: Path) -> None:
    done = torchbft("report", run_dir, "--json")
    assert json.loads(done.stdout)["ledger_verified"] is False
    assert "FALSE" in (run_dir / "report.html").read_text()


def test_verify_without_logs_is_false(torchbft: Torchbft, run_dir: Path) -> None:
    done = torchbft("verify", run_dir, "--json")
    assert done.returncode == 1
    data = json.loads(done.stdout)
    assert data["ledger_verified"] is False
    assert "run.toml" in data["problems"][0]["where"]
    assert "problem: " in done.stderr


def test_sim_is_safe_live_and_repeatable(torchbft: Torchbft) -> None:
    first, second = (
        torchbft("sim", "--seeds", "2", "--peers", 4, "--byzantine", 1, "--json", "--jobs", jobs)
        for jobs in (1, 2)
    )
    assert first.returncode == 0, first.stderr
    data = json.loads(first.stdout)
    assert (data["safety_violations"], data["liveness_failures"], data["seeds"]) == (0, 0, 2)
    assert json.loads(second.stdout) == data, "the same trace over processes"


def test_sim_refuses_more_liars_than_f(torchbft: Torchbft) -> None:
    done = torchbft("sim", "--seeds", "1", "--peers", 4, "--byzantine", 2)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


@pytest.mark.parametrize(
    ("text", "seeds"), [("3", [0, 1, 2]), ("5-7", [5, 6, 7]), ("7-7", [7]), ("0-0", [0])]
)
def test_seeds_are_a_count_or_a_range(text: str, seeds: list[int]) -> None:
    assert list(parse_seeds(text)) == seeds


@pytest.mark.parametrize("text", ["", "x", "0", "-3", "5-3", "1-x", "99999999"])
def test_wrong_seeds_are_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_seeds(text)
