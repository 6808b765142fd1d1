"""What a liar sees when it forges an update, and the base of the attacks that do so.

Shapes: N honest peers, D parameters, T earlier rounds. All tensors float32 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from torchbft.attacks.declaration import Attack, Kind, Knowledge
from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import PreconditionError

KnownRule = Callable[[Tensor], Tensor]
"""The swarm's rule as a liar may run it: updates (n, D) -> aggregate (D)."""


@dataclass(frozen=True)
class VectorView:
    """One round through a liar's eyes. Attacks never change its tensors."""

    own_D: Tensor
    """The update that this peer would send if it were honest."""
    honest_ND: Tensor | None = None
    """The honest updates of this round (from the oracle), rows in order of peer id."""
    aggregate_history: Sequence[Tensor] = ()
    """Aggregates (D each) of earlier rounds, oldest first."""
    n: int = 1
    f: int = 0
    round: int = 0
    seed: bytes = field(default=b"", repr=False)
    rule: KnownRule | None = None

    def generator(self, purpose: str) -> torch.Generator:
        """Randomness of this liar, round and purpose: the same in every repetition."""
        digest = sha256(f"attack/{purpose}", self.seed, self.round.to_bytes(8, "big"))
        return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)


class VectorAttack(Attack):
    """Changes a contribution's values; the protocol itself is followed.

    strength: see the attack; ``None`` takes its default. knowledge: at most what the attack can
    use; with less it falls back from the honest mean to the last aggregate to its own update.
    """

    kind: ClassVar[Kind] = "vector"
    most_knowledge: ClassVar[Knowledge]

    def __init__(
        self, strength: float | None = None, *, knowledge: Knowledge | str | None = None
    ) -> None:
        self.strength = self.default_strength if strength is None else float(strength)
        self.knowledge = self.most_knowledge if knowledge is None else Knowledge(knowledge)
        order = list(Knowledge)
        if order.index(self.knowledge) > order.index(self.most_knowledge):
            raise PreconditionError(
                f"{self.name} makes no use of more than knowledge {self.most_knowledge.value!r}"
            )

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch that the liar trains on in the place of (x, y); unchanged by default."""
        return x, y

    def forge(self, view: VectorView) -> Tensor:
        """The update (float32 D) to send in the place of ``view.own_D``."""
        raise NotImplementedError

    def reference_D(self, view: VectorView) -> Tensor:
        """Best estimate of the honest mean that this liar's knowledge allows (float32 D)."""
        if self.knowledge is Knowledge.OMNISCIENT and view.honest_ND is not None:
            return view.honest_ND.mean(dim=0)
        if self.knowledge is not Knowledge.OWN and view.aggregate_history:
            return view.aggregate_history[-1]
        return view.own_D
