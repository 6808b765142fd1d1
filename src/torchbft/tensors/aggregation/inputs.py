"""What enters a rule: which dtypes, which shapes, and the refusal of anything that is not finite.

Shapes: N contributions, D coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torchbft.primitives.errors import MisuseError
from torchbft.tensors.exact import MAX_MAGNITUDE, working_dtype

SUPPORTED_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def check_updates(
    updates: Sequence[Tensor], d: int, dtype: torch.dtype | None = None
) -> list[str | None]:
    """Say for each update why it may not enter a rule, or None if it may.

    updates: one tensor per contribution; each must be of shape (d,), of a supported float dtype
    (of ``dtype`` when that is given), finite, and at most MAX_MAGNITUDE in absolute value.
    Judges each row for itself: one peer's row never decides about another's.
    """
    return [_refusal(update, d, dtype) for update in updates]


def _refusal(update: Tensor, d: int, dtype: torch.dtype | None) -> str | None:
    if update.dtype not in SUPPORTED_DTYPES or dtype not in (None, update.dtype):
        wanted = "a float dtype" if dtype is None else str(dtype)
        return f"wrong dtype: {update.dtype} instead of {wanted}"
    if tuple(update.shape) != (d,):
        return f"wrong shape: {tuple(update.shape)} instead of ({d},)"
    return _not_finite(update.detach())


def _not_finite(values: Tensor, first: int = 0) -> str | None:
    if values.numel() == 0:
        return None
    if values.device.type == "cpu":
        block = values.to(working_dtype(values.dtype)).numpy()
        least, most = float(block.min()), float(block.max())
    else:
        least, most = (float(bound) for bound in torch.aminmax(values))
    if not (math.isfinite(least) and math.isfinite(most)):
        place = int(torch.isfinite(values).logical_not().reshape(-1).to(torch.uint8).argmax())
        return f"non-finite value at coordinate {first + place}"
    if max(most, -least) > MAX_MAGNITUDE:
        return f"out of range: a magnitude above {MAX_MAGNITUDE:.3g}"
    return None


def as_rows(updates: Tensor) -> Tensor:
    """Return updates of shape (N, ...) as a detached (N, D) view or copy, or raise MisuseError."""
    if updates.dtype not in SUPPORTED_DTYPES:
        raise MisuseError(
            f"updates of dtype {updates.dtype} cannot be aggregated",
            where="aggregation",
            hint="convert them to float32 first",
        )
    if updates.dim() == 0 or updates.shape[0] == 0:
        raise MisuseError("updates need a first axis of contributions", where="aggregation")
    rows_ND = updates.detach().flatten(1) if updates.dim() > 1 else updates.detach()[:, None]
    refuse_non_finite(rows_ND)
    return rows_ND


def refuse_non_finite(rows_NB: Tensor, first: int = 0) -> None:
    """Raise MisuseError that names row and coordinate (counted from ``first``) of a bad value.

    A sum of float32 is finite if no value is NaN or infinite, unless it overflows: then, and for
    float64, whose magnitudes are bounded as well, the values are looked at one by one.
    """
    sums_N = rows_NB.sum(1, dtype=working_dtype(rows_NB.dtype))
    if rows_NB.dtype != torch.float64 and bool(torch.isfinite(sums_N).all()):
        return
    for row, values_B in enumerate(rows_NB if _not_finite(rows_NB, first) else ()):
        if (reason := _not_finite(values_B, first)) is not None:
            raise MisuseError(
                f"row {row}: {reason}",
                where="aggregation",
                hint="refuse such rows with check_updates before the rule runs",
            )
