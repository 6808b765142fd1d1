"""Pre-aggregations: what is done to the rows before a rule runs.

Shapes: N rows, R references, P = N + R points.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchbft.primitives.errors import PreconditionError
from torchbft.tensors.aggregation.geometry import kth_smallest, squared_distances
from torchbft.tensors.aggregation.mixture import ZERO
from torchbft.tensors.aggregation.rule import PreAggregation
from torchbft.tensors.aggregation.span import clip_factors
from torchbft.tensors.exact import Float64s, sqrt


class NNM(PreAggregation):
    """Nearest-neighbour mixing: each row becomes the mean of its n − f nearest rows, itself first.

    Ties go to the first row. Need 2f < n. Cost O(n²d).
    Source: Allouah et al. 2023, "Fixing by mixing", algorithm 2.
    """

    name = "nnm"

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless 2f < n."""
        self.need(2 * f < n, "2f < n", n=n, f=f)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return 1/(n−f) at each row's nearest rows."""
        mixing_NP = np.zeros((n, len(gram_PP)))
        for row, distances_N in enumerate(squared_distances(gram_PP[:n, :n]).tolist()):
            distances_N[row] = -1.0
            nearest = sorted(range(n), key=distances_N.__getitem__)[: n - f]
            mixing_NP[row, nearest] = 1.0 / (n - f)
        return mixing_NP


class _Clipping(PreAggregation):
    """Rows longer than a bound are shortened to it."""

    def bound(self, norms_N: Float64s, n: int, f: int) -> float:
        """Return the length to which longer rows are clipped."""
        raise NotImplementedError

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless 2f < n."""
        self.need(2 * f < n, "2f < n", n=n, f=f)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return each row's factor, the rest of its weight on the zero vector."""
        zero = refs[ZERO]
        norms_N = sqrt(squared_distances(gram_PP)[zero, :n])
        factors_N = clip_factors(norms_N, self.bound(norms_N, n, f))
        mixing_NP = np.zeros((n, len(gram_PP)))
        np.fill_diagonal(mixing_NP, factors_N)
        mixing_NP[:, zero] = 1.0 - factors_N
        return mixing_NP


class ARC(_Clipping):
    """Adaptive robust clipping: the k = ⌊2(f/n)(n−f)⌋ longest rows are clipped to the next norm.

    Need 2f < n. Cost O(nd). Keeps the robustness of the rule behind it; on its own it is none.
    Source: Allouah et al. 2025, "Adaptive gradient clipping for robust federated learning",
    algorithm 2.
    """

    name = "arc"

    def bound(self, norms_N: Float64s, n: int, f: int) -> float:
        """Return the (k+1)-th largest norm."""
        clipped = 2 * f * (n - f) // n
        return kth_smallest(norms_N, n - clipped)


class NormClipping(_Clipping):
    """Rows longer than ``threshold`` are shortened to it; by default to the (n−f)-th smallest norm.

    Bounds what f rows can do to a mean, and is called *bounded*, not robust: the bias stays.
    Need 2f < n. Cost O(nd).
    Source: Sun et al. 2019, "Can you really backdoor federated learning?", section 3.3 (static
    bound); the bound from the rows themselves is a variant.
    """

    name = "norm_clipping"
    bounds_influence = True

    def __init__(self, threshold: float | None = None) -> None:
        if threshold is not None and not threshold > 0.0:
            raise PreconditionError(f"norm_clipping needs threshold > 0, not {threshold}")
        self.threshold = threshold

    def bound(self, norms_N: Float64s, n: int, f: int) -> float:
        """Return the threshold, or the (n−f)-th smallest norm."""
        return kth_smallest(norms_N, n - f) if self.threshold is None else self.threshold
