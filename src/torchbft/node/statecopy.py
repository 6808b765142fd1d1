"""Copies of the agreed state between peers, for those that are behind or diverged.

Who needs a state asks holders of its signed root; a holder stores the state's bytes as a payload
and answers with their root and length; the data plane brings them. The copy is adopted only if its
own root is the signed one, so a lying holder costs time and nothing else.
"""

from __future__ import annotations

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


@dataclass(slots=True)
class _Want:
    round: int
    root: bytes
    holders: set[PeerId]
    payloads: set[bytes]


class StateCopies:
    """Asks, answers and adopts. Works on the tensor thread where it touches states."""

    def __init__(self, keeper: ModelKeeper, store: PayloadStore) -> None:
        self._keeper, self._store = keeper, store
        self._want: _Want | None = None

    def want(
        self, round_: int, root: bytes, holders: Sequence[PeerId]
    ) -> list[tuple[PeerId, bytes]]:
        """Begin to look for a state; the messages to send, one per holder."""
        self._want = _Want(round_, root, set(holders), set())
        asked = encode(StateWanted(max(round_, 0), root))
        return [(holder, asked) for holder in holders]

    def expects(self, payload_root: bytes) -> bool:
        """Whether a stored payload is the copy that is looked for."""
        return self._want is not None and payload_root in self._want.payloads

    def received(self, sender: PeerId, message: bytes) -> bytes | StateOffered | None:
        """Bytes to answer with, an offer to fetch, or nothing."""
        try:
            value = decode(message, cast("type[StateWanted]", StateWanted | StateOffered))
        except DecodeError:
            return None
        if isinstance(value, StateWanted):
            return self._answer(value)
        offered, want = cast(StateOffered, value), self._want
        if want is None or sender not in want.holders or offered.root != want.root:
            return None
        want.payloads.add(offered.payload_root)
        return offered

    def _answer(self, wanted: StateWanted) -> bytes | None:
        state = self._keeper.by_root(wanted.root)
        if state is None:
            return None
        data = state.encode()
        payload_root = self._store.put(data, Round(wanted.round))
        return encode(StateOffered(wanted.round, wanted.root, payload_root, len(data)))

    def adopt(self, payload_root: bytes) -> bool:
        """Take a fetched copy if its root is the signed one."""
        want = self._want
        if want is None:
            return False
        try:
            state = AgreedState.decode(self._store.get(payload_root))
        except (DecodeError, StorageError):
            return False
        if state.root() != want.root:
            return False
        self._keeper.adopt(state)
        self._want = None
        return True
