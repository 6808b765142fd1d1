"""Members who start their own peers: ``torchbft join`` by hand, late, alone, leaving, and back."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from torchbft.cli.main import main
from torchbft.node.storage.lock import holder_of
from torchbft.primitives import trace
from torchbft.primitives.runspec import load_run
from torchbft.report.verify import verify

SECONDS = 180.0
"""Bound of any wait on a busy machine; on an idle one nothing here takes ten."""
PAUSE = 0.1
NAMES = ("bank-a", "bank-b", "clinic-c", "clinic-d")
ROUNDS = 14
PROGRAM = "import sys; from torchbft.cli.main import main; sys.exit(main())"

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms")]


def until(reached: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + SECONDS
    while not reached():
        assert time.monotonic() < end, what
        time.sleep(PAUSE)


def torchbft(*arguments: object) -> int:
    return int(main([str(argument) for argument in arguments]))


class Members:
    """One folder a member, as on machines of their own; whoever joined is killed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[subprocess.Popen[str]] = []

    def run_file(self, name: str) -> Path:
        return self.folder / name / "run.toml"

    def peer(self, name: str) -> Path:
        return self.folder / name / "peers" / name

    def admit_all(self) -> None:
        """Three init, request and admit; everybody countersigns."""
        first = self.run_file(NAMES[0])
        with contextlib.ExitStack() as stack:
            held = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in NAMES]
            ports = [sock.getsockname()[1] for sock in held]
        for name, port in zip(NAMES, ports, strict=True):
            mine = self.run_file(name)
            mine.parent.mkdir()
            options: list[object] = ["--name", name, "--port", port]
            if mine == first:
                options += ["--task", "digits", "--rounds", ROUNDS, "--inner-steps", 5]
            else:
                mine.write_bytes(first.read_bytes())
            assert torchbft("init", mine, *options) == 0
            if mine != first:
                asked = mine.parent / "me.request.toml"
                assert torchbft("request", mine, "--out", asked) == 0
                assert torchbft("admit", first, asked) == 0
        copies = []
        for name in NAMES[1:]:
            self.run_file(name).write_bytes(first.read_bytes())
            assert torchbft("admit", self.run_file(name)) == 0
            copies.append(self.run_file(name))
        assert torchbft("admit", first, *copies) == 0
        for copy in copies:
            copy.write_bytes(first.read_bytes())
        load_run(first).check_signed()

    def join(self, name: str) -> subprocess.Popen[str]:
        words = (self.folder / f"{name}.words").open("a")
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, "join", str(self.run_file(name)), "--json"],
            stdout=subprocess.PIPE,
            stderr=words,
            text=True,
        )
        words.close()
        self.processes.append(process)
        return process

    def words(self, name: str) -> str:
        """What ``join`` said on stderr."""
        path = self.folder / f"{name}.words"
        return path.read_text() if path.exists() else ""

    def rounds(self, name: str) -> int:
        records = trace.read_trace(self.peer(name) / "trace.jsonl")
        return len({r.round for r in records if isinstance(r, trace.RoundEnded)})

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()
        for name in NAMES:
            pid = holder_of(self.peer(name))
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


@pytest.fixture
def members(tmp_path: Path) -> Iterator[Members]:
    made = Members(tmp_path)
    made.admit_all()
    yield made
    made.close()


def answer(process: subprocess.Popen[str]) -> tuple[int, dict[str, Any]]:
    out, _ = process.communicate(timeout=SECONDS)
    return process.returncode, dict(json.loads(out))


def test_c08_c11_three_of_four_join_by_hand_one_leaves_and_is_back_with_the_same_model(
    members: Members, capsys: pytest.CaptureFixture[str]
) -> None:
    first = members.join("bank-a")
    alone = "waiting for 2 more of quorum 3: bank-b, clinic-c, clinic-d"
    until(lambda: alone in members.words("bank-a"), "nothing said of who is missing")
    second = members.join("bank-b")
    two = "waiting for 1 more of quorum 3: clinic-c, clinic-d"
    until(lambda: two in members.words("bank-b"), "the second says nothing of who is missing")
    third = members.join("clinic-c")  # the last of the quorum; clinic-d never comes
    until(lambda: members.rounds("clinic-c") >= 1, "no round with three of four")

    capsys.readouterr()
    assert torchbft("leave", members.run_file("clinic-c"), "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"name": "clinic-c", "stopped": True}
    code, left = answer(third)
    assert (code, left["status"]) == (0, "stopped"), members.words("clinic-c")
    assert torchbft("leave", members.run_file("clinic-c")) == 2, "it has left already"
    assert "no node of clinic-c runs" in capsys.readouterr().err

    back = members.join("clinic-c")
    results = [answer(process) for process in (first, second, back)]
    words = [members.words(name) for name in NAMES[:3]]
    assert [(code, found["status"]) for code, found in results] == [(0, "finished")] * 3, words
    assert len({found["root"] for _, found in results}) == 1
    for name in NAMES[:3]:
        verdict = verify(members.folder / name)
        assert verdict.ok, verdict.problems
        assert verdict.convicted == ()
        assert len(verdict.rounds) == ROUNDS
    assert "error" not in "".join(words)
