"""Rules whose result is a weighted sum of the rows, with weights from their inner products.

Shapes: N contributions, M mixed rows, R references, P = M + R points, T = N + R, D coordinates.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from torchbft.primitives.errors import PreconditionError
from torchbft.tensors.aggregation.geometry import PLAIN_COLUMNS, kth_smallest, squared_distances
from torchbft.tensors.aggregation.mixture import mixture_of, shares
from torchbft.tensors.aggregation.rule import (
    AggregationInfo,
    Case,
    Plan,
    PreAggregation,
    Rule,
    RuleState,
    Work,
)
from torchbft.tensors.exact import (
    Float64s,
    row_norms,
    spans,
    sqrt,
    sum_in_order,
    weighted_sum,
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

    def plan(self, gram_TT: Float64s | None, case: Case) -> Plan:
        """See Rule."""
        assert gram_TT is not None
        mixture = mixture_of(gram_TT, case)
        weights_P = self.select(mixture.gram_PP, n=mixture.m, f=mixture.f, refs=mixture.refs)
        weights_T = mixture.compose(weights_P[None, :])
        return Plan(weights_T, mixture.f, mixture.refused, mixture.norms_N)

    def carry_out(self, work: Work, plan: Plan) -> AggregationInfo:
        """See Rule."""
        assert plan.mixing_MT is not None
        return combine_rows(work, plan.mixing_MT[0], plan)


def combine_rows(work: Work, weights_T: Float64s, plan: Plan) -> AggregationInfo:
    """Write Σ w_t·x_t over rows and references to ``work.out_D``; report the weights."""
    rows_ND, out_D, n = work.rows_ND, work.out_D, work.rows_ND.shape[0]
    if work.exact:
        weighted_sum(weights_T[:n], rows_ND, out_D)
    else:
        weights_N = torch.from_numpy(weights_T[:n]).to(out_D)
        (used,) = np.nonzero(weights_T[:n])
        chosen = slice(int(used[0]), int(used[0]) + 1) if len(used) == 1 else slice(0, n)
        for span in spans(len(out_D), PLAIN_COLUMNS):
            block_NB = rows_ND[chosen, span].to(out_D.dtype)
            torch.mv(block_NB.t(), weights_N[chosen], out=out_D[span])
    for weight, vector_D in zip(weights_T[n + 1 :].tolist(), work.state.values(), strict=True):
        if weight != 0.0:
            out_D.copy_(out_D.double() + vector_D.double() * weight)
    norms_N = plan.norms_N or (row_norms(rows_ND) if work.info else [])
    return AggregationInfo(shares(weights_T[:n]), plan.refused, norms_N)


class Mean(SpanRule):
    """Arithmetic mean (1/n)·Σ x_i. Tolerates no liar. Need f = 0. Cost O(nd)."""

    name = "mean"
    requirement = "f = 0"

    def fits(self, n: int, f: int) -> bool:
        """f = 0."""
        return f == 0

    def kappa(self, n: int, f: int) -> float | None:
        """0: it is the mean."""
        return 0.0

    def weights(self, n: int) -> Float64s:
        """The weight of each row, of sum 1."""
        return equal_weights(range(n), n)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return the weights, none for the references."""
        weights_P = np.zeros(len(gram_PP))
        weights_P[:n] = self.weights(n)
        return weights_P

    def reads_gram(self, stages: tuple[PreAggregation, ...]) -> bool:
        """Without stages no distance is needed and no row is refused."""
        return bool(stages)

    def plan(self, gram_TT: Float64s | None, case: Case) -> Plan:
        """See Rule."""
        if gram_TT is not None:
            return super().plan(gram_TT, case)
        return Plan(np.append(self.weights(case.n), np.zeros(len(case.names)))[None], case.f)


def equal_weights(chosen: range | list[int], size: int) -> Float64s:
    weights = np.zeros(size)
    weights[list(chosen)] = 1.0 / len(chosen)
    return weights


class WeightedMean(Mean):
    """Σ w_i·x_i / Σ w_i with weights that the caller fixed: Σ over rows in order of peer id.

    No weight may be more than ``most`` times their mean (and none 0, negative or not finite): it is
    refused, never clamped, so that no member owns the average. Without weights it is the mean.
    Tolerates no liar. Need f = 0, and as many weights as rows. Cost O(nd).
    Source: McMahan et al. 2017, "Communication-efficient learning of deep networks from
    decentralized data", algorithm 1, by sample counts; the bound is ours (case: a count of 1e9).
    """

    name = "weighted_mean"
    requirement = "f = 0 and one weight per row"

    def __init__(self, weights: Sequence[float] | None = None, most: float = 4.0) -> None:
        self.given = None if weights is None else [float(weight) for weight in weights]
        if self.given is None:
            return
        bound = most * math.fsum(self.given) / max(1, len(self.given))
        for row, weight in enumerate(self.given):
            if not 0.0 < weight <= bound < math.inf:
                raise PreconditionError(
                    f"weighted_mean refuses the weight {weight} of row {row}",
                    where="aggregation",
                    hint=f"weights are above 0 and at most {most} times their mean",
                )

    def fits(self, n: int, f: int) -> bool:
        """f = 0, and each row has its weight."""
        return f == 0 and (self.given is None or len(self.given) == n)

    def kappa(self, n: int, f: int) -> float | None:
        """None with weights: it is then another mean than the plain one."""
        return super().kappa(n, f) if self.given is None else None

    def weights(self, n: int) -> Float64s:
        """The weight of each row, of sum 1."""
        if self.given is None:
            return super().weights(n)
        total = math.fsum(self.given)
        return np.array([weight / total for weight in self.given])


_OTHERS = {"blanchard": 2, "allouah": 1}
"""How many of the n − f rows nearest to a row, itself among them, a Krum score leaves out."""


def krum_scores(distances_NN: Float64s, count: int) -> list[float]:
    """Return for each row the sum of its squared distances to the ``count`` nearest others."""
    scores: list[float] = sum_in_order(np.sort(distances_NN, axis=1)[:, 1 : count + 1]).tolist()
    return scores


class MultiKrum(SpanRule):
    """Mean of the m rows with the least Krum score.

    score_i = Σ of ‖x_i − x_j‖² over the nearest other rows j; ties go to the first row. Cost
    O(n²d). Two counts of neighbours are published:

    - ``variant="blanchard"``, the default: n − f − 2. Need n ≥ 2f + 3 and 1 ≤ m ≤ n − f − 2, which
      is also the default m. Source: Blanchard et al. 2017, "Machine learning with adversaries",
      section 4 and, for m, Damaskinos et al. 2019 (AggregaThor): with at most n − f − 2 chosen rows
      it stays resilient.
    - ``variant="allouah"``: n − f − 1 (the n − f nearest, itself first). Need 2f < n and
      1 ≤ m ≤ n − f, the default m. Source: Allouah et al. 2023, "Fixing by mixing", appendix 8.1.3.
    """

    name = "multi_krum"

    def __init__(self, m: int | None = None, variant: str = "blanchard") -> None:
        if variant not in _OTHERS:
            raise PreconditionError(
                f"{self.name} has no variant {variant[:40]!r}", hint=f"one of {', '.join(_OTHERS)}"
            )
        self.m, self.variant = m, variant

    def _most(self, n: int, f: int) -> int:
        return n - f - 2 if self.variant == "blanchard" else n - f

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless n, f and m fit."""
        if self.variant == "blanchard":
            self.need(n >= 2 * f + 3, "n >= 2f + 3", n=n, f=f)
        super().check(n=n, f=f)
        if self.m is not None:
            most = "n - f - 2" if self.variant == "blanchard" else "n - f"
            self.need(1 <= self.m <= self._most(n, f), f"1 <= m <= {most} (m={self.m})", n=n, f=f)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return equal weights for the m rows of least score."""
        count = n - f - _OTHERS[self.variant]
        scores = krum_scores(squared_distances(gram_PP[:n, :n]), count)
        best = sorted(range(n), key=scores.__getitem__)
        return equal_weights(best[: self.m or self._most(n, f)], len(gram_PP))


class Krum(MultiKrum):
    """The row with the least Krum score (MultiKrum with m = 1; ``variant`` as there).

    Need n ≥ 2f + 3 (``blanchard``) or 2f < n (``allouah``, proven: κ = 6(1 + f/(n − 2f))).
    Cost O(n²d). Source: Blanchard et al. 2017, section 4; n − f − 2 neighbours as there.
    """

    name = "krum"

    def __init__(self, variant: str = "blanchard") -> None:
        super().__init__(1, variant)

    def kappa(self, n: int, f: int) -> float | None:
        """6(1 + f/(n − 2f)): Allouah et al. 2023, proposition 3, for the variant it is for."""
        return 6 * (1 + f / (n - 2 * f)) if self.variant == "allouah" else None


class GeometricMedian(SpanRule):
    """The point z with the least Σ ‖z − x_i‖, by smoothed Weiszfeld steps in weight space.

    z ← Σ w_i·x_i / Σ w_i, w_i = 1/max(ν, ‖z − x_i‖), from the mean. ν is relative to the rows'
    spread, so that the rule scales with its input. Need 2f < n. Cost O(n²d).
    Source: Pillutla, Kakade and Harchaoui 2022, "Robust aggregation for federated learning",
    algorithm 2 (equal weights).
    """

    name = "geometric_median"

    def kappa(self, n: int, f: int) -> float:
        """4(1 + f/(n − 2f))²: Allouah et al. 2023, proposition 4."""
        return 4 * (1 + f / (n - 2 * f)) ** 2

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return the last step's weights."""
        weights_P = equal_weights(range(n), len(gram_PP))
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

    History: ``centre``, the previous aggregate; zero before the first round. With
    ``history=False`` there is none, and the centre starts at the row whose (n−f)-th nearest row is
    nearest (the first of such rows): robust from the first step, and it moves with its input.
    ``threshold`` τ is absolute if given; otherwise, in each of the ``iterations``, the (n−f)-th
    smallest distance to the centre, so that the rule scales with its input and equals the mean at
    f = 0. Need 2f < n. Cost O(n²d).
    Source: Karimireddy, He and Jaggi 2021, "Learning from history for Byzantine robust
    optimization", algorithm 2; the adaptive τ and the start without history are variants.
    """

    name = "centred_clipping"
    _CENTRE = "centre"

    def __init__(
        self, threshold: float | None = None, iterations: int = 3, history: bool = True
    ) -> None:
        if (threshold is not None and not threshold > 0.0) or iterations < 1:
            raise PreconditionError("centred_clipping needs threshold > 0 and iterations >= 1")
        self.threshold, self.iterations, self.history = threshold, iterations, history

    def init(self, d: int, device: torch.device | str | None = None) -> RuleState:
        """The centre starts at zero, in float32 (float64 once an aggregate was)."""
        return {self._CENTRE: torch.zeros(d, device=device)} if self.history else {}

    def advance(self, state: RuleState, result_D: Tensor) -> RuleState:
        """The centre of the next round is this round's result."""
        return {self._CENTRE: result_D} if self.history else {}

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return the coefficients of v over rows and centre."""
        weights_P = np.zeros(len(gram_PP))
        if self.history:
            weights_P[refs[self._CENTRE]] = 1.0
        else:
            sorted_NN = np.sort(squared_distances(gram_PP[:n, :n]), axis=1)
            weights_P[int(sorted_NN[:, n - f - 1].argmin())] = 1.0
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
