"""``torchbft leave``: stop this member's node cleanly."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from torchbft.cli.init import own_name
from torchbft.cli.output import ExitCode, Json, emit, say, stop
from torchbft.node.storage.lock import holder_of
from torchbft.primitives.errors import ConfigError

LEAVE_SECONDS = 15.0
"""A node closes its logs and connections well within this."""


def leave(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")] = Path("run.toml"),
    name: Annotated[str, typer.Option(help="Which member, if there are keys of several.")] = "",
    as_json: Json = False,
) -> None:
    """Stop this member's running node; it may join again later and resumes where it was.

    The others go on as long as a quorum is left. The seat stays in the roster.

    Example: torchbft leave run.toml
    """
    me = own_name(run_file, name)
    folder = run_file.parent / "peers" / me
    pid = running_node(me, folder)
    with suppress(ProcessLookupError):  # it went by itself
        os.kill(pid, signal.SIGTERM)
    say(f"asked the node of {me} (process {pid}) to stop…")
    gone = _gone(folder, pid)
    emit({"name": me, "stopped": gone}, as_json=as_json, text="stopped" if gone else "still up")
    if not gone:
        raise stop(ExitCode.CHECK_FAILED)


def running_node(me: str, folder: Path) -> int:
    """The process of a member's node. Raises ConfigError if none runs."""
    pid = holder_of(folder)  # never the number in a file that a dead node left behind
    if pid is None:
        raise ConfigError(
            f"no node of {me} runs on this machine",
            where=str(folder),
            hint="torchbft status shows who is up",
        )
    return pid


def _gone(folder: Path, pid: int) -> bool:
    until = time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < until:
        if holder_of(folder) != pid:
            return True
        time.sleep(0.1)
    return False
