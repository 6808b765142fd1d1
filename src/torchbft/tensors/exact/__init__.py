"""Arithmetic whose result has one value, whatever the thread count, vector width or BLAS."""

from torchbft.tensors.exact.blocks import Blocks, RowSource, working_dtype
from torchbft.tensors.exact.mixing import Mixer, weighted_sum
from torchbft.tensors.exact.scaling import (
    BLOCK_COLUMNS,
    LARGEST_SINGLE,
    MAX_MAGNITUDE,
    Array,
    Float64s,
    all_finite,
    magnitude,
    quantise_,
)
from torchbft.tensors.exact.sums import (
    WORK_VALUES,
    add_gram_,
    block_columns,
    gram,
    matmul_in_order,
    row_norms,
    spans,
    sqrt,
    sum_in_order,
)
from torchbft.tensors.exact.workspace import workspace

__all__ = [
    "BLOCK_COLUMNS",
    "LARGEST_SINGLE",
    "MAX_MAGNITUDE",
    "WORK_VALUES",
    "Array",
    "Blocks",
    "Float64s",
    "Mixer",
    "RowSource",
    "add_gram_",
    "all_finite",
    "block_columns",
    "gram",
    "magnitude",
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
