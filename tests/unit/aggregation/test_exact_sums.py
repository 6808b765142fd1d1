"""Exact arithmetic against big integers and fractions."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from torchbft.tensors.exact import (
    BLOCK_COLUMNS,
    Mixer,
    exponent,
    gram,
    gram_of_block_,
    matmul_in_order,
    pow2,
    quantise,
    row_norms,
    spans,
    sqrt,
    sum_in_order,
    weighted_sum,
)


def rows(seed: int, n: int, d: int, dtype: type = np.float32) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((n, d)).astype(dtype))


def test_exponent_and_pow2_agree_with_frexp() -> None:
    values = [1.0, 1.5, 2.0, 3.9999, 2.0**-400, 2.0**400, 1e-300, 7.25]
    found = exponent(torch.tensor(values, dtype=torch.float64))
    assert found.tolist() == [int(np.frexp(value)[1]) - 1 for value in values]
    powers = torch.arange(-1022, 1024)
    assert pow2(powers).tolist() == [2.0 ** int(power) for power in powers]


@pytest.mark.parametrize("spread", [1e-30, 1.0, 1e30])
def test_quantised_rows_are_integers_close_to_the_row(spread: float) -> None:
    block_NB = rows(1, 4, 1000) * spread
    q_NB, scale_N = quantise(block_NB)
    assert torch.equal(q_NB, q_NB.round())
    assert 2**19 <= float(q_NB.abs().max()) <= 2**20
    error_NB = (q_NB * scale_N[:, None] - block_NB.double()).abs()
    assert bool((error_NB.amax(1) <= block_NB.double().abs().amax(1) * 2.0**-20).all())


def test_quantised_zeros_stay_zero_and_a_spike_coarsens_its_own_row_only() -> None:
    block_NB = torch.ones(3, 8)
    block_NB[1] = 0.0
    block_NB[2, 3] = 1e30
    q_NB, scale_N = quantise(block_NB)
    assert float(q_NB[1].abs().max()) == 0.0
    assert torch.equal(q_NB[0] * scale_N[0], torch.ones(8, dtype=torch.float64))


def test_gram_is_the_exact_integer_product_of_the_quantised_block() -> None:
    block_NB = rows(2, 5, BLOCK_COLUMNS)
    q_NB, scale_N = quantise(block_NB)
    integers = q_NB.to(torch.int64).numpy().astype(object)
    exact = integers @ integers.T
    found = gram_of_block_(block_NB.double()) / scale_N[:, None] / scale_N[None, :]
    assert [[int(x) for x in row] for row in found.tolist()] == exact.tolist()


def test_the_largest_block_product_stays_below_two_to_the_53() -> None:
    worst = torch.full((1, BLOCK_COLUMNS), 1.0 - 2.0**-53, dtype=torch.float64)
    q_NB, _ = quantise(worst)
    assert int(q_NB.abs().max()) == 2**20
    assert BLOCK_COLUMNS * (2**20) ** 2 < 2**53


@pytest.mark.parametrize("d", [0, 1, BLOCK_COLUMNS - 1, 3 * BLOCK_COLUMNS + 5])
def test_gram_and_norms_stay_within_the_rounding_of_the_operands(d: int) -> None:
    rows_ND = rows(3, 6, d).double()
    expected_NN = rows_ND @ rows_ND.t()
    step_N = 2.0**-20 * (rows_ND.abs().amax(1) if d else torch.zeros(6))
    lengths_N = rows_ND.abs().sum(1) + d * step_N
    bound_NN = step_N[:, None] * lengths_N[None, :] + step_N[None, :] * lengths_N[:, None]
    assert bool(((gram(rows_ND) - expected_NN).abs() <= bound_NN).all())
    assert torch.allclose(row_norms(rows_ND), expected_NN.diagonal().sqrt(), rtol=2e-6)


def test_gram_of_long_rows_is_far_better_than_its_operands() -> None:
    rows_ND = rows(5, 4, 50_000).double()
    expected_NN = rows_ND @ rows_ND.t()
    assert float((gram(rows_ND) - expected_NN).abs().max()) < 5e-8 * 50_000


def test_sum_in_order_is_the_left_to_right_sum() -> None:
    values = [0.1, 1e16, -1e16, 0.3, -0.0]
    total = 0.0
    for value in values:
        total += value
    assert sum_in_order(torch.tensor(values, dtype=torch.float64)).item() == total
    assert sum_in_order(torch.zeros(3, 0)).tolist() == [0.0, 0.0, 0.0]
    assert sum_in_order(torch.ones(2, 3), dim=0).tolist() == [2.0, 2.0, 2.0]


def test_matmul_in_order_is_the_naive_triple_loop() -> None:
    left, right = rows(4, 3, 5, np.float64), rows(5, 5, 4, np.float64)
    found = matmul_in_order(left, right)
    for i in range(3):
        for j in range(4):
            total = 0.0
            for k in range(5):
                total += left[i, k].item() * right[k, j].item()
            assert found[i, j].item() == total


def test_weighted_sum_rounds_once_and_never_reads_a_row_of_weight_zero() -> None:
    rows_ND = rows(6, 4, 20_000)
    rows_ND[3] = float("nan")
    weights_MN = torch.tensor([[0.25, 0.5, 0.25, 0.0], [0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    found = weighted_sum(weights_MN, rows_ND)
    assert found.dtype == torch.float32
    assert torch.equal(found[1], rows_ND[2])
    exact = [
        sum(
            Fraction(w) * Fraction(float(x)) for w, x in zip((0.25, 0.5, 0.25), column, strict=True)
        )
        for column in rows_ND[:3, :20].t().tolist()
    ]
    assert found[0, :20].tolist() == [float(np.float32(float(value))) for value in exact]
    assert weighted_sum(weights_MN, rows_ND.double()).dtype == torch.float64


def mask_mixing(n: int, kept: int, factors: list[float]) -> torch.Tensor:
    mixing_MN = torch.zeros(n, n, dtype=torch.float64)
    for row in range(n):
        for step in range(kept):
            column = (row + step) % n
            mixing_MN[row, column] = factors[column] / kept
    return mixing_MN


@pytest.mark.parametrize("factors", [[1.0] * 7, [1.0, 0.5, 1.0, 0.1, 0.0, 1.0, 0.3]])
def test_mixing_by_product_agrees_with_mixing_row_by_row(factors: list[float]) -> None:
    mixing_MN, block_NB = mask_mixing(7, 5, factors), rows(7, 7, 3000)
    block_NB[:, 0] *= 1e-20  # each column has its own scale
    block_NB[:, 1] = 0.0
    mixer = Mixer(mixing_MN, 3000, block_NB.device)
    assert mixer.by_product
    expected_MB = matmul_in_order(mixing_MN, block_NB.double())
    error_MB = (mixer(block_NB) - expected_MB).abs()
    assert bool((error_MB <= 2.0**-44 * block_NB.double().abs().amax(0)).all())


def test_mixing_of_any_other_shape_goes_row_by_row() -> None:
    mixing_MN, block_NB = rows(8, 3, 4, np.float64).abs(), rows(9, 4, 100)
    mixer = Mixer(mixing_MN, 100, block_NB.device)
    assert not mixer.by_product
    assert torch.equal(mixer(block_NB), matmul_in_order(mixing_MN, block_NB.double()))


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
