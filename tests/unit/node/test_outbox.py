"""The bounded queue to one peer: what fits leaves in order, the rest is dropped and counted."""

from __future__ import annotations

import pytest

from torchbft.node.transports import control
from torchbft.node.transports.control import QUEUE_SECONDS, WRITE_BYTES, _Outbox


def drain(outbox: _Outbox, now: float = 0.0) -> list[bytes]:
    batches = []
    while batch := outbox.batch(now):
        batches.append(batch)
    return batches


def test_small_messages_leave_together_and_in_order() -> None:
    outbox = _Outbox()
    for number in range(100):
        outbox.put(b"%03d" % number, now=0.0)
    assert drain(outbox) == [b"".join(b"%03d" % number for number in range(100))]
    assert drain(outbox) == []


def test_a_batch_is_bounded_but_one_large_message_always_leaves() -> None:
    outbox = _Outbox()
    large = bytes(WRITE_BYTES + 1)
    for data in (b"a", large, b"b", bytes(WRITE_BYTES), b"c"):
        outbox.put(data, now=0.0)
    assert [len(batch) for batch in drain(outbox)] == [1, len(large), 1, WRITE_BYTES, 1]


def test_a_full_queue_drops_the_newest_and_counts_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "QUEUE_MESSAGES", 3)
    monkeypatch.setattr(control, "QUEUE_BYTES", 10)
    outbox = _Outbox()
    for data in (b"1234", b"5678", b"too large", b"90", b"one too many"):
        outbox.put(data, now=0.0)
    assert outbox.dropped == 2
    assert drain(outbox) == [b"1234567890"]
    outbox.put(b"room again", now=0.0)
    assert drain(outbox) == [b"room again"]


def test_stale_messages_make_room_and_never_leave() -> None:
    """A peer that was away for long gets what is fresh, not a backlog that nobody needs."""
    outbox = _Outbox()
    outbox.put(b"old", now=0.0)
    outbox.put(b"fresh", now=QUEUE_SECONDS)
    assert drain(outbox, now=QUEUE_SECONDS + 1) == [b"fresh"]
    assert outbox.dropped == 1
    outbox.put(b"older", now=100.0)
    outbox.put(b"newer", now=200.0)
    assert outbox.dropped == 2
    assert drain(outbox, now=200.0) == [b"newer"]
