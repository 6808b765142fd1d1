"""The base of agents: an honest peer's machine whose inputs and effects pass through a liar.

An agent holds its own peer's keys and nothing else: it acts through its own machine's effects and
through messages that it signs. It has the shape of every machine, so any host can run it.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, ClassVar, Protocol

from torchbft.attacks.declaration import Attack, Kind, Knowledge
from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Broadcast, Effect, Send
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.ledger.messages import Message, decode_message
from torchbft.protocols.peer import LEDGER, TRANSACTION
from torchbft.protocols.round.messages import Parsed, Statement, parse, sign

MAX_SCHEDULED = 4096
"""Effects held back at a time; what comes on top is dropped, as a slow peer's queue would do."""


class Machine(Protocol):
    """What an agent wraps: a ``PeerMachine``, or one made up for a test."""

    def start(self, now: float) -> list[Effect]: ...

    def handle(self, event: Any, now: float) -> list[Effect]: ...

    def deadline(self) -> float | None: ...


class Screened:
    """A machine that asks its agent before it hands an own transaction to its own engine."""

    screen: Callable[[bytes], bool]


class Agent(Attack):
    """An honest machine in a liar's hands; the base lies about nothing.

    name: this peer. keys: its voting key. seed: its randomness. peers: all members. liars: the
    members that collude, itself included. strength: see the attack; None takes its default.
    """

    kind: ClassVar[Kind] = "agent"
    knowledge = Knowledge.HISTORY
    default_strength: ClassVar[float] = 0.0

    def __init__(
        self,
        machine: Machine,
        *,
        name: PeerId,
        keys: SigningKey,
        seed: bytes,
        peers: Iterable[PeerId],
        liars: Iterable[PeerId] = (),
        strength: float | None = None,
    ) -> None:
        self.machine, self.me = machine, name
        self.others = tuple(sorted(peer for peer in peers if peer != name))
        accomplices = frozenset(liars)
        self.victims = tuple(peer for peer in self.others if peer not in accomplices)
        self.strength = self.default_strength if strength is None else strength
        digest = sha256(f"attack/{self.name}", seed, name.encode())
        self.random = random.Random(int.from_bytes(digest[:8], "big"))
        self._key = keys
        self._scheduled: list[tuple[float, int, Effect]] = []
        self._ticket = count()
        if isinstance(machine, Screened):
            machine.screen = self.hands_in

    # -- the shape of a machine

    def start(self, now: float) -> list[Effect]:
        return self._passed(self.machine.start(now), now)

    def handle(self, event: Any, now: float) -> list[Effect]:
        effects = [e for heard in self.hears(event, now) for e in self.machine.handle(heard, now)]
        return [*self._passed(effects, now), *self._due(now)]

    def deadline(self) -> float | None:
        times = [self.machine.deadline(), self._scheduled[0][0] if self._scheduled else None]
        return min((t for t in times if t is not None), default=None)

    def __getattr__(self, name: str) -> Any:
        """What else a host may look at (``application``, ``height``) is the machine's."""
        if name == "machine":
            raise AttributeError(name)
        return getattr(self.machine, name)

    # -- what an attack overrides

    def hears(self, event: Any, now: float) -> list[Any]:
        """The inputs that the machine gets in the place of this one."""
        return [event]

    def says(self, effect: Effect, now: float) -> list[Effect]:
        """The effects that leave in the place of this one."""
        return [effect]

    def hands_in(self, tx: bytes) -> bool:
        """Whether an own transaction goes to the own ordering engine, which would propose it."""
        return True

    # -- what attacks use

    def later(self, at: float, effect: Effect) -> None:
        """Let an effect leave at this time."""
        if len(self._scheduled) < MAX_SCHEDULED:
            heapq.heappush(self._scheduled, (at, next(self._ticket), effect))

    def mine(self, effect: Effect) -> Parsed | None:
        """The own statement that an effect sends to all, if it does."""
        if not isinstance(effect, Broadcast) or effect.message[:1] != TRANSACTION:
            return None
        return self.own(effect.message[1:])

    def own(self, tx: bytes) -> Parsed | None:
        """A transaction of this peer, decoded; None for anybody else's."""
        parsed = parsed_or_none(tx)
        return parsed if parsed is not None and parsed.statement.author == self.me else None

    def signed(self, statement: Statement) -> bytes:
        """The control message of a statement under this peer's signature, whoever it names."""
        return TRANSACTION + sign(statement, self._key)

    def split(self, first: bytes, second: bytes) -> list[Effect]:
        """One message to the first half of the others, another one to the rest."""
        half = len(self.others) // 2
        return [
            *(Send(peer, first) for peer in self.others[:half]),
            *(Send(peer, second) for peer in self.others[half:]),
        ]

    def _passed(self, effects: Sequence[Effect], now: float) -> list[Effect]:
        return [said for effect in effects for said in self.says(effect, now)]

    def _due(self, now: float) -> list[Effect]:
        due = []
        while self._scheduled and self._scheduled[0][0] <= now:
            due.append(heapq.heappop(self._scheduled)[2])
        return due


def parsed_or_none(tx: bytes) -> Parsed | None:
    """A transaction decoded, or None."""
    try:
        return parse(tx)
    except DecodeError:
        return None


def ledger_message(data: bytes) -> Message | None:
    """A control message's content if it is the ledger's, or None."""
    if data[:1] != LEDGER:
        return None
    try:
        return decode_message(data[1:])
    except DecodeError:
        return None
