"""What a trainer and its node say to each other, as values and one protocol class.

Any object with these calls may stand for the node: the real one in another process, or a swarm in
this process (``solo``). All calls block; they come from one thread, in the order of a round:
``start``, then (``next_round``, ``submit``, ``outcome``, ``report``) until one returns ``RunOver``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from torchbft.primitives.ids import PeerId
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update


@dataclass(frozen=True, eq=False)
class RoundStart:
    """Train this round. ``positions``: the dataset indices assigned to this peer, in order of use;
    None when each peer trains on data of its own."""

    round: int
    positions: Sequence[int] | None
    state: AgreedState
    peers: tuple[PeerId, ...] = ()


@dataclass(frozen=True, eq=False)
class RoundOutcome:
    """How a round ended for this peer. ``state`` is the agreed one after it; as before if void."""

    round: int
    accepted: bool
    void: bool
    reason: str
    state: AgreedState


@dataclass(frozen=True, eq=False)
class RunOver:
    """No round follows. ``halted``: the run cannot go on safely; ``stopped``: this peer left."""

    status: Literal["finished", "halted", "stopped"]
    reason: str
    state: AgreedState


class NodeLink(Protocol):
    """A trainer's end of its node."""

    def start(self, initial: AgreedState) -> AgreedState:
        """Hand over this peer's own initial state; returns the agreed one to go on from."""
        ...

    def next_round(self) -> RoundStart | RunOver:
        """Wait for the next round that this peer takes part in."""
        ...

    def submit(
        self,
        round: int,
        payload: bytes | memoryview,
        trace_root: bytes,
        local_root: bytes,
        seconds: float = 0.0,
    ) -> None:
        """Hand over the contribution of a round: its bytes, two roots of 32 bytes, and the
        seconds that its inner steps took."""
        ...

    def outcome(self, round: int) -> RoundOutcome | RunOver:
        """Wait for the end of a round whose contribution was submitted."""
        ...

    def report(
        self,
        round: int,
        loss: float,
        accuracy: float | None,
        train_loss: float | None,
        seconds: float = 0.0,
    ) -> None:
        """What was measured on the agreed model after a round, and the seconds that it took."""
        ...

    def leave(self) -> None:
        """Take no further part. May be called more than once."""
        ...


class TrainerHook(Protocol):
    """Test switch of a demonstration: what sits in a trainer between honest code and the node."""

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """The batch to train on in the place of (x, y)."""
        ...

    def update(
        self,
        round: int,
        update: Update,
        codec: object,
        layout: StateLayout,
        history: Sequence[Tensor],
    ) -> Update | bytes:
        """What to send in the place of the honest update; bytes are sent as they are.

        ``history``: aggregates of earlier rounds (float32 D each), oldest first.
        """
        ...
