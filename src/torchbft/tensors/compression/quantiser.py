"""Numbers to codes and back, by integer operations and single IEEE operations only.

Shape suffixes: R rows (blocks that share a scale), W values of a row.

Each quantiser maps float32 values (R, W) to integer codes (R, W) and, where it has scales, one
byte a row. Code 0 is the value +0. A quantiser is total: what it cannot represent (NaN, infinity)
becomes a code that ``values`` maps to NaN again, so that a receiver refuses it by name.
``values(*codes(x))`` is a fixed point of both, which is what makes a payload canonical.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_SIGN = -(1 << 31)
_EXPONENT = 0x7F800000
_NAN = 0x7FC0


@dataclass(frozen=True)
class Codes:
    """Integer codes (R, W), and one scale byte a row (uint8 R; empty without scales)."""

    codes_RW: Tensor
    scales_R: Tensor


class Quantiser(Protocol):
    """One representation of numbers."""

    @property
    def name(self) -> str: ...
    @property
    def ident(self) -> int: ...
    @property
    def code_dtype(self) -> torch.dtype: ...
    @property
    def row_width(self) -> int:
        """Values that share a scale in a dense section; 0 when there are no scales."""
        ...

    def codes(self, values_RW: Tensor) -> Codes: ...
    def values(self, codes: Codes) -> Tensor: ...
    def fault(self, codes: Codes) -> str | None:
        """Why no encoder writes these codes, or None."""
        ...


NO_SCALES = torch.zeros(0, dtype=torch.uint8)


class Float32:
    """The value's own 32 bits."""

    name, ident, code_dtype, row_width = "float32", 1, torch.int32, 0

    def codes(self, values_RW: Tensor) -> Codes:
        return Codes((values_RW + 0.0).view(torch.int32), NO_SCALES)  # −0 + 0 is +0

    def values(self, codes: Codes) -> Tensor:
        return codes.codes_RW.view(torch.float32)

    def fault(self, codes: Codes) -> str | None:
        negative_zero = bool((codes.codes_RW == -(2**31)).any())
        return "a negative zero" if negative_zero else None


_NEGATIVE_ZERO = -(2**15)
"""The 16 bits of bfloat16's −0 as an int16: zero has one code, so that an update has one form."""


class BFloat16:
    """The upper 16 bits, rounded to nearest, ties to even.

    By integer arithmetic, because processors with bf16 instructions flush subnormals in their own
    conversion and others do not.
    """

    name, ident, code_dtype, row_width = "bfloat16", 2, torch.int16, 0

    def codes(self, values_RW: Tensor) -> Codes:
        bits_RW = values_RW.contiguous().view(torch.int32)
        # Only NaN patterns can overflow here, and they are replaced.
        rounded_RW = (bits_RW + (0x7FFF + ((bits_RW >> 16) & 1))) >> 16
        codes_RW = torch.where(values_RW.isnan(), _NAN, rounded_RW).to(torch.int16)
        codes_RW[codes_RW == _NEGATIVE_ZERO] = 0  # a tiny negative value rounds to it
        return Codes(codes_RW, NO_SCALES)

    def values(self, codes: Codes) -> Tensor:
        return (codes.codes_RW.to(torch.int32) << 16).view(torch.float32)

    def fault(self, codes: Codes) -> str | None:
        negative_zero = bool((codes.codes_RW == _NEGATIVE_ZERO).any())
        return "a negative zero" if negative_zero else None


class Int8Blocks:
    """Symmetric int8 with one power-of-two scale a row: x ≈ q · 2^(s−126), |q| ≤ 127.

    s is the smallest byte for which no |q| exceeds 127, so the largest |q| of a row lies in
    64 … 127 unless s = 0. Bytes above 247 would overflow float32; 255 marks a row that held NaN,
    infinity or more than 2^128 − 2^120. Rounding is to nearest, ties to even.
    """

    name, ident, code_dtype, row_width = "int8", 3, torch.int8, 256

    LARGEST_SCALE = 247
    NON_FINITE = 255
    _BIAS = 126

    def codes(self, values_RW: Tensor) -> Codes:
        scales_R = self._scales(values_RW)
        usable_R = scales_R <= self.LARGEST_SCALE
        # The inverse scale 2^(126−s) is built from its bits: exact, and normal for every s ≤ 247.
        inverse_R = _power_of_two(self._BIAS - torch.where(usable_R, scales_R, 0))
        finite_RW = torch.where(usable_R[:, None], values_RW, 0.0)
        codes_RW = (finite_RW * inverse_R[:, None]).round().to(torch.int8)
        marked_R = torch.where(usable_R, scales_R, self.NON_FINITE)
        return Codes(codes_RW, marked_R.to(torch.uint8))

    def _scales(self, values_RW: Tensor) -> Tensor:
        magnitude_RW = values_RW.contiguous().view(torch.int32) & ~_SIGN
        largest_R = magnitude_RW.amax(dim=1)
        exponent_R = (largest_R >> 23) - 126
        # With x = m·2^e, 1/2 ≤ m < 1: seven bits of integer hold m unless it exceeds 127/128.
        above_R = (largest_R & 0x7FFFFF) > 0x7E0000
        scales_R = exponent_R - 7 + above_R.to(torch.int32) + self._BIAS
        return torch.where(largest_R >= _EXPONENT, self.NON_FINITE, scales_R.clamp(min=0))

    def values(self, codes: Codes) -> Tensor:
        scales_R = codes.scales_R.to(torch.int32)
        usable_R = scales_R <= self.LARGEST_SCALE
        scale_R = _power_of_two(torch.where(usable_R, scales_R, 0) - self._BIAS)
        scale_R = torch.where(usable_R, scale_R, torch.nan)
        return codes.codes_RW.to(torch.float32) * scale_R[:, None]

    def fault(self, codes: Codes) -> str | None:
        codes_RW, scales_R = codes.codes_RW.numpy(), codes.scales_R.numpy()
        least_R = codes_RW.min(axis=1, initial=0)
        if (least_R == -128).any():
            return "an int8 code of -128"
        largest_R = np.maximum(codes_RW.max(axis=1, initial=0), -least_R)
        if ((largest_R < 64) & (scales_R > 0) & (scales_R != 255)).any():
            return "an int8 scale larger than its block needs"
        return None


def _power_of_two(exponents: Tensor) -> Tensor:
    """2^e as float32 for −126 ≤ e ≤ 127, from its bits."""
    return ((exponents.to(torch.int32) + 127) << 23).view(torch.float32)


QUANTISERS: dict[str, Quantiser] = {q.name: q for q in (Float32(), BFloat16(), Int8Blocks())}
