"""``torchbft void``: vote to give up a round that comes to no common root."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from torchbft.cli.init import own_name
from torchbft.cli.leave import running_node
from torchbft.cli.output import ExitCode, Json, emit, say, stop
from torchbft.node import wish

TAKEN_SECONDS = 5.0
"""A node looks at once; one that is busy starting does not look at all."""


def void(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")] = Path("run.toml"),
    reason: Annotated[
        str, typer.Option(help="Written into the vote and the others' traces.")
    ] = "its operator prefers so",
    name: Annotated[str, typer.Option(help="Which member, if there are keys of several.")] = "",
    as_json: Json = False,
) -> None:
    """Vote to void the round whose root is due, where members computed different ones.

    A run halts when no n - f members get the same root in time. Until then n - f such votes drop
    the round instead: the model stays as it was before it, and the run goes on. One member's vote
    alone changes nothing.

    Example: torchbft void run.toml --reason "two library versions among us"
    """
    me = own_name(run_file, name)
    folder = run_file.parent / "peers" / me
    wish.ask_to_void(folder, running_node(me, folder), reason)
    until = time.monotonic() + TAKEN_SECONDS
    while wish.is_waiting(folder) and time.monotonic() < until:
        time.sleep(0.05)
    asked = not wish.is_waiting(folder)
    wish.take_back(folder)
    text = "asked" if asked else "the node did not look: it may still be starting; ask again"
    emit({"name": me, "asked": asked}, as_json=as_json, text=text)
    if not asked:
        raise stop(ExitCode.CHECK_FAILED)
    say("only a round whose root is due can be voided; the node's log says what it did")
