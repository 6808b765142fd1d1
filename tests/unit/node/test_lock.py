"""One process per folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from torchbft.node.storage.lock import FolderLock
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
