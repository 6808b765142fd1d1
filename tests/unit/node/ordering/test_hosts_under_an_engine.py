"""Whole peers whose blocks an engine outside orders: rounds, crashes, restarts, a full disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import LiveChain, LiveEngine, Node
from node_swarm import LocalSwarm, run_swarm

from torchbft.node import driver
from torchbft.node.driver import APPLICATION, PeerHost
from torchbft.node.storage.saved import load_value
from torchbft.node.supervisor import EXIT_FAILED, EXIT_HALTED
from torchbft.primitives import trace
from torchbft.primitives.errors import HaltError, StorageError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import Ledger

A, B, C, D = (PeerId(f"peer-{letter}") for letter in "abcd")


OUTSIDE = Ledger(kind="cometbft")


class Outside:
    """A swarm under a ``LiveChain``."""

    def __init__(self, swarm: LocalSwarm) -> None:
        self.swarm, self.chain = swarm, LiveChain()
        self.engines: dict[PeerId, LiveEngine] = {}

    def up(self, *names: PeerId, **options: Any) -> None:
        for name in names or self.swarm.names:
            engine = LiveEngine(self.chain, self.swarm.run, self.swarm.folder / name)
            self.engines[name] = engine
            self.swarm.up(name, engine=engine, **options)

    def heights(self) -> dict[PeerId, int]:
        return {name: self._height(name) for name in self.swarm.names}

    def _height(self, name: PeerId) -> int:
        machine = getattr(self.host(name), "_machine", None)  # none before it is opened
        return machine.application.info().last_height if machine is not None else 0

    def host(self, name: PeerId) -> PeerHost:
        return self.swarm.hosts[name]


Story = Callable[[Outside], Awaitable[None]]


def under_an_engine(
    folder: Path, story: Story, rounds: int = 3, ledger: Ledger = OUTSIDE
) -> LocalSwarm:
    swarm = LocalSwarm(folder, rounds=rounds, ledger=ledger)

    async def told(swarm: LocalSwarm) -> None:
        driver.LINGER_SECONDS = swarm.limit  # who finished serves those that were away, to the end
        outside = Outside(swarm)
        try:
            await story(outside)
        finally:
            await swarm.close()
            await outside.chain.close()

    run_swarm(swarm, told)
    return swarm


def agree(swarm: LocalSwarm, *names: PeerId, rounds: int = 3) -> None:
    chosen = names or tuple(swarm.names)
    assert len({swarm.root(name) for name in chosen}) == 1
    for name in chosen:
        ended = swarm.rounds(name)
        assert sorted(ended) == list(range(rounds)), name
        assert not any(record.void for record in ended.values())


def test_a_run_under_an_engine_outside(tmp_path: Path) -> None:
    async def story(outside: Outside) -> None:
        outside.up()
        await outside.swarm.finished()

    swarm = under_an_engine(tmp_path, story)
    agree(swarm)
    for name in swarm.names:
        assert {r.accepted for r in swarm.rounds(name).values()} == {tuple(swarm.names)}
        assert {path.stem for path in (tmp_path / name).glob("*.log")} == {"statements"}
        assert not swarm.records(name, trace.Accused)
        blocks = swarm.records(name, trace.BlockFinalized)
        assert [block.height for block in blocks] == list(range(1, len(blocks) + 1))
        assert {r.engine for r in swarm.records(name, trace.RunStarted)} == {"cometbft"}
    saved = {load_value(tmp_path / name / APPLICATION, "") for name in swarm.names}
    assert len(saved) == 1, "all stand at the same state"
    assert None not in saved


def test_a_phase_is_one_block_and_few_calls(tmp_path: Path) -> None:
    """The proposer waits for what the phase expects; gossip brings the rest to the others."""
    calls: list[int] = []

    async def story(outside: Outside) -> None:
        outside.up()
        await outside.swarm.finished()
        calls.extend(len(engine.submitted) for engine in outside.engines.values())

    patient = Ledger(kind="cometbft", proposal_wait=20.0)
    swarm = under_an_engine(tmp_path, story, rounds=4, ledger=patient)
    for name in swarm.names:
        full = [b for b in swarm.records(name, trace.BlockFinalized) if b.txs]
        assert len(full) <= 1 + 4 * 3 + 1, "ready, three a round, the last certificate"
    assert all(calls)


CALLS = ("check_tx", "prepare_proposal", "process_proposal", "finalize_block", "commit")


@pytest.mark.parametrize("call", CALLS)
def test_an_engine_that_dies_at_a_call_comes_back_and_nothing_is_lost(
    tmp_path: Path, call: str
) -> None:
    async def story(outside: Outside) -> None:
        died: list[Node] = []

        def dies(node: Node, now: str) -> bool:
            hit = node is outside.engines[B] and now == call and len(outside.chain.blocks) >= 4
            if hit and not died:
                died.append(node)
                return True
            return False

        outside.chain.dies = dies
        outside.up()
        await outside.swarm.until(lambda: bool(died))
        engine = outside.engines[B]
        outside.chain.leave(engine)
        await engine.start()  # as its supervisor would
        await outside.swarm.finished()

    agree(under_an_engine(tmp_path, story))


def test_a_peer_that_dies_between_finalize_and_commit_takes_the_block_again(
    tmp_path: Path,
) -> None:
    async def story(outside: Outside) -> None:
        died: list[Node] = []

        def dies(node: Node, now: str) -> bool:
            hit = node is outside.engines[C] and now == "commit" and len(outside.chain.blocks) == 5
            if hit:
                died.append(node)
            return hit

        outside.chain.dies = dies
        outside.up()
        await outside.swarm.until(lambda: bool(died))
        assert outside.heights()[C] == 4
        await outside.swarm.down(C)
        outside.chain.dies = lambda node, now: False
        outside.up(C)
        await outside.swarm.finished()

    agree(under_an_engine(tmp_path, story))


def test_all_may_stop_and_start_in_any_order(tmp_path: Path) -> None:
    async def story(outside: Outside) -> None:
        outside.up()
        await outside.swarm.until(lambda: min(outside.heights().values()) >= 6)
        for name in (B, A, D, C):
            await outside.swarm.down(name)
        outside.up(D, B, A, C)
        await outside.swarm.finished()

    agree(under_an_engine(tmp_path, story))


def test_a_peer_without_its_saved_state_is_handed_all_blocks_again(tmp_path: Path) -> None:
    async def story(outside: Outside) -> None:
        outside.up()
        await outside.swarm.until(lambda: min(outside.heights().values()) >= 6)
        await outside.swarm.down(A)
        (outside.swarm.folder / A / APPLICATION).unlink()
        outside.up(A)
        await outside.swarm.finished()

    swarm = under_an_engine(tmp_path, story)
    assert len({swarm.root(name) for name in swarm.names}) == 1


def test_a_damaged_saved_state_stops_the_peer_with_what_to_do(tmp_path: Path) -> None:
    async def story(outside: Outside) -> None:
        outside.up()
        await outside.swarm.finished()
        await outside.swarm.down(A)
        path = outside.swarm.folder / A / APPLICATION
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        outside.up(A)
        with pytest.raises(StorageError, match="damaged") as caught:
            await outside.swarm.tasks.pop(A)
        assert "hands its blocks over again" in caught.value.hint

    under_an_engine(tmp_path, story)


def test_a_full_disk_stops_the_peer_before_its_block_counts_and_the_others_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save = driver.save_value
    victims: list[Path] = []

    def full(path: Path, value: bytes) -> None:
        if path.parent.name == D and victims:
            raise StorageError("saving a file failed: the disk is full", where=str(path))
        save(path, value)

    async def story(outside: Outside) -> None:
        monkeypatch.setattr(driver, "save_value", full)
        outside.up()
        await outside.swarm.until(lambda: min(outside.heights().values()) >= 4)
        victims.append(outside.swarm.folder / D)
        assert await outside.swarm.tasks.pop(D) == EXIT_FAILED
        before = load_value(outside.swarm.folder / D / APPLICATION, "")
        assert before is not None
        await outside.swarm.until(lambda: len(outside.chain.blocks) > 6)
        victims.clear()
        outside.up(D)  # with space again
        await outside.swarm.finished()

    agree(under_an_engine(tmp_path, story))


def test_an_engine_that_cannot_be_kept_alive_halts_the_peer(tmp_path: Path) -> None:
    async def story(outside: Outside) -> None:
        outside.up()
        await outside.swarm.until(lambda: bool(outside.engines[A].connections))
        outside.engines[A].failed.set_exception(HaltError("CometBFT failed 11 times in a row"))
        assert await outside.swarm.tasks.pop(A) == EXIT_HALTED
        (ended,) = outside.swarm.records(A, trace.RunEnded)
        assert "11 times" in ended.reason

    under_an_engine(tmp_path, story)


def test_what_the_engine_is_refused_is_told(tmp_path: Path) -> None:
    async def story(outside: Outside) -> None:
        outside.up(B, C, D)
        engine = LiveEngine(outside.chain, outside.swarm.run, outside.swarm.folder / A)
        engine._genesis.chain_id = "another"
        outside.swarm.up(A, engine=engine)
        await outside.swarm.until(lambda: "another genesis" in outside.swarm.notices(A))
        await outside.swarm.finished(B, C, D)

    under_an_engine(tmp_path, story)
