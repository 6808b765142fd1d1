"""Arithmetic whose result has one value, whatever the thread count, vector width or BLAS."""

from torchbft.tensors.exact.scaling import BLOCK_COLUMNS, MAX_MAGNITUDE, exponent, pow2, quantise
from torchbft.tensors.exact.sums import (
    gram,
    gram_of_block,
    matmul_in_order,
    mix_block,
    row_norms,
    sum_in_order,
    weighted_sum,
)

__all__ = [
    "BLOCK_COLUMNS",
    "MAX_MAGNITUDE",
    "exponent",
    "gram",
    "gram_of_block",
    "matmul_in_order",
    "mix_block",
    "pow2",
    "quantise",
    "row_norms",
    "sum_in_order",
    "weighted_sum",
]
