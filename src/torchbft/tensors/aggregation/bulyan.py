"""Bulyan: Krum picks rows one after another, then each coordinate is judged among them.

Shapes: N rows, P rows and references.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from torchbft.tensors.aggregation.coordinate import ClosestToMedian
from torchbft.tensors.aggregation.geometry import squared_distances
from torchbft.tensors.aggregation.rule import Case, Plan, PreAggregation
from torchbft.tensors.aggregation.span import krum_scores
from torchbft.tensors.exact import Float64s


class RepeatedKrum(PreAggregation):
    """Bulyan's first step: n − 2f times the row of least Krum score among those left is picked.

    Of r rows left the r − f − 2 nearest count, at least one. Where two rows are each other's only
    neighbours their scores are equal: then the one nearer to all that are left is picked, then the
    first.
    Need n >= 4f + 3. Cost O(n²d). Source: El Mhamdi et al. 2018, section 4.
    """

    name = "repeated_krum"
    requirement = "n >= 4f + 3"

    def fits(self, n: int, f: int) -> bool:
        """n >= 4f + 3."""
        return n >= 4 * f + 3

    def rows_after(self, n: int, f: int) -> int:
        """n − 2f rows are picked."""
        return n - 2 * f

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return one picked row per mixed row, in order of row."""
        distances_NN, left = squared_distances(gram_PP[:n, :n]), list(range(n))
        while len(left) > 2 * f:
            among_LL = distances_NN[np.ix_(left, left)]
            scores = krum_scores(among_LL, max(1, len(left) - f - 2))
            totals = krum_scores(among_LL, len(left))
            left.pop(min(range(len(left)), key=lambda place: (scores[place], totals[place])))
        picked = sorted(set(range(n)) - set(left))
        return np.eye(len(gram_PP))[picked]


class Bulyan(ClosestToMedian):
    """Of n − 2f rows picked by Krum, the n − 4f values of each coordinate nearest to its median.

    The result is their mean.

    Need n >= 4f + 3. Cost O(n²d + n log² n · d). No published κ.
    Source: El Mhamdi, Guerraoui and Rouault 2018, "The hidden vulnerability of distributed learning
    in Byzantium", section 4, with Krum as the base rule, θ = n − 2f and β = θ − 2f.
    """

    name = "bulyan"
    requirement = "n >= 4f + 3"

    def fits(self, n: int, f: int) -> bool:
        """n >= 4f + 3."""
        return n >= 4 * f + 3

    def count(self, m: int, f: int) -> int:
        """β = θ − 2f of the θ = m picked rows."""
        return m - 2 * f

    def reads_gram(self, stages: tuple[PreAggregation, ...]) -> bool:
        """Krum does."""
        return True

    def plan(self, gram_TT: Float64s | None, case: Case) -> Plan:
        """See Rule."""
        return super().plan(gram_TT, replace(case, stages=(*case.stages, RepeatedKrum())))
