"""Arithmetic whose result has one value, whatever the thread count, vector width or BLAS."""

from torchbft.tensors.exact.blocks import Blocks, working_dtype
from torchbft.tensors.exact.mixing import Mixer, weighted_sum
from torchbft.tensors.exact.scaling import (
    BLOCK_COLUMNS,
    MAX_MAGNITUDE,
    Float64s,
    all_finite,
    quantise_,
)
from torchbft.tensors.exact.sums import (
    WORK_VALUES,
    Array,
    block_columns,
    gram,
    gram_of_blocks_,
    matmul_in_order,
    row_norms,
    spans,
    sqrt,
    sum_in_order,
)
from torchbft.tensors.exact.workspace import workspace

__all__ = [
    "BLOCK_COLUMNS",
    "MAX_MAGNITUDE",
    "WORK_VALUES",
    "Array",
    "Blocks",
    "Float64s",
    "Mixer",
    "all_finite",
    "block_columns",
    "gram",
    "gram_of_blocks_",
    "matmul_in_order",
    "quantise_",
    "row_norms",
    "spans",
    "sqrt",
    "sum_in_order",
    "weighted_sum",
    "working_dtype",
    "workspace",
]
