"""A value that is replaced whole: whatever happens while it is written, the old or the new one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from torchbft.node.storage import saved
from torchbft.node.storage.saved import MAGIC, MAX_VALUE_BYTES, load_value, save_value
from torchbft.primitives.errors import StorageError

HINT = "remove it"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "value"


def test_there_is_none_before_the_first(path: Path) -> None:
    assert load_value(path, HINT) is None


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.binary(max_size=300), min_size=1, max_size=4))
def test_the_newest_value_is_read_back(path: Path, values: list[bytes]) -> None:
    for value in values:
        save_value(path, value)
        assert load_value(path, HINT) == value
    assert [each.name for each in path.parent.iterdir()] == ["value"]


def test_a_file_damaged_or_cut_anywhere_is_told_with_what_to_do(path: Path) -> None:
    save_value(path, b"some state")
    good = path.read_bytes()
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
            path.write_bytes(bad)
            with pytest.raises(StorageError, match="damaged") as caught:
                load_value(path, HINT)
            assert caught.value.hint == HINT
            assert str(path) in str(caught.value)
    path.write_bytes(good + b"x")
    with pytest.raises(StorageError, match="damaged"):
        load_value(path, HINT)
    path.write_bytes(good)
    assert load_value(path, HINT) == b"some state"


def test_a_file_beyond_the_bound_is_damaged_and_not_read_whole(path: Path) -> None:
    path.write_bytes(MAGIC)
    os.truncate(path, MAX_VALUE_BYTES + 100)
    with pytest.raises(StorageError, match="damaged"):
        load_value(path, HINT)


def test_a_file_that_cannot_be_read_is_told(path: Path) -> None:
    path.mkdir()
    with pytest.raises(StorageError, match="reading a file failed"):
        load_value(path, HINT)


def _at_once(*_: Any, **__: Any) -> Any:
    raise OSError(errno.ENOSPC, "No space left on device")


def _half(self: Path, content: bytes) -> int:
    with self.open("wb") as file:
        file.write(content[: len(content) // 2])
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "fails",
    [
        lambda m: m.setattr(Path, "write_bytes", _at_once),
        lambda m: m.setattr(Path, "write_bytes", _half),
        lambda m: m.setattr("torchbft.node.storage.durable.os.fsync", _at_once),
        lambda m: m.setattr("torchbft.node.storage.durable.os.replace", _at_once),
    ],
)
def test_a_full_disk_keeps_the_old_value(
    path: Path, monkeypatch: pytest.MonkeyPatch, fails: Callable[[pytest.MonkeyPatch], None]
) -> None:
    save_value(path, b"old")
    with monkeypatch.context() as broken:
        fails(broken)
        with pytest.raises(StorageError, match="the disk is full") as caught:
            save_value(path, b"new")
        assert "free space" in caught.value.hint
    assert load_value(path, HINT) == b"old"
    assert [each.name for each in path.parent.iterdir()] == ["value"]
    save_value(path, b"new")
    assert load_value(path, HINT) == b"new"


def test_what_a_crash_left_half_written_is_never_the_value(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kill runs no clean-up: the half file stays beside the old value, and is replaced later."""

    class Killed(BaseException):
        pass

    def killed(self: Path, content: bytes) -> int:
        with self.open("wb") as file:
            file.write(content[:20])
        raise Killed

    save_value(path, b"old")
    with monkeypatch.context() as broken:
        broken.setattr(Path, "write_bytes", killed)
        with pytest.raises(Killed):
            save_value(path, b"new")
    assert load_value(path, HINT) == b"old"
    save_value(path, b"newer")
    assert load_value(path, HINT) == b"newer"


def test_it_is_durable_before_it_takes_the_old_ones_place(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)

        def noted(*given: Any, name: str = name, real: Any = real) -> Any:
            done.append(name)
            return real(*given)

        monkeypatch.setattr(f"torchbft.node.storage.durable.os.{name}", noted)
    saved.save_value(path, b"value")
    assert done == ["fsync", "replace", "fsync"], "the file, its name, the folder"
