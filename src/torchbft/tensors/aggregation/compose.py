"""Rules by composition and by name."""

from __future__ import annotations

import torch
from torch import Tensor

from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors.aggregation.coordinate import Median, TrimmedMean
from torchbft.tensors.aggregation.preaggregation import ARC, NNM, NormClipping
from torchbft.tensors.aggregation.rule import AggregationInfo, PreAggregation, Rule, RuleState, Work
from torchbft.tensors.aggregation.span import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Mean,
    MultiKrum,
)

_RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (Mean, Median, TrimmedMean, Krum, MultiKrum, GeometricMedian, CentredClipping)
}
_PRE_AGGREGATIONS: dict[str, type[PreAggregation]] = {
    stage.name: stage for stage in (NNM, ARC, NormClipping)
}
STANDARD = (
    "arc+nnm+trimmed_mean",
    "nnm+trimmed_mean",
    "nnm+median",
    "nnm+geometric_median",
    "trimmed_mean",
    "median",
    "geometric_median",
    "centred_clipping",
    "multi_krum",
    "krum",
    "norm_clipping+mean",
    "mean",
)
"""Compositions worth naming in an error message, the default first."""


class Compose(Rule):
    """Pre-aggregations, then one rule: ``Compose(ARC(), NNM(), TrimmedMean())``.

    Each part's need on n and f must hold. A mean at the end is allowed with f > 0 only behind a
    stage that bounds each row's influence (norm clipping).
    """

    def __init__(self, *parts: PreAggregation | Rule) -> None:
        *stages, last = parts or (None,)
        if not isinstance(last, Rule) or isinstance(last, Compose):
            raise MisuseError("a composition ends with a single rule", where="Compose")
        self.stages = tuple(stage for stage in stages if isinstance(stage, PreAggregation))
        if len(self.stages) != len(stages):
            raise MisuseError("only pre-aggregations may stand before the rule", where="Compose")
        self._last = last
        self.name = "+".join(part.name for part in (*self.stages, last))

    @property
    def last(self) -> Rule:
        """The rule that runs after the stages."""
        return self._last

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless every part's need holds."""
        for stage in self.stages:
            stage.check(n=n, f=f)
        bounded = any(stage.bounds_influence for stage in self.stages)
        self._last.check(n=n, f=0 if bounded and isinstance(self._last, Mean) else f)

    def init(self, d: int, device: torch.device | str | None = None) -> RuleState:
        """The history of the last rule: pre-aggregations have none."""
        return self._last.init(d, device)

    def run(self, work: Work) -> tuple[Tensor, AggregationInfo]:
        """See Rule."""
        return self._last.run(work)


def known() -> tuple[str, ...]:
    """Return the names of all rules, then of all pre-aggregations."""
    return (*_RULES, *_PRE_AGGREGATIONS)


def get(name: str) -> Rule:
    """Return the rule of a name such as ``"trimmed_mean"`` or ``"arc+nnm+trimmed_mean"``.

    Raises PreconditionError for a name that is not known or does not end with a rule.
    """
    *before, last = name.split("+")
    if last not in _RULES or any(stage not in _PRE_AGGREGATIONS for stage in before):
        raise PreconditionError(
            f"no aggregation rule {name[:80]!r}",
            where="aggregation",
            hint=f"join any of {', '.join(_PRE_AGGREGATIONS)} and one of {', '.join(_RULES)}"
            " with '+', the rule last",
        )
    rule = _RULES[last]()
    return Compose(*(_PRE_AGGREGATIONS[stage]() for stage in before), rule) if before else rule


def rules_that_fit(n: int, f: int) -> list[str]:
    """Return the standard compositions whose need holds for n contributions with f liars."""
    return [name for name in STANDARD if _fits(get(name), n, f)]


def _fits(rule: Rule, n: int, f: int) -> bool:
    try:
        rule.check(n=n, f=f)
    except PreconditionError:
        return False
    return True
