"""The two ordering engines side by side: time per block and round, processor time, coming back.

``python benchmarks/engines.py [--peers 4] [--rounds 20] [--repeats 2] [--json]``, in real processes
on loopback, interleaved: a swarm under the embedded ledger; the same under CometBFT; and CometBFT
with its own key-value application, which answers from inside the engine's process.

``ms_per_block`` of a swarm runs from the moment that a peer has something to order to the block's
finalization, so it holds the bounded wait for the others' items; that of the key-value application
from handing one transaction in to the answer that it is in a block. ``app_cpu_ms_per_block`` is the
processor time of the application's calls for one block, measured by giving the recorded blocks of
the swarm to a fresh application: every transaction is checked, proposed, judged and finalized.
``return_seconds``: from SIGKILL of one engine until it has the others' height again.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import os
import platform
import shutil
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import round as rounds

from torchbft.cli.local import Plan, create, free_ports, run_swarm
from torchbft.node.ordering.cometbft import CometEngine
from torchbft.node.ordering.rpc import RpcError
from torchbft.node.storage.log import read_log
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Data, Ledger, RunSpec, new_member
from torchbft.protocols.ledger.messages import decode_finalized
from torchbft.protocols.peer import application_of

MAX_BLOCK_BYTES = 1 << 20
LIMIT_SECONDS = 120.0
POLL_SECONDS = 0.02
BLOCKS = 40
"""Of the key-value application in one repeat."""


class KeyValue:
    """CometBFT of each member with the application inside it."""

    def __init__(self, folder: Path, peers: int) -> None:
        names = [PeerId(f"peer-{number}") for number in range(peers)]
        identity = {name: SigningKey.generate() for name in names}
        voting = {name: SigningKey.generate() for name in names}
        ports = iter(free_ports(2 * peers))
        members = tuple(
            new_member(n, identity[n], voting[n], port=next(ports), ledger_port=next(ports))
            for n in names
        )
        run = RunSpec(
            name="key-value",
            seed="33" * 32,
            members=members,
            data=Data(samples=100),
            ledger=Ledger(kind="cometbft"),
        )
        self.engines = [
            CometEngine(
                run,
                name,
                folder / name,
                identity=identity[name],
                voting=voting[name],
                notice=lambda line: print(line, file=sys.stderr),
                application="kvstore",
            )
            for name in names
        ]

    async def measure(self, blocks: int) -> tuple[list[float], float]:
        """Milliseconds per block, and seconds until a killed engine is back."""
        try:
            for engine in self.engines:
                await engine.start()
            for engine in self.engines:
                await until(lambda engine=engine: _in_step(engine))  # type: ignore[misc]
            spans = [await self._block(f"key-{number}") for number in range(blocks)]
            return spans, await self._back()
        finally:
            for engine in self.engines:
                await engine.stop()

    async def _block(self, key: str) -> float:
        began = time.perf_counter()
        tx = base64.b64encode(f"{key}=1".encode()).decode()
        answer = await self.engines[0].rpc.call("broadcast_tx_commit", tx=tx)
        if int(answer["height"]) < 1:
            raise RuntimeError(f"not in a block: {answer}")
        return 1e3 * (time.perf_counter() - began)

    async def _back(self) -> float:
        victim = self.engines[-1]
        before = victim.process.pid
        if before is None:
            raise RuntimeError("the engine to kill does not run")
        os.kill(before, signal.SIGKILL)
        began = time.monotonic()
        for number in range(3):
            await self._block(f"while-away-{number}")
        height = await self.engines[0].rpc.height()
        await until(lambda: _has(victim, height))
        return time.monotonic() - began


async def _in_step(engine: CometEngine) -> bool:
    return bool(await engine.rpc.connected()) and not await engine.rpc.catching_up()


async def _has(engine: CometEngine, height: int) -> bool:
    return await engine.rpc.height() >= height


async def until(reached: Any) -> None:
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            try:
                if await reached():
                    return
            except RpcError:
                pass  # not up yet
            await asyncio.sleep(POLL_SECONDS)


def key_value(peers: int) -> dict[str, float]:
    folder = Path(tempfile.mkdtemp(prefix="torchbft-kv-"))
    try:

        async def run() -> tuple[list[float], float]:
            return await KeyValue(folder, peers).measure(BLOCKS)

        spans, back = asyncio.run(run())
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"ms_per_block": statistics.median(spans), "return_seconds": back}


def swarm(kind: str, peers: int, count: int) -> dict[str, float]:
    """One swarm's figures, by ``round.py``."""
    found = rounds.measure(kind, 1, 0, peers=peers, rounds=count, kind=kind)
    if found["status"] != "finished":
        raise RuntimeError(f"the swarm under {kind} {found['status']}")
    return {
        "ms_per_block": found["block_ms_median"],
        "blocks_per_round": found["blocks_per_round"],
        "agreement_ms": found["agreement_ms_median"],
    }


def application_cpu(peers: int, count: int) -> float:
    """Milliseconds of processor time per block of an application that gets a run's blocks."""
    folder = Path(tempfile.mkdtemp(prefix="torchbft-app-"))
    try:
        plan = Plan(out=folder / "run", task=rounds.TASK, peers=peers, rounds=count, inner_steps=1)
        local = create(plan)
        run_swarm(local, local.names, seconds=LIMIT_SECONDS, quiet=True)
        log = read_log(local.folder(local.names[0]) / "blocks.log")
        blocks = [decode_finalized(record).block.txs for record in log]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    application = application_of(local.run)
    began = time.process_time()
    for height, txs in enumerate(blocks, start=1):
        for tx in txs:
            application.check_tx(tx)
        chosen = application.prepare_proposal(Height(height), txs, MAX_BLOCK_BYTES)
        if not application.process_proposal(Height(height), chosen):
            raise RuntimeError(f"block {height} is refused")
        application.finalize_block(Height(height), txs)
        application.commit()
    return 1e3 * (time.process_time() - began) / len(blocks)


def compare(peers: int, count: int, repeats: int) -> dict[str, Any]:
    """Medians over the repeats; in each, the three take turns."""
    found: dict[str, list[dict[str, float]]] = {"embedded": [], "cometbft": [], "kvstore": []}
    for _ in range(repeats):
        found["embedded"].append(swarm("embedded", peers, count))
        found["cometbft"].append(swarm("cometbft", peers, count))
        found["kvstore"].append(key_value(peers))
    middle = {name: _medians(series) for name, series in found.items()}
    ours, plain = middle["cometbft"], middle["embedded"]
    return {
        "ms_per_block": {name: each["ms_per_block"] for name, each in middle.items()},
        "ratio_to_kvstore": ours["ms_per_block"] / middle["kvstore"]["ms_per_block"],
        "app_cpu_ms_per_block": application_cpu(peers, count),
        "blocks_per_round": {
            name: middle[name]["blocks_per_round"] for name in ("embedded", "cometbft")
        },
        "agreement_ms": {name: middle[name]["agreement_ms"] for name in ("embedded", "cometbft")},
        "round_ratio_to_embedded": ours["agreement_ms"] / plain["agreement_ms"],
        "return_seconds": middle["kvstore"]["return_seconds"],
    }


def _medians(series: list[dict[str, float]]) -> dict[str, float]:
    return {key: statistics.median(each[key] for each in series) for key in series[0]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    report = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "peers": given.peers,
        "seed": 0,
        **compare(given.peers, given.rounds, given.repeats),
    }
    print(json.dumps(report, indent=2) if given.json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
