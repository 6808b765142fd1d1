"""What every command shares: exit codes, data on stdout, words on stderr, one-line errors."""

from __future__ import annotations

import sys
from enum import IntEnum
from typing import Annotated

import msgspec
import typer

from torchbft.primitives.errors import HaltError, StorageError, TorchbftError

ISSUES = "https://github.com/torchbft/torchbft/issues"


class ExitCode(IntEnum):
    """The codes that commands end with; scripts may rely on them."""

    OK = 0
    CHECK_FAILED = 1
    """The command ran and its answer is no: verify, doctor, sim, a demo that missed its mark."""
    USAGE = 2
    """A wrong option, run file or key; nothing was started or changed."""
    HALTED = 3
    """The run halted, or ended in void rounds: more than f peers failed. Nothing wrong counted."""
    STORAGE = 4
    """Something durable cannot be read or written: disk full, a damaged log."""
    INTERNAL = 70
    """A defect of torchbft (EX_SOFTWARE)."""
    INTERRUPTED = 130
    """Control-C; the peer left cleanly."""


Json = Annotated[bool, typer.Option("--json", help="Print one JSON value on stdout.")]
"""The option that every command has."""


def emit(data: object, *, as_json: bool, text: str = "") -> None:
    """The command's answer on stdout: ``data`` as JSON, or ``text`` (if any) for people."""
    if as_json:
        sys.stdout.write(msgspec.json.format(_encoded(data), indent=2).decode() + "\n")
    elif text:
        sys.stdout.write(text.rstrip("\n") + "\n")
    sys.stdout.flush()


def _encoded(data: object) -> bytes:
    return msgspec.json.encode(data, enc_hook=str)


def say(words: str) -> None:
    """Words for people, on stderr; control characters in them (peers write some) are replaced."""
    safe = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in words)
    sys.stderr.write(safe + "\n")
    sys.stderr.flush()


def say_error(error: TorchbftError) -> None:
    """``error: WHERE: WHAT`` and, if there is one, ``hint: WHAT TO DO``."""
    say("error: " + " ".join(str(error).split()))
    if error.hint:
        say("hint: " + " ".join(error.hint.split()))


def exit_code(error: TorchbftError) -> ExitCode:
    """The exit code that an error stands for."""
    if isinstance(error, HaltError):
        return ExitCode.HALTED
    return ExitCode.STORAGE if isinstance(error, StorageError) else ExitCode.USAGE


def stop(code: ExitCode) -> typer.Exit:
    """To raise when a command ends with another code than 0."""
    return typer.Exit(int(code))
