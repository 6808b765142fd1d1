"""One pass over the contributions: inner products of rows and reference vectors, centred.

Each block of columns is centred on the coordinate-wise *median* of the contributions. Distances do
not change, but near-equal rows keep all their digits (an uncentred Gram matrix of values near 1
with spread 3e-5 loses them in the expanded square), and unlike the mean no single row of 1e20 can
move the centre.

Shapes: N contributions, R references, T = N + R, D coordinates, B columns of one block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchbft.tensors.aggregation.inputs import working_dtype
from torchbft.tensors.aggregation.network import median_of
from torchbft.tensors.exact import BLOCK_COLUMNS, WORK_COLUMNS, gram_of_block_, spans

NORM_BOUND = 100.0
"""Rows farther from the median than this many times the (n−f)-th smallest distance are refused.
Honest rows that differ this much have no common mean worth protecting, so the bound refuses faults
only; a lie below it is the rule's business. It never refuses more than f rows."""


def centred_gram(rows_ND: Tensor, references: list[Tensor], *, exact: bool) -> Tensor:
    """Return the float64 Gram matrix (T, T) of rows, then references, on the CPU.

    rows_ND: finite floats. references: float vectors of D entries. exact: quantised operands, same
    bits everywhere; otherwise a plain float64 product.
    """
    n, d = rows_ND.shape
    size = n + len(references)
    total_TT = rows_ND.new_zeros(size, size, dtype=torch.float64)
    work_NB = rows_ND.new_empty(n, min(d, WORK_COLUMNS), dtype=working_dtype(rows_ND.dtype))
    points_TB = rows_ND.new_empty(size, min(d, BLOCK_COLUMNS), dtype=torch.float64)
    for span in spans(d, WORK_COLUMNS):
        block_NB = rows_ND[:, span]
        median_B = median_of(work_NB[:, : block_NB.shape[1]].copy_(block_NB)).double()
        for part in spans(block_NB.shape[1], BLOCK_COLUMNS):
            points = points_TB[:, : part.stop - part.start]
            points[:n] = block_NB[:, part]
            for place, reference_D in enumerate(references, start=n):
                points[place] = reference_D[span][part]
            points.sub_(median_B[part])
            total_TT.add_(gram_of_block_(points) if exact else points @ points.t())
    return total_TT.cpu()


def squared_distances(gram_TT: Tensor) -> Tensor:
    """Return the float64 squared distances between the points of a Gram matrix, >= 0."""
    squares_T = gram_TT.diagonal()
    distances_TT = squares_T[:, None] + squares_T[None, :] - 2.0 * gram_TT
    return distances_TT.clamp_(min=0.0).fill_diagonal_(0.0)


def kth_smallest(values_N: Tensor, k: int) -> float:
    """Return the k-th smallest of finite values, k from 1."""
    return float(sorted(values_N.tolist())[k - 1])


def beyond_norm_bound(gram_NN: Tensor, n: int, f: int) -> tuple[int, ...]:
    """Return the rows (at most f) that lie too far from the coordinate-wise median."""
    squares_N = gram_NN.diagonal()[:n]
    bound = NORM_BOUND * NORM_BOUND * kth_smallest(squares_N, n - f)
    return tuple(row for row, square in enumerate(squares_N.tolist()) if square > bound)
