"""What a node hands to its engine, when, and what it does while there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from fake_engine import PAUSE, Connection, genesis_call, until
from round_world import World

from torchbft.node.ordering import orderer as orderers
from torchbft.node.ordering.calls import Calls
from torchbft.node.ordering.orderer import MAX_QUEUED, Orderer
from torchbft.node.ordering.proto import abci_pb2 as pb
from torchbft.node.ordering.rpc import RpcError
from torchbft.primitives.errors import ConfigError, DecodeError, TorchbftError
from torchbft.primitives.ids import Height
from torchbft.protocols.peer import CommitBlock, EngineStarted
from torchbft.protocols.round.application import Application


class StubEngine:
    """Notes what it is given; answers as it is told to."""

    def __init__(self, folder: Path) -> None:
        self.application = str(folder / "abci")
        self.rpc = self.process = self
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.submitted: list[bytes] = []
        self.life: list[str] = []
        self.answer: TorchbftError | None = None
        self.asks: Callable[[bytes], Awaitable[None]] | None = None
        self.up = True

    async def start(self) -> None:
        assert Path(self.application).exists(), "the application is served first"
        self.life.append("start")

    async def ready(self) -> None:
        if not self.up:
            raise RpcError("the engine does not answer", where="status")

    async def stop(self) -> None:
        assert Path(self.application).exists(), "and to the end"
        self.life.append("stop")

    async def submit(self, tx: bytes) -> None:
        self.submitted.append(tx)
        if self.answer is not None:
            raise self.answer
        if self.asks is not None:
            await self.asks(tx)


class StubFollower:
    def __init__(self) -> None:
        self.calls: list[str] = []
        self.error: TorchbftError | None = None

    async def catch_up(self) -> int:
        self.calls.append("catch_up")
        if self.error is not None:
            raise self.error
        return 1

    async def close(self, seconds: float) -> None:
        self.calls.append("close")
        if self.error is not None:
            raise self.error


class Bench:
    """An orderer over stubs, and four members' statements."""

    def __init__(self, folder: Path) -> None:
        self.world = World(4)
        self.application = Application(self.world.genesis)
        self.engine, self.follower = StubEngine(folder), StubFollower()
        self.fed: list[object] = []
        self.notices: list[str] = []
        self.calls = Calls(
            self.application,
            genesis_call(self.world.genesis),
            frozenset,
            wait=0.0,
            tell=self._tell,
            seat_power=10,
        )
        self.orderer = Orderer(
            self.engine,
            self.calls,
            self.fed.append,
            self.notices.append,
            self.follower,  # type: ignore[arg-type]
        )
        self.engine.asks = self.gossip
        self.readies = [self.world.ready(name) for name in self.world.names]

    def _tell(self, event: object) -> None:
        if isinstance(event, CommitBlock):
            self.application.commit()

    def order(self, *txs: bytes) -> None:
        for tx in txs:
            self.application.check_tx(tx)
            self.orderer.order(tx)

    async def ask(self, kind: str, message: object = None) -> None:
        await self.calls.answer(pb.Request(**{kind: message or pb.Empty()}))  # type: ignore[arg-type]

    async def gossip(self, *txs: bytes) -> None:
        """The engine heard of these and asks about them."""
        for tx in txs:
            await self.ask("check_tx", pb.RequestCheckTx(tx=tx))

    async def block(self, *txs: bytes) -> None:
        height = Height(self.application.info().last_height + 1)
        await self.ask("finalize_block", pb.RequestFinalizeBlock(height=height, txs=txs))
        await self.ask("commit")


async def settled(bench: Bench) -> None:
    await until(lambda: not bench.orderer._queue)


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a story about an orderer that was started."""
    for name in ("GOSSIP_SECONDS", "RETRY_SECONDS", "FOLLOW_SECONDS"):
        monkeypatch.setattr(orderers, name, PAUSE)

    def run(story: Callable[[Bench], Awaitable[None]]) -> None:
        async def told() -> None:
            made = Bench(tmp_path)
            await made.orderer.start()
            try:
                await story(made)
            finally:
                await made.orderer.stop()
            assert made.engine.life == ["start", "stop"]

        asyncio.run(told())

    return run


Run = Callable[[Callable[[Bench], Awaitable[None]]], None]


def test_one_transaction_goes_over_at_once_and_gossip_brings_the_rest(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(here: Bench) -> None:
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def sleep(seconds: float) -> None:
            assert seconds == orderers.GOSSIP_SECONDS
            await waits

        monkeypatch.setattr(orderers.asyncio, "sleep", sleep)
        here.order(*here.readies)
        while len(here.calls.known) < 1:
            await asyncio.wait([waits], timeout=PAUSE)
        await here.gossip(*here.readies[1:])
        waits.set_result(None)
        while here.orderer._queue:
            await asyncio.wait([asyncio.ensure_future(here.ask("flush"))], timeout=PAUSE)
        assert here.engine.submitted == here.readies[:1]
        monkeypatch.undo()

    bench(story)


def test_what_gossip_does_not_bring_is_handed_over(bench: Run) -> None:
    async def story(here: Bench) -> None:
        here.order(*here.readies)
        await settled(here)
        assert here.engine.submitted == here.readies

    bench(story)


def test_what_the_engine_asked_about_is_not_handed_over(bench: Run) -> None:
    async def story(here: Bench) -> None:
        await here.gossip(*here.readies)
        here.order(*here.readies)
        await settled(here)
        assert here.engine.submitted == []

    bench(story)


def test_what_is_on_the_ledger_is_not_handed_over(bench: Run) -> None:
    async def story(here: Bench) -> None:
        await here.block(*here.readies)
        here.order(*here.readies)
        await settled(here)
        assert here.engine.submitted == []

    bench(story)


def test_after_a_block_the_engine_is_told_again_of_what_it_left_out(bench: Run) -> None:
    async def story(here: Bench) -> None:
        await here.gossip(here.readies[3])
        await here.block(*here.readies[:3])
        here.order(here.readies[3])  # whether its mempool still has it is not known
        await settled(here)
        late = here.engine.submitted
        assert late == []  # the round has opened: a ready is of no use any more
        commit = here.world.commit("peer-0", 0)
        await here.gossip(commit)
        await here.block()
        here.order(commit)
        await settled(here)
        assert here.engine.submitted == [commit]

    bench(story)


def test_while_the_engine_is_down_transactions_wait_for_it(bench: Run) -> None:
    async def story(here: Bench) -> None:
        here.engine.answer = RpcError("the engine does not answer", where="submit")
        here.order(here.readies[0])
        await until(lambda: len(here.engine.submitted) > 2)
        here.engine.answer = None
        await settled(here)
        assert set(here.engine.submitted) == {here.readies[0]}

    bench(story)


def test_an_engine_that_is_down_is_not_asked_without_a_pause(
    bench: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(here: Bench) -> None:
        monkeypatch.setattr(orderers, "RETRY_SECONDS", 1e6)
        here.engine.answer = RpcError("the engine does not answer", where="submit")
        here.order(here.readies[0])
        looks = iter(range(50))
        await until(lambda: next(looks) == 49)
        assert len(here.engine.submitted) == 1

    bench(story)


def test_what_the_engine_refuses_comes_from_its_author_again(bench: Run) -> None:
    async def story(here: Bench) -> None:
        here.engine.answer = RpcError("mempool is full", where="submit", code=-32603)
        here.order(here.readies[0])
        await settled(here)
        here.engine.answer = None
        here.order(here.readies[0])
        await settled(here)
        assert here.engine.submitted == [here.readies[0]] * 2

    bench(story)


def test_the_queue_is_bounded_and_forgets_what_no_block_can_hold(bench: Run) -> None:
    async def story(here: Bench) -> None:
        here.engine.answer = RpcError("the engine does not answer", where="submit")
        for number in range(MAX_QUEUED + 10):
            here.orderer.order(b"%d" % number)  # of no member: as if admitted before a block
        assert len(here.orderer._queue) == MAX_QUEUED
        await settled(here)
        assert here.engine.submitted == []

    bench(story)


def test_each_engine_that_shakes_hands_and_answers_is_told_once(bench: Run) -> None:
    async def story(here: Bench) -> None:
        assert here.fed == []
        link = await Connection.open(f"unix://{here.engine.application}")
        await link.ask("info")
        await until(lambda: here.fed == [EngineStarted()])
        here.engine.up = False
        await link.ask("info")
        await until(lambda: not here.calls.greeted.is_set())
        here.engine.up = True
        await link.ask("info")
        await until(lambda: len(here.fed) == 2)
        link.close()

    bench(story)


def test_an_engine_that_shakes_hands_has_forgotten_everything(bench: Run) -> None:
    async def story(here: Bench) -> None:
        await here.gossip(*here.readies)
        await here.ask("info")
        here.order(here.readies[0])
        await settled(here)
        assert here.engine.submitted == [here.readies[0]]

    bench(story)


def test_the_log_of_the_chain_follows_blocks_and_is_closed_before_the_engine(bench: Run) -> None:
    async def story(here: Bench) -> None:
        await here.block()
        await until(lambda: "catch_up" in here.follower.calls)
        await here.block()
        await until(lambda: here.follower.calls.count("catch_up") == 2)
        stop = here.engine.stop

        async def stopping() -> None:
            assert here.follower.calls[-1] == "close"
            await stop()

        here.engine.stop = stopping  # type: ignore[method-assign]

    bench(story)


def test_a_chain_that_does_not_hold_is_told_once_and_stops_nothing(bench: Run) -> None:
    async def story(here: Bench) -> None:
        here.follower.error = DecodeError("block 1 is of height 2", where="chain.log", hint="look")
        for count in range(1, 4):
            await here.block()
            await until(lambda count=count: len(here.follower.calls) >= count)  # type: ignore[misc]
        here.order(*here.readies)
        await until(lambda: bool(here.engine.submitted))
        assert len(here.notices) == 1
        assert "block 1 is of height 2" in here.notices[0]

    bench(story)


def test_an_engine_that_does_not_start_is_an_error_and_leaves_no_socket(tmp_path: Path) -> None:
    async def story() -> None:
        here = Bench(tmp_path)

        async def missing() -> None:
            raise ConfigError("CometBFT is not installed", hint="make cometbft")

        here.engine.start = missing  # type: ignore[method-assign]
        with pytest.raises(ConfigError, match="not installed"):
            await here.orderer.start()
        await here.orderer.stop()

    asyncio.run(story())
    assert list(tmp_path.iterdir()) == []
