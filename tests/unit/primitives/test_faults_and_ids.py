"""The fault model is the one place that computes bounds; names are strict."""

import pytest

from torchbft.primitives.errors import DecodeError, PreconditionError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import parse_peer_id


@pytest.mark.parametrize(
    ("n", "f", "quorum"), [(1, 0, 1), (3, 0, 3), (4, 1, 3), (6, 1, 5), (7, 2, 5), (10, 3, 7)]
)
def test_bounds_of_a_set(n: int, f: int, quorum: int) -> None:
    faults = FaultModel(n)
    assert (faults.f, faults.quorum, faults.one_honest) == (f, quorum, f + 1)


@pytest.mark.parametrize("n", range(1, 70))
def test_two_quorums_share_an_honest_member(n: int) -> None:
    for f in range((n - 1) // 3 + 1):
        faults = FaultModel(n, f)
        assert 2 * faults.quorum - n >= f + 1
        assert faults.quorum <= n - f


@pytest.mark.parametrize(("n", "f"), [(3, 1), (6, 2), (7, 3), (4, -2)])
def test_too_many_faults_are_refused_never_clamped(n: int, f: int) -> None:
    with pytest.raises(PreconditionError, match=f"f={f}.*n={n}"):
        FaultModel(n, f)


def test_an_empty_set_is_refused() -> None:
    with pytest.raises(PreconditionError, match="at least one"):
        FaultModel(0)


@pytest.mark.parametrize("name", ["a", "clinic-c", "0", "x" * 32])
def test_names_that_are_fine(name: str) -> None:
    assert parse_peer_id(name) == name


@pytest.mark.parametrize("name", ["", "A", "a b", "-a", "a-", "x" * 33, "ä", "a\n", "a/b", "٣"])
def test_names_that_are_refused(name: str) -> None:
    with pytest.raises(DecodeError, match="not a peer name"):
        parse_peer_id(name)
