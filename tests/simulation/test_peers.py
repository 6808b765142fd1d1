"""Stories of whole peers: what the host does for them, and that they end with one state."""

from collections.abc import Callable

import pytest

from torchbft.primitives.effects import Effect
from torchbft.primitives.errors import HaltError, MisuseError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import Timing
from torchbft.protocols.peer import BlockDone
from torchbft.protocols.round.events import RoundFixed
from torchbft.protocols.round.interface import (
    CatchUp,
    Diverged,
    DropRound,
    Halt,
    PreferVoid,
    StartTraining,
)
from torchbft.protocols.round.messages import Opening, parse
from torchbft.sim.liars import LIARS, MALFORMED
from torchbft.sim.network import Conditions
from torchbft.sim.peers import START_ROOT, Peers, Trainer, run_of

NAMES = tuple(PeerId(name) for name in "abcd")
A, B, C, D = NAMES
TIMING = Timing(commit_floor=0.5, open_floor=0.3, attest_floor=0.3, root_floor=2.0, first_round=5.0)


def peers(rounds: int = 3, **options) -> Peers:
    made = Peers(
        run_of(NAMES, rounds=rounds, timing=TIMING),
        conditions=Conditions(latency=0.005, jitter=0.002),
        trainer=Trainer(seconds=0.1, payload_bytes=20_000),
        **options,
    )
    made.start()
    return made


def play(swarm: Peers, *without: PeerId, seconds: float = 300.0) -> Peers:
    """Until all but some are finished; nothing may be wrong then."""
    waited = set(swarm.honest) - set(without)
    assert swarm.cluster.run(seconds, lambda: waited <= swarm.finished), swarm.halted
    assert swarm.violations() == []
    return swarm


def effects_of(swarm: Peers, *kinds: type) -> list[tuple[PeerId, Effect]]:
    """Filled while the swarm runs: effects of these kinds, and whose they were."""
    found: list[tuple[PeerId, Effect]] = []
    swarm.listeners.append(
        lambda peer, effect: found.append((peer, effect)) if isinstance(effect, kinds) else None
    )
    return found


def when(swarm: Peers, condition: Callable[[], bool]) -> None:
    assert swarm.cluster.run(300.0, condition)


def test_without_faults_all_end_with_one_state() -> None:
    swarm = play(peers())
    assert {home.number for home in swarm.homes.values()} == {2}
    assert len({home.root for home in swarm.homes.values()}) == 1
    assert swarm.sets.fixed == {0: NAMES, 1: NAMES, 2: NAMES}
    assert swarm.homes[A].root == swarm.roots.roots[2] != START_ROOT
    assert (swarm.accusations.named, swarm.accusations.suspected) == ({}, {})


def test_a_peer_that_was_away_copies_the_state_and_goes_on() -> None:
    swarm = peers(rounds=6)
    copies = effects_of(swarm, CatchUp)
    when(swarm, lambda: 0 in swarm.roots.roots)
    swarm.cluster.crash(D)
    when(swarm, lambda: 3 in swarm.roots.roots)
    swarm.start(D)
    play(swarm)
    assert {peer for peer, _ in copies} == {D}
    assert swarm.homes[D].root == swarm.homes[A].root


def test_a_peer_that_computes_another_state_copies_the_signed_one() -> None:
    swarm = peers(rounds=4)
    swarm.slips[B] = 1
    diverged = effects_of(swarm, Diverged)
    play(swarm)
    assert [(peer, effect.round) for peer, effect in diverged] == [(B, 1)]
    assert len({home.root for home in swarm.homes.values()}) == 1
    assert swarm.slips == {}


def test_a_peer_that_crashed_after_it_committed_does_not_train_that_round_again() -> None:
    swarm = peers()
    when(swarm, lambda: bool(swarm.cluster.nodes[A].disk.read().get("statements", [])[2:]))
    swarm.cluster.crash(A)
    swarm.start(A)
    trained = effects_of(swarm, StartTraining)
    play(swarm)
    said = [parse(r).statement for r in swarm.cluster.nodes[A].disk.read()["statements"]]
    openings = [one for one in said if isinstance(one, Opening) and one.author == A]
    assert [one.round for one in openings] == [0, 1, 2]
    assert (A, 0) not in {(peer, effect.round) for peer, effect in trained}


def test_a_round_that_votes_void_is_taken_back() -> None:
    swarm = peers(rounds=4)
    dropped = effects_of(swarm, DropRound)

    def dislike(peer: PeerId, effect: Effect) -> None:
        for event in effect.events if isinstance(effect, BlockDone) else ():
            if isinstance(event, RoundFixed) and event.round == 1:
                swarm.cluster.feed(peer, PreferVoid(event.round, "a test dislikes it"))

    swarm.listeners.append(dislike)
    play(swarm)
    assert set(swarm.sets.void) == {1, 2}, "the next one goes along"
    assert {(peer, effect.round) for peer, effect in dropped} >= {(name, 1) for name in NAMES}
    assert set(swarm.sets.fixed) == {0, 1, 3}
    assert len({home.root for home in swarm.homes.values()}) == 1


def test_an_unreadable_payload_names_its_author() -> None:
    liars = {D: LIARS[MALFORMED](b"seed", (D,))}
    swarm = play(peers(liars=liars, malformed=[D]))
    assert swarm.accusations.named == {D: {"malformed-payload"}}
    assert all(authors == (A, B, C) for authors in swarm.sets.fixed.values())
    assert swarm.application(D).state.current.number == 2


def test_a_peer_that_halts_stays_down() -> None:
    swarm = peers()
    when(swarm, lambda: 0 in swarm.sets.fixed)
    swarm.on_halt(D, HaltError("its log is lost"))
    assert not swarm.cluster.is_up(D)
    swarm.start(D)
    assert not swarm.cluster.is_up(D)
    assert "its log is lost" in swarm.halted[D]
    assert any("d halted" in violation for violation in swarm.violations())
    with pytest.raises(MisuseError, match="does not run"):
        swarm.application(D)
    assert swarm.cluster.run(300.0, lambda: {A, B, C} <= swarm.finished)


def test_a_halt_of_the_round_stops_the_peer() -> None:
    swarm = peers()
    swarm._on_effect(C, Halt("because"), 0.0)
    assert not swarm.cluster.is_up(C)
    assert swarm.halted == {C: "because"}


def test_an_advance_that_the_host_cannot_carry_out_is_our_mistake() -> None:
    swarm = peers()

    def tamper(peer: PeerId, effect: Effect) -> None:
        told = effect.events if isinstance(effect, BlockDone) and peer == A else ()
        if any(isinstance(event, RoundFixed) for event in told):
            swarm.homes[A].root = b"another"

    swarm.listeners.append(tamper)
    with pytest.raises(MisuseError, match="a cannot apply round 0"):
        swarm.cluster.run(60.0)


def test_clocks_that_differ_change_nothing() -> None:
    swarm = Peers(run_of(NAMES, rounds=3, timing=TIMING), trainer=Trainer(seconds=0.1))
    for index, node in enumerate(swarm.cluster.nodes.values()):
        node.skew, node.rate = 3600.0 * index, 1.0 + 0.01 * index
    swarm.start()
    play(swarm)
    assert swarm.sets.fixed == {0: NAMES, 1: NAMES, 2: NAMES}
