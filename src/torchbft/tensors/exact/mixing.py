"""Weighted sums of rows with one value everywhere.

Shapes: N input rows, U of them used, M output rows, D columns, B columns of one block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from torchbft.tensors.exact.blocks import Blocks, RowSource
from torchbft.tensors.exact.scaling import Array, Float64s, magnitude, rounder, to_grid_
from torchbft.tensors.exact.sums import spans
from torchbft.tensors.exact.workspace import workspace

WORK_COLUMNS = 1 << 14
"""Columns of a block of ``weighted_sum``: a float64 row is 128 KiB."""
_EXACT_BITS = 52
"""Sums of whole numbers up to 2^52 are exact in float64 with a bit to spare."""
_DENSE = 4
"""Terms per input row from which the exact product is cheaper: it passes over the rows about four
times more."""


class Mixer:
    """Applies one mixing matrix (M x N) to blocks of rows.

    A matrix of many terms whose columns each hold one value and zeros, as after nearest-neighbour
    mixing and clipping, is applied as follows. The rows are scaled by their values, rounded to one
    grid for the block (at most 2^(52 − ⌈log2 N⌉) steps; an error of at most that fraction of the
    block's largest) and added by an exact product with a 0/1 matrix. Any other matrix is applied
    term by term, rows in order, each product and each sum rounded in float64. One last rounding
    gives the result. Rows of weight 0 take no part.
    """

    def __init__(self, mixing_MN: Float64s) -> None:
        chosen_MN, column_N = mixing_MN != 0, mixing_MN.max(0)
        self._rows = mixing_MN.tolist()
        dense = np.count_nonzero(chosen_MN) > _DENSE * mixing_MN.shape[1]
        self.by_product = bool(dense) and np.array_equal(mixing_MN, chosen_MN * column_N)
        used = np.flatnonzero(chosen_MN.any(0))
        self._used = slice(None) if len(used) == len(column_N) else used
        self._weight_U1 = torch.from_numpy(column_N[self._used, None])
        self._chosen_MU = torch.from_numpy(chosen_MN[:, self._used].astype(np.float64))
        self._bits = _EXACT_BITS - (len(column_N) - 1).bit_length()

    def __call__(self, block_NB: Array, out_MB: Array) -> None:
        """Write the mixture of finite rows to ``out_MB``; both float32 or float64."""
        if self.by_product:
            self._multiply(block_NB[self._used], out_MB)
            return
        for out_B, weights_N in zip(out_MB, self._rows, strict=True):
            np.copyto(out_B, _weighted(weights_N, block_NB), casting="same_kind")

    def _multiply(self, rows_UB: Array, out_MB: Array) -> None:
        terms_UB = workspace("terms", *rows_UB.shape)
        np.copyto(terms_UB, rows_UB)
        torch.from_numpy(terms_UB).mul_(self._weight_U1)
        largest = magnitude(terms_UB.reshape(1, -1), 1)
        rounded_UB = to_grid_(terms_UB, rounder(largest, self._bits))
        mixed_MB = workspace("sums", *out_MB.shape)
        torch.mm(self._chosen_MU, rounded_UB, out=torch.from_numpy(mixed_MB))
        np.copyto(out_MB, mixed_MB, casting="same_kind")


def _weighted(weights_N: list[float], block_NB: Array) -> Float64s:
    total_B: Float64s
    total_B, term_B = workspace("sums", 2, block_NB.shape[1])
    total_B.fill(0.0)
    scaled_B = torch.from_numpy(term_B)
    for weight, row_B in zip(weights_N, block_NB, strict=True):
        if weight != 0.0:
            np.copyto(term_B, row_B)
            scaled_B.mul_(weight)
            total_B += term_B
    return total_B


def weighted_sum(weights_N: Float64s, rows_ND: RowSource, out_D: Tensor | None = None) -> Tensor:
    """Return Σ_n w_n·x_n on the CPU: float32 (D,), or float64 when the rows are float64.

    Each product and each sum is rounded in float64, rows in order; one last rounding gives the
    result. Rows of weight 0 are not read. It is written to ``out_D`` if that is given.
    """
    blocks, weights = Blocks(rows_ND), weights_N.tolist()
    filled_D = np.empty(rows_ND.shape[1], blocks.dtype) if out_D is None else out_D.numpy()
    for span in spans(rows_ND.shape[1], WORK_COLUMNS):
        np.copyto(filled_D[span], _weighted(weights, blocks[span]), casting="same_kind")
    return torch.from_numpy(filled_D) if out_D is None else out_D
