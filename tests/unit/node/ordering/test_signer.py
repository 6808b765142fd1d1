"""Our end of the signer's socket, and the look at the chain before the first signature."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from comet_run import CHAIN, NAMES, VOTING, proposal, vote

from torchbft.node.ordering import signer as signers
from torchbft.node.ordering.delimited import Frames, framed
from torchbft.node.ordering.genesis import validator_address
from torchbft.node.ordering.proto import privval_pb2 as pb
from torchbft.node.ordering.rpc import RpcError
from torchbft.node.ordering.signer import SignerServer, StaleState, look_back
from torchbft.node.ordering.signing import Signer
from torchbft.node.ordering.signstate import LastSigned, SignState
from torchbft.primitives.ids import Height
from torchbft.primitives.keys import SigningKey

KEY = VOTING[NAMES[0]]
LIMIT = 60.0
Ask = Callable[[pb.Message], Awaitable[pb.Message]]


class Chain:
    """Commits by height: round, and whether our key signed, with which signature."""

    def __init__(self, first: int = 1) -> None:
        self.first = first
        self.signed: dict[int, tuple[int, bytes]] = {}
        self.fetched: list[int] = []
        self.down = False

    async def commit(self, height: Height) -> Any:
        self.fetched.append(height)
        if self.down:
            raise RpcError("the engine does not answer", where="commit")
        if height < self.first:
            raise RpcError("refused (height is not available)", where="commit", code=-32603)
        round_, signature = self.signed.get(height, (0, b""))
        absent = {"block_id_flag": 1, "validator_address": "", "signature": None}
        mine = {
            "block_id_flag": 2,
            "validator_address": validator_address(KEY.public),
            "signature": base64.b64encode(signature).decode(),
        }
        signatures = [absent, mine] if signature else [absent]
        return {"signed_header": {"commit": {"round": round_, "signatures": signatures}}}


def last(height: int, round_: int = 0, step: int = 3, signature: bytes = b"s" * 64) -> LastSigned:
    return LastSigned(KEY.public, CHAIN, 1, height, round_, step, b"x", signature)


def looked(chain: Chain, state: LastSigned, below: int) -> None:
    asyncio.run(look_back(state, below, chain.commit))


# --- the look at the chain ------------------------------------------------------------------------


def test_a_state_that_knows_all_its_signatures_is_clean() -> None:
    chain = Chain()
    chain.signed = {3: (0, b"a" * 64), 5: (1, b"s" * 64)}
    looked(chain, last(5, 1), 6)
    looked(chain, last(5, 1), 9)
    assert chain.fetched == [5, 5, 6, 7, 8]


@pytest.mark.parametrize(
    "state",
    [
        last(4),
        last(5, 0),
        last(5, 1, step=2),
        last(5, 1, signature=b"t" * 64),
        last(0, step=0, signature=b""),
    ],
    ids=["older", "older-round", "older-step", "another-signature", "made-anew"],
)
def test_a_state_older_than_the_chain_is_found(state: LastSigned) -> None:
    """A restored backup, or a key whose state was deleted with its folder."""
    chain = Chain()
    chain.signed = {5: (1, b"s" * 64)}
    with pytest.raises(StaleState, match="at height 5"):
        looked(chain, state, 9)


def test_the_look_is_bounded_and_takes_a_joiners_missing_heights() -> None:
    chain = Chain(first=960)
    looked(chain, last(0, step=0), 1000)
    assert chain.fetched == list(range(1000 - signers.LOOK_BACK, 1000))


def test_a_first_height_needs_no_look() -> None:
    chain = Chain()
    looked(chain, last(0, step=0), 1)
    assert chain.fetched == []


def test_an_engine_that_does_not_answer_is_no_clean_chain() -> None:
    chain = Chain()
    chain.down = True
    with pytest.raises(RpcError):
        looked(chain, last(0, step=0), 5)


# --- the socket -----------------------------------------------------------------------------------


class FakeEngine:
    """Listens as the engine does; takes one connection at a time."""

    def __init__(self, path: Path) -> None:
        self.path = str(path / "signer")
        self.connections: asyncio.Queue[tuple[Any, asyncio.StreamWriter]] = asyncio.Queue()

    async def __aenter__(self) -> FakeEngine:
        self._server = await asyncio.start_unix_server(
            lambda reader, writer: self.connections.put_nowait((reader, writer)), self.path
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        while not self.connections.empty():
            self.connections.get_nowait()[1].close()

    async def dialled(self) -> tuple[Ask, asyncio.StreamReader, asyncio.StreamWriter]:
        reader, writer = await self.connections.get()
        frames = Frames()

        async def ask(request: pb.Message) -> pb.Message:
            writer.write(framed(request))
            while data := await reader.read(1 << 16):
                for body in frames.feed(data):
                    return pb.Message.FromString(body)
            raise EOFError

        return ask, reader, writer


def served(
    path: Path,
    chain: Chain,
    work: Callable[[FakeEngine, Signer], Awaitable[None]],
    *,
    commit: Callable[[Height], Awaitable[Any]] | None = None,
) -> list[str]:
    """Run ``work`` against a server; returns what it told."""
    told: list[str] = []

    async def main() -> None:
        SignState.create(path / "state", KEY.public, CHAIN)
        signer = Signer(CHAIN, KEY, SignState(path / "state", KEY.public, CHAIN))
        async with asyncio.timeout(LIMIT), FakeEngine(path) as engine:
            server = SignerServer(engine.path, signer, commit or chain.commit, told.append)
            task = asyncio.create_task(server.run())
            try:
                await work(engine, signer)
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                signer.state.close()

    asyncio.run(main())
    return told


def test_it_dials_and_answers_in_order(tmp_path: Path) -> None:
    async def work(engine: FakeEngine, signer: Signer) -> None:
        ask, _, _ = await engine.dialled()
        asked = pb.Message(pub_key_request=pb.PubKeyRequest(chain_id=CHAIN))
        assert (await ask(asked)).pub_key_response.pub_key.ed25519 == KEY.public
        assert (await ask(pb.Message(ping_request=pb.Ping()))).HasField("ping_response")
        assert (await ask(proposal(1))).signed_proposal_response.proposal.signature
        assert (await ask(vote(1, 1))).signed_vote_response.vote.signature
        refused = (await ask(vote(1, 1, of=2))).signed_vote_response
        assert "another one" in refused.error.description
        passed = (await ask(proposal(1))).signed_proposal_response
        assert "is before" in passed.error.description, "as after a restart, which is told nobody"

    told = served(tmp_path, Chain(), work)
    assert told == ["the signer refused: another one is signed for this height, round and step"]


def test_it_dials_again_when_the_engine_comes_back(tmp_path: Path) -> None:
    async def work(engine: FakeEngine, signer: Signer) -> None:
        for _ in range(3):
            ask, _, writer = await engine.dialled()
            assert (await ask(pb.Message(ping_request=pb.Ping()))).HasField("ping_response")
            writer.close()

    assert served(tmp_path, Chain(), work) == []


@pytest.mark.parametrize("junk", [b"\xff" * 9, b"\x03abc", framed(pb.Message()), b"\x81\x80\x7f"])
def test_junk_drops_the_connection_and_nothing_else(tmp_path: Path, junk: bytes) -> None:
    async def work(engine: FakeEngine, signer: Signer) -> None:
        _, reader, writer = await engine.dialled()
        writer.write(junk)
        assert await reader.read() == b""
        ask, _, _ = await engine.dialled()
        assert (await ask(vote(1, 1))).signed_vote_response.vote.signature

    told = served(tmp_path, Chain(), work)
    assert len(told) == 1
    assert "was dropped" in told[0]


def test_a_stale_state_signs_nothing_and_says_so_once(tmp_path: Path) -> None:
    chain = Chain()
    chain.signed = {4: (0, b"s" * 64)}

    async def work(engine: FakeEngine, signer: Signer) -> None:
        ask, _, _ = await engine.dialled()
        for request in (vote(1, 5), vote(2, 5), vote(1, 500)):
            answer = (await ask(request)).signed_vote_response
            assert "rotate" in answer.error.description
        assert "rotate" in (await ask(proposal(6))).signed_proposal_response.error.description
        assert signer.state.last.sequence == 0

    told = served(tmp_path, chain, work)
    assert len(told) == 1


def test_a_clean_chain_is_looked_at_once(tmp_path: Path) -> None:
    chain = Chain()

    async def work(engine: FakeEngine, signer: Signer) -> None:
        ask, _, _ = await engine.dialled()
        for height in (3, 4, 9):
            assert (await ask(vote(1, height))).signed_vote_response.vote.signature

    served(tmp_path, chain, work)
    assert chain.fetched == [1, 2]


def test_an_engine_that_could_not_be_asked_is_asked_again(tmp_path: Path) -> None:
    chain = Chain()
    chain.down = True

    async def work(engine: FakeEngine, signer: Signer) -> None:
        ask, _, _ = await engine.dialled()
        answer = (await ask(vote(1, 3))).signed_vote_response
        assert "could not look" in answer.error.description
        chain.down = False
        assert (await ask(vote(1, 3))).signed_vote_response.vote.signature

    served(tmp_path, chain, work)


def test_a_long_look_does_not_keep_the_engine_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signers, "LOOK_SECONDS", 0.01)
    chain, opened = Chain(), asyncio.Event()

    async def slow(height: Height) -> Any:
        await opened.wait()
        return await chain.commit(height)

    async def work(engine: FakeEngine, signer: Signer) -> None:
        ask, _, _ = await engine.dialled()
        answer = (await ask(vote(1, 3))).signed_vote_response
        assert "still looking" in answer.error.description
        opened.set()
        while not (await ask(vote(1, 3))).signed_vote_response.vote.signature:
            pass

    served(tmp_path, chain, work, commit=slow)


def test_a_rotated_key_is_told_at_the_next_question(tmp_path: Path) -> None:
    new = SigningKey.derive(bytes(32), "new")

    async def work(engine: FakeEngine, signer: Signer) -> None:
        ask, _, _ = await engine.dialled()
        assert (await ask(vote(1, 1))).signed_vote_response.vote.signature
        SignState.create(tmp_path / "new", new.public, CHAIN, height=1)
        signer.use(new, SignState(tmp_path / "new", new.public, CHAIN))
        asked = pb.Message(pub_key_request=pb.PubKeyRequest(chain_id=CHAIN))
        assert (await ask(asked)).pub_key_response.pub_key.ed25519 == new.public
        assert (await ask(vote(1, 2))).signed_vote_response.vote.signature

    assert served(tmp_path, Chain(), work) == []
