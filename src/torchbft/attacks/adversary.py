"""The session's test hook: what sits in a trainer of a demonstration beside honest code.

``Adversary`` sits in a liar's trainer, ``HonestWitness`` in an honest one, where it only lets the
oracle see the update.

Shapes: D parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from torchbft.attacks.declaration import Knowledge
from torchbft.attacks.oracle import Oracle
from torchbft.attacks.vectors.view import KnownRule, VectorAttack, VectorView
from torchbft.primitives.ids import PeerId
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.update import Update

HISTORY_ROUNDS = 16
"""Earlier aggregates that an attack may use: enough for a deviation, bounded memory."""


class HonestWitness:
    """Publishes the honest update of its peer to the oracle; changes nothing."""

    def __init__(self, name: PeerId, oracle: Oracle) -> None:
        self._name, self._oracle = name, oracle

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    def update(
        self,
        round: int,
        update: Update,
        codec: object,
        layout: StateLayout,
        history: Sequence[Tensor],
    ) -> Update | bytes:
        """The same update. history, codec and layout are not looked at."""
        self._oracle.publish(round, self._name, update.parameters_D)
        return update


class Adversary:
    """A vector attack in a liar's trainer.

    n, f: of the contributors. seed: this liar's own randomness. rule: the swarm's rule as the liar
    runs it, or None when it does not know it. oracle: needed by an omniscient attack.
    """

    def __init__(
        self,
        attack: VectorAttack,
        *,
        n: int,
        f: int,
        seed: bytes,
        oracle: Oracle | None = None,
        rule: KnownRule | None = None,
    ) -> None:
        self.attack = attack
        self._n, self._f, self._seed, self._oracle, self._rule = n, f, seed, oracle, rule

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """What the liar trains on in the place of (x, y)."""
        return self.attack.batch(x, y)

    @torch.no_grad()
    def update(
        self,
        round: int,
        update: Update,
        codec: object,
        layout: StateLayout,
        history: Sequence[Tensor],
    ) -> Update | bytes:
        """The liar's contribution; its buffers stay as they are.

        history: aggregates of earlier rounds (float32 D each), oldest first.
        """
        honest_ND = None
        if self._oracle is not None and self.attack.knowledge is Knowledge.OMNISCIENT:
            honest_ND = self._oracle.wait(round, len(update.parameters_D))
        view = VectorView(
            own_D=update.parameters_D,
            honest_ND=honest_ND,
            aggregate_history=tuple(history)[-HISTORY_ROUNDS:],
            n=self._n,
            f=self._f,
            round=round,
            seed=self._seed,
            rule=self._rule,
        )
        return dataclasses.replace(update, parameters_D=self.attack.forge(view).contiguous())
