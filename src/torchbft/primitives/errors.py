"""Every error that torchbft raises: what happened, where, and what to do next."""

from __future__ import annotations


class TorchbftError(Exception):
    """Base of all errors. ``str(error)`` is one line; ``hint`` says what to do next."""

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what, self.where, self.hint = what, where, hint
        super().__init__(f"{where}: {what}" if where else what)


class MisuseError(TorchbftError):
    """Our own code, or the caller, broke an interface's contract."""


class PreconditionError(TorchbftError, ValueError):
    """A rule, codec or protocol cannot work with these numbers; names the bound that fails."""


class ConfigError(TorchbftError):
    """A run file, key file or option is wrong. Nothing was started or changed."""


class DecodeError(TorchbftError):
    """The one remote error: bytes from outside are not a canonical value of the expected type."""


class StorageError(TorchbftError):
    """Something durable could not be read or written."""


class CorruptLogError(StorageError):
    """A record in the middle of a log is damaged; ``offset`` is its first byte."""

    def __init__(self, what: str, *, where: str, offset: int) -> None:
        self.offset = offset
        super().__init__(
            f"{what} at byte {offset}",
            where=where,
            hint="restore this file from a backup, or delete the peer's folder and join again",
        )


class HaltError(TorchbftError):
    """The run cannot go on safely (no quorum, no equal roots); nothing wrong was finalized."""
