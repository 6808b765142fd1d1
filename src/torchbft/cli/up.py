"""``torchbft up``: a swarm of honest peers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from torchbft.cli.demo import judge, raise_for
from torchbft.cli.local import Plan, create, fresh_folder, run_swarm
from torchbft.cli.options import (
    A_TASK,
    DEFAULT_CODEC,
    DEFAULT_RULE,
    CodecName,
    InnerSteps,
    Peers,
    Rounds,
    RuleName,
    Seed,
)
from torchbft.cli.output import Json, emit

UP_SECONDS = 7 * 86_400.0
"""A local swarm runs until it is done; a week bounds what is forgotten in a corner."""


def up(
    task: Annotated[str, typer.Option(help=A_TASK)] = "digits",
    peers: Peers = 4,
    rounds: Rounds = 40,
    inner_steps: InnerSteps = 20,
    seed: Seed = 0,
    rule: RuleName = DEFAULT_RULE,
    codec: CodecName = DEFAULT_CODEC,
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    as_json: Json = False,
) -> None:
    """Train a task with peers in processes of their own on this machine, all of them honest.

    Peers that die are started again and resume. Control-C stops all of them cleanly.

    Example: torchbft up --task task.py:Digits --peers 4 --out runs/mine
    """
    from torchbft.report.verify import verify

    plan = Plan(
        out=fresh_folder(out, "up"),
        task=task,
        peers=peers,
        seed=seed,
        rounds=rounds,
        inner_steps=inner_steps,
        rule=rule,
        codec=codec,
    )
    local = create(plan)
    status, _ = run_swarm(local, local.names, seconds=UP_SECONDS)
    facts: dict[str, Any] = {
        "peers": peers,
        "folder": str(plan.out),
        "rounds": rounds,
        "seed": seed,
    }
    result = judge(local, facts, (), status, None, verify(plan.out))
    accuracy = result["accuracy"]
    text = (
        f"{status}: {result['rounds_counted']} rounds, the same model at all peers: "
        f"{'yes' if result['honest_roots_equal'] else 'NO'}"
        + (f", accuracy {accuracy:.1f} %" if accuracy is not None else "")
        + f"\nnext: torchbft report {plan.out}"
    )
    emit(result, as_json=as_json, text=text)
    raise_for(result)
