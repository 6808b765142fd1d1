"""Who starts, reaps and brings back the two processes of a peer. Real forks, no torch in them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from torchbft.node import supervisor as module
from torchbft.node.supervisor import (
    EXIT_FAILED,
    EXIT_FINISHED,
    EXIT_HALTED,
    EXIT_REFUSED,
    EXIT_RESTART,
    MAX_BACKOFF,
    Role,
    Supervisor,
)
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.ids import PeerId

LIMIT = 60.0
"""Seconds that anything may take before the test fails; a busy machine forks slowly."""
PAUSE = 0.005
A, B = PeerId("peer-a"), PeerId("peer-b")


def wait(name: PeerId, sock: socket.socket) -> int:
    """A role that stays until its other half ends, as a node or trainer does."""
    sock.recv(1)
    return EXIT_FINISHED


def stay(name: PeerId, sock: socket.socket) -> int:
    """A role that stays until it is killed, whatever happens to its other half."""
    while True:
        signal.pause()


def ending(code: int) -> Role:
    return lambda name, sock: code


def until(running: Supervisor, reached: Callable[[], bool]) -> None:
    """Poll as a host does until something holds."""
    end = time.monotonic() + LIMIT
    while not reached():
        assert time.monotonic() < end, {n: (s.pids, s.codes) for n, s in running.seats.items()}
        running.poll()
        time.sleep(PAUSE)


Start = Callable[..., Supervisor]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    made: list[Supervisor] = []

    def starting(node: Role, trainer: Role, *names: PeerId) -> Supervisor:
        for number, stream in ((1, "stdout"), (2, "stderr")):  # instead of what pytest put there
            plain = open(number, "w", buffering=1, closefd=False)  # noqa: SIM115
            monkeypatch.setattr(sys, stream, plain)
        folders = {name: tmp_path / name for name in names or (A,)}
        for folder in folders.values():
            folder.mkdir()
        running = Supervisor(folders, node, trainer)
        made.append(running)
        running.start()
        return running

    yield starting
    for running in made:
        running.stop()
        assert all(not seat.pids for seat in running.seats.values())


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_each_peer_has_two_processes_joined_by_a_link(start: Start, tmp_path: Path) -> None:
    def node(name: PeerId, sock: socket.socket) -> int:
        sock.sendall(name.encode())
        return EXIT_FINISHED

    def trainer(name: PeerId, sock: socket.socket) -> int:
        print("heard", sock.recv(100).decode())
        return EXIT_FINISHED

    running = start(node, trainer, A, B)
    until(running, lambda: not running.running)
    for name in (A, B):
        assert (tmp_path / name / "trainer.log").read_text() == f"heard {name}\n"
        assert running.seats[name].codes == {"node": EXIT_FINISHED, "trainer": EXIT_FINISHED}


@pytest.mark.parametrize("role", ["node", "trainer"])
def test_half_a_peer_that_is_killed_comes_back_as_a_whole(start: Start, role: str) -> None:
    running = start(stay, wait, A, B)
    before = dict(running.seats[A].pids)
    others = dict(running.seats[B].pids)
    assert running.kill(A, role)
    until(running, lambda: len(running.seats[A].pids) == 2 and running.seats[A].pids != before)
    assert not set(running.seats[A].pids.values()) & set(before.values())
    assert running.seats[A].restarts == 1
    assert running.seats[B].pids == others, "another peer is left alone"


def test_a_trainer_that_hangs_after_its_node_died_is_ended(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_GRACE", 0.1)
    running = start(wait, stay)
    before = dict(running.seats[A].pids)
    running.kill(A)
    until(running, lambda: running.seats[A].restarts == 1)
    assert not alive(before["trainer"])


def test_a_stopped_process_does_not_keep_the_supervisor(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STOP_GRACE", 0.1)
    running = start(stay, stay)
    pids = dict(running.seats[A].pids)
    os.kill(pids["node"], signal.SIGSTOP)
    running.stop()
    assert not any(alive(pid) for pid in pids.values())


@pytest.mark.parametrize("code", [EXIT_FINISHED, EXIT_REFUSED, EXIT_HALTED])
def test_who_ended_for_good_is_not_started_again(start: Start, code: int) -> None:
    running = start(ending(code), wait)
    until(running, lambda: not running.running)
    assert running.seats[A].restarts == 0
    assert running.seats[A].codes["node"] == code


@pytest.mark.parametrize("code", [EXIT_FAILED, EXIT_RESTART])
def test_who_failed_is_started_again_more_and_more_slowly(start: Start, code: int) -> None:
    running = start(ending(code), wait)
    seat = running.seats[A]
    waits: list[float] = []
    while seat.restarts < 3:
        until(running, lambda: seat.start_again_at is not None)
        waits.append(seat.backoff)
        restarts = seat.restarts
        until(running, lambda count=restarts: seat.restarts > count)  # type: ignore[misc]
    assert waits == sorted(waits)
    assert waits[0] < waits[-1] <= MAX_BACKOFF


def test_a_peer_that_dies_too_often_is_left_down(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_RESTARTS", 2)
    running = start(ending(EXIT_FAILED), wait)
    until(running, lambda: not running.running)
    assert running.seats[A].restarts == 2


def test_a_node_goes_on_without_a_trainer_that_gave_up(start: Start) -> None:
    running = start(stay, ending(EXIT_FAILED))
    until(running, lambda: "trainer" in running.seats[A].codes)
    running.poll()
    assert "node" in running.seats[A].pids
    assert running.running == [A]


def test_an_error_in_a_role_is_one_line_in_its_log_and_a_defect_a_traceback(
    start: Start, tmp_path: Path
) -> None:
    def refused(name: PeerId, sock: socket.socket) -> int:
        raise ConfigError("no such thing", where="run file", hint="look again")

    def broken(name: PeerId, sock: socket.socket) -> int:
        raise ZeroDivisionError("a defect")

    running = start(refused, broken)
    until(running, lambda: not running.running)
    assert running.seats[A].codes == {"node": EXIT_REFUSED, "trainer": EXIT_FAILED}
    assert (tmp_path / A / "node.log").read_text() == (
        "error: run file: no such thing\nhint: look again\n"
    )
    log = (tmp_path / A / "trainer.log").read_text()
    assert "Traceback" in log
    assert "ZeroDivisionError: a defect" in log


def test_logs_are_kept_over_restarts_and_read_by_their_owner_alone(
    start: Start, tmp_path: Path
) -> None:
    def node(name: PeerId, sock: socket.socket) -> int:
        print("started", flush=True)
        return wait(name, sock)

    running = start(node, wait)
    log = tmp_path / A / "node.log"
    until(running, lambda: log.exists() and log.read_text().count("started") == 1)
    running.kill(A)
    until(running, lambda: log.read_text().count("started") == 2)
    assert log.stat().st_mode & 0o777 == 0o600


def test_stop_asks_first_and_leaves_no_child(start: Start, tmp_path: Path) -> None:
    def polite(name: PeerId, sock: socket.socket) -> int:
        def leave(*_: object) -> None:
            print("asked to leave", flush=True)
            os._exit(EXIT_FINISHED)

        signal.signal(signal.SIGTERM, leave)
        print("ready", flush=True)
        return stay(name, sock)

    running = start(polite, stay, A, B)
    logs = [tmp_path / name / "node.log" for name in (A, B)]
    until(running, lambda: all(log.exists() and "ready" in log.read_text() for log in logs))
    pids = [pid for seat in running.seats.values() for pid in seat.pids.values()]
    running.stop()
    assert not any(alive(pid) for pid in pids)
    assert all("asked to leave" in log.read_text() for log in logs)
    assert running.running == []
    running.poll()
    assert running.running == [], "what was stopped stays stopped"


def test_killing_what_does_not_run_says_so(start: Start) -> None:
    running = start(ending(EXIT_FINISHED), ending(EXIT_FINISHED))
    until(running, lambda: not running.running)
    assert not running.kill(A)
