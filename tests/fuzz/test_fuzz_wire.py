"""The decoder is total: a value or DecodeError, whatever the bytes; one encoding per value."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbft.primitives import wire
from torchbft.primitives.errors import DecodeError


class Inner(wire.Wire, frozen=True):
    index: wire.Count
    data: bytes


class Sample(wire.Wire, frozen=True, tag="sample"):
    name: wire.Name
    digest: wire.Bytes32
    items: tuple[Inner, ...]
    flag: bool


GOOD = Sample("peer-1", bytes(32), (Inner(3, b"x"), Inner(2**62, b"")), True)


def test_round_trip_and_bound() -> None:
    data = wire.encode(GOOD)
    assert wire.decode(data, Sample) == GOOD
    with pytest.raises(DecodeError, match="at most 10"):
        wire.decode(data, Sample, limit=10)


@given(st.binary(max_size=300))
def test_any_bytes_give_a_value_or_the_one_error(data: bytes) -> None:
    try:
        value = wire.decode(data, Sample)
    except DecodeError:
        return
    assert wire.encode(value) == data


@given(st.integers(0, 200), st.integers(0, 255))
def test_a_changed_byte_is_another_value_or_an_error(place: int, byte: int) -> None:
    data = bytearray(wire.encode(GOOD))
    place %= len(data)
    changed = data[place] != byte
    data[place] = byte
    try:
        value = wire.decode(bytes(data), Sample)
    except DecodeError:
        return
    assert (value != GOOD) == changed


@pytest.mark.parametrize("extra", [b"\0", b"\xc0"])
def test_trailing_bytes_are_refused(extra: bytes) -> None:
    with pytest.raises(DecodeError):
        wire.decode(wire.encode(GOOD) + extra, Sample)


def test_a_longer_encoding_of_the_same_value_is_refused() -> None:
    raw = msgspec.msgpack.encode(["sample", "a", bytes(32), [], True])
    assert wire.decode(raw, Sample).name == "a"
    widened = raw.replace(b"\xa1a", b"\xd9\x01a")  # str 8 where fixstr is canonical
    assert widened != raw
    with pytest.raises(DecodeError, match="canonical"):
        wire.decode(widened, Sample)


@pytest.mark.parametrize("number", [-1, 2**62 + 1, 2**64 - 1, 1.0, "1", None])
def test_hostile_numbers_are_refused(number: object) -> None:
    raw = msgspec.msgpack.encode(["sample", "a", bytes(32), [[number, b""]], True])
    with pytest.raises(DecodeError):
        wire.decode(raw, Sample)


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(DecodeError):
        wire.decode(b"\x91" * 4000, Sample)


@pytest.mark.parametrize("name", ["", "A", "a\n", "a-", "é"])
def test_names_on_the_wire_are_strict(name: str) -> None:
    raw = msgspec.msgpack.encode(["sample", name, bytes(32), [], True])
    with pytest.raises(DecodeError):
        wire.decode(raw, Sample)
