"""Sums with one value: exact on integers, or one rounding after another in a fixed order.

No mm, dot, sum, norm, addcmul or add(alpha=) touches an inexact value here: those change bits with
the thread count or the vector width. Elementwise add, mul and div are correctly rounded
(IEEE 754) in every kernel, torch's and NumPy's. torch.sqrt is not: on a CPU it may be MKL's, which
is off in the last bit for 0.7 % to 19 % of its inputs, and differently for different MKL_CBWR; use
``sqrt`` from here. Everything runs on the CPU, through NumPy where operands are small.

Shapes: N input rows, M output rows, D columns, B columns of one block, K a contracted axis or the
blocks of a span, T points of a Gram matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import overload

import numpy as np
import torch
from torch import Tensor

from torchbft.tensors.exact.blocks import RowSource
from torchbft.tensors.exact.scaling import BLOCK_COLUMNS, Array, Float64s, magnitude, quantise_
from torchbft.tensors.exact.workspace import workspace

WORK_VALUES = 1 << 17
"""Values of a work block: 1 MiB of float64, half of a core's second-level cache."""
_ALIGNED = 8
"""Float64 values of a vector register or cache line."""
_PRODUCT_VALUES = 1 << 16
"""Products that ``matmul_in_order`` holds at once: 512 KiB."""


def spans(columns: int, width: int) -> Iterator[slice]:
    """Yield the consecutive slices of at most ``width`` columns."""
    for start in range(0, columns, width):
        yield slice(start, min(start + width, columns))


def sum_in_order(x: Array, axis: int = -1) -> Array:
    """Sum over ``axis`` by elementwise additions, first index first. Same dtype as x, never -0."""
    parts = np.moveaxis(x, axis, 0)
    total = np.zeros(parts.shape[1:], x.dtype)
    for part in parts:
        total += part
    return total


@overload
def sqrt(x: Tensor) -> Tensor: ...


@overload
def sqrt(x: Array) -> Array: ...


def sqrt(x: Tensor | Array) -> Tensor | Array:
    """Return the correctly rounded square root of float32 or float64 values >= 0."""
    if not isinstance(x, Tensor):
        return np.asarray(np.sqrt(x))
    if x.device.type != "cpu":
        return x.sqrt()
    return torch.from_numpy(np.asarray(np.sqrt(x.detach().numpy())))


def matmul_in_order(left_MK: Float64s, right_KN: Float64s) -> Float64s:
    """Matrix product of small matrices: rounded products, added in the order of K."""
    out_MN = np.zeros((len(left_MK), right_KN.shape[1]))
    if right_KN.size:
        for span in spans(len(left_MK), max(1, _PRODUCT_VALUES // right_KN.size)):
            products_MKN = left_MK[span, :, None] * right_KN
            # accumulate, unlike sum, is defined as one addition after the other
            out_MN[span] += np.add.accumulate(products_MKN, axis=1)[:, -1]
    return out_MN


def block_columns(d: int) -> int:
    """Columns of a block, at most 4096, such that few blocks of one width cover d columns."""
    blocks = max(1, -(-d // BLOCK_COLUMNS))
    return max(1, -(-d // (blocks * _ALIGNED))) * _ALIGNED


def add_gram_(points_TKB: Array, largest_TK: Array, total_TT: Float64s) -> None:
    """Add the inner products of quantised rows to a total, one block of B <= 4096 after another.

    points_TKB, largest_TK: as ``quantise_`` takes them; the points are overwritten by what is
    multiplied. The product of a block is exact and rounded once as it is added. Columns of zeros
    add nothing.
    """
    size, _, width = points_TKB.shape
    for block_TB in quantise_(points_TKB, largest_TK).unbind(1):
        factor_TB = block_TB
        if block_TB.dtype != torch.float64:
            factor_TB = torch.from_numpy(workspace("factor", size, width)).copy_(block_TB)
        total_TT += (factor_TB @ factor_TB.t()).numpy()


def gram(rows_ND: Tensor) -> Float64s:
    """Return the float64 Gram matrix of finite float rows, |x| <= MAX_MAGNITUDE.

    It is the exact Gram matrix of rows quantised by blocks of 4096 columns (relative error about
    1e-8 on generic rows), blocks added in order.
    """
    n, d = rows_ND.shape
    total_NN = np.zeros((n, n))
    for span in spans(d, BLOCK_COLUMNS):
        points_NKB = _float64_copy(rows_ND[:, span])[:, None]
        add_gram_(points_NKB, magnitude(points_NKB, -1), total_NN)
    return total_NN


def row_norms(rows_ND: RowSource) -> list[float]:
    """Return the Euclidean norm of each row, from exact sums of squares of quantised values."""
    total_N = np.zeros(rows_ND.shape[0])
    for span in spans(rows_ND.shape[1], BLOCK_COLUMNS):
        block_NB = quantise_(_float64_copy(rows_ND[:, span]))
        total_N += block_NB.mul_(block_NB).sum(1).numpy()
    norms: list[float] = np.sqrt(total_N).tolist()
    return norms


def _float64_copy(block_NB: Tensor) -> Float64s:
    copied: Float64s = block_NB.to("cpu", torch.float64, copy=True).contiguous().numpy()
    return copied
