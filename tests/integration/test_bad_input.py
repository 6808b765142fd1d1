"""What a member does wrong when it joins: one line that names what and where, one that says what
to do, an exit code, nothing lost, and no process left (issue "the main job", *Bad input*)."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch

from torchbft.cli.init import with_task
from torchbft.cli.main import main
from torchbft.node.launch import Keys
from torchbft.node.storage.lock import holder_of
from torchbft.node.storage.log import AppendLog
from torchbft.primitives.runspec import RunSpec, Training, dump_run, new_member
from torchbft.pytorch.tasks import digits

NAMES = ("bank-a", "bank-b", "clinic-c", "clinic-d")

SECONDS, PAUSE = 60.0, 0.05
"""Bound of the wait for a refused node's end, which takes a moment, and between two looks."""

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms")]


@dataclass
class Place:
    """A member's folder on its machine: the signed run file, and its own keys beside it."""

    folder: Path
    keys: dict[str, Keys]
    run: RunSpec

    @property
    def run_file(self) -> Path:
        return self.folder / "run.toml"

    @property
    def peer(self) -> Path:
        return self.folder / "peers" / "bank-a"

    def write(self, run: RunSpec) -> None:
        """Another run file, signed by all."""
        for name, keys in self.keys.items():
            run = run.signed(name, keys.identity)
        self.run_file.write_text(dump_run(run))


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("original")
    keys = {name: Keys.create(folder / "all" / name) for name in NAMES}
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    members = tuple(
        new_member(name, mine.identity, mine.voting, port=port if name == "bank-a" else 9 + number)
        for number, (name, mine) in enumerate(keys.items())
    )
    bare = RunSpec(name="bad", seed="44" * 32, members=members, training=Training(rounds=2))
    place = Place(folder, keys, with_task(bare, "digits"))
    shutil.copytree(folder / "all" / "bank-a", place.peer)
    place.write(place.run)
    return place


@pytest.fixture
def place(original: Place, tmp_path: Path) -> Iterator[Place]:
    shutil.copytree(original.folder, tmp_path / "mine")
    threads = torch.get_num_threads()
    made = Place(tmp_path / "mine", original.keys, original.run)
    yield made
    torch.set_num_threads(threads)
    end = time.monotonic() + SECONDS
    while holder_of(made.peer) is not None:
        assert time.monotonic() < end, "a node was left behind"
        time.sleep(PAUSE)


Refused = Callable[..., str]


@pytest.fixture
def refused(place: Place, capsys: pytest.CaptureFixture[str]) -> Refused:
    """``refused(2, "--name", "eve")``: join is refused with this code; returns what it said."""

    def join(code: int, *options: object) -> str:
        capsys.readouterr()
        assert main(["join", str(place.run_file), *map(str, options)]) == code
        captured = capsys.readouterr()
        assert captured.out == ""
        lines = captured.err.splitlines()
        assert [line.startswith("error: ") for line in lines].count(True) == 1, captured.err
        assert [line.startswith("hint: ") for line in lines].count(True) == 1, captured.err
        assert "Traceback" not in captured.err
        return captured.err

    return join


def test_an_edited_run_file(place: Place, refused: Refused) -> None:
    text = place.run_file.read_text()
    place.run_file.write_text(text.replace("rounds = 2", "rounds = 3"))
    said = refused(2)
    assert "0 of 3 needed members signed this content" in said
    assert "edited after signing" in said
    assert not (place.peer / "status.json").exists(), "nothing was started"


def test_another_task(place: Place, refused: Refused) -> None:
    source = Path(digits.__file__).read_text()
    other = place.folder / "task.py"
    other.write_text(source.replace("class Digits", "# my own\nclass Digits"))
    said = refused(2, "--task", f"{other}:Digits")
    assert "sha256" in said
    assert not (place.peer / "status.json").exists()


def test_another_data_set(place: Place, refused: Refused) -> None:
    data = msgspec.structs.replace(place.run.data, digest="ab" * 32)
    place.write(msgspec.structs.replace(place.run, data=data, signatures=()))
    said = refused(2)
    assert "its digest is not abababab" in said
    assert "compare with the others" in said


def test_another_start_model(place: Place, refused: Refused) -> None:
    task = msgspec.structs.replace(place.run.task, start_root="cd" * 32)
    place.write(msgspec.structs.replace(place.run, task=task, signatures=()))
    said = refused(3)
    assert "the run file names cdcdcdcd" in said
    assert "torch version" in said


def test_a_peer_that_is_not_in_the_roster(place: Place, refused: Refused) -> None:
    Keys.create(place.folder / "peers" / "eve")
    said = refused(2, "--name", "eve")
    assert "'eve' is not in the roster" in said
    assert "torchbft request" in said


def test_a_name_with_somebody_elses_keys(place: Place, refused: Refused) -> None:
    shutil.rmtree(place.peer)
    Keys.create(place.peer)
    said = refused(2)
    assert f"{place.peer}: the identity key of 'bank-a' is not the one in the roster" in said


def test_an_occupied_port(place: Place, refused: Refused) -> None:
    port = place.run.member("bank-a").port
    with socket.create_server(("127.0.0.1", port)):
        said = refused(2)
    assert f"127.0.0.1:{port}: the port is in use by process " in said
    assert "--listen" in said


def test_c28_a_damaged_log(place: Place, refused: Refused) -> None:
    path = place.peer / "blocks.log"
    log = AppendLog(path)
    for index in range(4):
        log.append(bytes([index]) * 50)
    log.sync()
    log.close()
    whole = path.read_bytes()
    at = 120
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
    said = refused(4)
    assert f"{path}: a record is damaged at byte " in said
    assert "restore this file from a backup" in said
    assert path.stat().st_size == len(whole)
