"""CometBFT engines of a run on loopback, each as a node would run it."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from socket import socket
from typing import Any

import pytest

from torchbft.cli.local import free_ports
from torchbft.node.ordering.answers import time_of
from torchbft.node.ordering.binary import find_binary
from torchbft.node.ordering.cometbft import CometEngine
from torchbft.node.ordering.genesis import validator_address
from torchbft.node.ordering.rpc import RpcError
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Data, Ledger, RunSpec, new_member
from torchbft.protocols.chain.hashes import sign_bytes
from torchbft.protocols.chain.messages import BlockId, VoteKind

SECONDS = 120.0
"""Bound of any wait on a busy machine; on an idle one nothing here takes ten."""
PAUSE = 0.05


def missing_binary() -> str:
    """Why these tests cannot run; empty if they can."""
    try:
        find_binary()
    except ConfigError as error:
        return f"{error} ({error.hint})"
    return ""


needs_cometbft = pytest.mark.skipif(bool(missing_binary()), reason=missing_binary())


async def until(reached: Callable[[], Awaitable[Any]], what: str, heard: object = "") -> None:
    """Wait until an engine answers so that ``reached`` is true; ``heard`` is told if it is not."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            if await reached():
                return
        except RpcError:
            pass
        assert time.monotonic() < end, f"{what}: {heard}"
        await asyncio.sleep(PAUSE)


class Swarm:
    """Engines of ``count`` members with CometBFT's own key-value application."""

    def __init__(self, folder: Path, count: int = 4) -> None:
        self.folder = folder
        self.names = [PeerId(f"peer-{number}") for number in range(count)]
        self.identity = {name: SigningKey.generate() for name in self.names}
        self.voting = {name: SigningKey.generate() for name in self.names}
        ports = free_ports(2 * count)
        self.run = RunSpec(
            name="engines",
            seed="33" * 32,
            members=tuple(
                new_member(
                    name,
                    self.identity[name],
                    self.voting[name],
                    port=ports[2 * number],
                    ledger_port=ports[2 * number + 1],
                )
                for number, name in enumerate(self.names)
            ),
            data=Data(samples=100),
            ledger=Ledger(kind="cometbft"),
        )
        self.run.check()
        self.told: dict[PeerId, list[str]] = {name: [] for name in self.names}
        self.engines: dict[PeerId, CometEngine] = {}

    def engine(self, name: PeerId, **options: Any) -> CometEngine:
        """A member's engine, not started. The last one of each member is kept."""
        made = CometEngine(
            self.run,
            name,
            self.folder / name,
            identity=self.identity[name],
            voting=self.voting[name],
            notice=self.told[name].append,
            **{"application": "kvstore", **options},
        )
        self.engines[name] = made
        return made

    async def start(self, *names: PeerId) -> None:
        """Start these members' engines, or all, and wait until they order transactions."""
        for name in names or self.names:
            await self.engine(name).start()
        for name in names or self.names:
            await until(lambda name=name: self.in_step(name), f"{name} is not in step")  # type: ignore[misc]

    async def in_step(self, name: PeerId) -> bool:
        engine = self.engines[name]
        assert not engine.process.failed.done()
        return bool(await engine.rpc.connected()) and not await engine.rpc.catching_up()

    async def height(self, name: PeerId) -> int:
        return await self.engines[name].rpc.height()

    async def order(self, tx: bytes, at: PeerId) -> int:
        """Have a transaction ordered; returns the height that holds it there."""
        before = await self.height(at)
        answer = await self.engines[at].rpc.submit(tx)
        assert answer.code == 0, answer
        held: list[int] = []
        await until(lambda: self._held(at, before, tx, held), "no block")
        return held[0]

    async def _held(self, name: PeerId, after: int, tx: bytes, held: list[int]) -> bool:
        """Note the height of the block with a transaction; empty ones may stand before it."""
        wanted, rpc = base64.b64encode(tx).decode(), self.engines[name].rpc
        for height in range(after + 1, await rpc.height() + 1):
            block = await rpc.block(Height(height))
            if wanted in (block["block"]["data"]["txs"] or ()):
                held.append(height)
        return bool(held)

    async def _grown(self, name: PeerId, before: int) -> bool:
        return await self.height(name) > before

    async def reached(self, height: int, *names: PeerId) -> None:
        for name in names or self.names:
            await until(
                lambda name=name: self._grown(name, height - 1),  # type: ignore[misc]
                f"{name} is not at {height}",
                self.told[name],
            )

    async def stop(self) -> None:
        for engine in self.engines.values():
            await engine.stop()


def two_votes(key: SigningKey, block: dict[str, Any]) -> dict[str, Any]:
    """Two prevotes of a key's holder at a block's height, as evidence in the engine's JSON. The
    holder is one of four with power 10."""
    header = block["header"]

    def vote(letter: int) -> dict[str, Any]:
        hash_ = bytes([letter]) * 32
        text = sign_bytes(
            header["chain_id"], VoteKind.PREVOTE, int(header["height"]), 0,
            BlockId(hash_, 1, hash_), time_of(header["time"]),
        )  # fmt: skip
        named = hash_.hex().upper()
        return {
            "type": 1, "height": header["height"], "round": 0, "timestamp": header["time"],
            "block_id": {"hash": named, "parts": {"total": 1, "hash": named}},
            "validator_address": validator_address(key.public), "validator_index": 0,
            "signature": base64.b64encode(key.sign_foreign(text)).decode(),
        }  # fmt: skip

    value = {"vote_a": vote(1), "vote_b": vote(2), "TotalVotingPower": "40",
             "ValidatorPower": "10", "Timestamp": header["time"]}  # fmt: skip
    return {"type": "tendermint/DuplicateVoteEvidence", "value": value}


def held_port() -> closing[socket]:
    """A port of loopback that somebody listens on."""
    sock = socket()
    sock.bind(("127.0.0.1", 0))
    sock.listen()
    return closing(sock)
