"""A swarm's folder on this machine, and following one until it is over."""

from __future__ import annotations

import hashlib
import os
import socket
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchbft.cli import local as module
from torchbft.cli.local import (
    FINISH_SECONDS,
    POLL_SECONDS,
    Local,
    Plan,
    create,
    free_ports,
    fresh_folder,
    phase_of,
    preload,
    supervisor,
    watch,
)
from torchbft.node.launch import Keys
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import load_key
from torchbft.primitives.runspec import load_run
from torchbft.pytorch.task import start_state

TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchbft import Task

class Tiny(Task):
    classes = 2
    train_set = TensorDataset(torch.arange(48.0).reshape(24, 2), torch.arange(24) % 2)
    def build_model(self): return nn.Linear(2, 2)
    def build_optimizer(self, model): return torch.optim.AdamW(model.parameters(), lr=0.1)
    def loss(self, model, batch, rng): return nn.functional.cross_entropy(model(batch[0]), batch[1])
    def evaluate(self, model): return 0.5, 0.75
"""
SAMPLES = 24


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    """Of four peers and a task that takes no time."""
    file = tmp_path / "task.py"
    file.write_text(TASK)
    return Plan(out=tmp_path / "run", task=f"{file}:Tiny", peers=4, rounds=3, inner_steps=2)


# --- the folder -----------------------------------------------------------------------------------


def test_the_run_file_is_the_plan_signed_by_all(plan: Plan) -> None:
    plan = replace(plan, batch_size=5, contribution="gradient", codec="int8", encrypt=False)
    made = create(plan)
    run = load_run(plan.out / "run.toml")
    run.check_signed()
    assert run == made.run
    assert run.countersigned_by() == made.names == ("peer-1", "peer-2", "peer-3", "peer-4")
    assert (run.training.rounds, run.training.inner_steps, run.training.batch_size) == (3, 2, 5)
    assert (run.training.contribution, run.aggregation.codec) == ("gradient", "int8")
    assert run.aggregation.rule == plan.rule
    assert not run.transport.encrypt_payloads
    assert (run.name, run.task.name, run.ledger.kind) == ("local-tiny", "Tiny", "embedded")
    assert (run.data.mode, run.data.samples) == ("assigned", SAMPLES)
    source = Path(plan.task.rpartition(":")[0]).read_bytes()
    assert run.task.digest == hashlib.sha256(source).hexdigest()
    assert run.task.start_root == start_state(made.task, run).root().hex()


def test_each_peer_has_the_keys_of_the_roster_and_nobody_else_can_read_them(plan: Plan) -> None:
    made = create(plan)
    for name in made.names:
        assert made.folder(name) == plan.out / "peers" / name
        keys = Keys.load(made.folder(name))
        keys.check(made.run, name)
        assert keys.secret.seed() == made.keys[name].secret.seed()
        files = sorted(made.folder(name).iterdir())
        assert [file.name for file in files] == ["identity.key", "secret.key", "voting.key"]
        assert {stat.S_IMODE(file.stat().st_mode) for file in files} == {0o600}
    seeds = [load_key(path).seed() for path in plan.out.glob("peers/*/*.key")]
    assert len(set(seeds)) == 3 * len(made.names)
    text = (plan.out / "run.toml").read_text() + repr(made)
    assert not any(seed.hex() in text for seed in seeds)


def test_an_existing_run_is_refused_and_left_alone(plan: Plan) -> None:
    create(plan)
    before = {path: path.read_bytes() for path in plan.out.rglob("*") if path.is_file()}
    with pytest.raises(ConfigError, match="holds a run already") as refused:
        create(plan)
    assert "--out" in refused.value.hint
    assert {path: path.read_bytes() for path in plan.out.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "wrong",
    [
        {"rule": "mean"},
        {"rule": "average"},
        {"codec": "float8"},
        {"task": "no-such-task"},
        {"task": "no-such-file.py:Tiny"},
    ],
)
def test_what_cannot_be_run_makes_nothing_so_that_it_can_be_tried_again(
    plan: Plan, wrong: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError):
        create(replace(plan, **wrong))
    assert not plan.out.exists()
    create(plan)


@pytest.mark.parametrize(("peers", "rule"), [(1, "mean"), (3, "mean"), (4, "arc+nnm+trimmed_mean")])
def test_few_peers_tolerate_no_liar_and_take_the_mean(plan: Plan, peers: int, rule: str) -> None:
    run = create(replace(plan, peers=peers)).run
    assert run.aggregation.rule == rule
    assert (run.contributor_faults.f == 0) == (rule == "mean")


def test_twelve_names_stand_in_their_order(plan: Plan) -> None:
    names = replace(plan, peers=12).names
    assert list(names) == sorted(names)
    assert (names[0], names[-1]) == ("peer-01", "peer-12")


def test_the_seed_decides_the_start_model_but_no_key(plan: Plan) -> None:
    first, again, other = (
        create(replace(plan, out=plan.out / str(index), seed=seed))
        for index, seed in enumerate((5, 5, 6))
    )
    assert first.run.seed == again.run.seed != other.run.seed
    assert first.run.task.start_root == again.run.task.start_root != other.run.task.start_root
    assert first.run.members[0].identity != again.run.members[0].identity


def test_private_shards_hold_every_sample_once(plan: Plan) -> None:
    def drawn(made: Local) -> list[list[int]]:
        shards: Any = made.shards
        assert tuple(shards) == made.names
        return [shard.indices for shard in shards.values()]

    made = create(replace(plan, alpha=0.5))
    assert sorted(index for shard in drawn(made) for index in shard) == list(range(SAMPLES))
    assert all(drawn(made))
    assert (made.run.data.mode, made.run.data.samples, made.run.data.digest) == ("private", 0, "")
    assert drawn(create(replace(plan, alpha=0.5, out=plan.out / "again"))) == drawn(made)


def test_public_data_has_no_shards(plan: Plan) -> None:
    assert create(plan).shards is None


@pytest.mark.parametrize("count", [0, 1, 64])
def test_free_ports_are_distinct_and_free(count: int) -> None:
    ports = free_ports(count)
    assert len(ports) == len(set(ports)) == count
    for port in ports[:3]:
        with socket.socket() as sock:
            sock.bind(("127.0.0.1", port))


def test_members_listen_on_ports_of_their_own(plan: Plan) -> None:
    members = create(plan).run.members
    assert len({member.port for member in members}) == 4
    assert {member.host for member in members} == {"127.0.0.1"}


def test_under_cometbft_each_engine_has_a_port_of_its_own_as_well(plan: Plan) -> None:
    made = create(replace(plan, kind="cometbft"))
    assert made.run.ledger.kind == "cometbft"
    ports = {member.port for member in made.run.members}
    ports |= {member.ledger_address[1] for member in made.run.members}
    assert len(ports) == 8


def test_a_folder_is_the_one_asked_for_or_a_new_one(tmp_path: Path) -> None:
    assert fresh_folder(tmp_path, "demo") == tmp_path
    first, second = fresh_folder(None, "demo"), fresh_folder(None, "demo")
    assert first != second
    assert first.parent == Path("runs")
    assert first.name.startswith("demo-")


# --- before the peers are forked ------------------------------------------------------------------


def test_preloading_starts_no_thread_that_a_forked_peer_would_lack(plan: Plan) -> None:
    made = create(plan)
    assert torch.get_num_threads() == 1
    threads = len(os.listdir("/proc/self/task"))
    preload(made)
    assert torch.get_num_threads() == 1
    assert len(os.listdir("/proc/self/task")) <= threads


def test_preloading_changes_neither_the_start_model_nor_torchs_randomness(plan: Plan) -> None:
    made = create(plan)
    torch.manual_seed(1)
    preload(made)
    after = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), after)
    assert start_state(made.task, made.run).root().hex() == made.run.task.start_root


@pytest.mark.parametrize(("status", "code"), [("finished", 0), ("halted", 1), ("stopped", 1)])
def test_the_supervisor_is_given_what_each_peer_is_made_of(
    plan: Plan, monkeypatch: pytest.MonkeyPatch, status: Any, code: int
) -> None:
    made = create(replace(plan, alpha=0.5))
    liar, honest = made.names[:2]
    made.builds[liar], made.hooks[liar] = build, hook = object(), object()  # type: ignore[assignment]
    nodes: list[Any] = []
    trainers: list[Any] = []

    def run_node(*given: object, **options: object) -> int:
        nodes.append((given, options))
        return 3

    def train_with(*given: object, **options: object) -> Any:
        trainers.append((given, options))
        return SimpleNamespace(status=status)

    monkeypatch.setattr("torchbft.node.launch.run_node", run_node)
    monkeypatch.setattr("torchbft.pytorch.train.train_with", train_with)
    running = supervisor(made)
    assert set(running.seats) == set(made.names)
    assert running.running == [], "nothing is forked before start()"
    left, right = socket.socketpair()
    with left, right:
        for name in (liar, honest):
            assert running._node(name, left) == 3
            assert running._trainer(name, right) == code
    (bad, bad_options), (good, good_options) = nodes
    assert bad == (made.run, liar, made.folder(liar), left)
    assert good == (made.run, honest, made.folder(honest), left)
    assert bad_options == {"keys": made.keys[liar], "build": build}
    assert good_options == {"keys": made.keys[honest], "build": None}
    assert [options["adversary"] for _, options in trainers] == [hook, None]
    assert made.shards is not None
    assert [options["train_set"] for _, options in trainers] == [
        made.shards[liar],
        made.shards[honest],
    ]


# --- what a status file says ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "phase"),
    [
        (None, ""),
        (b"", ""),
        (b"\x00\xff", ""),
        (b'"\xff\xfe"', ""),
        (b"{", ""),
        (b"[1]", ""),
        (b'"finished"', ""),
        (b"null", ""),
        (b"{}", ""),
        (b'{"phase": "train"}', "train"),
        (b'{"phase": "finished", "new": [1]}', "finished"),
    ],
)
def test_the_phase_is_what_the_status_says_or_nothing(
    tmp_path: Path, status: bytes | None, phase: str
) -> None:
    swarm = hollow(tmp_path, 1)
    if status is not None:
        (swarm.folder("peer-1") / "status.json").write_bytes(status)
    assert phase_of(swarm, "peer-1") == phase


def test_a_peer_without_a_folder_is_in_no_phase(tmp_path: Path) -> None:
    assert phase_of(hollow(tmp_path, 1), "peer-9") == ""


# --- following ------------------------------------------------------------------------------------


def hollow(folder: Path, peers: int) -> Local:
    """A swarm of which only names, folders and f matter."""
    plan = Plan(out=folder, peers=peers)
    members = tuple(SimpleNamespace(name=name) for name in plan.names)
    for name in plan.names:
        (folder / "peers" / name).mkdir(parents=True)
    run: Any = SimpleNamespace(members=members, validator_faults=FaultModel(peers))
    return Local(plan, run, task=None, keys={})  # type: ignore[arg-type]


@dataclass
class Story:
    """A supervisor and a clock in one: at each time, what happens to the peers."""

    swarm: Local
    events: dict[float, Callable[[], None]] = field(default_factory=dict)
    now: float = 1000.0
    polls: int = 0

    def __post_init__(self) -> None:
        self.began = self.now
        self.seats = {
            name: SimpleNamespace(running=True, training=False) for name in self.swarm.names
        }

    @property
    def passed(self) -> float:
        return self.now - self.began

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds == POLL_SECONDS
        self.now += seconds

    def poll(self) -> None:
        self.polls += 1
        for at in [at for at in self.events if at <= self.passed]:
            self.events.pop(at)()

    def finish(self, *numbers: int) -> Callable[[], None]:
        """They say so in their status, and end later."""

        def happen() -> None:
            for number in numbers:
                path = self.swarm.folder(f"peer-{number}") / "status.json"
                path.write_bytes(b'{"phase": "finished"}')

        return happen

    def set_running(self, running: bool, *numbers: int) -> Callable[[], None]:
        def happen() -> None:
            for number in numbers:
                self.seats[PeerId(f"peer-{number}")].running = running

        return happen


@pytest.fixture
def story(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Story:
    """Of four peers, of which one may fail."""
    told = Story(hollow(tmp_path, 4))
    assert told.swarm.run.validator_faults.f == 1
    monkeypatch.setattr(module, "time", told)
    return told


def follow(story: Story, seconds: float = 100.0, judged: Sequence[PeerId] | None = None) -> str:
    names = story.swarm.names if judged is None else judged
    return watch(story, story.swarm, names, lambda: None, seconds=seconds)  # type: ignore[arg-type]


def near(seconds: float) -> Any:
    return pytest.approx(seconds, abs=2.5 * POLL_SECONDS)


def test_a_swarm_whose_peers_all_finish_is_finished_at_once(story: Story) -> None:
    story.events = {3.0: story.finish(1, 2, 3, 4)}
    assert follow(story) == "finished"
    assert story.passed == near(3.0)


def test_it_polls_ticks_and_shows_each_time(story: Story) -> None:
    story.events = {1.0: story.finish(1, 2, 3, 4)}
    ticks: list[float] = []
    shown: list[float] = []
    watch(
        story,  # type: ignore[arg-type]
        story.swarm,
        story.swarm.names,
        lambda: shown.append(story.now),
        seconds=5.0,
        tick=lambda: ticks.append(story.now),
    )
    assert story.polls == len(ticks) == len(shown) > 5


def test_who_has_finished_may_still_measure_the_last_model(story: Story) -> None:
    seat = story.seats[PeerId("peer-2")]
    seat.training = True
    story.events = {1.0: story.finish(1, 2, 3, 4), 3.0: lambda: setattr(seat, "training", False)}
    assert follow(story) == "finished"
    assert story.passed == near(3.0)
    seat.training = True
    story.began = story.now
    assert follow(story) == "finished", "but not for ever"
    assert story.passed == near(FINISH_SECONDS)


def test_a_swarm_that_comes_to_no_end_times_out(story: Story) -> None:
    assert follow(story, seconds=7.0) == "timed out"
    assert story.passed == near(7.0)


def test_the_slow_get_a_grace_after_the_first(story: Story) -> None:
    story.events = {2.0: story.finish(1, 2, 3), 2.0 + FINISH_SECONDS / 2: story.finish(4)}
    assert follow(story) == "finished"
    assert story.passed == near(2.0 + FINISH_SECONDS / 2)


def test_one_that_does_not_follow_is_not_waited_for_beyond_the_grace(story: Story) -> None:
    story.events = {2.0: story.finish(1, 2, 3)}
    assert follow(story) == "finished"
    assert story.passed == near(2.0 + FINISH_SECONDS)


def test_a_first_that_nobody_follows_is_no_finish(story: Story) -> None:
    story.events = {2.0: story.finish(1)}
    assert follow(story) == "halted"
    assert story.passed == near(2.0 + FINISH_SECONDS)


def test_half_of_them_is_no_majority(story: Story) -> None:
    story.events = {2.0: story.finish(1, 2), 3.0: story.set_running(False, 3, 4)}
    assert follow(story) == "halted"
    assert story.passed == near(3.0)


def test_one_that_is_down_does_not_stop_the_others(story: Story) -> None:
    story.events = {1.0: story.set_running(False, 4), 60.0: story.finish(1, 2, 3)}
    assert follow(story) == "finished"
    assert story.passed == near(60.0)


def test_more_than_f_down_halt_the_swarm_after_the_grace(story: Story) -> None:
    story.events = {1.0: story.set_running(False, 3, 4)}
    assert follow(story) == "halted"
    assert story.passed == near(1.0 + FINISH_SECONDS)


def test_one_that_comes_back_within_the_grace_starts_it_anew(story: Story) -> None:
    story.events = {
        1.0: story.set_running(False, 3, 4),
        1.0 + FINISH_SECONDS / 2: story.set_running(True, 4),
        50.0: story.set_running(False, 4),
    }
    assert follow(story) == "halted"
    assert story.passed == near(50.0 + FINISH_SECONDS)


def test_all_down_without_a_finish_is_halted_at_once(story: Story) -> None:
    story.events = {1.0: story.set_running(False, 1, 2, 3, 4)}
    assert follow(story) == "halted"
    assert story.passed == near(1.0)


def test_only_the_judged_are_waited_for_and_counted(story: Story) -> None:
    story.events = {2.0: story.finish(1, 2, 3)}
    assert follow(story, judged=story.swarm.names[:3]) == "finished"
    assert story.passed == near(2.0)


def test_a_finish_of_the_unjudged_counts_for_nothing(story: Story) -> None:
    story.events = {2.0: story.finish(4)}
    assert follow(story, seconds=30.0, judged=story.swarm.names[:3]) == "timed out"
