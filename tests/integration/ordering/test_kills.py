"""Engines and their nodes' ends killed at random moments: no slot is signed twice, all go on."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest
from comet_swarm import Swarm, needs_cometbft, until

from torchbft.node.ordering.proto import privval_pb2 as pb
from torchbft.node.ordering.signing import STEPS, Signer
from torchbft.primitives.ids import PeerId

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms"), needs_cometbft]

KILLS = 8
SEED = 7


class Watched:
    """Every signature that leaves any signer, by key and slot."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.signed: dict[tuple[bytes, int, int, int], bytes] = {}
        self.twice: list[object] = []
        self.again = 0
        truth = Signer.answer

        def answer(signer: Signer, request: pb.Message) -> pb.Message:
            given = truth(signer, request)
            for one in (given.signed_vote_response.vote, given.signed_proposal_response.proposal):
                if one.signature:
                    self._left(signer.state.last.public, one)
            return given

        monkeypatch.setattr(Signer, "answer", answer)

    def _left(self, public: bytes, one: Any) -> None:
        slot = (public, one.height, one.round, STEPS[one.type])
        self.again += slot in self.signed
        if self.signed.setdefault(slot, one.signature) != one.signature:
            self.twice.append(slot)


def test_killed_at_random_moments_nobody_signs_a_slot_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, watched, random_ = Swarm(tmp_path), Watched(monkeypatch), random.Random(SEED)

    async def kill(name: PeerId, whole: bool) -> None:
        """The engine alone, which its supervisor brings back, or with all that stands by it."""
        engine = swarm.engines[name]
        if engine.process.pid is not None:
            os.kill(engine.process.pid, signal.SIGKILL)
        if whole:
            await engine.stop()
            await swarm.engine(name).start()

    async def load(stop: asyncio.Event) -> int:
        count = 0
        while not stop.is_set():
            count += 1
            await asyncio.gather(
                *(e.rpc.submit(b"k%d=1" % count) for e in swarm.engines.values()),
                return_exceptions=True,
            )
        return count

    async def work() -> None:
        await swarm.start()
        stop = asyncio.Event()
        busy = asyncio.create_task(load(stop))
        for _ in range(KILLS):
            victim = random_.choice(swarm.names)
            await kill(victim, whole=random_.random() < 0.5)
            await asyncio.sleep(random_.random())
            await until(lambda victim=victim: swarm.in_step(victim), f"{victim} is away")  # type: ignore[misc]
        stop.set()
        await busy
        height = max([await swarm.height(name) for name in swarm.names])
        await swarm.order(b"last=1", swarm.names[0])
        await swarm.reached(height + 1)

    async def story() -> None:
        try:
            await work()
        finally:
            await swarm.stop()

    asyncio.run(story())
    assert watched.twice == []
    assert len(watched.signed) > 100, "the load was real"
