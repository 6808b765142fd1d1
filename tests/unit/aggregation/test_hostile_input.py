"""Hostile and degenerate input, on every rule and stage that is registered."""

import numpy as np
import pytest
import torch

from torchbft import robust
from torchbft.primitives.errors import MisuseError, PreconditionError

GIVEN = {"static_clipping": "static_clipping(threshold=9)"}
STAGES = ("nnm", "arc", "norm_clipping", "static_clipping", "bucketing")
MODES = ("deterministic", "fast")
CHOOSING = ("krum", "multi_krum", "mda", "smea", "faba", "dnc", "nna", "caf", "nnm+krum")
"""Rules that leave out whole rows where these are far from the rest."""
CLOSE_TO_ZERO = ("clipping", "arc", "fltrust", "sign", "cge")
"""Parts that measure from zero: a shift of all rows does not shift their result."""


def named(name: str) -> robust.Rule:
    """The rule of this name; a stage stands before a median; Zeno scores the distance to 2."""
    if name == "zeno":
        return robust.Zeno(lambda row_D: -float((row_D.double() - 2.0).norm()))
    return robust.get(f"{GIVEN.get(name, name)}+median" if name in STAGES else name)


def run(
    rule: robust.Rule, x_ND: torch.Tensor, f: int, mode: str = "deterministic"
) -> tuple[torch.Tensor, robust.AggregationInfo]:
    """Call it; the vector of one's own, where a rule needs it, is the last row."""
    state = {key: x_ND[-1].float() for key in rule.last.inputs} if rule.init(1) else {}
    history = {**rule.init(x_ND[0].numel()), **state}
    return rule(x_ND, f, state=history, mode=mode, return_info=True)


def normal(seed: int, n: int, d: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


EVERY = robust.known()
ROBUST = [name for name in EVERY if name not in ("mean", "weighted_mean")]


def largest_f(name: str, n: int) -> int:
    return max(f for f in range(n) if _fits(named(name), n, f))


def _fits(rule: robust.Rule, n: int, f: int) -> bool:
    try:
        rule.check(n=n, f=f)
    except PreconditionError:
        return False
    return True


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", EVERY)
def test_a_value_that_is_no_number_is_refused_with_its_place(name: str, bad: float) -> None:
    x_ND = normal(1, 12, 30)
    x_ND[4, 17] = bad
    with pytest.raises(MisuseError, match="row 4: non-finite value at coordinate 17"):
        run(named(name), x_ND, 0)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ROBUST)
def test_rows_of_1e20_leave_a_result_no_longer_than_the_honest_rows(name: str, mode: str) -> None:
    n, f = 12, 2
    x_ND = normal(2, n, 300)
    longest = float(x_ND[f:].norm(dim=1).max())
    x_ND[:f] = torch.tensor([1e20, -1e20])[:, None]
    result_D, info = run(named(name), x_ND, f, mode)
    assert float(result_D.norm()) <= max(longest, 300**0.5 if "sign" in name else 0.0) * (1 + 1e-5)
    assert np.isfinite(info.weights_N).all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [0.0, -0.0, 2.5, -1e-30])
@pytest.mark.parametrize("name", EVERY)
def test_equal_rows_give_that_row_and_never_a_negative_zero(
    name: str, value: float, mode: str
) -> None:
    f = min(2, largest_f(name, 12))
    result_D, info = run(named(name), torch.full((12, 50), value), f, mode)
    expected = float(np.sign(value)) if "sign" in name else min(value, 9.0 / 50**0.5, key=abs)
    expected = expected if name == "static_clipping" or "sign" in name else value
    assert torch.allclose(result_D, torch.full((50,), expected), rtol=1e-5, atol=0.0)
    assert not torch.signbit(result_D[result_D == 0.0]).any() or mode == "fast"
    assert np.isfinite(info.weights_N).all()


@pytest.mark.parametrize("name", EVERY)
def test_each_rule_works_at_its_least_n_and_refuses_one_less(name: str) -> None:
    for f in (0, 1, 2):
        if name in ("mean", "weighted_mean") and f:
            continue
        least = next(n for n in range(1, 99) if _fits(named(name), n, f))
        result_D, _ = run(named(name), normal(f, least, 40), f)
        assert torch.isfinite(result_D).all()
        with pytest.raises(PreconditionError, match=f"n={least - 1}, f={f}"):
            named(name).check(n=least - 1, f=f)
        with pytest.raises(PreconditionError):
            named(name).check(n=least, f=-1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EVERY)
def test_with_no_liars_and_one_row_the_result_is_that_row(name: str, mode: str) -> None:
    if name in ("krum", "multi_krum", "bulyan"):
        return  # need n >= 3
    x_ND = normal(3, 1, 40)
    result_D, _ = run(named(name), x_ND, 0, mode)
    expected = x_ND[0].sign() if "sign" in name else x_ND[0]
    assert torch.allclose(result_D, expected, atol=1e-6)


@pytest.mark.parametrize("name", ROBUST)
def test_the_order_of_rows_does_not_matter(name: str) -> None:
    """Two rules choose by the order of rows where their definition leaves a choice."""
    if name in ("mda", "bucketing"):
        return  # mda: see test_rules_by_group; bucketing: random by design
    x_ND = normal(4, 12, 70)
    x_ND[:2] *= 5
    x_ND[-1] = x_ND[2:].mean(0)
    order = [*np.random.default_rng(4).permutation(11).tolist(), 11]
    (result_D, info), (shuffled_D, shuffled) = (run(named(name), x, 2) for x in (x_ND, x_ND[order]))
    assert torch.allclose(result_D, shuffled_D, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose([info.weights_N[i] for i in order], shuffled.weights_N, atol=1e-6)


@pytest.mark.parametrize("name", [n for n in ROBUST if not any(c in n for c in CLOSE_TO_ZERO)])
def test_adding_a_constant_moves_the_result_by_it(name: str) -> None:
    """‖x‖²/‖x − y‖² is 1e9; values lie on a grid, so that the shift itself rounds nothing."""
    if name in ("zeno", "bucketing"):
        return  # a score of its own; an order drawn from the rows
    grid_ND = np.random.default_rng(5).integers(-511, 512, size=(12, 500)) / 2.0**14
    grid_ND[:2] += 2.0**-7
    x_ND = torch.tensor(grid_ND, dtype=torch.float32)
    assert float((x_ND + 1000).square().sum(1).min() / torch.pdist(x_ND).square().max()) > 1e8
    for mode in MODES:
        result_D, info = run(named(name), x_ND + 1000, 2, mode)
        exact_D, here = run(named(name), x_ND.double(), 2, mode)
        units = 1 if mode == "deterministic" else 4  # fast sums in float32
        assert float((result_D.double() - (exact_D + 1000)).abs().max()) <= units * 2.0**-13
        if name != "nnm":  # rounded mixtures may tie at the edge of the kept range
            np.testing.assert_allclose(info.weights_N, here.weights_N, atol=1e-6)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CHOOSING)
def test_liars_far_from_the_rest_get_no_weight_however_near_the_rest_is(
    name: str, mode: str
) -> None:
    """Case A02: values near 1 with a spread of 3e-5, liars shifted by five deviations."""
    x_ND = 1 + 3e-5 * normal(6, 13, 20_000)
    x_ND[:3] += 5 * 3e-5
    _, info = run(named(name), x_ND, 3, mode)
    assert max(info.weights_N[:3]) < 1e-3


@pytest.mark.parametrize("name", [*CHOOSING[:7], "cge", "zeno"])
def test_ties_are_broken_by_peer_id(name: str) -> None:
    """Five equal rows: those of the lowest ids are kept."""
    _, info = run(named(name), torch.full((5, 6), 3.0), 1)
    kept = [row for row, weight in enumerate(info.weights_N) if weight > 0]
    assert kept == list(range(len(kept)))


@pytest.mark.parametrize("name", EVERY)
def test_both_modes_agree(name: str) -> None:
    f = min(2, largest_f(name, 12))
    x_ND = normal(7, 12, 900) + 0.3
    x_ND[:2] = x_ND[:2] * 4 - 1
    if name == "bucketing":
        return  # the order follows from the bits of the Gram matrix
    exact_D, fast_D = (run(named(name), x_ND, f, mode)[0] for mode in MODES)
    assert torch.allclose(exact_D, fast_D, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_every_float_dtype_comes_back_and_inputs_stay_untouched(
    name: str, dtype: torch.dtype
) -> None:
    f = min(1, largest_f(name, 12))
    x_ND = normal(9, 12, 64).to(dtype)
    before_ND = x_ND.clone()
    result_D, _ = run(named(name), x_ND, f)
    assert result_D.dtype == dtype
    result_D.add_(1.0)
    assert torch.equal(x_ND, before_ND)


# --- proven bounds ---------------------------------------------------------------------------

PROVEN = [
    *("median", "trimmed_mean", "geometric_median", "mda", "smea", "krum(variant=allouah)"),
    *(
        "nnm+trimmed_mean",
        "nnm+median",
        "arc+nnm+trimmed_mean",
        "nnm+smea",
        "nnm+krum(variant=allouah)",
    ),
]


def excess(result_D: torch.Tensor, honest_ND: torch.Tensor) -> float:
    """‖result − x̄_S‖² in units of the honest variance."""
    centre_D = honest_ND.mean(0)
    variance = float((honest_ND - centre_D).square().sum(1).mean())
    return float((result_D - centre_D).square().sum()) / variance


def worst(rule: robust.Rule, n: int, f: int, seed: int) -> float:
    """The greatest excess that a random search over lies and their lengths finds."""
    rng = np.random.default_rng(seed)
    honest_ND = normal(seed, n - f, 6).double() * torch.logspace(-0.7, 0.7, n - f)[:, None]
    directions = [honest_ND.mean(0), honest_ND.std(0), honest_ND[0], *normal(seed, 3, 6)]
    found, best = 0.0, honest_ND.mean(0).expand(f, -1)
    for step in range(40):
        along_D = directions[step % len(directions)].double() * 10.0 ** rng.uniform(-1, 1.5)
        base = best if step % 2 else honest_ND.mean(0).expand(f, -1)
        lies_ND = base + along_D * float(rng.choice([-1.0, 1.0]))
        value = excess(rule(torch.cat([lies_ND, honest_ND]), f), honest_ND)
        if value > found:
            found, best = value, lies_ND
    return found


@pytest.mark.parametrize("name", PROVEN)
@pytest.mark.parametrize(("n", "f"), [(5, 1), (7, 2), (11, 4)])
def test_no_lie_that_a_search_finds_breaks_the_proven_bound(name: str, n: int, f: int) -> None:
    rule = robust.get(name)
    kappa = rule.kappa(n, f)
    assert kappa is not None
    assert 0.0 < worst(rule, n, f, n) <= kappa


def test_a_wrong_rule_breaks_the_bound_that_the_search_holds_others_to() -> None:
    """Negative control: a trimmed mean that trims one too few on each side, and a mean."""

    class TrimsTooFew(robust.TrimmedMean):
        def kept(self, n: int, f: int) -> tuple[int, int]:
            return f - 1, n - f + 1

    kappa = robust.TrimmedMean().kappa(7, 2)
    assert worst(robust.TrimmedMean(), 7, 2, 7) <= kappa < worst(TrimsTooFew(), 7, 2, 7)


def test_rules_without_a_published_bound_claim_none() -> None:
    for name in ("krum", "multi_krum", "cge", "faba", "dnc", "meamed", "bulyan", "arc+cge"):
        assert robust.get(name).kappa(11, 2) is None
    assert robust.get("nnm+mean").kappa(9, 0) == 0.0
    assert robust.get("nnm+mean").kappa(9, 1) is None
    assert robust.get("bucketing+median").kappa(11, 2) is None
