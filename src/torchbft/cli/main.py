"""The ``torchbft`` program: finds the commands and turns every failure into one line and a code.

A command is a module of this package with a function of its own name. They are imported at start,
so none may import torch, or anything heavy, at its top: ``torchbft --help`` must be quick.
"""

from __future__ import annotations

import errno
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Sequence
from functools import cache

import typer

from torchbft import __version__
from torchbft.cli.output import ISSUES, ExitCode, exit_code, say, say_error
from torchbft.primitives.errors import TorchbftError

COMMANDS = (
    "demo",
    "init",
    "request",
    "admit",
    "doctor",
    "up",
    "join",
    "status",
    "leave",
    "vote",
    "void",
    "report",
    "verify",
    "sim",
)
"""In the order of a newcomer's first day."""

UsageFailure: type[Exception] = typer.BadParameter.__mro__[2]
"""Click's base of usage errors; some releases of typer carry their own click, so no import."""

DEBUG_VARIABLE = "TORCHBFT_DEBUG"
_PATH = {errno.ENOENT, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EISDIR}
_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO}


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"torchbft {__version__}\n")
        raise typer.Exit


@cache
def build() -> typer.Typer:
    """The program with every command whose module is there."""
    app = typer.Typer(
        name="torchbft",
        help="Train one PyTorch model across machines that do not trust each other.",
        pretty_exceptions_enable=False,
        rich_markup_mode=None,  # plain help: quick, and the same in a pipe
        context_settings={"help_option_names": ["-h", "--help"]},
        epilog="Exit codes: 0 done; 1 a check failed; 2 wrong usage or configuration; "
        "3 the run halted or voided; 4 storage; 70 a defect; 130 interrupted.",
    )

    @app.callback()
    def program(
        version: bool = typer.Option(
            False, "--version", callback=_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        pass

    for name in COMMANDS:
        module = f"torchbft.cli.{name}"
        if importlib.util.find_spec(module):
            app.command(name)(getattr(importlib.import_module(module), name))
    return app


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; never a traceback for an expected failure."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal without Unicode shows "?"
    try:
        given = list(sys.argv[1:] if arguments is None else arguments)
        result = build()(args=given or ["--help"], prog_name="torchbft", standalone_mode=False)
        return int(result or 0)
    except UsageFailure as error:
        say(f"error: {error.format_message()}")  # type: ignore[attr-defined]
        say("hint: torchbft COMMAND --help lists what it takes")
        return ExitCode.USAGE
    except TorchbftError as error:
        say_error(error)
        return exit_code(error)
    except (KeyboardInterrupt, typer.Abort):
        say("interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        return _unexpected(error)


def _unexpected(error: Exception) -> int:
    if isinstance(error, OSError) and error.errno in _DISK:
        say(f"error: {error.filename or 'disk'}: {error.strerror}")
        say("hint: free some space, or check the disk; what was finalized is not lost")
        return ExitCode.STORAGE
    if isinstance(error, OSError) and error.errno in _PATH and error.filename:
        say(f"error: {error.filename}: {error.strerror}")
        say("hint: check the path and who may read or write it")
        return ExitCode.USAGE
    if os.environ.get(DEBUG_VARIABLE):
        raise error
    say(f"error: unexpected {type(error).__name__}: {error}")
    say(f"hint: this is a defect; please report it at {ISSUES} ({DEBUG_VARIABLE}=1 shows where)")
    return ExitCode.INTERNAL


if __name__ == "__main__":
    sys.exit(main())
