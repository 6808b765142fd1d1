"""Cutting one data set into the peers' own shards, and saying when a shard is empty.

Shards are lists of sample indices; together they hold every sample exactly once.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from torchbft.primitives.errors import PreconditionError

MAX_DRAWS = 200
"""Attempts at shards of the least size: at alpha 0.1 and 7 peers a few are enough; a demand that
this many draws miss is not reasonable."""
ROUNDING = 1e-9
"""How far fractions may add up beside 1: what decimal notation loses."""


class EmptyShardWarning(UserWarning):
    """A peer holds no sample; its session refuses to start with "no data"."""


def fraction_shards(samples: int, fractions: Sequence[float], *, seed: int = 0) -> list[list[int]]:
    """Shards of the given fractions of ``samples`` indices in a seeded order.

    Sizes are rounded by largest remainder, so that they add up. Raises PreconditionError unless
    the fractions are finite, not negative and add up to 1; warns of empty shards.
    """
    if not all(math.isfinite(part) and part >= 0 for part in fractions):
        raise PreconditionError("fractions must be finite and not negative", where="partition")
    if abs(math.fsum(fractions) - 1) > ROUNDING:
        raise PreconditionError(
            f"fractions add up to {math.fsum(fractions):.6g}, not 1", where="partition"
        )
    exact = [part * samples for part in fractions]
    sizes = [math.floor(size) for size in exact]
    by_remainder = sorted(range(len(exact)), key=lambda i: (sizes[i] - exact[i], i))
    for index in by_remainder[: samples - sum(sizes)]:
        sizes[index] += 1
    order = np.random.default_rng(seed).permutation(samples).tolist()
    ends = np.cumsum(sizes).tolist()
    return checked([order[end - n : end] for end, n in zip(ends, sizes, strict=True)], samples)


def dirichlet_shards(
    labels: Tensor, peers: int, alpha: float, *, seed: int, least: int = 1
) -> list[list[int]]:
    """Shards whose class shares are drawn from a symmetric Dirichlet distribution.

    labels: int64, one a sample. alpha > 0: small is heterogeneous; 0.5 and 0.1 are the usual
    tests (Hsu, Qi and Brown 2019, section 3). Drawn again until every shard has ``least``
    samples; ``least=0`` takes the first draw and warns of empty shards.
    """
    if peers < 1 or not (math.isfinite(alpha) and alpha > 0) or least * peers > len(labels):
        raise PreconditionError(
            f"{len(labels)} samples do not fit {peers} peers of at least {least} at alpha={alpha}",
            where="partition",
        )
    generator = np.random.default_rng(seed)
    for _ in range(MAX_DRAWS):
        shards = _draw(labels.numpy(), peers, alpha, generator)
        if min(map(len, shards)) >= least:
            return checked(shards, len(labels))
    raise PreconditionError(
        f"{MAX_DRAWS} draws at alpha={alpha} left a shard under {least} samples",
        where="partition",
        hint="ask for fewer samples, fewer peers or a larger alpha",
    )


def _draw(
    labels: np.ndarray, peers: int, alpha: float, generator: np.random.Generator
) -> list[list[int]]:
    shards: list[list[int]] = [[] for _ in range(peers)]
    for label in np.unique(labels):
        members = generator.permutation(np.flatnonzero(labels == label))
        shares = generator.dirichlet(np.full(peers, alpha))
        ends = np.round(np.cumsum(shares)[:-1] * len(members)).astype(int)
        for shard, piece in zip(shards, np.split(members, ends), strict=True):
            shard.extend(piece.tolist())
    return [sorted(shard) for shard in shards]


def checked(shards: list[list[int]], samples: int) -> list[list[int]]:
    """The shards, if they hold each of ``samples`` indices once. Warns of empty ones."""
    if sorted(index for shard in shards for index in shard) != list(range(samples)):
        raise PreconditionError(
            f"shards of {[len(shard) for shard in shards]} do not hold each of {samples} samples"
            " exactly once",
            where="partition",
        )
    empty = [index for index, shard in enumerate(shards) if not shard]
    if empty:
        warnings.warn(
            f"shards {empty} of {len(shards)} hold no sample: those peers cannot take part",
            EmptyShardWarning,
            stacklevel=3,
        )
    return shards
