"""Transactions that wait for a block: bounded, in order of arrival, each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from torchbft.primitives.abci import CODE_OK, Application
from torchbft.primitives.ids import PeerId
from torchbft.protocols.ledger.messages import MAX_TX_BYTES

MAX_PENDING_TXS = 4096
"""One full block; whatever does not fit is sent again by its author."""

MAX_PENDING_BYTES = 8 * 1024 * 1024
"""Eight full blocks."""

MAX_PENDING_OF_SENDER = 512
"""An eighth of the whole, so that one peer cannot crowd out the others of a swarm of eight."""


class Mempool:
    """Pending transactions of one validator. Not durable: authors send again (ROUND.md, 18)."""

    def __init__(self, application: Application) -> None:
        self._application = application
        self._pending: dict[bytes, PeerId | None] = {}
        self._of_sender: Counter[PeerId | None] = Counter()
        self._bytes = 0
        self.version = 0
        """Counts insertions: the same version holds nothing new."""

    def __len__(self) -> int:
        return len(self._pending)

    def pending(self) -> Sequence[bytes]:
        """All pending transactions, oldest first."""
        return tuple(self._pending)

    def add(self, tx: bytes, sender: PeerId | None) -> bool:
        """Insert a transaction that the application admits; whether it is new and was taken."""
        if tx in self._pending or not self._has_room(tx, sender):
            return False
        if self._application.check_tx(tx).code != CODE_OK:
            return False
        self._pending[tx] = sender
        self._of_sender[sender] += 1
        self._bytes += len(tx)
        self.version += 1
        return True

    def _has_room(self, tx: bytes, sender: PeerId | None) -> bool:
        return (
            0 < len(tx) <= MAX_TX_BYTES
            and len(self._pending) < MAX_PENDING_TXS
            and self._bytes + len(tx) <= MAX_PENDING_BYTES
            and (sender is None or self._of_sender[sender] < MAX_PENDING_OF_SENDER)
        )

    def remove(self, txs: Iterable[bytes]) -> None:
        """Drop transactions that a finalized block holds."""
        for tx in txs:
            if tx in self._pending:
                self._of_sender[self._pending.pop(tx)] -= 1
                self._bytes -= len(tx)

    def recheck(self) -> None:
        """Drop what the application no longer admits, after its state moved."""
        check = self._application.check_tx
        self.remove([tx for tx in self._pending if check(tx).code != CODE_OK])
