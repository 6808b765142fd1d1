"""The outer optimizer: one step from the aggregated pseudo-gradient, the same bits on every CPU.

Shape suffix: D parameter values.

``torch.optim`` fuses multiply and add in ways that depend on the vector width; here every product
and every sum is an operation of its own, rounded once as IEEE 754 says.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from torchbft.primitives.errors import PreconditionError


class OuterOptimizer(Protocol):
    """What ``advance`` asks of an outer optimizer; all its memory is the momentum it is handed."""

    def step(
        self, parameters_D: Tensor, momentum_D: Tensor, pseudo_gradient_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        """New parameters and momentum (float32 D each); no argument is changed."""
        ...


@dataclass(frozen=True)
class OuterSGD:
    """SGD with momentum on the pseudo-gradient (DiLoCo, Douillard et al. 2023, algorithm 1).

    m ← μ·m + g;  θ ← θ − lr·m, or θ ← θ − lr·(g + μ·m) with Nesterov (Sutskever et al. 2013 as
    PyTorch writes it, without dampening). The momentum starts at zero. Raises PreconditionError
    unless lr > 0, 0 ≤ momentum < 1, and momentum > 0 where Nesterov is asked for.
    """

    lr: float
    momentum: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        if not (math.isfinite(self.lr) and self.lr > 0):
            raise PreconditionError(f"outer learning rate {self.lr} is not positive", where="outer")
        if not 0 <= self.momentum < 1:
            raise PreconditionError(f"outer momentum {self.momentum} not in [0, 1)", where="outer")
        if self.nesterov and self.momentum == 0:
            raise PreconditionError("Nesterov needs a momentum above 0", where="outer")

    def step(
        self, parameters_D: Tensor, momentum_D: Tensor, pseudo_gradient_D: Tensor
    ) -> tuple[Tensor, Tensor]:
        if self.momentum == 0:
            return parameters_D - pseudo_gradient_D * self.lr, momentum_D
        momentum_D = (momentum_D * self.momentum).add_(pseudo_gradient_D)
        direction_D = momentum_D
        if self.nesterov:
            direction_D = (momentum_D * self.momentum).add_(pseudo_gradient_D)
        return parameters_D - direction_D * self.lr, momentum_D


DILOCO = OuterSGD(lr=0.7, momentum=0.5, nesterov=True)
"""The default. DiLoCo's own momentum of 0.9 diverges over the few rounds of a small run."""
