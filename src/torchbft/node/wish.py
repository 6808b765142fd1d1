"""What a member's operator wishes of the running node: a file in its folder, and a signal to look.

Whoever may write the folder holds the member's keys as well, so nothing here is authenticated.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

LOOK = signal.SIGURG
"""Ignored by a process without a handler for it: a node that has only begun to start lives on."""
MAX_REASON = 120
"""Characters of a reason that a vote to void carries."""
_FILE = "prefer-void"


def ask_to_void(folder: Path, process: int, reason: str) -> None:
    """Ask the node that holds ``folder`` to vote for voiding the round whose root is due."""
    (folder / _FILE).write_text(reason[:MAX_REASON], encoding="utf-8")
    os.kill(process, LOOK)


def is_waiting(folder: Path) -> bool:
    """Whether a wish lies there that no node has taken."""
    return (folder / _FILE).exists()


def take_back(folder: Path) -> None:
    """Drop a wish that was not taken."""
    (folder / _FILE).unlink(missing_ok=True)


def taken(folder: Path) -> str | None:
    """The reason of a wish to void, once; None if there is none."""
    with suppress(OSError), (folder / _FILE).open(encoding="utf-8", errors="replace") as file:
        reason = file.read(MAX_REASON)
        take_back(folder)
        return reason
    return None
