"""The signed challenge in clear: both sides prove themselves, and no proof can be used again."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from torchbft.node.transports.challenge import (
    MAGIC,
    NAME_BYTES,
    NONCE_BYTES,
    check_as_listener,
    prove_as_dialer,
)
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SIGNATURE_BYTES, SigningKey

A, B, M = (PeerId(name) for name in "abm")
KEYS = {name: SigningKey.derive(bytes(32), name) for name in (A, B, M)}
ROSTER = {name: KEYS[name].public for name in (A, B)}
RUN, OTHER_RUN = bytes(32), b"\1" * 32
Side = Callable[[socket.socket], Coroutine[Any, Any, Any]]


def meet(dialer: Side, listener: Side) -> tuple[Any, Any]:
    """Both sides over a socket pair; each one's result or exception."""

    async def story() -> tuple[Any, Any]:
        left, right = socket.socketpair()
        for sock in (left, right):
            sock.setblocking(False)

        async def side(run: Side, sock: socket.socket) -> Any:
            try:
                return await run(sock)
            finally:
                sock.close()

        async with asyncio.timeout(10):
            return tuple(
                await asyncio.gather(
                    side(dialer, left), side(listener, right), return_exceptions=True
                )
            )  # type: ignore[return-value]

    return asyncio.run(story())


def dialer(me: PeerId = A, key: PeerId = A, run: bytes = RUN, expects: PeerId = B) -> Side:
    return lambda sock: prove_as_dialer(sock, me, KEYS[key], run, expects, KEYS[expects].public)


def listener(me: PeerId = B, key: PeerId = B, run: bytes = RUN) -> Side:
    return lambda sock: check_as_listener(sock, me, KEYS[key], run, ROSTER)


def test_two_members_know_each_other_afterwards() -> None:
    assert meet(dialer(), listener()) == (None, A)


@pytest.mark.parametrize(
    ("dialling", "listening", "who_finds_out"),
    [
        (dialer(key=M), listener(), 1),  # a stranger in a member's name
        (dialer(me=M, key=M), listener(), 1),  # a stranger in its own
        (dialer(me=B, key=B), listener(), 1),  # a twin of the listener
        (dialer(), listener(key=M), 0),  # a stranger at a member's address
        (dialer(run=OTHER_RUN), listener(), 0),  # members of different runs
    ],
)
def test_everything_else_is_refused(dialling: Side, listening: Side, who_finds_out: int) -> None:
    results = meet(dialling, listening)
    assert isinstance(results[who_finds_out], DecodeError)
    assert not isinstance(results[1], str)


def test_a_listener_cannot_pass_on_another_members_answer() -> None:
    """b sits at a's address: its own true answer, and the dialler's signature turned around."""
    results = meet(dialer(me=B, key=B, expects=A), listener(me=B, key=B))
    assert all(isinstance(result, DecodeError) for result in results)


def test_a_signature_is_good_for_one_connection_only() -> None:
    recorded = bytearray()

    async def replaying(sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        await loop.sock_sendall(sock, bytes(recorded[: len(MAGIC) + NAME_BYTES + NONCE_BYTES]))
        await loop.sock_recv(sock, NONCE_BYTES + SIGNATURE_BYTES)
        await loop.sock_sendall(sock, bytes(recorded[-SIGNATURE_BYTES:]))

    async def recording(sock: socket.socket) -> PeerId:
        loop = asyncio.get_running_loop()
        inner, outer = socket.socketpair()
        for end in (inner, outer):
            end.setblocking(False)
        checking = asyncio.create_task(check_as_listener(outer, B, KEYS[B], RUN, ROSTER))
        hello = await loop.sock_recv(sock, 4096)
        await loop.sock_sendall(inner, hello)
        await loop.sock_sendall(sock, await loop.sock_recv(inner, 4096))
        proof = await loop.sock_recv(sock, 4096)
        await loop.sock_sendall(inner, proof)
        recorded.extend(hello + proof)
        peer = await checking
        inner.close()
        outer.close()
        return peer

    assert meet(dialer(), recording) == (None, A)
    _, result = meet(replaying, listener())
    assert isinstance(result, DecodeError)
    assert "did not prove" in result.what


@pytest.mark.parametrize(
    "data",
    [b"", b"x", MAGIC, MAGIC + bytes(NAME_BYTES + NONCE_BYTES), b"\xff" * 80, bytes(4096)],
)
def test_noise_is_one_error(data: bytes) -> None:
    async def noise(sock: socket.socket) -> None:
        await asyncio.get_running_loop().sock_sendall(sock, data)

    _, result = meet(noise, listener())
    assert isinstance(result, DecodeError | OSError)
