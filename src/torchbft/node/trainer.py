"""The node's side of its trainer: which round it works on, and what it is told when.

A trainer is slower than the protocol: it may hand over a round that was decided long ago. It is
answered in the order in which it asks: ``Close`` for the round that it submitted, then ``Open`` for
the newest round to train.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from io import BufferedReader

import numpy as np

from torchbft.node.link import (
    MAX_WORDS,
    Begin,
    Close,
    Delivery,
    Endpoint,
    Message,
    Open,
    Over,
    refusal,
)
from torchbft.node.model import Saved
from torchbft.primitives.errors import DecodeError, HaltError

SAME = b""
"""In the place of a state that the trainer was told a message before."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a round ended for this peer's contribution."""

    accepted: bool
    void: bool
    reason: str


@dataclass(frozen=True, slots=True)
class Assigned:
    """A round to train: sample positions, or None with data of the peer's own."""

    round: int
    positions: Sequence[int] | None


class TrainerPort:
    """Reads the link on a thread of its own; everything else happens on the event loop."""

    def __init__(
        self,
        endpoint: Endpoint,
        loop: asyncio.AbstractEventLoop,
        on_message: Callable[[Delivery | None], None],
        peers: tuple[str, ...],
    ) -> None:
        self._endpoint, self._loop, self._on_message = endpoint, loop, on_message
        self._peers = peers
        self._working: int | None = None
        self._submitted = False
        self._next: Assigned | None = None
        self._over: Over | None = None
        self._told_over = False
        self._gone = False
        self._begun = False
        threading.Thread(target=self._read, daemon=True, name="trainer-link").start()

    def _read(self) -> None:
        while True:
            try:
                delivery = self._endpoint.receive()
            except DecodeError:
                delivery = None
            try:
                self._loop.call_soon_threadsafe(self._on_message, delivery)
            except RuntimeError:  # the loop has ended
                return
            if delivery is None:
                return

    @property
    def attached(self) -> bool:
        return self._begun and not self._gone

    @property
    def idle(self) -> bool:
        """Whether nothing is left to tell or to receive."""
        return self._gone or self._told_over

    def begin(self, ended: Callable[[int], Ended], state: Saved) -> None:
        """Answer the trainer's ``Hello``; a round may wait for it already, as after a restart."""
        self._begun = True
        self._send(Begin(state.state.round), state.file)
        self._go_on(ended, state)

    def refuse(self, error: BaseException) -> None:
        """Answer ``Hello`` with the reason why there is no run."""
        self._send(refusal(error))

    def assign(self, assigned: Assigned, ended: Callable[[int], Ended], state: Saved) -> None:
        """A round to train from ``state``; closes the one before, if the trainer waits for it."""
        self._next = assigned
        self._go_on(ended, state)

    def submitted(self, round_: int, ended: Callable[[int], Ended], state: Saved) -> None:
        """The trainer handed over a round and waits for its end; it may have ended already."""
        self._submitted = True
        self._go_on(ended, state)

    def finish(self, status: str, reason: str, ended: Callable[[int], Ended], state: Saved) -> None:
        """No further round. A trainer is told at once, in the middle of a round as well, unless
        the run finished without it: then it is answered for its own round first."""
        self._over = Over(status, reason[:MAX_WORDS], "")
        self._next = None
        if status != "finished" and not self._submitted:
            self._working = None
        self._go_on(ended, state)

    def gone(self) -> None:
        self._gone = True

    def _go_on(self, ended: Callable[[int], Ended], state: Saved) -> None:
        if not self.attached or self._told_over:
            return
        held: bytes | BufferedReader = state.file
        if self._working is not None and self._submitted and self._is_past(self._working):
            end = ended(self._working)
            closed = Close(self._working, end.accepted, end.void, end.reason[:MAX_WORDS])
            self._send(closed, held)
            self._working, self._submitted, held = None, False, SAME
        if self._working is not None:
            return
        if self._over is not None:
            self._told_over = True
            self._send(self._over, held)
        elif self._next is not None:
            self._open(self._next, held)
            self._next = None

    def _is_past(self, round_: int) -> bool:
        return self._over is not None or (self._next is not None and self._next.round > round_)

    def _open(self, assigned: Assigned, held: bytes | BufferedReader) -> None:
        positions = np.asarray(assigned.positions or (), dtype="<i8").tobytes()
        opened = Open(assigned.round, assigned.positions is not None, self._peers)
        self._working, self._submitted = assigned.round, False
        self._send(opened, held, positions)

    def _send(self, message: Message, *blobs: bytes | BufferedReader) -> None:
        try:
            self._endpoint.send(message, *blobs)
        except HaltError:
            self._gone = True

    def close(self) -> None:
        self._endpoint.close()
