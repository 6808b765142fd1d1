"""Power-of-two scales and integer-valued operands.

A sum of integers whose partial sums stay below 2^53 is exact in float64, so every order of
summation, every vector width and every BLAS gives the same bits (Ozaki et al. 2012 use the same
fact). Scales are powers of two, found and built by integer operations on the bits of a float64,
because log and exp differ between vector widths.

Shapes: N rows, B columns of one block.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

QUANTISED_BITS = 20
"""|q| <= 2^20, so that a product is at most 2^40."""
BLOCK_COLUMNS = 4096
"""2^12 products of at most 2^40 add up to at most 2^52, below 2^53 in any order."""
MAX_MAGNITUDE = 2.0**480
"""Largest |x| of an operand: squares over 2^40 columns stay below the float64 overflow at 2^1024.
Only float64 inputs can be larger."""
_LEAST_EXPONENT = -400
"""Values are scaled as if the largest were at least 2^-400: products of two scales then stay
normal. Smaller values (none exist in float32) round to zero."""

_MANTISSA_BITS = 52
_EXPONENT_BIAS = 1023
_EXPONENT_MASK = 0x7FF


def all_finite(values: Tensor) -> bool:
    """Whether a tensor of any float dtype holds neither NaN nor infinity."""
    if values.device.type == "cpu" and values.dtype != torch.bfloat16:
        return bool(np.isfinite(values.detach().numpy()).all())  # torch's takes 30 times as long
    return bool(torch.isfinite(values).all())


def exponent(x: Tensor) -> Tensor:
    """Return e with 2^e <= x < 2^(e+1) as int64, for non-negative float64 x (-1023 for zero)."""
    return ((x.view(torch.int64) >> _MANTISSA_BITS) & _EXPONENT_MASK) - _EXPONENT_BIAS


def pow2(exponents: Tensor) -> Tensor:
    """Return 2^e in float64 for int64 exponents in [-1022, 1023]."""
    return ((exponents + _EXPONENT_BIAS) << _MANTISSA_BITS).view(torch.float64)


def fixed_point(magnitude: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return (up, down): powers of two with x·up an integer-valued |q| <= 2^bits once rounded.

    magnitude: float64, the largest |x| that shares the scale. down = 1/up exactly.
    """
    top = exponent(magnitude).clamp_(min=_LEAST_EXPONENT) + 1
    return pow2(bits - top), pow2(top - bits)


def quantise(block_NB: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of a block to integers: block ≈ q · scale[:, None].

    block_NB: finite floats, B <= 4096. Returns q_NB (float64, integer-valued, |q| <= 2^20) and
    scale_N (float64 powers of two). One scale per row, so that a row with a spike does not coarsen
    the others. Error of an element: at most 2^-20 of the largest in its row of the block.
    """
    q_NB = block_NB.to(torch.float64, copy=True)
    return q_NB, quantise_(q_NB)


def quantise_(block_NB: Tensor) -> Tensor:
    """Do what ``quantise`` does in place, on a float64 block; return scale_N."""
    up_N, down_N = fixed_point(magnitude(block_NB, 1), QUANTISED_BITS)
    block_NB.mul_(up_N[:, None]).round_()
    return down_N


def magnitude(block_NB: Tensor, dim: int) -> Tensor:
    """Return the largest |x| along ``dim`` (a maximum has one value in any order), never -0."""
    return torch.maximum(block_NB.amax(dim), block_NB.amin(dim).neg_()).abs_()
