"""What ``torchbft sim`` prints: totals, and for a seed that fails what it drew."""

import json
from random import Random

import pytest

from torchbft.cli import sim as command
from torchbft.cli.main import main
from torchbft.sim.swarm import Parameters, SimResult


def result(seed: int, *, safety: tuple[str, ...] = (), liveness: tuple[str, ...] = ()) -> SimResult:
    return SimResult(
        seed=seed,
        parameters=Parameters.drawn(Random(f"swarm/{seed}"), 2),
        safety_violations=list(safety),
        liveness_failures=list(liveness),
        trace_hash=f"hash of {seed}",
        signed=4,
        void=1,
        halted=False,
        named=(),
        epoch=0,
        windows=2,
        seconds=20.0,
        messages=5000,
    )


def test_totals_hold_details_only_of_what_failed() -> None:
    results = [result(0), result(1, safety=("a fork",)), result(2, liveness=("stuck", "stuck"))]
    data = command.summary(results, 7, 2)
    assert (data["seeds"], data["peers"], data["byzantine"]) == (3, 7, 2)
    assert (data["safety_violations"], data["liveness_failures"]) == (1, 2)
    assert (data["rounds_signed"], data["rounds_void"], data["runs_halted"]) == (12, 3, 0)
    assert data["failures"] == [
        {"seed": r.seed, "what": what, "drawn": r.parameters.line()}
        for r, what in ((results[1], ["a fork"]), (results[2], ["stuck", "stuck"]))
    ]


def test_the_trace_hash_is_of_all_seeds_in_order() -> None:
    one, two = result(0), result(1)
    hashes = [command.summary(r, 7, 2)["trace_hash"] for r in ([one, two], [two, one], [one])]
    assert len(set(hashes)) == 3


def test_a_seed_that_fails_is_shown_and_the_command_ends_with_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = result(1, safety=("a fork",))
    monkeypatch.setattr(command, "run_seeds", lambda *given: [result(0), failed])
    assert main(["sim", "--seeds", "2", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["failures"][0]["seed"] == 1
    lines = err.splitlines()
    assert lines[0] == "seed 1: a fork"
    assert lines[1] == f"drawn: {failed.parameters.line()}"
    assert lines[2] == "hint: torchbft sim --seeds 1-1 --peers 7 --byzantine 2"


def test_one_seed_alone_shows_what_it_drew(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "run_seeds", lambda *given: [result(5)])
    assert main(["sim", "--seeds", "5-5"]) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [f"drawn: {result(5).parameters.line()}"]
    assert "4 rounds signed, 1 void" in out
