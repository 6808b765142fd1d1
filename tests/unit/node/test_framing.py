"""Frames: whole or not at all, bounded whatever they claim."""

from __future__ import annotations

import pytest

from torchbft.node.transports import control, messages
from torchbft.node.transports.control import Hello
from torchbft.node.transports.framing import HEAD, FrameDecoder, OversizedError, frame
from torchbft.node.transports.messages import Done, Offer, Refuse, Start, Want
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.wire import encode

LIMITS = {0: 4, 7: 1000}


def test_a_frame_is_kind_length_and_body() -> None:
    assert frame(7, b"abc") == b"\x07\x00\x00\x00\x03abc"
    assert FrameDecoder(LIMITS).feed(frame(7, b"abc") + frame(0)) == [(7, b"abc"), (0, b"")]


def test_frames_come_out_the_same_however_the_stream_is_cut() -> None:
    stream = frame(7, b"x" * 300) + frame(0, b"1234") + frame(7)
    expected = [(7, b"x" * 300), (0, b"1234"), (7, b"")]
    for cut in range(len(stream) + 1):
        decoder = FrameDecoder(LIMITS)
        assert decoder.feed(stream[:cut]) + decoder.feed(stream[cut:]) == expected
        assert decoder.unfinished() == 0
    decoder = FrameDecoder(LIMITS)
    assert [f for byte in stream for f in decoder.feed(bytes([byte]))] == expected


@pytest.mark.parametrize(
    ("head", "error"),
    [
        (HEAD.pack(0, 5), OversizedError),
        (HEAD.pack(7, 2**32 - 1), OversizedError),
        (HEAD.pack(1, 0), DecodeError),
        (HEAD.pack(255, 0), DecodeError),
    ],
)
def test_a_bad_head_is_refused_before_its_body(head: bytes, error: type[DecodeError]) -> None:
    with pytest.raises(error):
        FrameDecoder(LIMITS).feed(head)


def test_good_frames_before_a_bad_one_in_the_same_read_do_not_hide_it() -> None:
    with pytest.raises(OversizedError, match="5 bytes where at most 4"):
        FrameDecoder(LIMITS).feed(frame(7, b"good") + HEAD.pack(0, 5))


FROZEN = {
    "hello": (
        lambda: encode(Hello(1, bytes(32), bytes(16), "torchbft 0")),
        "9401c420" + "00" * 32 + "c410" + "00" * 16 + "aa746f7263686266742030",
    ),
    "offer": (lambda: encode(Offer(bytes(32), 300, 2)), "93c420" + "00" * 32 + "cd012c02"),
    "want": (lambda: encode(Want(bytes(32), 65536)), "92c420" + "00" * 32 + "ce00010000"),
    "start": (
        lambda: encode(Start(bytes(32), 1, 0, b"\xaa" * 32)),
        "94c420" + "00" * 32 + "0100c420" + "aa" * 32,
    ),
    "done": (lambda: encode(Done(bytes(32))), "91c420" + "00" * 32),
    "refuse": (lambda: encode(Refuse(bytes(32), "no")), "92c420" + "00" * 32 + "a26e6f"),
}


@pytest.mark.parametrize("name", FROZEN)
def test_what_is_said_between_peers_is_frozen(name: str) -> None:
    """Another encoding is another wire version: old and new peers would not understand another."""
    make, expected = FROZEN[name]
    assert make().hex() == expected


def test_the_kinds_of_frames_are_frozen() -> None:
    kinds = (control.HELLO, control.MESSAGE, control.PING, control.BYE)
    assert kinds == (0, 1, 2, 3)
    named = (messages.OFFER, messages.WANT, messages.START, messages.DATA, messages.DONE)
    assert (*named, messages.REFUSE) == (1, 2, 3, 4, 5, 6)
    assert (HEAD.format, HEAD.size) == (">BI", 5)
