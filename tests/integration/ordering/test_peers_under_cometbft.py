"""Whole peers with real CometBFT engines: rounds to the end, engines killed, peers stopped."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "node"))

from comet_swarm import needs_cometbft
from node_swarm import LocalSwarm, run_swarm

from torchbft.node import driver
from torchbft.node.ordering.cometbft import CometEngine
from torchbft.primitives import trace
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import Ledger

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms"), needs_cometbft]

A, B, C, D = (PeerId(f"peer-{letter}") for letter in "abcd")
PATIENT = Ledger(kind="cometbft", proposal_wait=5.0)
"""A proposer waits until all is there, however slow this machine is."""
SECONDS = 240.0
"""Bound of a whole run on a busy machine; on an idle one it takes ten."""


def engine_of(swarm: LocalSwarm, name: PeerId) -> CometEngine:
    orderer: Any = swarm.hosts[name]._orderer
    engine: CometEngine = orderer._engine
    return engine


def under_cometbft(
    folder: Path, story: Callable[[LocalSwarm], Awaitable[None]], rounds: int, ledger: Ledger
) -> LocalSwarm:
    swarm = LocalSwarm(folder, rounds=rounds, ledger=ledger, limit=SECONDS)

    async def told(swarm: LocalSwarm) -> None:
        driver.LINGER_SECONDS = SECONDS  # who finished serves those that were away, to the end
        for name in swarm.names:
            swarm.up(name)
        await story(swarm)
        await swarm.finished()

    run_swarm(swarm, told)
    assert len({swarm.root(name) for name in swarm.names}) == 1
    return swarm


def test_rounds_are_agreed_on_in_few_blocks(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        pass

    swarm = under_cometbft(tmp_path, story, 4, PATIENT)
    ended = swarm.rounds(A)
    assert sorted(ended) == [0, 1, 2, 3]
    assert {tuple(record.accepted) for record in ended.values()} == {tuple(swarm.names)}
    full = [block for block in swarm.records(A, trace.BlockFinalized) if block.txs]
    assert len(full) <= 1 + 4 * 3 + 1, "ready, three a round, the last certificate"
    assert not any(swarm.records(name, trace.Accused) for name in swarm.names)


def test_engines_killed_in_every_round_cost_time_and_nothing_else(tmp_path: Path) -> None:
    """And a peer is stopped and started: its application and engine find each other again."""
    rounds = 5
    killed: list[PeerId] = []

    async def story(swarm: LocalSwarm) -> None:
        for number, name in enumerate((B, D, A)):
            await swarm.until(lambda number=number: number in swarm.rounds(C))  # type: ignore[misc]
            pid = engine_of(swarm, name).process.pid
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
                killed.append(name)
        await swarm.down(C)
        swarm.up(C)

    swarm = under_cometbft(tmp_path, story, rounds, Ledger(kind="cometbft"))
    assert killed
    for name in swarm.names:
        assert sorted(swarm.rounds(name)) == list(range(rounds))
        named = [each.peer for each in swarm.records(name, trace.Accused) if each.named]
        assert named == [], "nobody signed twice"
    assert all("starting it again" in swarm.notices(name) for name in killed)
