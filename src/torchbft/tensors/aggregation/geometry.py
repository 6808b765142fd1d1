"""One pass over the contributions: inner products of rows and reference vectors, centred.

Each block of columns is centred on the coordinate-wise *median* of the contributions. Distances do
not change, but near-equal rows keep all their digits (an uncentred Gram matrix of values near 1
with spread 3e-5 loses them in the expanded square), and unlike the mean no single row of 1e20 can
move the centre.

Shapes: N contributions, R references, T = N + R, D coordinates, B columns of one block.
"""

from __future__ import annotations

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
"""Columns of a block without quantisation: a float64 row is 128 KiB."""


def centred_gram(rows_ND: RowSource, references: list[Tensor], *, exact: bool) -> Float64s:
    """Return the Gram matrix (T, T) of rows, then references.

    rows_ND: finite floats. references: float vectors of D entries. exact: quantised operands, same
    bits everywhere, rows on the CPU; otherwise a plain float64 product.
    """
    if not exact:
        return _plain_gram(rows_ND, references)
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


def _plain_gram(rows_ND: RowSource, references: list[Tensor]) -> Float64s:
    """The same by ordinary products, on the rows' device."""
    n, d = rows_ND.shape
    size = n + len(references)
    total_TT = torch.zeros(size, size, dtype=torch.float64, device=rows_ND.device)
    for span in spans(d, PLAIN_COLUMNS):
        block_NB = rows_ND[:, span].to(working_dtype(rows_ND.dtype))
        median_B = torch.as_tensor(median_of(as_block(block_NB)))
        points_TB = torch.stack([*block_NB, *(vector_D[span] for vector_D in references)]).double()
        points_TB -= median_B.double()
        total_TT += points_TB @ points_TB.t()
    plain_TT: Float64s = total_TT.cpu().numpy()
    return plain_TT


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
