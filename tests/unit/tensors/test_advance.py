"""One round's step, buffers included. Cases C04, C05 and C06 of the fault collection."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.primitives.ids import PeerId
from torchbft.tensors import aggregation
from torchbft.tensors.advance import LedgerFields, advance, integer_median, pool_float_buffers
from torchbft.tensors.outer import DILOCO, OuterOptimizer, OuterSGD
from torchbft.tensors.state import AgreedState, StateLayout
from torchbft.tensors.update import Update, difference

DIGEST = bytes(range(32))
LEDGER = LedgerFields(1, 20, 0, 640, DIGEST, bytes(32))
MEAN = aggregation.get("mean")


def peers(updates: list[Update]) -> list[tuple[PeerId, Update]]:
    return [(PeerId(f"p{i}"), update) for i, update in enumerate(updates)]


def normed(norm: Callable[[int], nn.Module]) -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(norm(4), nn.Linear(4, 2))


def seen(state: AgreedState, model: nn.Module, mean: float, seed: int = 0) -> Update:
    """The update of a peer whose data has this mean: 80 training passes, one small step."""
    state.load_into(model)
    model.train()
    generator = torch.Generator().manual_seed(seed)
    for _ in range(80):
        loss = model(mean + torch.randn(64, 4, generator=generator)).square().mean()
    gradients = torch.autograd.grad(loss, [*model.parameters()])
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.data -= 1e-3 * gradient
    return difference(state, model)


def gradient_only(state: AgreedState, **fields: Tensor) -> Update:
    flat = Update(torch.ones_like(state.parameters_D), state.float_buffers_B, state.int_buffers_I)
    return replace(flat, **fields)


def go(
    state: AgreedState,
    updates: list[Update],
    rule: str = "mean",
    f: int = 0,
    outer: OuterOptimizer = DILOCO,
) -> AgreedState:
    return advance(
        state, peers(updates), rule=aggregation.get(rule), f=f, outer=outer, ledger=LEDGER
    )[0]


class OuterAdam:
    """FedAdam's server step (Reddi et al. 2021), as hostile to a buffer as an optimizer can be."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def step(self, parameters_D: Tensor, momentum_D: Tensor, g_D: Tensor) -> tuple[Tensor, Tensor]:
        self.sizes += [len(parameters_D), len(momentum_D), len(g_D)]
        momentum_D = 0.9 * momentum_D + g_D
        return parameters_D - momentum_D / (g_D.abs() + 1e-8), momentum_D


def test_c04_outer_optimizer_never_sees_buffers_and_variance_stays_positive() -> None:
    model, outer = normed(nn.BatchNorm1d), OuterAdam()
    state = AgreedState.initial(model)
    for number in range(4):
        state = go(state, [seen(state, model, m, number) for m in (0.0, 3.0, -2.0)], outer=outer)
        variance = state.float_buffers_B[state.layout.moments[1]]
        assert bool((variance > 0).all())
        assert bool(torch.isfinite(state.parameters_D).all())
    assert set(outer.sizes) == {state.layout.parameter_count}
    state.load_into(model)
    assert bool(torch.isfinite(model.eval()(torch.randn(3, 4))).all())


@pytest.mark.parametrize("rule", ["krum", "arc+nnm+trimmed_mean", "geometric_median"])
def test_c04_buffers_take_no_part_in_distances(rule: str) -> None:
    state = AgreedState.initial(normed(nn.BatchNorm1d))
    rows = torch.randn(7, state.layout.parameter_count, generator=torch.Generator().manual_seed(1))
    plain = [gradient_only(state, parameters_D=row) for row in rows]
    scales = [1.0, 1e6, 1e-6, 3.0, 1e12, 7.0, 1e3]
    loud = [
        replace(update, float_buffers_B=state.float_buffers_B + scale)
        for update, scale in zip(plain, scales, strict=True)
    ]
    quiet_state, loud_state = (go(state, updates, rule, f=1) for updates in (plain, loud))
    assert torch.equal(quiet_state.parameters_D, loud_state.parameters_D)
    assert not torch.equal(quiet_state.float_buffers_B, loud_state.float_buffers_B)


def c05(norm: Callable[[int], nn.Module]) -> tuple[AgreedState, list[nn.Module]]:
    models = [normed(norm) for _ in range(2)]
    state = AgreedState.initial(models[0])
    updates = [seen(state, model, mean) for model, mean in zip(models, (0.0, 10.0), strict=True)]
    after = go(state, updates, outer=OuterSGD(0.7))
    for model in models:
        after.load_into(model)
        model.eval()
    return after, models


def losses(models: list[nn.Module]) -> list[float]:
    x = 5 + torch.randn(32, 4, generator=torch.Generator().manual_seed(9))
    return [model(x).square().mean().item() for model in models]


@pytest.mark.parametrize("norm", [nn.BatchNorm1d, nn.SyncBatchNorm])
def test_c05_c06_running_statistics_are_those_of_the_union(norm: type[nn.Module]) -> None:
    _, models = c05(norm)
    first = models[0][0]
    assert torch.allclose(first.running_mean, torch.full((4,), 5.0), atol=0.1)
    # Two parties of variance 1 and means 0 and 10: the union has variance 1 + 5².
    assert torch.allclose(first.running_var, torch.full((4,), 26.0), rtol=0.02)
    assert int(first.num_batches_tracked) == 80
    assert losses(models)[0] == losses(models)[1]


def test_c06_group_norm_has_no_buffers_and_works() -> None:
    state, models = c05(lambda width: nn.GroupNorm(2, width))
    assert (state.layout.float_buffer_count, state.layout.int_buffer_count) == (0, 0)
    assert losses(models)[0] == losses(models)[1]


def test_the_order_of_arrival_changes_nothing() -> None:
    model = normed(nn.BatchNorm1d)
    state = AgreedState.initial(model)
    updates = peers([seen(state, model, m, i) for i, m in enumerate((0.0, 1.0, 2.0, 3.0))])
    results = [
        advance(state, order, rule=MEAN, f=0, outer=DILOCO, ledger=LEDGER)
        for order in itertools.permutations(updates)
    ]
    assert len({after.root() for after, _ in results}) == 1
    assert results[0][1] == results[-1][1]


def test_inputs_are_left_alone_and_nothing_is_aliased() -> None:
    state = AgreedState.initial(normed(nn.BatchNorm1d))
    root, update = state.root(), gradient_only(state)
    after = go(state, [update])
    assert state.root() == root
    after.parameters_D.zero_(), after.float_buffers_B.zero_(), after.int_buffers_I.zero_()
    assert state.root() == root
    assert bool((update.parameters_D == 1).all())


def test_ledger_fields_and_history_are_taken_over() -> None:
    rule = aggregation.get("centred_clipping")
    state = AgreedState.initial(normed(nn.BatchNorm1d), rule=rule)
    after = go(state, [gradient_only(state)] * 3, "centred_clipping", f=1)
    fields = (after.round, after.inner_step, after.pass_index, after.cursor)
    assert fields == (1, 20, 0, 640)
    assert (after.membership_digest, after.credit_digest) == (DIGEST, bytes(32))
    assert after.rule_state.keys() == state.rule_state.keys()
    assert any(
        not torch.equal(after.rule_state[key], state.rule_state[key]) for key in state.rule_state
    )


def test_the_outcome_names_peers_not_rows() -> None:
    state = AgreedState.initial(normed(nn.BatchNorm1d))
    updates = {f"p{i}": gradient_only(state) for i in range(7)}
    updates["p2"] = replace(updates["p2"], parameters_D=updates["p2"].parameters_D * 1e20)
    arrivals = [(PeerId(peer), update) for peer, update in reversed(updates.items())]
    rule = aggregation.get("arc+nnm+trimmed_mean")
    _, outcome = advance(state, arrivals, rule=rule, f=2, outer=DILOCO, ledger=LEDGER)
    assert outcome.refused_by_norm == (PeerId("p2"),)
    assert outcome.weights[PeerId("p2")] == 0.0
    assert outcome.norms[PeerId("p2")] == pytest.approx(1e20 * outcome.norms[PeerId("p0")])


def test_misuse_and_missing_majorities_raise() -> None:
    state = AgreedState.initial(normed(nn.BatchNorm1d))
    update = gradient_only(state)
    with pytest.raises(MisuseError, match="twice"):
        advance(state, peers([update]) * 2, rule=MEAN, f=0, outer=DILOCO, ledger=LEDGER)
    with pytest.raises(PreconditionError, match="n > 2f"):
        go(state, [update] * 4, "median", f=2)
    with pytest.raises(PreconditionError, match="n > 2f"):
        go(state, [])
    for broken in (
        replace(update, parameters_D=update.parameters_D * torch.nan),
        replace(update, parameters_D=update.parameters_D[1:]),
        replace(update, int_buffers_I=update.int_buffers_I.to(torch.int32)),
        replace(update, float_buffers_B=-torch.ones_like(update.float_buffers_B)),
    ):
        with pytest.raises(MisuseError, match="let through"):
            go(state, [update, broken])


def test_a_process_that_flushes_subnormals_is_told_so() -> None:
    state = AgreedState.initial(normed(nn.BatchNorm1d))
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        with pytest.raises(MisuseError, match="subnormal"):
            go(state, [gradient_only(state)])
    finally:
        torch.set_flush_denormal(False)
    go(state, [gradient_only(state)])


BN_LAYOUT = StateLayout.from_module(nn.BatchNorm1d(1))


def rows(*pairs: tuple[float, float]) -> list[Tensor]:
    return [torch.tensor(pair) for pair in pairs]


def test_pooled_variance_is_that_of_the_union_of_data() -> None:
    data = [
        torch.randn(500, generator=torch.Generator().manual_seed(i)) * (i + 1) + i for i in range(4)
    ]
    moments = rows(*((float(x.mean()), float(x.var(correction=0))) for x in data))
    union = torch.cat(data)
    expected = torch.stack([union.mean(), union.var(correction=0)])
    assert torch.allclose(pool_float_buffers(moments, BN_LAYOUT, 0), expected, rtol=1e-5)


def test_a_large_mean_does_not_cancel_the_variance() -> None:
    pooled = pool_float_buffers(rows((1e5, 1e-3), (1e5, 3e-3), (1e5, 2e-3)), BN_LAYOUT, 0)
    assert pooled.tolist() == pytest.approx([1e5, 2e-3], rel=1e-6)
    # The textbook form in the float32 that travels has lost it:
    second = torch.tensor(1e5).square() + torch.tensor(2e-3)
    assert float(second - torch.tensor(1e5).square()) == 0.0


def test_liars_cannot_collapse_the_variance() -> None:
    honest = rows((9.5, 1.0), (9.8, 0.9), (10.0, 1.1), (10.2, 1.0), (10.5, 1.0))
    for lie in ((1e6, 0.0), (-1e6, 0.0), (10.5, 0.0), (0.0, 1e30), (3e38, 3e38)):
        mean, variance = pool_float_buffers([*honest, *rows(lie, lie)], BN_LAYOUT, 2).tolist()
        assert 9.5 <= mean <= 10.5
        assert 0.9 <= variance <= 2.1


def test_equal_buffers_are_left_bit_for_bit() -> None:
    layout = StateLayout((replace(BN_LAYOUT.tensors[2], name="table", shape=(3,)),))
    row = torch.tensor([0.1, 1 / 3, 3e38])
    for n in (1, 2, 3, 5, 7):
        assert torch.equal(pool_float_buffers([row] * n, layout, (n - 1) // 3), row)


def test_negative_zero_does_not_depend_on_the_order_of_a_sort() -> None:
    layout = StateLayout((replace(BN_LAYOUT.tensors[2], name="table", shape=(1,)),))
    zeros = rows((-0.0,), (0.0,), (-0.0,))
    for order in itertools.permutations(zeros):
        pooled = pool_float_buffers(list(order), layout, 1)
        assert pooled.numpy().tobytes() == bytes(4)


@pytest.mark.parametrize(
    ("column", "median"),
    [
        ([5], 5),
        ([1, 2], 1),
        ([-1, -2], -2),
        ([3, 1, 2], 2),
        ([80, 80, 80, 0], 80),
        ([2**63 - 1, 2**63 - 1], 2**63 - 1),
        ([-(2**63), -(2**63)], -(2**63)),
        ([-(2**63), 2**63 - 1], -1),
        ([2**63 - 1, 2**63 - 3], 2**63 - 2),
    ],
)
def test_integer_median(column: list[int], median: int) -> None:
    assert integer_median(torch.tensor(column)[:, None]).tolist() == [median]
