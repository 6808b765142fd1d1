"""The node's side of a membership that changes: whom it connects to, its keys, what it votes for.

Wishes are files in the peer's folder, one per change, that ``torchbft vote`` writes and takes away;
the node reads them at its start and whenever it is told to look (``wish.py``).
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec

from torchbft.node.transports.control import ControlChannel
from torchbft.node.transports.data import DataPlane
from torchbft.node.transports.endpoint import Contact, Endpoint
from torchbft.primitives.errors import ConfigError, DecodeError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import KeyRing, SigningKey, load_key, save_key
from torchbft.primitives.runspec import Member, RunSpec
from torchbft.primitives.wire import MAX_ITEM_BYTES, decode, encode
from torchbft.protocols.round.changes import Change, described
from torchbft.protocols.round.interface import ChangeTold, KeyAdded, Want
from torchbft.protocols.round.state import LedgerState

WISHES = "wishes"
"""Folder of the changes that this member's operator is for."""
ROTATED = "voting-*.key"
"""Voting keys of after a rotation, beside the first one."""
MAX_ROTATED = 64
"""Voting keys of one member that are read."""


def own_entry(folder: Path) -> tuple[Member, ...]:
    """What ``torchbft init`` wrote of this folder's member: one entry, or none."""
    with suppress(OSError, tomllib.TOMLDecodeError, msgspec.ValidationError):
        return (msgspec.convert(tomllib.loads((folder / "member.toml").read_text()), Member),)
    return ()


def entry(run: RunSpec, folder: Path, name: str) -> Member:
    """A member's entry: of the run file, or for one that is admitted during the run its own.
    Raises ConfigError if there is neither."""
    for member in (*run.members, *own_entry(folder)):
        if member.name == name:
            return member
    return run.member(name)


def contacts(run: RunSpec, state: LedgerState, own: Member) -> dict[PeerId, Contact]:
    """Whom to connect to: the ledger's members, those who still have to sign for the round before,
    and oneself. Members of the run file are found where it says, or where they were admitted."""
    last = state.previous.seats if state.previous is not None else ()
    leaving = {seat.name for seat in last} | {own.name}
    found = {
        PeerId(m.name): Contact(m.host, m.port, m.identity)
        for m in state.members
        if not m.left or m.name in leaving
    }
    found[PeerId(own.name)] = Contact(own.host, own.port, bytes.fromhex(own.identity))
    return found


# --- keys -----------------------------------------------------------------------------------------


def rotated_keys(folder: Path) -> list[SigningKey]:
    """The voting keys made for rotations, oldest first."""
    paths = sorted(folder.glob(ROTATED), key=lambda path: (len(path.name), path.name))
    return [load_key(path) for path in paths[:MAX_ROTATED]]


def ring_of(voting: SigningKey, folder: Path) -> SigningKey | KeyRing:
    """The voting key, with those of rotations if there are any."""
    later = rotated_keys(folder)
    return KeyRing(voting, *later) if later else voting


def make_rotated_key(folder: Path) -> SigningKey:
    """Make and save a further voting key. Raises ConfigError after too many."""
    count = len(rotated_keys(folder))
    if count >= MAX_ROTATED:
        raise ConfigError("has had too many voting keys", where=str(folder))
    key = SigningKey.generate()
    save_key(folder / f"voting-{count + 2}.key", key)
    return key


# --- wishes ---------------------------------------------------------------------------------------


def _path(folder: Path, change: Change) -> Path:
    digest = hashlib.sha256(encode(change)).hexdigest()[:16]
    return folder / WISHES / f"{change.name}-{digest}"


def wish_for(folder: Path, change: Change) -> Path:
    """Write a change down as wanted."""
    path = _path(folder, change)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_bytes(encode(change))
    draft.replace(path)
    return path


def forget(folder: Path, change: Change) -> bool:
    """Want a change no more; whether it was wanted."""
    path = _path(folder, change)
    there = path.exists()
    path.unlink(missing_ok=True)
    return there


def wanted(folder: Path) -> tuple[Change, ...]:
    """All changes that are wanted; files that are none are passed over."""
    return tuple(_read(folder))


def _read(folder: Path) -> Iterator[Change]:
    for path in sorted((folder / WISHES).glob("*-*")):
        with suppress(OSError, DecodeError), path.open("rb") as file:
            yield cast(Change, decode(file.read(MAX_ITEM_BYTES + 1), Change))  # type: ignore[arg-type]


# --- the running node -----------------------------------------------------------------------------


class Members:
    """Follows the ledger's members for one node, and hands its operator's wishes to its machine.

    ``feed`` gives the machine an input; ``notice`` writes a line for people.
    """

    def __init__(
        self,
        run: RunSpec,
        me: PeerId,
        folder: Path,
        feed: Callable[[object], None],
        notice: Callable[[str], None],
    ) -> None:
        self._run, self._folder, self._feed, self._notice = run, folder, feed, notice
        self._own = entry(run, folder, me)

    @property
    def address(self) -> tuple[str, int]:
        """Where this member says that it listens."""
        return self._own.host, self._own.port

    def keys(self, voting: SigningKey) -> SigningKey | KeyRing:
        """The voting key, with those of rotations if there are any."""
        return ring_of(voting, self._folder)

    def roster(self, state: LedgerState) -> dict[PeerId, Contact]:
        return contacts(self._run, state, self._own)

    def look(self) -> None:
        """The operator is for these changes, and no others, and may have made a new key."""
        for key in rotated_keys(self._folder):
            self._feed(KeyAdded(key))
        self._feed(Want(wanted(self._folder)))

    def told(self, effect: ChangeTold) -> None:
        """What became of a wish; one that came true is put away."""
        news = "is in force" if effect.in_force else f"cannot be voted for now: {effect.reason}"
        self._notice(f"{described(effect.change)}: {news}")
        if effect.in_force:
            forget(self._folder, effect.change)

    def follow(
        self, state: LedgerState, network: Endpoint, control: ControlChannel, data: DataPlane
    ) -> None:
        """Connect to whom the ledger admitted, and let go of who left."""
        now, before = self.roster(state), network.roster
        if now == before:
            return
        network.update_roster(now)
        control.connect_all()
        gone, come = before.keys() - now.keys(), now.keys() - before.keys()
        for name in gone:
            data.disconnect(name)
        for what, names in (("joined", come), ("left", gone)):
            if names:
                self._notice(f"{what} by the members' votes: {', '.join(sorted(names))}")
