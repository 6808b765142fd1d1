"""Saved states by round, with a pointer to the last one that the members agreed on.

Retention keeps the newest few and always the agreed one, so that a run of bad rounds never pushes
out the last good model (case C26).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from torchbft.node.storage.durable import replace_file, storage_error, sync_folder
from torchbft.primitives.errors import MisuseError, StorageError
from torchbft.primitives.ids import Round

KEEP = 3
"""Newest checkpoints kept beside the agreed one: the round in work, the one before, a spare."""

_POINTER = "agreed"
_NAME = re.compile(r"round-(\d{1,19})\.safetensors")


class Checkpoints:
    """Files ``round-R.safetensors`` in one folder. All methods raise StorageError on disk faults.

    A file that exists is whole (it is renamed into place); what it holds is the caller's to check
    against the signed root.
    """

    def __init__(self, folder: Path, keep: int = KEEP) -> None:
        if keep < 1:
            raise MisuseError(f"at least one checkpoint is kept, not {keep}")
        self.folder, self._keep = folder, keep
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for stale in folder.glob("*.tmp"):
                stale.unlink()
        except OSError as error:
            raise storage_error(error, folder, "opening the checkpoints") from error

    def path(self, round: Round) -> Path:
        return self.folder / f"round-{round}.safetensors"

    def rounds(self) -> list[Round]:
        """Rounds that have a checkpoint, in order."""
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted(Round(int(match[1])) for match in names if match)

    def save(self, round: Round, content: bytes | Callable[[Path], None]) -> Path:
        """Save a round's state: bytes, or a function that writes a file at the path it gets."""
        path = self.path(round)
        if isinstance(content, bytes):
            blob = content
            replace_file(path, lambda temporary: _write(temporary, blob))
        else:
            replace_file(path, content)
        self._prune()
        return path

    def agree(self, round: Round) -> None:
        """Point at the round whose root the quorum signed; its checkpoint must be there."""
        if not self.path(round).exists():
            raise MisuseError(f"round {round} has no checkpoint to agree on")
        replace_file(self.folder / _POINTER, lambda path: _write(path, str(round).encode()))
        self._prune()

    def agreed(self) -> Round | None:
        """The round that the pointer names, None when none was agreed yet."""
        pointer = self.folder / _POINTER
        if not pointer.exists():
            return None
        text = pointer.read_bytes()
        if not text.isdigit() or not self.path(Round(int(text))).exists():
            raise StorageError(
                "the pointer to the agreed checkpoint is damaged, or the checkpoint is gone",
                where=str(pointer),
                hint="delete this folder: the peer fetches the agreed state from the others",
            )
        return Round(int(text))

    def load(self, round: Round) -> bytes:
        """The bytes of a round's checkpoint."""
        try:
            return self.path(round).read_bytes()
        except OSError as error:
            raise storage_error(error, self.path(round), "reading a checkpoint") from error

    def _prune(self) -> None:
        keep = {*self.rounds()[-self._keep :], self.agreed()}
        old = [round for round in self.rounds() if round not in keep]
        for round in old:
            self.path(round).unlink(missing_ok=True)
        if old:
            sync_folder(self.folder)


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)
