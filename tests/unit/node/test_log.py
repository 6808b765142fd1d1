"""The append-only log: torn tails, damage, full disks (C28)."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
import signal
from pathlib import Path

import pytest

from torchbft.node.storage import durable, log
from torchbft.node.storage.log import AppendLog, read_log
from torchbft.primitives.errors import CorruptLogError, MisuseError, StorageError

FROZEN = "795106a3ec4a7290e71d6789df51656fb0a446ffe4f814793a7696eaf5872a18"
RECORDS = [b"first", b"", b"x" * 300, bytes(range(64)), b"the last record"]


def write(path: Path, records: list[bytes]) -> list[int]:
    """Write a log; returns the file size after each record."""
    sizes = []
    out = AppendLog(path)
    for record in records:
        out.append(record)
        sizes.append(path.stat().st_size)
    out.sync()
    out.close()
    return sizes


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "votes.log"


def test_records_come_back_in_order_and_after_reopening(path: Path) -> None:
    write(path, RECORDS[:3])
    out = AppendLog(path)
    assert (len(out), out.dropped, list(out)) == (3, 0, RECORDS[:3])
    for record in RECORDS[3:]:
        out.append(record)
    assert list(out) == RECORDS
    out.close()
    assert list(read_log(path)) == RECORDS


def test_any_record_is_read_by_position_as_it_stands_on_the_disk(path: Path) -> None:
    write(path, RECORDS[:3])
    out = AppendLog(path)
    for record in RECORDS[3:]:
        out.append(record)
    assert [out[index] for index in range(len(RECORDS))] == RECORDS
    assert (out[-1], out[1:4], out[9:]) == (RECORDS[-1], RECORDS[1:4], [])
    with pytest.raises(IndexError):
        out[len(RECORDS)]
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b"x" * 300, b"x" * 299 + b"y"))
    assert out[1] == RECORDS[1]
    with pytest.raises(CorruptLogError, match="damaged"):
        out[2]
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptLogError, match="cut"):
        out[-1]
    out.close()


def test_c28_a_log_cut_anywhere_in_its_last_record_opens_and_loses_only_that(path: Path) -> None:
    sizes = write(path, RECORDS)
    whole = path.read_bytes()
    for end in range(sizes[-2] + 1, sizes[-1]):
        path.write_bytes(whole[:end])
        with pytest.raises(CorruptLogError) as strict:
            list(read_log(path))
        assert strict.value.offset == sizes[-2]
        assert list(read_log(path, strict=False)) == RECORDS[:-1]
        opened = AppendLog(path)
        assert opened.dropped == end - sizes[-2]
        opened.append(b"after the crash")
        opened.close()
        assert list(read_log(path)) == [*RECORDS[:-1], b"after the crash"]


def test_c28_every_flipped_bit_is_refused_with_the_offset_of_its_record(path: Path) -> None:
    sizes = write(path, RECORDS)
    whole = path.read_bytes()
    starts = [0, len(log.MAGIC), *sizes[:-1]]
    for place in range(len(whole)):
        for bit in (0, 7):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)
            expected = max(start for start in starts if start <= place)
            with pytest.raises(CorruptLogError) as offline:
                list(read_log(path))
            with pytest.raises(CorruptLogError) as opening:
                AppendLog(path)
            assert offline.value.offset == opening.value.offset == expected
            assert path.read_bytes() == bytes(damaged), "a damaged log is left as it is"


def test_records_in_another_order_or_missing_from_the_middle_are_damage(path: Path) -> None:
    sizes = write(path, [b"aaaa", b"bbbb", b"cccc"])
    whole = path.read_bytes()
    head, a, b, c = (
        whole[: len(log.MAGIC)],
        whole[len(log.MAGIC) : sizes[0]],
        whole[sizes[0] : sizes[1]],
        whole[sizes[1] :],
    )
    for wrong in (head + b + a + c, head + a + c, head + a + a + b + c):
        path.write_bytes(wrong)
        with pytest.raises(CorruptLogError):
            AppendLog(path)


def test_a_file_torn_at_creation_is_an_empty_log(path: Path) -> None:
    for size in range(len(log.MAGIC)):
        path.write_bytes(log.MAGIC[:size])
        opened = AppendLog(path)
        assert list(opened) == []
        opened.close()


def test_reserved_space_that_was_never_written_is_a_torn_tail(path: Path) -> None:
    write(path, RECORDS)
    with path.open("ab") as file:
        file.write(bytes(4096))
    opened = AppendLog(path)
    assert opened.dropped == 4096
    assert list(opened) == RECORDS


def test_another_file_is_refused_at_its_first_byte(path: Path) -> None:
    path.write_bytes(b"SQLite format 3\0" * 8)
    with pytest.raises(CorruptLogError, match="not a torchbft log") as refused:
        AppendLog(path)
    assert refused.value.offset == 0


def test_a_full_disk_is_one_clear_line_and_leaves_the_log_whole(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(path, RECORDS)
    out = AppendLog(path)
    real = os.pwrite

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        if offset > path.stat().st_size - 1 and len(data) > 20:
            return real(descriptor, data[:20], offset)  # the last free bytes
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable.os, "pwrite", full)
    with pytest.raises(StorageError, match="the disk is full") as failure:
        out.append(b"no room for this" * 10)
    assert str(path) in str(failure.value)
    assert "free space" in failure.value.hint
    assert "\n" not in str(failure.value)
    monkeypatch.undo()
    assert list(out) == RECORDS
    out.append(b"room again")
    assert list(out) == [*RECORDS, b"room again"]


def test_a_real_limit_on_the_file_size_leaves_the_log_whole(path: Path) -> None:
    write(path, RECORDS)
    out = AppendLog(path)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100, before[1]))
    try:
        with pytest.raises(StorageError):
            out.append(bytes(4096))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert list(out) == RECORDS


def test_after_a_failed_sync_the_log_refuses_until_it_is_opened_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = AppendLog(path)
    out.append(b"perhaps lost")

    def fail(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(log.os, "fdatasync", fail)
    with pytest.raises(StorageError, match="making a log durable"):
        out.sync()
    monkeypatch.undo()
    for use in (out.sync, lambda: out.append(b"more")):
        with pytest.raises(StorageError):
            use()
    out.close()
    out.close()
    AppendLog(path).append(b"more")


def test_where_a_half_record_cannot_be_removed_nothing_is_written_after_it(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = AppendLog(path)

    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(durable.os, "pwrite", fail)
    monkeypatch.setattr(log.os, "ftruncate", fail)
    with pytest.raises(StorageError):
        out.append(b"half")
    monkeypatch.undo()
    with pytest.raises(StorageError, match="writing a record"):
        out.append(b"after it")


def test_oversized_records_are_our_own_misuse(path: Path) -> None:
    with pytest.raises(MisuseError):
        AppendLog(path).append(bytes(log.MAX_RECORD_BYTES + 1))


def test_a_missing_log_or_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="nowhere"):
        AppendLog(tmp_path / "nowhere" / "votes.log")
    with pytest.raises(StorageError, match=r"gone\.log"):
        list(read_log(tmp_path / "gone.log"))


def test_the_format_is_frozen(path: Path) -> None:
    """Old logs must stay readable; another digest here is another format and another magic."""
    write(path, RECORDS)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == FROZEN
