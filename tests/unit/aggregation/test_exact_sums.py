"""Exact arithmetic against big integers and fractions."""

from fractions import Fraction
from threading import Thread

import numpy as np
import pytest
import torch

from torchbft.tensors.exact import (
    BLOCK_COLUMNS,
    Mixer,
    add_gram_,
    block_columns,
    gram,
    magnitude,
    matmul_in_order,
    quantise_,
    row_norms,
    spans,
    sqrt,
    sum_in_order,
    weighted_sum,
    workspace,
)
from torchbft.tensors.exact.scaling import rounder
from torchbft.tensors.exact.workspace import MOST_HELD_BYTES


def rows(seed: int, n: int, d: int, dtype: type = np.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)).astype(dtype))


def quantised(block_NB: torch.Tensor) -> np.ndarray:
    copied = block_NB.numpy().copy()
    quantise_(copied)
    return copied


def steps_of(row: np.ndarray) -> float:
    """The step of a row's grid: 2^-19 of the power of two below its largest magnitude."""
    return 2.0 ** (int(np.frexp(np.abs(row).max())[1]) - 20)


def test_a_rounder_holds_one_and_a_half_times_two_to_the_mantissa_steps() -> None:
    values = np.array([1.0, 1.5, 2.0, 3.9999, 2.0**-390, 2.0**400, 1e-100, 7.25])
    steps = rounder(values, 20) / (1.5 * 2.0**52)
    assert steps.tolist() == [steps_of(value) for value in values]
    assert rounder(np.zeros(1), 20)[0] == rounder(np.array([2.0**-400]), 20)[0]
    single = np.array([1.0, 3.9999, 2.0**-126, 2.0**99, 1e-30], np.float32)
    steps = rounder(single, 20).astype(np.float64) / (1.5 * 2.0**23)
    assert steps.tolist() == [steps_of(value) for value in single.astype(np.float64)]
    assert rounder(np.zeros(1, np.float32), 20)[0] == rounder(np.float32([2.0**-126]), 20)[0]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e28])
def test_quantised_rows_are_whole_multiples_of_a_step_close_to_the_row(
    spread: float, dtype: type
) -> None:
    block_NB = rows(1, 4, 1000, dtype) * spread
    for row, values in zip(block_NB.double().numpy(), quantised(block_NB), strict=True):
        whole = values / steps_of(row)
        assert np.array_equal(whole, np.rint(whole))
        assert 2**19 <= np.abs(whole).max() <= 2**20
        assert np.abs(values - row).max() <= np.abs(row).max() * 2.0**-20
        assert np.array_equal(whole, np.rint(row / steps_of(row))), "to nearest, ties to even"


def test_quantised_zeros_stay_zero_and_a_spike_coarsens_its_own_row_only() -> None:
    block_NB = torch.ones(3, 8)
    block_NB[1] = 0.0
    block_NB[2, 3] = 1e30
    found = quantised(block_NB)
    assert np.array_equal(found[:2], block_NB[:2].numpy())
    assert found[2].tolist() == [0.0] * 3 + [pytest.approx(1e30, rel=1e-6)] + [0.0] * 4


def test_ties_go_to_the_even_multiple() -> None:
    row = np.array([[2.0**20, 0.5, 1.5, 2.5, -0.5, -1.5]])
    quantise_(row)
    assert row.tolist() == [[2.0**20, 0.0, 2.0, 2.0, 0.0, -2.0]]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gram_is_the_exact_integer_product_of_the_quantised_blocks(dtype: type) -> None:
    points_TKB = rows(2, 5, 2 * BLOCK_COLUMNS, dtype).numpy().reshape(5, 2, BLOCK_COLUMNS)
    expected = [[0.0] * 5 for _ in range(5)]
    for block in (points_TKB[:, 0], points_TKB[:, 1]):
        steps = [steps_of(row) for row in block]
        whole = [
            np.rint(row / step).astype(int).tolist() for row, step in zip(block, steps, strict=True)
        ]
        for i in range(5):
            for j in range(5):
                product = sum(a * b for a, b in zip(whole[i], whole[j], strict=True))
                expected[i][j] += float(product) * steps[i] * steps[j]
    total = np.zeros((5, 5))
    add_gram_(points_TKB, magnitude(points_TKB, -1), total)
    assert total.tolist() == expected


def test_the_largest_block_product_stays_below_two_to_the_53_steps() -> None:
    worst = np.full((1, BLOCK_COLUMNS), 2.0 - 2.0**-52)
    quantise_(worst)
    assert worst.max() == 2.0
    assert BLOCK_COLUMNS * (2**20) ** 2 < 2**53


@pytest.mark.parametrize("d", [0, 1, 7, 8, 9, 4095, 4096, 4097, 4810, 8192, 38_376, 1_000_003])
def test_blocks_of_one_width_cover_the_columns_with_few_to_spare(d: int) -> None:
    width = block_columns(d)
    blocks = -(-d // width)
    assert 8 <= width <= BLOCK_COLUMNS
    assert width % 8 == 0
    assert blocks <= -(-d // BLOCK_COLUMNS)
    assert blocks * width - d < 8 * max(1, blocks)


@pytest.mark.parametrize("d", [0, 1, BLOCK_COLUMNS - 1, 3 * BLOCK_COLUMNS + 5])
def test_gram_and_norms_stay_within_the_rounding_of_the_operands(d: int) -> None:
    rows_ND = rows(3, 6, d).double()
    expected_NN = rows_ND @ rows_ND.t()
    step_N = 2.0**-20 * (rows_ND.abs().amax(1) if d else torch.zeros(6))
    lengths_N = rows_ND.abs().sum(1) + d * step_N
    bound_NN = step_N[:, None] * lengths_N[None, :] + step_N[None, :] * lengths_N[:, None]
    assert bool(((torch.from_numpy(gram(rows_ND)) - expected_NN).abs() <= bound_NN).all())
    np.testing.assert_allclose(row_norms(rows_ND), expected_NN.diagonal().sqrt(), rtol=2e-6)


def test_gram_of_long_rows_is_far_better_than_its_operands() -> None:
    rows_ND = rows(5, 4, 50_000).double()
    expected_NN = rows_ND @ rows_ND.t()
    assert np.abs(gram(rows_ND) - expected_NN.numpy()).max() < 5e-8 * 50_000


def test_sum_in_order_is_the_left_to_right_sum() -> None:
    values = [0.1, 1e16, -1e16, 0.3, -0.0]
    total = 0.0
    for value in values:
        total += value
    assert sum_in_order(np.array(values)).item() == total
    assert sum_in_order(np.zeros((3, 0))).tolist() == [0.0, 0.0, 0.0]
    assert sum_in_order(np.ones((2, 3)), axis=0).tolist() == [2.0, 2.0, 2.0]
    assert not np.signbit(sum_in_order(np.array([-0.0, -0.0])))


@pytest.mark.parametrize(("m", "k", "n"), [(3, 5, 4), (40, 50, 45), (2, 0, 3)])
def test_matmul_in_order_is_the_naive_triple_loop(m: int, k: int, n: int) -> None:
    left, right = rows(4, m, k, np.float64).numpy(), rows(5, k, n, np.float64).numpy()
    found = matmul_in_order(left, right)
    assert found.shape == (m, n)
    for i in range(m):
        for j in range(n):
            total = 0.0
            for inner in range(k):
                total += left[i, inner].item() * right[inner, j].item()
            assert found[i, j].item() == total


def test_weighted_sum_rounds_once_and_never_reads_a_row_of_weight_zero() -> None:
    rows_ND = rows(6, 4, 20_000)
    rows_ND[3] = float("nan")
    weights_N = np.array([0.25, 0.5, 0.25, 0.0])
    found = weighted_sum(weights_N, rows_ND)
    assert found.dtype == torch.float32
    assert torch.equal(weighted_sum(np.array([0.0, 0.0, 1.0, 0.0]), rows_ND), rows_ND[2])
    exact = [
        sum(
            Fraction(w) * Fraction(float(x)) for w, x in zip((0.25, 0.5, 0.25), column, strict=True)
        )
        for column in rows_ND[:3, :20].t().tolist()
    ]
    assert found[:20].tolist() == [float(np.float32(float(value))) for value in exact]
    assert weighted_sum(weights_N, rows_ND.double()).dtype == torch.float64


def mask_mixing(n: int, kept: int, factors: list[float]) -> np.ndarray:
    mixing_MN = np.zeros((n, n))
    for row in range(n):
        for step in range(kept):
            column = (row + step) % n
            mixing_MN[row, column] = factors[column] / kept
    return mixing_MN


def mixed(mixing_MN: np.ndarray, block_NB: np.ndarray) -> np.ndarray:
    out_MB = np.full((len(mixing_MN), block_NB.shape[1]), np.nan, block_NB.dtype)
    Mixer(mixing_MN)(block_NB, out_MB)
    return out_MB


def one_by_one(mixing_MN: np.ndarray, block_NB: np.ndarray) -> np.ndarray:
    """Each product and each sum rounded in float64, rows in order; then to the block's dtype."""
    out_MB = np.zeros((len(mixing_MN), block_NB.shape[1]))
    for total_B, weights_N in zip(out_MB, mixing_MN, strict=True):
        for weight, row_B in zip(weights_N, block_NB, strict=True):
            if weight != 0.0:
                total_B += row_B.astype(np.float64) * weight
    return out_MB.astype(block_NB.dtype)


MIXINGS = {
    "few terms": mask_mixing(7, 3, [1.0, 0.5, 1.0, 0.1, 1.0, 1.0, 0.3]),
    "a row that nobody uses": mask_mixing(7, 3, [1.0, 0.5, 1.0, 0.1, 0.0, 1.0, 0.3]),
    "many weights a column": rows(8, 6, 7, np.float64).abs().numpy(),
    "one output": np.full((1, 9), 1 / 9),
    "no term": np.zeros((2, 3)),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", MIXINGS)
def test_mixing_in_order_is_one_rounding_after_another(name: str, dtype: type) -> None:
    mixing_MN = MIXINGS[name]
    block_NB = rows(9, mixing_MN.shape[1], 4000, dtype).numpy()
    block_NB[:, :9] = -0.0
    block_NB[~mixing_MN.any(axis=0)] = np.nan
    found_MB = mixed(mixing_MN, block_NB)
    assert not Mixer(mixing_MN).by_product
    assert np.array_equal(found_MB, one_by_one(mixing_MN, block_NB))
    assert not np.signbit(found_MB[:, :9]).any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(
    ("kept", "factors"),
    [(5, [1.0] * 7), (5, [1.0, 0.5, 1.0, 0.1, 0.0, 1.0, 0.3]), (24, [1.0] * 30 + [0.3])],
)
def test_mixing_by_an_exact_product_agrees_with_mixing_in_order(
    kept: int, factors: list[float], dtype: type
) -> None:
    n = len(factors)
    mixing_MN, block_NB = mask_mixing(n, kept, factors), rows(7, n, 9000, dtype).numpy()
    block_NB[:, 1] = -0.0
    block_NB[np.array(factors) == 0.0] = np.nan
    assert Mixer(mixing_MN).by_product
    found_MB = mixed(mixing_MN, block_NB)
    error_MB = np.abs(found_MB.astype(np.float64) - one_by_one(mixing_MN, block_NB))
    grid = n * 2.0**-48 * np.nanmax(np.abs(block_NB)) / kept
    assert (error_MB <= grid + np.spacing(np.abs(found_MB))).all()
    assert not np.signbit(found_MB[:, 1]).any()


def test_mixing_by_product_is_the_exact_sum_of_rounded_terms() -> None:
    """Against integers: any order of adding would give the same."""
    mixing_MN, block_NB = mask_mixing(7, 5, [0.7] * 7), rows(7, 7, 300, np.float64).numpy()
    terms = block_NB * mixing_MN.max(0)[:, None]
    step = 2.0 ** (int(np.frexp(np.abs(terms).max())[1]) - 49)
    whole = np.rint(terms / step).astype(np.int64)
    expected = ((mixing_MN != 0).astype(np.int64) @ whole).astype(np.float64) * step
    assert np.array_equal(mixed(mixing_MN, block_NB), expected)


def test_a_workspace_is_the_threads_own_and_kept_up_to_a_bound() -> None:
    first = workspace("test", 3, 4)
    assert workspace("test", 2, 2).base is first.base
    other: list[np.ndarray] = []
    thread = Thread(target=lambda: other.append(workspace("test", 3, 4)))
    thread.start()
    thread.join()
    assert not np.shares_memory(first, other[0])
    large = MOST_HELD_BYTES // 8 + 1
    assert not np.shares_memory(workspace("test", large), workspace("test", large))
    assert workspace("test", 3, dtype=np.float32).dtype == np.float32


def test_spans_cover_every_column_once() -> None:
    assert [list(range(10))[span] for span in spans(10, 4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert list(spans(0, 4)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sqrt_is_correctly_rounded(dtype: torch.dtype) -> None:
    """Against integer square roots: r is right when (r − ulp/2)² < x < (r + ulp/2)²."""
    x = rows(12, 1, 3000, np.float64)[0].abs().to(dtype)
    roots = sqrt(x)
    assert roots.dtype == dtype
    for value, root in zip(x.tolist(), roots.tolist(), strict=True):
        ulp = Fraction(float(np.spacing(np.array(root, dtype=x.numpy().dtype))))
        low, high = Fraction(root) - ulp / 2, Fraction(root) + ulp / 2
        assert low * low < Fraction(value) < high * high
    assert sqrt(torch.zeros(2, 0, dtype=dtype)).shape == (2, 0)
    assert sqrt(torch.tensor(4.0, dtype=dtype)).item() == 2.0
