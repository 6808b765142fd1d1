"""Rules that choose or weigh rows as a group, and those that need something of the caller's."""

import time
from itertools import combinations, product

import numpy as np
import pytest
import torch

from torchbft import robust
from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors.aggregation.bulyan import RepeatedKrum
from torchbft.tensors.aggregation.covers import cover_fits, first_without_conflict, members
from torchbft.tensors.aggregation.selection import MOST_SETS
from torchbft.tensors.aggregation.spectrum import top_eigenpairs


def normal(seed: int, n: int, d: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


# --- covers ----------------------------------------------------------------------------------


def random_graph(seed: int, n: int, share: float) -> list[int]:
    rng, conflicts = np.random.default_rng(seed), [0] * n
    for a, b in combinations(range(n), 2):
        if rng.random() < share:
            conflicts[a] |= 1 << b
            conflicts[b] |= 1 << a
    return conflicts


def free_sets(conflicts: list[int], budget: int) -> list[tuple[int, ...]]:
    """All sets of n − budget rows without a conflict, by trying every one."""
    n = len(conflicts)
    return [
        rows
        for rows in combinations(range(n), n - budget)
        if not any(conflicts[a] >> b & 1 for a, b in combinations(rows, 2))
    ]


@pytest.mark.parametrize(("seed", "share"), list(product(range(12), (0.1, 0.25, 0.5, 0.9))))
def test_the_search_finds_what_trying_every_set_finds(seed: int, share: float) -> None:
    conflicts = random_graph(seed, 9, share)
    for budget in range(9):
        free = free_sets(conflicts, budget)
        assert cover_fits(conflicts, (1 << 9) - 1, budget) == bool(free)
        if free:
            assert tuple(first_without_conflict(conflicts, budget)[: 9 - budget]) == free[0]


def test_rings_and_chains_need_half_of_their_edges() -> None:
    ring = [1 << (i - 1) % 7 | 1 << (i + 1) % 7 for i in range(7)]
    assert [cover_fits(ring, 127, budget) for budget in (3, 4)] == [False, True]
    assert [cover_fits(ring, 63, budget) for budget in (2, 3)] == [False, True]
    assert members(0b101001) == [0, 3, 5]


# --- spectrum --------------------------------------------------------------------------------


@pytest.mark.parametrize("power", [-200, 0, 200])
def test_the_top_eigenpair_is_lapacks(power: int) -> None:
    x_SNK = np.random.default_rng(1).standard_normal((20, 8, 5)) * 2.0 ** (power / 2)
    matrices_SNN = x_SNK @ x_SNK.transpose(0, 2, 1)
    values_S, vectors_SN = top_eigenpairs(matrices_SNN)
    exact_SN, _ = np.linalg.eigh(matrices_SNN)
    np.testing.assert_allclose(values_S, exact_SN[:, -1], rtol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(vectors_SN, axis=1), 1.0, rtol=1e-12)


def test_no_matrix_hides_its_top_direction_from_the_search() -> None:
    """Row 0 is the longest, but the four others together spread more: power iteration from the
    longest row never leaves it."""
    gram_NN = np.zeros((5, 5))
    gram_NN[0, 0], gram_NN[1:, 1:] = 3.0, 1.0
    (value,), (vector_N,) = top_eigenpairs(gram_NN[None])
    assert value == pytest.approx(4.0)
    np.testing.assert_allclose(np.abs(vector_N), [0.0, 0.5, 0.5, 0.5, 0.5], atol=1e-9)


def test_a_matrix_of_zeros_has_no_direction() -> None:
    (value,), (vector_N,) = top_eigenpairs(np.zeros((1, 4, 4)))
    assert (value, vector_N.tolist()) == (0.0, [0.0] * 4)


# --- minimum diameter ------------------------------------------------------------------------


def chosen(info: robust.AggregationInfo) -> tuple[int, ...]:
    return tuple(row for row, weight in enumerate(info.weights_N) if weight > 0)


def diameter(x_ND: torch.Tensor, rows: tuple[int, ...]) -> float:
    return float(torch.cdist(x_ND[list(rows)].double(), x_ND[list(rows)].double()).max())


@pytest.mark.parametrize(("n", "f"), [(5, 1), (9, 3), (11, 5), (12, 4), (6, 0)])
def test_mda_has_the_least_diameter_in_any_order_of_rows(n: int, f: int) -> None:
    x_ND = normal(n, n, 30)
    least = min(diameter(x_ND, rows) for rows in combinations(range(n), n - f))
    for order in (torch.arange(n), torch.arange(n).flip(0)):
        _, info = robust.MDA()(x_ND[order], f, return_info=True)
        assert len(chosen(info)) == n - f
        assert diameter(x_ND[order], chosen(info)) == pytest.approx(least, rel=1e-5)


def test_mda_takes_the_lowest_rows_of_several_sets() -> None:
    x_ND = torch.tensor([[0.0], [1.0], [2.0], [3.0], [4.0]])
    assert chosen(robust.MDA()(x_ND, 2, return_info=True)[1]) == (0, 1, 2)
    assert chosen(robust.MDA()(torch.ones(5, 2), 2, return_info=True)[1]) == (0, 1, 2)


def test_mda_of_sixty_four_rows_is_exact_and_soon_done() -> None:
    """64 over 16 is 5e14 sets. Time is that of the process, with a margin of tenfold."""
    x_ND = normal(3, 64, 400)
    x_ND[::4] = x_ND[::4] * 3 + 1
    start = time.process_time()
    _, info = robust.MDA()(x_ND, 16, return_info=True)
    assert chosen(info) == tuple(row for row in range(64) if row % 4)
    assert time.process_time() - start < 30.0


# --- others ----------------------------------------------------------------------------------


def test_smea_refuses_a_search_without_end_and_names_the_limit() -> None:
    robust.SMEA().check(n=20, f=5)
    with pytest.raises(PreconditionError, match=f"n over f <= {MOST_SETS}"):
        robust.SMEA().check(n=30, f=10)


def test_bulyan_picks_rows_one_after_another() -> None:
    x_ND = normal(5, 11, 60)
    x_ND[3], x_ND[8] = x_ND[3] + 9.0, x_ND[8] - 9.0
    gram_NN = (x_ND @ x_ND.t()).double().numpy()
    picked_MN = RepeatedKrum().select(gram_NN, n=11, f=2, refs={})
    assert picked_MN.shape == (7, 11)
    assert picked_MN[:, [3, 8]].sum() == 0.0
    assert picked_MN.sum(1).tolist() == [1.0] * 7


@pytest.mark.parametrize(("n", "f"), [(3, 0), (7, 1), (11, 2), (15, 3)])
def test_bulyan_works_at_its_least_n_and_not_below(n: int, f: int) -> None:
    assert torch.isfinite(robust.Bulyan()(normal(6, n, 20), f)).all()
    with pytest.raises(PreconditionError, match="n >= 4f"):
        robust.Bulyan().check(n=n - 1, f=f)


def test_caf_gives_liars_along_one_direction_no_weight() -> None:
    x_ND = normal(7, 12, 200)
    x_ND[:3] += 2.0
    _, info = robust.CAF()(x_ND, 3, return_info=True)
    assert max(info.weights_N[:3]) < 0.01 < min(info.weights_N[3:])


def test_dnc_with_a_larger_c_leaves_out_more_rows() -> None:
    x_ND = normal(8, 9, 50)
    for c, left in ((0.5, 8), (1.0, 7), (2.0, 5)):
        assert len(chosen(robust.DnC(c=c)(x_ND, 2, return_info=True)[1])) == left
    with pytest.raises(PreconditionError):
        robust.DnC(c=2.0).check(n=5, f=3)


def test_sign_majority_is_zero_on_a_draw_and_blind_to_length() -> None:
    x_ND = torch.tensor([[3.0, -1e20, 0.0], [-0.1, -1.0, 2.0], [9.0, 4.0, -5.0]])
    result_D, info = robust.SignMajority()(x_ND, 1, return_info=True)
    assert result_D.tolist() == [1.0, -1.0, 0.0]
    assert info.weights_N == pytest.approx([3 / 5, 1 / 5, 1 / 5])


def test_without_history_clipping_starts_at_a_row_among_the_majority() -> None:
    """A shift of all rows shifts the result; the start at zero would not allow that."""
    x_ND = normal(9, 7, 80)
    x_ND[:2] = 40.0
    rule = robust.CentredClipping(history=False)
    assert rule.init(80) == {}
    assert float((rule(x_ND + 512, 2) - 512 - rule(x_ND, 2)).abs().max()) < 1e-3
    away = robust.CentredClipping()(x_ND + 512, 2) - 512 - robust.CentredClipping()(x_ND, 2)
    assert float(away.norm()) > 0.1


# --- weights and inputs of the caller --------------------------------------------------------


def test_weighted_mean_is_the_weighted_mean() -> None:
    x_ND = normal(10, 3, 30)
    found_D = robust.WeightedMean([1, 2, 5])(x_ND, 0)
    assert torch.allclose(found_D, (x_ND[0] + 2 * x_ND[1] + 5 * x_ND[2]) / 8, atol=1e-6)
    through_D = robust.Compose(robust.NNM(), robust.WeightedMean([1, 2, 5]))(x_ND, 0)
    assert torch.allclose(through_D, x_ND.mean(0), atol=1e-6)


@pytest.mark.parametrize("weight", [1e9, 0.0, -3.0, float("nan"), float("inf")])
def test_weights_that_would_own_or_turn_the_average_are_refused(weight: float) -> None:
    with pytest.raises(PreconditionError, match="row"):
        robust.WeightedMean([100, 90, weight, 110, 95, 100])


def test_weighted_mean_needs_as_many_weights_as_rows_and_no_liar() -> None:
    rule = robust.WeightedMean([1.0, 1.0, 2.0])
    for n, f in ((4, 0), (3, 1)):
        with pytest.raises(PreconditionError, match="one weight per row"):
            rule.check(n=n, f=f)
    with pytest.raises(PreconditionError):
        robust.Compose(robust.NormClipping(), robust.WeightedMean([1.0] * 5)).check(n=5, f=1)


@pytest.mark.parametrize("name", ["nna", "fltrust", "arc+fltrust"])
def test_rules_that_need_a_vector_say_so_when_it_is_missing(name: str) -> None:
    with pytest.raises(MisuseError, match=r"own|root"):
        robust.get(name)(normal(11, 5, 9), 1)
    key = "own" if name == "nna" else "root"
    with pytest.raises(MisuseError, match="non-finite"):
        robust.get(name)(normal(11, 5, 9), 1, state={key: torch.full((9,), float("nan"))})


def test_fltrust_gives_nothing_when_nobody_agrees() -> None:
    root_D = torch.ones(6)
    rule = robust.FLTrust()
    assert rule(-torch.ones(4, 6), 3, state={"root": root_D}).tolist() == [0.0] * 6
    assert rule(torch.zeros(4, 6), 3, state={"root": root_D}).tolist() == [0.0] * 6
    assert rule(torch.ones(4, 6), 3, state={"root": torch.zeros(6)}).tolist() == [0.0] * 6


def test_fltrust_withstands_a_majority_of_liars_and_keeps_the_roots_length() -> None:
    x_ND = torch.cat([-50 * torch.ones(4, 6), torch.ones(1, 6)])
    found_D = robust.FLTrust()(x_ND, 4, state={"root": 2 * torch.ones(6)})
    assert torch.allclose(found_D, 2 * torch.ones(6), atol=1e-5)


def test_zeno_averages_the_rows_that_score_best() -> None:
    x_ND = normal(12, 6, 15)
    target_D = x_ND[4]

    def closeness(update_D: torch.Tensor) -> float:
        return -float((update_D - target_D).norm())

    best = sorted(range(6), key=lambda row: -closeness(x_ND[row]))[:4]
    found_D, info = robust.Zeno(closeness)(x_ND, 2, return_info=True)
    assert torch.allclose(found_D, x_ND[best].mean(0), atol=1e-6)
    assert chosen(info) == tuple(sorted(best))


def test_zeno_penalises_length_and_takes_nan_for_the_worst() -> None:
    x_ND = torch.tensor([[9.0], [1.0], [2.0], [3.0]])
    scores = iter([5.0, 1.0, float("nan"), 1.0])
    _, info = robust.Zeno(lambda _: next(scores), penalty=0.1)(x_ND, 2, return_info=True)
    assert chosen(info) == (1, 3)
    with pytest.raises(MisuseError, match="single updates"):
        robust.Compose(robust.NNM(), robust.Zeno(lambda _: 0.0))(x_ND, 1)


# --- bucketing and names ---------------------------------------------------------------------


def test_bucketing_averages_disjoint_groups_in_an_order_of_the_round() -> None:
    gram_NN = np.diag(np.arange(1.0, 8.0))
    mixing_BN = robust.Bucketing(size=3).select(gram_NN, n=7, f=1, refs={})
    assert mixing_BN.shape == (3, 7)
    assert sorted((mixing_BN > 0).sum(1).tolist()) == [1, 3, 3]
    np.testing.assert_allclose(mixing_BN.sum(1), 1.0)
    assert ((mixing_BN > 0).sum(0) == 1).all()
    again = [
        robust.Bucketing(size=3, seed=seed).select(gram_NN * factor, n=7, f=1, refs={})
        for seed, factor in ((0, 1), (1, 1), (0, 2))
    ]
    assert np.array_equal(again[0], mixing_BN)
    assert not np.array_equal(again[1], mixing_BN)
    assert not np.array_equal(again[2], mixing_BN)


def test_bucketing_counts_the_buckets_that_the_next_rule_sees() -> None:
    robust.get("bucketing+median").check(n=9, f=2)
    for name, n, f in (("bucketing+median", 8, 2), ("bucketing+krum", 9, 2)):
        with pytest.raises(PreconditionError):
            robust.get(name).check(n=n, f=f)
    x_ND = normal(13, 9, 20)
    found_D = robust.get("bucketing(size=1)+trimmed_mean")(x_ND, 2)
    assert torch.allclose(found_D, robust.TrimmedMean()(x_ND, 2), atol=1e-6)


def test_parameters_stand_in_brackets() -> None:
    rule = robust.get("bucketing(size=3, seed=7)+multi_krum(m=2,variant=allouah)")
    (stage,) = rule.stages
    assert isinstance(stage, robust.Bucketing)
    assert isinstance(rule.last, robust.MultiKrum)
    assert (stage.size, stage.seed, rule.last.m, rule.last.variant) == (3, 7, 2, "allouah")


@pytest.mark.parametrize(
    "name",
    [
        *("static_clipping+mean", "zeno", "krum(m=2)", "krum(variant=other)", "dnc(c=9)"),
        *("bucketing(size=0)+median", "bucketing(seed=-1)+median", "krum)", "zeno(score=3)"),
    ],
)
def test_parameters_that_are_missing_or_wrong_are_refused(name: str) -> None:
    with pytest.raises(PreconditionError):
        robust.get(name)


@pytest.mark.parametrize("name", robust.known())
def test_every_rule_is_described_by_need_cost_and_source(name: str) -> None:
    found = robust.describe(name)
    assert "f" in found.need or "n" in found.need
    assert found.cost.startswith("O(")
    assert name == "mean" or any(year in found.source for year in map(str, range(1980, 2027)))


def test_an_unknown_rule_is_not_described() -> None:
    with pytest.raises(PreconditionError, match="no aggregation rule"):
        robust.describe("best")
