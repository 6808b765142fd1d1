"""Copies of the agreed state between peers, for those that are behind or diverged.

Who needs a state asks holders of its signed root; a holder stores the state's bytes as a payload
and answers with their root and length; the data plane brings them. The copy is adopted only if its
own root is the signed one, so a lying holder costs time and nothing else. Messages may be lost and
holders die, so who needs a state asks all of them, and again until it has it (case C27).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

from torchbft.node.model import ModelKeeper
from torchbft.node.storage.payloads import PayloadStore
from torchbft.primitives.errors import DecodeError, StorageError
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.wire import Bytes32, Count, Wire, decode, encode
from torchbft.tensors.state import AgreedState


class StateWanted(Wire, frozen=True, tag="state.wanted"):
    """Who has the agreed state of this root?"""

    round: Count
    root: Bytes32


class StateOffered(Wire, frozen=True, tag="state.offered"):
    """Its bytes are held as this payload."""

    round: Count
    root: Bytes32
    payload_root: Bytes32
    length: Count


RETRY_SECONDS = 3.0
"""Until the next question, if no copy came: a restarted peer is connected well within this."""
ANSWERS_KEPT = 3
"""Roots whose payload is remembered: the states that a keeper can give out."""
GROWTH, HEADER_SLACK = 2, 64 * 1024
"""A copy larger than this many times the own state, and so many bytes, is no state of this model:
only counters and the rule's history differ in size."""


@dataclass(slots=True)
class _Want:
    round: Round
    root: bytes
    holders: tuple[PeerId, ...]
    payloads: dict[PeerId, bytes]
    """The newest offer of each holder."""


class StateCopies:
    """Asks, answers and adopts. Works on the tensor thread where it touches states."""

    def __init__(self, keeper: ModelKeeper, store: PayloadStore) -> None:
        self._keeper, self._store = keeper, store
        self._want: _Want | None = None
        self._answers: dict[bytes, tuple[bytes, int]] = {}

    def want(
        self, round_: int, root: bytes, holders: Sequence[PeerId]
    ) -> list[tuple[PeerId, bytes]]:
        """Begin to look for a state; the messages to send, one per holder."""
        self._want = _Want(Round(max(round_, 0)), root, tuple(holders), {})
        return self.ask()

    def ask(self) -> list[tuple[PeerId, bytes]]:
        """The messages to send, again after RETRY_SECONDS; empty once nothing is wanted."""
        want = self._want
        if want is None:
            return []
        asked = encode(StateWanted(want.round, want.root))
        return [(holder, asked) for holder in want.holders]

    def expects(self, payload_root: bytes) -> bool:
        """Whether a stored payload is the copy that is looked for."""
        return self._want is not None and payload_root in self._want.payloads.values()

    def received(self, sender: PeerId, message: bytes) -> bytes | StateOffered | None:
        """Bytes to answer with, an offer to fetch, or nothing."""
        try:
            value = decode(message, cast("type[StateWanted]", StateWanted | StateOffered))
        except DecodeError:
            return None
        if isinstance(value, StateWanted):
            return self._answer(value)
        offered, want = cast(StateOffered, value), self._want
        if want is None or sender not in want.holders:
            return None
        if (offered.round, offered.root) != (want.round, want.root):
            return None
        if offered.length > self._longest():
            return None
        want.payloads[sender] = offered.payload_root
        return offered

    def _longest(self) -> int:
        if not self._keeper.ready:
            return 0
        return os.fstat(self._keeper.saved().file.fileno()).st_size * GROWTH + HEADER_SLACK

    def _answer(self, wanted: StateWanted) -> bytes | None:
        known = self._answers.get(wanted.root)
        if known is None or not self._store.has(known[0]):
            state = self._keeper.by_root(wanted.root)
            if state is None:
                return None
            data = state.encode()
            known = (self._store.put(data, Round(state.round), passing=True), len(data))
            self._answers[wanted.root] = known
            if len(self._answers) > ANSWERS_KEPT:
                del self._answers[next(iter(self._answers))]
        return encode(StateOffered(wanted.round, wanted.root, *known))

    def adopt(self, payload_root: bytes) -> str | None:
        """Take a fetched copy if its root is the signed one; else says why not. A state that the
        keeper has left behind by itself is no longer wanted."""
        want = self._want
        if want is None:
            return "no copy is wanted any more"
        try:
            state = AgreedState.decode(self._store.get(payload_root))
        except (DecodeError, StorageError) as error:
            return error.what
        if state.root() != want.root:
            return "it does not have the signed root"
        if self._want is want:
            self._want = None
        if self._keeper.state is not None and self._keeper.state.round > state.round:
            return "this peer has computed a later state meanwhile"
        self._keeper.adopt(state)
        return None
