"""Error feedback in two phases: what a codec left behind joins the next update, once it is known
whether the block took this one (Karimireddy et al. 2019, EF-SGD; DESIGN §3).

Shape suffix: D parameter values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchbft.tensors.exact import all_finite, row_norms
from torchbft.tensors.layout import StateLayout


@dataclass(frozen=True, eq=False)
class Residual:
    """What earlier messages did not say (float32 D). Stays with the peer."""

    values_D: Tensor

    @staticmethod
    def zero(layout: StateLayout) -> Residual:
        return Residual(torch.zeros(layout.parameter_count))


@dataclass(frozen=True, eq=False)
class PendingResidual:
    """The residual while nobody knows yet whether the payload counts (float32 D each)."""

    before_D: Tensor
    update_D: Tensor
    sent_D: Tensor

    def settled(self, accepted: bool) -> Residual:
        """The residual for the next update, once the block is final.

        Accepted: residual + update − sent. Refused: residual + update, clipped to the larger norm
        of the two, so that refusals in a row never let a message grow. Values that are not finite
        (a diverged peer) are dropped whole: kept, they would spoil every later message.
        """
        total_D = self.before_D + self.update_D
        if accepted:
            kept_D = total_D - self.sent_D
        else:
            kept_D = _clipped(total_D, max(_norm(self.before_D), _norm(self.update_D)))
        if not all_finite(kept_D):
            return Residual(torch.zeros_like(kept_D))
        return Residual(kept_D)


def _norm(values_D: Tensor) -> float:
    if not all_finite(values_D):
        return float("nan")
    return row_norms(values_D[None])[0]


def _clipped(values_D: Tensor, limit: float) -> Tensor:
    norm = _norm(values_D)
    return values_D if norm <= limit else values_D * (limit / norm)
