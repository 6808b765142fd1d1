"""Stories of local swarms whose processes are frozen, killed or starved; one JSON object each.

``python stories.py STORY FOLDER``. A process of its own, because peers are forked from it: nothing
parallel may have run in it before.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torchbft.cli.local import Local, Plan, create, phase_of, supervisor, watch
from torchbft.node.supervisor import Supervisor
from torchbft.primitives import trace
from torchbft.protocols.peer import PeerMachine
from torchbft.report.verify import verify

LIMIT = 200.0
"""Seconds of a whole story on a busy machine."""
FULL_AT = 45_000
"""Bytes of any one file that a starved node may write: checkpoints fit, the votes of seven rounds
do, and those of twelve do not."""
PEERS, INNER = 4, 5


class Story:
    """A swarm of four honest peers, and what its tick does to it."""

    def __init__(self, out: Path, rounds: int) -> None:
        self.local: Local = create(
            Plan(out=out, peers=PEERS, rounds=rounds, inner_steps=INNER, batch_size=16)
        )
        self.running: Supervisor | None = None
        self.facts: dict[str, Any] = {}

    def rounds(self, name: str) -> int:
        """Rounds that a peer saw end."""
        records = trace.read_trace(self.local.folder(name) / "trace.jsonl")
        return len({r.round for r in records if isinstance(r, trace.RoundEnded)})

    def play(self, tick: Callable[[Supervisor], None], *, judged: tuple[str, ...] = ()) -> Any:
        names = tuple(n for n in self.local.names if not judged or n in judged)
        running = self.running = supervisor(self.local)
        running.start()
        try:
            status = watch(
                running, self.local, names, lambda: None, seconds=LIMIT, tick=lambda: tick(running)
            )
        finally:
            running.stop()
        return self.told(status, names)

    def told(self, status: str, names: tuple[str, ...]) -> dict[str, Any]:
        verdict = verify(self.local.plan.out)
        records = {n: trace.read_trace(self.local.folder(n) / "trace.jsonl") for n in names}
        ends = {n: [r for r in records[n] if isinstance(r, trace.RunEnded)] for n in names}
        return {
            "status": status,
            "finished": [n for n in names if phase_of(self.local, n) == "finished"],
            "roots": sorted({e[-1].root for e in ends.values() if e}),
            "verified": verdict.ok,
            "problems": [f"{p.where}: {p.what}" for p in verdict.problems],
            "rounds": len(verdict.rounds),
            "convicted": list(verdict.convicted),
            **self.facts,
        }


def freeze(out: Path) -> Any:
    """Case C16: a node is frozen in the middle of the run, and goes on two rounds later."""
    story = Story(out, rounds=10)
    victim, witness = story.local.names[1], story.local.names[0]
    at: dict[str, int] = {}

    def tick(running: Supervisor) -> None:
        pid = running.seats[victim].pids.get("node")
        done = story.rounds(witness)
        if "frozen" not in at and done >= 2 and pid:
            os.kill(pid, signal.SIGSTOP)
            at["frozen"] = done
        elif "thawed" not in at and "frozen" in at and done >= at["frozen"] + 3 and pid:
            story.facts["own_rounds_while_frozen"] = story.rounds(victim)
            os.kill(pid, signal.SIGCONT)
            at["thawed"] = done
        story.facts.update(at)

    return story.play(tick)


def kill_all(out: Path) -> Any:
    """Case C10: every process of every peer is killed at the same moment, twice."""
    story = Story(out, rounds=8)
    moments = [1, 4]

    def tick(running: Supervisor) -> None:
        if moments and story.rounds(story.local.names[0]) >= moments[0]:
            moments.pop(0)
            for seat in running.seats.values():
                for pid in seat.pids.values():
                    os.kill(pid, signal.SIGKILL)
            story.facts["killed"] = 2 - len(moments)

    told = story.play(tick)
    seats = story.running.seats.values() if story.running else ()
    return {**told, "restarts": [seat.restarts for seat in seats]}


def fill_disk(out: Path) -> Any:
    """One peer's files may not grow beyond a size, as on a full disk; the others go on."""
    story = Story(out, rounds=12)
    victim = story.local.names[2]

    def starved(*arguments: Any) -> PeerMachine:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_AT, resource.RLIM_INFINITY))
        return PeerMachine(*arguments)

    story.local.builds[victim] = starved
    others = tuple(n for n in story.local.names if n != victim)
    told = story.play(lambda running: None, judged=others)
    return {**told, "log": (story.local.folder(victim) / "node.log").read_text()}


STORIES = {"freeze": freeze, "kill_all": kill_all, "fill_disk": fill_disk}


if __name__ == "__main__":
    began = time.monotonic()
    result = STORIES[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps({**result, "seconds": round(time.monotonic() - began, 1)}))
