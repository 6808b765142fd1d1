"""One process per folder."""

from __future__ import annotations

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from torchbft.node.storage import lock as lock_module
from torchbft.node.storage.lock import FolderLock, holder_of
from torchbft.primitives.errors import StorageError

HOLD = """
import sys
from pathlib import Path
from torchbft.node.storage.lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_second_process_is_refused_with_the_holders_pid(tmp_path: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    with holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StorageError, match=f"in use by process {holder.pid}") as refused:
            FolderLock(tmp_path)
        assert "stop that process" in refused.value.hint
        holder.kill()
    with FolderLock(tmp_path) as lock:
        assert (tmp_path / "lock").read_text() == f"{os.getpid()}\n"
        with pytest.raises(StorageError):
            FolderLock(tmp_path)
        lock.release()
        FolderLock(tmp_path).release()


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="locking the peer's folder"):
        FolderLock(tmp_path / "nowhere")


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], object]]:
    """What happens while somebody waits for the file to settle: one thing for each look."""
    events: list[Callable[[], object]] = []
    pause = SimpleNamespace(sleep=lambda seconds: events.pop(0)() if events else None)
    monkeypatch.setattr(lock_module, "time", pause)
    return events


def held(folder: Path, kind: int, text: str = "") -> int:
    """The lock file in somebody's hands, with this text in it."""
    descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, text.encode(), 0)
    fcntl.flock(descriptor, kind)
    return descriptor


def test_who_asks_for_the_holder_keeps_no_node_from_starting(
    tmp_path: Path, looks: list[Callable[[], object]]
) -> None:
    asking = held(tmp_path, fcntl.LOCK_SH)
    looks.append(lambda: os.close(asking))
    with FolderLock(tmp_path):
        assert holder_of(tmp_path) == os.getpid()


def test_the_number_of_a_dead_holder_is_not_taken_for_the_new_one(
    tmp_path: Path, looks: list[Callable[[], object]]
) -> None:
    """Between taking the lock and writing its number, the file holds that of the one before."""
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    for before in (gone.pid, 1):  # dead; alive, and another process by now
        new = held(tmp_path, fcntl.LOCK_EX, f"{before}\n")
        looks.append(lambda: None)
        looks.append(lambda to=new: os.pwrite(to, f"{os.getpid():<9}\n".encode(), 0))  # type: ignore[misc]
        assert holder_of(tmp_path) == os.getpid()
        assert looks == []
        os.close(new)


def test_a_holder_that_cannot_be_told_is_an_error_and_never_a_number(
    tmp_path: Path, looks: list[Callable[[], object]]
) -> None:
    taken = held(tmp_path, fcntl.LOCK_EX, "1\n")
    with pytest.raises(StorageError, match="cannot be seen from here"):
        holder_of(tmp_path)
    with pytest.raises(StorageError, match=r"in use by process \(unknown\)"):
        FolderLock(tmp_path)
    os.close(taken)
    assert holder_of(tmp_path) is None


def test_a_full_disk_costs_the_number_and_not_the_lock(
    tmp_path: Path, looks: list[Callable[[], object]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(lock_module.os, "pwrite", full)
    with FolderLock(tmp_path), pytest.raises(StorageError, match="in use"):
        FolderLock(tmp_path)
