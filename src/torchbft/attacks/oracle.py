"""The oracle: how a demo's omniscient liars read this round's honest updates.

It lies outside the protocol: honest trainers of a *demonstration* publish their updates in a
folder (of shared memory where there is any), one file a round and peer, and liars wait for them.
With commit–reveal a real liar cannot have this; reports print that it was there.

Files hold raw little-endian float32; nothing is unpickled. A file appears whole (atomic rename).

Shapes: N honest peers, D parameters.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from torchbft.primitives.ids import PeerId

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "torchbft-oracle-"
PATIENCE_S = 5.0
"""A liar waits at most so long for honest updates: one honest peer may be down, and a liar that
waits longer than the swarm's own time-outs would only be late."""
POLL_S = 0.002
"""Between two looks into the folder: far below a round's time, and a look costs microseconds."""
ROUNDS_KEPT = 2
"""A publisher removes its files of older rounds; every liar is through with them by then."""


class Oracle:
    """One process's end of the oracle's folder, which all trainers of a demo share."""

    def __init__(
        self,
        folder: Path,
        honest: Iterable[PeerId],
        *,
        patience: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder = folder
        self.honest = tuple(sorted(honest))
        self._patience, self._clock, self._sleep = patience, clock, sleep

    def publish(self, round: int, peer: PeerId, update_D: Tensor) -> None:
        """Make an honest update (float32 D) visible to the liars. Never disturbs its peer: a full
        disk or a removed folder only leaves the liars without it."""
        place = self._place(round, peer)
        draft = place.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):
            update_D.detach().to("cpu", torch.float32).contiguous().numpy().tofile(draft)
            draft.replace(place)
        self._place(round - ROUNDS_KEPT, peer).unlink(missing_ok=True)

    def wait(self, round: int, size: int) -> Tensor | None:
        """The honest updates of a round (float32 N, D), rows in order of peer id.

        Returns once all are there, or after the patience with those that are; None if none is.
        size: D; a file of another length is left out.
        """
        until = self._clock() + self._patience
        while any(not self._place(round, peer).exists() for peer in self.honest):
            if self._clock() >= until:
                break
            self._sleep(POLL_S)
        rows = [
            row_D for peer in self.honest if (row_D := self._read(round, peer, size)) is not None
        ]
        return torch.stack(rows) if rows else None

    def close(self) -> None:
        """Remove the folder; for the process that created it."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _place(self, round: int, peer: PeerId) -> Path:
        return self.folder / f"{round:010d}.{peer}.f32"

    def _read(self, round: int, peer: PeerId, size: int) -> Tensor | None:
        try:
            values_D = np.fromfile(self._place(round, peer), dtype="<f4")
        except OSError:
            return None
        return torch.from_numpy(values_D) if len(values_D) == size else None


def create_folder() -> Path:
    """A fresh folder for one demo, private to this user, in shared memory where there is any.

    Folders whose creating process is gone, and could not remove them, are removed.
    """
    parent = SHARED_MEMORY if os.access(SHARED_MEMORY, os.W_OK) else Path(tempfile.gettempdir())
    for left in parent.glob(f"{PREFIX}*-*"):
        if _is_orphan(left):
            shutil.rmtree(left, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-", dir=parent))


def _is_orphan(folder: Path) -> bool:
    """Whether the process named in a folder's name no longer runs; not if that is unclear."""
    try:
        os.kill(int(folder.name.removeprefix(PREFIX).partition("-")[0]), 0)
    except ProcessLookupError:
        return True
    except (ValueError, OSError):
        return False
    return False
