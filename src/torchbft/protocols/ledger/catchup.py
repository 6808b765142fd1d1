"""Helping and being helped: finalized blocks for laggards, early messages, bounds on both."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence

from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.wire import MAX_CONTROL_BYTES
from torchbft.protocols.ledger.messages import BATCH_BLOCKS, BATCH_BYTES

HISTORY_BYTES = 16 * 1024 * 1024
"""Finalized blocks kept in memory for laggards; older ones come from the host's log."""

EARLY_MESSAGES = 16
"""Messages of the next height kept per sender: its proposal, votes and a few repetitions."""

SERVES_PER_SECOND = 16
"""Answers to one peer in a second: 32 MiB of blocks."""

ASK_SECONDS = 0.25
"""Least time between two requests that we make on hearing of greater heights."""


class History:
    """Encoded finalized blocks by height: the newest in memory, older ones in the log ``blocks``,
    which holds one record for each height."""

    def __init__(self, log: Sequence[bytes]) -> None:
        self._recent: OrderedDict[Height, bytes] = OrderedDict()
        self._bytes = 0
        self._log = log

    def append(self, height: Height, encoded: bytes) -> None:
        """Keep a block; the oldest ones make room."""
        self._recent[height] = encoded
        self._bytes += len(encoded)
        while self._bytes > HISTORY_BYTES and len(self._recent) > 1:
            self._bytes -= len(self._recent.popitem(last=False)[1])

    def get(self, height: Height) -> bytes | None:
        """The block of a height, if this peer still has it."""
        recent = self._recent.get(height)
        if recent is None and 0 < height <= len(self._log):
            return self._log[height - 1]
        return recent

    def batch(self, start: Height, end: Height) -> tuple[bytes, ...]:
        """Consecutive blocks from ``start``, before ``end``, within the bounds of one answer."""
        blocks: list[bytes] = []
        size = 0
        for height in range(start, min(end, start + BATCH_BLOCKS)):
            block = self.get(Height(height))
            if block is None or (blocks and size + len(block) > BATCH_BYTES):
                break
            blocks.append(block)
            size += len(block)
        return tuple(blocks)


class EarlyMessages:
    """Messages of the next height, bounded per sender, until this validator gets there."""

    def __init__(self) -> None:
        self._held: dict[PeerId, deque[bytes]] = {}

    def hold(self, sender: PeerId, message: bytes) -> None:
        """Keep a message; beyond the sender's bound it is dropped (the sender repeats it)."""
        held = self._held.setdefault(sender, deque())
        room = MAX_CONTROL_BYTES - sum(map(len, held))
        if len(held) < EARLY_MESSAGES and len(message) <= room and message not in held:
            held.append(message)

    def senders(self) -> list[PeerId]:
        """Who is known to be ahead."""
        return [sender for sender, held in self._held.items() if held]

    def release(self) -> list[tuple[PeerId, bytes]]:
        """All held messages, each sender's in order; forgets them."""
        held, self._held = self._held, {}
        return [(sender, message) for sender, queue in held.items() for message in queue]


class Limits:
    """Rates: how often one peer is answered, and how often this one asks."""

    def __init__(self) -> None:
        self._served: dict[PeerId, tuple[float, int]] = {}
        self._asked = -ASK_SECONDS

    def may_serve(self, peer: PeerId, now: float) -> bool:
        """Whether to answer this peer now; takes note if so."""
        since, count = self._served.get(peer, (now, 0))
        if now >= since + 1.0:
            since, count = now, 0
        self._served[peer] = since, count + 1
        return count < SERVES_PER_SECOND

    def may_ask(self, now: float) -> bool:
        """Whether to ask for blocks now; takes note if so."""
        if now < self._asked + ASK_SECONDS:
            return False
        self._asked = now
        return True
