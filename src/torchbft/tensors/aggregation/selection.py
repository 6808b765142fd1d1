"""Span rules that choose rows, or weigh them, as a group: by diameter, by spread, by length.

All need 2f < n unless they say otherwise, and read the Gram matrix only.

Shapes: N contributions, P rows and references, S sets of rows, K rows of a set.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations, islice
from math import comb

import numpy as np

from torchbft.primitives.errors import PreconditionError
from torchbft.tensors.aggregation.covers import cover_fits, first_without_conflict
from torchbft.tensors.aggregation.geometry import squared_distances
from torchbft.tensors.aggregation.rule import ZERO
from torchbft.tensors.aggregation.span import SpanRule, distances_to, equal_weights
from torchbft.tensors.aggregation.spectrum import gram_about, top_eigenpairs
from torchbft.tensors.exact import Float64s, sqrt, sum_in_order

MOST_SETS = 1 << 16
"""Sets of rows that SMEA looks at: some seconds. n=20, f=5 has 15504."""
_SETS_AT_ONCE = 1 << 11
"""Gram matrices held at once: 4 MiB at 16 rows."""


def nearest(distances_N: Float64s, count: int) -> list[int]:
    """Return the rows of the ``count`` least distances; ties go to the first row."""
    return sorted(range(len(distances_N)), key=distances_N.tolist().__getitem__)[:count]


class MDA(SpanRule):
    """Minimum diameter averaging: the mean of the n − f rows whose largest distance is least.

    S* ∈ argmin over |S| = n − f of max_{i,j∈S} ‖x_i − x_j‖. Of several such sets the one of the
    lowest rows is taken: the paper leaves the choice open. Need 2f < n. Cost O(n²d) and an exact
    search that a bound on the vertex cover keeps to 1.47^f steps, not the n over f of trying all.
    Proven: κ = 8f²/(n − f), from (f, 2f/(n−f))-resilience (Farhadkhani et al. 2022, "Byzantine
    machine learning made easy by resilient averaging of momentums", table 1) and diameter² <=
    2(n−f)·variance.
    Source: El Mhamdi et al. 2021, "Distributed momentum for Byzantine-resilient SGD", section 2.3;
    Rousseeuw 1985.
    """

    name = "mda"

    def kappa(self, n: int, f: int) -> float:
        """8f²/(n − f)."""
        return 8 * f * f / (n - f)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return equal weights for the chosen set."""
        distances_NN = squared_distances(gram_PP[:n, :n])
        levels, everyone = sorted(set(distances_NN.flatten().tolist())), (1 << n) - 1
        low, high = 0, len(levels) - 1
        while low < high:
            middle = (low + high) >> 1
            if cover_fits(_beyond(distances_NN, levels[middle]), everyone, f):
                high = middle
            else:
                low = middle + 1
        chosen = first_without_conflict(_beyond(distances_NN, levels[low]), f)
        return equal_weights(chosen[: n - f], len(gram_PP))


def _beyond(distances_NN: Float64s, level: float) -> list[int]:
    """Return for each row, as bits, the rows that lie farther from it than the level."""
    return [
        sum(1 << column for column in np.flatnonzero(row_N > level).tolist())
        for row_N in distances_NN
    ]


class SMEA(SpanRule):
    """Smallest maximum eigenvalue averaging: the mean of the n − f rows that spread least.

    S* ∈ argmin over |S| = n − f of λ_max of the covariance of S; ties go to the lowest rows.
    Need 2f < n and no more than 2^16 sets (n over f). Cost O(n²d + sets·n³).
    Proven: κ = 4f/(n−f)·(1 + f/(n−2f))².
    Source: Allouah et al. 2023, "On the privacy-robustness-utility trilemma in distributed
    learning", section 4.
    """

    name = "smea"
    requirement = f"2f < n and n over f <= {MOST_SETS}"

    def fits(self, n: int, f: int) -> bool:
        """2f < n, and the sets can be looked at."""
        return 2 * f < n and comb(n, f) <= MOST_SETS

    def kappa(self, n: int, f: int) -> float:
        """4f/(n−f)·(1 + f/(n−2f))²."""
        return 4 * f / (n - f) * (1 + f / (n - 2 * f)) ** 2

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return equal weights for the chosen set."""
        best, least, sets = tuple(range(n - f)), np.inf, combinations(range(n), n - f)
        while some := list(islice(sets, _SETS_AT_ONCE)):
            values_S = _spread(gram_PP, np.array(some))
            if float(values_S.min()) < least:
                best, least = some[int(values_S.argmin())], float(values_S.min())
        return equal_weights(list(best), len(gram_PP))


def _spread(gram_PP: Float64s, sets_SK: np.ndarray) -> Float64s:
    """Return the largest eigenvalue of the scatter of each set of rows."""
    gram_SKK = gram_PP[sets_SK[:, :, None], sets_SK[:, None, :]]
    mean_SK = sum_in_order(gram_SKK) / sets_SK.shape[1]
    square_S = sum_in_order(mean_SK) / sets_SK.shape[1]
    centred_SKK = gram_SKK - (mean_SK[:, :, None] + mean_SK[:, None, :]) + square_S[:, None, None]
    return top_eigenpairs(centred_SKK)[0]


class CGE(SpanRule):
    """Comparative gradient elimination: the mean of the n − f shortest rows.

    Ties go to the first row. Need 2f < n. Cost O(nd). Not robust in the sense of κ: it guards where
    honest rows almost agree (2f-redundancy) and nowhere else.
    Source: Liu, Gupta and Vaidya 2021, "Approximate Byzantine fault-tolerance in distributed
    optimization", equation 22; the mean instead of the sum.
    """

    name = "cge"

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return equal weights for the shortest rows."""
        lengths_N = squared_distances(gram_PP)[refs[ZERO], :n]
        return equal_weights(nearest(lengths_N, n - f), len(gram_PP))


class FABA(SpanRule):
    """f times the row farthest from the mean of the rest goes; then their mean.

    Of equally far rows the last one goes. Need 2f < n. Cost O(n²d). No published κ.
    Source: Xia et al. 2019, "FABA: an algorithm for fast aggregation against Byzantine attacks in
    distributed neural networks", algorithm 1.
    """

    name = "faba"

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return equal weights for the rows that stay."""
        left = list(range(n))
        for _ in range(f):
            distances = distances_to(gram_PP, equal_weights(left, len(gram_PP))).tolist()
            left.remove(max(reversed(left), key=distances.__getitem__))
        return equal_weights(left, len(gram_PP))


class NNA(SpanRule):
    """Nearest-neighbour averaging, as in MoNNA: the mean of the n − f rows nearest to one's own.

    The own vector comes with each call: ``rule(updates, f, state={"own": own_D})``; it is one of
    the rows as well if it shall count. Ties go to the first row. Each peer gets another result, so
    a run with one agreed model cannot use it. Need 2f < n. Cost O(nd).
    Source: Farhadkhani et al. 2023, "Robust collaborative learning with linear gradient overhead",
    algorithm 1, line 7.
    """

    name = "nna"
    inputs = ("own",)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return equal weights for the nearest rows."""
        distances_N = squared_distances(gram_PP)[refs["own"], :n]
        return equal_weights(nearest(distances_N, n - f), len(gram_PP))


class DnC(SpanRule):
    """Divide and conquer: the ⌈c·f⌉ rows that stand out most along the top direction go.

    score_i = ⟨x_i − x̄, v⟩², v the top right singular vector of the centred rows; the mean of the
    rest. Of equal scores the last go. Need ⌈c·f⌉ < n and 2f < n. Cost O(n²d). No published κ.
    Variant: on all coordinates instead of repeatedly on a random 10,000 of them, which the Gram
    matrix makes as cheap; so one iteration is all, and there is nothing to draw.
    Source: Shejwalkar and Houmansadr 2021, "Manipulating the Byzantine", algorithm 2.
    """

    name = "dnc"
    requirement = "2f < n and ⌈c·f⌉ < n"

    def __init__(self, c: float = 1.0) -> None:
        if not 0.0 < c <= 2.0:
            raise PreconditionError(f"dnc needs 0 < c <= 2, not {c}")
        self.c = c

    def fits(self, n: int, f: int) -> bool:
        """Some row stays."""
        return 2 * f < n and self._removed(f) < n

    def _removed(self, f: int) -> int:
        return int(np.ceil(self.c * f))

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return equal weights for the rows that stay."""
        centred_NN = gram_about(gram_PP[:n, :n], np.full(n, 1.0 / n))
        scores_N = np.square(top_eigenpairs(centred_NN[None])[1][0])
        return equal_weights(nearest(scores_N, n - self._removed(f)), len(gram_PP))


class CAF(SpanRule):
    """Covariance bound-agnostic filter: weights fall along the top direction until 2f are gone.

    From c = 1: with μ, Σ the c-weighted mean and covariance, v its top eigenvector and
    τ_i = ⟨v, x_i − μ⟩², c_i ← c_i·(1 − τ_i/max τ), while Σ c_i > n − 2f. The result is the μ whose
    covariance had the least top eigenvalue. At f = 0 the mean. Need 2f < n. Cost O(n²d + f·n³).
    Proven: κ = O(f/n) with respect to the spectral norm, for n >= (2 + η)f, constants not given.
    Source: Allouah et al. 2025, "Towards trustworthy federated learning with untrusted
    participants", algorithm 2.
    """

    name = "caf"

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return the normalised weights of the best step."""
        best_N = counts_N = np.ones(n)
        least = np.inf
        while float(sum_in_order(counts_N)) > n - 2 * f:  # at least one count falls to 0 each time
            weights_N = counts_N / sum_in_order(counts_N)
            centred_NN, roots_N = gram_about(gram_PP[:n, :n], weights_N), sqrt(weights_N)
            scaled_NN = centred_NN * (roots_N[:, None] * roots_N)
            (value,), (vector_N,) = top_eigenpairs(scaled_NN[None])
            if value < least:
                best_N, least = counts_N, value
            squares_N = np.square(sum_in_order(centred_NN * (roots_N * vector_N)))
            squares_N[counts_N == 0.0] = 0.0
            if float(squares_N.max()) == 0.0:
                break
            counts_N = counts_N * (1.0 - squares_N / squares_N.max())
        weights_P = np.zeros(len(gram_PP))
        weights_P[:n] = best_N / sum_in_order(best_N)
        return weights_P
