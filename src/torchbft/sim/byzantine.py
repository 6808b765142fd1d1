"""Ledger adversaries: machines that hold a validator's real key and break the protocol.

Each is named after what it does. Most drive honest machines and change what leaves them, so that
they know all that a colluding validator would (the *Twins* method: Bano et al., "Twins: BFT Systems
Made Robust", 2021).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from msgspec.structs import replace

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Broadcast, Effect, Send
from torchbft.primitives.errors import HaltError
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.machine import LedgerMachine
from torchbft.protocols.ledger.messages import (
    NO_DIGEST,
    Kind,
    Message,
    Proposal,
    Status,
    Timeout,
    Transaction,
    Vote,
    Want,
    block_digest,
    decode_message,
    sign_vote,
)

GARBAGE_CHANCE = 0.1
"""Share of a garbage sender's messages that are damaged: enough to meet every decoder, few enough
that the run stays fast."""

TOP = 2**62
"""The largest count that the wire allows."""


@dataclass(frozen=True, slots=True)
class Seat:
    """What an adversary has: a validator's place, key and a source of honest machines."""

    run_id: bytes
    me: PeerId
    peers: tuple[PeerId, ...]
    key: SigningKey
    random: Random
    honest: Callable[[bytes | None], LedgerMachine]
    """A machine with this seat's key and nothing on its disk; its application leaves out of
    proposals the transactions that begin with the argument."""
    filling: Callable[[View], Sequence[bytes]] = lambda view: (b"z/%d" % view,)
    """Transactions of a block that only this adversary proposes."""


def handled(machine: LedgerMachine, event: Any, now: float) -> list[Effect]:
    """What an honest machine in a liar's hands does; one that finds out that its key was used
    behind its back is ignored instead of halting."""
    try:
        return machine.handle(event, now)
    except HaltError:
        return []


class Adversary:
    """Base: an honest machine whose effects pass through ``change``."""

    censored: bytes | None = None

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.machine = seat.honest(self.censored)

    def start(self, now: float) -> list[Effect]:
        return self._changed(self.machine.start(now))

    def handle(self, event: Any, now: float) -> list[Effect]:
        return self._changed(handled(self.machine, event, now))

    def deadline(self) -> float | None:
        return self.machine.deadline()

    def _changed(self, effects: Sequence[Effect]) -> list[Effect]:
        return [
            changed
            for effect in effects
            if isinstance(effect, Send | Broadcast)
            for changed in self.change(effect, decode_message(effect.message))
        ]

    def change(self, effect: Send | Broadcast, message: Message) -> list[Effect]:
        """What is sent instead of one message."""
        return [effect]

    def vote(self, kind: Kind, height: Height, view: View, digest: bytes) -> Vote:
        """A vote signed without asking the safety rules."""
        seat = self.seat
        return sign_vote(seat.key, seat.run_id, seat.me, kind, height, view, digest)


class Silent(Adversary):
    """Hears everything and says nothing."""

    def change(self, effect: Send | Broadcast, message: Message) -> list[Effect]:
        return []


class DoubleVoter(Adversary):
    """Sends, beside each vote, one for another block in the same slot."""

    def change(self, effect: Send | Broadcast, message: Message) -> list[Effect]:
        if not isinstance(message, Vote) or message.author != self.seat.me:
            return [effect]
        other = sha256("byzantine/other", message.digest)
        vote = self.vote(message.kind, message.height, message.view, other)
        return [effect, Broadcast(encode(vote))]


class CensoringLeader(Adversary):
    """Leaves out the transactions of one author whenever it leads."""

    censored = b"a"


class SelectiveLeader(Adversary):
    """Shows its proposals to a few peers only."""

    def change(self, effect: Send | Broadcast, message: Message) -> list[Effect]:
        if not isinstance(message, Proposal) or not isinstance(effect, Broadcast):
            return [effect]
        others = [peer for peer in self.seat.peers if peer != self.seat.me]
        few = self.seat.random.sample(others, len(others) // 2)
        return [Send(peer, effect.message) for peer in few]


class LockHider(Adversary):
    """Denies in its time-outs every prepare certificate that it holds."""

    def change(self, effect: Send | Broadcast, message: Message) -> list[Effect]:
        if not isinstance(message, Timeout) or message.prepared is None:
            return [effect]
        denial = self.vote(Kind.TIME_OUT, message.vote.height, message.vote.view, NO_DIGEST)
        return [Broadcast(encode(Timeout(denial, None)))]


class LockBreaker(Adversary):
    """As leader of a later view it proposes a block of its own instead of the certified one."""

    def change(self, effect: Send | Broadcast, message: Message) -> list[Effect]:
        if not isinstance(message, Proposal) or message.justification is None:
            return [effect]
        seat, vote = self.seat, message.vote
        block = self.machine.tip.block(seat.run_id, seat.me, list(seat.filling(vote.view)))
        own = self.vote(Kind.PROPOSE, vote.height, vote.view, block_digest(block))
        return [Broadcast(encode(Proposal(own, block, message.justification)))]


class Forger(Adversary):
    """Sends votes in the names of others, and swaps authors and signers in what it sends."""

    def change(self, effect: Send | Broadcast, message: Message) -> list[Effect]:
        if not isinstance(message, Vote):
            return [effect]
        victim = self.seat.random.choice(self.seat.peers)
        return [effect, Broadcast(encode(replace(message, author=victim)))]


class GarbageSender(Adversary):
    """Sends damaged messages, huge numbers and noise between valid ones."""

    def change(self, effect: Send | Broadcast, message: Message) -> list[Effect]:
        random = self.seat.random
        if random.random() > GARBAGE_CHANCE:
            return [effect]
        data = bytearray(effect.message)
        for _ in range(random.randint(1, 4)):
            data[random.randrange(len(data))] = random.randrange(256)
        odd = [
            Status(Height(TOP)),
            Want(Height(TOP), NO_DIGEST),
            self.vote(Kind.FINALIZE, Height(TOP), View(TOP), NO_DIGEST),
            Timeout(self.vote(Kind.TIME_OUT, self.machine.height, View(TOP), NO_DIGEST), None),
        ]
        sent = [bytes(data), bytes(data[: random.randrange(len(data))]), random.randbytes(64)]
        return [effect, *(Broadcast(d) for d in (*sent, encode(random.choice(odd))))]


class Equivocator:
    """Twins: two honest machines with one key, each heard by one half of the peers. They hold
    different transactions, so as leaders they sign different blocks."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.twins = (seat.honest(None), seat.honest(b"b"))
        others = [peer for peer in seat.peers if peer != seat.me]
        seat.random.shuffle(others)
        half = len(others) // 2
        self.audiences = (others[:half], others[half:])

    def start(self, now: float) -> list[Effect]:
        return self._both(lambda twin: twin.start(now))

    def handle(self, event: Any, now: float) -> list[Effect]:
        effects = self._both(lambda twin: handled(twin, event, now))
        if isinstance(event, Transaction):
            own = Transaction(b"z/" + event.tx)
            effects += self._to(self.audiences[1], handled(self.twins[1], own, now))
        return effects

    def deadline(self) -> float | None:
        times = [twin.deadline() for twin in self.twins]
        return min((t for t in times if t is not None), default=None)

    def _both(self, act: Callable[[LedgerMachine], list[Effect]]) -> list[Effect]:
        pairs = zip(self.audiences, self.twins, strict=True)
        return [e for audience, twin in pairs for e in self._to(audience, act(twin))]

    def _to(self, audience: Sequence[PeerId], effects: Sequence[Effect]) -> list[Effect]:
        sent: list[Effect] = []
        for effect in effects:
            if isinstance(effect, Broadcast):
                sent += [Send(peer, effect.message) for peer in audience]
            elif isinstance(effect, Send) and effect.to in audience:
                sent.append(effect)
        return sent


ADVERSARIES: dict[str, Callable[[Seat], Adversary | Equivocator]] = {
    "silent": Silent,
    "double-voter": DoubleVoter,
    "censoring-leader": CensoringLeader,
    "selective-leader": SelectiveLeader,
    "lock-hider": LockHider,
    "lock-breaker": LockBreaker,
    "forger": Forger,
    "garbage-sender": GarbageSender,
    "equivocator": Equivocator,
}
"""All ledger adversaries by name."""
