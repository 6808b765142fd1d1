"""The min/max network against the 0-1 principle, and its medians against NumPy."""

from itertools import product

import numpy as np
import pytest
import torch

from torchbft.tensors.aggregation.network import comparators, mean_of, median_of, order_statistics

ALL_BITS = {
    n: np.array(list(product([0.0, 1.0], repeat=n)), np.float32).T.copy() for n in range(1, 12)
}
FORMS = {"array": lambda block_NB: block_NB, "tensor": torch.from_numpy}
"""What the network is given on a CPU, and on another device."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", range(1, 12))
def test_network_sorts_every_zero_one_input(n: int, form: str) -> None:
    """By the 0-1 principle (Knuth, TAOCP 5.3.4, theorem Z) it then sorts every input."""
    block_NB = ALL_BITS[n].copy()
    found = order_statistics(FORMS[form](block_NB), 0, n)
    assert np.array_equal(np.stack(found), np.sort(ALL_BITS[n], axis=0))
    assert np.array_equal(block_NB, ALL_BITS[n]), "the input is not changed"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("n", "first", "last"), [(7, 3, 4), (7, 2, 5), (11, 0, 1), (11, 5, 6), (2, 1, 2)]
)
def test_pruned_network_places_the_wanted_ranks(n: int, first: int, last: int, form: str) -> None:
    rows = order_statistics(FORMS[form](ALL_BITS[n]), first, last)
    assert np.array_equal(np.stack(rows), np.sort(ALL_BITS[n], axis=0)[first:last])


def test_pruning_removes_work_and_an_unpruned_rank_needs_all_of_it() -> None:
    assert len(comparators(30, 14, 16)) < len(comparators(30, 0, 30))
    whole = comparators(16, 0, 16)
    assert all(step.wants_low and step.wants_high for step in whole)
    assert len(whole) == 63, "Batcher's network for 16 inputs has 63 comparators"


def test_a_network_that_lacks_a_comparator_fails_the_zero_one_test() -> None:
    """Negative control: the test above can tell a wrong network from a right one."""
    rows = list(ALL_BITS[7])
    for low, high, *_ in comparators(7, 0, 7)[:-1]:
        rows[low], rows[high] = (
            np.minimum(rows[low], rows[high]),
            np.maximum(rows[low], rows[high]),
        )
    assert not np.array_equal(np.stack(rows), np.sort(ALL_BITS[7], axis=0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 30])
def test_median_is_the_true_median(n: int, form: str) -> None:
    block_NB = np.random.default_rng(n).standard_normal((n, 50))
    found_B = np.asarray(median_of(FORMS[form](block_NB)))
    np.testing.assert_array_equal(found_B, np.median(block_NB, axis=0))


@pytest.mark.parametrize("form", FORMS)
def test_mean_of_rows_rounds_once_and_settles_the_sign_of_zero(form: str) -> None:
    rows = np.array([[1e8, -0.0], [1.0, -0.0], [-1e8, -0.0]], np.float32)
    mean_B = np.asarray(mean_of(list(FORMS[form](rows))))
    assert mean_B[0] == np.float32(1 / 3)
    assert not np.signbit(mean_B[1])
