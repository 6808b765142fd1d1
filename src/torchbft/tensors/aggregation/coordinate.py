"""Rules that judge each coordinate for itself: median and trimmed mean.

They need no distances, and no row is refused by its norm: an extreme value is trimmed where it is.

Shapes: N contributions, M mixed rows, D coordinates, B columns of one block.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from torchbft.tensors.aggregation.inputs import working_dtype
from torchbft.tensors.aggregation.mixture import mixture_of, shares
from torchbft.tensors.aggregation.network import mean_of, order_statistics
from torchbft.tensors.aggregation.rule import AggregationInfo, Rule, Work
from torchbft.tensors.exact import Mixer, matmul_in_order, row_norms, spans

_BLOCK_VALUES = 1 << 18
"""Values of a block of rows: 1 MiB of float32, about half of a core's second-level cache."""
_LEAST_WIDTH, _MOST_WIDTH = 1 << 12, 1 << 16
"""Narrower blocks cost more in calls than they save in cache misses; wider ones gain nothing."""


class CoordinateRule(Rule):
    """The mean of the ranks ``kept(n, f)`` of each coordinate, by a min/max network."""

    @abstractmethod
    def kept(self, n: int, f: int) -> tuple[int, int]:
        """Return the first kept rank of n, counted from 0, and the one after the last."""

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless 2f < n."""
        self.need(2 * f < n, "2f < n", n=n, f=f)

    def combine(self, block_NB: Tensor, f: int) -> Tensor:
        """Return the result for one block (N, B), which is overwritten."""
        return mean_of(self._kept_rows(block_NB, f))

    def _kept_rows(self, block_NB: Tensor, f: int) -> list[Tensor]:
        return order_statistics(block_NB, *self.kept(block_NB.shape[0], f))

    def run(self, work: Work) -> tuple[Tensor, AggregationInfo]:
        """See Rule."""
        rows_ND, n = work.rows_ND, work.rows_ND.shape[0]
        if not work.stages:
            result_D, counts_N = self._combine_all(work, None, work.f)
            norms_N = row_norms(rows_ND).tolist() if work.info else []
            return result_D, AggregationInfo(shares(counts_N), (), norms_N)
        mixture = mixture_of(work)
        mixing_MN = mixture.coefficients_MT[:, :n]
        result_D, counts_M = self._combine_all(work, mixing_MN, mixture.f)
        weights_N = matmul_in_order(counts_M[None, :], mixing_MN)[0]
        return result_D, AggregationInfo(shares(weights_N), mixture.refused, mixture.norms_N)

    def _combine_all(self, work: Work, mixing_MN: Tensor | None, f: int) -> tuple[Tensor, Tensor]:
        """Return the result (D,) and in how many coordinates each (mixed) row was kept."""
        rows_ND, dtype = work.rows_ND, working_dtype(work.rows_ND.dtype)
        n, d = rows_ND.shape
        m = n if mixing_MN is None else len(mixing_MN)
        width = min(d, max(_BLOCK_VALUES // n, _LEAST_WIDTH), _MOST_WIDTH)
        out_D = rows_ND.new_empty(d, dtype=dtype)
        counts_M = rows_ND.new_zeros(m, dtype=torch.int64)
        work_MB = rows_ND.new_empty(m, width, dtype=dtype)
        mix = _mixer(mixing_MN, work_MB, exact=work.exact)
        for span in spans(d, max(width, 1)):
            block_MB = work_MB[:, : span.stop - span.start].copy_(mix(rows_ND[:, span]))
            before_MB = block_MB.clone() if work.info else block_MB
            kept = self._kept_rows(block_MB, f)
            out_D[span] = mean_of(kept)
            if work.info:
                counts_M += ((before_MB >= kept[0]) & (before_MB <= kept[-1])).sum(1)
        return out_D, counts_M.to("cpu", torch.float64)


def _mixer(mixing_MN: Tensor | None, work_MB: Tensor, *, exact: bool) -> Callable[[Tensor], Tensor]:
    """Return what turns a block of rows into a block of mixed rows."""
    if mixing_MN is None:
        return lambda block_NB: block_NB
    if exact:
        return Mixer(mixing_MN, work_MB.shape[1], work_MB.device)
    weights_MN = mixing_MN.to(work_MB)
    return lambda block_NB: weights_MN @ block_NB.to(work_MB.dtype)


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
