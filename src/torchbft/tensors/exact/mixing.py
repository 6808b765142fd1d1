"""Weighted sums of rows with one value everywhere.

Shapes: N input rows, U of them used, M output rows, D columns, B columns of one block.
"""

from __future__ import annotations

from itertools import takewhile
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchbft.tensors.exact.blocks import Blocks
from torchbft.tensors.exact.scaling import Float64s, magnitude, rounder, to_grid_
from torchbft.tensors.exact.sums import WORK_VALUES, Array, spans
from torchbft.tensors.exact.workspace import workspace

_EXACT_BITS = 52
"""Integer sums up to 2^52 are exact in float64 with a bit to spare."""
_PRODUCT_FROM = 10
"""Additions per input row from which an exact product is cheaper: it passes over the rows about
ten times."""
_LEAST_WIDTH, _MOST_WIDTH = 1 << 11, 1 << 14
"""Columns of a block: narrower ones cost more in calls than they save in cache misses."""


class _Output(NamedTuple):
    """One output row: the sum of ``terms`` (slot, weight), of which the first ``shared`` are those
    of the output before it."""

    row: int
    shared: int
    terms: tuple[tuple[int, float], ...]


class Mixer:
    """Applies one mixing matrix (M x N) to many blocks of rows.

    Each product and each sum is rounded in float64, rows in order, so that outputs which begin with
    the same terms share them. When that takes many additions and each column of the (non-negative)
    matrix holds one value and zeros, as after nearest-neighbour mixing and clipping, the rows are
    scaled by that value, rounded to a grid per column of the block (N summands of at most
    2^(52 − ⌈log2 N⌉) steps) and added by an exact product with a 0/1 matrix. Which of the two is
    decided by the matrix alone. One last rounding gives the result. Rows of weight 0 take no part.
    """

    def __init__(self, mixing_MN: Float64s) -> None:
        m, n = mixing_MN.shape
        column_N, chosen_MN = mixing_MN.max(0), mixing_MN != 0
        self._used = np.flatnonzero(chosen_MN.any(0))
        self._whole = len(self._used) == n
        self._one_weight = np.array_equal(mixing_MN, chosen_MN * column_N)
        self._weight_U1 = torch.from_numpy(column_N[self._used, None])
        self._outputs = _outputs(mixing_MN[:, self._used].tolist())
        additions = sum(len(output.terms) - output.shared for output in self._outputs)
        self.by_product = self._one_weight and additions > _PRODUCT_FROM * n
        self._chosen_MU = torch.from_numpy(chosen_MN[:, self._used].astype(np.float64))
        self._bits = _EXACT_BITS - (n - 1).bit_length()
        longest = max(len(output.terms) for output in self._outputs)
        self._terms, self._sums = len(self._used) + 1, m if self.by_product else longest + 1
        width = WORK_VALUES // (self._terms + self._sums)
        self._width = min(max(width, _LEAST_WIDTH), _MOST_WIDTH)

    def __call__(self, block_NB: Array, out_MB: Array) -> None:
        """Write the mixture of finite rows to ``out_MB``; both float32 or float64."""
        rows_UB = block_NB if self._whole else block_NB[self._used]
        for span in spans(block_NB.shape[1], self._width):
            width = span.stop - span.start
            work = workspace("terms", self._terms, width)
            np.copyto(work[:-1], rows_UB[:, span])
            if self._one_weight:
                torch.from_numpy(work[:-1]).mul_(self._weight_U1)
            mix = self._multiply if self.by_product else self._add
            mix(work, workspace("sums", self._sums, width), out_MB[:, span])

    def _multiply(self, work: Float64s, mixed_MB: Float64s, out_MB: Array) -> None:
        terms_UB = work[:-1]
        rounded_UB = to_grid_(terms_UB, rounder(magnitude(terms_UB, 0), self._bits))
        torch.mm(self._chosen_MU, rounded_UB, out=torch.from_numpy(mixed_MB))
        np.copyto(out_MB, mixed_MB, casting="same_kind")

    def _add(self, work: Float64s, sums: Float64s, out_MB: Array) -> None:
        """``sums[k]`` holds the first k terms of the current output."""
        *terms_UB, product_B = work
        sums_B = list(sums)
        sums_B[0].fill(0.0)
        for row, shared, terms in self._outputs:
            for depth, (slot, weight) in enumerate(terms[shared:], start=shared):
                term_B = terms_UB[slot]
                if not self._one_weight:
                    term_B = np.multiply(term_B, weight, out=product_B)
                np.add(sums_B[depth], term_B, out=sums_B[depth + 1])
            np.copyto(out_MB[row], sums_B[len(terms)], casting="same_kind")


def _outputs(mixing_MU: list[list[float]]) -> list[_Output]:
    """Order the outputs so that those with the same beginning follow each other."""
    terms_M = [
        tuple((slot, weight) for slot, weight in enumerate(weights_U) if weight != 0.0)
        for weights_U in mixing_MU
    ]
    outputs: list[_Output] = []
    before: tuple[tuple[int, float], ...] = ()
    for row in sorted(range(len(terms_M)), key=terms_M.__getitem__):
        pairs = zip(terms_M[row], before, strict=False)
        shared = len(list(takewhile(lambda pair: pair[0] == pair[1], pairs)))
        outputs.append(_Output(row, shared, terms_M[row]))
        before = terms_M[row]
    return outputs


def weighted_sum(weights_MN: Float64s, rows_ND: Tensor) -> Tensor:
    """Return Σ_n w_mn·x_n, as ``Mixer`` forms it, on the CPU.

    float32 (M, D), or float64 when the rows are float64. Rows of weight 0 are not read.
    """
    blocks = Blocks(rows_ND)
    out_MD = np.empty((len(weights_MN), rows_ND.shape[1]), blocks.dtype)
    mixer = Mixer(weights_MN)
    for span in spans(rows_ND.shape[1], _MOST_WIDTH):
        mixer(blocks[span], out_MD[:, span])
    return torch.from_numpy(out_MD)
