"""Our end of ``priv_validator_laddr``: dials the engine's unix socket and answers its requests.

Before the first signature of a process the last heights of the chain are looked through: where they
hold a signature of this key that its state does not know, the state is older than the chain (a
restored backup, or a key that lived elsewhere), and nothing is signed until the key is rotated.
What no chain can tell are signatures of a height that was never decided; so whoever restores a
folder from a backup rotates its key.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from typing import Any

from torchbft.node.ordering import signing
from torchbft.node.ordering.delimited import Frames, framed
from torchbft.node.ordering.genesis import validator_address
from torchbft.node.ordering.proto import privval_pb2 as pb
from torchbft.node.ordering.rpc import RpcError
from torchbft.node.ordering.signing import Signer
from torchbft.node.ordering.signstate import LastSigned
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import Height

DIAL_SECONDS = 0.05
"""Between attempts to reach an engine that is not up; it waits 3 s for us before it gives up."""
LOOK_BACK = 100
"""Heights. A life of this key that could have signed the next height took part in the last ones."""
LOOK_SECONDS = 3.0
"""The engine waits 5 s for a signature; after this long it is told no, and asks again later."""
MAX_TOLD = 100
"""Different notices, each told once."""

FetchCommit = Callable[[Height], Awaitable[Any]]
"""The engine's ``/commit`` of a height. Raises RpcError."""


class StaleState(Exception):
    """The chain holds a signature that the state does not know."""


async def look_back(last: LastSigned, below: int, fetch: FetchCommit) -> None:
    """Raise StaleState if commits under ``below`` hold signatures that ``last`` does not know."""
    address = validator_address(last.public)
    for height in range(max(last.height, below - LOOK_BACK, 1), below):
        try:
            answer = await fetch(Height(height))
        except RpcError as error:
            if error.code:  # below the engine's first block: a joiner has none of these
                continue
            raise
        commit = answer["signed_header"]["commit"]
        signed = {s["validator_address"]: s["signature"] for s in commit["signatures"]}
        if not signed.get(address):
            continue
        slot = (height, int(commit["round"]), signing.STEPS[signing.PRECOMMIT])
        same = slot == last.slot and base64.b64decode(signed[address]) == last.signature
        if slot > last.slot or (slot == last.slot and not same):
            raise StaleState(
                f"the chain has a signature of this key at height {height}, its signing state ends"
                f" at {last.height}: it signs nothing until the members rotate it"
            )


class SignerServer:
    """Serves one engine for as long as ``run`` runs. ``notice`` is told what an operator must know;
    it hears no secret."""

    def __init__(
        self, path: str, signer: Signer, fetch: FetchCommit, notice: Callable[[str], None]
    ) -> None:
        self._path, self._signer, self._fetch, self._notice = path, signer, fetch, notice
        self._looking: asyncio.Task[None] | None = None
        self._told: set[str] = set()

    async def run(self) -> None:
        """Dial the engine again and again; never returns."""
        try:
            while True:
                try:
                    reader, writer = await asyncio.open_unix_connection(self._path)
                except OSError:
                    await asyncio.sleep(DIAL_SECONDS)
                    continue
                await self._serve(reader, writer)
        finally:
            if self._looking is not None:
                self._looking.cancel()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            frames = Frames(signing.MAX_REQUEST_BYTES)
            while data := await reader.read(signing.MAX_REQUEST_BYTES):
                for body in frames.feed(data):
                    writer.write(framed(await self._answer(signing.parse(body))))
                await writer.drain()
        except OSError:
            pass  # the engine ended, or will dial us in again
        except DecodeError as error:
            self._say(f"the engine's request to its signer was dropped: {error}")
        finally:
            writer.close()

    async def _answer(self, request: pb.Message) -> pb.Message:
        """The signer's answer, or a refusal as long as its state may be stale."""
        asked = request.WhichOneof("sum") or ""
        if asked in ("sign_vote_request", "sign_proposal_request"):
            which = request.sign_vote_request.vote
            height = which.height or request.sign_proposal_request.proposal.height
            why = await self._stale(height)
            if why is not None:
                return _refused(asked, why)
        answer = self._signer.answer(request)
        self._tell(answer)
        return answer

    async def _stale(self, height: int) -> str | None:
        """Why this process may not sign at ``height`` yet; None once one look was clean."""
        if self._looking is None or (self._looking.done() and self._failed()):
            look = look_back(self._signer.state.last, height, self._fetch)
            self._looking = asyncio.ensure_future(look)
        done, _ = await asyncio.wait({self._looking}, timeout=LOOK_SECONDS)
        if not done:
            return "the signer is still looking through the chain"
        try:
            self._looking.result()
        except StaleState as error:
            self._say(str(error))
            return str(error)
        except Exception as error:
            return f"the signer could not look through the chain ({error})"
        return None

    def _failed(self) -> bool:
        error = self._looking.exception() if self._looking is not None else None
        return error is not None and not isinstance(error, StaleState)

    def _tell(self, answer: pb.Message) -> None:
        for response in (answer.signed_vote_response, answer.signed_proposal_response):
            if response.error.code == signing.REFUSED:
                self._say(f"the signer refused: {response.error.description}")

    def _say(self, text: str) -> None:
        if text not in self._told and len(self._told) < MAX_TOLD:
            self._told.add(text)
            self._notice(text)


def _refused(asked: str, why: str) -> pb.Message:
    error = pb.RemoteSignerError(code=signing.REFUSED, description=why)
    if asked == "sign_vote_request":
        return pb.Message(signed_vote_response=pb.SignedVoteResponse(error=error))
    return pb.Message(signed_proposal_response=pb.SignedProposalResponse(error=error))
