"""Contributions of a round: what they say, what they commit, what stays with the peer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import RunSpec
from torchbft.pytorch.link import RoundOutcome, RoundStart
from torchbft.pytorch.solo import local_run
from torchbft.pytorch.work import Contribution, RoundWork, initial_state
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.recipe import outer_of
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update


class Bench:
    """One RoundWork with its model, and a hand to drive it."""

    def __init__(self, model: nn.Module, run: RunSpec, **options: object) -> None:
        self.model, self.run = model, run
        self.state = initial_state(model, run)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.work = RoundWork(model, [self.optimizer], (), run, start=self.state, **options)  # type: ignore[arg-type]
        self.number = 0

    def round(self, *batches: tuple[Tensor, Tensor]) -> Contribution:
        self.work.begin(RoundStart(self.number, None, self.state))
        for x, y in batches:
            self.optimizer.zero_grad()
            functional.cross_entropy(self.model(x), y).backward()
            self.optimizer.step()
            self.work.batch_done()
        return self.work.finish()

    def settle(self, *, accepted: bool, state: AgreedState | None = None) -> None:
        self.state = state or self.state
        self.work.settle(RoundOutcome(self.number, accepted, not accepted, "", self.state))
        self.number += 1

    def decoded(self, made: Contribution) -> Update:
        return self.work.codec.decode(made.payload, self.state.layout)


def halves(points: TensorDataset) -> list[tuple[Tensor, Tensor]]:
    x, y = points.tensors
    return [(x[:48], y[:48]), (x[48:], y[48:])]


def one_step(contribution: str, **training: object) -> RunSpec:
    return local_run(1, training={"contribution": contribution, "inner_steps": 1, **training})


def gradient_at(
    model: nn.Module, state: AgreedState, batches: Sequence[tuple[Tensor, Tensor]]
) -> Tensor:
    """The mean gradient over the batches at the state, by plain autograd."""
    state.load_into(model)
    model.zero_grad()
    losses = [functional.cross_entropy(model(x), y) for x, y in batches]
    torch.stack(losses).mean().backward()
    return StateLayout.from_module(model).gradients(model)


def test_a_pseudo_gradient_is_start_minus_end(points: TensorDataset, model: nn.Module) -> None:
    bench = Bench(model, local_run(1))
    made = bench.round(*halves(points))
    end_D = bench.state.layout.flatten(model).parameters_D
    assert torch.equal(bench.decoded(made).parameters_D, bench.state.parameters_D - end_D)


def test_gradients_of_two_peers_make_one_step_of_data_parallel_sgd(
    points: TensorDataset, model: nn.Module
) -> None:
    run = one_step("gradient")
    bench, batches = Bench(model, run), halves(points)
    said = []
    for batch in batches:
        said.append(bench.decoded(bench.round(batch)).parameters_D)
        bench.settle(accepted=True)
    outer = outer_of(run)
    start = bench.state
    ours, _ = outer.step(start.parameters_D, start.outer_momentum_D, (said[0] + said[1]) / 2)
    together = gradient_at(model, start, batches)
    assert outer.momentum == 0
    torch.testing.assert_close(ours, start.parameters_D - together * run.outer.learning_rate)


def test_momentum_is_the_peers_own_average_of_gradients(
    points: TensorDataset, model: nn.Module
) -> None:
    bench, batches = Bench(model, one_step("momentum", momentum=0.9)), halves(points)
    expected = torch.zeros(bench.state.layout.parameter_count)
    for batch in [*batches, *batches]:
        made = bench.round(batch)
        expected = 0.9 * expected + 0.1 * gradient_at(model, bench.state, [batch])
        torch.testing.assert_close(bench.decoded(made).parameters_D, expected)
        bench.settle(accepted=True)


@pytest.mark.parametrize("contribution", ["gradient", "momentum"])
def test_gradients_need_one_inner_step(model: nn.Module, contribution: str) -> None:
    run = local_run(1, training={"contribution": contribution, "inner_steps": 20})
    with pytest.raises(ConfigError, match=f"'{contribution}' needs inner_steps = 1, not 20"):
        Bench(model, run)


def test_what_was_refused_is_said_again(points: TensorDataset, model: nn.Module) -> None:
    bench = Bench(model, local_run(1))
    first = bench.decoded(bench.round(halves(points)[0]))
    bench.settle(accepted=False)
    assert torch.equal(bench.work.residual.values_D, first.parameters_D)
    second = bench.decoded(bench.round(halves(points)[1]))
    end_D = bench.state.layout.flatten(model).parameters_D
    fresh_D = bench.state.parameters_D - end_D
    torch.testing.assert_close(second.parameters_D, fresh_D + first.parameters_D)
    bench.settle(accepted=True)
    assert not bench.work.residual.values_D.any()


def test_a_lossy_codec_leaves_the_rest_behind(points: TensorDataset, model: nn.Module) -> None:
    run = local_run(1, aggregation={"codec": "int8", "rule": "mean"})
    bench = Bench(model, run)
    said = bench.decoded(bench.round(*halves(points))).parameters_D
    true_D = bench.state.parameters_D - bench.state.layout.flatten(model).parameters_D
    bench.settle(accepted=True)
    torch.testing.assert_close(said + bench.work.residual.values_D, true_D)
    assert bench.work.residual.values_D.any()


def test_a_round_ends_with_the_agreed_model_loaded(points: TensorDataset, model: nn.Module) -> None:
    bench = Bench(model, local_run(1))
    start_D = bench.state.parameters_D.clone()
    bench.round(*halves(points))
    bench.settle(accepted=False)
    assert torch.equal(bench.state.layout.flatten(model).parameters_D, start_D)


def test_the_trace_binds_the_payload_to_the_work(points: TensorDataset, model: nn.Module) -> None:
    def root(*batches: tuple[Tensor, Tensor], **options: object) -> Contribution:
        fresh = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        fresh.load_state_dict(model.state_dict())
        return Bench(fresh, run, **options).round(*batches)

    run = local_run(1)
    first, second = halves(points)
    made = root(first, second)
    assert made == root(first, second)
    others = [root(second, first), root(first), root(first, first)]
    assert len({made.trace_root, *(other.trace_root for other in others)}) == 4
    assert len({made.payload, *(other.payload for other in others)}) == 4


def test_leaves_come_every_sixteen_steps_whatever_is_accumulated(
    points: TensorDataset, model: nn.Module
) -> None:
    for accumulate, batches in ((1, 40), (2, 80)):
        run = local_run(1, training={"accumulate": accumulate, "inner_steps": 40})
        bench = Bench(model, run)
        bench.round(*halves(points) * (batches // 2))
        assert bench.work._trace is not None
        assert len(bench.work._trace.leaves) == 1 + 2 + 1


def test_the_local_root_follows_the_inner_optimizer(
    points: TensorDataset, model: nn.Module
) -> None:
    run = local_run(1, training={"inner_state": "keep"})
    bench = Bench(model, run)
    bench.optimizer.param_groups[0]["momentum"] = 0.9
    roots = {bench.round(*halves(points)).local_root for _ in range(2)}
    assert len(roots) == 2


class Liar:
    """A test hook that says something else, and remembers what it was shown."""

    def __init__(self, says: float | bytes) -> None:
        self.says, self.histories = says, []  # type: ignore[var-annotated]

    def batch(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    def update(
        self,
        round: int,
        update: Update,
        codec: object,
        layout: StateLayout,
        history: Sequence[Tensor],
    ) -> Update | bytes:
        self.histories.append(history)
        if isinstance(self.says, bytes):
            return self.says
        lie = update.parameters_D * self.says
        return Update(lie, update.float_buffers_B, update.int_buffers_I)


def test_a_hook_may_change_the_update_or_send_bytes(
    points: TensorDataset, model: nn.Module
) -> None:
    bench = Bench(model, local_run(1), hook=Liar(-4.0))
    said = bench.decoded(bench.round(*halves(points))).parameters_D
    true_D = bench.state.parameters_D - bench.state.layout.flatten(model).parameters_D
    assert torch.equal(said, true_D * -4)
    raw = Bench(model, local_run(1), hook=Liar(b"no payload")).round(*halves(points))
    assert raw.payload == b"no payload"


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_hook_is_shown_the_aggregates_of_earlier_rounds(
    points: TensorDataset, model: nn.Module, momentum: float
) -> None:
    liar = Liar(1.0)
    run = local_run(1, outer={"momentum": momentum, "nesterov": momentum > 0})
    bench, outer, said = Bench(model, run, hook=liar), outer_of(run), []
    for number in range(3):
        said.append(bench.decoded(bench.round(*halves(points))).parameters_D)
        before = bench.state
        parameters_D, momentum_D = outer.step(
            before.parameters_D, before.outer_momentum_D, said[-1]
        )
        after = AgreedState(
            before.layout,
            parameters_D,
            before.float_buffers_B,
            before.int_buffers_I,
            momentum_D,
            before.rule_state,
            round=number + 1,
            inner_step=20 * (number + 1),
        )
        bench.settle(accepted=True, state=after)
    shown = liar.histories[2]
    assert len(liar.histories[0]) == 0
    assert len(shown) == 2
    for mine, real in zip(shown, said, strict=False):
        torch.testing.assert_close(mine, real, atol=1e-5, rtol=1e-4)
