"""Between a trainer and its node: two processes of one peer that share memory.

Small headers travel over a stream socket; tensors and payloads lie in anonymous shared memory
whose descriptor travels with the header, so nothing large is copied through a pipe. Both ends
belong to one owner, but the decoder is the bounded one all the same.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from io import BufferedReader
from typing import Annotated

import msgspec

from torchbft.primitives import wire
from torchbft.primitives.errors import ConfigError, DecodeError, HaltError, StorageError

MAX_HEADER_BYTES = 64 * 1024
"""Names of 64 members and a reason; everything larger is in shared memory."""
MAX_BLOBS = 2
_LENGTH = struct.Struct("!II")

Text = Annotated[str, msgspec.Meta(max_length=2000)]


class Hello(wire.Wire, frozen=True, tag="hello"):
    """Trainer to node. Blob: its own initial ``AgreedState``."""

    root: wire.Bytes32


class Submit(wire.Wire, frozen=True, tag="submit"):
    """Trainer to node. Blob: the payload."""

    round: wire.Count
    trace_root: wire.Bytes32
    local_root: wire.Bytes32
    seconds: float


class Evaluation(wire.Wire, frozen=True, tag="evaluation"):
    """Trainer to node: measured on the agreed model."""

    round: wire.Count
    loss: float
    accuracy: float | None
    train_loss: float | None
    seconds: float


class Leave(wire.Wire, frozen=True, tag="leave"):
    """Trainer to node: shut down cleanly."""


class Begin(wire.Wire, frozen=True, tag="begin"):
    """Node to trainer. Blob: the agreed state to go on from."""

    round: wire.Count


class Open(wire.Wire, frozen=True, tag="open"):
    """Node to trainer: train this round. Blobs: the agreed state, empty if it is that of the
    ``Close`` before; positions (int64) if assigned."""

    round: wire.Count
    assigned: bool
    peers: tuple[wire.Name, ...]


class Close(wire.Wire, frozen=True, tag="close"):
    """Node to trainer: how the round ended. Blob: the agreed state after it."""

    round: wire.Count
    accepted: bool
    void: bool
    reason: Text


class Over(wire.Wire, frozen=True, tag="over"):
    """Node to trainer: the run is over. Blob: the agreed state."""

    status: Text
    reason: Text
    hint: Text


Message = Hello | Submit | Evaluation | Leave | Begin | Open | Close | Over


MAX_WORDS = 2000
"""Characters of a reason or hint, as ``Text`` bounds them."""


def refusal(error: BaseException) -> Over:
    """The end of a run that could not be entered, for the trainer to raise again."""
    kinds = {ConfigError: "refused", StorageError: "storage"}
    status = next((name for kind, name in kinds.items() if isinstance(error, kind)), "halted")
    return Over(status, str(error)[:MAX_WORDS], str(getattr(error, "hint", ""))[:MAX_WORDS])


class Blob:
    """A read-only view of shared memory; ``close`` when done with it. Takes the descriptor over;
    raises OSError if it is none of a memory or a file."""

    def __init__(self, descriptor: int) -> None:
        try:
            size = os.fstat(descriptor).st_size
            self._map = mmap.mmap(descriptor, size, prot=mmap.PROT_READ) if size else None
        finally:
            os.close(descriptor)
        self.view = memoryview(self._map) if self._map is not None else memoryview(b"")

    def close(self) -> None:
        self.view.release()
        if self._map is not None:
            self._map.close()


@dataclass(frozen=True, slots=True)
class Delivery:
    """One received message and its shared memory."""

    message: Message
    blobs: tuple[Blob, ...]

    def take(self, index: int = 0) -> bytes:
        """Copy a blob out and unmap it."""
        if index >= len(self.blobs):
            raise DecodeError("the message lacks its shared memory", where="trainer link")
        data = bytes(self.blobs[index].view)
        self.blobs[index].close()
        return data


def _shared(data: bytes | memoryview | BufferedReader) -> int:
    if isinstance(data, BufferedReader):
        return os.dup(data.fileno())
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("torchbft", os.MFD_CLOEXEC)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    view = memoryview(data).cast("B")
    while view.nbytes:
        view = view[os.write(descriptor, view) :]
    return descriptor


def _mapped(descriptors: Sequence[int]) -> tuple[Blob, ...]:
    blobs: list[Blob] = []
    try:
        blobs += map(Blob, descriptors)
    except OSError:
        for blob in blobs:
            blob.close()
        for descriptor in descriptors[len(blobs) + 1 :]:
            os.close(descriptor)
        raise DecodeError("what came with it is no memory", where="trainer link") from None
    return tuple(blobs)


class Endpoint:
    """One end of the link, blocking. ``receive`` returns None once the other end is gone."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock

    def send(self, message: Message, *blobs: bytes | memoryview | BufferedReader) -> None:
        """Send a header and its blobs, an open file without a copy; raises HaltError if the
        other end is gone."""
        body = wire.encode(message)
        descriptors: list[int] = []
        try:
            descriptors += map(_shared, blobs)
            framed = _LENGTH.pack(len(body), len(blobs)) + body
            sent = socket.send_fds(self.socket, [framed], descriptors)
            if sent < len(framed):
                self.socket.sendall(framed[sent:])
        except OSError as error:
            raise HaltError(
                f"the other process of this peer is gone ({error.strerror})",
                where="trainer link",
                hint="its last lines in node.log say why",
            ) from None
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def receive(self) -> Delivery | None:
        """Wait for one message. None at end of stream; DecodeError breaks the link for good."""
        try:
            head, descriptors, _, _ = socket.recv_fds(self.socket, _LENGTH.size, MAX_BLOBS)
        except OSError:
            return None
        blobs = _mapped(descriptors)
        delivery = None
        try:
            delivery = self._delivery(head, blobs)
        finally:
            for blob in blobs if delivery is None else ():
                blob.close()
        return delivery

    def _delivery(self, head: bytes, blobs: tuple[Blob, ...]) -> Delivery | None:
        head += self._exactly(_LENGTH.size - len(head))
        if len(head) < _LENGTH.size:
            return None
        length, count = _LENGTH.unpack(head)
        if length > MAX_HEADER_BYTES or count != len(blobs):
            raise DecodeError("a header that breaks its bounds", where="trainer link")
        body = self._exactly(length)
        if len(body) < length:
            return None
        message: Message = wire.decode(body, Message, limit=MAX_HEADER_BYTES)  # type: ignore[arg-type]
        return Delivery(message, blobs)

    def _exactly(self, count: int) -> bytes:
        data = bytearray()
        while len(data) < count:
            try:
                piece = self.socket.recv(count - len(data))
            except OSError:
                break
            if not piece:
                break
            data += piece
        return bytes(data)

    def close(self) -> None:
        self.socket.close()


def endpoints() -> tuple[Endpoint, Endpoint]:
    """A connected pair, to be shared out between two processes."""
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    return Endpoint(left), Endpoint(right)
