"""Time-outs follow what was measured, floors, bytes and void rounds (ROUND.md 16)."""

import pytest

from torchbft.primitives.runspec import Timing
from torchbft.protocols.round.deadlines import (
    MAX_DOUBLINGS,
    MAX_SECONDS,
    RECENT_ROUNDS,
    SLOWEST_LINK,
    UNMEASURED,
    Deadlines,
)

TIMING = Timing(
    commit_floor=2.0, open_floor=1.0, attest_floor=1.0, root_floor=5.0, first_round=60.0, factor=3.0
)


def test_round_16_a_constant_times_the_n_minus_f_th_fastest_arrival() -> None:
    deadlines = Deadlines(TIMING)
    deadlines.observe("commit", [9.0, 1.0, 2.0, 500.0], 3, 500.0)
    assert deadlines.timeout("commit") == 3 * 9.0


def test_round_16_a_liar_cannot_stretch_it_beyond_the_honest() -> None:
    slow, fast = Deadlines(TIMING), Deadlines(TIMING)
    slow.observe("commit", [4.0, 5.0, 6.0, 1e6], 3, 10.0)
    fast.observe("commit", [4.0, 5.0, 6.0], 3, 10.0)
    assert slow.timeout("commit") == fast.timeout("commit") == 18.0


def test_round_16_floors_grow_with_bytes() -> None:
    deadlines = Deadlines(TIMING)
    deadlines.observe("attest", [0.0] * 4, 3, 0.0)
    assert deadlines.timeout("attest") == 1.0
    size = 758_000_000
    assert deadlines.timeout("attest", size=size) == 1.0 + size / SLOWEST_LINK


def test_c14_a_large_update_over_a_slow_link_is_given_its_time() -> None:
    """758 MB at 10 Mbit/s take 606 s."""
    deadlines = Deadlines(TIMING)
    assert deadlines.timeout("attest", size=758_000_000) > 606


def test_round_16_doubled_after_each_void_round_until_one_counts() -> None:
    deadlines = Deadlines(TIMING)
    deadlines.observe("commit", [4.0] * 4, 3, 4.0)
    for k in range(1, MAX_DOUBLINGS + 3):
        deadlines.round_ended(void=True)
        assert deadlines.timeout("commit") == 12.0 * 2 ** min(k, MAX_DOUBLINGS)
    deadlines.round_ended(void=False)
    assert deadlines.timeout("commit") == 12.0


def test_a_window_that_fewer_than_n_minus_f_reached_is_twice_as_long_the_next_time() -> None:
    deadlines = Deadlines(TIMING)
    deadlines.observe("open", [0.1, 0.1], 3, 4.0)
    assert deadlines.timeout("open") == 8.0


def test_a_spell_is_forgotten() -> None:
    deadlines = Deadlines(TIMING)
    deadlines.observe("commit", [400.0] * 4, 3, 400.0)
    for _ in range(RECENT_ROUNDS):
        deadlines.observe("commit", [1.0] * 4, 3, 1.0)
    assert deadlines.timeout("commit") == 3.0


def test_before_anything_was_measured_the_first_n_minus_f_arrivals_set_it() -> None:
    deadlines = Deadlines(TIMING)
    assert deadlines.timeout("commit") == 60.0
    assert deadlines.timeout("commit", arrivals=[5.0, 6.0], need=3) == 60.0
    assert deadlines.timeout("commit", arrivals=[5.0, 6.0, 7.0], need=3) == 21.0
    assert deadlines.timeout("open") == UNMEASURED * TIMING.open_floor


@pytest.mark.parametrize("size", [0, 2**62])
def test_no_time_out_is_longer_than_the_bound(size: int) -> None:
    deadlines = Deadlines(TIMING)
    deadlines.observe("root", [1e9], 1, 1e9)
    assert deadlines.timeout("root", size=size) == MAX_SECONDS
