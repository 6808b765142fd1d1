"""A little is enough: an update that hides inside the spread of the honest ones.

Shapes: N honest peers, n peers, D parameters, S searched coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from torchbft.attacks.declaration import Expectation, Knowledge, Leaves
from torchbft.attacks.vectors.view import KnownRule, VectorAttack, VectorView

SEARCH_COORDINATES = 4096
"""Coordinates on which z is searched: enough for the distances of a rule, cheap each round."""
LARGEST_Z = 16.0
"""End of the search: under a plain mean the distance grows without end."""
GRID_POINTS = 7
"""The grid 16, 8, ... 0.25."""
REFINEMENTS = (6, 4)
"""Points tried around the best so far, twice: z to 1/12 of itself. No smooth peak is assumed, since
a rule that refuses rows has a cliff just behind it. A run of a rule costs milliseconds, and the
swarm waits for the liar."""


class ALittleIsEnough(VectorAttack):
    """μ − z · σ, μ and σ the coordinate-wise mean and deviation of the honest updates.

    Strength z, or ``"optimal"``, the default: the z of either sign, |z| <= 16, that moves the
    known rule farthest from μ, as ByzFL's optimal ALIE (González et al. 2025) does; where the rule
    is not known, z = 1.5 (its default without search). The published z, ``published_z``, is 0.25 at
    n=7, f=2, which harms nobody. With knowledge ``history`` μ and σ are those of the earlier
    aggregates. Source: Baruch, Baruch and Goldberg (NeurIPS 2019), Algorithm 3.
    """

    name: ClassVar[str] = "alie"
    most_knowledge = Knowledge.OMNISCIENT
    leaves = Leaves.NOTHING
    default_strength = 1.5
    expected = Expectation(named=False, suspected=False, downweighted=False)

    def __init__(
        self, z: float | str | None = None, *, knowledge: Knowledge | str | None = None
    ) -> None:
        self.optimal = z is None or z == "optimal"
        super().__init__(None if isinstance(z, str) else z, knowledge=knowledge)

    def forge(self, view: VectorView) -> Tensor:
        rows_ND = self._rows(view)
        if rows_ND is None or len(rows_ND) < 2:
            return view.own_D.clone()
        mean_D, deviation_D = rows_ND.mean(dim=0), rows_ND.std(dim=0)
        z = self.strength
        if self.optimal and view.rule is not None and len(rows_ND) >= view.n - view.f:
            z = optimal_z(rows_ND, view.f, view.rule)
        return mean_D - z * deviation_D

    def _rows(self, view: VectorView) -> Tensor | None:
        if self.knowledge is Knowledge.OMNISCIENT and view.honest_ND is not None:
            return view.honest_ND
        if self.knowledge is not Knowledge.OWN and view.aggregate_history:
            return torch.stack(list(view.aggregate_history))
        return None


def published_z(n: int, f: int) -> float:
    """The paper's z_max: Φ(z) = (n − f − s)/(n − f) with s = ⌊n/2 + 1⌋ − f supporters needed."""
    supporters = n // 2 + 1 - f
    share = (n - f - supporters) / (n - f)
    return NormalDist().inv_cdf(share) if 0.0 < share < 1.0 else 0.0


def optimal_z(rows_ND: Tensor, f: int, rule: KnownRule) -> float:
    """The z that maximises ‖rule(honest rows, f copies of μ − zσ) − μ‖ over ±(0, 16].

    Some 34 runs of the rule, on SEARCH_COORDINATES of the coordinates.
    """
    stride = max(1, rows_ND.shape[1] // SEARCH_COORDINATES)
    rows_NS = rows_ND[:, ::stride].contiguous()
    mean_S, deviation_S = rows_NS.mean(dim=0), rows_NS.std(dim=0)

    @cache
    def harm(z: float) -> float:
        forged_S = mean_S - z * deviation_S
        aggregate_S = rule(torch.cat([rows_NS, forged_S.expand(f, -1)]))
        distance = float((aggregate_S - mean_S).double().norm())
        return distance if math.isfinite(distance) else 0.0

    return max((_peak(harm, sign) for sign in (1.0, -1.0)), key=harm)


def _peak(harm: Callable[[float], float], sign: float) -> float:
    """The z of one sign with the greatest harm on a doubling grid, then on two finer ones."""
    best = max((sign * LARGEST_Z * 0.5**i for i in range(GRID_POINTS)), key=harm)
    reach = 0.5
    for points in REFINEMENTS:
        steps = [1.0 + reach * (2 * i / points - 1.0) for i in range(points + 1)]
        candidates = [max(-LARGEST_Z, min(LARGEST_Z, best * step)) for step in steps]
        best, reach = max([best, *candidates], key=harm), 2.0 * reach / points
    return best
