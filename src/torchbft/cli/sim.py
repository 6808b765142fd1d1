"""``torchbft sim``: seeded swarms in one process, under a virtual clock."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from torchbft.cli.output import ExitCode, Json, emit, say, stop
from torchbft.primitives.errors import ConfigError

if TYPE_CHECKING:
    from torchbft.sim.swarm import SimResult

MAX_SEEDS = 1_000_000
"""A night's work; more is a typing error."""
MAX_SHOWN = 10
"""Failures printed in full; the seeds of all are listed."""


def sim(
    seeds: Annotated[str, typer.Option(help="How many (200), or which (5 or 0-4).")] = "20",
    peers: Annotated[int, typer.Option(help="Validators.", min=1, max=64)] = 7,
    byzantine: Annotated[int, typer.Option(help="Adversaries among them.", min=0)] = 2,
    jobs: Annotated[int, typer.Option(help="Processes; 0: one per core.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Run whole rounds on simulated networks with crashes and liars.

    Each seed draws a network, faults and liars; first nothing wrong may happen, then the network
    heals and an honest core must sign further rounds. The same seed gives the same trace hash. A
    single number is a count (seeds 0 to N-1); --seeds 7-7 runs seed 7 alone and shows what it drew.
    Ends with 1 if any seed violates safety or liveness.

    Example: torchbft sim --seeds 200 --peers 7 --byzantine 2 --json
    """
    results = run_seeds(parse_seeds(seeds), peers, byzantine, jobs or os.cpu_count() or 1)
    data = summary(results, peers, byzantine)
    for failure in data["failures"][:MAX_SHOWN]:
        say(f"seed {failure['seed']}: {'; '.join(failure['what'])}")
        say(f"drawn: {failure['drawn']}")
        say(f"hint: torchbft sim --seeds {failure['seed']}-{failure['seed']} --peers {peers}"
            f" --byzantine {byzantine}")  # fmt: skip
    if len(results) == 1 and not data["failures"]:
        say(f"drawn: {results[0].parameters.line()}")
    text = (
        f"{data['seeds']} seeds: {data['safety_violations']} safety violations,"
        f" {data['liveness_failures']} liveness failures; {data['rounds_signed']} rounds signed,"
        f" {data['rounds_void']} void; trace {data['trace_hash'][:16]}…"
    )
    emit(data, as_json=as_json, text=text)
    if data["failures"]:
        raise stop(ExitCode.CHECK_FAILED)


def parse_seeds(text: str) -> range:
    """``200`` is seeds 0 to 199, ``3-9`` those from 3 to 9. Raises ConfigError."""
    first, dash, last = text.partition("-")
    try:
        chosen = range(int(first), int(last) + 1) if dash else range(int(first))
    except ValueError:
        raise ConfigError(
            f"{text!r} is no count and no range", where="--seeds", hint="say 200, or 0-4"
        ) from None
    if not 0 < len(chosen) <= MAX_SEEDS or chosen.start < 0:
        raise ConfigError(f"{text!r} holds no seed, or too many", where="--seeds")
    return chosen


def run_seeds(seeds: range, peers: int, byzantine: int, jobs: int) -> list[SimResult]:
    """All seeds, in order, over some processes."""
    from torchbft.sim.swarm import run

    if jobs == 1 or len(seeds) == 1:
        return [run(seed, peers, byzantine) for seed in seeds]
    with ProcessPoolExecutor(max_workers=min(jobs, len(seeds))) as pool:
        count = len(seeds)
        return list(pool.map(run, seeds, [peers] * count, [byzantine] * count))


def summary(results: Sequence[SimResult], peers: int, byzantine: int) -> dict[str, Any]:
    """Totals, and what failed under which seed."""
    from torchbft.primitives.digests import sha256

    failures = [
        {
            "seed": r.seed,
            "what": [*r.safety_violations, *r.liveness_failures],
            "drawn": r.parameters.line(),
        }
        for r in results
        if r.safety_violations or r.liveness_failures
    ]
    return {
        "seeds": len(results),
        "peers": peers,
        "byzantine": byzantine,
        "safety_violations": sum(len(r.safety_violations) for r in results),
        "liveness_failures": sum(len(r.liveness_failures) for r in results),
        "trace_hash": sha256("sim/traces", *(r.trace_hash.encode() for r in results)).hex(),
        "rounds_signed": sum(r.signed for r in results),
        "rounds_void": sum(r.void for r in results),
        "runs_halted": sum(r.halted for r in results),
        "messages": sum(r.messages for r in results),
        "virtual_seconds": sum(r.seconds for r in results),
        "failures": failures,
    }
