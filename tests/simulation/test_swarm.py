"""The seeded swarm of whole peers: safety and liveness over seeds, the same trace for the same
seed, and mutants of ledger and round that it must catch."""

import subprocess
import sys
from collections.abc import Iterable
from random import Random

import pytest

from torchbft.primitives.errors import PreconditionError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols import peer as whole
from torchbft.protocols.ledger.certificates import Validator, ValidatorSet
from torchbft.protocols.round import reader
from torchbft.protocols.round.machine import RoundMachine
from torchbft.protocols.round.outcomes import tally
from torchbft.protocols.round.roots import RootVotes
from torchbft.protocols.round.statements import Statements
from torchbft.sim import swarm
from torchbft.sim.liars import LIARS
from torchbft.sim.network import Conditions
from torchbft.sim.swarm import Parameters, run


@pytest.mark.parametrize("seed", range(2))
def test_a_seed_is_safe_and_then_live(seed: int) -> None:
    result = run(seed)
    assert result.safety_violations == [], result.parameters.line()
    assert result.liveness_failures == [], result.parameters.line()
    assert result.signed >= swarm.MORE_ROUNDS
    assert not result.halted


@pytest.mark.parametrize(("peers", "byzantine"), [(1, 0), (2, 0), (4, 0), (4, 1)])
def test_swarms_of_other_sizes(peers: int, byzantine: int) -> None:
    result = run(3, peers, byzantine)
    assert result.safety_violations == [], result.parameters.line()
    assert result.liveness_failures == [], result.parameters.line()


def test_a_swarm_whose_membership_changes_under_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rotation, a newcomer and one that leaves, among two liars of whom one convicts itself."""
    monkeypatch.setattr(swarm, "STORIES", [("rotate", "join", "leave")])
    liars = {"double_voter", "equivocator", "twins", "deaf"}
    drawn = (Parameters.drawn(Random(f"swarm/{seed}"), 2) for seed in range(100))
    seed = next(n for n, p in enumerate(drawn) if liars & set(p.liars) and p.rounds == 64)
    result = run(seed)
    assert result.safety_violations == [], result.parameters.line()
    assert result.liveness_failures == [], result.parameters.line()
    assert result.epoch >= 3


def test_the_same_seed_gives_the_same_trace_in_any_process() -> None:
    """Also under another hash seed: no order of a set may reach the trace."""
    code = "from torchbft.sim.swarm import run; print(run(11, 4, 1).trace_hash)"
    environment = {"PYTHONHASHSEED": "1", "PYTHONPATH": ":".join(sys.path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == run(11, 4, 1).trace_hash != run(12, 4, 1).trace_hash


def test_more_liars_than_can_be_tolerated_are_refused() -> None:
    with pytest.raises(PreconditionError, match="3 of 7"):
        run(0, 7, 3)


def test_seeds_draw_every_liar_and_kind_of_network() -> None:
    drawn = [Parameters.drawn(Random(f"swarm/{seed}"), 2) for seed in range(200)]
    assert {liar for p in drawn for liar in p.liars} == set(LIARS)
    assert {p.conditions.loss for p in drawn} == {0.0, 0.01, 0.1, 0.2}
    assert {p.rounds for p in drawn} == {4, 6, 64}
    assert {p.changes for p in drawn} == set(swarm.STORIES)
    assert len({p.line() for p in drawn}) == 200


# -- mutants: what is broken must be reported


class TooSmall(FaultModel):
    __slots__ = ()

    @property
    def quorum(self) -> int:
        return self.f + 1


def weakening_the_ledgers_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    def validators(run: RunSpec) -> ValidatorSet:
        members = [Validator(m.name, bytes.fromhex(m.voting)) for m in run.validators]
        return ValidatorSet(members, TooSmall(len(members)))

    monkeypatch.setattr(whole, "validators_of", validators)


def weakening_the_quorum_of_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RootVotes, "agreed", lambda self: next(iter(self.by_root()), None))


def accepting_what_one_validator_attests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "attested", lambda *slot: bool(tally(*slot)))


def closing_without_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RoundMachine, "_held_item", lambda self, state, kind, seat: None)


def forgetting_statements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Statements, "_remember", lambda self, parsed, tx: None)
    monkeypatch.setattr(Statements, "foreign", lambda self: None)


def opening_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Statements, "_sendable", lambda self, place, tx, state: place[1] != "root")


def violations(seeds: Iterable[int]) -> str:
    return " ".join(violation for seed in seeds for violation in run(seed).safety_violations)


@pytest.mark.parametrize(
    ("mutate", "symptom", "liars"),
    [
        (weakening_the_ledgers_quorum, "bad certificate", ("twins", "deaf")),
        (weakening_the_quorum_of_roots, "counts a root", ("root_liar", "root_liar")),
        (accepting_what_one_validator_attests, "no honest peer holds", ("perjurer", "perjurer")),
        (closing_without_a_list, "came in time, is lost", ("censoring_leader", "censoring_leader")),
        (forgetting_statements, "signed twice", ("malformed", "deaf")),
        (opening_at_once, "too early", ("malformed", "malformed")),
    ],
)
def test_a_mutant_is_reported(
    monkeypatch: pytest.MonkeyPatch, mutate, symptom: str, liars: tuple[str, str]
) -> None:
    mutate(monkeypatch)
    harsh = Parameters(
        conditions=Conditions(jitter=0.05, loss=0.1),
        liars=liars,
        crashes=12,
        partitions=2,
        outages=0,
        void_votes=0,
        slips=0,
        sync_seconds=0.005,
        isolation=0.1,
        rounds=64,
        timing="quick",
        train_seconds=0.1,
        train_spread=0.5,
    )
    monkeypatch.setattr(Parameters, "drawn", classmethod(lambda cls, *drawn: harsh))
    monkeypatch.setattr(swarm._Swarm, "phase_two", lambda self: [])
    assert any(symptom in violations([seed]) for seed in range(8))
