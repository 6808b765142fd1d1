"""The node's keeper of the agreed state: checks payloads, applies rounds, saves checkpoints.

Runs on one thread of its own, so that tensors never delay a vote. A payload is decoded once, when
it is stored; what was decoded is kept until its round is applied.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path

from torchbft.node.storage.checkpoints import Checkpoints
from torchbft.node.storage.durable import storage_error
from torchbft.node.storage.payloads import PayloadStore
from torchbft.primitives.errors import DecodeError, HaltError, MisuseError, StorageError
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.runspec import RunSpec
from torchbft.tensors.advance import Advanced, LedgerFields, advance
from torchbft.tensors.recipe import Recipe
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update

START = "start.safetensors"
"""The state before round 0, never pruned: a verifier replays the run from it."""
MAX_CACHED_UPDATES = 128
"""Decoded updates kept: two rounds of 64 members."""


@dataclass(frozen=True, slots=True)
class Applied:
    """A round applied here: the new root, and what the rule made of each contribution."""

    round: int
    root: bytes
    advanced: Advanced
    seconds: float


@dataclass(frozen=True, slots=True)
class Saved:
    """The agreed state and the file that holds it, which stays readable after its name is gone:
    given to the trainer, so that nobody encodes a model on the event loop."""

    state: AgreedState
    file: BufferedReader


class ModelKeeper:
    """Holds the agreed state after ``state.round`` rounds."""

    def __init__(
        self,
        run: RunSpec,
        recipe: Recipe,
        folder: Path,
        checkpoints: Checkpoints,
        store: PayloadStore,
    ) -> None:
        self._run, self._recipe, self._store = run, recipe, store
        self._start, self._checkpoints = folder / START, checkpoints
        self._updates: dict[bytes, Update] = {}
        self._before: AgreedState | None = None
        self._held: Saved | None = None
        self.unusable: list[str] = []
        """One line for each saved state that could not be read."""

    @property
    def ready(self) -> bool:
        return self.state is not None

    def current(self) -> AgreedState:
        """The agreed state. Raises MisuseError before ``begin`` or ``resume``."""
        return self.saved().state

    def saved(self) -> Saved:
        """The agreed state and its file. Raises MisuseError before ``begin`` or ``resume``."""
        if self._held is None:
            raise MisuseError("the model is not there yet", where="node")
        return self._held

    @property
    def state(self) -> AgreedState | None:
        """The agreed state; None before ``begin`` or ``resume``."""
        return self._held.state if self._held is not None else None

    def _hold(self, state: AgreedState, path: Path) -> None:
        """Go on with a state that was saved at ``path``."""
        try:
            self._held = Saved(state, path.open("rb"))
        except OSError as error:
            raise storage_error(error, path, "reading the agreed state") from error

    def resume(self) -> bool:
        """Take up the newest usable checkpoint, and the one before it, for others may need that:
        its root may be the newest that is signed. False if there is none: a fresh peer."""
        saved = self._on_disk()
        for state, path in saved:
            self._hold(state, path)
            self._before = next((before for before, _ in saved), None)
            break
        return self.ready

    def _on_disk(self) -> Iterator[tuple[AgreedState, Path]]:
        """The states on the disk, newest first; what cannot be read is noted and passed over."""
        paths = [self._checkpoints.path(r) for r in reversed(self._checkpoints.rounds())]
        for path in [*paths, self._start]:
            try:
                if path.exists():
                    yield AgreedState.load(path), path
            except (DecodeError, StorageError) as error:
                self.unusable.append(str(error))

    def begin(self, initial: AgreedState) -> None:
        """Start from the trainer's initial state, if it is the one that the run file names."""
        want = self._run.task.start_root
        if want and initial.root().hex() != want:
            raise HaltError(
                f"this model starts at root {initial.root().hex()[:16]}…, the run file names"
                f" {want[:16]}…",
                where="initial model",
                hint="use the task and the torch version that the run was made with",
            )
        initial.save(self._start)
        self._hold(initial, self._start)

    def inspect(self, root: bytes) -> str | None:
        """Decode a stored payload of at most the codec's bytes (the data plane sees to that); the
        reason why it is malformed, or None."""
        if root in self._updates:
            return None
        layout = self.current().layout
        try:
            update = self._recipe.codec.decode(self._store.get(root), layout)
        except DecodeError as error:
            return error.what
        if len(self._updates) >= MAX_CACHED_UPDATES:
            self._updates.pop(next(iter(self._updates)))
        self._updates[root] = update
        return None

    def by_root(self, root: bytes) -> AgreedState | None:
        """The state of this root, if it is the newest, the one before, or the start."""
        for state in (self.state, self._before):
            if state is not None and state.root() == root:
                return state
        named = self._run.task.start_root
        if named in ("", root.hex()) and self._start.exists():
            start = AgreedState.load(self._start)
            return start if start.root() == root else None
        return None

    def adopt(self, state: AgreedState) -> None:
        """Go on from a state whose root the caller has checked against a signed one. What was
        saved of later rounds is removed, or a restart would take it up."""
        for later in self._checkpoints.rounds():
            if later > state.round:
                self._checkpoints.path(later).unlink(missing_ok=True)
        path = self._start
        if state.root().hex() == self._run.task.start_root:
            state.save(path)
        else:
            path = self._checkpoints.save(Round(state.round), state.save)
        self._before = None
        self._hold(state, path)
        self._updates.clear()

    def take_back(self, round_: int) -> bool:
        """Undo a round that votes voided after it was fixed; False if it was not applied here."""
        if self.state is None or self.state.round != round_ + 1:
            return False
        saved = (state for state, _ in self._on_disk() if state.round <= round_)
        before = self._before or next(saved, None)
        if before is None:
            return False
        self.adopt(before)
        return True

    def apply(
        self,
        round_: int,
        from_root: bytes,
        accepted: Sequence[tuple[PeerId, bytes]],
        f: int,
        ledger: LedgerFields,
    ) -> Applied | None:
        """Apply a fixed round's accepted set (member, payload root) to the state of ``from_root``;
        every payload is held. None if a copy took the place of that state meanwhile."""
        before = self.current()
        if before.root() != from_root:
            return None
        started = time.perf_counter()
        for peer, root in accepted:
            reason = self.inspect(root)
            if reason is not None:
                raise HaltError(
                    f"the accepted payload of {peer} is malformed: {reason}", where="node"
                )
        updates = [(peer, self._updates[root]) for peer, root in accepted]
        after, advanced = advance(
            before, updates, rule=self._recipe.rule, f=f, outer=self._recipe.outer, ledger=ledger
        )
        root = after.root()
        path = self._checkpoints.save(Round(after.round), after.save)
        self._before = before
        self._hold(after, path)
        self._updates.clear()
        return Applied(round_, root, advanced, time.perf_counter() - started)
