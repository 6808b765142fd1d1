"""One pass over the contributions: inner products of rows and reference vectors, centred.

Each block of columns is centred on the coordinate-wise *median* of the contributions. Distances do
not change, but near-equal rows keep all their digits (an uncentred Gram matrix of values near 1
with spread 3e-5 loses them in the expanded square), and unlike the mean no single row of 1e20 can
move the centre.

Shapes: N contributions, R references, T = N + R, D coordinates, B columns of one block.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from torchbft.tensors.aggregation.network import as_block, median_of
from torchbft.tensors.exact import (
    LARGEST_SINGLE,
    WORK_VALUES,
    Array,
    Blocks,
    Float64s,
    RowSource,
    add_gram_,
    block_columns,
    magnitude,
    spans,
    working_dtype,
    workspace,
)

NORM_BOUND = 100.0
"""Rows farther from the median than this many times the (n−f)-th smallest distance are refused.
Honest rows that differ this much have no common mean worth protecting, so the bound refuses faults
only; a lie below it is the rule's business. It never refuses more than f rows."""


PLAIN_COLUMNS = 1 << 14
"""Columns of a block without quantisation: a float32 row is 64 KiB."""
LEAST_SQUARE = 2.0**-60
"""Below it the squares of single values may be lost in float32, which ends at 2^-149."""
FAR_CENTRE = 64.0
"""A centre is far off when the (n−f)-th squared length about it is this many times the squared
diameter of as many rows. Up to there a squared distance in float32 keeps four digits, in relation
to that diameter."""


def centred_gram(
    rows_ND: RowSource, references: list[Tensor], f: int, *, exact: bool, precise: bool = False
) -> Float64s:
    """Return the Gram matrix (T, T) of rows, at most f of them a liar's, then references.

    rows_ND: finite floats. references: float vectors of D entries. exact: quantised operands, same
    bits everywhere. Otherwise plain products: of float32 about the middle of three rows, checked,
    and of float64 about the median where that centre turns out to be far off, a square overflows,
    or ``precise`` asks for it.
    """
    if not exact:
        if precise:
            return _product(rows_ND, references, _true_median, torch.float64)
        return _plain_gram(rows_ND, references, f)
    n, d = rows_ND.shape
    size = n + len(references)
    total_TT = np.zeros((size, size))
    blocks, sources = Blocks(rows_ND), [Blocks(vector_D[None]) for vector_D in references]
    width = block_columns(d)
    for span in spans(d, width * max(1, WORK_VALUES // (size * width))):
        block_NB = blocks[span]
        rows_TB = [*block_NB, *(source[span][0] for source in sources)]
        median_B = median_of(block_NB)
        single = all(row_B.dtype == np.float32 for row_B in rows_TB)
        points_TKB = _centred(rows_TB, median_B, width, np.float32 if single else np.float64)
        largest_TK = magnitude(points_TKB, -1)
        if single and largest_TK.max() >= LARGEST_SINGLE:
            points_TKB = _centred(rows_TB, median_B, width, np.float64)
            largest_TK = magnitude(points_TKB, -1)
        add_gram_(points_TKB, largest_TK, total_TT)
    return total_TT


def _centred(rows_TB: list[Array], median_B: Array, width: int, dtype: type) -> Array:
    """Return rows less median by blocks (T, K, width), the last one filled up with zeros."""
    filled = len(median_B)
    points_TKB = workspace("points", len(rows_TB), -(-filled // width), width, dtype=dtype)
    points_TB = points_TKB.reshape(len(rows_TB), -1)
    points_TB[:, filled:] = 0.0
    with np.errstate(over="ignore"):  # looked for by the caller
        for point_B, row_B in zip(points_TB, rows_TB, strict=True):
            np.subtract(row_B, median_B, out=point_B[:filled], dtype=dtype)
    return points_TKB


def _plain_gram(rows_ND: RowSource, references: list[Tensor], f: int) -> Float64s:
    """The same by ordinary products, on the rows' device."""
    if rows_ND.device.type == "cpu" and torch.get_float32_matmul_precision() == "highest":
        quick_TT = _product(rows_ND, references, _middle_of_three, working_dtype(rows_ND.dtype))
        if _trustworthy(quick_TT, rows_ND.shape[0], f):
            return quick_TT
    return _product(rows_ND, references, _true_median, torch.float64)


def _product(
    rows_ND: RowSource,
    references: list[Tensor],
    centre_of: Callable[[Tensor], Tensor],
    dtype: torch.dtype,
) -> Float64s:
    """Return the Gram matrix about a centre of each block: products in dtype, float64 sums."""
    n, d = rows_ND.shape
    size = n + len(references)
    total_TT = torch.zeros(size, size, dtype=torch.float64, device=rows_ND.device)
    points_TB = torch.empty(size, min(d, PLAIN_COLUMNS), dtype=dtype, device=rows_ND.device)
    for span in spans(d, PLAIN_COLUMNS):
        block_NB = rows_ND[:, span].to(working_dtype(rows_ND.dtype))
        centre_B, filled_TB = centre_of(block_NB).to(dtype), points_TB[:, : span.stop - span.start]
        torch.sub(block_NB, centre_B, out=filled_TB[:n])
        for point_B, vector_D in zip(filled_TB[n:], references, strict=True):
            torch.sub(vector_D[span], centre_B, out=point_B)
        total_TT += filled_TB @ filled_TB.t()
    product_TT: Float64s = total_TT.cpu().numpy()
    return product_TT


def _true_median(block_NB: Tensor) -> Tensor:
    return torch.as_tensor(median_of(as_block(block_NB)))


def _middle_of_three(block_NB: Tensor) -> Tensor:
    """A centre at a fifth of a median's cost; two liars among the three can move it."""
    first_B, middle_B, last_B = block_NB[0], block_NB[len(block_NB) // 2], block_NB[-1]
    low_B, high_B = torch.minimum(first_B, middle_B), torch.maximum(first_B, middle_B)
    return torch.maximum(low_B, torch.minimum(high_B, last_B))


def _trustworthy(gram_TT: Float64s, n: int, f: int) -> bool:
    """Whether float32 held the squares, and n − f rows lie about as far from the centre as from
    each other."""
    squares_N = gram_TT.diagonal()[:n]
    if not np.isfinite(gram_TT).all():
        return False
    distances_NN = squared_distances(gram_TT[:n, :n])
    honest = max(1, n - f)
    pairs = np.sort(distances_NN[np.triu_indices(n, 1)])[: max(1, honest * (honest - 1) // 2)]
    diameter = float(pairs[-1]) if len(pairs) else 0.0
    reach = kth_smallest(squares_N, honest)
    return LEAST_SQUARE < reach <= FAR_CENTRE * diameter


def squared_distances(gram_TT: Float64s) -> Float64s:
    """Return the squared distances between the points of a Gram matrix, >= 0.

    Symmetric to the last bit, which a mixed Gram matrix need not be: equal distances stay ties.
    """
    squares_T = gram_TT.diagonal()
    distances_TT = np.maximum(squares_T[:, None] + squares_T - (gram_TT + gram_TT.T), 0.0)
    np.fill_diagonal(distances_TT, 0.0)
    return distances_TT


def kth_smallest(values_N: Float64s, k: int) -> float:
    """Return the k-th smallest of finite values, k from 1."""
    return float(sorted(values_N.tolist())[k - 1])


def beyond_norm_bound(gram_NN: Float64s, n: int, f: int) -> tuple[int, ...]:
    """Return the rows (at most f) that lie too far from the coordinate-wise median."""
    squares_N = gram_NN.diagonal()[:n]
    bound = NORM_BOUND * NORM_BOUND * kth_smallest(squares_N, n - f)
    return tuple(row for row, square in enumerate(squares_N.tolist()) if square > bound)
