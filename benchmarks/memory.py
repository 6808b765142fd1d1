"""Memory of each peer's own over many rounds, and how fast it grows.

``python benchmarks/memory.py [--rounds 200] [--peers 7] [--json]``: a run on digits. *Private* is
what only this process holds (``Private_Clean`` + ``Private_Dirty`` of ``smaps_rollup``, Linux): the
parent's pages that a fork shares count for nobody. The slope is that of a straight line fitted to
the samples after the warm-up, in MB per round. Exit code 1 if the run did not finish.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from torchbft.cli.local import Local, Plan, create, run_swarm
from torchbft.node.supervisor import Supervisor

WARM_UP = 50
"""Rounds until caches, buffers and the two kept states are full."""
SAMPLE_SECONDS = 1.0
SECONDS_PER_ROUND = 20.0
MB = 1e6


def private_bytes(pid: int) -> int:
    """What only this process holds, in bytes; 0 once it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Private_"))


class Sampler:
    """Notes (round, bytes) of every process of the swarm about once a second."""

    def __init__(self, local: Local) -> None:
        self._local, self._next = local, 0.0
        self.samples: dict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)

    def tick(self, running: Supervisor) -> None:
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + SAMPLE_SECONDS
        for name, seat in running.seats.items():
            number = self._round(name)
            for role, pid in seat.pids.items():
                held = private_bytes(pid)
                if held:
                    self.samples[name, role].append((number, held))

    def _round(self, name: str) -> int:
        try:
            status = msgspec.json.decode((self._local.folder(name) / "status.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return 0
        return int(status.get("round", 0))


def slope(samples: list[tuple[int, int]]) -> float:
    """MB per round after the warm-up; nan where too few rounds were sampled."""
    late = [(number, held / MB) for number, held in samples if number >= WARM_UP]
    if len({number for number, _ in late}) < 2:
        return float("nan")
    return statistics.linear_regression(*zip(*late, strict=True)).slope


def run(peers: int, rounds: int, seed: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="torchbft-memory-"))
    try:
        local = create(
            Plan(out=folder / "run", peers=peers, rounds=rounds, seed=seed, inner_steps=1)
        )
        sampler = Sampler(local)
        status, _ = run_swarm(
            local,
            local.names,
            seconds=SECONDS_PER_ROUND * rounds,
            quiet=True,
            tick=sampler.tick,
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return {"status": status, **figures(sampler.samples)}


def figures(samples: dict[tuple[str, str], list[tuple[int, int]]]) -> dict[str, Any]:
    """Per role: the most that any peer's process held, and the steepest slope of any."""
    report: dict[str, Any] = {}
    for role in sorted({role for _, role in samples}):
        of_role = [series for (_, found), series in samples.items() if found == role]
        report[role] = {
            "most_mb": round(max(held for series in of_role for _, held in series) / MB, 1),
            "steepest_mb_per_round": round(max(slope(series) for series in of_role), 4),
        }
    return report


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--peers", type=int, default=7)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    report = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "peers": given.peers,
        "rounds": given.rounds,
        "seed": given.seed,
        **run(given.peers, given.rounds, given.seed),
    }
    print(json.dumps(report, indent=2) if given.json else report)
    return 0 if report["status"] == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())
