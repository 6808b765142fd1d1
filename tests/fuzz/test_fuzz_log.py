"""Any bytes are a log, a log with a torn tail, or one CorruptLogError; never another error."""

from __future__ import annotations

import tempfile
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft.node.storage.log import MAGIC, AppendLog, read_log
from torchbft.primitives.errors import CorruptLogError

RECORDS = st.lists(st.binary(max_size=60), max_size=6)


def log_bytes(records: list[bytes]) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        out = AppendLog(path)
        for record in records:
            out.append(record)
        out.close()
        return path.read_bytes()


def opened(data: bytes) -> list[bytes] | None:
    """What opening makes of a file's bytes; None when it refuses."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"
        path.write_bytes(data)
        try:
            out = AppendLog(path)
        except CorruptLogError:
            return None
        records = list(out)
        out.close()
        assert list(read_log(path)) == records
        return records


@settings(max_examples=60, deadline=None)
@given(st.binary(max_size=200), st.booleans())
def test_any_bytes_give_records_or_one_error(data: bytes, with_magic: bool) -> None:
    opened(MAGIC + data if with_magic else data)


@settings(max_examples=60, deadline=None)
@given(RECORDS, st.data())
def test_a_prefix_of_a_log_gives_a_prefix_of_its_records(
    records: list[bytes], data: st.DataObject
) -> None:
    whole = log_bytes(records)
    cut = data.draw(st.integers(0, len(whole)))
    kept = opened(whole[:cut])
    assert kept is not None
    assert kept == records[: len(kept)]
    assert len(kept) == len(records) or cut < len(whole)


@settings(max_examples=100, deadline=None)
@given(RECORDS, st.data())
def test_no_changed_byte_passes(records: list[bytes], data: st.DataObject) -> None:
    whole = bytearray(log_bytes(records))
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    assert opened(bytes(whole)) is None
