"""``torchbft leave``: stop this member's node cleanly."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from torchbft.cli.init import own_name
from torchbft.cli.output import ExitCode, Json, emit, say, stop
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
    status_path = run_file.parent / "peers" / me / "status.json"
    try:
        status = msgspec.json.decode(status_path.read_bytes())
        pid = int(status["pid"])
        os.kill(pid, signal.SIGTERM)
    except (OSError, KeyError, ValueError, TypeError):
        raise ConfigError(
            f"no node of {me} runs on this machine",
            where=str(status_path.parent),
            hint="torchbft status shows who is up",
        ) from None
    say(f"asked the node of {me} (process {pid}) to stop…")
    gone = _gone(pid)
    emit({"name": me, "stopped": gone}, as_json=as_json, text="stopped" if gone else "still up")
    if not gone:
        raise stop(ExitCode.CHECK_FAILED)


def _gone(pid: int) -> bool:
    until = time.monotonic() + LEAVE_SECONDS
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except OSError:
            return True
        time.sleep(0.1)
    return False
