"""An ordering engine of few lines that speaks ABCI over real sockets, and dies where it is told to.

``Chain`` orders blocks for any number of applications as CometBFT would: four connections to each,
gossiped transactions, a proposer in turn, proposals judged by all, then ``finalize_block`` and
``commit``. An application that was away is handed its blocks again after ``info``. ``LiveChain``
does so by itself for the hosts of a swarm.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchbft.node.ordering.abci_server import AbciServer
from torchbft.node.ordering.calls import Calls, init_chain_of
from torchbft.node.ordering.delimited import Frames, framed
from torchbft.node.ordering.genesis import genesis_document
from torchbft.node.ordering.proto import abci_pb2 as pb
from torchbft.node.ordering.rpc import RpcError
from torchbft.primitives.runspec import RunSpec
from torchbft.primitives.wire import encode
from torchbft.protocols.peer import CommitBlock
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.state import GenesisConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "round"))  # for ``round_world``
MAX_BLOCK = 1 << 20
CONNECTIONS = ("consensus", "mempool", "query", "snapshot")
PAUSE = 0.002
LIMIT = 60.0
"""Seconds that an answer may take on a loaded machine; idle it takes one thousandth."""


async def until(reached: Callable[[], bool]) -> None:
    """Let other tasks run until something holds."""
    async with asyncio.timeout(LIMIT):
        while not reached():
            await asyncio.sleep(PAUSE)


class Died(Exception):
    """The engine's connection ended, or the application answered with an exception."""


def genesis_call(genesis: GenesisConfig, chain_id: str = "chain") -> pb.RequestInitChain:
    """The ``init_chain`` of a genesis, as an engine would make it."""
    return pb.RequestInitChain(
        chain_id=chain_id,
        initial_height=1,
        consensus_params=pb.ConsensusParams(version=pb.VersionParams(app=1)),
        validators=[
            pb.ValidatorUpdate(pub_key=pb.PublicKey(ed25519=member.voting), power=10)
            for member in genesis.members
        ],
        app_state_bytes=b'{"genesis":"' + encode(genesis).hex().encode() + b'"}',
    )


class Connection:
    """One connection of an engine: questions one after the other, or many at once."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._frames, self._answers = Frames(), list[pb.Response]()

    @classmethod
    async def open(cls, address: str) -> Connection:
        return cls(*await asyncio.open_unix_connection(address.removeprefix("unix://")))

    def send(self, *requests: pb.Request) -> None:
        self._writer.write(b"".join(framed(request) for request in requests))

    def write(self, data: bytes) -> None:
        self._writer.write(data)

    def has_answer(self) -> bool:
        """Whether anything has come that was not received yet."""
        return bool(self._answers or self._reader._buffer)  # type: ignore[attr-defined]

    async def receive(self) -> pb.Response:
        """The next answer. Raises Died at the end of the connection."""
        async with asyncio.timeout(LIMIT):
            while not self._answers:
                data = await self._reader.read(1 << 16)
                if not data:
                    raise Died("the connection ended")
                for body in self._frames.feed(data):
                    self._answers.append(pb.Response.FromString(body))
        return self._answers.pop(0)

    async def ask(self, kind: str, message: Any = None) -> Any:
        """Ask and flush, as the engine does. Raises Died at an exception."""
        self.send(pb.Request(**{kind: message or pb.Empty()}), pb.Request(flush=pb.Empty()))
        answer = await self.receive()
        if answer.WhichOneof("value") == "exception":
            raise Died(answer.exception.error)
        assert answer.WhichOneof("value") == kind
        assert (await self.receive()).WhichOneof("value") == "flush"
        return getattr(answer, kind)

    def close(self) -> None:
        self._writer.close()


@dataclass
class Site:
    """The application of one member behind its server; ``saved`` is what its disk holds."""

    genesis: GenesisConfig
    folder: Path
    wait: float = 0.05
    saved: bytes = b""
    address: str = ""
    faults: list[BaseException] = field(default_factory=list)
    told: list[object] = field(default_factory=list)
    save: Callable[[bytes], None] | None = None

    async def up(self) -> None:
        """Start from the disk."""
        self.application = Application(self.genesis)
        if self.saved:
            self.application.resume(self.saved)
        self.calls = Calls(
            self.application,
            genesis_call(self.genesis),
            lambda: frozenset({"friend"}),
            wait=self.wait,
            tell=self._tell,
            seat_power=10,
        )
        self._server = AbciServer(self.calls.answer, self.faults.append)
        self.folder.mkdir(exist_ok=True)
        self.address = await self._server.open(str(self.folder / "abci"))

    def _tell(self, event: object) -> None:
        self.told.append(event)
        if isinstance(event, CommitBlock):
            self.application.commit()
        if self.save is not None:
            self.save(self.application.saved())
        self.saved = self.application.saved()

    async def down(self) -> None:
        await self._server.close()


class Node:
    """One engine in front of an application, with a mempool that its death empties."""

    def __init__(self, site: Site) -> None:
        self.site = site
        self.mempool: dict[bytes, None] = {}
        self.connections: dict[str, Connection] = {}
        self.verdict: Any = None

    @property
    def address(self) -> str:
        return self.site.address

    @property
    def genesis(self) -> pb.RequestInitChain:
        return genesis_call(self.site.genesis)

    async def up(self, blocks: Sequence[Sequence[bytes]]) -> None:
        """Connect, shake hands, and hand over the blocks that the application lacks."""
        opened = {name: await Connection.open(self.address) for name in CONNECTIONS}
        self.connections = opened
        info = await self.ask("query", "info")
        if not info.last_block_height:
            await self.ask("consensus", "init_chain", self.genesis)
        for height in range(info.last_block_height + 1, len(blocks) + 1):
            await self.finalize(height, blocks[height - 1])
            await self.ask("consensus", "commit")

    async def ask(self, connection: str, kind: str, message: Any = None) -> Any:
        link = self.connections.get(connection)
        if link is None:
            raise Died("it is down")
        return await link.ask(kind, message)

    async def finalize(self, height: int, txs: Sequence[bytes]) -> pb.ResponseFinalizeBlock:
        call = pb.RequestFinalizeBlock(height=height, txs=txs)
        answer: pb.ResponseFinalizeBlock = await self.ask("consensus", "finalize_block", call)
        return answer

    def die(self) -> None:
        for connection in self.connections.values():
            connection.close()
        self.connections, self.mempool = {}, {}


class Chain:
    """Orders blocks for the nodes that are up."""

    def __init__(self, sites: Sequence[Site] = ()) -> None:
        self.nodes = [Node(site) for site in sites]
        self.blocks: list[list[bytes]] = []
        self.results: list[list[pb.ResponseFinalizeBlock]] = []
        self.turn = 0

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.nodes if node.connections]

    async def start(self) -> None:
        for node in self.nodes:
            await node.site.up()
            await node.up(self.blocks)

    async def stop(self) -> None:
        for node in self.nodes:
            node.die()
            await node.site.down()

    async def restart(self, node: Node, *, site: bool) -> None:
        """The engine dies and comes back; with ``site`` the application does, too."""
        node.die()
        if site:
            await node.site.down()
            await node.site.up()
        await node.up(self.blocks)

    async def submit(self, tx: bytes) -> list[int]:
        """Offer a transaction to every node that is up; returns the codes of ``check_tx``."""
        codes = []
        for node in self.alive:
            answer = await node.ask("mempool", "check_tx", pb.RequestCheckTx(tx=tx))
            codes.append(answer.code)
            if answer.code == 0:
                node.mempool[tx] = None
        return codes

    async def order(self, dies: Callable[[Node], bool] = lambda node: False) -> list[bytes]:
        """Make one block. Nodes that ``dies`` names are killed between finalize and commit."""
        proposer = self.alive[self.turn % len(self.alive)]
        height = len(self.blocks) + 1
        self.turn += 1
        call = pb.RequestPrepareProposal(
            max_tx_bytes=MAX_BLOCK, txs=list(proposer.mempool), height=height
        )
        txs = list((await proposer.ask("consensus", "prepare_proposal", call)).txs)
        for node in self.alive:
            judged = pb.RequestProcessProposal(txs=txs, height=height)
            verdict = await node.ask("consensus", "process_proposal", judged)
            assert verdict.result == 1, "an honest proposal was refused"
        self.blocks.append(txs)
        self.results.append([await node.finalize(height, txs) for node in self.alive])
        for node in self.alive:
            if dies(node):
                await self.restart(node, site=True)
                continue
            await node.ask("consensus", "commit")
            for tx in list(node.mempool):
                again = await node.ask("mempool", "check_tx", pb.RequestCheckTx(tx=tx))
                if tx in txs or again.code:
                    del node.mempool[tx]
        return txs


class LiveEngine(Node):
    """What a host starts in the place of CometBFT: a node of a ``LiveChain``."""

    def __init__(self, chain: LiveChain, run: RunSpec, folder: Path) -> None:
        self.chain, self.rpc, self.process = chain, self, self
        self.application = str(folder / "abci")
        self.mempool, self.connections = {}, {}
        self._genesis = init_chain_of(genesis_document(run))
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submitted: list[bytes] = []

    @property
    def address(self) -> str:
        return f"unix://{self.application}"

    @property
    def genesis(self) -> pb.RequestInitChain:
        return self._genesis

    async def start(self) -> None:
        await self.chain.join(self)

    async def ready(self) -> None:
        if not self.connections:
            raise RpcError("the engine does not answer", where="ready")

    async def stop(self) -> None:
        self.die()
        self.chain.leave(self)

    async def submit(self, tx: bytes) -> None:
        """Into the own mempool, and by gossip into all others."""
        if not self.connections:
            raise RpcError("the engine does not answer", where="submit")
        self.submitted.append(tx)
        self.chain.inbox.put_nowait(tx)


class LiveChain(Chain):
    """Orders whatever its engines are given, until it is closed. A node whose application dies in
    a call is dead until it is started again; a quorum goes on without it."""

    def __init__(self, quorum: int = 3) -> None:
        super().__init__()
        self.quorum = quorum
        self.inbox: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.dies: Callable[[Node, str], bool] = lambda node, call: False
        """Whether a node dies at this call of a block."""
        self._lock = asyncio.Lock()
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def join(self, node: LiveEngine) -> None:
        async with self._lock:
            try:
                await node.up(self.blocks)
            except (Died, OSError):
                node.die()
            self.nodes.append(node)
        self.inbox.put_nowait(None)

    def leave(self, node: LiveEngine) -> None:
        self.nodes = [other for other in self.nodes if other is not node]

    async def close(self) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _live(self) -> None:
        while True:
            given = [await self.inbox.get()]
            while not self.inbox.empty():
                given.append(self.inbox.get_nowait())
            async with self._lock:
                for tx in given:
                    if tx is not None:
                        await self._each("check_tx", pb.RequestCheckTx(tx=tx))
                while len(self.alive) >= self.quorum and any(n.mempool for n in self.alive):
                    await self._block()

    async def _block(self) -> None:
        proposer = self.alive[self.turn % len(self.alive)]
        self.turn += 1
        height = len(self.blocks) + 1
        call = pb.RequestPrepareProposal(
            max_tx_bytes=MAX_BLOCK, txs=list(proposer.mempool), height=height
        )
        if not await self._make(proposer, "prepare_proposal", call):
            return
        txs = list(proposer.verdict.txs)
        judged = pb.RequestProcessProposal(txs=txs, height=height)
        for node in await self._each("process_proposal", judged):
            assert node.verdict.result == 1, "an honest proposal was refused"
        if len(self.alive) < self.quorum:
            return
        self.blocks.append(txs)
        final = pb.RequestFinalizeBlock(txs=txs, height=height)
        await self._each("finalize_block", final)
        await self._each("commit", pb.Empty())
        for node in self.alive:
            left = [tx for tx in node.mempool if tx not in txs]
            node.mempool = {}
            for tx in left:
                await self._make(node, "check_tx", pb.RequestCheckTx(tx=tx))

    async def _each(self, call: str, message: Any) -> list[Node]:
        """Make a call to all that are up; returns those that answered."""
        return [node for node in self.alive if await self._make(node, call, message)]

    async def _make(self, node: Node, call: str, message: Any) -> bool:
        if self.dies(node, call):
            node.die()
            return False
        try:
            connection = "mempool" if call == "check_tx" else "consensus"
            node.verdict = await node.ask(connection, call, message)
        except (Died, OSError):
            node.die()
            return False
        if call == "check_tx" and node.verdict.code == 0:
            node.mempool[message.tx] = None
        return True
