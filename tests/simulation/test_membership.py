"""Whole peers whose membership changes while they train: stories, and mutants that are caught."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import Timing
from torchbft.protocols.ledger.certificates import ValidatorSet
from torchbft.protocols.ledger.machine import LedgerMachine
from torchbft.protocols.round import events, interface
from torchbft.protocols.round.changes import Change, Remove
from torchbft.protocols.round.membership import in_force
from torchbft.protocols.round.state import RoundState
from torchbft.sim.liars import LIARS
from torchbft.sim.peers import Peers, admission_of, run_of

QUICK = Timing(commit_floor=0.5, open_floor=0.3, attest_floor=0.3, root_floor=2.0, first_round=5.0)
A, B, C, D, E = (PeerId(f"peer-{letter}") for letter in "abcde")


def peers_of(*names: PeerId, rounds: int = 12, **options: object) -> Peers:
    return Peers(run_of(names, rounds=rounds, timing=QUICK), **options)


def run_until(peers: Peers, done: Callable[[], bool], seconds: float = 120.0) -> None:
    assert peers.cluster.run(seconds, done), [stands(peers, name) for name in peers.names]
    assert peers.violations() == []


def stands(peers: Peers, name: PeerId) -> str:
    if not peers.cluster.is_up(name):
        return f"{name} is down"
    state = peers.application(name).state
    return f"{name}: round {state.current.number}, {state.phase}, epoch {state.epoch}"


def made(peers: Peers, *changes: Change, by: tuple[PeerId, ...] = (A, B, C, D)) -> bool:
    return all(in_force(peers.application(name).state, c) for name in by for c in changes)


def seats(peers: Peers, name: PeerId = A) -> list[str]:
    return [seat.name for seat in peers.application(name).state.current.seats]


def finished(peers: Peers, *names: PeerId) -> Callable[[], bool]:
    return lambda: set(names) <= peers.finished


def test_c15_a_key_is_rotated_and_a_fifth_party_added_and_the_others_only_vote() -> None:
    """NVFlare #5247, FLIP PR #680: adding a site re-minted every certificate."""
    peers = peers_of(A, B, C, D, joiners=[E])
    peers.start()
    run_until(peers, lambda: 0 in peers.roots.roots)
    before = {name: peers._rings[name].publics for name in (A, C, D)}
    rotate, admit = peers.new_key(B, "2"), admission_of(E)
    peers.want(rotate, admit)
    run_until(peers, lambda: made(peers, rotate, admit))
    start = peers.application(A).state.current.number
    run_until(peers, finished(peers, A, B, C, D, E))
    assert {name: peers._rings[name].publics for name in (A, C, D)} == before
    assert seats(peers) == [A, B, C, D, E]
    told = [number for number, who in peers.sets.fixed.items() if who == (A, B, C, D, E)]
    assert min(told) <= start + 1, "all five count, the newcomer from its first round on"
    assert peers.application(A).state.epoch >= 1
    assert peers.sets.void == {}
    assert not peers.accusations.named


def test_c15_holds_when_all_restart_from_their_folders_afterwards() -> None:
    peers = peers_of(A, B, C, D, joiners=[E])
    peers.start()
    rotate, admit = peers.new_key(B, "2"), admission_of(E)
    peers.want(rotate, admit)
    run_until(peers, lambda: made(peers, rotate, admit))
    for name in peers.names:
        peers.cluster.crash(name)
    peers.start()
    run_until(peers, finished(peers, A, B, C, D, E))


def test_a_joiner_that_comes_late_catches_up_from_the_genesis_block() -> None:
    peers = peers_of(A, B, C, D, joiners=[E])
    peers.start(A, B, C, D)
    admit = admission_of(E)
    peers.want(admit)
    run_until(peers, lambda: made(peers, admit))
    number = peers.application(A).state.current.number
    run_until(peers, lambda: peers.application(A).state.current.number >= number + 3)
    peers.start(E)
    run_until(peers, finished(peers, A, B, C, D, E))
    assert peers.homes[E].root == peers.homes[A].root


def test_who_leaves_is_not_waited_for_and_follows_as_it_likes() -> None:
    peers = peers_of(A, B, C, D, E)
    peers.start()
    peers.want(Remove(E))
    run_until(peers, lambda: made(peers, Remove(E)))
    peers.cluster.crash(E)
    void, since = dict(peers.sets.void), peers.cluster.clock.now
    run_until(peers, finished(peers, A, B, C, D))
    assert peers.sets.void == void
    assert seats(peers) == [A, B, C, D]
    assert peers.cluster.clock.now - since < 30.0, "no time-out is spent on it"


def test_a_lost_log_is_cured_by_a_new_key() -> None:
    """ROUND.md 1: lost signing state means rotation by vote."""
    peers = peers_of(A, B, C, D, rounds=16)
    peers.start()
    run_until(peers, lambda: 1 in peers.roots.roots)
    peers.cluster.crash(D)
    peers.cluster.nodes[D].disk = type(peers.cluster.nodes[D].disk)()
    rotate = peers.new_key(D, "2")
    peers._rings[D] = type(peers._rings[D])(peers._rings[D].get(rotate.voting))
    peers.want(rotate)
    run_until(peers, lambda: made(peers, rotate, by=(A, B, C)))
    peers.start(D)
    run_until(peers, finished(peers, A, B, C, D))
    last = max(peers.sets.fixed)
    assert D in peers.sets.fixed[last]
    assert not peers.halted


def test_one_validator_becomes_four_and_one_again() -> None:
    """f follows: 0 with up to three, 1 with four; the last validator cannot be voted out."""
    peers = peers_of(A, joiners=[B, C, D], rounds=24)
    peers.start()
    grown = [admission_of(name) for name in (B, C, D)]
    peers.want(*grown)
    run_until(peers, lambda: made(peers, *grown, by=(A,)))
    run_until(peers, lambda: seats(peers) == [A, B, C, D])
    assert peers.application(A).state.current.f == 1
    gone = [Remove(name) for name in (B, C, D)]
    peers.want(*gone)
    run_until(peers, lambda: seats(peers) == [A])
    told: list[object] = []
    peers.listeners.append(lambda peer, effect: told.append(effect))
    peers.want(Remove(A))
    run_until(peers, finished(peers, A))
    reasons = [e.reason for e in told if isinstance(e, interface.ChangeTold)]
    assert set(reasons) == {"no validator would be left"}
    assert seats(peers) == [A]


def test_a_convict_loses_its_power_and_the_engine_goes_on() -> None:
    seed = b"\7" * 32
    liars = {D: LIARS["double_voter"](seed, (D,))}
    peers = peers_of(A, B, C, D, liars=liars)
    told: list[events.MembershipChanged] = []

    def listen(peer: PeerId, effect: object) -> None:
        told.extend(
            event
            for event in getattr(effect, "events", ())
            if isinstance(event, events.MembershipChanged)
        )

    peers.listeners.append(listen)
    peers.start()
    run_until(peers, finished(peers, A, B, C))
    assert seats(peers) == [A, B, C]
    assert {event.epoch for event in told} == {1}
    assert peers.application(A).state.current.f == 0
    tip = peers.application(A).info().last_height
    assert [seat.name for seat in peers.seating.validators(tip)] == [A, B, C]


# --- mutants: what is broken must be reported -----------------------------------------------------


def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates of height h are in force at h + 1."""
    advance = LedgerMachine._advance

    def early(self: LedgerMachine, finalized: object, encoded: bytes) -> None:
        advance(self, finalized, encoded)
        if self._validators is not self._upcoming:
            self._validators = self._upcoming
            self._begin()

    monkeypatch.setattr(LedgerMachine, "_advance", early)


def never(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ledger goes on counting the first set's power."""
    monkeypatch.setattr(ValidatorSet, "updated", lambda self, updates, names: self)


def old_power(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds need the quorum that the run began with: 3 of 4, now of 5."""
    monkeypatch.setattr(RoundState, "voting", SimpleNamespace(n=4, f=1, quorum=3))


@pytest.mark.parametrize(
    ("mutate", "symptom"),
    [
        (at_once, "holds a bad certificate"),
        (never, "holds a bad certificate"),
        (old_power, "counts a root"),
    ],
)
def test_a_mutant_of_the_epochs_is_reported(
    monkeypatch: pytest.MonkeyPatch, mutate: Callable, symptom: str
) -> None:
    mutate(monkeypatch)
    peers = peers_of(A, B, C, D, joiners=[E])
    peers.start()
    peers.want(admission_of(E))
    if mutate is old_power:  # three of five roots are equal
        assert peers.cluster.run(60.0, lambda: made(peers, admission_of(E)))
        number = peers.application(A).state.current.number
        peers.slips.update({D: number, E: number})
    peers.cluster.run(60.0, lambda: False)
    assert any(symptom in violation for violation in peers.violations())


def test_blocks_of_before_a_change_are_served_and_taken_with_their_own_sets() -> None:
    peers = peers_of(A, B, C, D, joiners=[E])
    peers.start(A, B, C, D)
    peers.want(admission_of(E), Remove(D))
    run_until(peers, lambda: made(peers, admission_of(E), Remove(D), by=(A, B, C)))
    peers.start(E)
    run_until(peers, lambda: E in peers.finished or peers.round_of(E) > 3)
    sets = {tuple(s.name for s in peers.seating.validators(h)) for h in range(1, 30)}
    assert (A, B, C, D) in sets
    assert (A, B, C, E) in sets
