"""The min/max network against the 0-1 principle, and its medians against NumPy."""

from itertools import product

import numpy as np
import pytest
import torch

from torchbft.tensors.aggregation.network import comparators, mean_of, median_of, order_statistics

ALL_BITS = {n: torch.tensor(list(product([0.0, 1.0], repeat=n))).t().contiguous() for n in (7, 11)}


@pytest.mark.parametrize("n", range(1, 12))
def test_network_sorts_every_zero_one_input(n: int) -> None:
    """By the 0-1 principle (Knuth, TAOCP 5.3.4, theorem Z) it then sorts every input."""
    block_NB = torch.tensor(list(product([0.0, 1.0], repeat=n))).t().contiguous()
    expected_NB = np.sort(block_NB.numpy().copy(), axis=0)
    assert np.array_equal(torch.stack(order_statistics(block_NB, 0, n)).numpy(), expected_NB)


@pytest.mark.parametrize(("n", "first", "last"), [(7, 3, 4), (7, 2, 5), (11, 0, 1), (11, 5, 6)])
def test_pruned_network_places_the_wanted_ranks(n: int, first: int, last: int) -> None:
    expected_NB = np.sort(ALL_BITS[n].numpy(), axis=0)[first:last]
    rows = order_statistics(ALL_BITS[n].clone(), first, last)
    assert np.array_equal(torch.stack(rows).numpy(), expected_NB)


def test_pruning_removes_work_and_an_unpruned_rank_needs_all_of_it() -> None:
    assert len(comparators(30, 14, 16)) < len(comparators(30, 0, 30))
    whole = comparators(16, 0, 16)
    assert all(step.wants_low and step.wants_high for step in whole)
    assert len(whole) == 63, "Batcher's network for 16 inputs has 63 comparators"


def test_a_network_that_lacks_a_comparator_fails_the_zero_one_test() -> None:
    """Negative control: the test above can tell a wrong network from a right one."""
    block_NB = ALL_BITS[7].clone()
    rows = list(block_NB.unbind(0))
    for low, high, *_ in comparators(7, 0, 7)[:-1]:
        rows[low], rows[high] = (
            torch.minimum(rows[low], rows[high]),
            torch.maximum(rows[low], rows[high]),
        )
    assert not np.array_equal(torch.stack(rows).numpy(), np.sort(ALL_BITS[7].numpy(), axis=0))


@pytest.mark.parametrize("n", [1, 2, 3, 6, 7, 30])
def test_median_is_the_true_median(n: int) -> None:
    block_NB = np.random.default_rng(n).standard_normal((n, 50))
    found_B = median_of(torch.from_numpy(block_NB.copy()))
    np.testing.assert_array_equal(found_B.numpy(), np.median(block_NB, axis=0))


def test_mean_of_rows_rounds_once_and_settles_the_sign_of_zero() -> None:
    rows = [torch.tensor([1e8, -0.0]), torch.tensor([1.0, -0.0]), torch.tensor([-1e8, -0.0])]
    mean_B = mean_of(rows)
    assert mean_B[0].item() == np.float32(1 / 3)
    assert not torch.signbit(mean_B[1])
