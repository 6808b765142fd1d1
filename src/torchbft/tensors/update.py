"""What one peer contributes in a round, how it is measured, and when it is refused.

Shape suffixes: D parameter values, B float buffer values, I integer buffer values.

Buffers travel as they are: BatchNorm's (running mean, running variance) rather than (mean, E[x²]).
The second moment is formed about the agreed mean when updates are pooled (``advance``), where it
cannot cancel, and a negative variance can be refused here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from torchbft.tensors.exact import all_finite
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.state import AgreedState

WRONG_SHAPE = "wrong shape"
WRONG_DTYPE = "wrong dtype"
NON_FINITE_PARAMETERS = "non-finite parameters"
NON_FINITE_BUFFERS = "non-finite buffers"
NEGATIVE_VARIANCE = "negative running variance"
INTEGER_RANGE = "integer buffer beyond the range of its dtype"


@dataclass(frozen=True, eq=False)
class Update:
    """A contribution: float32 D pseudo-gradient, float32 B buffers, int64 I integer buffers."""

    parameters_D: Tensor
    float_buffers_B: Tensor
    int_buffers_I: Tensor


def difference(start: AgreedState, model: nn.Module) -> Update:
    """The pseudo-gradient start − end of a model that trained from ``start``, and its buffers.

    The start is taken as the model saw it: parameters of a bf16 model were rounded when they were
    loaded, and that rounding is not training, so it is no part of the update (float32 master,
    Micikevicius et al. 2018, section 3.1). Source of the pseudo-gradient: DiLoCo, Douillard et al.
    2023, algorithm 1, line 11. Raises MisuseError when the model has another layout.
    """
    end = start.layout.flatten(model)
    seen_D = start.layout.rounded(start.parameters_D)
    return Update(seen_D - end.parameters_D, end.float_buffers_B, end.int_buffers_I)


def check(update: Update, layout: StateLayout) -> str | None:
    """Why this update is refused before any rule sees it, or None. Never raises."""
    reason = _form_fault(update, layout)
    if reason is not None:
        return reason
    if not all_finite(update.parameters_D):
        return NON_FINITE_PARAMETERS
    if not all_finite(update.float_buffers_B):
        return NON_FINITE_BUFFERS
    variance_V = layout.moments[1]
    if len(variance_V) and bool((update.float_buffers_B[variance_V] < 0).any()):
        return NEGATIVE_VARIANCE
    low_I, high_I = layout.integer_limits
    if len(low_I) and bool(
        ((update.int_buffers_I < low_I) | (update.int_buffers_I > high_I)).any()
    ):
        return INTEGER_RANGE
    return None


def _form_fault(update: Update, layout: StateLayout) -> str | None:
    expected = (
        (update.parameters_D, torch.float32, layout.parameter_count),
        (update.float_buffers_B, torch.float32, layout.float_buffer_count),
        (update.int_buffers_I, torch.int64, layout.int_buffer_count),
    )
    if any(tuple(values.shape) != (size,) for values, _, size in expected):
        return WRONG_SHAPE
    if any(values.dtype != dtype for values, dtype, _ in expected):
        return WRONG_DTYPE
    return None
