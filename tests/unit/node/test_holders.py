"""Whom a fetch asks: no liar costs more than a spell, and nobody honest is lost."""

from __future__ import annotations

import pytest

from torchbft.node.transports.holders import (
    FAIR_RATE,
    FLOOR_RATE,
    LONGEST_PAUSE,
    LONGEST_SPELL,
    SPELL_SECONDS,
    Holders,
)
from torchbft.primitives.ids import PeerId

A, B, C = (PeerId(name) for name in "abc")
MUCH = 10**9


def of(*peers: PeerId) -> Holders:
    holders = Holders()
    holders.add(peers)
    return holders


def asked(holders: Holders, now: float, connected: tuple[PeerId, ...] = ()) -> set[PeerId | None]:
    """Whom it may choose: chance decides among equals."""
    return {holders.choose(now, connected) for _ in range(40)}


def test_the_untried_come_first_connected_before_others_then_the_fastest() -> None:
    holders = of(A, B, C)
    assert asked(holders, 0.0) == {A, B, C}
    assert asked(holders, 0.0, (B,)) == {B}
    holders.ended(B, 900e3, 1.0)
    assert asked(holders, 1.0, (B,)) == {A, C}
    holders.ended(A, 100e3, 1.0)
    holders.ended(C, 0.0, 1.0)
    assert asked(holders, 100.0, (C,)) == {B}


def test_who_fails_is_paused_longer_each_time_and_asked_again() -> None:
    holders, now = of(A), 0.0
    pauses = []
    for _ in range(12):
        assert holders.choose(now, ()) == A
        holders.ended(A, 0.0, now)
        assert holders.choose(now, ()) is None
        pauses.append(holders.pause(now))
        now += pauses[-1]
    assert pauses[0] < 0.2 < pauses[-1] <= LONGEST_PAUSE * 1.25
    assert holders.spell(A) == SPELL_SECONDS * 13
    for _ in range(12):
        holders.ended(A, 0.0, now)
    assert holders.spell(A) == SPELL_SECONDS * LONGEST_SPELL
    holders.ended(A, FLOOR_RATE, now)
    assert (holders.spell(A), holders.choose(now, ())) == (SPELL_SECONDS, A)


def test_a_liar_is_never_asked_nor_added_again() -> None:
    holders = of(A, B)
    holders.exclude(A)
    holders.add([A])
    assert asked(holders, 0.0) == {B}
    holders.exclude(B)
    assert holders.choose(0.0, ()) is None
    assert holders.pause(0.0) == LONGEST_PAUSE


@pytest.mark.parametrize(
    ("rate", "left", "best", "leaves"),
    [
        (1.0, MUCH, 0.0, True),  # the drip
        (FAIR_RATE - 1, MUCH, 0.0, True),
        (FAIR_RATE, MUCH, 0.0, False),
        (FAIR_RATE, MUCH, 100 * FAIR_RATE, True),  # slow for this network
        (FAIR_RATE / 2, int(FAIR_RATE), 0.0, False),  # nearly done
        (1.0, 2, 0.0, True),  # nearly done for ever
    ],
)
def test_when_an_untried_holder_is_asked_instead(
    rate: float, left: int, best: float, leaves: bool
) -> None:
    assert of(A, B).should_leave(A, rate, left, 0.0, best) is leaves
    assert not of(A).should_leave(A, rate, left, 0.0, best), "there is nobody else"


def test_a_pusher_that_is_no_holder_is_left_for_one() -> None:
    assert of(B).should_leave(A, 1.0, MUCH, 0.0, 0.0)
    assert of(B).spell(A) == SPELL_SECONDS


def test_once_all_are_measured_only_one_twice_as_fast_is_preferred() -> None:
    holders = of(A, B)
    holders.ended(B, 400e3, 0.0)
    assert not holders.should_leave(A, 200e3, MUCH, 0.0, 0.0)
    assert holders.should_leave(A, 199e3, MUCH, 0.0, 0.0)
    holders.ended(B, 0.0, 0.0)
    assert not holders.should_leave(A, FLOOR_RATE, MUCH, 100.0, 0.0)
    assert not holders.should_leave(A, FLOOR_RATE - 1, MUCH, 0.0, 0.0), "B is paused"
    assert holders.should_leave(A, FLOOR_RATE - 1, MUCH, 100.0, 0.0)


@pytest.mark.parametrize("liars", [1, 21])
def test_liars_of_any_kind_cost_a_few_spells_and_not_the_fetch(liars: int) -> None:
    """Simulated: liars drip, or are fast in their first spell only; one honest line of 0.5 MB/s."""
    honest = PeerId("honest")
    names = [PeerId(f"liar-{i}") for i in range(liars)]
    holders, now, left, seen = of(honest, *names), 0.0, 20_000_000, set[PeerId]()
    while left > 0:
        peer = holders.choose(now, names)
        if peer is None:
            now += holders.pause(now)
            continue
        while True:
            first, seconds = peer not in seen, holders.spell(peer)
            seen.add(peer)
            fast = first and peer.endswith(("0", "2", "4", "6", "8"))
            rate = 5e5 if peer == honest else 9e5 if fast else 10.0
            now, left = now + seconds, left - int(rate * seconds)
            if left <= 0 or holders.should_leave(peer, rate, left, now, 0.0):
                holders.ended(peer, rate, now)
                break
    alone = 20_000_000 / 5e5
    assert now <= alone + (2 * liars + 2) * SPELL_SECONDS
