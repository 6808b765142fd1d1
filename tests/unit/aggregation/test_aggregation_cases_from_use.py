"""A01 to A11: inputs that broke other aggregation libraries, on every rule where they apply."""

import ast
import inspect
from pathlib import Path

import numpy as np
import pytest
import torch

from torchbft import robust
from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors import aggregation
from torchbft.tensors.aggregation.compose import STANDARD

ROBUST = [name for name in STANDARD if name != "mean"]
HULL = [name for name in ROBUST if "clipping" not in name and "arc" not in name]
"""Rules whose result is a mean of rows: where all honest rows agree, it agrees with them."""
CHOOSING = ["krum", "multi_krum", "nnm+krum"]
"""Rules that leave out whole rows."""


def normal(seed: int, n: int, d: int) -> torch.Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", ROBUST)
def test_a01_a_non_finite_row_is_refused_by_name_and_the_rest_is_aggregated(
    name: str, bad: float
) -> None:
    x_ND = normal(1, 9, 40)
    x_ND[4, 17] = bad
    reasons = robust.check_updates(list(x_ND), 40)
    assert reasons[4] == "non-finite value at coordinate 17"
    assert reasons[:4] + reasons[5:] == [None] * 8
    rest_ND = torch.stack([row for row, reason in zip(x_ND, reasons, strict=True) if not reason])
    assert torch.isfinite(robust.get(name)(rest_ND, 1)).all()
    with pytest.raises(MisuseError, match="row 4: non-finite value at coordinate 17"):
        robust.get(name)(x_ND, 2)


@pytest.mark.parametrize("name", CHOOSING)
def test_a02_values_near_one_with_tiny_spread_never_let_a_shifted_row_win(name: str) -> None:
    n, f, d = 30, 7, 100_000
    rng = np.random.default_rng(2)
    x_ND = torch.from_numpy(1 + 3e-5 * rng.standard_normal((n, d), dtype=np.float32))
    x_ND[:f] += 5 * 3e-5
    _, info = robust.get(name)(x_ND, f, return_info=True)
    assert max(info.weights_N[:f]) == 0.0


def test_a02_the_expanded_square_without_centring_does_choose_a_shifted_row() -> None:
    """Negative control: on such input the usual float32 formula has lost every distance."""
    rng = np.random.default_rng(2)
    x_ND = torch.from_numpy(1 + 3e-5 * rng.standard_normal((30, 20_000), dtype=np.float32))
    x_ND[:7] += 5 * 3e-5
    squares_N = (x_ND * x_ND).sum(1)
    expanded_NN = squares_N[:, None] + squares_N[None, :] - 2 * x_ND @ x_ND.t()
    exact_NN = torch.cdist(x_ND.double(), x_ND.double()).square()
    off = ~torch.eye(30, dtype=torch.bool)
    error_NN = (expanded_NN.double() - exact_NN).abs() / exact_NN.clamp(min=1e-30)
    # An error as large as the distance itself leaves no digit of it; how much larger it is depends
    # on the order in which a BLAS adds, and so on its threads.
    assert float(error_NN[off].median()) > 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ROBUST)
def test_a03_half_precision_near_300_is_exact(name: str, dtype: torch.dtype) -> None:
    x_ND = (300 + normal(3, 9, 2000)).to(dtype)
    x_ND[:2] = (normal(4, 2, 2000) / 100).to(dtype)
    result_D = robust.get(name)(x_ND, 2)
    assert result_D.dtype == dtype
    reference_D = robust.get(name)(x_ND.double(), 2)
    step = torch.finfo(dtype).eps * 301
    assert float((result_D.double() - reference_D).abs().max()) <= step
    if name in CHOOSING:
        assert float(result_D.double().mean()) > 290


def test_a04_no_row_has_a_weight_of_its_own_to_declare() -> None:
    x_ND = normal(5, 4, 10)
    _, info = robust.Mean()(x_ND, 0, return_info=True)
    assert info.weights_N == [0.25] * 4
    for call in (robust.Rule.__call__, robust.Rule.aggregate):
        assert not {"weights", "counts", "num_examples"} & set(inspect.signature(call).parameters)


def test_a05_a_row_of_another_shape_is_refused_and_never_broadcast() -> None:
    rows = [torch.zeros(6), torch.zeros(7), torch.zeros(1), torch.zeros(1, 6), torch.tensor(0.0)]
    assert robust.check_updates(rows, 6) == [
        None,
        "wrong shape: (7,) instead of (6,)",
        "wrong shape: (1,) instead of (6,)",
        "wrong shape: (1, 6) instead of (6,)",
        "wrong shape: () instead of (6,)",
    ]


@pytest.mark.parametrize(
    ("name", "n", "f", "bound"),
    [
        ("krum", 3, 1, "n >= 2f + 3"),
        ("multi_krum", 6, 2, "n >= 2f + 3"),
        ("mean", 7, 1, "f = 0"),
        ("median", 4, 2, "2f < n"),
        ("trimmed_mean", 2, 1, "2f < n"),
        ("geometric_median", 4, 2, "2f < n"),
        ("centred_clipping", 4, 3, "2f < n"),
        ("nnm+median", 4, 2, "2f < n"),
        ("arc+krum", 5, 2, "n >= 2f + 3"),
        ("norm_clipping+mean", 4, 2, "2f < n"),
        ("median", 3, -1, "2f < n"),
        ("mean", 0, 0, "f = 0"),
    ],
)
def test_a06_a_need_that_fails_names_rule_n_f_and_bound(
    name: str, n: int, f: int, bound: str
) -> None:
    with pytest.raises(PreconditionError) as caught:
        robust.get(name).check(n=n, f=f)
    assert name.split("+")[-1] in str(caught.value) or name.split("+")[0] in str(caught.value)
    assert f"needs {bound}, but n={n}, f={f}" in str(caught.value)
    if n > 0:
        with pytest.raises(PreconditionError):
            robust.get(name)(torch.zeros(n, 3), f)


def test_a06_multi_krum_refuses_an_m_that_could_include_a_liar_majority() -> None:
    robust.MultiKrum(m=3).check(n=7, f=2)
    with pytest.raises(PreconditionError, match="m=4"):
        robust.MultiKrum(m=4).check(n=7, f=2)


@pytest.mark.parametrize("n", [2, 4, 10, 30])
def test_a07_the_median_of_an_even_number_is_the_middle_of_both(n: int) -> None:
    x_ND = normal(7, n, 1001)
    expected_D = np.median(x_ND.numpy().astype(np.float64), axis=0).astype(np.float32)
    np.testing.assert_array_equal(robust.Median()(x_ND, 0).numpy(), expected_D)


@pytest.mark.parametrize("name", HULL)
@pytest.mark.parametrize("outlier", [5.0, -1e20, 3e38, 0.0])
def test_a08_identical_honest_rows_win_over_identical_outliers(name: str, outlier: float) -> None:
    x_ND = torch.full((9, 50), 2.0)
    x_ND[:2] = outlier
    distance_D = (robust.get(name)(x_ND, 2) - 2.0).abs()
    smoothing = 1e-4 if "geometric" in name else 0.0
    assert float(distance_D.max()) <= smoothing


@pytest.mark.parametrize("value", [0.0, -0.0, 2.5, -1e20, 1e-30])
@pytest.mark.parametrize("name", ROBUST)
def test_a08_equal_rows_give_that_row(name: str, value: float) -> None:
    result_D, info = robust.get(name)(torch.full((9, 50), value), 2, return_info=True)
    tolerance = 1e-6 * abs(value) if "clipping" in name else 0.0
    assert float((result_D - value).abs().max()) <= tolerance
    assert not torch.signbit(result_D[result_D == 0.0]).any()
    assert np.isfinite(info.weights_N).all()


@pytest.mark.parametrize("name", ROBUST)
def test_a08_rows_of_1e20_leave_a_finite_result_near_the_honest_rows(name: str) -> None:
    x_ND = normal(8, 9, 300)
    longest = float(x_ND[2:].norm(dim=1).max())
    x_ND[:2] = torch.tensor([1e20, -1e20])[:, None]
    assert float(robust.get(name)(x_ND, 2).norm()) <= longest


@pytest.mark.parametrize("name", STANDARD)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_a09_every_float_dtype_comes_back_and_inputs_stay_untouched(
    name: str, dtype: torch.dtype
) -> None:
    f = 0 if name == "mean" else 1
    x_ND = normal(9, 5, 64).to(dtype)
    before_ND = x_ND.clone()
    result_D = robust.get(name)(x_ND, f)
    assert result_D.dtype == dtype
    assert torch.equal(x_ND, before_ND)
    result_D.add_(1.0)
    assert torch.equal(x_ND, before_ND), "the result shares no memory with the input"


def test_a09_float64_is_not_rounded_to_float32() -> None:
    x_ND = torch.full((5, 3), 1.0 + 2.0**-40, dtype=torch.float64)
    for name in STANDARD:
        f = 0 if name == "mean" else 1
        assert float((robust.get(name)(x_ND, f) - x_ND[0]).abs().max()) < 2.0**-45, name


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64])
def test_a09_other_dtypes_are_refused(dtype: torch.dtype) -> None:
    x_ND = torch.ones(5, 3).to(dtype)
    with pytest.raises(MisuseError, match="dtype"):
        robust.Median()(x_ND, 1)
    assert robust.check_updates([x_ND[0]], 3) == [f"wrong dtype: {dtype} instead of a float dtype"]
    assert robust.check_updates([torch.ones(3)], 3, torch.float64) == [
        "wrong dtype: torch.float32 instead of torch.float64"
    ]


def test_a09_an_update_set_without_rows_is_refused() -> None:
    for empty in (torch.tensor(1.0), torch.zeros(0, 4)):
        with pytest.raises(MisuseError, match="first axis"):
            robust.Median()(empty, 0)


@pytest.mark.parametrize("name", STANDARD)
def test_a09_strides_and_gradients_make_no_difference(name: str) -> None:
    f = 0 if name == "mean" else 1
    x_ND = normal(10, 5, 64)
    expected_D = robust.get(name)(x_ND, f)
    strided_ND = torch.stack([x_ND, x_ND], dim=2)[:, :, 0]
    transposed_ND = x_ND.t().contiguous().t()
    tracked_ND = x_ND.clone().requires_grad_()
    for view_ND in (strided_ND, transposed_ND, tracked_ND, x_ND.expand(1, 5, 64)[0]):
        result_D = robust.get(name)(view_ND, f)
        assert torch.equal(result_D, expected_D)
        assert not result_D.requires_grad
    assert tracked_ND.grad is None


def test_a09_a_magnitude_whose_square_overflows_is_refused() -> None:
    huge = torch.full((3,), 1e200, dtype=torch.float64)
    assert str(robust.check_updates([huge], 3)[0]).startswith("out of range")
    with pytest.raises(MisuseError, match="out of range"):
        robust.Mean()(huge[None], 0)
    largest = torch.full((3,), torch.finfo(torch.float32).max)
    assert robust.check_updates([largest], 3) == [None]
    assert torch.equal(robust.Mean()(torch.stack([largest] * 4), 0), largest)


FRAGILE = {"topk", "quantile", "kthvalue", "cdist", "median", "nanmedian", "argsort", "msort"}


def called_names(path: Path) -> set[str]:
    tree = ast.parse(path.read_text())
    calls = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {call.attr for call in calls if isinstance(call, ast.Attribute)}


def test_a10_no_rule_relies_on_operators_that_differ_between_devices() -> None:
    """The only sorts are of small, finite, float64 matrices on the CPU."""
    sources = list(Path(aggregation.__file__).parent.glob("*.py"))
    assert len(sources) > 5
    for path in sources:
        assert not called_names(path) & FRAGILE, path.name
    assert "cdist" in called_names(Path(__file__)), "the scan sees such calls where they are"


def test_a10_a_row_is_its_own_nearest_neighbour_even_among_duplicates() -> None:
    """cdist may give a row a distance above zero to itself; here the row comes first."""
    x_ND = 1e4 + normal(11, 7, 100) * 1e-3
    x_ND[3] = x_ND[2]
    mixing_NN = robust.NNM().select(np.zeros((7, 7)), n=7, f=2, refs={})
    assert (mixing_NN.diagonal() == 1 / 5).all(), "all distances tie: itself first"
    _, info = robust.get("nnm+trimmed_mean")(x_ND, 2, return_info=True)
    assert min(info.weights_N) > 0.0


def rows_of_a11(seed: int, n: int, f: int, d: int) -> torch.Tensor:
    x_ND = normal(seed, n, d)
    x_ND[: f - 1] += 50.0
    x_ND[f - 1] = 1e20
    return x_ND


@pytest.mark.parametrize("name", CHOOSING)
def test_a11_a_huge_row_cannot_hide_the_distance_of_others(name: str) -> None:
    n, f = 13, 3
    for seed in range(5):
        _, info = robust.get(name)(rows_of_a11(seed, n, f, 1000), f, return_info=True)
        assert info.refused_by_norm == (2,)
        assert max(info.weights_N[:f]) == 0.0
        assert info.norms_N[2] == pytest.approx(1e20 * np.sqrt(1000), rel=1e-6)


def test_a11_centring_on_the_mean_does_lose_every_other_distance() -> None:
    """Negative control: the same rows, centred on their float32 mean, have no distances left."""
    x_ND = rows_of_a11(0, 13, 3, 1000)
    centred_ND = x_ND - x_ND.mean(0)
    distances_NN = torch.cdist(centred_ND[3:], centred_ND[3:])
    assert float(distances_NN.max()) == 0.0


def test_a11_a_refused_row_also_frees_its_seat() -> None:
    """n and f fall together: the rest is judged as n − 1 rows with f − 1 liars."""
    x_ND = rows_of_a11(1, 13, 3, 200)
    rest_ND = torch.cat([x_ND[:2], x_ND[3:]])
    for name in ("nnm+trimmed_mean", "multi_krum", "geometric_median"):
        found_D = robust.get(name)(x_ND, 3)
        assert torch.allclose(found_D, robust.get(name)(rest_ND, 2), atol=1e-5), name


def test_a11_honest_rows_of_unequal_length_are_not_refused() -> None:
    x_ND = normal(12, 13, 200) * torch.logspace(0, 1, 13)[:, None]
    for f in (0, 1, 3):
        _, info = robust.GeometricMedian()(x_ND, f, return_info=True)
        assert info.refused_by_norm == ()


def test_a11_never_more_than_f_rows_are_refused() -> None:
    x_ND = torch.zeros(9, 20)
    x_ND[:4] = normal(13, 4, 20)
    with_two = robust.GeometricMedian()(x_ND, 4, return_info=True)[1]
    assert with_two.refused_by_norm == (0, 1, 2, 3), "five rows coincide: the bound is 0"
    with_two = robust.GeometricMedian()(x_ND, 2, return_info=True)[1]
    assert with_two.refused_by_norm == ()
