"""Rules that judge each coordinate for itself: median and trimmed mean.

They need no distances, and no row is refused by its norm: an extreme value is trimmed where it is.

Shapes: N contributions, M mixed rows, D coordinates, B columns of one block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchbft.tensors.aggregation.mixture import mixture_of, shares
from torchbft.tensors.aggregation.network import Block, as_block, mean_of, order_statistics
from torchbft.tensors.aggregation.rule import AggregationInfo, Rule, Work
from torchbft.tensors.exact import (
    Blocks,
    Float64s,
    Mixer,
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
    """The mean of the ranks ``kept(n, f)`` of each coordinate, by a min/max network."""

    @abstractmethod
    def kept(self, n: int, f: int) -> tuple[int, int]:
        """Return the first kept rank of n, counted from 0, and the one after the last."""

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless 2f < n."""
        self.need(2 * f < n, "2f < n", n=n, f=f)

    def combine(self, block_NB: Block, f: int) -> Block:
        """Return the result for one block (N, B) in the working dtype."""
        return mean_of(self._kept_rows(block_NB, f))

    def _kept_rows(self, block_NB: Block, f: int) -> list[Block]:
        return order_statistics(block_NB, *self.kept(block_NB.shape[0], f))

    def run(self, work: Work) -> tuple[Tensor, AggregationInfo]:
        """See Rule."""
        rows_ND, n = work.rows_ND, work.rows_ND.shape[0]
        if not work.stages:
            result_D, counts_N = self._combine_all(work, None, work.f)
            norms_N = row_norms(rows_ND) if work.info else []
            return result_D, AggregationInfo(shares(counts_N), (), norms_N)
        mixture = mixture_of(work)
        mixing_MN = mixture.coefficients_MT[:, :n]
        result_D, counts_M = self._combine_all(work, mixing_MN, mixture.f)
        weights_N = matmul_in_order(counts_M[None, :], mixing_MN)[0]
        return result_D, AggregationInfo(shares(weights_N), mixture.refused, mixture.norms_N)

    def _combine_all(
        self, work: Work, mixing_MN: Float64s | None, f: int
    ) -> tuple[Tensor, Float64s]:
        """Return the result (D,), and in how many of the sampled coordinates each row was kept."""
        rows_ND, dtype = work.rows_ND, working_dtype(work.rows_ND.dtype)
        n, d = rows_ND.shape
        m = n if mixing_MN is None else len(mixing_MN)
        out_D = rows_ND.new_empty(d, dtype=dtype)
        counts_M = np.zeros(m)
        every = -(-d // SHARE_COLUMNS)
        mix = _mixer(mixing_MN, rows_ND, exact=work.exact)
        for span in spans(d, _block_width(m, d)):
            block_MB = mix(span)
            kept = self._kept_rows(block_MB, f)
            out_D[span] = torch.as_tensor(mean_of(kept))
            if work.info:
                low_B, high_B = kept[0][::every], kept[-1][::every]
                within_MB = (block_MB[:, ::every] >= low_B) & (block_MB[:, ::every] <= high_B)
                counts_M += [_count(within_B) for within_B in within_MB]
        return out_D, counts_M


def _block_width(m: int, d: int) -> int:
    """Columns of a block of m rows, such that the blocks of d columns are alike."""
    widest = min(max(_BLOCK_VALUES // m, _LEAST_WIDTH), _MOST_WIDTH)
    return -(-d // max(1, -(-d // widest))) or 1


def _count(within_B: Block) -> int:
    if isinstance(within_B, np.ndarray):
        return int(np.count_nonzero(within_B))
    return int(within_B.sum())


def _mixer(mixing_MN: Float64s | None, rows_ND: Tensor, *, exact: bool) -> Callable[[slice], Block]:
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


class Median(CoordinateRule):
    """Coordinate-wise median; for even n the mean of both middle values.

    Need 2f < n. Cost O(n log² n · d). Source: Yin et al. 2018, "Byzantine-robust distributed
    learning: towards optimal statistical rates", definition 1.
    """

    name = "median"

    def kept(self, n: int, f: int) -> tuple[int, int]:
        """The middle rank, or both."""
        return (n - 1) // 2, n // 2 + 1


class TrimmedMean(CoordinateRule):
    """Mean of each coordinate without its f smallest and f largest values.

    Need 2f < n. Cost O(n log² n · d). With f = 0 it is the mean.
    Source: Yin et al. 2018, definition 2, with the trimmed share β = f/n.
    """

    name = "trimmed_mean"

    def kept(self, n: int, f: int) -> tuple[int, int]:
        """All ranks but f at either end."""
        return f, n - f
