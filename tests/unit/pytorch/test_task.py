"""Tasks: loading what was signed, start states from the seed, steps that replay."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import RunSpec
from torchbft.primitives.runspec import Task as TaskTable
from torchbft.pytorch.solo import LocalSwarm, SoloNode, local_run
from torchbft.pytorch.task import (
    Task,
    TaskStep,
    build_model,
    evaluate,
    load_task,
    source_digest,
    start_state,
)
from torchbft.pytorch.tasks import get_task, names
from torchbft.pytorch.train import check_task, train_with
from torchbft.tensors.layout import StateLayout

USERS = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
from torchbft import Task

class Mine(Task):
    train_set = TensorDataset(torch.zeros(8, 2), torch.zeros(8))
    def build_model(self): return nn.Linear(2, 1)
    def build_optimizer(self, model): return torch.optim.SGD(model.parameters(), lr=0.1)
    def loss(self, model, batch, rng): return model(batch[0]).mean()
    def evaluate(self, model): return 0.0, None

class NotATask: pass
"""


class Noisy(Task):
    """Uses every kind of randomness that a task has: dropout, and its own generator."""

    classes = 3

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(96) % 3
        inputs = torch.randn(96, 6, generator=generator) + functional.one_hot(labels, 6) * 3
        self.train_set = TensorDataset(inputs, labels)
        self.rates: list[float] = []

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 3))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=1.0)

    def learning_rate(self, step: int) -> float:
        self.rates.append(0.1 / (1 + step))
        return self.rates[-1]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], rng: torch.Generator) -> Tensor:
        x, y = batch
        noise = torch.randn(x.shape, generator=rng)
        return functional.cross_entropy(model(x + 0.1 * noise), y)

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        assert not model.training
        assert not torch.is_grad_enabled()
        x, y = self.train_set.tensors
        logits = model(x)
        right = (logits.argmax(1) == y).float().mean()
        return functional.cross_entropy(logits, y).item(), right.item()


def small_run(peers: int = 1, **tables: object) -> RunSpec:
    training = {"rounds": 3, "inner_steps": 4, "batch_size": 8}
    return local_run(peers, **{"training": training, "data": {"samples": 96}, **tables})


def parameters(model: nn.Module) -> Tensor:
    return StateLayout.from_module(model).flatten(model).parameters_D


def test_a_users_file_is_loaded_and_its_digest_is_that_of_sha256sum(tmp_path: Path) -> None:
    file = tmp_path / "my task.py"
    file.write_text(USERS)
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    task = load_task(f"{file}:Mine", digest)
    assert type(task).__name__ == "Mine"
    assert source_digest(task) == digest
    assert len(task.train_set) == 8


def test_a_file_that_was_edited_is_refused_before_its_code_runs(tmp_path: Path) -> None:
    file, mark = tmp_path / "task.py", tmp_path / "it-ran"
    file.write_text(f"open({str(mark)!r}, 'w')\n" + USERS)
    with pytest.raises(ConfigError, match=r"sha256 is .*…, but the run file names abab") as error:
        load_task(f"{file}:Mine", "ab" * 32)
    assert not mark.exists()
    assert "never ships code" in error.value.hint


@pytest.mark.parametrize("name", ["Nobody", "NotATask", ""])
def test_a_file_without_the_task_is_refused(tmp_path: Path, name: str) -> None:
    file = tmp_path / "task.py"
    file.write_text(USERS)
    with pytest.raises(ConfigError, match="has no Task named"):
        load_task(f"{file}:{name}")


def test_a_missing_file_and_an_unknown_name_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_task(f"{tmp_path}/none.py:Mine")
    with pytest.raises(ConfigError, match="no task is named 'digit'") as error:
        load_task("digit")
    assert all(name in error.value.hint for name in names())


def test_shipped_tasks_have_digests_too() -> None:
    task = load_task("digits")
    assert load_task("digits", source_digest(task)).classes == 10
    with pytest.raises(ConfigError, match="the run file names 0000"):
        load_task("digits", "00" * 32)


def test_a_run_file_with_another_task_is_refused() -> None:
    run = local_run(1, task=TaskTable(digest="00" * 32))
    with pytest.raises(ConfigError, match="task Noisy: its source has sha256"):
        check_task(Noisy(), run)
    check_task(Noisy(), local_run(1))


def test_the_start_state_comes_from_the_runs_seed_alone() -> None:
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    run = small_run()
    first = start_state(Noisy(), run)
    assert torch.equal(torch.rand(1), expected)  # the caller's generator was left alone
    assert start_state(Noisy(), run).root() == first.root()
    assert start_state(Noisy(), small_run(seed=1)).root() != first.root()


def test_a_step_replays_from_its_arguments() -> None:
    task, run = Noisy(), small_run()
    batch = task.train_set.tensors[0][:8], task.train_set.tensors[1][:8]

    def after(disturb: int, **place: int) -> Tensor:
        model = build_model(task, run)
        step = TaskStep(task, model, task.build_optimizer(model), run, "peer-00")
        torch.manual_seed(disturb)
        step(batch, **{"round": 0, "index": 0, "base": 0, **place})
        return parameters(model)

    assert torch.equal(after(1), after(2))
    assert not torch.equal(after(1), after(1, round=1))
    assert not torch.equal(after(1), after(1, base=5))


def test_the_learning_rate_follows_the_agreed_step() -> None:
    task, run = Noisy(), small_run()
    train_with(task, SoloNode(run), run, peer="peer-00")
    assert task.rates == [0.1 / (1 + step) for step in range(12)]


def test_accumulated_batches_step_once_with_their_mean() -> None:
    training = {"rounds": 1, "inner_steps": 2, "batch_size": 8, "accumulate": 3}
    task, run = Noisy(), small_run(training=training)
    node = SoloNode(run)
    train_with(task, node, run, peer="peer-00")
    assert len(task.rates) == 2
    assert node.swarm.run.training.accumulate == 3


def test_training_a_task_reports_and_finishes() -> None:
    task, run = Noisy(), small_run()
    node = SoloNode(run)
    over = train_with(task, node, run, peer="peer-00")
    assert over.status == "finished"
    assert [report[0] for report in node.swarm.reports] == [0, 1, 2]
    _, _, loss, accuracy, train_loss = node.swarm.reports[-1]
    model = build_model(task, run)
    over.state.load_into(model)
    assert (loss, accuracy) == evaluate(task, model)
    assert train_loss is not None
    assert train_loss > 0


def test_evaluation_may_be_rare_but_the_last_round_is_never_missed() -> None:
    task, run = Noisy(), small_run()
    for every, expected in ((0, []), (2, [1, 2]), (5, [2])):
        node = SoloNode(run)
        train_with(task, node, run, peer="peer-00", evaluate_every=every)
        assert [report[0] for report in node.swarm.reports] == expected


def test_evaluation_puts_the_modes_back() -> None:
    task, run = Noisy(), small_run()
    model = build_model(task, run)
    model[2].eval()  # type: ignore[index]
    evaluate(task, model)
    assert [module.training for module in model] == [True, True, False, True]  # type: ignore[union-attr]


def test_a_peer_with_another_start_goes_on_from_the_agreed_one() -> None:
    task, run = Noisy(), small_run()
    agreed = start_state(task, small_run(seed=9))
    over = train_with(task, SoloNode(run, resume=agreed), run, peer="peer-00")
    same = train_with(task, SoloNode(run, resume=agreed), run, peer="peer-00")
    assert torch.equal(over.state.parameters_D, same.state.parameters_D)
    other = train_with(task, SoloNode(run), run, peer="peer-00")
    assert not torch.equal(over.state.parameters_D, other.state.parameters_D)


class NaNSender:
    """A liar's hook: trains on zeros and sends NaN."""

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x), y

    def update(self, round: int, update: object, *rest: object) -> bytes:
        return b"\xff" * 64


def test_a_liars_hook_is_used_and_its_payload_is_not_accepted() -> None:
    task, run = Noisy(), small_run(aggregation={"m_min": 1})
    node = SoloNode(run)
    over = train_with(task, node, run, peer="peer-00", adversary=NaNSender())  # type: ignore[arg-type]
    assert over.state.round == 0
    assert set(node.swarm.payloads.values()) == {b"\xff" * 64}


def test_get_task_takes_hyphens(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="no task is named"):
        get_task("fashion")
    assert type(get_task("digits")).__name__ == "Digits"


def test_a_local_swarm_knows_its_members_only() -> None:
    with pytest.raises(Exception, match="'peer-09' is not a contributor"):
        LocalSwarm(small_run(2)).link("peer-09")
