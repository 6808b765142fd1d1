"""Batches by position, orders of private shards, and digests of data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from torchbft.primitives.errors import ConfigError, MisuseError
from torchbft.pytorch.data import (
    Feed,
    dataset_digest,
    own_positions,
    part_of,
    permutation,
    private_seed,
    round_samples,
)
from torchbft.pytorch.solo import local_run


class Plain(Dataset[Any]):
    """Samples (i, 10·i) without tensors inside."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, 10.0 * index


class Fetching(Plain):
    def __getitems__(self, indices: list[int]) -> list[tuple[int, float]]:
        return [(index, -1.0) for index in indices]


def test_batches_are_collated_as_a_data_loader_would() -> None:
    batches = list(Feed(Plain(9), 4).batches([8, 0, 3, 1, 5]))
    assert [index.tolist() for index, _ in batches] == [[8, 0, 3, 1], [5]]
    assert batches[1][1].tolist() == [50.0]


def test_data_sets_that_fetch_many_at_once_are_asked_so() -> None:
    (batch,) = Feed(Fetching(4), 4).batches([2, 1])
    assert batch[1].tolist() == [-1.0, -1.0]


def test_tensors_are_indexed_together_unless_the_user_collates() -> None:
    pair = TensorDataset(torch.arange(6), torch.arange(6) * 2)
    (batch,) = Feed(pair, 4).batches([5, 0])
    assert isinstance(batch, tuple)
    assert batch[1].tolist() == [10, 0]
    (counted,) = Feed(pair, 4, len).batches([5, 0])
    assert counted == 2


@pytest.mark.parametrize("positions", [[0, 9], [-1]])
def test_a_position_beyond_the_data_set_is_refused(positions: list[int]) -> None:
    with pytest.raises(ConfigError, match="beyond the 9 of this train set"):
        list(Feed(Plain(9), 4).batches(positions))


def test_a_part_of_a_set_of_tensors_is_read_like_a_whole_one() -> None:
    whole = TensorDataset(torch.arange(10), torch.arange(10) * 2)
    part = Subset(whole, [7, 2, 5])
    (batch,) = Feed(part, 4).batches([2, 0])
    assert isinstance(batch, tuple)
    assert [column.tolist() for column in batch] == [[5, 7], [10, 14]]
    (nested,) = Feed(Subset(part, [1]), 4).batches([0])
    assert [column.tolist() for column in nested] == [[2], [4]]


def test_no_positions_give_no_batches() -> None:
    assert list(Feed(Plain(9), 4).batches([])) == []


def test_c01_an_empty_set_is_named_with_its_owner() -> None:
    with pytest.raises(ConfigError, match="no data: the train set of clinic-c has 0 samples"):
        Feed(Plain(0), 4, peer="clinic-c")


def test_own_positions_go_on_where_the_round_says() -> None:
    whole = [index for r in range(7) for index in own_positions(10, r, 6, b"seed")]
    assert all(sorted(whole[start : start + 10]) == list(range(10)) for start in range(0, 40, 10))
    assert own_positions(10, 5, 6, b"seed") == whole[30:36]
    assert own_positions(10, 0, 25, b"seed") == [*whole[:25]]
    assert own_positions(10, 0, 6, b"other") != whole[:6]


def test_permutations_differ_by_pass() -> None:
    assert permutation(50, b"s", 0) == permutation(50, b"s", 0)
    assert permutation(50, b"s", 0) != permutation(50, b"s", 1)
    assert sorted(permutation(50, b"s", 2)) == list(range(50))


def test_seeds_of_private_orders_are_each_peers_own() -> None:
    run = local_run(2)
    assert private_seed(run, "peer-00") != private_seed(run, "peer-01")
    assert private_seed(run, "peer-00") != private_seed(local_run(2, seed=1), "peer-00")


def test_a_contribution_is_made_of_h_times_accumulated_batches() -> None:
    run = local_run(1, training={"inner_steps": 5, "accumulate": 2, "batch_size": 3})
    assert round_samples(run) == 30


def test_ranks_share_each_batch() -> None:
    positions = list(range(16))
    parts = [part_of(positions, 8, rank, 2) for rank in range(2)]
    assert parts[0] == [0, 2, 4, 6, 8, 10, 12, 14]
    assert sorted([*parts[0][:4], *parts[1][:4]]) == positions[:8]
    assert part_of(positions, 8, 0, 1) == positions
    with pytest.raises(ConfigError, match="batches of 8 cannot be shared by 3 ranks"):
        part_of(positions, 8, 0, 3)


def test_equal_data_sets_have_equal_digests() -> None:
    one = TensorDataset(torch.arange(6), torch.ones(6))
    assert dataset_digest(one) == dataset_digest(TensorDataset(torch.arange(6), torch.ones(6)))
    assert len(dataset_digest(one)) == 64


def test_order_values_shape_and_dtype_change_the_digest() -> None:
    base = torch.arange(6)
    variants = [base, base.flip(0), base.view(2, 3), base.to(torch.int32), base.float(), base[:5]]
    assert len({dataset_digest(TensorDataset(variant)) for variant in variants}) == 6


def test_samples_of_many_kinds_have_digests() -> None:
    kinds = [1, 1.5, "a", b"a", True, {"x": 1}, [1, 2], np.float32(2.0), np.arange(3)]
    digests = {dataset_digest([kind]) for kind in kinds}
    assert len(digests) == len(kinds)
    assert dataset_digest(Plain(3)) != dataset_digest(Plain(4))


def test_a_sample_without_a_digest_is_named() -> None:
    with pytest.raises(MisuseError, match="a sample holds a object, which has no digest"):
        dataset_digest([object()])
