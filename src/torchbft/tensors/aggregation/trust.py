"""Rules that lean on something the aggregator knows by itself: data of its own.

Shapes: N contributions, P rows and references, D coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors.aggregation.rule import (
    ZERO,
    AggregationInfo,
    Case,
    Plan,
    Rule,
    RuleState,
    Work,
)
from torchbft.tensors.aggregation.selection import nearest
from torchbft.tensors.aggregation.span import SpanRule, combine_rows, equal_weights
from torchbft.tensors.exact import Float64s, row_norms, sqrt, sum_in_order


class FLTrust(SpanRule):
    """Rows scaled to the length of a root gradient g₀, weighed by how far they agree with it.

    Σ t_i·(‖g₀‖/‖x_i‖)·x_i / Σ t_i with t_i = max(0, cos(x_i, g₀)); zero if no row agrees. g₀ comes
    from clean data of the aggregator: ``rule(updates, f, state={"root": g0_D})``. Need f < n: its
    guarantee rests on g₀, not on a majority. Cost O(nd).
    Source: Cao et al. 2021, "FLTrust: Byzantine-robust federated learning via trust
    bootstrapping", equations 1 to 3.
    """

    name = "fltrust"
    requirement = "f < n"
    inputs = ("root",)
    precise = True

    def fits(self, n: int, f: int) -> bool:
        """Any honest row is enough."""
        return f < n

    def select(self, gram_PP: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return the scaled trust scores, the rest of the weight on the zero vector."""
        zero, root = refs[ZERO], refs["root"]
        about_zero_PP = gram_PP - (gram_PP[zero][:, None] + gram_PP[zero]) + gram_PP[zero, zero]
        lengths_P = sqrt(np.maximum(about_zero_PP.diagonal(), 0.0))
        divisors_N = np.where(lengths_P[:n] > 0.0, lengths_P[:n], np.inf)
        weights_P = np.zeros(len(gram_PP))
        if lengths_P[root] > 0.0:
            trust_N = np.maximum(about_zero_PP[root, :n] / divisors_N / lengths_P[root], 0.0)
            total = float(sum_in_order(trust_N))
            if total > 0.0:
                weights_P[:n] = trust_N / total * (lengths_P[root] / divisors_N)
        weights_P[zero] = 1.0 - float(sum_in_order(weights_P[:n]))
        return weights_P


class Zeno(Rule):
    """The mean of the n − f rows of the highest score: score(x) − ρ·‖x‖².

    ``score(x_D)`` says what an update is worth, for instance the loss on held-out data before it
    less the loss after it; NaN counts as the worst. ``penalty`` is ρ. Ties go to the first row. It
    stands alone: pre-aggregations mix rows, and a score judges one. Need f < n. Cost O(nd) and n
    scores. A run cannot use it, since the score is not part of the run file.
    Source: Xie, Koyejo and Gupta 2019, "Zeno: distributed stochastic gradient descent with
    suspicion-based fault-tolerance", definition 2 and algorithm 1.
    """

    name = "zeno"
    requirement = "f < n"
    inputs = ("score",)

    def __init__(self, score: Callable[[Tensor], float], penalty: float = 0.0) -> None:
        if not (callable(score) and 0.0 <= penalty < math.inf):
            raise PreconditionError("zeno needs a scoring function and a penalty >= 0")
        self.score, self.penalty = score, penalty

    def fits(self, n: int, f: int) -> bool:
        """Some row stays."""
        return f < n

    def init(self, d: int, device: torch.device | str | None = None) -> RuleState:
        """No history: the score came with the rule."""
        return {}

    def plan(self, gram_TT: Float64s | None, case: Case) -> Plan:
        """See Rule. A Gram matrix does not tell what an update is worth."""
        raise MisuseError("zeno judges whole updates, not slices of them", where=self.name)

    def carry_out(self, work: Work, plan: Plan) -> AggregationInfo:
        """See Rule."""
        assert plan.mixing_MT is not None
        return combine_rows(work, plan.mixing_MT[0], plan)

    def run(self, work: Work) -> AggregationInfo:
        """See Rule."""
        if work.stages:
            raise MisuseError("zeno judges single updates and takes no stage", where=self.name)
        n, norms_N = work.rows_ND.shape[0], np.array(row_norms(work.rows_ND))
        rows = (work.rows_ND[row : row + 1, :][0] for row in range(n))
        scores_N = np.array([float(self.score(row_D)) for row_D in rows])
        losses_N = self.penalty * np.square(norms_N) - scores_N
        losses_N[np.isnan(losses_N)] = np.inf
        weights_T = equal_weights(nearest(losses_N, n - work.f), n + 1)
        return self.carry_out(work, Plan(weights_T[None], work.f, (), norms_N.tolist()))
