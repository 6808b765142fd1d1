"""One peer's work in one round: from the agreed state through inner steps to a contribution.

Shape suffix: D parameter values.

What is submitted (``contribution`` of the run file):

* ``pseudo_gradient``: start − end after H inner steps (DiLoCo, Douillard et al. 2023, alg. 1);
* ``gradient`` (H = 1): the gradient g at the agreed start; with f = 0 this is data-parallel SGD;
* ``momentum`` (H = 1): m ← β·m + (1 − β)·g, each peer's own average: without history no rule
  resists attacks that are coupled over time (Karimireddy, He and Jaggi 2021, section 5).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchbft.primitives.digests import blake3_digest, payload_root
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import RunSpec
from torchbft.pytorch.inner import GradientWatch, InnerState
from torchbft.pytorch.link import RoundOutcome, RoundStart, TrainerHook
from torchbft.pytorch.trace import LEAF_STEPS, RoundTrace, inner_root, model_root, residual_root
from torchbft.tensors.compression import PendingResidual, Residual
from torchbft.tensors.recipe import Recipe
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update, difference

HISTORY_ROUNDS = 16
"""Earlier aggregates kept for a test hook: enough for any attack at hand, bounded memory."""


@dataclass(frozen=True)
class Contribution:
    """What the node is handed: payload bytes, and two roots of 32 bytes."""

    payload: bytes
    trace_root: bytes
    local_root: bytes


def initial_state(model: nn.Module, run: RunSpec) -> AgreedState:
    """The state before round 0 with the values of ``model`` and an empty history of the rule."""
    return AgreedState.initial(model, rule=Recipe.of(run).rule)


class RoundWork:
    """A trainer's side of one round after another. ``begin``, ``batch_done`` …, ``finish``,
    ``settle``; a round that ends without a contribution skips ``finish``.

    ``traced`` False leaves out the commitments, for references that nobody audits.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler],
        run: RunSpec,
        *,
        start: AgreedState,
        hook: TrainerHook | None = None,
        traced: bool = True,
    ) -> None:
        training = run.training
        if training.contribution != "pseudo_gradient" and training.inner_steps != 1:
            raise ConfigError(
                f"contribution {training.contribution!r} needs inner_steps = 1,"
                f" not {training.inner_steps}",
                where="run file",
                hint='with more inner steps the contribution is "pseudo_gradient"',
            )
        recipe = Recipe.of(run)
        self.model, self.layout, self.codec = model, start.layout, recipe.codec
        self.residual = Residual.zero(start.layout)
        self._training, self._outer, self._hook = training, recipe.outer, hook
        self._inner = InnerState(
            optimizers,
            schedulers,
            steps=training.inner_steps,
            reset=training.inner_state == "reset",
        )
        self._watch = (
            None
            if training.contribution == "pseudo_gradient"
            else GradientWatch(optimizers, start.layout, model)
        )
        self._momentum_D = torch.zeros(start.layout.parameter_count)
        self._traced = traced
        self._state, self._round, self.batches = start, 0, 0
        self._trace: RoundTrace | None = None
        self._pending: PendingResidual | None = None
        self._history: list[Tensor] = []

    def resume(self, state: AgreedState) -> None:
        """Go on from a state that other processes reached."""
        self._state = state
        state.load_into(self.model)
        self._inner.catch_up(state)

    def begin(self, start: RoundStart) -> None:
        """Load the agreed state and put the inner optimizers where the round starts."""
        self._remember(start.state)
        self._state, self._round, self.batches, self._pending = start.state, start.round, 0, None
        start.state.load_into(self.model)
        self._inner.begin(start.state)
        if self._watch is not None:
            self._watch.take()
        self._trace = RoundTrace(start.round, start.state.root()) if self._traced else None

    def batch_done(self) -> None:
        """After each batch; commits every ``LEAF_STEPS`` inner steps."""
        self.batches += 1
        step, rest = divmod(self.batches, self._training.accumulate)
        if self._trace is not None and rest == 0 and step % LEAF_STEPS == 0:
            model = model_root(self.layout.flatten(self.model))
            self._trace.step(step, model, inner_root(self._inner.optimizers))

    def finish(self) -> Contribution:
        """The contribution of the batches since ``begin``."""
        update = self.update()
        if isinstance(update, bytes):
            return Contribution(update, bytes(32), bytes(32))
        payload, pending = self.codec.encode(update, self.residual)
        self._pending = pending
        return Contribution(payload, *self._roots(payload, pending))

    def settle(self, outcome: RoundOutcome) -> None:
        """Take over the agreed state after the round, and what the residual becomes."""
        if self._pending is not None:
            self.residual = self._pending.settled(outcome.accepted)
        self._inner.end(void=outcome.void)
        outcome.state.load_into(self.model)

    def update(self) -> Update | bytes:
        """What the batches since ``begin`` make this peer say; call it once a round."""
        honest = self._honest()
        if self._hook is None:
            return honest
        history = tuple(self._history)
        return self._hook.update(self._round, honest, self.codec, self.layout, history)

    def _honest(self) -> Update:
        update = difference(self._state, self.model)
        if self._watch is None:
            return update
        gradient_D = self._watch.take()
        if self._training.contribution == "momentum":
            beta = self._training.momentum
            self._momentum_D = self._momentum_D * beta + gradient_D * (1 - beta)
            gradient_D = self._momentum_D
        return Update(gradient_D, update.float_buffers_B, update.int_buffers_I)

    def _roots(self, payload: bytes, pending: PendingResidual) -> tuple[bytes, bytes]:
        """``trace_root``, and the root of what stays with the peer."""
        if self._trace is None:
            return bytes(32), bytes(32)
        before = residual_root(pending.before_D)
        after = residual_root(pending.settled(True).values_D)
        end = model_root(self.layout.flatten(self.model))
        trace = self._trace.finish(self.batches, end, before, after, payload_root(payload))
        memory = (inner_root(self._inner.optimizers), residual_root(self._momentum_D))
        return trace, blake3_digest("trace/local", *memory, after)

    def _remember(self, state: AgreedState) -> None:
        """Keep the aggregate that led to ``state``, for a test hook."""
        before = self._state
        if self._hook is None or state.round == before.round:
            return
        if self._outer.momentum == 0:
            aggregate_D = (before.parameters_D - state.parameters_D) / self._outer.lr
        else:
            aggregate_D = state.outer_momentum_D - before.outer_momentum_D * self._outer.momentum
        self._history = [*self._history, aggregate_D][-HISTORY_ROUNDS:]
