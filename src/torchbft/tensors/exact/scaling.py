"""Grids of powers of two, and values that are whole multiples of a grid's step.

A sum of whole multiples whose partial sums stay below 2^53 steps is exact in float64, so every
order of summation, every vector width and every BLAS gives the same bits (Ozaki et al. 2012 use the
same fact). Steps are found and built by integer operations on the bits of a float64, because log
and exp differ between vector widths. Adding and subtracting 1.5·2^52 steps rounds to nearest, ties
to even (Dekker's and Knuth's way): two additions, correctly rounded everywhere.

Everything here is on the CPU. What is small is a NumPy array: a call costs a third of torch's.

Shapes: N rows, B columns of one block.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Float64s = NDArray[np.float64]

QUANTISED_BITS = 20
"""|q| <= 2^20, so that a product is at most 2^40."""
BLOCK_COLUMNS = 4096
"""2^12 products of at most 2^40 add up to at most 2^52, below 2^53 in any order."""
MAX_MAGNITUDE = 2.0**480
"""Largest |x| of an operand: squares over 2^40 columns stay below the float64 overflow at 2^1024.
Only float64 inputs can be larger."""
_MANTISSA_BITS = 52
_EXPONENT_BIAS = 1023
_LEAST_FIELD = _EXPONENT_BIAS - 400
"""Grids are as if the largest value were at least 2^-400: products of two steps then stay normal.
Smaller values (none exist in float32) round to zero."""


def all_finite(values: Tensor) -> bool:
    """Whether a tensor of any float dtype holds neither NaN nor infinity."""
    if values.device.type == "cpu" and values.dtype != torch.bfloat16:
        return bool(np.isfinite(values.detach().numpy()).all())  # torch's takes 30 times as long
    return bool(torch.isfinite(values).all())


def rounder(magnitude: Float64s, bits: int) -> Float64s:
    """Return 1.5·2^52 steps of the grid on which |x| <= magnitude is at most 2^bits steps.

    The step is the power of two 2^(e+1−bits) with 2^e <= magnitude < 2^(e+1).
    """
    exponent = np.maximum(magnitude.view(np.int64) >> _MANTISSA_BITS, _LEAST_FIELD)
    power: Float64s = ((exponent + (1 + _MANTISSA_BITS - bits)) << _MANTISSA_BITS).view(np.float64)
    return power * 1.5


def quantise_(blocks: Float64s) -> Tensor:
    """Round (..., B) in place, each row of B to a grid of its own of at most 2^20 steps.

    One grid per row, so that a row with a spike does not coarsen the others. Error of a value: at
    most 2^-20 of the largest in its row. Returns the same memory as a tensor.
    """
    return to_grid_(blocks, rounder(magnitude(blocks, -1), QUANTISED_BITS)[..., None])


def to_grid_(values: Float64s, rounders: Float64s) -> Tensor:
    """Round values in place, each to the grid of the rounder that it meets; return a tensor."""
    # torch's addition of one number to a row takes a third of NumPy's time
    rounded, broadcast = torch.from_numpy(values), torch.from_numpy(rounders)
    return rounded.add_(broadcast).sub_(broadcast)


def magnitude(block: Float64s, axis: int) -> Float64s:
    """Return the largest |x| along ``axis`` (a maximum has one value in any order), never -0."""
    largest: Float64s = np.maximum(block.max(axis), -block.min(axis))
    return np.abs(largest)
