"""``torchbft status``."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from torchbft.cli.output import ExitCode, Json, emit, say, stop


def status(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run.")] = Path(),
    watch: Annotated[bool, typer.Option("--watch", help="Follow the run until it ends.")] = False,
    as_json: Json = False,
) -> None:
    """Show where a run stands and whom it waits for.

    Phase, quorum and margin, loss per peer, and how each contribution ended. It reads the run
    folder only, so it disturbs nobody. Ends with 3 if the run halted.

    Example: torchbft status ./run --watch
    """
    from rich.console import Console

    from torchbft.report.gather import gather
    from torchbft.report.terminal import LiveView, picture

    view = gather(run_dir)
    if view.spec_problem:
        say(f"warning: {view.spec_problem}")
    if watch and not as_json:
        live = LiveView(run_dir)
        live.run(lambda: live.view.end is not None)
        view = live.view
    elif as_json:
        emit(summary(view, time.time()), as_json=True)
    else:
        console = Console()
        console.print(
            picture(
                view, now=time.time(), width=console.width, ascii_only=console.options.ascii_only
            )
        )
    if view.end and view.end.status == "halted":
        raise stop(ExitCode.HALTED)


def summary(view: Any, now: float) -> dict[str, Any]:
    """A run's state as plain data. ``view`` is a ``RunView``."""
    from torchbft.report.terminal import phase_of, seen, total_rounds

    phase, waiting, until = phase_of(view)
    ended = view.agreed(view.last_round)
    return {
        "phase": phase,
        "waiting_for": waiting,
        "seconds_left": None if until is None else max(0.0, until - now),
        "rounds": view.last_round + 1,
        "total_rounds": total_rounds(view),
        "members": view.members,
        "seen": seen(view, now),
        "last_round": ended,
        "accusations": view.accusations(),
        "end": view.end,
        "run_file_problem": view.spec_problem,
        "peers": {name: _peer(peer) for name, peer in view.peers.items()},
    }


def _peer(peer: Any) -> dict[str, Any]:
    latest = peer.evaluations[max(peer.evaluations)] if peer.evaluations else None
    return {
        "rounds": len(peer.rounds),
        "height": max(peer.blocks, default=0),
        "loss": latest.loss if latest else None,
        "accuracy": latest.accuracy if latest else None,
        "root": peer.rounds[max(peer.rounds)].root if peer.rounds else "",
        "last_seen": peer.last_at,
        "status": peer.status,
    }
