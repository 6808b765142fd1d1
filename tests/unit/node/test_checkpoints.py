"""Checkpoints: whole or absent, and the agreed one is never pruned (C26)."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbft.node.storage.checkpoints import Checkpoints
from torchbft.primitives.errors import MisuseError, StorageError
from torchbft.primitives.ids import Round


def test_c26_bad_rounds_never_push_out_the_last_agreed_state(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path, keep=3)
    saved.save(Round(1), b"good")
    saved.agree(Round(1))
    for round in range(2, 20):
        saved.save(Round(round), b"nan")
    assert saved.rounds() == [1, 17, 18, 19]
    assert (saved.agreed(), saved.load(Round(1))) == (1, b"good")
    saved.agree(Round(18))
    assert saved.rounds() == [17, 18, 19]


def test_reopening_finds_the_agreed_round_and_drops_half_files(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(Round(4), lambda path: path.write_bytes(b"by function") and None)
    saved.agree(Round(4))
    (tmp_path / "round-5.safetensors.tmp").write_bytes(b"half")
    again = Checkpoints(tmp_path)
    assert (again.agreed(), again.rounds()) == (4, [4])
    assert again.load(Round(4)) == b"by function"
    assert not list(tmp_path.glob("*.tmp"))


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path)
    saved.save(Round(1), b"old")

    def full(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StorageError, match="the disk is full"):
        saved.save(Round(1), full)
    assert saved.load(Round(1)) == b"old"
    assert not list(tmp_path.glob("*.tmp"))


def test_nothing_agreed_yet_and_nothing_there(tmp_path: Path) -> None:
    saved = Checkpoints(tmp_path / "new")
    assert (saved.agreed(), saved.rounds()) == (None, [])
    with pytest.raises(MisuseError):
        saved.agree(Round(1))
    with pytest.raises(MisuseError):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(StorageError, match="reading a checkpoint"):
        saved.load(Round(1))


@pytest.mark.parametrize("pointer", [b"", b"seven", b"7", b"\xff"])
def test_a_damaged_pointer_is_named(tmp_path: Path, pointer: bytes) -> None:
    (tmp_path / "agreed").write_bytes(pointer)
    with pytest.raises(StorageError, match="agreed checkpoint"):
        Checkpoints(tmp_path).agreed()
