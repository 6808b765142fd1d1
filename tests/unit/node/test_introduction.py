"""Who says hello at the door: cheap to check, and bound to one listener."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbft.node.transports import introduction as module
from torchbft.node.transports.introduction import (
    INTRODUCTION_BYTES,
    MAGIC,
    Introductions,
    introduction,
)
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.keys import SigningKey

ME, OTHER, STRANGER = (SigningKey.derive(bytes(32), name) for name in ("me", "other", "stranger"))
GOOD = introduction(OTHER, ME.public, 2)


def door() -> Introductions:
    return Introductions(ME.public, frozenset([ME.public, OTHER.public]))


def test_a_member_is_told_with_the_service_that_it_wants() -> None:
    assert len(GOOD) == INTRODUCTION_BYTES
    assert door().read(GOOD) == (OTHER.public, 2)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x" + GOOD[1:], "does not speak torchbft"),
        (introduction(STRANGER, ME.public, 1), "not in the roster"),
        (introduction(ME, ME.public, 1), "our own"),
        (introduction(OTHER, STRANGER.public, 1), "not signed"),
        (GOOD[:-1] + bytes([GOOD[-1] ^ 1]), "not signed"),
    ],
)
def test_all_others_are_refused_with_the_reason(data: bytes, reason: str) -> None:
    with pytest.raises(DecodeError, match=reason):
        door().read(data)


def test_once_a_member_was_here_false_signatures_in_its_name_are_not_even_verified(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    at = door()
    at.read(GOOD)
    monkeypatch.setattr(module, "verify", None)
    assert at.read(GOOD) == (OTHER.public, 2)
    with pytest.raises(DecodeError, match="not signed"):
        at.read(GOOD[:-1] + bytes([GOOD[-1] ^ 1]))


@given(st.binary(min_size=INTRODUCTION_BYTES, max_size=INTRODUCTION_BYTES), st.booleans())
def test_any_bytes_are_a_member_or_one_error(data: bytes, spoken: bool) -> None:
    with pytest.raises(DecodeError):
        door().read(MAGIC + data[len(MAGIC) :] if spoken else data)
