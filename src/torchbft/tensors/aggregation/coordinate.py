"""Rules that judge each coordinate for itself: ranks, nearness to the median, signs.

They need no distances, and no row is refused by its norm: an extreme value is trimmed where it is.

Shapes: N contributions, M mixed rows, D coordinates, B columns of one block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from functools import reduce
from operator import add

import numpy as np
import torch

from torchbft.tensors.aggregation.geometry import PLAIN_COLUMNS
from torchbft.tensors.aggregation.mixture import mixture_of, shares
from torchbft.tensors.aggregation.network import (
    Block,
    as_block,
    functions_of,
    mean_of,
    order_statistics,
)
from torchbft.tensors.aggregation.rule import (
    AggregationInfo,
    Case,
    Plan,
    PreAggregation,
    Rule,
    Work,
)
from torchbft.tensors.exact import (
    Blocks,
    Float64s,
    Mixer,
    RowSource,
    all_finite,
    matmul_in_order,
    row_norms,
    spans,
    working_dtype,
    workspace,
)

_BLOCK_VALUES = 1 << 17
"""Values of a block of rows: 512 KiB of float32; with the network's workspace, half of a core's
second-level cache."""
_LEAST_WIDTH, _MOST_WIDTH = 1 << 12, 1 << 16
"""Narrower blocks cost more in calls than they save in cache misses; wider ones gain nothing."""
SHARE_COLUMNS = 1 << 13
"""Coordinates looked at for the shares of a report, evenly spaced; a share is then known to 1 %."""


class CoordinateRule(Rule):
    """A rule that treats each coordinate alike and knows nothing of the others."""

    @abstractmethod
    def combine(self, block_NB: Block, f: int, *, exact: bool) -> tuple[Block, list[Block]]:
        """Return the result (B) for one block in the working dtype, and the values behind it.

        The values are rows (B): a contribution counts at a coordinate where it lies between the
        least and the greatest of them. They are valid until the next call. exact: with one result
        on every machine; otherwise a sum may be rounded to, and overflow, the block's dtype.
        """

    def reads_gram(self, stages: tuple[PreAggregation, ...]) -> bool:
        """Only stages look at more than one coordinate."""
        return bool(stages)

    def plan(self, gram_TT: Float64s | None, case: Case) -> Plan:
        """See Rule."""
        if gram_TT is None:
            return Plan(None, case.f)
        mixture = mixture_of(gram_TT, case)
        return Plan(mixture.coefficients_MT, mixture.f, mixture.refused, mixture.norms_N)

    def carry_out(self, work: Work, plan: Plan) -> AggregationInfo:
        """See Rule."""
        n, mixing_MN = work.rows_ND.shape[0], plan.mixing_MT
        if mixing_MN is not None:
            mixing_MN = mixing_MN[:, :n]
        counts_M = self._combine_all(work, mixing_MN, plan.f, exact=work.exact)
        if not (work.exact or all_finite(work.out_D)):  # a sum of float32 overflowed
            counts_M = self._combine_all(work, mixing_MN, plan.f, exact=True)
        if mixing_MN is not None:
            counts_M = matmul_in_order(counts_M[None, :], mixing_MN)[0]
        norms_N = plan.norms_N or (row_norms(work.rows_ND) if work.info else [])
        return AggregationInfo(shares(counts_M), plan.refused, norms_N)

    def _combine_all(
        self, work: Work, mixing_MN: Float64s | None, f: int, *, exact: bool
    ) -> Float64s:
        """Write the result; return in how many of the sampled coordinates each row was kept."""
        n, d = work.rows_ND.shape
        m = n if mixing_MN is None else len(mixing_MN)
        counts_M, every = np.zeros(m), -(-d // SHARE_COLUMNS)
        mix = _mixer(mixing_MN, work.rows_ND, exact=work.exact)
        for span in spans(d, _block_width(m, d) if work.exact else PLAIN_COLUMNS):
            block_MB = mix(span)
            result_B, kept = self.combine(block_MB, f, exact=exact)
            work.out_D[span] = torch.as_tensor(result_B)
            if work.info:
                counts_M += _kept_within(block_MB[:, ::every], [row[::every] for row in kept])
        return counts_M


def _block_width(m: int, d: int) -> int:
    """Columns of a block of m rows, such that the blocks of d columns are alike."""
    widest = min(max(_BLOCK_VALUES // m, _LEAST_WIDTH), _MOST_WIDTH)
    return -(-d // max(1, -(-d // widest))) or 1


def _kept_within(block_MS: Block, kept: list[Block]) -> list[int]:
    """Return for each row at how many coordinates it lies in the range of the kept values."""
    namespace = functions_of(block_MS)
    low_S, high_S = reduce(namespace.minimum, kept), reduce(namespace.maximum, kept)
    return [int(((row_S >= low_S) & (row_S <= high_S)).sum()) for row_S in block_MS]


def _mixer(
    mixing_MN: Float64s | None, rows_ND: RowSource, *, exact: bool
) -> Callable[[slice], Block]:
    """Return what gives a block of (mixed) rows, valid until the next one."""
    if not exact:
        dtype = working_dtype(rows_ND.dtype)
        if mixing_MN is None:
            return lambda span: as_block(rows_ND[:, span].to(dtype))
        weights_MN = torch.from_numpy(mixing_MN).to(rows_ND.device, dtype)
        return lambda span: as_block(weights_MN @ rows_ND[:, span].to(dtype))
    blocks = Blocks(rows_ND)
    if mixing_MN is None:
        return blocks.__getitem__
    mixer, m = Mixer(mixing_MN), len(mixing_MN)

    def mix(span: slice) -> Block:
        mixed_MB = workspace("mixed", m, span.stop - span.start, dtype=blocks.dtype)
        mixer(blocks[span], mixed_MB)
        return mixed_MB

    return mix


class RankRule(CoordinateRule):
    """The mean of the ranks ``kept(n, f)`` of each coordinate, by a min/max network."""

    @abstractmethod
    def kept(self, n: int, f: int) -> tuple[int, int]:
        """Return the first kept rank of n, counted from 0, and the one after the last."""

    def combine(self, block_NB: Block, f: int, *, exact: bool) -> tuple[Block, list[Block]]:
        """See CoordinateRule."""
        rows = order_statistics(block_NB, *self.kept(block_NB.shape[0], f))
        return mean_of(rows, exact=exact), rows


class Median(RankRule):
    """Coordinate-wise median; for even n the mean of both middle values.

    Need 2f < n. Cost O(n log² n · d). Proven: κ = 4(1 + f/(n − 2f))².
    Source: Yin et al. 2018, "Byzantine-robust distributed learning: towards optimal statistical
    rates", definition 1.
    """

    name = "median"

    def kappa(self, n: int, f: int) -> float:
        """4(1 + f/(n − 2f))²: Allouah et al. 2023, proposition 5."""
        return 4 * (1 + f / (n - 2 * f)) ** 2

    def kept(self, n: int, f: int) -> tuple[int, int]:
        """The middle rank, or both."""
        return (n - 1) // 2, n // 2 + 1


class TrimmedMean(RankRule):
    """Mean of each coordinate without its f smallest and f largest values.

    Need 2f < n. Cost O(n log² n · d). With f = 0 it is the mean.
    Proven: κ = 6f/(n − 2f)·(1 + f/(n − 2f)).
    Source: Yin et al. 2018, definition 2, with the trimmed share β = f/n.
    """

    name = "trimmed_mean"

    def kappa(self, n: int, f: int) -> float:
        """6f/(n − 2f)·(1 + f/(n − 2f)): Allouah et al. 2023, proposition 2."""
        return 6 * f / (n - 2 * f) * (1 + f / (n - 2 * f))

    def kept(self, n: int, f: int) -> tuple[int, int]:
        """All ranks but f at either end."""
        return f, n - f


class ClosestToMedian(CoordinateRule):
    """The mean of the ``count(n, f)`` values that lie nearest to the median of their coordinate.

    They are neighbours in the sorted column, so rank k (of those above the count) is exchanged for
    rank k + count where that one is nearer. Of two values equally near the smaller one is taken.
    """

    @abstractmethod
    def count(self, m: int, f: int) -> int:
        """How many of m values are kept."""

    def combine(self, block_NB: Block, f: int, *, exact: bool) -> tuple[Block, list[Block]]:
        """See CoordinateRule."""
        m = block_NB.shape[0]
        count = self.count(m, f)
        rows = order_statistics(block_NB, 0, m)
        middle, where = rows[(m - 1) // 2 : m // 2 + 1], functions_of(block_NB).where
        with np.errstate(over="ignore"):  # a distance that overflows is the greater one
            for low in range(m - count):
                below_B, above_B = rows[low], rows[low + count]
                # not by the median itself, which is rounded where m is even
                up_B = reduce(add, [above_B - middle_B for middle_B in middle])
                down_B = reduce(add, [middle_B - below_B for middle_B in middle])
                rows[low] = where(up_B < down_B, above_B, below_B)
        return mean_of(rows[:count], exact=exact), rows[:count]


class MeaMed(ClosestToMedian):
    """Mean around the median: each coordinate's mean of the n − f values nearest to its median.

    Of two values equally near the smaller one is taken. Need 2f < n. Cost O(n log² n · d).
    No published κ. Source: Xie, Koyejo and Gupta 2018, "Generalized Byzantine-tolerant SGD",
    definition 4.
    """

    name = "meamed"

    def count(self, m: int, f: int) -> int:
        """n − f."""
        return m - f


class SignMajority(CoordinateRule):
    """sign(Σ sign(x_i)) of each coordinate: −1, 0 or 1, whatever the length of the rows.

    Zero where the votes are even. A row counts where its sign is the result's. Need 2f < n.
    Cost O(nd). No κ: the result is a direction, not an estimate of the mean.
    Source: Bernstein et al. 2019, "signSGD with majority vote is communication efficient and fault
    tolerant", algorithm 1.
    """

    name = "sign_majority"

    def combine(self, block_NB: Block, f: int, *, exact: bool) -> tuple[Block, list[Block]]:
        """See CoordinateRule."""
        namespace = functions_of(block_NB)
        votes_B = reduce(lambda total, row: total + namespace.sign(row), block_NB, block_NB[0] * 0)
        result_B = namespace.sign(votes_B) + 0
        limits = np.finfo(f"f{block_NB.dtype.itemsize}")
        return result_B, [result_B * float(limits.tiny), result_B * float(limits.max)]
