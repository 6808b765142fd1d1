"""The inner optimizers and learning-rate schedulers of a trainer, seen from the round.

Shape suffix: D parameter values.

A round starts from the agreed state alone: what optimizers remember is put back to how they were
when the run was joined (``inner_state = "reset"``), and schedulers stand where the agreed step
says. A round that is void took no step, so schedulers go back; rounds that this peer missed, or
that ran before it started, are caught up.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from torchbft.tensors.layout import StateLayout
from torchbft.tensors.state import AgreedState


class InnerState:
    """Optimizers whose memory belongs to one round, and schedulers that follow the agreed step.

    ``steps`` is H: how often a scheduler is stepped in a round until one was watched.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        *,
        steps: int,
        reset: bool,
    ) -> None:
        self.optimizers, self.schedulers = tuple(optimizers), tuple(schedulers)
        self._steps, self._reset = steps, reset
        # Some optimizers (Adagrad) fill their memory when they are built, and need it.
        self._first = [_memory(optimizer) for optimizer in self.optimizers]
        self._agreed_step = 0
        self._start: list[_Position] = []
        self._per_round = [steps for _ in self.schedulers]

    def begin(self, state: AgreedState) -> None:
        """Before the first inner step of a round that starts from ``state``."""
        if self._reset:
            self.reset()
        self.catch_up(state)
        self._start = [_Position.of(scheduler) for scheduler in self.schedulers]

    def end(self, *, void: bool) -> None:
        """After a round in which this peer trained. What the agreed state gained beyond that one
        round is caught up when the next begins."""
        for index, (scheduler, start) in enumerate(zip(self.schedulers, self._start, strict=True)):
            if void:
                start.restore(scheduler)
            else:
                self._per_round[index] = _count(scheduler) - start.count
        self._agreed_step += 0 if void else self._steps

    def reset(self) -> None:
        """Put every optimizer's memory back to what it was when the run was joined."""
        for optimizer, first in zip(self.optimizers, self._first, strict=True):
            optimizer.state.clear()
            for parameter, memory in first.items():
                optimizer.state[parameter] = copy.deepcopy(memory)

    def catch_up(self, state: AgreedState) -> None:
        """Take the scheduler steps of rounds that led to ``state`` without this process."""
        rounds = (state.inner_step - self._agreed_step) // self._steps
        self._agreed_step = state.inner_step
        with warnings.catch_warnings():
            # PyTorch warns of scheduler steps without optimizer steps; these took place elsewhere.
            warnings.simplefilter("ignore", UserWarning)
            for scheduler, per_round in zip(self.schedulers, self._per_round, strict=True):
                if not isinstance(scheduler, ReduceLROnPlateau):  # steps on a loss not known here
                    for _ in range(rounds * per_round):
                        scheduler.step()


@dataclass(frozen=True)
class _Position:
    """Where a scheduler stood, and what its optimizer's groups were set to."""

    count: int
    state: dict[str, Any]
    options: list[dict[str, Any]]

    @staticmethod
    def of(scheduler: LRScheduler) -> _Position:
        groups = scheduler.optimizer.param_groups
        options = [{key: value for key, value in g.items() if key != "params"} for g in groups]
        return _Position(
            _count(scheduler), copy.deepcopy(scheduler.state_dict()), copy.deepcopy(options)
        )

    def restore(self, scheduler: LRScheduler) -> None:
        scheduler.load_state_dict(copy.deepcopy(self.state))
        for group, options in zip(scheduler.optimizer.param_groups, self.options, strict=False):
            group.update(copy.deepcopy(options))


def _count(scheduler: LRScheduler) -> int:
    """Steps taken; a chain of schedulers counts as its first does."""
    parts = getattr(scheduler, "_schedulers", None)
    return int(getattr(scheduler, "last_epoch", _count(parts[0]) if parts else 0))


def _memory(optimizer: Optimizer) -> dict[Tensor, Any]:
    return {parameter: copy.deepcopy(value) for parameter, value in optimizer.state.items()}


class GradientWatch:
    """The gradients with which optimizers step, for contributions that are gradients (H = 1).

    Read just before the step, so clipping and unscaling count. A step that a GradScaler skips
    leaves zeros: this peer then contributes no gradient.
    """

    def __init__(
        self, optimizers: Sequence[Optimizer], layout: StateLayout, model: nn.Module
    ) -> None:
        self._layout, self._model = layout, model
        self._gradient_D = torch.zeros(layout.parameter_count)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._read)

    def take(self) -> Tensor:
        """The gradient since the last call (float32 D); zero where no step was taken."""
        gradient_D, self._gradient_D = self._gradient_D, torch.zeros_like(self._gradient_D)
        return gradient_D

    def _read(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        scale = getattr(optimizer, "grad_scale", None)  # set by a GradScaler on fused optimizers
        found_inf = getattr(optimizer, "found_inf", None)
        if found_inf is not None and float(found_inf) > 0:
            return
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        live = self._layout.tensors_of(self._model)
        for spec, place in self._layout.group("parameter"):
            parameter = live[spec.name]
            if id(parameter) in own and parameter.grad is not None:
                dense = parameter.grad.detach().to_dense().reshape(-1).to("cpu", torch.float32)
                self._gradient_D[place] = dense if scale is None else dense / float(scale)
