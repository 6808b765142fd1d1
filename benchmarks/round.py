"""What agreement costs per round: time by phase, blocks, bytes, and its share of the wall time.

``python benchmarks/round.py [--rounds 30] [--json]``: 7 peers on loopback, no faults, a CNN of 38 k
parameters at batch 32, H = 1, 20, 50, 100; and H = 20 with two withholders. *Agreement* is the
time from one round's start to the next, less the longest training (and the longest evaluation) of
any peer in it: what is left is everything that a lone trainer would not have had. The physical
limit beside it is what one hop costs here: a round trip of a small message over loopback TLS is
measured by ``benchmarks/transport.py``; a round needs 3 blocks × 3 hops, 3 hops of transactions,
one of payloads and one of root signatures.
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
from pathlib import Path
from typing import Any

import torch

from torchbft.cli.demo import arm, draw_liars
from torchbft.cli.local import Local, Plan, create, run_swarm
from torchbft.node.chronicle import AGREEMENT
from torchbft.report.gather import PeerView, gather

TASK = f"{Path(__file__).with_name('cnn.py')}:Cnn"
PEERS, WITHHOLDERS = 7, 2
WARM_UP = 5
"""Rounds left out at the start: connections, caches, first measurements."""
SETTINGS = (("H=1", 1, 0), ("H=20", 20, 0), ("H=50", 50, 0), ("H=100", 100, 0))
WITH_LIARS = ("H=20, 2 withholders", 20, WITHHOLDERS)
SECONDS = 600.0


def measure(name: str, inner_steps: int, liars: int, **plan: Any) -> dict[str, Any]:
    """One swarm's figures; medians over rounds after the warm-up and over honest peers. ``plan``:
    further fields of ``local.Plan``."""
    folder = Path(tempfile.mkdtemp(prefix="torchbft-round-"))
    try:
        fields = {"peers": PEERS, **plan}
        local = create(Plan(out=folder / "run", task=TASK, inner_steps=inner_steps, **fields))
        drawn = draw_liars(local.names, liars, local.plan.seed)
        if drawn:
            arm(local, "withholder", drawn, None)
        return {"setting": name, "inner_steps": inner_steps, **_run(local, drawn)}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _run(local: Local, liars: Any) -> dict[str, Any]:
    judged = [name for name in local.names if name not in liars]
    status, _ = run_swarm(local, judged, seconds=SECONDS, quiet=True)
    view = gather(local.plan.out)
    return {"status": status, **figures([view.peers[name] for name in judged])}


def figures(peers: list[PeerView]) -> dict[str, Any]:
    """Medians over rounds that every peer recorded, after the warm-up."""
    numbers = set.intersection(*(set(peer.phases) for peer in peers))
    rounds = [n for n in sorted(numbers) if n >= WARM_UP][:-1]
    overhead, wall, training = [], [], []
    for number in rounds:
        totals = [sum(peer.phases[number].values()) for peer in peers]
        longest = max(peer.phases[number].get("train", 0.0) for peer in peers)
        wall.append(statistics.median(totals))
        training.append(longest)
        overhead.append(max(statistics.median(totals) - longest, 0.0))
    phases = {
        phase: 1e3
        * statistics.median(peer.phases[n].get(phase, 0.0) for peer in peers for n in rounds)
        for phase in ("train", "wait", *AGREEMENT)
    }
    ended = [peer.rounds[n] for peer in peers for n in rounds if n in peer.rounds]
    blocks = [block.seconds for peer in peers for block in peer.blocks.values() if block.txs]
    return {
        "rounds": len(rounds),
        "agreement_ms_median": 1e3 * statistics.median(overhead),
        "agreement_ms_p90": 1e3 * sorted(overhead)[int(0.9 * (len(overhead) - 1))],
        "training_ms_median": 1e3 * statistics.median(training),
        "share_of_wall": statistics.median(o / w for o, w in zip(overhead, wall, strict=True)),
        "block_ms_median": 1e3 * statistics.median(blocks),
        "blocks_per_round": statistics.mean(r.blocks for r in ended),
        "phase_ms": phases,
        "sent_control_bytes": statistics.median(r.sent_control for r in ended),
        "received_control_bytes": statistics.median(r.received_control for r in ended),
        "sent_payload_bytes": statistics.median(r.sent_payload for r in ended),
        "received_payload_bytes": statistics.median(r.received_payload for r in ended),
        "payload_bytes": statistics.median(r.payload_bytes for r in ended),
    }


def show(results: list[dict[str, Any]]) -> str:
    head = f"{'setting':<22}{'agreement ms':>14}{'training ms':>13}{'share':>8}{'blocks':>8}"
    rows = [
        f"{r['setting']:<22}{r['agreement_ms_median']:>14.1f}{r['training_ms_median']:>13.1f}"
        f"{r['share_of_wall']:>8.1%}{r['blocks_per_round']:>8.2f}"
        for r in results
    ]
    return "\n".join([head, *rows])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--codec", default="float32")
    parser.add_argument("--only", default="", help="one setting, such as H=20")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    settings = [s for s in (*SETTINGS, WITH_LIARS) if given.only in ("", s[0])]
    results = [measure(*s, rounds=given.rounds, codec=given.codec) for s in settings]
    report = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "torch": torch.__version__,
        "peers": PEERS,
        "seed": 0,
        "codec": given.codec,
        "results": results,
    }
    print(json.dumps(report, indent=2) if given.json else show(results))
    return 0 if all(r["status"] == "finished" for r in results) else 1


if __name__ == "__main__":
    sys.exit(main())
