"""Every rule against a naive float64 version written from its definition, in vector space.

The oracles know nothing of Gram matrices, networks or blocks: they loop over NumPy vectors.
"""

from collections.abc import Callable
from itertools import combinations

import numpy as np
import pytest
import torch

from torchbft import robust

Matrix = np.ndarray


def norm(x: Matrix) -> float:
    return float(np.sqrt(np.square(x).sum()))


def mean(x_ND: Matrix, f: int) -> Matrix:
    return x_ND.mean(axis=0)


def median(x_ND: Matrix, f: int) -> Matrix:
    return np.median(x_ND, axis=0)


def trimmed_mean(x_ND: Matrix, f: int) -> Matrix:
    return np.sort(x_ND, axis=0)[f : len(x_ND) - f].mean(axis=0)


def krum_order(x_ND: Matrix, f: int) -> list[int]:
    n = len(x_ND)
    scores = []
    for i in range(n):
        others = sorted(norm(x_ND[i] - x_ND[j]) ** 2 for j in range(n) if j != i)
        scores.append(sum(others[: n - f - 2]))
    return sorted(range(n), key=lambda i: scores[i])


def krum(x_ND: Matrix, f: int) -> Matrix:
    return x_ND[krum_order(x_ND, f)[0]]


def multi_krum(x_ND: Matrix, f: int) -> Matrix:
    return x_ND[krum_order(x_ND, f)[: len(x_ND) - f - 2]].mean(axis=0)


def geometric_median(x_ND: Matrix, f: int) -> Matrix:
    z_D = np.median(x_ND, axis=0)
    for _ in range(400):
        weights = [1.0 / max(norm(x - z_D), 1e-12) for x in x_ND]
        z_D = sum(w * x for w, x in zip(weights, x_ND, strict=True)) / sum(weights)
    return z_D


def centred_clipping(x_ND: Matrix, f: int, v_D: Matrix | None = None) -> Matrix:
    n = len(x_ND)
    v_D = np.zeros(x_ND.shape[1]) if v_D is None else v_D
    for _ in range(3):
        distances = [norm(x - v_D) for x in x_ND]
        radius = sorted(distances)[n - f - 1]
        moves = [(x - v_D) * min(1.0, radius / d) for x, d in zip(x_ND, distances, strict=True)]
        v_D = v_D + sum(moves) / n
    return v_D


def nnm(x_ND: Matrix, f: int) -> Matrix:
    n = len(x_ND)
    mixed = []
    for i in range(n):
        nearest = sorted(range(n), key=lambda j: norm(x_ND[i] - x_ND[j]))[: n - f]
        mixed.append(x_ND[nearest].mean(axis=0))
    return np.stack(mixed)


def clip(x_ND: Matrix, bound: float) -> Matrix:
    return np.stack([x * min(1.0, bound / norm(x)) for x in x_ND])


def arc(x_ND: Matrix, f: int) -> Matrix:
    n = len(x_ND)
    k = int(np.floor(2 * (f / n) * (n - f)))
    return clip(x_ND, sorted((norm(x) for x in x_ND), reverse=True)[k])


def norm_clipping(x_ND: Matrix, f: int) -> Matrix:
    return clip(x_ND, sorted(norm(x) for x in x_ND)[len(x_ND) - f - 1])


ORACLES: dict[str, Callable[[Matrix, int], Matrix]] = {
    "mean": mean,
    "median": median,
    "trimmed_mean": trimmed_mean,
    "krum": krum,
    "multi_krum": multi_krum,
    "geometric_median": geometric_median,
    "centred_clipping": centred_clipping,
    "nnm": nnm,
    "arc": arc,
    "norm_clipping": norm_clipping,
}
NAMES = [
    *("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centred_clipping"),
    *("nnm+trimmed_mean", "arc+nnm+trimmed_mean", "nnm+arc+median", "nnm+krum", "arc+median"),
    *("norm_clipping+mean", "arc+nnm+geometric_median", "nnm+nnm+trimmed_mean"),
    "norm_clipping+centred_clipping",
]


def oracle(name: str, x_ND: Matrix, f: int) -> Matrix:
    *stages, last = name.split("+")
    for stage in stages:
        x_ND = ORACLES[stage](x_ND, f)
    return ORACLES[last](x_ND, f)


def rows_with_liars(seed: int, n: int, f: int, d: int) -> Matrix:
    """Honest rows with a common mean and unequal spread; liars of several kinds and lengths."""
    rng = np.random.default_rng(seed)
    x_ND = 0.5 + rng.standard_normal((n, d)) * np.exp(rng.normal(size=(n, 1)) / 3)
    for liar in range(f):
        x_ND[liar * 2] = [-4.0, 9.0, 0.01][liar % 3] * (1 + rng.random(d))
    return x_ND.astype(np.float32).astype(np.float64)


def test_every_known_name_has_an_oracle() -> None:
    assert set(robust.known()) == set(ORACLES)


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "f", "d"), [(7, 2, 501), (12, 3, 40), (13, 0, 300)])
def test_rule_equals_its_definition(name: str, n: int, f: int, d: int, mode: str) -> None:
    x_ND = rows_with_liars(n, n, f, d)
    found_D = robust.get(name)(torch.tensor(x_ND, dtype=torch.float32), f, mode=mode)
    assert found_D.dtype == torch.float32
    expected_D = oracle(name, x_ND, f)
    np.testing.assert_allclose(found_D.numpy(), expected_D, rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_mean_equals_its_definition(n: int) -> None:
    x_ND = rows_with_liars(n, n, 0, 100)
    found_D = robust.Mean()(torch.tensor(x_ND, dtype=torch.float32), 0)
    np.testing.assert_allclose(found_D.numpy(), mean(x_ND, 0), rtol=1e-6, atol=1e-7)


def test_blocks_of_columns_join_without_a_seam() -> None:
    """d above every block width, and not a multiple of any."""
    x_ND = rows_with_liars(5, 5, 1, 70_001)
    for name in ("trimmed_mean", "nnm+median", "multi_krum"):
        found_D = robust.get(name)(torch.tensor(x_ND, dtype=torch.float32), 1)
        np.testing.assert_allclose(found_D.numpy(), oracle(name, x_ND, 1), rtol=1e-5, atol=1e-5)


def test_the_oracles_tell_rules_apart() -> None:
    """Negative control: on these inputs no two rules agree, so none can stand in for another."""
    x_ND = rows_with_liars(12, 12, 3, 40)
    results = {name: oracle(name, x_ND, 3) for name in NAMES}
    for (name, result_D), (other, other_D) in combinations(results.items(), 2):
        assert not np.allclose(result_D, other_D, rtol=3e-5, atol=3e-5), (name, other)


def test_geometric_median_is_a_stationary_point() -> None:
    """Independent of any iteration: the unit vectors towards the rows add up to zero."""
    x_ND = rows_with_liars(3, 9, 3, 60)
    z_D = robust.GeometricMedian()(torch.tensor(x_ND), 3).numpy()
    assert norm(sum((x - z_D) / norm(x - z_D) for x in x_ND)) < 1e-4


def test_centred_clipping_goes_on_from_the_previous_aggregate() -> None:
    rule = robust.CentredClipping()
    state, centre_D = rule.init(80), np.zeros(80)
    assert state["centre"].shape == (80,)
    for round_ in range(3):
        x_ND = rows_with_liars(round_, 7, 2, 80)
        before = state["centre"].clone()
        result_D, after, _ = rule.aggregate(torch.tensor(x_ND, dtype=torch.float32), 2, state)
        centre_D = centred_clipping(x_ND, 2, centre_D)
        np.testing.assert_allclose(result_D.numpy(), centre_D, rtol=1e-4, atol=1e-5)
        assert torch.equal(state["centre"], before), "the caller's state is read, never written"
        state = after


def test_static_thresholds_are_used_as_given() -> None:
    x_ND = torch.tensor([[3.0, 4.0], [0.3, 0.4], [0.0, 0.0]])
    clipped = robust.Compose(robust.NormClipping(threshold=1.0), robust.Mean())(x_ND, 1)
    np.testing.assert_allclose(clipped.numpy(), [0.3, 0.4], rtol=1e-6)
    once = robust.CentredClipping(threshold=1.0, iterations=1)(x_ND, 1)
    np.testing.assert_allclose(once.numpy(), [0.3, 0.4], rtol=1e-5)


def test_multi_krum_takes_the_m_given() -> None:
    x_ND = rows_with_liars(4, 9, 2, 33)
    expected_D = x_ND[krum_order(x_ND, 2)[:3]].mean(axis=0)
    found_D = robust.MultiKrum(m=3)(torch.tensor(x_ND), 2)
    np.testing.assert_allclose(found_D.numpy(), expected_D, rtol=1e-12)
