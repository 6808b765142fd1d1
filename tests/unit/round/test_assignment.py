"""Every sample once a pass, from the ledger's randomness."""

import itertools
from collections import Counter

import pytest

from torchbft.primitives.digests import sha256
from torchbft.protocols.round.assignment import (
    Cursor,
    Slice,
    deal,
    genesis_beacon,
    mix_beacon,
    pass_key,
    positions,
)

RUN = b"r" * 32
BEACON = genesis_beacon(b"s" * 32, RUN)
NAMES = ("a", "b", "c", "d")


def start() -> Cursor:
    return Cursor(pass_key(BEACON, RUN, 0), 0, 0)


@pytest.mark.parametrize("samples", [*range(1, 40), 1000, 1347, 1797, 4096, 4097])
def test_a_pass_is_a_permutation(samples: int) -> None:
    whole = positions(Slice(pass_key(BEACON, RUN, 0), 0, samples, 0, samples))
    assert sorted(whole) == list(range(samples))
    assert samples < 15 or whole != sorted(whole)


def test_passes_and_runs_are_permuted_differently() -> None:
    keys = {pass_key(BEACON, RUN, 0), pass_key(BEACON, RUN, 1), pass_key(BEACON, b"q" * 32, 0)}
    orders = {tuple(positions(Slice(key, 0, 100, 0, 100))) for key in keys}
    assert len(orders) == 3


def test_a_permutation_leaves_no_visible_structure() -> None:
    """Fixed points and ascents of a random permutation: about 1, and about half."""
    samples = 4000
    order = positions(Slice(pass_key(BEACON, RUN, 0), 0, samples, 0, samples))
    assert sum(i == p for i, p in enumerate(order)) <= 8
    ascents = sum(a < b for a, b in itertools.pairwise(order))
    assert abs(ascents - samples / 2) < 5 * (samples / 12) ** 0.5


def test_neighbouring_positions_are_sent_apart_on_both_sides_of_the_pair() -> None:
    """Chi-square of the quotient and the remainder by a side: 63 degrees of freedom each."""
    samples, side = 4096, 64
    order = positions(Slice(pass_key(BEACON, RUN, 0), 0, samples, 0, samples))
    for part in ([p // side for p in order], [p % side for p in order]):
        steps = Counter((b - a) % side for a, b in itertools.pairwise(part))
        expected = (samples - 1) / side
        assert sum((steps[s] - expected) ** 2 / expected for s in range(side)) < 63 + 5 * 126**0.5


def test_large_data_sets_cost_no_more_than_their_slice() -> None:
    part = Slice(pass_key(BEACON, RUN, 0), 0, 2**40 + 7, 2**39, 64)
    found = positions(part)
    assert len(set(found)) == 64
    assert all(0 <= p < 2**40 + 7 for p in found)


def dealt(rounds: int, *, samples: int, share: int, lost: frozenset[str] = frozenset()):
    """Deal some rounds in which the shares of ``lost`` never count."""
    cursor, requeue, counted = start(), (), []
    for number in range(rounds):
        beacon = sha256("test/beacon", bytes([number]))
        given = deal(
            NAMES,
            cursor,
            requeue,
            share_size=share,
            samples=samples,
            beacon=beacon,
            run_id=RUN,
        )
        cursor = given.cursor
        requeue = given.requeue + tuple(s for n, s in given.shares if n in lost)
        counted += [s for n, s in given.shares if n not in lost]
    return counted, requeue


def consumed(shares: list) -> list[tuple[int, int]]:
    return [(part.pass_index, p) for share in shares for part in share for p in positions(part)]


def test_no_sample_is_counted_twice_and_none_is_left_out() -> None:
    counted, requeue = dealt(5, samples=200, share=10)
    assert not requeue
    assert sorted(consumed(counted)) == [(0, p) for p in range(200)]


def test_shares_that_did_not_count_are_dealt_again_until_they_do() -> None:
    counted, requeue = dealt(9, samples=200, share=10, lost=frozenset({"b"}))
    found = consumed(counted) + consumed(list(requeue))
    assert len(found) == len(set(found))
    assert len(requeue) == 1
    assert {p for index, p in found if index == 0} == set(range(200))


def test_a_pass_that_ends_inside_a_share_goes_on_in_the_next() -> None:
    counted, _ = dealt(3, samples=25, share=10)
    assert sorted(consumed(counted)) == sorted(
        [(i, p) for i in range(4) for p in range(25)]
        + [part for part in consumed(counted) if part[0] == 4]
    )
    assert sum(part.count for share in counted for part in share) == 120


def test_the_beacon_decides_who_gets_which_share() -> None:
    def first(beacon: bytes) -> str:
        given = deal(NAMES, start(), (), share_size=10, samples=500, beacon=beacon, run_id=RUN)
        return next(name for name, share in given.shares if share[0].start == 0)

    assert {first(bytes([i]) * 32) for i in range(40)} == set(NAMES)


def test_the_beacon_takes_every_secret_in_order_of_author_and_falls_back() -> None:
    shares = [("b", b"2" * 32), ("a", b"1" * 32)]
    mixed = mix_beacon(BEACON, shares, 2)
    assert mixed == mix_beacon(BEACON, shares[::-1], 2)
    assert mixed != mix_beacon(BEACON, [("a", b"2" * 32), ("b", b"1" * 32)], 2)
    few = mix_beacon(BEACON, shares, 3)
    assert few == mix_beacon(BEACON, [], 1) != mixed
