"""Weight space: contributions as coefficients over rows and references, and their Gram matrix.

Pre-aggregations and span rules never touch the vectors. They read inner products and return
coefficients; the vectors are combined once, at the end. References (the zero vector to which
clipping pulls, a rule's history) are points like the rows, behind them.

    Gram matrix → refuse by norm → stage → stage → ... → (coefficients, Gram matrix)

Shapes: N contributions, M mixed rows, R references, T = N + R, P = M + R, D coordinates,
B columns of one block.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from torchbft.tensors.aggregation.geometry import beyond_norm_bound, squared_distances
from torchbft.tensors.aggregation.rule import Case, PreAggregation
from torchbft.tensors.exact import Float64s, matmul_in_order, sqrt


@dataclass(frozen=True)
class Mixture:
    """M mixed rows, f of them a liar's: x'_m = Σ_t coefficients_MT[m, t] · x_t.

    gram_before: inner products of what step_PP, the last stage's mixing, was applied to (None: not
    mixed yet). names: of the references, in order. norms_N: of the original rows.
    """

    f: int
    coefficients_MT: Float64s
    gram_before: Float64s
    step_PP: Float64s | None
    names: tuple[str, ...]
    refused: tuple[int, ...]
    norms_N: list[float]

    @property
    def m(self) -> int:
        """The number of mixed rows."""
        return len(self.coefficients_MT)

    @property
    def refs(self) -> dict[str, int]:
        """Where each reference stands in ``gram_PP``."""
        return {name: self.m + place for place, name in enumerate(self.names)}

    @cached_property
    def gram_PP(self) -> Float64s:
        """Inner products of the mixed rows, then of the references, about a common centre."""
        if self.step_PP is None:
            return self.gram_before
        return matmul_in_order(matmul_in_order(self.step_PP, self.gram_before), self.step_PP.T)

    def compose(self, mixing_MP: Float64s) -> Float64s:
        """Turn coefficients over mixed rows and references into ones over the original points."""
        return matmul_in_order(mixing_MP, self._with_references(self.coefficients_MT))

    def mixed_by(self, stage: PreAggregation) -> Mixture:
        """Return the mixture after one more stage."""
        mixing_MP = stage.select(self.gram_PP, n=self.m, f=self.f, refs=self.refs)
        return replace(
            self,
            coefficients_MT=self.compose(mixing_MP),
            gram_before=self.gram_PP,
            step_PP=self._with_references(mixing_MP),
        )

    def _with_references(self, matrix: Float64s) -> Float64s:
        points = matrix.shape[1]
        return np.concatenate((matrix, np.eye(points)[points - len(self.names) :]))


def mixture_of(gram_TT: Float64s, case: Case) -> Mixture:
    """Refuse what lies beyond the norm bound, then run the stages."""
    n, f = case.n, case.f
    norms_N = sqrt(squared_distances(gram_TT)[n, :n]).tolist()
    # With a majority of liars the median is theirs: rules that allow it trust something else.
    refused = beyond_norm_bound(gram_TT, n, f) if 2 * f < n else ()
    kept = [place for place in range(len(gram_TT)) if place not in refused]
    coefficients_MT = np.eye(len(gram_TT))[kept[: n - len(refused)]]
    gram_PP = gram_TT[np.ix_(kept, kept)] if refused else gram_TT
    mixture = Mixture(
        f - len(refused), coefficients_MT, gram_PP, None, case.names, refused, norms_N
    )
    for stage in case.stages:
        mixture = mixture.mixed_by(stage)
    return mixture


def shares(weights_N: Float64s) -> list[float]:
    """Scale non-negative weights to sum 1, as Python floats; all zero stays all zero."""
    total = 0.0
    for weight in weights_N.tolist():
        total += weight
    return [weight / total if total > 0.0 else 0.0 for weight in weights_N.tolist()]
