"""``torchbft up``: a swarm of honest peers on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from torchbft.cli.demo import judge, raise_for
from torchbft.cli.local import Plan, create, fresh_folder, supervisor, watch
from torchbft.cli.output import Json, emit, say

UP_SECONDS = 7 * 86_400.0
"""A local swarm runs until it is done; a week bounds what is forgotten in a corner."""


def up(
    task: Annotated[str, typer.Option(help="A shipped task or file.py:Class.")] = "digits",
    peers: Annotated[int, typer.Option(help="How many peers.", min=1, max=64)] = 4,
    rounds: Annotated[int, typer.Option(help="Rounds.", min=1)] = 40,
    inner_steps: Annotated[int, typer.Option(help="H: inner steps a round.", min=1)] = 20,
    seed: Annotated[int, typer.Option(help="Seed of everything random but keys.", min=0)] = 0,
    rule: Annotated[str, typer.Option(help="Aggregation rule.")] = "arc+nnm+trimmed_mean",
    codec: Annotated[str, typer.Option(help="Codec of the payloads.")] = "float32",
    out: Annotated[Path | None, typer.Option(help="Folder of the run.")] = None,
    as_json: Json = False,
) -> None:
    """Train a task with peers in processes of their own on this machine, all of them honest.

    Peers that die are started again and resume. Control-C stops all of them cleanly.

    Example: torchbft up --task task.py:Digits --peers 4 --out runs/mine
    """
    from torchbft.report.terminal import LiveView

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
    running = supervisor(local)
    running.start()
    status = "stopped"
    try:
        with LiveView(plan.out, plan.rounds) as view:
            status = watch(running, local, local.names, view.refresh, seconds=UP_SECONDS)
    except KeyboardInterrupt:
        say("stopping the peers…")
    finally:
        running.stop()
    facts: dict[str, Any] = {
        "peers": peers,
        "folder": str(plan.out),
        "rounds": rounds,
        "seed": seed,
    }
    result = judge(local, facts, (), status, None)
    accuracy = result["accuracy"]
    text = (
        f"{status}: {result['rounds_counted']} rounds, the same model at all peers: "
        f"{'yes' if result['honest_roots_equal'] else 'NO'}"
        + (f", accuracy {accuracy:.1f} %" if accuracy is not None else "")
        + f"\nnext: torchbft report {plan.out}"
    )
    emit(result, as_json=as_json, text=text)
    raise_for(result)
