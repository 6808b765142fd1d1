"""Arithmetic whose result has one value, whatever the thread count, vector width or BLAS."""

from torchbft.tensors.exact.scaling import (
    BLOCK_COLUMNS,
    MAX_MAGNITUDE,
    all_finite,
    exponent,
    pow2,
    quantise,
)
from torchbft.tensors.exact.sums import (
    WORK_COLUMNS,
    Mixer,
    gram,
    gram_of_block_,
    matmul_in_order,
    row_norms,
    spans,
    sqrt,
    sum_in_order,
    weighted_sum,
)

__all__ = [
    "BLOCK_COLUMNS",
    "MAX_MAGNITUDE",
    "WORK_COLUMNS",
    "Mixer",
    "all_finite",
    "exponent",
    "gram",
    "gram_of_block_",
    "matmul_in_order",
    "pow2",
    "quantise",
    "row_norms",
    "spans",
    "sqrt",
    "sum_in_order",
    "weighted_sum",
]
