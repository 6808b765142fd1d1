"""SIGKILL of random peers at random moments, the current leader included, with restart.

``python benchmarks/kill.py [--kills 50] [--peers 7] [--json]`` prints one JSON object: whether the
run went on to its end, all peers came back under their identity with the same root, nobody signed
two things for one slot, and how long a killed peer took to be connected to a quorum again.
Exit code 1 if a promise did not hold.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import msgspec

from torchbft.cli.local import Local, Plan, create, phase_of, run_swarm
from torchbft.node.storage.log import read_log
from torchbft.node.supervisor import Supervisor
from torchbft.primitives.ids import PeerId
from torchbft.protocols.ledger.messages import Proposal, Timeout, Vote, decode_vote_record
from torchbft.protocols.round.messages import parse
from torchbft.report.gather import gather
from torchbft.report.verify import verify

GAP_SECONDS = (0.05, 1.2)
"""Between two kills, drawn evenly: from the middle of a block to several blocks."""
RUN_SECONDS = 900.0


class Killer:
    """Kills a running node now and then, and notes whether it led and when it was back."""

    def __init__(self, local: Local, kills: int, seed: int) -> None:
        self._local, self.left = local, kills
        self._random = random.Random(f"kill/{seed}")
        self._next = time.monotonic() + 3.0
        self._down: dict[PeerId, float] = {}
        self.victims: list[str] = []
        self.leaders = 0
        self.returns: list[float] = []

    def tick(self, running: Supervisor) -> None:
        now = time.monotonic()
        for name, since in list(self._down.items()):
            status = self._status(name)
            if status.get("at", 0.0) > since and len(status.get("connected", ())) >= self._need():
                self.returns.append(time.time() - since)
                del self._down[name]
        if self.left and now >= self._next:
            self._next = now + self._random.uniform(*GAP_SECONDS)
            self._kill(running)

    def _need(self) -> int:
        return self._local.run.validator_faults.quorum - 1

    def _status(self, name: str) -> dict[str, Any]:
        try:
            found = msgspec.json.decode((self._local.folder(name) / "status.json").read_bytes())
        except (OSError, msgspec.DecodeError):
            return {}
        return dict(found)

    def _kill(self, running: Supervisor) -> None:
        names = [n for n in self._local.names if phase_of(self._local, n) != "finished"]
        if not names:
            self.left = 0
            return
        name = self._random.choice(names)
        status = self._status(name)
        role = self._random.choice(("node", "node", "node", "trainer"))
        if not running.kill(name, role):
            return
        self.left -= 1
        self.victims.append(name)
        self.leaders += status.get("leader") == name
        self._down[name] = time.time()


def signed_twice(local: Local) -> list[str]:
    """Slots in which a peer's own logs hold two different signed things. Empty if none."""
    found = []
    for name in local.names:
        votes: dict[object, set[bytes]] = defaultdict(set)
        for record in read_log(local.folder(name) / "votes.log"):
            value = decode_vote_record(record)
            vote = value.vote if isinstance(value, Proposal | Timeout) else value
            if isinstance(vote, Vote) and vote.author == name:
                votes[vote.height, vote.slot].add(vote.digest)
        statements: dict[object, set[bytes]] = defaultdict(set)
        for tx in read_log(local.folder(name) / "statements.log"):
            parsed = parse(tx)
            if parsed.statement.author == name:
                statements[parsed.statement.round, parsed.slot].add(parsed.body)
        found += [
            f"{name}: {slot}"
            for slot, said in (*votes.items(), *statements.items())
            if len(said) > 1
        ]
    return found


def run(kills: int, peers: int, rounds: int, seed: int) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="torchbft-kill-"))
    try:
        local = create(Plan(out=folder / "run", peers=peers, rounds=rounds, seed=seed))
        killer = Killer(local, kills, seed)
        status, _ = run_swarm(local, local.names, seconds=RUN_SECONDS, quiet=True, tick=killer.tick)
        view, verdict = gather(local.plan.out), verify(local.plan.out)
        roots = {
            p.ended.root for p in view.peers.values() if p.ended and p.ended.status == "finished"
        }
        finished = [n for n in local.names if phase_of(local, n) == "finished"]
        return {
            "machine": f"{platform.system()} {platform.machine()}",
            "seed": seed,
            "peers": peers,
            "kills": len(killer.victims),
            "kills_of_leader": killer.leaders,
            "status": status,
            "finished": len(finished),
            "roots_equal": len(roots) == 1 and len(finished) == peers,
            "ledger_verified": verdict.ok,
            "problems": [f"{p.where}: {p.what}" for p in verdict.problems[:5]],
            "signed_twice": signed_twice(local),
            "rounds_counted": sum(not r.void for r in verdict.rounds),
            "rounds_void": sum(r.void for r in verdict.rounds),
            "named": sorted(a.peer for a in view.accusations() if a.named),
            "return_seconds_median": statistics.median(killer.returns) if killer.returns else None,
            "return_seconds_max": max(killer.returns, default=None),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--peers", type=int, default=7)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    result = run(given.kills, given.peers, given.rounds, given.seed)
    print(json.dumps(result, indent=2))
    good = (
        result["status"] == "finished"
        and result["roots_equal"]
        and result["ledger_verified"]
        and not result["signed_twice"]
        and not result["named"]
    )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
