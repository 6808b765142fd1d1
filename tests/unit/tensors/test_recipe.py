"""What a run file asks of its tensors is built, or refused with what would fit."""

from __future__ import annotations

import msgspec
import pytest
import torch

from torchbft.primitives.errors import ConfigError, PreconditionError
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Aggregation, Outer, RunSpec, Training, new_member
from torchbft.tensors import aggregation
from torchbft.tensors.aggregation.compose import STANDARD
from torchbft.tensors.outer import OuterSGD
from torchbft.tensors.recipe import Recipe, outer_of

TOP_K = "topk:4096:64"


def run_of(
    n: int,
    rule: str = "arc+nnm+trimmed_mean",
    *,
    m_min: int = 0,
    codec: str = "float32",
    f: int = -1,
    **training: object,
) -> RunSpec:
    """A run of n members; by default f = ⌊(n−1)/3⌋ of them may lie and n − f contributions are
    enough."""
    members = tuple(
        new_member(name, SigningKey.derive(b"\1" * 32, name), SigningKey.derive(bytes(32), name))
        for name in (f"peer-{i:02d}" for i in range(n))
    )
    run = RunSpec(
        name="mixed",
        seed="05" * 32,
        members=members,
        f=f,
        training=Training(**training),  # type: ignore[arg-type]
        aggregation=Aggregation(rule=rule, codec=codec, m_min=m_min),
    )
    run.check()
    return run


def fits(rule: str, n: int, f: int) -> bool:
    try:
        aggregation.get(rule).check(n=n, f=f)
    except PreconditionError:
        return False
    return True


def offered(error: ConfigError) -> list[str]:
    """The rules that the hint lists."""
    assert error.hint.startswith("rules that fit: ")
    return error.hint.removeprefix("rules that fit: ").split(", ")


def test_the_default_of_seven_is_built_as_the_run_file_names_it() -> None:
    recipe = Recipe.of(run_of(7, codec="int8"))
    assert recipe.rule.name == "arc+nnm+trimmed_mean"
    assert recipe.codec.name == "int8"
    assert recipe.outer == OuterSGD(0.7, 0.5, nesterov=True)


@pytest.mark.parametrize("rule", STANDARD)
@pytest.mark.parametrize(("n", "m_min"), [(1, 0), (3, 0), (4, 0), (4, 1), (7, 0), (7, 4), (10, 0)])
def test_a_rule_is_taken_if_it_holds_for_m_min_and_refused_with_those_that_do(
    rule: str, n: int, m_min: int
) -> None:
    run = run_of(n, rule, m_min=m_min)
    f = run.contributor_faults.f
    if fits(rule, run.m_min, f):
        assert Recipe.of(run).rule.name == rule
        return
    with pytest.raises(ConfigError) as refused:
        Recipe.of(run)
    assert f"from {run.m_min} contributions with f={f}" in refused.value.what
    assert "[aggregation]" in str(refused.value)
    listed = offered(refused.value)
    if listed == ["none; raise m_min"]:
        assert not any(fits(other, run.m_min, f) for other in STANDARD)
        return
    for other in listed:  # what the hint offers is taken
        assert Recipe.of(run_of(n, other, m_min=m_min)).rule.name == other


@pytest.mark.parametrize(
    ("rule", "n", "m_min", "need"),
    [
        ("mean", 4, 0, "f = 0"),
        ("krum", 4, 0, "n >= 2f + 3"),
        ("multi_krum", 7, 6, "n >= 2f + 3"),
        ("trimmed_mean", 7, 4, "2f < n"),
        ("nnm+median", 10, 6, "2f < n"),
        ("norm_clipping+mean", 4, 2, "2f < n"),
    ],
)
def test_the_refusal_says_which_need_is_not_met(rule: str, n: int, m_min: int, need: str) -> None:
    with pytest.raises(ConfigError, match="needs") as refused:
        Recipe.of(run_of(n, rule, m_min=m_min))
    assert need in refused.value.what
    assert rule not in offered(refused.value)


def test_a_mean_is_refused_among_liars_and_the_default_rule_is_offered() -> None:
    with pytest.raises(ConfigError) as refused:
        Recipe.of(run_of(7, "mean"))
    assert offered(refused.value)[0] == "arc+nnm+trimmed_mean"
    assert "mean" not in offered(refused.value)


def test_f_of_zero_in_the_run_file_allows_the_mean() -> None:
    assert Recipe.of(run_of(7, "mean", f=0)).rule.name == "mean"


def test_the_need_is_of_the_fewest_contributions_and_not_of_all_members() -> None:
    """Krum holds for seven contributions of which two lie, but not for the five that may come."""
    assert fits("krum", 7, 2)
    with pytest.raises(ConfigError, match="n=5, f=2"):
        Recipe.of(run_of(7, "krum"))


def test_a_rule_or_codec_that_nobody_knows_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="no aggregation rule 'average'") as refused:
        Recipe.of(run_of(4, "average"))
    assert "trimmed_mean" in refused.value.hint
    with pytest.raises(ConfigError, match="no codec is named 'float8'") as refused:
        Recipe.of(run_of(4, codec="float8"))
    assert "int8" in refused.value.hint


@pytest.mark.parametrize("codec", [TOP_K, f"{TOP_K}:int8", f"{TOP_K}:float32"])
@pytest.mark.parametrize("rule", ["arc+nnm+trimmed_mean", "median", "krum"])
def test_raw_top_k_is_refused_among_liars_with_what_to_take_instead(rule: str, codec: str) -> None:
    with pytest.raises(ConfigError, match="neither medians nor distances tell a liar") as refused:
        Recipe.of(run_of(10, rule, codec=codec))
    assert "int8" in refused.value.hint
    assert "norm_clipping+mean" in refused.value.hint


def test_raw_top_k_is_taken_without_liars_and_with_the_rule_that_bounds_each_message() -> None:
    assert Recipe.of(run_of(3, "mean", codec=TOP_K)).codec.name == TOP_K
    assert Recipe.of(run_of(7, "norm_clipping+mean", codec=TOP_K)).codec.name == TOP_K


@pytest.mark.parametrize(
    ("contribution", "outer"),
    [
        ("pseudo_gradient", OuterSGD(0.7, 0.5, nesterov=True)),
        ("momentum", OuterSGD(0.7)),
        ("gradient", OuterSGD(0.7)),
    ],
)
def test_only_pseudo_gradients_get_momentum_outside(contribution: str, outer: OuterSGD) -> None:
    assert outer_of(run_of(4, contribution=contribution)) == outer


@pytest.mark.parametrize(
    ("table", "outer"),
    [
        (Outer(learning_rate=1.0, momentum=0.0), OuterSGD(1.0)),
        (Outer(learning_rate=0.3, momentum=0.9, nesterov=False), OuterSGD(0.3, 0.9)),
        (Outer(learning_rate=0.3, momentum=0.9), OuterSGD(0.3, 0.9, nesterov=True)),
    ],
)
def test_the_outer_table_is_followed(table: Outer, outer: OuterSGD) -> None:
    assert outer_of(msgspec.structs.replace(run_of(4), outer=table)) == outer


def test_without_momentum_the_outer_step_is_plain_descent() -> None:
    before_D, gradient_D = torch.tensor([1.0, 2.0]), torch.tensor([0.5, -1.0])
    step = outer_of(run_of(4, contribution="gradient")).step
    after_D, momentum_D = step(before_D, torch.zeros(2), gradient_D)
    assert torch.equal(after_D, before_D - gradient_D * 0.7)
    assert torch.equal(momentum_D, torch.zeros(2))
