"""The few calls of CometBFT's RPC that a node makes, on the engine's own unix socket.

JSON-RPC in an HTTP/1.0 request: the server then sends the body as it is and closes, so that there
is nothing to parse but one head. Answers are bounded, and every failure is an ``RpcError``.
"""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass
from typing import Any

from torchbft.primitives.errors import TorchbftError
from torchbft.primitives.ids import Height

_MISSHAPEN = (KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)

MAX_ANSWER_BYTES = 8 << 20
"""A block of 1 MiB in base64, with its evidence and a commit of 64 signatures, several times."""
MAX_HEAD_BYTES = 16 * 1024
CALL_SECONDS = 10.0
"""A loopback call takes a millisecond; an engine that is replaying may keep it waiting."""
PAGE = 100
"""Validators a page: more than a run has members."""
KNOWN = "tx already exists in cache"
"""What CometBFT v0.40 says to a transaction that it has seen."""
LATER = ("catching up", "mempool is full")
"""What it says to one that it will take when it is handed in again."""


class RpcError(TorchbftError):
    """The engine did not give an answer; ``code`` is the one of its error, 0 if it said nothing."""

    def __init__(self, what: str, *, where: str, code: int = 0, hint: str = "") -> None:
        self.code = code
        super().__init__(what, where=where, hint=hint)


@dataclass(frozen=True, slots=True)
class Submitted:
    """What became of a transaction: ``code`` 0 means that it is in the engine's mempool.

    ``known``: it was seen before, which is no error (ROUND.md 18).
    """

    code: int
    log: str
    known: bool = False


class Rpc:
    """Calls to the engine that listens on a unix socket. Any number may run at a time."""

    def __init__(self, path: str, *, seconds: float = CALL_SECONDS) -> None:
        self._path, self._seconds = path, seconds

    async def call(self, method: str, **parameters: Any) -> Any:
        """The result of one call. Raises RpcError."""
        where = f"CometBFT's {method}"
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": parameters}
        try:
            async with asyncio.timeout(self._seconds):
                answer = await self._exchange(json.dumps(request).encode())
        except (OSError, TimeoutError, EOFError) as error:
            why = getattr(error, "strerror", None) or str(error) or "no answer in time"
            raise RpcError(
                f"the engine does not answer ({why})", where=where, hint="see its log in ours"
            ) from None
        return result_of(answer, where)

    async def _exchange(self, body: bytes) -> bytes:
        reader, writer = await asyncio.open_unix_connection(self._path, limit=MAX_HEAD_BYTES)
        try:
            head = (
                "POST / HTTP/1.0\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            await writer.drain()
            try:
                await reader.readuntil(b"\r\n\r\n")
            except asyncio.LimitOverrunError:
                raise EOFError("its answer has no head") from None
            answer = bytearray()
            while piece := await reader.read(1 << 16):
                answer += piece
                if len(answer) > MAX_ANSWER_BYTES:
                    raise EOFError(f"its answer has more than {MAX_ANSWER_BYTES} bytes")
            return bytes(answer)
        finally:
            writer.close()

    async def submit(self, tx: bytes) -> Submitted:
        """Hand a transaction to the engine's mempool (``broadcast_tx_sync``). Raises RpcError; with
        code 0 it is worth to hand it in again."""
        try:
            answer = await self.call("broadcast_tx_sync", tx=base64.b64encode(tx).decode())
            return Submitted(int(answer["code"]), str(answer.get("log", "")))
        except RpcError as error:
            if KNOWN in error.what:
                return Submitted(0, KNOWN, known=True)
            if any(words in error.what for words in LATER):
                raise RpcError(error.what, where=error.where) from None
            raise
        except _MISSHAPEN:
            raise _no_answer("broadcast_tx_sync") from None

    async def height(self) -> Height:
        """Of the last block in the engine's store; 0 before the first."""
        status = await self.status()
        try:
            return Height(int(status["sync_info"]["latest_block_height"]))
        except _MISSHAPEN:
            raise _no_answer("status") from None

    async def catching_up(self) -> bool:
        """Whether the engine still fetches blocks; until then it takes no transactions."""
        status = await self.status()
        try:
            return bool(status["sync_info"]["catching_up"])
        except _MISSHAPEN:
            raise _no_answer("status") from None

    async def connected(self) -> frozenset[str]:
        """Ids of the members that the engine is connected with."""
        info = await self.net_info()
        try:
            return frozenset(str(peer["node_info"]["id"]) for peer in info["peers"] or ())
        except _MISSHAPEN:
            raise _no_answer("net_info") from None

    async def status(self) -> Any:
        return await self.call("status")

    async def net_info(self) -> Any:
        return await self.call("net_info")

    async def block(self, height: Height) -> Any:
        """Block and block id of a height."""
        return await self.call("block", height=str(height))

    async def commit(self, height: Height) -> Any:
        """The signed header; ``canonical`` is false for the last height's, which may still grow."""
        return await self.call("commit", height=str(height))

    async def block_results(self, height: Height) -> Any:
        return await self.call("block_results", height=str(height))

    async def validators(self, height: Height) -> Any:
        """All validators of a height (runs have no more members than a page)."""
        return await self.call("validators", height=str(height), per_page=str(PAGE))

    async def broadcast_evidence(self, evidence: Any) -> Any:
        """Hand in two votes of one validator for one slot, as the engine's JSON has them."""
        return await self.call("broadcast_evidence", evidence=evidence)


def result_of(answer: bytes, where: str) -> Any:
    """What a JSON-RPC answer says. Raises RpcError; never anything else."""
    try:
        message = json.loads(answer)
        if "error" in message:
            error = message["error"]
            text = f"{error['message']}: {error.get('data', '')}".strip(": ")
            raise RpcError(f"refused ({text})", where=where, code=int(error["code"]))
        return message["result"]
    except _MISSHAPEN:
        raise _no_answer(where) from None


def _no_answer(where: str) -> RpcError:
    return RpcError("what the engine sent is no answer", where=where, hint="see its log in ours")
