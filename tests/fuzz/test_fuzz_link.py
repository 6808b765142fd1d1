"""Any bytes and descriptors on the trainer link: a message, the end or DecodeError; none leaks."""

from __future__ import annotations

import gc
import os
import socket
import struct
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft.node.link import MAX_BLOBS, MAX_HEADER_BYTES, Delivery, Hello, Submit, endpoints
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.wire import encode

BODIES = [encode(Hello(bytes(32))), encode(Submit(0, bytes(32), bytes(32), 0.5))]
WORDS = st.integers(0, 2**32 - 1)
LIMIT = 20.0


@pytest.fixture(autouse=True, scope="module")
def _clean() -> None:
    """What earlier tests left open is closed now, and not while descriptors are counted."""
    gc.collect()


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def receive_all(data: bytes, memories: int) -> list[Delivery]:
    """What the other end makes of these bytes until the end or an error."""
    left, right = endpoints()
    right.socket.settimeout(LIMIT)
    found: list[Delivery] = []
    try:
        with tempfile.TemporaryFile() as file:
            file.write(b"memory")
            file.flush()
            if data:
                sent = socket.send_fds(left.socket, [data], [file.fileno()] * memories)
                left.socket.sendall(data[sent:])
        left.close()
        while (delivery := right.receive()) is not None:
            found.append(delivery)
    except DecodeError:
        pass
    finally:
        right.close()
    return found


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=400), st.integers(0, MAX_BLOBS + 2))
def test_random_bytes(data: bytes, memories: int) -> None:
    before = descriptors()
    for delivery in receive_all(data, memories):
        for blob in delivery.blobs:
            blob.close()
    assert descriptors() == before


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(BODIES), WORDS | st.integers(0, 200), WORDS | st.integers(0, 3), st.data())
def test_frames_with_every_number_changed(
    body: bytes, length: int, count: int, data: st.DataObject
) -> None:
    place = data.draw(st.integers(0, len(body) - 1))
    changed = body[:place] + bytes([data.draw(st.integers(0, 255))]) + body[place + 1 :]
    frame = struct.pack("!II", length, count) + changed
    before = descriptors()
    for delivery in receive_all(frame, data.draw(st.integers(0, MAX_BLOBS + 1))):
        assert len(encode(delivery.message)) <= MAX_HEADER_BYTES
        assert len(delivery.blobs) <= MAX_BLOBS
        for blob in delivery.blobs:
            blob.close()
    assert descriptors() == before


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(BODIES), st.integers(0, 120))
def test_a_frame_cut_at_any_byte_is_the_end(body: bytes, cut: int) -> None:
    frame = struct.pack("!II", len(body), 1) + body
    before = descriptors()
    found = receive_all(frame[:cut], 1)
    assert len(found) == (cut >= len(frame))
    for delivery in found:
        assert delivery.take() == b"memory"
    assert descriptors() == before
