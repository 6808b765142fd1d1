"""Inner optimizers and schedulers across rounds: resume, missed rounds, void rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import torchbft
from torchbft.pytorch.inner import GradientWatch
from torchbft.pytorch.link import RoundOutcome
from torchbft.pytorch.session import Swarm
from torchbft.pytorch.solo import SoloNode, local_run
from torchbft.pytorch.work import initial_state
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.state import AgreedState

STEPS = 4
Build = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
SCHEDULERS: dict[str, Build] = {
    "step": lambda o: lr_scheduler.StepLR(o, 3, gamma=0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 16),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.2, total_steps=40),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], [5]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def session(
    model: nn.Module, build: Build, *, resume_after: int = 0, void: set[int] | None = None
) -> tuple[Swarm, torch.optim.Optimizer, lr_scheduler.LRScheduler]:
    """A session with a scheduler, going on after some rounds that another process ran."""
    training = {"rounds": 4, "inner_steps": STEPS, "batch_size": 8}
    run = local_run(1, training=training, data={"samples": 96})
    first = initial_state(model, run)
    resume = _after(first, resume_after) if resume_after else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scheduler = build(optimizer)
    link = SoloNode(run, resume=resume, void=void or set())
    return torchbft.join(run, model, optimizer, scheduler, link=link), optimizer, scheduler


def _after(state: AgreedState, rounds: int) -> AgreedState:
    return dataclasses.replace(state, round=rounds, inner_step=rounds * STEPS)


def rates(
    swarm: Swarm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scheduler: lr_scheduler.LRScheduler,
    points: TensorDataset,
) -> list[float]:
    """The learning rate of every step of the loop."""
    used: list[float] = []
    for x, y in swarm.batches(points):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    return used


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_resumed_session_sets_schedulers_from_the_agreed_step(
    points: TensorDataset, model: nn.Module, kind: str
) -> None:
    whole = rates(*_looped(session(model, SCHEDULERS[kind]), model, points))
    swarm, optimizer, scheduler = session(model, SCHEDULERS[kind], resume_after=2)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(whole[2 * STEPS])
    rest = rates(swarm, model, optimizer, scheduler, points)
    assert rest == pytest.approx(whole[2 * STEPS :])


def _looped(
    made: tuple[Swarm, torch.optim.Optimizer, lr_scheduler.LRScheduler],
    model: nn.Module,
    points: TensorDataset,
) -> tuple[Swarm, nn.Module, torch.optim.Optimizer, lr_scheduler.LRScheduler, TensorDataset]:
    swarm, optimizer, scheduler = made
    return swarm, model, optimizer, scheduler, points


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_a_void_round_takes_its_scheduler_steps_back(
    points: TensorDataset, model: nn.Module, kind: str
) -> None:
    whole = rates(*_looped(session(model, SCHEDULERS[kind]), model, points))
    voided = rates(*_looped(session(model, SCHEDULERS[kind], void={1}), model, points))
    assert voided == pytest.approx([*whole[: 2 * STEPS], *whole[STEPS : 3 * STEPS]])


def test_rounds_that_a_peer_missed_are_caught_up(points: TensorDataset, model: nn.Module) -> None:
    swarm, optimizer, scheduler = session(model, SCHEDULERS["lambda"])
    real = swarm._link.outcome

    def late(round: int) -> object:
        outcome = real(round)
        if round != 1:
            return outcome
        assert isinstance(outcome, RoundOutcome)
        behind = _after(outcome.state, 10)
        node = swarm._link.swarm  # type: ignore[attr-defined]
        node._state = behind
        return dataclasses.replace(outcome, state=behind)  # a node answers with its newest state

    swarm._link.outcome = late  # type: ignore[method-assign,assignment]
    used = rates(swarm, model, optimizer, scheduler, points)
    assert used[2 * STEPS] == pytest.approx(0.1 / (1 + 10 * STEPS))


def test_a_scheduler_that_steps_once_a_round_is_watched_and_left_alone(
    points: TensorDataset, model: nn.Module
) -> None:
    swarm, optimizer, scheduler = session(model, SCHEDULERS["lambda"])
    used: list[float] = []
    for count, _ in enumerate(swarm.batches(points), 1):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if count % STEPS == 0:
            scheduler.step()
    assert used[::STEPS] == pytest.approx([0.1, 0.1 / 2, 0.1 / 3, 0.1 / 4])


def test_a_plateau_scheduler_is_not_stepped_for_rounds_it_did_not_see(model: nn.Module) -> None:
    swarm, optimizer, _ = session(
        model,
        lambda o: lr_scheduler.ReduceLROnPlateau(o),
        resume_after=3,
    )
    assert swarm.state.round == 3
    assert optimizer.param_groups[0]["lr"] == 0.1


def watched(model: nn.Module) -> tuple[GradientWatch, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return GradientWatch([optimizer], StateLayout.from_module(model), model), optimizer


def test_gradients_are_read_before_the_step_whatever_the_loop_does_after(
    points: TensorDataset, model: nn.Module
) -> None:
    watch, optimizer = watched(model)
    x, y = points.tensors
    functional.cross_entropy(model(x), y).backward()
    expected = StateLayout.from_module(model).gradients(model)
    optimizer.step()
    optimizer.zero_grad()
    assert torch.equal(watch.take(), expected)
    assert not watch.take().any()


def test_each_optimizer_counts_for_its_own_parameters(
    points: TensorDataset, model: nn.Module
) -> None:
    first = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index,operator]
    second = torch.optim.SGD(model[2].parameters(), lr=0.1)  # type: ignore[index,operator]
    watch = GradientWatch([first, second], StateLayout.from_module(model), model)
    x, y = points.tensors
    functional.cross_entropy(model(x), y).backward()
    expected = StateLayout.from_module(model).gradients(model)
    first.step()
    model[0].zero_grad()  # type: ignore[index,operator]
    second.step()
    assert torch.equal(watch.take(), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_scaled_gradients_are_unscaled_and_skipped_steps_leave_zeros(
    points: TensorDataset, model: nn.Module, fused: bool
) -> None:
    x, y = points.tensors
    functional.cross_entropy(model(x), y).backward()
    expected = StateLayout.from_module(model).gradients(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0, fused=fused)
    watch = GradientWatch([optimizer], StateLayout.from_module(model), model)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, float("inf")):
        optimizer.zero_grad()
        scaler.scale(functional.cross_entropy(model(x), y) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        found = watch.take()
        if factor == 1.0:
            torch.testing.assert_close(found, expected)
        else:
            assert not found.any()
