"""Reference accuracies: a cohort of peers trained one after another in one process.

No ledger, no network: what a trusted aggregator would reach with the same task, data, inner and
outer steps. With ``checks=False`` it is the undefended baseline: every update enters a plain mean
as it is, NaN included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import RunSpec
from torchbft.pytorch.data import Feed, MapStyle, own_positions, private_seed, round_samples
from torchbft.pytorch.link import RoundOutcome, RoundStart, TrainerHook
from torchbft.pytorch.solo import Slices
from torchbft.pytorch.task import Task, TaskStep, build_model, evaluate
from torchbft.pytorch.work import RoundWork, initial_state
from torchbft.tensors.advance import LedgerFields, advance, integer_median
from torchbft.tensors.aggregation import get
from torchbft.tensors.recipe import outer_of
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update

Publish = Callable[[int, PeerId, Tensor], None]
"""Called with (round, peer, update float32 D) for each honest update, before the liars' turn."""


@dataclass(frozen=True)
class CohortResult:
    """Held-out loss and accuracy (0 … 1, NaN-free or None) after each evaluated round."""

    rounds: tuple[int, ...]
    losses: tuple[float, ...]
    accuracies: tuple[float | None, ...]
    state: AgreedState

    @property
    def accuracy(self) -> float | None:
        """At the end."""
        return self.accuracies[-1]


@dataclass(frozen=True)
class _Member:
    peer: PeerId
    work: RoundWork
    step: TaskStep
    feed: Feed
    hook: TrainerHook | None


def simulate(
    task: Task,
    run: RunSpec,
    *,
    peers: Sequence[str] | None = None,
    rounds: int | None = None,
    rule: str = "mean",
    f: int = 0,
    liars: Mapping[str, TrainerHook] | None = None,
    publish: Publish | None = None,
    checks: bool = True,
    shards: Mapping[str, MapStyle] | None = None,
    evaluate_every: int = 1,
) -> CohortResult:
    """Train a cohort and return how its model does.

    ``peers``: names, by default the run's contributors. ``rule`` and ``f``: what aggregates (the
    trusted mean). ``liars``: their test hooks, by name; they act after the honest ones.
    ``shards``: private data by name; otherwise slices of the task's train set. ``evaluate_every``:
    rounds between evaluations; 0 evaluates at the end alone.
    """
    names = [PeerId(peer) for peer in peers or [member.name for member in run.contributors]]
    names.sort(key=lambda name: (name in (liars or {}), name))
    cohort = _Cohort(task, run, names, rule, f, liars or {}, shards)
    measured: list[tuple[int, float, float | None]] = []
    total = rounds or run.training.rounds
    for round in range(total):
        cohort.round(round, publish=publish, checks=checks)
        if round == total - 1 or (evaluate_every and (round + 1) % evaluate_every == 0):
            measured.append((round, *cohort.evaluated()))
    numbers, losses, accuracies = zip(*measured, strict=True)
    return CohortResult(numbers, losses, accuracies, cohort.state)


class _Cohort:
    def __init__(
        self,
        task: Task,
        run: RunSpec,
        names: Sequence[PeerId],
        rule: str,
        f: int,
        liars: Mapping[str, TrainerHook],
        shards: Mapping[str, MapStyle] | None,
    ) -> None:
        self._task, self._run, self._f, self._rule = task, run, f, get(rule)
        self._outer = outer_of(run)
        self._model = build_model(task, run)
        initial = initial_state(self._model, run)
        history = self._rule.init(initial.layout.parameter_count)
        self.state = dataclasses.replace(initial, rule_state=history)
        self._slices = None if shards is not None else Slices(run, len(task.train_set))
        self._members = [self._member(name, liars.get(name), shards) for name in names]

    def _member(
        self, peer: PeerId, hook: TrainerHook | None, shards: Mapping[str, MapStyle] | None
    ) -> _Member:
        model = build_model(self._task, self._run)
        optimizer = self._task.build_optimizer(model)
        data = self._task.train_set if shards is None else shards[peer]
        return _Member(
            peer,
            RoundWork(model, [optimizer], (), self._run, start=self.state, hook=hook, traced=False),
            TaskStep(self._task, model, optimizer, self._run, peer),
            Feed(data, self._run.training.batch_size, peer=peer),
            hook,
        )

    def round(self, round: int, *, publish: Publish | None, checks: bool) -> None:
        slices = self._slices.take(len(self._members)) if self._slices else None
        decoded: list[tuple[PeerId, Update]] = []
        for index, member in enumerate(self._members):
            positions = slices[index] if slices else self._own(member, round)
            update = self._trained(member, round, positions, checks=checks)
            if publish is not None and member.hook is None and update is not None:
                publish(round, member.peer, update.parameters_D)
            if update is not None:
                decoded.append((member.peer, update))
        taken = {peer for peer, _ in decoded}
        self.state = self._checked(decoded) if checks else self._unchecked(decoded)
        for member in self._members:
            member.work.settle(RoundOutcome(round, member.peer in taken, False, "", self.state))

    def _own(self, member: _Member, round: int) -> list[int]:
        seed = private_seed(self._run, member.peer)
        return own_positions(member.feed.samples, round, round_samples(self._run), seed)

    def _trained(
        self, member: _Member, round: int, positions: Sequence[int], *, checks: bool
    ) -> Update | None:
        """What the member's contribution says; None when nobody could read it."""
        member.work.begin(RoundStart(round, positions, self.state))
        for index, batch in enumerate(member.feed.batches(positions)):
            if member.hook is not None:
                batch = member.hook.batch(*batch)
            member.step(batch, round=round, index=index, base=self.state.inner_step)
            member.work.batch_done()
        if not checks:
            update = member.work.update()
            return update if isinstance(update, Update) else None
        try:
            return member.work.codec.decode(member.work.finish().payload, self.state.layout)
        except DecodeError:
            return None

    def _checked(self, decoded: list[tuple[PeerId, Update]]) -> AgreedState:
        state, _ = advance(
            self.state,
            decoded,
            rule=self._rule,
            f=self._f,
            outer=self._outer,
            ledger=self._ledger(),
        )
        return state

    def _unchecked(self, decoded: list[tuple[PeerId, Update]]) -> AgreedState:
        updates = [update for _, update in decoded]
        mean_D = torch.stack([update.parameters_D for update in updates]).mean(dim=0)
        before = self.state
        parameters_D, momentum_D = self._outer.step(
            before.parameters_D, before.outer_momentum_D, mean_D
        )
        return dataclasses.replace(
            before,
            parameters_D=parameters_D,
            outer_momentum_D=momentum_D,
            float_buffers_B=torch.stack([u.float_buffers_B for u in updates]).mean(dim=0),
            int_buffers_I=integer_median(torch.stack([u.int_buffers_I for u in updates])),
            round=before.round + 1,
            inner_step=before.inner_step + self._run.training.inner_steps,
        )

    def _ledger(self) -> LedgerFields:
        before = self.state
        steps = self._run.training.inner_steps
        return LedgerFields(
            before.round + 1,
            before.inner_step + steps,
            0,
            0,
            before.membership_digest,
            before.credit_digest,
        )

    def evaluated(self) -> tuple[float, float | None]:
        self.state.load_into(self._model)
        return evaluate(self._task, self._model)
