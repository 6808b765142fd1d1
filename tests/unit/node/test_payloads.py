"""The payload store: content-addressed, durable before visible, kept by round."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from torchbft.node.storage import durable, payloads
from torchbft.node.storage.payloads import PayloadStore
from torchbft.primitives.digests import CHUNK_BYTES, chunk_digests, payload_root
from torchbft.primitives.errors import StorageError
from torchbft.primitives.ids import Round

SIZES = (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, payloads.READ_BYTES + 5)


def payload(size: int) -> bytes:
    return (b"0123456789abcdef" * (size // 16 + 1))[:size]


@pytest.mark.parametrize("size", SIZES)
def test_what_was_put_is_found_by_its_root_also_after_reopening(tmp_path: Path, size: int) -> None:
    data = payload(size)
    root = PayloadStore(tmp_path).put(data, Round(3))
    assert root == payload_root(data)
    store = PayloadStore(tmp_path)
    assert store.has(root)
    assert store.get(root) == store.path(root).read_bytes() == data
    assert (store.length(root), store.roots()) == (size, {root: 3})
    assert store.chunks(root) == chunk_digests(data) == store.chunks(root)


def test_each_flipped_byte_of_a_payload_is_found(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    root = store.put(payload(CHUNK_BYTES + 40), Round(1))
    path = store.path(root)
    whole = path.read_bytes()
    for place in (0, 1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 39):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(StorageError, match="do not match") as failure:
            store.get(root)
        assert str(path) in str(failure.value)
        with pytest.raises(StorageError, match="do not match"):
            PayloadStore(tmp_path).chunks(root)


def test_an_unfinished_payload_is_invisible_and_gone_after_a_restart(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    data = payload(CHUNK_BYTES * 2)
    root = payload_root(data)
    incoming = store.receive(root, len(data))
    incoming.write(0, data[:CHUNK_BYTES])
    assert not store.has(root)
    again = PayloadStore(tmp_path)
    assert not again.has(root)
    assert list((tmp_path / payloads.INCOMING).iterdir()) == []


def test_pieces_in_any_order_become_the_payload(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    data = payload(CHUNK_BYTES * 2 + 7)
    root = payload_root(data)
    incoming = store.receive(root, len(data))
    incoming.write(CHUNK_BYTES, data[CHUNK_BYTES:])
    incoming.write(0, data[:CHUNK_BYTES])
    incoming.finish(Round(2), chunk_digests(data))
    assert store.get(root) == data


def test_old_rounds_are_let_go_of_and_the_files_of_contributions_stay(tmp_path: Path) -> None:
    """A verifier needs them after the run; copies of the state are of no use to it."""
    store = PayloadStore(tmp_path)
    roots = [store.put(bytes([r]) * 100, Round(r)) for r in range(6)]
    shared = store.put(bytes([0]) * 100, Round(5))
    assert shared == roots[0], "the same bytes again: kept for the later round"
    copies = [store.put(bytes([r]) * 101, Round(r), passing=True) for r in (3, 4)]
    paths = [store.path(root) for root in (*roots, *copies)]
    store.release(Round(4))
    assert [store.has(root) for root in roots] == [True, False, False, False, True, True]
    assert [store.has(root) for root in copies] == [False, True]
    assert store.known_chunks(roots[1]) is None
    assert [path.exists() for path in paths] == [True] * 6 + [False, True]
    again = PayloadStore(tmp_path)
    assert set(again.roots()) == set(roots), "copies do not outlive the process"
    assert not paths[-1].exists()


def test_keeping_a_payload_for_an_earlier_round_does_not_shorten_its_life(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    root = store.put(b"x", Round(7))
    assert store.keep(root, Round(2))
    assert store.roots() == {root: 7}
    assert not store.keep(bytes(32), Round(2))


def test_a_full_disk_is_one_clear_line_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = PayloadStore(tmp_path)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable.os, "pwrite", full)
    with pytest.raises(StorageError, match="the disk is full"):
        store.put(b"payload", Round(1))
    assert store.roots() == {}
    assert list((tmp_path / payloads.INCOMING).iterdir()) == []


def test_an_unknown_root_and_a_vanished_file_are_named(tmp_path: Path) -> None:
    store = PayloadStore(tmp_path)
    with pytest.raises(StorageError, match="not held"):
        store.get(bytes(32))
    root = store.put(b"payload", Round(1))
    store.path(root).unlink()
    with pytest.raises(StorageError, match="reading a payload"):
        store.get(root)


def test_digest_lists_in_memory_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(payloads, "DIGEST_LISTS", 2)
    store = PayloadStore(tmp_path)
    roots = [store.put(bytes([r]), Round(1)) for r in range(5)]
    assert len(store._chunks) == 2
    assert [store.chunks(root) for root in roots] == [chunk_digests(bytes([r])) for r in range(5)]
