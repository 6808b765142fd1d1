"""``torchbft vote``: what it writes for the node, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from torchbft.cli import vote as module
from torchbft.node import entries as kept
from torchbft.node import wish
from torchbft.primitives.runspec import load_run
from torchbft.protocols.round.changes import Admit, Remove, Rotate, is_certified

Make = Callable[[int], list[Path]]


@pytest.fixture
def run_files(members: Make) -> list[Path]:
    return members(3)


def folder(run_file: Path, name: str) -> Path:
    return run_file.parent / "peers" / name


def newcomer(torchbft: Callable, run_file: Path, tmp_path: Path, host: str = "127.0.0.1") -> Path:
    """The request of one who is not in the run file."""
    place = tmp_path / "new"
    place.mkdir()
    mine = place / "run.toml"
    mine.write_text(run_file.read_text())
    assert torchbft("init", mine, "--name", "clinic-e", "--port", 7799, "--host", host).code == 0
    assert torchbft("request", mine, "--name", "clinic-e").code == 0
    return place / "clinic-e.request.toml"


def test_a_newcomers_request_is_voted_for_and_the_run_file_stays(
    torchbft: Callable, run_files: list[Path], tmp_path: Path
) -> None:
    run_file = run_files[0]
    before = run_file.read_bytes()
    request = newcomer(torchbft, run_file, tmp_path)
    ran = torchbft("vote", run_file, "admit", request, "--json")
    assert (ran.code, ran.data["node"], ran.data["withdrawn"]) == (0, False, False)
    (change,) = kept.wanted(folder(run_file, "lab-0"))
    assert isinstance(change, Admit)
    assert (change.name, change.port) == ("clinic-e", 7799)
    assert is_certified(change.identity, change)
    assert run_file.read_bytes() == before
    assert "it votes when it starts" in ran.err
    again = torchbft("vote", run_file, "admit", request, "--withdraw", "--json")
    assert again.data["withdrawn"]
    assert kept.wanted(folder(run_file, "lab-0")) == ()
    assert torchbft("vote", run_file, "admit", request, "--withdraw").out.startswith("this member")


def test_a_request_for_another_run_or_a_changed_one_is_refused(
    torchbft: Callable, run_files: list[Path], tmp_path: Path
) -> None:
    request = newcomer(torchbft, run_files[0], tmp_path)
    text = request.read_text()
    request.write_text(text.replace("7799", "7800"))
    assert torchbft("vote", run_files[0], "admit", request).code == 2
    request.write_text("nonsense = 1")
    assert torchbft("vote", run_files[0], "admit", request).code == 2
    request.write_bytes(b"\xff" * 9)
    assert torchbft("vote", run_files[0], "admit", request).code == 2
    request.write_bytes(b"#" * (1 << 17))
    assert "too large" in torchbft("vote", run_files[0], "admit", request).err
    assert torchbft("vote", run_files[0], "admit", tmp_path / "nothing").code == 2
    assert kept.wanted(folder(run_files[0], "lab-0")) == ()


@pytest.mark.parametrize("host", ["a\x1b[2J", "a b", "a\nb", "x" * 254])
def test_a_request_that_no_ledger_takes_or_that_paints_the_screen_is_refused(
    torchbft: Callable, run_files: list[Path], tmp_path: Path, host: str
) -> None:
    request = newcomer(torchbft, run_files[0], tmp_path, host)
    ran = torchbft("vote", run_files[0], "admit", request)
    assert ran.code == 2
    assert "is no request that can be voted for" in ran.err
    assert host not in ran.err
    assert kept.wanted(folder(run_files[0], "lab-0")) == ()


def test_under_cometbft_members_can_only_be_removed(
    torchbft: Callable, run_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = load_run(run_files[0])
    outside = replace(run, ledger=replace(run.ledger, kind="cometbft"))
    monkeypatch.setattr(module, "load_run", lambda path: outside)
    for action, what in (("admit", "no.toml"), ("rotate", "lab-0")):
        ran = torchbft("vote", run_files[0], action, what)
        assert ran.code == 2
        assert "can only be removed" in ran.err
    assert torchbft("vote", run_files[0], "remove", "lab-2").code == 0


def test_a_member_is_voted_out_by_name(torchbft: Callable, run_files: list[Path]) -> None:
    assert torchbft("vote", run_files[0], "remove", "lab-2").out.strip() == "for: remove lab-2"
    assert kept.wanted(folder(run_files[0], "lab-0")) == (Remove("lab-2"),)
    assert torchbft("vote", run_files[0], "remove", "No Name").code == 2


def test_an_own_key_is_made_and_the_others_vote_for_its_file(
    torchbft: Callable, run_files: list[Path]
) -> None:
    mine, other = run_files[1], run_files[0]
    assert torchbft("vote", mine, "rotate", "lab-1").code == 0
    file = mine.parent / "lab-1.key.toml"
    (key,) = kept.rotated_keys(folder(mine, "lab-1"))
    assert key.seed().hex() not in file.read_text()
    assert torchbft("vote", other, "rotate", file).code == 0
    (wanted,) = kept.wanted(folder(mine, "lab-1"))
    assert kept.wanted(folder(other, "lab-0")) == (wanted,)
    assert isinstance(wanted, Rotate)
    member = load_run(mine).member("lab-1")
    assert is_certified(bytes.fromhex(member.identity), wanted)
    assert wanted.voting == key.public
    # Asked again before it passed: the same key.
    assert torchbft("vote", mine, "rotate", "lab-1").code == 0
    assert len(kept.rotated_keys(folder(mine, "lab-1"))) == 1


def test_a_key_file_of_another_run_is_refused(torchbft: Callable, run_files: list[Path]) -> None:
    assert torchbft("vote", run_files[1], "rotate", "lab-1").code == 0
    file = run_files[1].parent / "lab-1.key.toml"
    text = file.read_text()
    file.write_text(text.replace('run = "', 'run = "other-'))
    assert "another run" in torchbft("vote", run_files[0], "rotate", file).err
    file.write_text(text.replace("voting", "Voting"))
    assert "is no new key" in torchbft("vote", run_files[0], "rotate", file).err


def test_a_running_node_is_told_to_look(
    torchbft: Callable, run_files: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(module, "holder_of", lambda folder: 4711)
    monkeypatch.setattr(module, "os", SimpleNamespace(kill=lambda *given: sent.append(given)))
    ran = torchbft("vote", run_files[0], "remove", "lab-2", "--json")
    assert ran.data["node"]
    assert sent == [(4711, wish.LOOK)]
