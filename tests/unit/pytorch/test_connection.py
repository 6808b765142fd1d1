"""Which peer joins, when only a run file is given."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbft.primitives.errors import ConfigError
from torchbft.pytorch.connection import peer_folder
from torchbft.pytorch.solo import local_run


def with_keys(place: Path, *names: str) -> Path:
    for name in names:
        (place / "peers" / name).mkdir(parents=True)
        (place / "peers" / name / "identity.key").touch()
    return place / "run.toml"


def test_a_folder_or_a_name_decides(tmp_path: Path) -> None:
    run = with_keys(tmp_path, "bank-b", "clinic-c")
    assert peer_folder(run, tmp_path / "mine", None) == tmp_path / "mine"
    assert peer_folder(run, None, "bank-b") == tmp_path / "peers" / "bank-b"


def test_the_only_peer_needs_no_name(tmp_path: Path) -> None:
    run = with_keys(tmp_path, "clinic-c")
    (tmp_path / "peers" / "no-keys-here").mkdir()
    assert peer_folder(str(run), None, None) == tmp_path / "peers" / "clinic-c"


def test_two_peers_or_none_are_asked_about(tmp_path: Path) -> None:
    run = with_keys(tmp_path, "bank-b", "clinic-c")
    with pytest.raises(ConfigError, match=r"2 peers have keys in .*: bank-b, clinic-c") as error:
        peer_folder(run, None, None)
    assert "name=" in error.value.hint
    with pytest.raises(ConfigError, match="0 peers have keys") as error:
        peer_folder(tmp_path / "else" / "run.toml", None, None)
    assert "torchbft init" in error.value.hint


def test_a_run_without_a_file_has_no_folder() -> None:
    with pytest.raises(ConfigError, match="needs folder= or link="):
        peer_folder(local_run(1), None, None)
