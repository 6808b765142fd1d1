"""Attacks on the training data: the update is honestly computed from wrong labels."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from torchbft.attacks.declaration import Expectation, Knowledge, Leaves
from torchbft.attacks.vectors.view import VectorAttack, VectorView


class LabelFlip(VectorAttack):
    """Trains on labels C − 1 − y (integer y of any shape, C classes); sends what comes out.

    ``classes`` is C; without it, one more than the largest label seen so far. Source: Allen-Zhu,
    Ebrahimianghazani, Li and Alistarh, "Byzantine-resilient non-convex SGD" (ICLR 2021), §5.
    """

    name: ClassVar[str] = "label_flip"
    most_knowledge = Knowledge.OWN
    leaves = Leaves.NOTHING
    default_strength = 0.0
    expected = Expectation(named=False, suspected=False, downweighted=False)

    def __init__(
        self,
        strength: float | None = None,
        *,
        classes: int | None = None,
        knowledge: Knowledge | str | None = None,
    ) -> None:
        super().__init__(strength, knowledge=knowledge)
        self.classes = classes
        self._seen = 0

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        if y.is_floating_point():  # a regression target: its mirror image
            return x, -y
        self._seen = max(self._seen, int(y.max()) + 1 if y.numel() else 0)
        top = (self.classes or self._seen) - 1
        return x, torch.where(y >= 0, top - y, y)  # negative labels mean "ignore"

    def forge(self, view: VectorView) -> Tensor:
        return view.own_D.clone()
