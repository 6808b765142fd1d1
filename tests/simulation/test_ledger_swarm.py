"""The seeded swarm: safety and liveness over seeds, the same trace for the same seed, and mutants
that it must catch."""

import contextlib
import subprocess
import sys
from random import Random

import pytest

from torchbft.primitives.effects import Persist
from torchbft.primitives.errors import HaltError, PreconditionError
from torchbft.primitives.faults import FaultModel
from torchbft.protocols.ledger import machine, recovery, safety
from torchbft.protocols.ledger.outbox import Outbox
from torchbft.sim import ledger_swarm
from torchbft.sim.byzantine import ADVERSARIES
from torchbft.sim.disk import Disk
from torchbft.sim.ledger_swarm import Parameters, run
from torchbft.sim.network import Conditions


@pytest.mark.parametrize("seed", range(4))
def test_a_seed_is_safe_and_then_live(seed: int) -> None:
    result = run(seed)
    assert result.safety_violations == [], result.parameters
    assert result.liveness_failures == [], result.parameters
    assert max(result.heights.values()) > 0


@pytest.mark.parametrize(("peers", "byzantine"), [(1, 0), (2, 0), (4, 1), (10, 3)])
def test_swarms_of_other_sizes(peers: int, byzantine: int) -> None:
    result = run(3, peers, byzantine)
    assert result.safety_violations == []
    assert result.liveness_failures == []


def test_the_same_seed_gives_the_same_trace_in_any_process() -> None:
    """Also under another hash seed: no order of a set may reach the trace."""
    code = "from torchbft.sim.ledger_swarm import run; print(run(11).trace_hash)"
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == run(11).trace_hash != run(12).trace_hash


def test_more_liars_than_can_be_tolerated_are_refused() -> None:
    with pytest.raises(PreconditionError, match="3 of 7"):
        run(0, 7, 3)


def test_seeds_draw_every_adversary_and_kind_of_network() -> None:
    drawn = [Parameters.drawn(Random(f"swarm/{seed}"), 2) for seed in range(200)]
    assert {a for p in drawn for a in p.adversaries} == set(ADVERSARIES)
    assert {p.conditions.loss for p in drawn} == {0.0, 0.01, 0.1, 0.3}
    assert any(p.isolation for p in drawn)
    assert not all(p.isolation for p in drawn)


# -- mutants: a broken ledger must be reported


class TooSmall(FaultModel):
    __slots__ = ()

    @property
    def quorum(self) -> int:
        return self.f + 1


def violations(seeds, **options) -> str:
    found = []
    for seed in seeds:
        with contextlib.suppress(HaltError):  # a validator that notices by itself
            found += run(seed, **options).safety_violations
    return " ".join(found)


def test_a_weakened_quorum_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_swarm._Swarm, "phase_two", lambda self: [])
    found = violations((17, 23), faults=TooSmall(7))  # one swarm in six forks
    assert "another block" in found
    assert "bad certificate" in found


def forgetting_votes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "restore", lambda state, recorded, me: None)


def forgetting_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safety.Signed, "learn", lambda self, certificate: None)


def voting_after_a_time_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        safety, "_open", lambda signed, kind, view: (kind, view) not in signed.votes
    )


def sending_before_persisting(monkeypatch: pytest.MonkeyPatch) -> None:
    drain = Outbox.drain

    def wrong(self):
        effects = drain(self)
        persists = [e for e in effects if isinstance(e, Persist)]
        return [e for e in effects if not isinstance(e, Persist)] + persists

    monkeypatch.setattr(Outbox, "drain", wrong)


def a_disk_that_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Disk, "sync", lambda self: None)


def losing_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = recovery.restore

    def wrong(state, recorded, me):
        for height, records in recorded.items():
            recorded[height] = [r for r in records if not isinstance(r[0], recovery.Prepared)]
        restore(state, recorded, me)

    monkeypatch.setattr(machine, "restore", wrong)


@pytest.mark.parametrize(
    ("mutate", "symptom", "first"),
    [
        (forgetting_votes, "signed twice", 3),
        (sending_before_persisting, "signed twice", 3),
        (a_disk_that_lies, "signed twice", 5),
        (forgetting_locks, "hid its certificate", 0),
        (losing_certificates, "hid its certificate", 17),
        (voting_after_a_time_out, "hid its certificate", 0),
    ],
)
def test_a_mutant_is_reported_within_forty_seeds(
    monkeypatch: pytest.MonkeyPatch, mutate, symptom: str, first: int
) -> None:
    """``first``: where to begin, so that the usual case is quick."""
    mutate(monkeypatch)
    harsh = Parameters(
        Conditions(loss=0.2, jitter=0.05), ("silent", "lock-hider"), 16, 4, 40, 0.005, 0.5
    )
    monkeypatch.setattr(Parameters, "drawn", classmethod(lambda cls, random, byzantine: harsh))
    monkeypatch.setattr(ledger_swarm._Swarm, "phase_two", lambda self: [])
    assert any(symptom in violations([(first + seed) % 40]) for seed in range(40))
