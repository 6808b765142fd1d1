"""The one canonical, bounded encoding of everything that is signed or crosses a network.

MessagePack through msgspec. A value has exactly one valid byte string: decoding checks the type,
the bounds declared in the type, and that encoding the result gives the same bytes back.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec

from torchbft.primitives.errors import DecodeError

WIRE_VERSION = 1

MAX_ITEM_BYTES = 4096
"""A statement on the ledger (ROUND.md, last part): 64 members × 8 bytes and signatures fit."""

MAX_CONTROL_BYTES = 4 * 1024 * 1024
"""A message on the control channel: a full block of 1 MiB and its certificate, with room."""

Bytes32 = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Bytes64 = Annotated[bytes, msgspec.Meta(min_length=64, max_length=64)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?\Z")]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
"""A round, view, height, length or index; 2^62 leaves room to add without overflow in any host."""


class Wire(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """Base of all values on the wire: a tuple of fields in declared order, nothing optional."""


_T = TypeVar("_T")
_ENCODER = msgspec.msgpack.Encoder()
_DECODERS: dict[object, msgspec.msgpack.Decoder[object]] = {}


def encode(value: object) -> bytes:
    """The canonical bytes of a value."""
    return _ENCODER.encode(value)


def decode(data: bytes | memoryview, type_: type[_T], *, limit: int = MAX_ITEM_BYTES) -> _T:
    """The value of canonical bytes, or DecodeError; never another error; memory O(limit)."""
    if len(data) > limit:
        raise DecodeError(f"{len(data)} bytes where at most {limit} are allowed")
    decoder = _DECODERS.get(type_)
    if decoder is None:
        decoder = _DECODERS[type_] = msgspec.msgpack.Decoder(type_)
    try:
        value = decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DecodeError(f"not a {_name(type_)}: {error}") from None
    if _ENCODER.encode(value) != bytes(data):
        raise DecodeError(f"not the canonical encoding of a {_name(type_)}")
    return value  # type: ignore[return-value]


def _name(type_: object) -> str:
    return getattr(type_, "__name__", str(type_))
