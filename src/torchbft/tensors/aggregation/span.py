"""Rules whose result is a weighted sum of the rows, with weights from their inner products.

Shapes: N contributions, M mixed rows, R references, P = M + R points, T = N + R, D coordinates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from torchbft.primitives.errors import PreconditionError
from torchbft.tensors.aggregation.geometry import kth_smallest, squared_distances
from torchbft.tensors.aggregation.mixture import ZERO, mixture_of, shares
from torchbft.tensors.aggregation.rule import AggregationInfo, Rule, RuleState, Work
from torchbft.tensors.exact import (
    Float64s,
    row_norms,
    sqrt,
    sum_in_order,
    weighted_sum,
    working_dtype,
)

WEISZFELD_STEPS = 100
"""Weiszfeld converges linearly; published uses stop after 3 to 10 steps."""
WEISZFELD_TOLERANCE = 2.0**-40
"""Weights that all change by less than this moved the point by nothing float32 can show."""
WEISZFELD_SMOOTHING = 2.0**-20
"""ν relative to the (n−f)-th smallest distance to the mean: a row nearer than ν counts as hit."""


class SpanRule(Rule):
    """A rule that returns Σ_p w_p·x_p over rows and references."""

    @abstractmethod
    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return weights_P of sum 1.

        gram_PP: inner products, about a common centre, of n rows (f of them a liar's) and
        of the references, which stand where ``refs`` says.
        """

    def run(self, work: Work) -> tuple[Tensor, AggregationInfo]:
        """See Rule."""
        n = work.rows_ND.shape[0]
        mixture = mixture_of(work)
        weights_P = self.select(mixture.gram_PP, n=mixture.m, f=mixture.f, refs=mixture.refs)
        weights_T = mixture.compose(weights_P[None, :])[0]
        result_D = _combine(work, weights_T, mixture.references)
        info = AggregationInfo(shares(weights_T[:n]), mixture.refused, mixture.norms_N)
        return result_D, info


def _combine(work: Work, weights_T: Float64s, references: Mapping[str, Tensor]) -> Tensor:
    rows_ND, n = work.rows_ND, work.rows_ND.shape[0]
    dtype = working_dtype(rows_ND.dtype)
    if not work.exact:
        result_D = torch.from_numpy(weights_T[:n]).to(rows_ND.device, dtype) @ rows_ND.to(dtype)
    else:
        result_D = weighted_sum(weights_T[:n], rows_ND)
    for weight, (name, vector_D) in zip(weights_T[n:].tolist(), references.items(), strict=True):
        if name != ZERO and weight != 0.0:
            result_D = (result_D.double() + vector_D.double() * weight).to(dtype)
    return result_D


class Mean(SpanRule):
    """Arithmetic mean (1/n)·Σ x_i. Tolerates no liar: need f = 0. Cost O(nd)."""

    name = "mean"

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless f = 0."""
        self.need(f == 0, "f = 0", n=n, f=f)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return 1/n for each row."""
        return _equal_weights(range(n), len(gram_PP))

    def run(self, work: Work) -> tuple[Tensor, AggregationInfo]:
        """See Rule. Without stages no distance is needed and no row is refused."""
        if work.stages:
            return super().run(work)
        n = work.rows_ND.shape[0]
        weights_N = _equal_weights(range(n), n)
        norms_N = row_norms(work.rows_ND) if work.info else []
        return _combine(work, weights_N, {}), AggregationInfo(shares(weights_N), (), norms_N)


def _equal_weights(chosen: range | list[int], size: int) -> Float64s:
    weights = np.zeros(size)
    weights[list(chosen)] = 1.0 / len(chosen)
    return weights


class MultiKrum(SpanRule):
    """Mean of the m rows with the least Krum score; m = n − f − 2 unless given.

    score_i = Σ of ‖x_i − x_j‖² over the n − f − 2 nearest other rows j; ties go to the first row.
    Need n ≥ 2f + 3 and 1 ≤ m ≤ n − f − 2. Cost O(n²d).
    Source: Blanchard et al. 2017, "Machine learning with adversaries", section 4 and, for m,
    Damaskinos et al. 2019 (AggregaThor): with at most n − f − 2 chosen rows it stays resilient.
    """

    name = "multi_krum"

    def __init__(self, m: int | None = None) -> None:
        self.m = m

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless n ≥ 2f + 3 and m fits."""
        self.need(n >= 2 * f + 3, "n >= 2f + 3", n=n, f=f)
        if self.m is not None:
            self.need(1 <= self.m <= n - f - 2, f"1 <= m <= n - f - 2 (m={self.m})", n=n, f=f)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return equal weights for the m rows of least score."""
        nearest_NN = np.sort(squared_distances(gram_PP[:n, :n]), axis=1)[:, 1 : n - f - 1]
        scores_N = sum_in_order(nearest_NN).tolist()
        best = sorted(range(n), key=scores_N.__getitem__)
        return _equal_weights(best[: self.m or n - f - 2], len(gram_PP))


class Krum(MultiKrum):
    """The row with the least Krum score (MultiKrum with m = 1).

    Need n ≥ 2f + 3. Source: Blanchard et al. 2017, section 4; n − f − 2 neighbours as there.
    """

    name = "krum"

    def __init__(self) -> None:
        super().__init__(m=1)


class GeometricMedian(SpanRule):
    """The point z with the least Σ ‖z − x_i‖, by smoothed Weiszfeld steps in weight space.

    z ← Σ w_i·x_i / Σ w_i, w_i = 1/max(ν, ‖z − x_i‖), from the mean. ν is relative to the rows'
    spread, so that the rule scales with its input. Need 2f < n. Cost O(n²d).
    Source: Pillutla, Kakade and Harchaoui 2022, "Robust aggregation for federated learning",
    algorithm 2 (equal weights).
    """

    name = "geometric_median"

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless 2f < n."""
        self.need(2 * f < n, "2f < n", n=n, f=f)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return the last step's weights."""
        weights_P = _equal_weights(range(n), len(gram_PP))
        distances_N = distances_to(gram_PP, weights_P)[:n]
        smoothing = WEISZFELD_SMOOTHING * kth_smallest(distances_N, n - f)
        if smoothing == 0.0:  # n − f rows coincide with their mean: it is the median
            return weights_P
        for _ in range(WEISZFELD_STEPS):
            before_P, weights_P = weights_P, np.zeros_like(weights_P)
            inverse_N = 1.0 / np.maximum(distances_N, smoothing)
            weights_P[:n] = inverse_N / sum_in_order(inverse_N)
            if float(np.abs(weights_P - before_P).max()) < WEISZFELD_TOLERANCE:
                break
            distances_N = distances_to(gram_PP, weights_P)[:n]
        return weights_P


def distances_to(gram_PP: Float64s, weights_P: Float64s) -> Float64s:
    """Return the distance of each point to Σ w_p·x_p, for weights of sum 1."""
    product_P = sum_in_order(gram_PP * weights_P)
    square = sum_in_order(product_P * weights_P)
    return sqrt(np.maximum(gram_PP.diagonal() - 2.0 * product_P + square, 0.0))


class CentredClipping(SpanRule):
    """Rows clipped around the previous aggregate: v ← v + (1/n)·Σ (x_i − v)·min(1, τ/‖x_i − v‖).

    History: ``centre``, the previous aggregate; zero before the first round. ``threshold`` τ is
    absolute if given; otherwise, in each of the ``iterations``, the (n−f)-th smallest distance to
    the centre, so that the rule scales with its input and equals the mean at f = 0.
    Need 2f < n. Cost O(n²d).
    Source: Karimireddy, He and Jaggi 2021, "Learning from history for Byzantine robust
    optimization", algorithm 2; the adaptive τ is a variant.
    """

    name = "centred_clipping"
    _CENTRE = "centre"

    def __init__(self, threshold: float | None = None, iterations: int = 3) -> None:
        if (threshold is not None and not threshold > 0.0) or iterations < 1:
            raise PreconditionError("centred_clipping needs threshold > 0 and iterations >= 1")
        self.threshold, self.iterations = threshold, iterations

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless 2f < n."""
        self.need(2 * f < n, "2f < n", n=n, f=f)

    def init(self, d: int, device: torch.device | str | None = None) -> RuleState:
        """The centre starts at zero, in float32 (float64 once an aggregate was)."""
        return {self._CENTRE: torch.zeros(d, device=device)}

    def advance(self, state: RuleState, result_D: Tensor) -> RuleState:
        """The centre of the next round is this round's result."""
        return {self._CENTRE: result_D}

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return the coefficients of v over rows and centre."""
        weights_P = np.zeros(len(gram_PP))
        weights_P[refs[self._CENTRE]] = 1.0
        for _ in range(self.iterations):
            distances_N = distances_to(gram_PP, weights_P)[:n]
            pull_N = clip_factors(distances_N, self._radius(distances_N, n - f)) / n
            weights_P = weights_P * (1.0 - sum_in_order(pull_N))
            weights_P[:n] += pull_N
        return weights_P

    def _radius(self, distances_N: Float64s, rank: int) -> float:
        return kth_smallest(distances_N, rank) if self.threshold is None else self.threshold


def clip_factors(lengths_N: Float64s, bound: float) -> Float64s:
    """Return min(1, bound / length), 1 where the length is 0."""
    return np.divide(bound, lengths_N, out=np.ones_like(lengths_N), where=lengths_N > bound)
