"""The application's end of ABCI 2.0: frames, connections and the order of answers.

Source: CometBFT v0.40, ``spec/abci``. A frame is the length of a message as a varint, then the
message. The engine opens four connections and has no more than one question that changes anything
on the way; answers leave in the order of the questions of their connection. What fails is told as
``exception``, upon which the engine ends itself: its supervisor starts it again.

The socket lies in a folder that only this user may enter. Where there are no such sockets it is a
port on loopback, which any user of this machine could dial. Nothing that comes in raises or takes
more memory than the bounds here.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

from google.protobuf.message import DecodeError as ParseError

from torchbft.node.ordering.delimited import Frames, framed
from torchbft.node.ordering.proto import abci_pb2 as pb
from torchbft.node.storage.durable import storage_error
from torchbft.primitives.errors import DecodeError

MAX_CONNECTIONS = 4
"""For consensus, mempool, queries and snapshots."""

MAX_WAITING = 4
"""Those of an engine that was started anew, before the ends of the old ones are noticed."""

READ_BYTES = 64 * 1024

Answer = Callable[[pb.Request], Awaitable[pb.Response]]


def exception(error: BaseException) -> pb.Response:
    """What the engine gets, and logs, before it ends."""
    return pb.Response(exception=pb.Exception(error=str(error) or type(error).__name__))


def parse_request(body: bytes) -> pb.Request:
    """Decode a question. Raises DecodeError if it is none that this application answers."""
    request = pb.Request()
    try:
        request.ParseFromString(body)
    except ParseError as error:
        raise DecodeError(f"not a request: {error}", where="ABCI") from None
    if request.WhichOneof("value") is None:
        raise DecodeError("a request of no known kind", where="ABCI")
    return request


class AbciServer:
    """Serves one engine at a time on a socket.

    answer: gives the answer to a question; what it raises is told to the engine and to ``failed``.
    """

    def __init__(self, answer: Answer, failed: Callable[[BaseException], None]) -> None:
        self._answer, self._failed = answer, failed
        self._slots = asyncio.Semaphore(MAX_CONNECTIONS)
        self._connections: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._path = ""

    async def open(self, path: str) -> str:
        """Listen on this path, or on loopback where there are no such sockets. Returns the address
        that the engine is to dial. Raises StorageError."""
        if not hasattr(asyncio, "start_unix_server"):
            self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
            return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        with suppress(FileNotFoundError):
            os.unlink(path)  # a crash leaves it behind; the folder's lock says that nobody listens
        try:
            self._server = await asyncio.start_unix_server(self._accept, path)
        except OSError as error:
            raise storage_error(error, Path(path), "opening a socket") from error
        self._path = path
        return f"unix://{path}"

    async def close(self) -> None:
        """Stop listening and end every connection. May be called twice."""
        if self._server is not None:
            self._server.close()
            for task in self._connections:
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            self._server = None
            with suppress(FileNotFoundError):
                os.unlink(self._path)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS + MAX_WAITING:
            writer.close()
            return
        task = asyncio.get_running_loop().create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with self._slots:
                await self._converse(reader, writer)
        except OSError:
            pass  # the engine died: its supervisor's matter
        finally:
            writer.close()

    async def _converse(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        frames = Frames()
        while data := await reader.read(READ_BYTES):
            try:
                for body in frames.feed(data):
                    writer.write(framed(await self._answer(parse_request(body))))
            except Exception as error:
                self._failed(error)
                writer.write(framed(exception(error)))
                await writer.drain()
                return
            await writer.drain()
