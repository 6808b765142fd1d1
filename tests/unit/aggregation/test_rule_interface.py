"""The interface that runs build on: names, needs, history, dtypes, info, refusals."""

import inspect
from collections.abc import Callable

import pytest
import torch

from torchbft import robust
from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors import aggregation
from torchbft.tensors.aggregation.compose import STANDARD


def normal(n: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, *shape, generator=torch.Generator().manual_seed(seed))


def test_composition_by_name_and_by_object_are_the_same_rule() -> None:
    by_object = robust.Compose(robust.ARC(), robust.NNM(), robust.TrimmedMean())
    by_name = robust.get("arc+nnm+trimmed_mean")
    assert by_object.name == by_name.name == "arc+nnm+trimmed_mean"
    x_ND = normal(7, 100)
    assert torch.equal(by_object(x_ND, 2), by_name(x_ND, 2))
    assert not torch.equal(by_name(x_ND, 2), robust.get("nnm+arc+trimmed_mean")(x_ND, 2))


@pytest.mark.parametrize("name", ["", "nnm", "krum+nnm", "nnm++mean", "best", "trimmed_mean+arc"])
def test_unknown_names_are_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(PreconditionError) as caught:
        robust.get(name)
    assert all(known in caught.value.hint for known in robust.known())


@pytest.mark.parametrize(
    "build",
    [
        lambda: robust.Compose(),
        lambda: robust.Compose(robust.NNM()),  # type: ignore[arg-type]
        lambda: robust.Compose(robust.Krum(), robust.NNM()),
        lambda: robust.Compose(robust.Median(), robust.Mean()),
        lambda: robust.Compose(robust.ARC(), robust.get("nnm+median")),
    ],
)
def test_a_composition_is_stages_and_then_one_rule(build: Callable[[], object]) -> None:
    with pytest.raises(MisuseError):
        build()


@pytest.mark.parametrize(
    "build",
    [
        lambda: robust.NormClipping(threshold=0.0),
        lambda: robust.CentredClipping(threshold=-1.0),
        lambda: robust.CentredClipping(threshold=float("nan")),
        lambda: robust.CentredClipping(iterations=0),
    ],
)
def test_parameters_without_meaning_are_refused(build: Callable[[], object]) -> None:
    with pytest.raises(PreconditionError):
        build()


@pytest.mark.parametrize(("n", "f"), [(1, 0), (3, 0), (4, 1), (5, 2), (7, 2), (13, 4), (4, 2)])
def test_rules_that_fit_are_those_whose_check_passes(n: int, f: int) -> None:
    fitting = robust.rules_that_fit(n, f)
    for name in STANDARD:
        if name in fitting:
            robust.get(name).check(n=n, f=f)
        else:
            with pytest.raises(PreconditionError):
                robust.get(name).check(n=n, f=f)
    assert bool(fitting) == (2 * f < n)


def test_five_accepted_of_seven_rule_out_krum_but_not_the_default() -> None:
    fitting = robust.rules_that_fit(5, 2)
    assert "arc+nnm+trimmed_mean" in fitting
    assert not {"krum", "multi_krum", "mean"} & set(fitting)


def test_a_mean_with_liars_is_allowed_only_behind_a_bound() -> None:
    robust.get("norm_clipping+mean").check(n=7, f=2)
    for name in ("mean", "arc+mean", "nnm+mean"):
        with pytest.raises(PreconditionError):
            robust.get(name).check(n=7, f=2)


@pytest.mark.parametrize("name", STANDARD)
def test_info_gives_shares_of_sum_one_and_the_norms(name: str) -> None:
    x_ND = normal(9, 400)
    f = 0 if name == "mean" else 2
    result_D, info = robust.get(name)(x_ND, f, return_info=True)
    assert torch.equal(result_D, robust.get(name)(x_ND, f)), "asking for info changes no bit"
    assert sum(info.weights_N) == pytest.approx(1.0)
    assert min(info.weights_N) >= 0.0
    assert info.refused_by_norm == ()
    assert info.norms_N == pytest.approx(x_ND.norm(dim=1).tolist(), rel=1e-5)


def test_info_of_a_span_rule_is_its_weights() -> None:
    x_ND = normal(9, 400)
    result_D, info = robust.MultiKrum()(x_ND, 2, return_info=True)
    assert sorted(set(info.weights_N)) == [0.0, pytest.approx(1 / 5)]
    weights_N = torch.tensor(info.weights_N)
    assert torch.allclose(weights_N @ x_ND, result_D, atol=1e-6)


def test_info_of_a_trimmed_mean_counts_the_coordinates_kept() -> None:
    x_ND = torch.tensor([[0.0, 0, 0, 0], [1, 1, 1, -1], [2, 2, 2, 9]])
    _, info = robust.TrimmedMean()(x_ND, 1, return_info=True)
    assert info.weights_N == [0.25, 0.75, 0.0]


def test_shares_of_long_rows_are_those_of_evenly_spaced_coordinates() -> None:
    """Row 0 lies in the middle in the first half of the coordinates, row 2 in the second."""
    d = 40_000
    x_ND = normal(3, d).clamp(-1, 1) / 100 + torch.tensor([[0.0], [1.0], [0.5]])
    x_ND[0, : d // 2], x_ND[2, : d // 2] = 0.5, 0.0
    _, info = robust.Median()(x_ND, 1, return_info=True)
    assert info.weights_N == pytest.approx([0.5, 0.0, 0.5], abs=1e-3)


def test_info_after_mixing_gives_the_share_through_all_mixtures() -> None:
    """Row 0 is in nobody's neighbourhood but its own, whose mixture is always trimmed."""
    x_ND = torch.cat([torch.full((1, 50), 60.0), normal(6, 50)])
    _, info = robust.get("nnm+trimmed_mean")(x_ND, 1, return_info=True)
    assert info.weights_N[0] == 0.0
    assert min(info.weights_N[1:]) > 0.05


def test_rules_without_history_have_an_empty_state() -> None:
    for name in robust.known()[:6]:
        rule = robust.get(name)
        state = rule.init(10)
        assert state == {}
        _, after, info = rule.aggregate(normal(7, 10), 0, state)
        assert after == {}
        assert isinstance(info, robust.AggregationInfo)


def test_history_passes_through_a_composition() -> None:
    rule = robust.get("arc+centred_clipping")
    x_ND = normal(7, 30)
    result_D, state, _ = rule.aggregate(x_ND, 2, rule.init(30))
    assert torch.equal(state["centre"], result_D)
    assert state["centre"].data_ptr() != result_D.data_ptr()
    again_D, _, _ = rule.aggregate(x_ND, 2, state)
    assert not torch.equal(again_D, result_D)
    assert torch.equal(rule(x_ND, 2, state=state), again_D)


@pytest.mark.parametrize("state", [{}, {"centre": torch.zeros(4)}, {"other": torch.zeros(30)}])
def test_a_foreign_history_is_refused(state: dict[str, torch.Tensor]) -> None:
    with pytest.raises(MisuseError, match="history"):
        robust.CentredClipping().aggregate(normal(7, 30), 2, state)


def test_history_keeps_float32_for_half_precision_and_float64_for_float64() -> None:
    rule = robust.CentredClipping()
    x_ND = normal(7, 30)
    for dtype, kept in [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)]:
        result_D, state, _ = rule.aggregate(x_ND.to(dtype), 2, rule.init(30))
        assert (result_D.dtype, state["centre"].dtype) == (dtype, kept)
        rule.aggregate(x_ND.to(dtype), 2, state)


def test_unknown_mode_is_refused() -> None:
    with pytest.raises(MisuseError, match="mode"):
        robust.Mean()(normal(3, 3), 0, mode="exact")


@pytest.mark.parametrize("name", STANDARD)
def test_shapes_beyond_vectors_come_back_as_they_were(name: str) -> None:
    f = 0 if name == "mean" else 1
    rule = robust.get(name)
    assert rule(normal(5, 3, 4), f).shape == (3, 4)
    assert rule(normal(5), f).shape == ()
    assert rule(normal(5, 0), f).shape == (0,)
    assert torch.equal(rule(normal(5, 3, 4), f).flatten(), rule(normal(5, 3, 4).flatten(1), f))


def test_one_row_is_its_own_aggregate() -> None:
    x_ND = normal(1, 20)
    for name in robust.rules_that_fit(1, 0):
        if "centred" not in name:
            assert torch.equal(robust.get(name)(x_ND, 0), x_ND[0]), name


def test_every_public_rule_says_need_cost_and_source() -> None:
    for name in robust.known():
        cls = type(robust.get(name)) if name in STANDARD or name == "krum" else None
        cls = cls or {"nnm": robust.NNM, "arc": robust.ARC}.get(name, robust.NormClipping)
        text = inspect.getdoc(cls) or ""
        assert "eed" in text, name
        assert "Source:" in text or name == "mean", name


def test_short_names_are_the_same_objects() -> None:
    for name in robust.__all__:
        assert getattr(robust, name) is getattr(aggregation, name)
