"""Attacks without a direction: noise, and values that are no numbers.

Shapes: D parameters, K poisoned coordinates.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
from torch import Tensor

from torchbft.attacks.declaration import Expectation, Knowledge, Leaves
from torchbft.attacks.vectors.view import VectorAttack, VectorView


class Gaussian(VectorAttack):
    """s · rms(u) · N(0, I), u the liar's own honest update.

    Strength s, default 30, in units of the root mean square of u, so that it means the same for
    every model (the source uses a fixed deviation of 200). An update of zeros takes rms 1.
    Source: Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine learning with adversaries"
    (NeurIPS 2017), §5, Gaussian Byzantine.
    """

    name: ClassVar[str] = "gaussian"
    most_knowledge = Knowledge.OWN
    leaves = Leaves.RULE
    default_strength = 30.0
    bites = True
    expected = Expectation(named=False, suspected=False, downweighted=True)

    def forge(self, view: VectorView) -> Tensor:
        rms = float(view.own_D.double().square().mean().sqrt()) if len(view.own_D) else 0.0
        noise_D = torch.randn(len(view.own_D), generator=view.generator(self.name))
        return noise_D * (self.strength * (rms if 0.0 < rms < math.inf else 1.0))


class NotANumber(VectorAttack):
    """The liar's own update with NaN at a few coordinates; a plain mean then holds NaN as well.

    Strength: share of the coordinates, default 0.01, never fewer than one; places drawn anew each
    round. Source: case A01 and Baruch et al. (2019), §1, on trivially malformed gradients.
    """

    name: ClassVar[str] = "nan"
    most_knowledge = Knowledge.OWN
    leaves = Leaves.OBSERVATIONS
    default_strength = 0.01
    bites = True
    expected = Expectation(named=True, suspected=False, downweighted=False)
    value: ClassVar[float] = math.nan

    def forge(self, view: VectorView) -> Tensor:
        forged_D = view.own_D.clone()
        count = min(len(forged_D), max(1, round(self.strength * len(forged_D))))
        order_D = torch.randperm(len(forged_D), generator=view.generator(self.name))
        forged_D[order_D[:count]] = self.value
        return forged_D


class Infinite(NotANumber):
    """As ``nan``, with +inf."""

    name: ClassVar[str] = "inf"
    value: ClassVar[float] = math.inf
