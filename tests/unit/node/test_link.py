"""The link between a node and its trainer: framing, shared memory, and no descriptor left open."""

from __future__ import annotations

import gc
import os
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchbft.node import link
from torchbft.node.link import (
    MAX_HEADER_BYTES,
    Begin,
    Close,
    Endpoint,
    Evaluation,
    Hello,
    Leave,
    Message,
    Open,
    Over,
    Submit,
    endpoints,
    refusal,
)
from torchbft.primitives.errors import (
    ConfigError,
    CorruptLogError,
    DecodeError,
    HaltError,
    StorageError,
)
from torchbft.primitives.wire import encode

LIMIT = 20.0
ROOT = bytes(range(32))
MESSAGES = (
    (Hello(ROOT), (b"state",)),
    (Submit(3, ROOT, ROOT, 0.5), (b"payload",)),
    (Evaluation(3, 0.5, None, 0.25, 0.1), ()),
    (Leave(), ()),
    (Begin(0), (b"state",)),
    (Open(1, True, ("peer-a", "peer-b")), (b"state", b"positions")),
    (Close(1, False, True, "too few"), (b"state",)),
    (Over("finished", "", ""), (b"state",)),
)


@pytest.fixture(autouse=True, scope="module")
def _clean() -> None:
    """What earlier tests left open is closed now, and not while descriptors are counted."""
    gc.collect()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def pair() -> Iterator[tuple[Endpoint, Endpoint]]:
    left, right = endpoints()
    left.socket.settimeout(LIMIT)
    right.socket.settimeout(LIMIT)
    yield left, right
    left.close()
    right.close()


@pytest.mark.parametrize(("message", "blobs"), MESSAGES, ids=lambda value: type(value).__name__)
def test_every_message_arrives_whole_with_its_memory_and_leaves_nothing_open(
    pair: tuple[Endpoint, Endpoint], message: Message, blobs: tuple[bytes, ...]
) -> None:
    left, right = pair
    before = descriptors()
    left.send(message, *blobs)
    delivery = right.receive()
    assert delivery is not None
    assert delivery.message == message
    assert tuple(delivery.take(index) for index in range(len(blobs))) == blobs
    assert descriptors() == before


def test_large_and_empty_memory_is_shared_and_not_sent(pair: tuple[Endpoint, Endpoint]) -> None:
    left, right = pair
    large = os.urandom(1 << 20) * 8
    left.send(Open(0, True, ()), large, b"")  # far beyond the socket's buffer: nobody reads yet
    delivery = right.receive()
    assert delivery is not None
    assert delivery.blobs[0].view == large
    assert delivery.take(1) == b""
    delivery.blobs[0].close()


def test_taking_a_blob_that_did_not_come_is_a_decode_error(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    left, right = pair
    left.send(Submit(0, ROOT, ROOT, 0.5))
    delivery = right.receive()
    assert delivery is not None
    with pytest.raises(DecodeError, match="lacks its shared memory"):
        delivery.take()


def test_messages_keep_their_order_and_borders(pair: tuple[Endpoint, Endpoint]) -> None:
    left, right = pair
    for number in range(50):
        left.send(Begin(number), number.to_bytes(4, "big"))
    for number in range(50):
        delivery = right.receive()
        assert delivery is not None
        assert (delivery.message, delivery.take()) == (Begin(number), number.to_bytes(4, "big"))


def test_a_header_larger_than_the_buffer_is_sent_in_pieces(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    left, right = pair
    left.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)
    names = tuple(f"peer-{number:027d}" for number in range(1900))
    message = Open(0, False, names)
    assert 50_000 < len(encode(message)) < MAX_HEADER_BYTES
    sender = threading.Thread(target=left.send, args=(message, b"state", b""))
    sender.start()
    delivery = right.receive()
    sender.join(LIMIT)
    assert delivery is not None
    assert delivery.message == message
    assert delivery.take() == b"state"


def test_the_end_of_the_other_side_is_none(pair: tuple[Endpoint, Endpoint]) -> None:
    left, right = pair
    left.close()
    assert right.receive() is None
    assert right.receive() is None


@pytest.mark.parametrize("cut", [1, 7, 8, 9, 20])
def test_a_message_that_is_cut_off_is_the_end_and_closes_what_came_with_it(
    pair: tuple[Endpoint, Endpoint], cut: int, tmp_path: Path
) -> None:
    left, right = pair
    before = descriptors()
    body = encode(Hello(ROOT))
    framed = struct.pack("!II", len(body), 1) + body
    with (tmp_path / "memory").open("wb+") as file:
        file.write(b"state")
        file.flush()
        socket.send_fds(left.socket, [framed[:cut]], [file.fileno()])
    left.socket.shutdown(socket.SHUT_WR)
    assert right.receive() is None
    assert descriptors() == before


@pytest.mark.parametrize(
    ("length", "count"), [(MAX_HEADER_BYTES + 1, 0), (2**32 - 1, 0), (4, 1), (4, 2**31)]
)
def test_a_header_beyond_its_bounds_is_refused_before_anything_is_read(
    pair: tuple[Endpoint, Endpoint], length: int, count: int
) -> None:
    left, right = pair
    left.socket.sendall(struct.pack("!II", length, count) + b"body")
    with pytest.raises(DecodeError, match="breaks its bounds"):
        right.receive()


def test_more_memory_than_a_message_may_have_is_refused_and_closed(
    pair: tuple[Endpoint, Endpoint], tmp_path: Path
) -> None:
    left, right = pair
    before = descriptors()
    body = encode(Hello(ROOT))
    with (tmp_path / "memory").open("wb+") as file:
        file.write(b"x")
        file.flush()
        framed = struct.pack("!II", len(body), 3) + body
        socket.send_fds(left.socket, [framed], [file.fileno()] * 3)
    with pytest.raises(DecodeError):
        right.receive()
    assert descriptors() == before


def test_a_descriptor_that_is_no_memory_is_refused_and_closed(
    pair: tuple[Endpoint, Endpoint], tmp_path: Path
) -> None:
    left, right = pair
    before = descriptors()
    folder = os.open(tmp_path, os.O_RDONLY)
    body = encode(Hello(ROOT))
    socket.send_fds(left.socket, [struct.pack("!II", len(body), 2) + body], [folder, folder])
    os.close(folder)
    with pytest.raises(DecodeError, match="no memory"):
        right.receive()
    assert descriptors() == before


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x92\xa5hello", b"\x92\xa3bad\x00", b"x" * 100])
def test_a_body_that_is_no_message_is_a_decode_error(
    pair: tuple[Endpoint, Endpoint], body: bytes
) -> None:
    left, right = pair
    left.socket.sendall(struct.pack("!II", len(body), 0) + body)
    with pytest.raises(DecodeError):
        right.receive()


def test_sending_to_a_process_that_is_gone_says_so_and_closes_the_memory(
    pair: tuple[Endpoint, Endpoint],
) -> None:
    left, right = pair
    right.close()
    before = descriptors()
    with pytest.raises(HaltError, match="other process of this peer is gone") as gone:
        left.send(Hello(ROOT), b"state", b"more")
    assert "node.log" in gone.value.hint
    assert descriptors() == before


def test_a_disk_that_refuses_the_memory_leaves_no_descriptor(
    pair: tuple[Endpoint, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    left, _ = pair
    before = descriptors()
    shared = link._shared

    def second_fails(data: bytes | memoryview) -> int:
        if data == b"more":
            raise OSError(28, "No space left on device")
        return shared(data)

    monkeypatch.setattr(link, "_shared", second_fails)
    with pytest.raises(HaltError, match="No space left"):
        left.send(Hello(ROOT), b"state", b"more")
    assert descriptors() == before


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ConfigError("a", where="b", hint="c"), "refused"),
        (StorageError("a", where="b", hint="c"), "storage"),
        (CorruptLogError("a", where="b", offset=7), "storage"),
        (HaltError("a", where="b", hint="c"), "halted"),
        (ValueError("a"), "halted"),
    ],
)
def test_what_keeps_a_node_from_starting_fits_into_one_message(
    error: Exception, status: str
) -> None:
    over = refusal(error)
    assert (over.status, over.reason) == (status, str(error))
    assert over.hint == getattr(error, "hint", "")
    long = refusal(ConfigError("x" * 10_000, hint="y" * 10_000))
    assert len(encode(long)) < MAX_HEADER_BYTES
