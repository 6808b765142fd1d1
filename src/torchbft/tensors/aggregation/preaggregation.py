"""Pre-aggregations: what is done to the rows before a rule runs.

Shapes: N rows, R references, P = N + R points.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import PreconditionError
from torchbft.tensors.aggregation.geometry import kth_smallest, squared_distances
from torchbft.tensors.aggregation.rule import ZERO, PreAggregation
from torchbft.tensors.aggregation.span import clip_factors
from torchbft.tensors.exact import Float64s, sqrt


class NNM(PreAggregation):
    """Nearest-neighbour mixing: each row becomes the mean of its n − f nearest rows, itself first.

    Ties go to the first row. Need 2f < n. Cost O(n²d).
    Source: Allouah et al. 2023, "Fixing by mixing", algorithm 2.
    """

    name = "nnm"

    def kappa_after(self, kappa: float, n: int, f: int) -> float | None:
        """8f/(n−f)·(1 + κ): lemma 1 of the source."""
        return 8 * f / (n - f) * (1 + kappa)

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

    def kappa_after(self, kappa: float, n: int, f: int) -> float | None:
        """κ + 2f/(n − 2f): theorem 3.2 of the source."""
        return kappa + 2 * f / (n - 2 * f)

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


class StaticClipping(NormClipping):
    """Rows longer than ``threshold`` are shortened to it, whatever the others are.

    Need 2f < n. Cost O(nd). Bounded, not robust. Source: Sun et al. 2019, section 3.3.
    """

    name = "static_clipping"

    def __init__(self, threshold: float) -> None:
        super().__init__(threshold)


class Bucketing(PreAggregation):
    """Rows in random order, each ``size`` of them replaced by their mean.

    The order follows from ``seed`` and from a digest of the rows' inner products: new in each
    round, the same for all peers, and not known before the rows are. ⌈n/size⌉ rows come out, up to
    f of them spoiled. Need 2f < ⌈n/size⌉. Cost O(n²d).
    Source: Karimireddy, He and Jaggi 2022, "Byzantine-robust learning on heterogeneous datasets via
    bucketing", algorithm 1.
    """

    name = "bucketing"
    requirement = "2f < ⌈n/size⌉"

    def __init__(self, size: int = 2, seed: int = 0) -> None:
        if size < 1 or seed < 0:
            raise PreconditionError(f"bucketing needs size >= 1 and seed >= 0, not {size}, {seed}")
        self.size, self.seed = size, seed

    def fits(self, n: int, f: int) -> bool:
        """Spoiled buckets are a minority."""
        return 2 * f < self.rows_after(n, f)

    def rows_after(self, n: int, f: int) -> int:
        """⌈n/size⌉: the last bucket may be smaller."""
        return -(-n // self.size)

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return 1/size at the rows of each bucket."""
        key = sha256("aggregation/bucketing", str(self.seed).encode(), gram_PP[:n, :n].tobytes())
        order = sorted(range(n), key=lambda row: sha256("bucket", key, row.to_bytes(4, "big")))
        mixing_BP = np.zeros((self.rows_after(n, f), len(gram_PP)))
        for bucket, weights_P in enumerate(mixing_BP):
            rows = order[bucket * self.size : (bucket + 1) * self.size]
            weights_P[rows] = 1.0 / len(rows)
        return mixing_BP
