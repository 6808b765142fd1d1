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
        factors = [min(1.0, radius / (distance or 1.0)) for distance in distances]
        v_D = v_D + sum(c * (x - v_D) for c, x in zip(factors, x_ND, strict=True)) / n
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


def closest_to_median(x_ND: Matrix, count: int) -> Matrix:
    result = []
    for column in x_ND.T:
        middle = np.median(column)
        result.append(np.mean(sorted(column, key=lambda v: (abs(v - middle), v))[:count]))
    return np.array(result)


def meamed(x_ND: Matrix, f: int) -> Matrix:
    return closest_to_median(x_ND, len(x_ND) - f)


def bulyan(x_ND: Matrix, f: int) -> Matrix:
    left, picked = list(range(len(x_ND))), []
    while len(picked) < len(x_ND) - 2 * f:
        scores = {}
        for i in left:
            squares = sorted(norm(x_ND[i] - x_ND[j]) ** 2 for j in left if j != i)
            scores[i] = (sum(squares[: max(1, len(left) - f - 2)]), sum(squares))
        best = min(left, key=scores.__getitem__)
        picked.append(best)
        left.remove(best)
    return closest_to_median(x_ND[picked], len(picked) - 2 * f)


def sets_of(n: int, f: int) -> list[list[int]]:
    return [list(chosen) for chosen in combinations(range(n), n - f)]


def diameter(x_ND: Matrix) -> float:
    return max((norm(a - b) for a, b in combinations(x_ND, 2)), default=0.0)


def mda(x_ND: Matrix, f: int) -> Matrix:
    return x_ND[min(sets_of(len(x_ND), f), key=lambda s: diameter(x_ND[s]))].mean(axis=0)


def top_value(x_ND: Matrix) -> float:
    return float(np.linalg.svd(x_ND - x_ND.mean(axis=0), compute_uv=False)[0])


def smea(x_ND: Matrix, f: int) -> Matrix:
    return x_ND[min(sets_of(len(x_ND), f), key=lambda s: top_value(x_ND[s]))].mean(axis=0)


def cge(x_ND: Matrix, f: int) -> Matrix:
    return x_ND[np.argsort([norm(x) for x in x_ND])[: len(x_ND) - f]].mean(axis=0)


def faba(x_ND: Matrix, f: int) -> Matrix:
    for _ in range(f):
        centre = x_ND.mean(axis=0)
        x_ND = np.delete(x_ND, int(np.argmax([norm(x - centre) for x in x_ND])), axis=0)
    return x_ND.mean(axis=0)


def dnc(x_ND: Matrix, f: int) -> Matrix:
    centred = x_ND - x_ND.mean(axis=0)
    direction = np.linalg.svd(centred, full_matrices=False)[2][0]
    return x_ND[np.argsort((centred @ direction) ** 2)[: len(x_ND) - f]].mean(axis=0)


def caf(x_ND: Matrix, f: int) -> Matrix:
    counts, best, least = np.ones(len(x_ND)), x_ND.mean(axis=0), np.inf
    while counts.sum() > len(x_ND) - 2 * f:
        centre = np.average(x_ND, axis=0, weights=counts)
        covariance = (counts[:, None] * (x_ND - centre)).T @ (x_ND - centre) / counts.sum()
        values, vectors = np.linalg.eigh(covariance)
        if values[-1] < least:
            best, least = centre, values[-1]
        squares = ((x_ND - centre) @ vectors[:, -1]) ** 2 * (counts > 0)
        counts = counts * (1 - squares / squares.max())
    return best


def sign_majority(x_ND: Matrix, f: int) -> Matrix:
    return np.sign(np.sign(x_ND).sum(axis=0))


def own_vector(d: int) -> Matrix:
    return np.linspace(2.5, -1.0, d).astype(np.float32).astype(np.float64)


def nna(x_ND: Matrix, f: int) -> Matrix:
    distances = [norm(x - own_vector(x_ND.shape[1])) for x in x_ND]
    return x_ND[np.argsort(distances)[: len(x_ND) - f]].mean(axis=0)


def fltrust(x_ND: Matrix, f: int) -> Matrix:
    root = own_vector(x_ND.shape[1])
    trust = [max(0.0, float(x @ root) / norm(x) / norm(root)) for x in x_ND]
    scaled = [t * norm(root) / norm(x) * x for t, x in zip(trust, x_ND, strict=True)]
    return sum(scaled) / sum(trust)


def krum_order_allouah(x_ND: Matrix, f: int) -> list[int]:
    scores = [sum(sorted(norm(x - y) ** 2 for y in x_ND)[: len(x_ND) - f]) for x in x_ND]
    return np.argsort(scores).tolist()


def multi_krum_allouah(x_ND: Matrix, f: int) -> Matrix:
    return x_ND[krum_order_allouah(x_ND, f)[: len(x_ND) - f]].mean(axis=0)


def memoryless_clipping(x_ND: Matrix, f: int) -> Matrix:
    n = len(x_ND)
    reach = [sorted(norm(x - y) for y in x_ND)[n - f - 1] for x in x_ND]
    return centred_clipping(x_ND, f, x_ND[int(np.argmin(reach))])


def static_clipping(x_ND: Matrix, f: int) -> Matrix:
    return clip(x_ND, 6.0)


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
    "static_clipping(threshold=6)": static_clipping,
    "meamed": meamed,
    "bulyan": bulyan,
    "mda": mda,
    "smea": smea,
    "cge": cge,
    "caf": caf,
    "nna": nna,
    "faba": faba,
    "dnc": dnc,
    "sign_majority": sign_majority,
    "fltrust": fltrust,
    "weighted_mean": mean,
    "multi_krum(variant=allouah)": multi_krum_allouah,
    "centred_clipping(history=false)": memoryless_clipping,
}
ELSEWHERE = {"zeno", "bucketing"}
"""Compared with their definitions in tests of their own: a score, and a random order."""
NAMES = [
    *("median", "trimmed_mean", "krum", "multi_krum", "geometric_median", "centred_clipping"),
    *("nnm+trimmed_mean", "arc+nnm+trimmed_mean", "nnm+arc+median", "nnm+krum", "arc+median"),
    *("norm_clipping+mean", "arc+nnm+geometric_median", "nnm+nnm+trimmed_mean"),
    *("norm_clipping+centred_clipping", "static_clipping(threshold=6)+median", "meamed", "mda"),
    *("smea", "cge", "caf", "nna", "faba", "dnc", "sign_majority", "fltrust", "arc+meamed"),
    *("multi_krum(variant=allouah)", "centred_clipping(history=false)", "arc+smea", "arc+faba"),
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
    assert set(robust.known()) == {name.split("(")[0] for name in ORACLES} | ELSEWHERE


@pytest.mark.parametrize("mode", ["deterministic", "fast"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("n", "f", "d"), [(7, 2, 501), (12, 3, 40), (13, 0, 300)])
def test_rule_equals_its_definition(name: str, n: int, f: int, d: int, mode: str) -> None:
    x_ND = rows_with_liars(n, n, f, d)
    rule = robust.get(name)
    state = {key: torch.tensor(own_vector(d), dtype=torch.float32) for key in rule.last.inputs}
    x = torch.tensor(x_ND, dtype=torch.float32)
    found_D = rule(x, f, state=state or None, mode=mode)
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
    """Negative control: no two rules agree on all of four inputs, so none can stand in."""
    draw = np.random.default_rng(0).standard_normal
    noise_ND = draw((12, 40)) + 0.5 * np.random.default_rng(99).standard_normal(40)
    inputs = [*(rows_with_liars(seed, 12, 3, 40) for seed in range(3)), noise_ND]
    results = {name: np.stack([oracle(name, x_ND, 3) for x_ND in inputs]) for name in NAMES}
    for (name, result_D), (other, other_D) in combinations(results.items(), 2):
        assert not np.allclose(result_D, other_D, rtol=3e-5, atol=3e-5), (name, other)


def test_both_neighbour_counts_of_krum_choose_as_published() -> None:
    rows_differ = 0
    for seed in range(20):
        x_ND = np.random.default_rng(seed).standard_normal((7, 3)).astype(np.float32)
        orders = krum_order(x_ND, 2), krum_order_allouah(x_ND, 2)
        for variant, order in zip(("blanchard", "allouah"), orders, strict=True):
            found_D = robust.Krum(variant=variant)(torch.tensor(x_ND), 2)
            np.testing.assert_allclose(found_D.numpy(), x_ND[order[0]], rtol=1e-6)
        rows_differ += orders[0][0] != orders[1][0]
    assert rows_differ > 0


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
