"""Batches from assigned positions or from a peer's own shard, and the digest of a data set."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Sized
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset, default_collate

from torchbft.primitives import wire
from torchbft.primitives.digests import blake3_digest, sha256
from torchbft.primitives.errors import ConfigError, MisuseError
from torchbft.primitives.runspec import RunSpec
from torchbft.tensors.state_root import tensor_view

Batch: TypeAlias = Any
"""What the collate function makes of a list of samples."""


class MapStyle(Sized, Protocol):
    """A data set with a length whose samples are read by index."""

    def __getitem__(self, index: int, /) -> Any: ...


class Feed:
    """Reads batches of a map-style data set by position. Raises ConfigError where there is none.

    ``collate``: as of a DataLoader. ``peer`` names the owner of the data in errors.
    """

    def __init__(
        self,
        train_set: MapStyle,
        batch_size: int,
        collate: Callable[[list[Any]], Batch] | None = None,
        *,
        peer: str = "",
    ) -> None:
        if not hasattr(train_set, "__getitem__") or not hasattr(train_set, "__len__"):
            raise MisuseError(
                f"{type(train_set).__name__} has no length or no samples by index",
                where="train_set",
                hint="use a map-style data set: positions are assigned by number",
            )
        if len(train_set) == 0:
            raise ConfigError(
                f"no data: the train set{f' of {peer}' if peer else ''} has 0 samples",
                where="train_set",
                hint="check the path or the shard; a peer without data has nothing to contribute",
            )
        self._set, self.samples = _flat(train_set), len(train_set)
        self.batch_size, self._collate = batch_size, collate

    def batches(self, positions: Sequence[int]) -> Iterator[Batch]:
        """Batches of ``batch_size`` in order; the last one may be smaller."""
        if positions and not 0 <= min(positions) <= max(positions) < self.samples:
            raise ConfigError(
                f"assigned a sample beyond the {self.samples} of this train set",
                where="train_set",
                hint="every peer must hold the data set that the run file names",
            )
        for start in range(0, len(positions), self.batch_size):
            yield self._batch(list(positions[start : start + self.batch_size]))

    def _batch(self, indices: list[int]) -> Batch:
        if isinstance(self._set, TensorDataset) and self._collate is None:
            rows = torch.tensor(indices)
            return tuple(tensor[rows] for tensor in self._set.tensors)
        together = getattr(self._set, "__getitems__", None)
        samples = together(indices) if together else [self._set[index] for index in indices]
        return (self._collate or default_collate)(samples)


def _flat(train_set: MapStyle) -> MapStyle:
    """A part of a set of tensors as tensors of its own, which are read a batch at a time."""
    if isinstance(train_set, Subset) and isinstance(train_set.dataset, TensorDataset):
        rows = torch.as_tensor(train_set.indices)
        return TensorDataset(*(tensor[rows] for tensor in train_set.dataset.tensors))
    return train_set


def own_positions(samples: int, round: int, count: int, seed: bytes) -> list[int]:
    """The indices of a private shard that a round uses: ``count`` of them, pass after pass.

    Each pass is a permutation of its own, seeded by ``seed`` and its number, so that every sample
    is used once a pass and a restarted peer goes on where the round number says.
    """
    positions: list[int] = []
    cursor = round * count
    while len(positions) < count:
        index, offset = divmod(cursor + len(positions), samples)
        order = permutation(samples, seed, index)
        positions += order[offset : offset + count - len(positions)]
    return positions


def private_seed(run: RunSpec, peer: str) -> bytes:
    """The seed of the order in which a peer reads its own shard."""
    return sha256("data/private", bytes.fromhex(run.seed), peer.encode())


def round_samples(run: RunSpec) -> int:
    """Samples of one contribution: H × accumulate × batch_size."""
    training = run.training
    return training.inner_steps * training.accumulate * training.batch_size


def part_of(positions: Sequence[int], batch: int, rank: int, ranks: int) -> Sequence[int]:
    """The positions of one of ``ranks`` processes that share each batch: every ranks-th of it."""
    if batch % ranks:
        raise ConfigError(
            f"batches of {batch} cannot be shared by {ranks} ranks",
            where="process_group",
            hint="a mean of unequal parts would weigh samples differently",
        )
    if ranks == 1:
        return positions
    return [index for place, index in enumerate(positions) if place % batch % ranks == rank]


def permutation(samples: int, seed: bytes, pass_index: int) -> list[int]:
    """One order of ``samples`` indices, from a seed and the number of the pass."""
    digest = sha256("data/order", seed, pass_index.to_bytes(8, "big"))
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    order: list[int] = torch.randperm(samples, generator=generator).tolist()
    return order


def dataset_digest(train_set: MapStyle) -> str:
    """Hex digest of all samples in order, as every peer of an assigned run must hold them.

    Reads the set once. Samples are tensors, numbers, strings, bytes, or tuples, lists and
    dictionaries of them; raises MisuseError for others.
    """
    if isinstance(train_set, TensorDataset):
        columns = [_sample_digest(tensor) for tensor in train_set.tensors]
        return blake3_digest("data/columns", *columns).hex()
    rows = [_sample_digest(train_set[index]) for index in range(len(train_set))]
    return blake3_digest("data/rows", *rows).hex()


def _sample_digest(value: object) -> bytes:
    if isinstance(value, Tensor):
        dtype = str(value.dtype).encode()
        shape = wire.encode(tuple(value.shape))
        return blake3_digest("data/tensor", dtype, shape, tensor_view(value.detach().cpu()))
    if isinstance(value, bool | int | float | str | bytes):
        return blake3_digest("data/value", wire.encode(value))
    if isinstance(value, dict):
        pairs = sorted(value.items())
        return blake3_digest(
            "data/nest", *(_sample_digest(part) for pair in pairs for part in pair)
        )
    if isinstance(value, tuple | list):
        return blake3_digest("data/nest", *map(_sample_digest, value))
    if hasattr(value, "__array__"):
        return _sample_digest(torch.as_tensor(value))
    raise MisuseError(
        f"a sample holds a {type(value).__name__}, which has no digest", where="train_set"
    )
