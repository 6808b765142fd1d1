"""up, join and leave: what they refuse in one line, and what they do, without further processes."""

from __future__ import annotations

import hashlib
import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from torchbft.cli import join as joining
from torchbft.cli import leave as leaving
from torchbft.cli import local
from torchbft.cli import up as starting
from torchbft.cli import void as voiding
from torchbft.cli.local import Plan
from torchbft.node.launch import Keys
from torchbft.node.storage.lock import FolderLock
from torchbft.node.wish import taken
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import dump_run, load_run
from torchbft.primitives.trace import Evaluated, Notice, RoundEnded, TraceWriter
from torchbft.pytorch.link import RunOver
from torchbft.pytorch.solo import SoloNode

Torchbft = Callable[..., Any]
Members = Callable[[int], list[Path]]

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchbft import Task

class Tiny(Task):
    classes = 2
    train_set = TensorDataset(torch.arange(48.0).reshape(24, 2) / 48, torch.arange(24) % 2)
    def build_model(self): return nn.Linear(2, 2)
    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def loss(self, model, batch, rng): return nn.functional.cross_entropy(model(batch[0]), batch[1])
    def evaluate(self, model): return 0.5, 0.75
"""


def refused(ran: Any, *words: str) -> None:
    """The command said what is wrong and what to do, in a line each, and ended with code 2."""
    assert ran.code == 2
    assert ran.out == ""
    lines = ran.err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["error", "hint"], ran.err
    for word in words:
        assert word in ran.err


@pytest.fixture
def task(tmp_path: Path) -> str:
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return f"{file}:Tiny"


def free_port() -> int:
    """One that other tests, which run beside this one, do not have by default."""
    return local.free_ports(1)[0]


@pytest.fixture
def solo(torchbft: Torchbft, task: str, tmp_path: Path) -> Callable[..., Path]:
    """``solo()``: the run file of a run of one member, lab-0, with the task in it."""

    def make(*options: object) -> Path:
        file = tmp_path / "solo" / "run.toml"
        ran = torchbft(
            "init", file, "--name", "lab-0", "--task", task, "--rounds", 2, "--inner-steps", 2,
            "--port", free_port(), *options,
        )  # fmt: skip
        assert ran.code == 0
        return file

    return make


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Instead of a process, ``join`` gets a node in this one; holds how it was asked for."""
    asked: list[Any] = []

    def connect(run_file: Path, folder: Path, listen: str) -> SoloNode:
        asked.append((run_file, folder, listen))
        return SoloNode(load_run(run_file))

    monkeypatch.setattr("torchbft.pytorch.connection.connect", connect)
    return asked


# --- join -----------------------------------------------------------------------------------------


def test_joining_trains_to_the_end_and_says_with_what(
    torchbft: Torchbft, solo: Callable[..., Path], task: str, node: list[Any]
) -> None:
    file = solo()
    place = f"[::]:{free_port()}"
    ran = torchbft("join", file, "--task", task, "--listen", place, "--json")
    assert ran.code == 0
    assert node == [(file, file.parent / "peers" / "lab-0", place)]
    assert (ran.data["name"], ran.data["status"], ran.data["reason"]) == ("lab-0", "finished", "")
    assert len(bytes.fromhex(ran.data["root"])) == 32
    assert ran.data["root"] != load_run(file).task.start_root, "it trained"
    assert "lab-0 joins run" in ran.err
    told = torchbft("join", file, "--task", task)
    assert told.out == f"finished; model {ran.data['root'][:16]}…\n", "the same model again"


def test_a_run_that_halts_ends_with_its_own_code_and_reason(
    torchbft: Torchbft,
    solo: Callable[..., Path],
    task: str,
    node: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    file = solo()
    state = SimpleNamespace(root=lambda: bytes(32))
    over = RunOver("halted", "no quorum", state)  # type: ignore[arg-type]
    monkeypatch.setattr("torchbft.pytorch.train.train_with", lambda *args, **options: over)
    ran = torchbft("join", file, "--task", task)
    assert ran.code == 3
    assert ran.out.startswith("halted: no quorum; model 0000")


def test_a_name_that_is_not_in_the_roster_is_refused(
    torchbft: Torchbft, solo: Callable[..., Path], task: str, node: list[Any]
) -> None:
    ran = torchbft("join", solo(), "--task", task, "--name", "stranger")
    refused(ran, "'stranger' is not in the roster", "torchbft request")
    assert node == []


@pytest.mark.parametrize("key", ["identity", "voting"])
def test_a_member_without_its_keys_here_starts_nothing(
    torchbft: Torchbft, solo: Callable[..., Path], task: str, node: list[Any], key: str
) -> None:
    file = solo()
    (file.parent / "peers" / "lab-0" / f"{key}.key").unlink()
    ran = torchbft("join", file, "--task", task, "--name", "lab-0")
    refused(ran, f"{key}.key: the key cannot be read", "torchbft init")
    assert node == []


def test_which_member_must_be_clear(torchbft: Torchbft, solo: Callable[..., Path]) -> None:
    file = solo()
    torchbft("init", file, "--name", "lab-1")
    refused(torchbft("join", file), "holds the keys of lab-0, lab-1", "--name")
    elsewhere = file.parent.parent / "copy" / "run.toml"
    elsewhere.parent.mkdir()
    elsewhere.write_bytes(file.read_bytes())
    refused(torchbft("join", elsewhere), "holds no member's keys", "torchbft init")


def test_a_task_other_than_the_signed_one_is_refused_before_its_code_runs(
    torchbft: Torchbft, solo: Callable[..., Path], node: list[Any], tmp_path: Path
) -> None:
    other, ran_it = tmp_path / "other.py", tmp_path / "it-ran"
    other.write_text(f"open({str(ran_it)!r}, 'w')\n{TASK}")
    refused(torchbft("join", solo(), "--task", f"{other}:Tiny"), "sha256", "signed")
    assert node == []
    assert not ran_it.exists()


def named(file: Path, name: str, digest: str) -> None:
    """Somebody else's run file, signed, that names a task so."""
    run = load_run(file)
    run = msgspec.structs.replace(run, task=msgspec.structs.replace(run.task, name=name,
                                                                    digest=digest))  # fmt: skip
    keys = Keys.load(file.parent / "peers" / "lab-0")
    file.write_text(dump_run(run.signed("lab-0", keys.identity)))


@pytest.mark.parametrize("with_digest", [False, True])
def test_a_run_file_does_not_choose_which_local_file_is_run(
    torchbft: Torchbft, solo: Callable[..., Path], node: list[Any], tmp_path: Path,
    with_digest: bool,
) -> None:  # fmt: skip
    file, ran_it = solo(), tmp_path / "it-ran"
    found = tmp_path / "found.py"
    found.write_text(f"open({str(ran_it)!r}, 'w')\n{TASK}")
    digest = hashlib.sha256(found.read_bytes()).hexdigest() if with_digest else ""
    named(file, f"{found}:Tiny", digest)
    refused(torchbft("join", file), "none that torchbft ships", "--task file.py:Tiny")
    assert not ran_it.exists()
    named(file, "Tiny", digest)
    refused(torchbft("join", file), "'Tiny' is none", f"{digest[:16]}", "--task file.py:Tiny")
    named(file, "", "")
    refused(torchbft("join", file), "names no task", "torchbft.join")
    assert node == []
    named(file, "", digest)
    assert torchbft("join", file, "--task", f"{found}:Tiny").code in (0, 2), "start roots differ"
    assert ran_it.exists(), "what its user names is run"


def test_a_class_that_a_task_file_lacks_is_told_with_those_that_it_has(
    torchbft: Torchbft, solo: Callable[..., Path], task: str, node: list[Any]
) -> None:
    ran = torchbft("join", solo(), "--task", task.replace("Tiny", "Tyni"))
    refused(ran, "has no Task named 'Tyni'", "it has Tiny")
    assert node == []


def test_a_port_that_is_taken_is_told_before_anything_slow(
    torchbft: Torchbft, solo: Callable[..., Path], node: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = solo()

    def load(*given: object) -> None:
        raise AssertionError("the task was loaded first")

    monkeypatch.setattr("torchbft.pytorch.task.load_task", load)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ran = torchbft("join", file, "--task", "x.py:X", "--listen", f"127.0.0.1:{port}")
        refused(ran, f"127.0.0.1:{port}: the port is in use by process", "--listen")
    with FolderLock(file.parent / "peers" / "lab-0"):
        ran = torchbft("join", file, "--task", "x.py:X")
    assert ran.code == 4
    assert f"in use by process {os.getpid()}" in ran.err
    assert node == []


def test_a_run_file_that_was_edited_or_is_missing_is_refused(
    torchbft: Torchbft, solo: Callable[..., Path], task: str, node: list[Any], tmp_path: Path
) -> None:
    file = solo()
    file.write_text(file.read_text().replace("rounds = 2", "rounds = 3"))
    refused(torchbft("join", file, "--task", task), "0 of 1 needed", "torchbft admit")
    refused(torchbft("join", tmp_path / "none.toml"), "cannot be read", "torchbft init")
    assert node == []


def test_a_task_that_is_not_there_is_refused(
    torchbft: Torchbft, solo: Callable[..., Path], node: list[Any]
) -> None:
    ran = torchbft("join", solo(), "--task", "nowhere.py:Tiny")
    assert ran.code == 2
    assert "nowhere.py: cannot be read" in ran.err
    assert node == []


@pytest.fixture
def shard(tmp_path: Path) -> Path:
    path = tmp_path / "mine.safetensors"
    save_file({"x": torch.ones(8, 2), "y": torch.arange(8) % 2}, path)
    return path


def test_own_data_in_a_run_with_public_data_is_refused(
    torchbft: Torchbft, solo: Callable[..., Path], task: str, node: list[Any], shard: Path
) -> None:
    ran = torchbft("join", solo(), "--task", task, "--data", shard)
    refused(ran, "--data", "data mode is 'assigned'", "private")
    assert node == []


def test_private_data_must_be_given_and_is_trained_on(
    torchbft: Torchbft, solo: Callable[..., Path], task: str, node: list[Any], shard: Path
) -> None:
    file = solo("--private")
    refused(torchbft("join", file, "--task", task), "--data", "data mode is 'private'")
    assert node == []
    ran = torchbft("join", file, "--task", task, "--data", shard, "--json")
    assert (ran.code, ran.data["status"]) == (0, "finished")


def test_a_shard_holds_the_samples_as_they_were_saved(shard: Path) -> None:
    samples = joining._shard(shard)
    assert len(samples) == 8
    x, y = samples[3]
    assert torch.equal(x, torch.ones(2))
    assert int(y) == 1


@pytest.mark.parametrize(
    "tensors",
    [None, {"x": torch.ones(3)}, {"x": torch.ones(3), "y": torch.ones(2)}, b"", b"\xff" * 40],
    ids=["no file", "no labels", "not as many labels", "empty", "garbage"],
)
def test_a_file_that_is_no_shard_is_refused(tmp_path: Path, tensors: Any) -> None:
    path = tmp_path / "bad.safetensors"
    if isinstance(tensors, bytes):
        path.write_bytes(tensors)
    elif tensors is not None:
        save_file(tensors, path)
    with pytest.raises(ConfigError, match="is no shard") as error:
        joining._shard(path)
    assert "x and y" in error.value.hint
    assert error.value.where == str(path)


def test_joining_shows_rounds_and_waits_of_this_start_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "peers" / "lab-0"
    folder.mkdir(parents=True)
    writer = TraceWriter(folder / "trace.jsonl")
    before, waits = Notice(at=1.0, text="from last time"), Notice(at=2.0, text="waiting for lab-1")

    def ended(number: int) -> RoundEnded:
        return RoundEnded(at=2.0, round=number, void=False, accepted=("lab-0",), root="aa" * 32)

    for record in (before, ended(0)):
        writer.write(record)
    with joining._shown(tmp_path, 9):
        for record in (waits, ended(1), Evaluated(at=3.0, round=1, loss=0.5), waits):
            writer.write(record)
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "waiting for lab-1"
    assert [line[:20] for line in said if "round" in line] == ["round 1 (2/9)  accep"]
    assert "loss 0.5000" in said[-1]
    assert "from last time" not in said


# --- leave ----------------------------------------------------------------------------------------


@pytest.fixture
def lock(solo: Callable[..., Path]) -> Iterator[FolderLock]:
    """The lock that lab-0's running node would hold; here this process does."""
    held = FolderLock(solo().parent / "peers" / "lab-0")
    yield held
    held.release()


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return tmp_path / "solo" / "run.toml"


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Signals that ``leave`` would send."""
    sent: list[tuple[int, int]] = []
    killer = SimpleNamespace(kill=lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(leaving, "os", killer)
    return sent


class Watch:
    """Time that passes only where it is slept through."""

    def __init__(self, at: float = 0.0, then: Callable[[], object] = lambda: None) -> None:
        self.now, self._at, self._then = 0.0, at, then

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self._at:
            self._then()


def test_leaving_where_nobody_runs_is_refused(
    torchbft: Torchbft, solo: Callable[..., Path], signals: list[tuple[int, int]]
) -> None:
    refused(torchbft("leave", solo()), "no node of lab-0 runs", "torchbft status")
    assert signals == []


def test_the_number_of_a_node_that_died_is_never_signalled(
    torchbft: Torchbft, solo: Callable[..., Path], signals: list[tuple[int, int]]
) -> None:
    file = solo()
    (file.parent / "peers" / "lab-0" / "lock").write_text("1\n")
    refused(torchbft("leave", file), "no node of lab-0 runs")
    assert signals == []


def test_leaving_asks_the_node_and_waits_until_it_is_gone(
    torchbft: Torchbft,
    lock: FolderLock,
    run_file: Path,
    signals: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch(3.0, lock.release)
    monkeypatch.setattr(leaving, "time", watch)
    ran = torchbft("leave", run_file, "--json")
    assert ran.code == 0
    assert ran.data == {"name": "lab-0", "stopped": True}
    assert signals == [(os.getpid(), signal.SIGTERM)]
    assert f"process {os.getpid()}" in ran.err
    assert watch.now == pytest.approx(3.0, abs=0.2)


def test_a_node_that_stays_is_told_and_is_a_failure(
    torchbft: Torchbft,
    lock: FolderLock,
    run_file: Path,
    signals: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    watch = Watch()
    monkeypatch.setattr(leaving, "time", watch)
    ran = torchbft("leave", run_file)
    assert (ran.code, ran.out) == (1, "still up\n")
    assert watch.now == pytest.approx(leaving.LEAVE_SECONDS, abs=0.2)
    assert len(signals) == 1


def test_a_node_that_goes_by_itself_just_then_is_no_error(
    torchbft: Torchbft, lock: FolderLock, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(pid: int, number: int) -> None:
        lock.release()
        raise ProcessLookupError

    monkeypatch.setattr(leaving, "os", SimpleNamespace(kill=kill))
    ran = torchbft("leave", run_file)
    assert (ran.code, ran.out) == (0, "stopped\n")


# --- void -----------------------------------------------------------------------------------------


def test_voiding_asks_the_running_node_and_says_whether_it_looked(
    torchbft: Torchbft, lock: FolderLock, run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, told = run_file.parent / "peers" / "lab-0", []
    looks = SimpleNamespace(kill=lambda pid, number: told.append((pid, number, taken(folder))))
    monkeypatch.setattr("torchbft.node.wish.os", looks)
    ran = torchbft("void", run_file, "--reason", "two versions", "--json")
    assert (ran.code, ran.data) == (0, {"name": "lab-0", "asked": True})
    assert told == [(os.getpid(), signal.SIGURG, "two versions")]
    monkeypatch.setattr("torchbft.node.wish.os", SimpleNamespace(kill=lambda *given: None))
    monkeypatch.setattr(voiding, "time", Watch())
    ran = torchbft("void", run_file)
    assert ran.code == 1
    assert "did not look" in ran.out
    assert taken(folder) is None, "no wish is left for later"


def test_voiding_where_nobody_runs_is_refused(
    torchbft: Torchbft, solo: Callable[..., Path]
) -> None:
    refused(torchbft("void", solo()), "no node of lab-0 runs", "torchbft status")


# --- up -------------------------------------------------------------------------------------------

RESULT = {
    "status": "finished",
    "rounds_counted": 5,
    "honest_roots_equal": True,
    "ledger_verified": True,
    "finalized_wrong": False,
    "accuracy": 91.5,
}


class Running:
    """A supervisor that only says whether it was started and stopped."""

    def __init__(self) -> None:
        self.did: list[str] = []

    def start(self) -> None:
        self.did.append("start")

    def stop(self) -> None:
        self.did.append("stop")


@pytest.fixture
def staged(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> SimpleNamespace:
    """``up`` without peers: ``plans`` it made, ``running``; ``ends`` is what following gives."""
    stage = SimpleNamespace(plans=[], running=Running(), ends=lambda: "finished", result=RESULT)
    stage.judged = []

    def create(plan: Plan) -> Any:
        stage.plans.append(plan)
        return SimpleNamespace(names=plan.names, plan=plan)

    def judge(
        local: Any, facts: Any, liars: Any, status: str, references: Any, verdict: Any
    ) -> Any:
        assert not verdict.ok, "what the verifier says of a folder without a run"
        stage.judged.append((liars, status, references))
        return {**facts, **stage.result, "status": status}

    monkeypatch.setattr(starting, "create", create)
    monkeypatch.setattr(local, "supervisor", lambda local: stage.running)
    monkeypatch.setattr(local, "watch", lambda *args, **options: stage.ends())
    monkeypatch.setattr(starting, "judge", judge)
    return stage


def test_up_runs_the_plan_of_its_options_and_judges_it(
    torchbft: Torchbft, staged: SimpleNamespace, tmp_path: Path
) -> None:
    ran = torchbft(
        "up", "--task", "kjv", "--peers", 5, "--rounds", 3, "--inner-steps", 2, "--seed", 4,
        "--rule", "median", "--codec", "int8", "--out", tmp_path / "x", "--json",
    )  # fmt: skip
    assert ran.code == 0
    assert staged.plans == [
        Plan(out=tmp_path / "x", task="kjv", peers=5, seed=4, rounds=3, inner_steps=2,
             rule="median", codec="int8")
    ]  # fmt: skip
    assert staged.running.did == ["start", "stop"]
    assert staged.judged == [((), "finished", None)]
    assert (ran.data["status"], ran.data["peers"], ran.data["seed"]) == ("finished", 5, 4)


def test_up_says_in_words_what_came_of_it_and_what_is_next(
    torchbft: Torchbft, staged: SimpleNamespace, tmp_path: Path
) -> None:
    said = torchbft("up", "--out", tmp_path / "x").out
    assert said == (
        "finished: 5 rounds, the same model at all peers: yes, accuracy 91.5 %\n"
        f"next: torchbft report {tmp_path / 'x'}\n"
    )
    staged.result = {**RESULT, "accuracy": None, "honest_roots_equal": False}
    ran = torchbft("up", "--out", tmp_path / "x")
    assert "at all peers: NO\n" in ran.out
    assert ran.code == 1


@pytest.mark.parametrize("status", ["halted", "timed out"])
def test_up_that_comes_to_nothing_has_the_code_of_a_halt(
    torchbft: Torchbft, staged: SimpleNamespace, tmp_path: Path, status: str
) -> None:
    staged.ends = lambda: status
    assert torchbft("up", "--out", tmp_path / "x").code == 3


def test_control_c_stops_the_peers_and_still_tells_what_came_of_it(
    torchbft: Torchbft, staged: SimpleNamespace, tmp_path: Path
) -> None:
    def interrupted() -> str:
        raise KeyboardInterrupt

    staged.ends = interrupted
    ran = torchbft("up", "--out", tmp_path / "x")
    assert staged.running.did == ["start", "stop"]
    assert "stopping the peers" in ran.err
    assert ran.out.startswith("stopped: 5 rounds")
    assert ran.code == 3


def test_a_defect_while_following_stops_the_peers(
    torchbft: Torchbft, staged: SimpleNamespace, tmp_path: Path
) -> None:
    def fails() -> str:
        raise ZeroDivisionError

    staged.ends = fails
    assert torchbft("up", "--out", tmp_path / "x").code == 70
    assert staged.running.did == ["start", "stop"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--peers", 0), "--peers"),
        (("--peers", 65), "--peers"),
        (("--rounds", 0), "--rounds"),
        (("--inner-steps", 0), "--inner-steps"),
        (("--seed", -1), "--seed"),
        (("--peers", "four"), "--peers"),
        (("--bogus",), "--bogus"),
        (("--task", "no-such-task"), "no-such-task"),
        (("--rule", "average"), "average"),
        (("--codec", "float8"), "float8"),
        (("--rule", "mean"), "rules that fit"),
    ],
)
def test_up_refuses_what_cannot_be_run_and_makes_nothing(
    torchbft: Torchbft, task: str, tmp_path: Path, arguments: tuple[object, ...], word: str
) -> None:
    folder = tmp_path / "x"
    given = ("--task", task, "--out", folder, *arguments)
    refused(torchbft("up", *given), word)
    assert not folder.exists()


def test_up_refuses_a_folder_that_holds_a_run(torchbft: Torchbft, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    refused(torchbft("up", "--out", tmp_path), "holds a run already", "--out")


def test_a_signature_that_is_missing_is_found_before_any_key_is_looked_for(
    torchbft: Torchbft, members: Members, task: str
) -> None:
    file = members(4)[0]
    bare = msgspec.structs.replace(load_run(file), signatures=load_run(file).signatures[:2])
    file.write_text(dump_run(bare))
    refused(torchbft("join", file, "--task", task), "2 of 3 needed")
