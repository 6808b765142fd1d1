"""Grids of powers of two, and values that are whole multiples of a grid's step.

A sum of whole multiples whose partial sums stay below 2^53 steps is exact in float64, so every
order of summation, every vector width and every BLAS gives the same bits (Ozaki et al. 2012 use the
same fact). Steps are found and built by integer operations on the bits of a float, because log
and exp differ between vector widths. Adding and subtracting 1.5·2^52 steps (in float32 1.5·2^23)
rounds to nearest, ties to even: two additions, correctly rounded everywhere.

Everything here is on the CPU. What is small is a NumPy array: a call costs a third of torch's.

Shapes: N rows, B columns of one block.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Array = NDArray[Any]
Float64s = NDArray[np.float64]

QUANTISED_BITS = 20
"""|q| <= 2^20, so that a product is at most 2^40."""
BLOCK_COLUMNS = 4096
"""2^12 products of at most 2^40 add up to at most 2^52, below 2^53 in any order."""
MAX_MAGNITUDE = 2.0**480
"""Largest |x| of an operand: squares over 2^40 columns stay below the float64 overflow at 2^1024.
Only float64 inputs can be larger."""
LARGEST_SINGLE = 2.0**100
"""Float32 values from here on are quantised in float64: 1.5·2^23 steps must not overflow."""


class _Layout(NamedTuple):
    """Where the bits of a float dtype are."""

    integer: type[np.signedinteger[Any]]
    mantissa_bits: int
    least_field: int
    """Exponent field as if of the smallest magnitude."""


_LAYOUTS = {
    np.dtype(np.float32): _Layout(np.int32, 23, 1),
    # As if at least 2^-400: products of two steps then stay normal. No float32 is smaller.
    np.dtype(np.float64): _Layout(np.int64, 52, 1023 - 400),
}


def all_finite(values: Tensor) -> bool:
    """Whether a tensor of any float dtype holds neither NaN nor infinity."""
    if values.device.type == "cpu" and values.dtype != torch.bfloat16:
        return bool(np.isfinite(values.detach().numpy()).all())  # torch's takes 30 times as long
    return bool(torch.isfinite(values).all())


def rounder(magnitude: Array, bits: int) -> Array:
    """Return 1.5·2^m steps of the grid on which |x| <= magnitude is at most 2^bits steps.

    float32 (m = 23) or float64 (m = 52), as the magnitude is; bits < m and the result must not
    overflow. The step is the power of two 2^(e+1−bits) with 2^e <= magnitude < 2^(e+1).
    """
    layout = _LAYOUTS[magnitude.dtype]
    field = np.maximum(magnitude.view(layout.integer) >> layout.mantissa_bits, layout.least_field)
    power: Array = (field + (1 + layout.mantissa_bits - bits)) << layout.mantissa_bits
    rounders: Array = power.view(magnitude.dtype) * magnitude.dtype.type(1.5)
    return rounders


def to_grid_(values: Array, rounders: Array) -> Tensor:
    """Round values in place, each to the grid of the rounder that it meets.

    Returns the same memory as a tensor.
    """
    # torch's addition of one number to a row takes a third of NumPy's time
    rounded, broadcast = torch.from_numpy(values), torch.from_numpy(rounders)
    return rounded.add_(broadcast).sub_(broadcast)


def quantise_(blocks: Array, largest: Array | None = None) -> Tensor:
    """Round (..., B) in place, each row of B to a grid of its own of at most 2^20 steps.

    One grid per row, so that a row with a spike does not coarsen the others. Error of a value: at
    most 2^-20 of the largest in its row. float32 below LARGEST_SINGLE, or float64.
    ``largest``: the magnitudes (...), if they are at hand.
    """
    largest = magnitude(blocks, -1) if largest is None else largest
    return to_grid_(blocks, rounder(largest, QUANTISED_BITS)[..., None])


def magnitude(block: Array, axis: int) -> Array:
    """Return the largest |x| along ``axis`` (a maximum has one value in any order), never -0."""
    largest: Array = np.maximum(block.max(axis), -block.min(axis))
    return np.abs(largest)
