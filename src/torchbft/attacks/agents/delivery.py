"""Agents that misuse the network: late, absent, to the wrong peers, again, or in others' names."""

from __future__ import annotations

from collections import deque
from typing import Any

from msgspec.structs import replace

from torchbft.attacks.agents.agent import Agent, ledger_message
from torchbft.attacks.agents.contribution import twin
from torchbft.attacks.declaration import Expectation, Leaves
from torchbft.primitives.effects import Broadcast, Effect, Received, Send, Tick
from torchbft.primitives.wire import WIRE_VERSION, encode
from torchbft.protocols.ledger.messages import Vote
from torchbft.protocols.peer import LEDGER, ROUND, TRANSACTION
from torchbft.protocols.round.interface import OfferPayload
from torchbft.protocols.round.messages import Commitment, Opening, RootVote, sign

REMEMBERED = 32
"""Messages that a replayer keeps of each kind: a round or two of seven peers."""
VICTIMS = 2
"""Peers in whose names a forger speaks in a round."""


class Straggler(Agent):
    """Sends everything, payload included, so late that each time-out has passed.

    Strength: the delay in seconds.
    """

    name = "straggler"
    leaves = Leaves.NOTHING
    default_strength = 10.0
    expected = Expectation(named=False, suspected=True, downweighted=False)

    def says(self, effect: Effect, now: float) -> list[Effect]:
        if not isinstance(effect, Send | Broadcast | OfferPayload):
            return [effect]
        self.later(now + self.strength, effect)
        return []


class Crasher(Agent):
    """Stops at random moments and comes back: while down it neither hears nor sends.

    What its own host tells it meanwhile waits for its return. Strength s in seconds: it is up for
    s·E and down for s·(1 + E/2), E drawn anew from the exponential distribution of mean 1, so that
    each outage lasts longer than the time-outs of short rounds.
    """

    name = "crasher"
    leaves = Leaves.NOTHING
    default_strength = 5.0
    expected = Expectation(named=False, suspected=True, downweighted=False)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._down = False
        self._turns: float | None = None
        self._waiting: list[Any] = []

    def start(self, now: float) -> list[Effect]:
        self._turns = now + self._span()
        return super().start(now)

    def handle(self, event: Any, now: float) -> list[Effect]:
        while self._turns is not None and now >= self._turns:
            self._down = not self._down
            self._turns += self._span()
        if self._down:
            if not isinstance(event, Received | Tick):
                self._waiting.append(event)
            return []
        missed, self._waiting = self._waiting, []
        return [
            effect for each in (*missed, event) for effect in super(Crasher, self).handle(each, now)
        ]

    def deadline(self) -> float | None:
        inner = None if self._down else super().deadline()
        return min((t for t in (inner, self._turns) if t is not None), default=None)

    def _span(self) -> float:
        drawn = self.random.expovariate(1.0)
        return self.strength * (1.0 + drawn / 2.0 if self._down else drawn)


class Replayer(Agent):
    """Sends again, in each round, what it and others sent in earlier ones: transactions, votes and
    root signatures as the same bytes, and its own last payload. Old statements have no effect, and
    replays never convict: anybody could replay an honest peer's."""

    name = "replayer"
    leaves = Leaves.NOTHING
    expected = Expectation(named=False, suspected=False, downweighted=False)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._messages: dict[bytes, deque[bytes]] = {
            kind: deque(maxlen=REMEMBERED) for kind in (LEDGER, ROUND, TRANSACTION)
        }
        self._offer: OfferPayload | None = None

    def hears(self, event: Any, now: float) -> list[Any]:
        if isinstance(event, Received):
            self._remember(event.message)
        return [event]

    def says(self, effect: Effect, now: float) -> list[Effect]:
        if isinstance(effect, OfferPayload):
            old, self._offer = self._offer, effect
            replayed = [Broadcast(m) for kept in self._messages.values() for m in kept]
            return [*replayed, *([old] if old is not None else []), effect]
        if isinstance(effect, Broadcast):
            self._remember(effect.message)
        return [effect]

    def _remember(self, message: bytes) -> None:
        kept = self._messages.get(message[:1])
        if kept is not None and message not in kept:
            kept.append(message)


class Forger(Agent):
    """Speaks in other peers' names, with signatures that are not theirs: statements, ledger votes
    and root votes. Every receiver can tell, and the channel says who sent it; but a third party
    has only the receivers' word."""

    name = "forger"
    leaves = Leaves.NOTHING
    expected = Expectation(named=False, suspected=True, downweighted=False)

    def says(self, effect: Effect, now: float) -> list[Effect]:
        if not isinstance(effect, Broadcast):
            return [effect]
        message = ledger_message(effect.message)
        if isinstance(message, Vote):
            victim = self.random.choice(self.victims)
            return [effect, Broadcast(LEDGER + encode(replace(message, author=victim)))]
        parsed = self.mine(effect)
        if parsed is None or not isinstance(parsed.statement, Commitment | Opening):
            return [effect]
        names = self.random.sample(self.victims, min(VICTIMS, len(self.victims)))
        forged = [replace(twin(parsed.statement), author=name) for name in names]
        return [effect, *(Broadcast(self.signed(statement)) for statement in forged)] + [
            self._forged_root(parsed.statement, name) for name in names
        ]

    def _forged_root(self, like: Commitment | Opening, name: str) -> Effect:
        vote = RootVote(WIRE_VERSION, like.run_id, like.epoch, like.round, name, bytes(32))
        return Broadcast(ROUND + sign(vote, self._key))


class SelectiveSender(Agent):
    """Pushes its payload to one honest peer only. That one attests and hands it on, so the payload
    counts if the others get it in time, and is nobody's if they do not."""

    name = "selective_sender"
    leaves = Leaves.NOTHING
    expected = Expectation(named=False, suspected=False, downweighted=False)

    def says(self, effect: Effect, now: float) -> list[Effect]:
        if not isinstance(effect, OfferPayload):
            return [effect]
        only = self.random.choice(self.victims)
        return [OfferPayload(effect.round, effect.payload_root, effect.length, to=(only,))]
