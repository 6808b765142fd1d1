"""From keys and a run file to a node, and what is said when they do not fit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from node_swarm import LocalSwarm, Trainee, honest

from torchbft.node import launch
from torchbft.node.launch import Keys, peer_name, run_node
from torchbft.node.link import Endpoint, Over, endpoints
from torchbft.node.storage.lock import FolderLock, holder_of
from torchbft.node.supervisor import EXIT_FINISHED, EXIT_REFUSED
from torchbft.primitives.errors import ConfigError, StorageError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import RunSpec, Training, dump_run

A, B = PeerId("peer-a"), PeerId("peer-b")
LIMIT = 60.0


@pytest.fixture
def swarm(tmp_path: Path) -> LocalSwarm:
    return LocalSwarm(tmp_path, count=1, rounds=2)


@pytest.fixture
def link() -> Iterator[tuple[Endpoint, Endpoint]]:
    node, trainer = endpoints()
    trainer.socket.settimeout(LIMIT)
    yield node, trainer
    node.close()
    trainer.close()


def told(trainer: Endpoint) -> Over:
    delivery = trainer.receive()
    assert delivery is not None
    assert isinstance(delivery.message, Over)
    return delivery.message


def test_keys_are_fresh_private_and_never_overwritten(tmp_path: Path) -> None:
    keys = Keys.create(tmp_path / "a")
    publics = {key.public for key in (keys.identity, keys.voting, keys.secret)}
    assert len(publics) == 3
    for path in (tmp_path / "a").iterdir():
        assert path.stat().st_mode & 0o777 == 0o600
    (tmp_path / "a" / "voting.key").unlink()
    again = Keys.create(tmp_path / "a")
    assert again.identity.public == keys.identity.public
    assert again.secret.public == keys.secret.public
    assert again.voting.public != keys.voting.public
    with pytest.raises(ConfigError, match="already there"):
        keys.save(tmp_path / "a")
    assert Keys.load(tmp_path / "a").voting.public == again.voting.public
    assert keys.identity.seed().hex() not in repr(keys)


def test_keys_must_be_those_of_the_roster(swarm: LocalSwarm, tmp_path: Path) -> None:
    swarm.keys[A].check(swarm.run, A)
    other = Keys.create(tmp_path / "other")
    for mixed, what in (
        (Keys(other.identity, swarm.keys[A].voting, other.secret), "identity"),
        (Keys(swarm.keys[A].identity, other.voting, other.secret), "voting"),
    ):
        with pytest.raises(ConfigError, match=f"the {what} key of 'peer-a' is not the one"):
            mixed.check(swarm.run, A)
    with pytest.raises(ConfigError, match="not in the roster"):
        other.check(swarm.run, "peer-z")


def test_a_folder_belongs_to_the_member_with_its_identity_key(
    swarm: LocalSwarm, tmp_path: Path
) -> None:
    assert peer_name(swarm.run, tmp_path / A) == A
    Keys.create(tmp_path / "stranger")
    with pytest.raises(ConfigError, match="no member of run 'swarm'") as refused:
        peer_name(swarm.run, tmp_path / "stranger")
    assert "torchbft request" in refused.value.hint


def edited(run: RunSpec) -> RunSpec:
    return msgspec.structs.replace(run, training=Training(rounds=99))


@pytest.mark.parametrize("fault", ["edited", "keys", "folder"])
def test_what_keeps_a_node_from_starting_is_raised_and_told_to_its_trainer(
    swarm: LocalSwarm, tmp_path: Path, link: tuple[Endpoint, Endpoint], fault: str
) -> None:
    node, trainer = link
    run, folder = swarm.run, tmp_path / A
    if fault == "edited":
        run = edited(run)
    if fault == "keys":
        folder = tmp_path / "other"
        Keys.create(folder)
    lock = FolderLock(folder) if fault == "folder" else None
    with pytest.raises((ConfigError, StorageError)) as refused:
        run_node(run, A, folder, node.socket)
    if lock is not None:
        lock.release()
    said = told(trainer)
    assert said.status == ("storage" if fault == "folder" else "refused")
    assert (said.reason, said.hint) == (str(refused.value), refused.value.hint)
    assert said.hint
    assert not (folder / "votes.log").exists(), "nothing was begun"


def test_a_node_runs_in_this_process_until_its_end(
    swarm: LocalSwarm, tmp_path: Path, link: tuple[Endpoint, Endpoint], monkeypatch: Any
) -> None:
    monkeypatch.setattr("torchbft.node.driver.LINGER_SECONDS", 0.1)
    node, trainer = link
    Trainee(A, trainer, honest).start()
    code = run_node(
        swarm.run, A, tmp_path / A, node.socket, listen=("127.0.0.1", swarm.run.member(A).port)
    )
    assert code == EXIT_FINISHED
    assert swarm.phase(A) == "finished"
    assert holder_of(tmp_path / A) is None


def test_a_node_of_its_own_process_writes_its_log_and_stops_when_asked(
    swarm: LocalSwarm, tmp_path: Path
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(dump_run(swarm.run))
    endpoint, process = launch.spawn(run_file, tmp_path / A)
    trainee = Trainee(A, endpoint, honest)
    trainee.start()
    try:
        asyncio.run(swarm.until(lambda: swarm.phase(A) == "finished"))
        assert holder_of(tmp_path / A) == process.pid
        process.terminate()  # it would serve those behind for a while
        assert process.wait(LIMIT) == EXIT_FINISHED
    finally:
        process.kill()
        process.wait()
    assert holder_of(tmp_path / A) is None
    assert "error" not in (tmp_path / A / "node.log").read_text()


def test_the_program_says_in_one_line_why_it_does_not_start(
    swarm: LocalSwarm, tmp_path: Path
) -> None:
    run_file = tmp_path / "run.toml"
    run_file.write_text(dump_run(edited(swarm.run)))
    command = [sys.executable, "-m", "torchbft.node", str(run_file), str(tmp_path / A)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == EXIT_REFUSED
    error, hint = done.stderr.splitlines()
    assert error.startswith("error: run file 'swarm': 0 of 1 needed members signed")
    assert hint.startswith("hint: it was edited after signing")
