"""Reference runs: the same model as a session makes, and attacks that bite when nothing checks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Subset, TensorDataset

from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import RunSpec
from torchbft.pytorch.cohort import simulate
from torchbft.pytorch.solo import LocalSwarm, Slices, SoloNode, local_run
from torchbft.pytorch.task import Task, start_state
from torchbft.pytorch.train import train_with
from torchbft.tensors.update import Update


class Points(Task):
    """Three classes of points; 51 parameters and a norm with buffers."""

    classes = 3

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        labels = torch.arange(192) % 3
        inputs = torch.randn(192, 6, generator=generator) + functional.one_hot(labels, 6) * 3.0
        self.train_set = TensorDataset(inputs[:96], labels[:96])
        self.test_set = TensorDataset(inputs[96:], labels[96:])

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], rng: torch.Generator) -> Tensor:
        return functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        x, y = self.test_set.tensors
        logits = model(x)
        right = (logits.argmax(1) == y).float().mean().item()
        return functional.cross_entropy(logits, y).item(), right


def small_run(peers: int = 4, **tables: object) -> RunSpec:
    training = {"rounds": 6, "inner_steps": 8, "batch_size": 8}
    return local_run(peers, **{"training": training, "data": {"samples": 96}, **tables})


class Hook:
    """A liar that sends ``forge`` of its honest parameters."""

    def __init__(self, forge: Callable[[Tensor], Tensor] | bytes) -> None:
        self.forge = forge

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    def update(self, round: int, update: Update, *rest: object) -> Update | bytes:
        if isinstance(self.forge, bytes):
            return self.forge
        lie = self.forge(update.parameters_D)
        return Update(lie, update.float_buffers_B, update.int_buffers_I)


def test_a_cohort_of_one_trains_exactly_as_a_session_does() -> None:
    task, run = Points(), small_run(1)
    over = train_with(task, SoloNode(run), run, peer="peer-00")
    alone = simulate(task, run)
    assert torch.equal(alone.state.parameters_D, over.state.parameters_D)
    assert torch.equal(alone.state.float_buffers_B, over.state.float_buffers_B)


def test_the_same_arguments_give_the_same_result() -> None:
    first, second = (simulate(Points(), small_run()) for _ in range(2))
    assert first.losses == second.losses
    assert first.state.root() == second.state.root()
    other = simulate(Points(), small_run(seed=1))
    assert other.state.root() != first.state.root()


def test_a_cohort_learns() -> None:
    result = simulate(Points(), small_run())
    assert result.rounds == tuple(range(6))
    assert result.losses[-1] < result.losses[0]
    assert result.accuracy is not None
    assert result.accuracy > 0.8


def test_fewer_peers_and_rounds_may_be_asked_for() -> None:
    result = simulate(Points(), small_run(), peers=["peer-00", "peer-02"], rounds=4)
    assert result.state.round == 4
    rare = simulate(Points(), small_run(), rounds=5, evaluate_every=2)
    assert rare.rounds == (1, 3, 4)
    assert simulate(Points(), small_run(), rounds=2, evaluate_every=0).rounds == (1,)


def test_an_undefended_mean_takes_what_liars_send() -> None:
    run, task = small_run(), Points()
    honest = simulate(task, run)
    flipped = {"peer-03": Hook(lambda own: own * -9.0)}
    undefended = simulate(task, run, liars=flipped, checks=False)
    assert undefended.accuracy is not None
    assert honest.accuracy is not None
    assert undefended.accuracy < honest.accuracy - 0.2
    defended = simulate(task, run, liars=flipped, rule="arc+nnm+trimmed_mean", f=1)
    assert defended.accuracy is not None
    assert defended.accuracy > honest.accuracy - 0.05


def test_nan_spoils_the_undefended_and_is_refused_by_the_checked() -> None:
    run, task = small_run(), Points()
    liars = {"peer-03": Hook(lambda own: own * float("nan"))}
    undefended = simulate(task, run, liars=liars, checks=False)
    assert undefended.state.parameters_D.isnan().all()
    checked = simulate(task, run, liars=liars)
    alone = simulate(task, run, peers=["peer-00", "peer-01", "peer-02"])
    assert checked.state.parameters_D.isfinite().all()
    assert checked.accuracy == pytest.approx(alone.accuracy, abs=0.1)


def test_unreadable_bytes_count_for_nobody() -> None:
    run, task = small_run(), Points()
    liars = {"peer-03": Hook(b"nothing")}
    for checks in (True, False):
        result = simulate(task, run, liars=liars, checks=checks, rounds=2)
        assert result.state.round == 2
        assert result.state.parameters_D.isfinite().all()


def test_honest_updates_are_published_before_the_liars_turn() -> None:
    seen: list[tuple[int, PeerId]] = []

    class Late(Hook):
        def update(self, round: int, update: Update, *rest: object) -> Update | bytes:
            seen.append((round, PeerId("liar")))
            return super().update(round, update, *rest)

    simulate(
        Points(),
        small_run(),
        rounds=2,
        liars={"peer-00": Late(lambda own: own)},
        publish=lambda round, peer, update_D: seen.append((round, peer)),
    )
    one = ["peer-01", "peer-02", "peer-03", "liar"]
    assert seen == [(round, PeerId(name)) for round in range(2) for name in one]


def test_private_shards_are_each_peers_own() -> None:
    task = Points()
    run = small_run(2, data={"mode": "private"})
    halves = {
        f"peer-{index:02d}": Subset(task.train_set, range(index * 48, index * 48 + 48))
        for index in range(2)
    }
    result = simulate(task, run, shards=halves)
    assert result.accuracy is not None
    assert result.accuracy > 0.6
    assert result.state.root() != simulate(task, run).state.root()


def test_slices_of_a_round_are_disjoint_until_the_pass_ends() -> None:
    run = small_run(2)
    slices = Slices(run, 96)
    rounds = [slices.take(2) for _ in range(3)]
    assert all(len(part) == 64 for parts in rounds for part in parts)
    flat = [index for parts in rounds for part in parts for index in part]
    passes = [flat[start : start + 96] for start in range(0, len(flat), 96)]
    assert all(sorted(one) == list(range(96)) for one in passes)
    assert (slices.passes, slices.cursor) == (4, 96)


def test_a_peer_that_leaves_does_not_stop_the_others_until_too_few_are_left() -> None:
    run = small_run(4)
    swarm = LocalSwarm(run)
    links = [swarm.link(f"peer-{index:02d}") for index in range(4)]
    task = Points()
    swarm._initial = {link.peer: start_state(task, run) for link in links}
    for link in links:
        link.start(start_state(task, run))
    links[3].leave()
    assert links[0].next_round().state.round == 0
    links[2].leave()
    over = links[0].next_round()
    assert getattr(over, "status", "") == "halted"
    assert getattr(over, "reason", "") == "2 of the 3 peers that a round needs"
    assert getattr(links[3].next_round(), "status", "") == "stopped"
