"""An ordering engine outside and what a node does for it: serves the application, hands it work.

Transactions come from their authors over the control channel (ROUND.md 18), and the application
has them for proposals at once. The engine has to know of one to begin a block; the others reach it
by its own gossip, or from here if they do not. Each would cost a call otherwise, at every peer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from torchbft.node.ordering.abci_server import AbciServer
from torchbft.node.ordering.calls import Calls, init_chain_of
from torchbft.node.ordering.cometbft import CometEngine
from torchbft.node.ordering.follower import CHAIN_LOG, Follower
from torchbft.node.ordering.genesis import POWER_OF_A_SEAT, chain_id, genesis_document
from torchbft.node.ordering.rpc import RpcError
from torchbft.primitives.errors import TorchbftError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.chain.evidence import evidence_in
from torchbft.protocols.chain.messages import ChainRecord, address_of
from torchbft.protocols.peer import EngineStarted
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.interface import Found

MAX_QUEUED = 4096
"""Transactions that wait to be handed over; their authors send again what is left out."""

AT_ONCE = 8
"""Calls at a time: the engine answers each only after it asked the application, which takes it up
to 20 ms."""

GOSSIP_SECONDS = 0.1
"""An engine that has something to begin with gets so long to hear of the rest by itself."""

RETRY_SECONDS = 0.25
"""Between attempts while the engine is starting."""


FOLLOW_SECONDS = 0.5
"""Between looks at the chain: one call fetches all that is new."""

EXPORT_SECONDS = 5.0
"""For the last commit, before the engine is stopped."""


class Submits(Protocol):
    async def submit(self, tx: bytes) -> Any:
        """Raises TorchbftError if the engine gave no answer."""


class Supervised(Protocol):
    failed: asyncio.Future[None]
    """Gets a HaltError when starting the engine again does not help."""


class Engine(Protocol):
    """What runs below, as ``cometbft.CometEngine``."""

    application: str
    """Path of the socket at which the application is to be served."""

    @property
    def rpc(self) -> Submits: ...
    @property
    def process(self) -> Supervised: ...

    async def start(self) -> None: ...
    async def ready(self) -> None: ...
    async def stop(self) -> None: ...


class Orderer:
    """Lives from ``start`` to ``stop``.

    feed: gives the peer's machine an input. notice: takes lines for the node's log.
    """

    def __init__(
        self,
        engine: Engine,
        calls: Calls,
        feed: Callable[[object], None],
        notice: Callable[[str], None],
        follower: Follower | None = None,
    ) -> None:
        self._engine, self._calls, self._feed, self._notice = engine, calls, feed, notice
        self._follower = follower
        self._server = AbciServer(calls.answer, self._told)
        self._queue: dict[bytes, None] = {}
        self._more = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def failed(self) -> asyncio.Future[None]:
        """Gets a HaltError when the engine is no longer started again."""
        return self._engine.process.failed

    def _told(self, error: BaseException) -> None:
        """What the engine got as an exception: it ends, and its supervisor starts it again."""
        hint = getattr(error, "hint", "")
        self._notice(f"the ordering engine was refused: {error}" + (f"; {hint}" if hint else ""))

    async def start(self) -> None:
        """Serve the application, then start the engine. Raises ConfigError, StorageError."""
        await self._server.open(self._engine.application)
        await self._engine.start()
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(each) for each in (self._hand_over(), self._announce(), self._follow())
        ]

    async def stop(self) -> None:
        """End the engine, and only then the application. May be called twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        if self._follower is not None:
            with suppress(TorchbftError, TimeoutError):  # told before, or an engine that is down
                await self._follower.close(EXPORT_SECONDS)
        await self._engine.stop()
        await self._server.close()

    def order(self, tx: bytes) -> None:
        """Have the engine order a transaction that the application admitted."""
        self._calls.arrived()
        if len(self._queue) < MAX_QUEUED:
            self._queue[tx] = None
        self._more.set()

    async def _announce(self) -> None:
        """Tell the machine of each engine that has shaken hands and answers calls."""
        while True:
            await self._calls.greeted.wait()
            self._calls.greeted.clear()
            with suppress(TorchbftError):  # it died again, and will greet again
                await self._engine.ready()
                self._feed(EngineStarted())

    async def _follow(self) -> None:
        """Keep the log of the chain up with the engine's blocks."""
        told = ""
        while self._follower is not None:
            await self._calls.committed.wait()
            self._calls.committed.clear()
            try:
                await self._follower.catch_up()
            except RpcError:
                pass  # it is starting or ending: what is missing is fetched with the next block
            except TorchbftError as error:
                if str(error) != told:
                    told = str(error)
                    self._notice(f"the log of the chain does not grow: {error}; {error.hint}")
            await asyncio.sleep(FOLLOW_SECONDS)

    async def _hand_over(self) -> None:
        while True:
            await self._more.wait()
            self._more.clear()
            while self._lacking():
                if self._calls.known:
                    await asyncio.sleep(GOSSIP_SECONDS)
                count = AT_ONCE if self._calls.known else 1
                tried = self._lacking()[:count]
                answered = await asyncio.gather(*map(self._submit, tried))
                if not all(answered):
                    await asyncio.sleep(RETRY_SECONDS)

    def _lacking(self) -> list[bytes]:
        """What the engine does not know and a block could still hold; the rest is forgotten."""
        self._queue = {tx: None for tx in self._queue if self._calls.lacks(tx)}
        return list(self._queue)

    async def _submit(self, tx: bytes) -> bool:
        """Whether the engine gave an answer, whatever it is: refused ones come from their authors
        again."""
        try:
            await self._engine.rpc.submit(tx)
        except TorchbftError as error:
            if not getattr(error, "code", 0):
                return False
        self._queue.pop(tx, None)
        return True


def accuser(
    application: Application, feed: Callable[[object], None]
) -> Callable[[ChainRecord], None]:
    """Hears blocks and tells the machine of double votes in them. The engine reports these to the
    application without the votes; with them they go on the ledger, and convict there."""

    def heard(record: ChainRecord) -> None:
        names = {address_of(public): name for public, name in application.names.items()}
        for evidence in evidence_in(record, names):
            feed(Found(evidence))

    return heard


def orderer_of(
    run: RunSpec,
    me: PeerId,
    folder: Path,
    application: Application,
    *,
    identity: SigningKey,
    voting: SigningKey,
    feed: Callable[[object], None],
    notice: Callable[[str], None],
    reachable: Callable[[], Collection[str]],
    engine: Engine | None = None,
) -> Orderer:
    """The engine that a run names, with this application before it; or another ``engine``."""
    members = frozenset(member.ledger_id for member in run.members)
    calls = Calls(
        application,
        init_chain_of(genesis_document(run)),
        lambda: members,
        wait=run.ledger.proposal_wait,
        tell=feed,
        seat_power=POWER_OF_A_SEAT,
    )
    if engine is not None:
        return Orderer(engine, calls, feed, notice)
    comet = CometEngine(
        run, me, folder, identity=identity, voting=voting, notice=notice, reachable=reachable
    )
    seen = accuser(application, feed)
    follower = Follower(folder / CHAIN_LOG, comet.rpc, chain_id(run), seen)
    return Orderer(comet, calls, feed, notice, follower)
