"""What one peer saw itself and when: items of others, payloads, votes. Bounded; lost at a crash."""

from __future__ import annotations

from torchbft.protocols.round.interface import PayloadRefused, PayloadStored
from torchbft.protocols.round.messages import Parsed, Status
from torchbft.protocols.round.state import QUOTA, Accepted, LedgerState

MAX_HEARD = 4096
"""Items of others held in memory: 64 members × 2 rounds × 7 slots × 2, rounded up."""


class Sightings:
    """Times are the host's clock. Kinds are slots, and ``payload``."""

    def __init__(self) -> None:
        self._seen: dict[tuple[int, str, str], float] = {}
        self._heard: dict[tuple[int, str, str], tuple[bytes, ...]] = {}
        self._stored: set[tuple[int, str, bytes]] = set()
        self._refused: set[tuple[int, str, bytes]] = set()

    def note(self, number: int, kind: str, author: str, now: float) -> None:
        """The first time that something of this kind was seen counts."""
        self._seen.setdefault((number, kind, author), now)

    def note_ledger(self, state: LedgerState, now: float) -> None:
        for known in (state.previous, state.current):
            for slot in known.slots if known is not None else ():
                if known is not None:
                    self.note(known.number, slot.kind, slot.author, now)

    def note_item(self, parsed: Parsed, tx: bytes, now: float) -> None:
        """Hold an admissible item: it may have to be passed on."""
        place = (parsed.statement.round, parsed.slot, parsed.statement.author)
        self.note(*place, now)
        held = self._heard.get(place, ())
        if len(held) < QUOTA and tx not in held and len(self._heard) < MAX_HEARD:
            self._heard[place] = (*held, tx)

    def note_payload(self, event: PayloadStored | PayloadRefused, now: float) -> None:
        place = (event.round, event.author, event.payload_root)
        (self._stored if isinstance(event, PayloadStored) else self._refused).add(place)
        self.note(event.round, "payload", event.author, now)

    def when(self, number: int, kind: str, author: str) -> float | None:
        """When something of this kind by the author was seen first."""
        return self._seen.get((number, kind, author))

    def items(self, number: int, kind: str, author: str) -> tuple[bytes, ...]:
        return self._heard.get((number, kind, author), ())

    def arrivals(self, number: int, kind: str, since: float) -> list[float]:
        """Seconds from ``since`` of all that were seen of a kind."""
        found = [at for (r, k, _), at in self._seen.items() if r == number and k == kind]
        return [max(at - since, 0.0) for at in found]

    def silent(self, number: int, kind: str, expected: set[str]) -> list[str]:
        return sorted(name for name in expected if (number, kind, name) not in self._seen)

    def stored(self, number: int, item: Accepted) -> bool:
        return (number, item.author, item.payload_root) in self._stored

    def decided(self, number: int, item: Accepted) -> bool:
        refused = (number, item.author, item.payload_root) in self._refused
        return refused or self.stored(number, item)

    def status(self, number: int, item: Accepted | None) -> int:
        """What to attest of an opening."""
        if item is None:
            return Status.NONE
        if self.stored(number, item):
            return Status.HELD
        return Status.MALFORMED if self.decided(number, item) else Status.MISSING

    def forget(self, oldest: int) -> None:
        """Drop all of rounds before ``oldest``."""
        self._seen = {k: at for k, at in self._seen.items() if k[0] >= oldest}
        self._heard = {k: txs for k, txs in self._heard.items() if k[0] >= oldest}
        self._stored = {k for k in self._stored if k[0] >= oldest}
        self._refused = {k for k in self._refused if k[0] >= oldest}
