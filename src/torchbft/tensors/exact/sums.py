"""Sums with one value: exact on integers, or one rounding after another in a fixed order.

No mm, dot, sum, norm, addcmul or add(alpha=) touches an inexact value here: those change bits with
the thread count or the vector width. Elementwise add, mul and div are correctly rounded
(IEEE 754) in every kernel. torch.sqrt is not: on a CPU it may be MKL's, which is off in the last
bit for 0.7 % to 19 % of its inputs, and differently for different MKL_CBWR; use ``sqrt`` from here.

Shapes: N input rows, M output rows, D columns, B columns of one block, K a contracted axis.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from torchbft.tensors.exact.scaling import (
    BLOCK_COLUMNS,
    fixed_point,
    magnitude,
    quantise,
    quantise_,
)

WORK_COLUMNS = 1 << 14
"""Columns of a work block: a float64 row is 128 KiB, so that a handful of rows stay in cache."""
_EXACT_BITS = 52
"""Integer sums up to 2^52 are exact in float64 with a bit to spare."""


def spans(columns: int, width: int) -> Iterator[slice]:
    """Yield the consecutive slices of at most ``width`` columns."""
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns))


def sum_in_order(x: Tensor, dim: int = -1) -> Tensor:
    """Sum over ``dim`` by elementwise additions, first index first. Same dtype as x, never -0."""
    shape = list(x.shape)
    del shape[dim]
    total = x.new_zeros(shape)
    for part in x.unbind(dim):
        total.add_(part)
    return total


def sqrt(x: Tensor) -> Tensor:
    """Return the correctly rounded square root of a float32 or float64 tensor, values >= 0."""
    if x.device.type != "cpu":
        return x.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(x.detach().numpy())))


def matmul_in_order(left_MK: Tensor, right_KN: Tensor) -> Tensor:
    """Matrix product of small float64 matrices: rounded products, added in the order of K."""
    out_MN = left_MK.new_zeros(left_MK.shape[0], right_KN.shape[1])
    for column_M, row_N in zip(left_MK.unbind(1), right_KN.unbind(0), strict=True):
        out_MN.add_(column_M[:, None] * row_N[None, :])
    return out_MN


def gram_of_block_(block_NB: Tensor) -> Tensor:
    """Return the exact float64 inner products of the quantised rows of a float64 block, B <= 4096.

    The block is overwritten by its quantised form.
    """
    scale_N = quantise_(block_NB)
    return (block_NB @ block_NB.t()).mul_(scale_N[:, None]).mul_(scale_N[None, :])


def gram(rows_ND: Tensor) -> Tensor:
    """Return the float64 Gram matrix of finite float rows, |x| <= MAX_MAGNITUDE.

    It is the exact Gram matrix of rows quantised by blocks of 4096 columns (relative error about
    1e-8 on generic rows), blocks added in order.
    """
    n, d = rows_ND.shape
    total_NN = rows_ND.new_zeros(n, n, dtype=torch.float64)
    for span in spans(d, BLOCK_COLUMNS):
        total_NN.add_(gram_of_block_(rows_ND[:, span].to(torch.float64, copy=True)))
    return total_NN


def row_norms(rows_ND: Tensor) -> Tensor:
    """Return the float64 Euclidean norm of each row, from exact sums of squares of integers."""
    total_N = rows_ND.new_zeros(rows_ND.shape[0], dtype=torch.float64)
    for span in spans(rows_ND.shape[1], BLOCK_COLUMNS):
        q_NB, scale_N = quantise(rows_ND[:, span])
        total_N.add_(q_NB.mul_(q_NB).sum(1).mul_(scale_N).mul_(scale_N))
    return sqrt(total_N)


def weighted_sum(weights_MN: Tensor, rows_ND: Tensor) -> Tensor:
    """Return Σ_n w_mn·x_n: float32 (M, D), or float64 when the rows are float64.

    Each product and each sum is rounded in float64, rows in order; one last rounding gives the
    result. Rows of weight 0 are not read.
    """
    dtype = torch.float64 if rows_ND.dtype == torch.float64 else torch.float32
    out_MD = rows_ND.new_empty(weights_MN.shape[0], rows_ND.shape[1], dtype=dtype)
    weights = weights_MN.tolist()
    for span in spans(rows_ND.shape[1], WORK_COLUMNS):
        for out_D, weights_N in zip(out_MD, weights, strict=True):
            out_D[span] = _weighted_block(weights_N, rows_ND[:, span])
    return out_MD


def _weighted_block(weights_N: list[float], block_NB: Tensor) -> Tensor:
    total_B = block_NB.new_zeros(block_NB.shape[1], dtype=torch.float64)
    term_B = torch.empty_like(total_B)
    for weight, row_B in zip(weights_N, block_NB, strict=True):
        if weight != 0.0:
            total_B.add_(term_B.copy_(row_B).mul_(weight))
    return total_B


class Mixer:
    """Applies one mixing matrix to many blocks: mixing_MN @ block_NB with one value everywhere.

    When each column of the (non-negative) mixing matrix holds one value and zeros, as after
    nearest-neighbour mixing and clipping, the rows are scaled by that value, rounded to
    fixed point per column of the block (N summands of 2^(52 − ⌈log2 N⌉) at most) and added by an
    exact product with a 0/1 matrix. Any other mixing matrix is applied row by row in order.
    """

    def __init__(self, mixing_MN: Tensor, width: int, device: torch.device) -> None:
        m, n = mixing_MN.shape
        column_N, chosen_MN = mixing_MN.amax(0), mixing_MN != 0
        dense = int(chosen_MN.sum()) > 2 * m
        self.by_product = dense and torch.equal(mixing_MN, chosen_MN * column_N)
        self._rows = mixing_MN.tolist()
        self._column_N1 = column_N[:, None].to(device)
        self._chosen_MN = chosen_MN.to(device, torch.float64)
        self._bits = _EXACT_BITS - (n - 1).bit_length()
        self._scaled_NB = torch.empty(n, width, dtype=torch.float64, device=device)
        self._mixed_MB = torch.empty(m, width, dtype=torch.float64, device=device)

    def __call__(self, block_NB: Tensor) -> Tensor:
        """Return the float64 mixture (M, B); it is overwritten by the next call."""
        width = block_NB.shape[1]
        mixed_MB = self._mixed_MB[:, :width]
        if not self.by_product:
            for mixed_B, weights_N in zip(mixed_MB, self._rows, strict=True):
                mixed_B.copy_(_weighted_block(weights_N, block_NB))
            return mixed_MB
        scaled_NB = self._scaled_NB[:, :width].copy_(block_NB).mul_(self._column_N1)
        up_B, down_B = fixed_point(magnitude(scaled_NB, 0), self._bits)
        scaled_NB.mul_(up_B).round_()
        return torch.mm(self._chosen_MN, scaled_NB, out=mixed_MB).mul_(down_B)
