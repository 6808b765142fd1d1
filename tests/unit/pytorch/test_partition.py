"""Shards: every sample once, empty ones said aloud."""

from __future__ import annotations

import warnings

import pytest
import torch

from torchbft.primitives.errors import PreconditionError
from torchbft.pytorch.partition import (
    EmptyShardWarning,
    checked,
    dirichlet_shards,
    fraction_shards,
)

LABELS = torch.arange(600) % 10


def test_c02_ten_samples_over_seven_peers_add_up_and_empty_shards_are_said() -> None:
    with pytest.warns(EmptyShardWarning, match=r"shards \[6\] of 7 hold no sample"):
        shards = fraction_shards(10, [0.3, 0.2, 0.14, 0.12, 0.11, 0.1, 0.03])
    assert [len(shard) for shard in shards] == [3, 2, 2, 1, 1, 1, 0]
    assert sorted(index for shard in shards for index in shard) == list(range(10))


def test_equal_fractions_differ_by_one_sample_at_most() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        shards = fraction_shards(10, [1 / 7] * 7)
    assert sorted(len(shard) for shard in shards) == [1, 1, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("fractions", [[0.5, 0.4], [1.5, -0.5], [float("nan"), 1.0], [], [0.6] * 2])
def test_fractions_that_are_none_are_refused(fractions: list[float]) -> None:
    with pytest.raises(PreconditionError, match="fractions"):
        fraction_shards(10, fractions)


def test_dirichlet_shards_hold_every_sample_once_and_repeat() -> None:
    shards = dirichlet_shards(LABELS, 7, 0.5, seed=3)
    assert sorted(index for shard in shards for index in shard) == list(range(600))
    assert shards == dirichlet_shards(LABELS, 7, 0.5, seed=3)
    assert shards != dirichlet_shards(LABELS, 7, 0.5, seed=4)


def share_of_largest_class(alpha: float) -> float:
    """Mean over shards and seeds of the most frequent label's share."""
    shares = []
    for seed in range(5):
        for shard in dirichlet_shards(LABELS, 7, alpha, seed=seed):
            counts = torch.bincount(LABELS[shard], minlength=10)
            shares.append(counts.max().item() / counts.sum().item())
    return sum(shares) / len(shares)


def test_a_smaller_alpha_is_more_one_sided() -> None:
    low, middle, high = (share_of_largest_class(alpha) for alpha in (0.1, 0.5, 100.0))
    assert low > middle > high
    assert high < 0.2
    assert low > 0.4


def test_shards_of_a_least_size_are_drawn_again_until_they_fit() -> None:
    shards = dirichlet_shards(LABELS, 7, 0.1, seed=1, least=20)
    assert min(map(len, shards)) >= 20
    with pytest.warns(EmptyShardWarning):
        dirichlet_shards(LABELS[:8], 7, 0.1, seed=1, least=0)
    with pytest.raises(PreconditionError, match=r"draws at alpha=0\.05"):
        dirichlet_shards(LABELS, 7, 0.05, seed=1, least=80)


@pytest.mark.parametrize(("peers", "alpha", "least"), [(0, 1.0, 1), (7, 0.0, 1), (7, 1.0, 100)])
def test_impossible_demands_are_refused(peers: int, alpha: float, least: int) -> None:
    with pytest.raises(PreconditionError, match="do not fit"):
        dirichlet_shards(LABELS, peers, alpha, seed=0, least=least)


@pytest.mark.parametrize("shards", [[[0, 1], [1]], [[0], [2]], [[0]]])
def test_shards_that_lose_or_repeat_samples_are_refused(shards: list[list[int]]) -> None:
    with pytest.raises(PreconditionError, match="exactly once"):
        checked(shards, 2 if shards != [[0], [2]] else 3)
