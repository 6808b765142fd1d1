"""This peer's own signed statements: one per slot for ever, durable before sent, resent unchanged.

Restarts hand back the log ``statements``: own transactions, and items of others that an own closing
lists (an honest closing must come true, so its items may not be lost with this peer's memory).
"""

from __future__ import annotations

from collections.abc import Sequence

from torchbft.primitives.effects import Effect, Persist
from torchbft.primitives.errors import CorruptLogError, DecodeError
from torchbft.primitives.evidence import Evidence
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import KeyRing, SigningKey
from torchbft.protocols.round.admissible import seats_for
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.interface import Submit
from torchbft.protocols.round.messages import (
    EvidenceTx,
    Parsed,
    RootVote,
    Statement,
    parse,
    sign,
    slot_of,
)
from torchbft.protocols.round.state import LedgerState

LOG = "statements"

ROUNDS_KEPT = 3
"""Previous, current and next: nothing older is admissible."""


class Statements:
    """Signs, keeps and resends. Effects come back to be carried out in order."""

    def __init__(
        self,
        me: PeerId,
        keys: KeyRing,
        records: Sequence[bytes],
        application: Application,
        resend: float,
    ) -> None:
        self._me, self._keys, self._resend = me, keys, resend
        self._application = application
        self._ready: tuple[LedgerState, list[bytes]] | None = None
        self._own: dict[tuple[int, str], bytes] = {}
        self._relayed: dict[bytes, None] = {}
        self._sent: dict[bytes, float] = {}
        for index, record in enumerate(records):
            self._remember(_read(record, index), record)

    def _remember(self, parsed: Parsed, tx: bytes) -> None:
        statement = parsed.statement
        if statement.author == self._me:
            self._own.setdefault((statement.round, parsed.slot), tx)
        else:
            self._relayed[tx] = None

    def own(self, number: int, slot: str) -> bytes | None:
        """The transaction that this peer signed for a slot, if it did."""
        return self._own.get((number, slot))

    def statement(self, number: int, slot: str) -> Statement | None:
        tx = self.own(number, slot)
        return parse(tx).statement if tx is not None else None

    def accusing(self) -> list[Evidence]:
        """Evidence that this peer signed for and that may still be on its way to the ledger."""
        said = [parse(tx).statement for tx in self._own.values()]
        return [one.evidence for one in said if isinstance(one, EvidenceTx)]

    def has(self, statement: Statement) -> bool:
        """Whether something was signed for this statement's slot."""
        return (statement.round, slot_of(statement)) in self._own

    def make(self, statement: Statement) -> list[Effect]:
        """Sign with the key that the round's seats list, and persist. Nothing where the slot is
        taken (what was signed for it stands), or where this peer has no seat, or not its key."""
        place = (statement.round, slot_of(statement))
        key = self._key_for(statement.round)
        if place in self._own or key is None:
            return []
        tx = sign(statement, key)
        self._own[place], self._ready = tx, None
        return [Persist(LOG, tx)]

    def _key_for(self, number: int) -> SigningKey | None:
        seats = seats_for(self._application.state, number) or ()
        mine = next((seat.voting for seat in seats if seat.name == self._me), None)
        return self._keys.get(mine)

    def relay(self, tx: bytes) -> list[Effect]:
        """Take over another author's item, durably, to resend it like an own one."""
        if tx in self._relayed:
            return []
        self._relayed[tx], self._ready = None, None
        return [Persist(LOG, tx)]

    def due(self, now: float) -> tuple[list[Effect], float | None]:
        """Submissions due now, and when the next one is. Final or too late ones are left out."""
        effects: list[Effect] = []
        soonest: float | None = None
        for tx in self._pending():
            again = self._sent.get(tx, now)
            if again <= now:
                effects.append(Submit(tx))
                again = self._sent[tx] = now + self._resend
            soonest = again if soonest is None else min(soonest, again)
        return effects, soonest

    def _pending(self) -> list[bytes]:
        """What the committed state still takes; looked up once per state and new statement."""
        state = self._application.state
        if self._ready is None or self._ready[0] is not state:
            own = [tx for place, tx in self._own.items() if self._sendable(place, tx, state)]
            refusal = self._application.refusal
            fit = [tx for tx in (*self._relayed, *own) if refusal(tx) is None]
            self._ready = (state, fit)
        return self._ready[1]

    def _sendable(self, place: tuple[int, str], tx: bytes, state: LedgerState) -> bool:
        if isinstance(parse(tx).statement, RootVote):
            return False
        known = state.round_of(place[0])
        return place[1] != "open" or (known is not None and known.reached_open)

    def forget(self, current: int) -> None:
        """Drop from memory what no ledger takes any more; the log keeps it."""
        oldest = current + 2 - ROUNDS_KEPT
        self._own = {p: tx for p, tx in self._own.items() if p[0] >= oldest}
        self._relayed = {tx: None for tx in self._relayed if parse(tx).statement.round >= oldest}
        kept = {*self._relayed, *self._own.values()}
        self._sent = {tx: at for tx, at in self._sent.items() if tx in kept}
        self._ready = None

    def foreign(self) -> str | None:
        """A slot on the ledger that holds a statement of ours which our log does not: the log was
        lost, or this key signs elsewhere too."""
        state = self._application.state
        for known in (state.previous, state.current):
            if known is None or self._key_for(known.number) is None:
                continue
            for slot in known.slots:
                if slot.author != self._me:
                    continue
                tx = self._own.get((known.number, slot.kind))
                if tx is None or any(parse(tx).body != parse(x).body for x in slot.txs):
                    return f"{slot.kind} of round {known.number}"
        return None


def _read(record: bytes, index: int) -> Parsed:
    try:
        return parse(record)
    except DecodeError as error:
        raise CorruptLogError(error.what, where=f"log {LOG}", offset=index) from None
