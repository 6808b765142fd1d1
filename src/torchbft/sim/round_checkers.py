"""What must hold of rounds in every run, one property each, checked outside the code under test.

A checker sees what honest peers send, receive, write down and tell their hosts. It shares the wire
format, the signature check and the events' types with the round, and none of its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Effect
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import FinalizedBlock
from torchbft.protocols.peer import LEDGER, ROUND, TRANSACTION, BlockDone
from torchbft.protocols.round import events, interface
from torchbft.protocols.round.messages import (
    Closing,
    Opening,
    Parsed,
    RootCertificate,
    RootVote,
    parse,
    seats_in,
)
from torchbft.protocols.round.state import Seat
from torchbft.sim.checkers import Checker, decoded
from torchbft.sim.seating import power, quorum

CONTRIBUTIONS = ("commit", "open")
"""Slots of a contribution; each has a window that closings may close."""


def peer_message(message: bytes) -> object:
    """A control message of a whole peer: the ledger's, a parsed statement, or None."""
    kind, body = message[:1], message[1:]
    if kind == LEDGER:
        return decoded(body)
    if kind not in (ROUND, TRANSACTION):
        return None
    try:
        return parse(body)
    except DecodeError:
        return None


def events_in(effect: Effect) -> tuple[object, ...]:
    """What the round's reader told about a block that an honest peer finalized."""
    return effect.events if isinstance(effect, BlockDone) else ()


def statements_in(finalized: FinalizedBlock) -> list[Parsed]:
    """The statements of a block, in order."""
    read = [peer_message(TRANSACTION + tx) for tx in finalized.block.txs]
    return [message for message in read if isinstance(message, Parsed)]


class OneStatementPerSlot(Checker):
    """An honest peer never signs two different statements for one slot of a round, across any
    restarts; root votes included."""

    def __init__(self) -> None:
        super().__init__()
        self._said: dict[tuple[PeerId, int, str], bytes] = {}

    def on_message(self, peer: PeerId, message: object) -> None:
        if not isinstance(message, Parsed) or message.statement.author != peer:
            return
        number = message.statement.round
        if self._said.setdefault((peer, number, message.slot), message.body) != message.body:
            self.violations.append(f"{peer} signed twice: {message.slot} of round {number}")


class OpensAfterTheWindow(Checker):
    """An honest peer shows its opening only after the block that closed the commitments is final to
    it; ``is_closed`` tells that from the peer's ledger."""

    def __init__(self, is_closed: Callable[[PeerId, int], bool]) -> None:
        super().__init__()
        self._is_closed = is_closed

    def on_message(self, peer: PeerId, message: object) -> None:
        said = message.statement if isinstance(message, Parsed) else None
        is_own = isinstance(said, Opening) and said.author == peer
        if said is not None and is_own and not self._is_closed(peer, said.round):
            self.violations.append(f"{peer} opens round {said.round} too early")


class OneSetPerRound(Checker):
    """All honest readers tell one accepted set, or one reason of voidness, for each round."""

    def __init__(self) -> None:
        super().__init__()
        self._told: dict[tuple[int, str], bytes] = {}
        self.fixed: dict[int, tuple[str, ...]] = {}
        self.void: dict[int, str] = {}

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        for event in events_in(effect):
            if isinstance(event, events.RoundFixed):
                self.fixed[event.round] = tuple(item.author for item in event.accepted)
                self._compare(peer, event.round, "accepted", encode(event.accepted))
            elif isinstance(event, events.RoundVoid):
                self.void[event.round] = event.reason
                self._compare(peer, event.round, "void", event.reason.encode())

    def _compare(self, peer: PeerId, number: int, what: str, said: bytes) -> None:
        digest = sha256("checker/set", said)
        if self._told.setdefault((number, what), digest) != digest:
            self.violations.append(f"{peer} reads another outcome of round {number}: {what}")


class HaltsAfterVoidRounds(Checker):
    """With at most f liars an honest peer halts only once so many rounds in a row are void."""

    ROUNDS = 5

    def __init__(self) -> None:
        super().__init__()
        self._void: set[int] = set()

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        for event in events_in(effect):
            if isinstance(event, events.RoundVoid):
                self._void.add(event.round)
        if isinstance(effect, interface.Halt):
            last = max(self._void, default=0)
            if not self._void.issuperset(range(last - self.ROUNDS + 1, last + 1)):
                self.violations.append(f"{peer} halted: {effect.reason}")


class OneRootPerRound(Checker):
    """All honest peers know one signed root for each round."""

    def __init__(self) -> None:
        super().__init__()
        self.roots: dict[int, bytes] = {}

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        if isinstance(effect, interface.RootAgreed):
            self._compare(peer, effect.round, effect.root)
        for event in events_in(effect):
            if isinstance(event, events.RootSigned):
                self._compare(peer, event.round, event.root)

    def _compare(self, peer: PeerId, number: int, root: bytes) -> None:
        if self.roots.setdefault(number, root) != root:
            self.violations.append(f"{peer} knows another signed root of round {number}")


class RootsAreComputed(Checker):
    """A signed root was signed by a quorum of its round's validators less the liars: honest ones of
    that power computed it. ``seats`` tells those of a round."""

    def __init__(self, seats: Callable[[int], Sequence[Seat]], liars: Iterable[PeerId]) -> None:
        super().__init__()
        self._seats, self._liars = seats, frozenset(liars)
        self._signers: dict[tuple[int, bytes], set[PeerId]] = {}

    def on_statement(self, peer: PeerId, statement: Parsed) -> None:
        said = statement.statement
        if isinstance(said, RootVote) and said.author == peer:
            self._signers.setdefault((said.round, said.root), set()).add(peer)

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        if isinstance(effect, interface.RootAgreed):
            signers = self._signers.get((effect.round, effect.root), set())
            seats = self._seats(effect.round)
            need, held = quorum(seats) - power(seats, self._liars), power(seats, signers)
            if held < need:
                self.violations.append(
                    f"{peer} counts a root of round {effect.round} as signed that"
                    f" {held} honest peers signed, not {need}"
                )


class TrainsFromSignedRoots(Checker):
    """An honest peer trains from the start state or from a root that a quorum signed."""

    def __init__(self, start: bytes) -> None:
        super().__init__()
        self._signed = {start}

    def on_block(self, peer: PeerId, finalized: FinalizedBlock) -> None:
        for message in statements_in(finalized):
            if isinstance(message.statement, RootCertificate):
                self._signed.add(message.statement.root)

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        if isinstance(effect, interface.RootAgreed):
            self._signed.add(effect.root)
        if isinstance(effect, interface.StartTraining) and effect.from_root not in self._signed:
            self.violations.append(f"{peer} trains round {effect.round} from an unsigned root")


class AcceptedPayloadsAreHeld(Checker):
    """When a round is fixed, an honest peer's disk holds each accepted payload."""

    def __init__(self, honest: Iterable[PeerId], holders: Callable[[bytes], Iterable[str]]) -> None:
        super().__init__()
        self._honest, self._holders = frozenset(honest), holders

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        for event in events_in(effect):
            if isinstance(event, events.RoundFixed):
                for item in event.accepted:
                    if self._honest.isdisjoint(self._holders(item.payload_root)):
                        self.violations.append(
                            f"no honest peer holds {item.author}'s payload of round {event.round}"
                        )


class HonestAreNotNamed(Checker):
    """Nobody names or convicts an honest peer."""

    def __init__(self, honest: Iterable[PeerId]) -> None:
        super().__init__()
        self._honest = frozenset(honest)
        self.named: dict[PeerId, set[str]] = {}
        self.suspected: dict[PeerId, set[str]] = {}

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        if isinstance(effect, interface.Accuse):
            into = self.named if effect.named else self.suspected
            into.setdefault(effect.peer, set()).add(effect.fault)
            if effect.named:
                self._check(peer, effect.peer, effect.fault)
        for event in events_in(effect):
            if isinstance(event, events.Convicted):
                self._check(peer, event.peer, event.evidence.fault)

    def _check(self, peer: PeerId, accused: PeerId, fault: str) -> None:
        if accused in self._honest:
            self.violations.append(f"{peer} names {accused}, which is honest: {fault}")


@dataclass(slots=True)
class _Window:
    """What is known of one window of one round, by author or by validator."""

    reached: dict[str, dict[PeerId, int]] = field(default_factory=dict)
    """Author to the honest validators that have its item, each with its life then."""
    blind: dict[str, set[PeerId]] = field(default_factory=dict)
    """Author to the honest validators that closed without its item in that life."""
    on_ledger: dict[str, Height] = field(default_factory=dict)
    """Author to the height of its item."""
    closings: dict[str, tuple[Height, Closing]] = field(default_factory=dict)
    is_judged: bool = False


class NothingInTimeIsLost(Checker):
    """An honest item that reached enough honest validators before they closed is in the set, where
    a quorum of closings closed its window.

    Any quorum holds at least quorum − liars honest validators; an item that reached more honest
    ones than are missing from those was known to one of them before it signed its list. Where the
    members waited for were all there, nothing can be said of the others. A validator knows an item
    if it came in the life in which it closes, and its ledger was in the item's round or the one
    before; ``round_of`` tells in which. ``seats``: of a round, in order of name.
    """

    def __init__(
        self,
        seats: Callable[[int], Sequence[Seat]],
        honest: Iterable[PeerId],
        round_of: Callable[[PeerId], int],
    ) -> None:
        super().__init__()
        self._seats, self._honest, self._round_of = seats, frozenset(honest), round_of
        self._convicts: set[str] = set()
        self._windows: dict[tuple[int, str], _Window] = {}
        self._committed: dict[int, set[str]] = {}
        self._genuine: set[tuple[bytes, bytes]] = set()
        self._lives: dict[PeerId, int] = {}
        self._read = Height(0)
        self.decided = 0
        """Windows of which something could be said."""

    def _window(self, number: int, kind: str) -> _Window:
        return self._windows.setdefault((number, kind), _Window())

    def _life(self, peer: PeerId) -> int:
        return self._lives.get(peer, 0)

    def on_start(self, peer: PeerId) -> None:
        self._lives[peer] = self._life(peer) + 1

    def on_receive(self, peer: PeerId, message: object) -> None:
        if not isinstance(message, Parsed) or message.slot not in CONTRIBUTIONS:
            return
        if (message.body, message.signature) not in self._genuine:
            return
        number, current = message.statement.round, self._round_of(peer)
        if current <= number <= current + 1:
            reached = self._window(number, message.slot).reached
            reached.setdefault(message.statement.author, {})[peer] = self._life(peer)

    def on_message(self, peer: PeerId, message: object) -> None:
        if not isinstance(message, Parsed) or message.statement.author != peer:
            return
        said = message.statement
        if message.slot in CONTRIBUTIONS:
            self._genuine.add((message.body, message.signature))
            self._window(said.round, message.slot).reached.setdefault(peer, {})[peer] = 0
        elif isinstance(said, Closing):
            window = self._window(said.round, said.window)
            for author in self._honest:
                life = 0 if author == peer else self._life(peer)
                if window.reached.get(author, {}).get(peer) != life:
                    window.blind.setdefault(author, set()).add(peer)

    def on_block(self, peer: PeerId, finalized: FinalizedBlock) -> None:
        height = finalized.block.height
        if height != self._read + 1:
            return
        self._read = height
        for message in statements_in(finalized):
            said = message.statement
            if message.slot in CONTRIBUTIONS:
                window = self._window(said.round, message.slot)
                window.on_ledger.setdefault(said.author, height)
            elif isinstance(said, Closing):
                window = self._window(said.round, said.window)
                window.closings.setdefault(said.author, (height, said))

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        if not isinstance(effect, BlockDone):
            return
        for event in effect.events:
            if isinstance(event, events.CommitmentsClosed):
                self._committed.setdefault(event.round, set(event.authors))
                self._judge(event.round, "commit", effect.height, set(event.authors))
            elif isinstance(event, events.Convicted):
                self._convicts.add(event.peer)
            elif isinstance(event, events.OpeningsClosed):
                authors = {item.author for item in event.opened}
                self._judge(event.round, "open", effect.height, authors)
            elif isinstance(event, events.RoundVoid):
                kind = "open" if event.round in self._committed else "commit"
                self._judge(event.round, kind, effect.height, None)

    def _judge(self, number: int, kind: str, height: Height, authors: set[str] | None) -> None:
        """``authors``: the set; None where the round is void: then what the ledger holds."""
        window = self._window(number, kind)
        if window.is_judged:
            return
        window.is_judged = True
        here = {author for author, at in window.on_ledger.items() if at <= height}
        closings = [closing for at, closing in window.closings.values() if at <= height]
        closed = {closing.author for closing in closings if self._counts(closing, here)}
        seats = self._seats(number)
        if power(seats, closed) < quorum(seats):
            return
        self.decided += 1
        candidates = self._honest if kind == "commit" else self._committed[number] & self._honest
        for author in sorted(candidates - (here if authors is None else authors)):
            known = set(window.reached.get(author, ())) - window.blind.get(author, set())
            if power(seats, known) >= self._need(seats):
                self.violations.append(f"{author}'s {kind} of round {number} came in time, is lost")

    def _counts(self, closing: Closing, here: set[str]) -> bool:
        seats = self._seats(closing.round)
        listed = seats_in(closing.authors, len(seats))
        there = here | self._convicts
        return listed is not None and all(seats[index].name in there for index in listed)

    def _need(self, seats: Sequence[Seat]) -> int:
        """Power of honest validators that more than miss in any quorum."""
        honest = power(seats, self._honest)
        return honest - (quorum(seats) - (power(seats) - honest)) + 1
