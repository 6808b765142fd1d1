"""What a member's folder holds beside its logs: its own entry, further voting keys, and the changes
of the membership that its operator is for.

Wishes are files, one per change, that ``torchbft vote`` writes and takes away; the node reads them
at its start and whenever it is told to look (``wish.py``).
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

import msgspec

from torchbft.primitives.errors import ConfigError, DecodeError
from torchbft.primitives.keys import KeyRing, SigningKey, load_key, save_key
from torchbft.primitives.runspec import Member, RunSpec
from torchbft.primitives.wire import MAX_ITEM_BYTES, decode, encode
from torchbft.protocols.round.changes import Change

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
