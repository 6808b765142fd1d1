"""Calls to the engine: one error for everything, and no answer larger than its bound."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchbft.node.ordering import rpc as calls
from torchbft.node.ordering.rpc import Rpc, RpcError, Submitted, result_of
from torchbft.primitives.ids import Height

ENDLESS = b'{"error": {"code": Infinity, "message": "x"}}'
HEAD = b"HTTP/1.0 200 OK\r\nContent-Type: application/json\r\n\r\n"
Reply = Callable[[dict[str, Any]], bytes]


def result(value: object) -> bytes:
    return HEAD + json.dumps({"jsonrpc": "2.0", "id": 1, "result": value}).encode()


def failure(data: str, code: int = -32603) -> bytes:
    error = {"code": code, "message": "Internal error", "data": data}
    return HEAD + json.dumps({"jsonrpc": "2.0", "id": 1, "error": error}).encode()


def asked(path: Path, reply: Reply, work: Callable[[Rpc], Awaitable[Any]], **options: Any) -> Any:
    """What ``work`` gets from a server that gives these replies."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
        writer.write(reply(json.loads(await reader.readexactly(length))))
        writer.close()

    async def main() -> Any:
        server = await asyncio.start_unix_server(serve, path / "rpc")
        try:
            return await work(Rpc(str(path / "rpc"), **options))
        finally:
            server.close()

    return asyncio.run(main())


def test_a_call_carries_its_parameters_and_gives_the_result(tmp_path: Path) -> None:
    seen: list[dict[str, Any]] = []

    def reply(request: dict[str, Any]) -> bytes:
        seen.append(request)
        return result({"a": 1})

    async def work(rpc: Rpc) -> Any:
        await rpc.validators(Height(7))
        await rpc.block_results(Height(7))
        await rpc.broadcast_evidence({"type": "x"})
        return await rpc.commit(Height(7))

    assert asked(tmp_path, reply, work) == {"a": 1}
    assert [(r["method"], r["params"]) for r in seen] == [
        ("validators", {"height": "7", "per_page": "100"}),
        ("block_results", {"height": "7"}),
        ("broadcast_evidence", {"evidence": {"type": "x"}}),
        ("commit", {"height": "7"}),
    ]


def test_a_transaction_is_submitted(tmp_path: Path) -> None:
    def reply(request: dict[str, Any]) -> bytes:
        assert base64.b64decode(request["params"]["tx"]) == b"statement"
        return result({"code": 3, "log": "too early", "data": "", "hash": "AB"})

    got = asked(tmp_path, reply, lambda rpc: rpc.submit(b"statement"))
    assert got == Submitted(3, "too early")


def test_a_transaction_that_is_known_is_no_error(tmp_path: Path) -> None:
    got = asked(tmp_path, lambda _: failure(calls.KNOWN), lambda rpc: rpc.submit(b"x"))
    assert got == Submitted(0, calls.KNOWN, known=True)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("endpoint is closed while node is catching up", 0),
        ("mempool is full: number of txs 5000", 0),
        ("tx too large", -32603),
    ],
)
def test_what_is_worth_to_hand_in_again_has_no_code(tmp_path: Path, said: str, code: int) -> None:
    with pytest.raises(RpcError, match=said[:10]) as caught:
        asked(tmp_path, lambda _: failure(said), lambda rpc: rpc.submit(b"x"))
    assert caught.value.code == code


def test_height_and_connections(tmp_path: Path) -> None:
    def reply(request: dict[str, Any]) -> bytes:
        if request["method"] == "net_info":
            return result({"peers": [{"node_info": {"id": "ab"}}, {"node_info": {"id": "cd"}}]})
        return result({"sync_info": {"latest_block_height": "12", "catching_up": True}})

    async def work(rpc: Rpc) -> Any:
        return await rpc.height(), await rpc.connected(), await rpc.catching_up()

    assert asked(tmp_path, reply, work) == (12, {"ab", "cd"}, True)
    nobody = asked(tmp_path, lambda _: result({"peers": None}), lambda rpc: rpc.connected())
    assert nobody == frozenset()


@pytest.mark.parametrize("work", [Rpc.height, Rpc.connected, Rpc.catching_up, Rpc.status])
@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"no json",
        HEAD + b"[]",
        HEAD,
        HEAD + b'{"result"',
        HEAD + b'{"error": 3}',
        HEAD + ENDLESS,
    ],
)
def test_what_is_no_answer_is_an_rpc_error(
    tmp_path: Path, answer: bytes, work: Callable[[Rpc], Awaitable[Any]]
) -> None:
    with pytest.raises(RpcError, match="no answer"):
        asked(tmp_path, lambda _: answer, work)


@pytest.mark.parametrize(
    ("work", "value"),
    [
        (Rpc.height, {"sync_info": {}}),
        (Rpc.height, [1]),
        (Rpc.catching_up, None),
        (Rpc.connected, {"peers": [{}]}),
        (Rpc.connected, 3),
        (lambda rpc: rpc.submit(b"x"), {"log": "no code"}),
        (lambda rpc: rpc.submit(b"x"), None),
    ],
)
def test_an_answer_without_what_was_asked_for_is_an_rpc_error(
    tmp_path: Path, work: Callable[[Rpc], Awaitable[Any]], value: object
) -> None:
    with pytest.raises(RpcError, match="is no answer"):
        asked(tmp_path, lambda _: result(value), work)


def test_an_answer_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MAX_ANSWER_BYTES", 1 << 16)
    with pytest.raises(RpcError, match="more than 65536 bytes"):
        asked(tmp_path, lambda _: result("x" * (1 << 20)), Rpc.status)
    endless = b"HTTP/1.0 200 OK\r\nX: " + b"x" * (1 << 20)
    with pytest.raises(RpcError, match="no head"):
        asked(tmp_path, lambda _: endless, Rpc.status)


def test_an_engine_that_is_not_there_or_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(RpcError, match="does not answer") as caught:
        asyncio.run(Rpc(str(tmp_path / "nobody")).status())
    assert caught.value.code == 0
    with pytest.raises(RpcError, match="does not answer"):
        asked(tmp_path, lambda _: b"", Rpc.status)

    async def silent() -> None:
        server = await asyncio.start_unix_server(lambda *_: None, tmp_path / "silent")
        try:
            await Rpc(str(tmp_path / "silent"), seconds=0.01).status()
        finally:
            server.close()

    with pytest.raises(RpcError, match="no answer in time"):
        asyncio.run(silent())


@given(data=st.binary(max_size=200) | st.from_regex(rb'\{"(error|result)": ?.{0,30}\}'))
def test_any_bytes_are_a_result_or_an_rpc_error(data: bytes) -> None:
    with contextlib.suppress(RpcError):
        result_of(data, "here")


def test_deep_nesting_is_an_rpc_error() -> None:
    with pytest.raises(RpcError):
        result_of(b"[" * 100_000, "here")
