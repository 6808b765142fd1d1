"""Rules by composition and by name."""

from __future__ import annotations

import inspect
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch

from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors.aggregation.bulyan import Bulyan
from torchbft.tensors.aggregation.coordinate import MeaMed, Median, SignMajority, TrimmedMean
from torchbft.tensors.aggregation.preaggregation import (
    ARC,
    NNM,
    Bucketing,
    NormClipping,
    StaticClipping,
)
from torchbft.tensors.aggregation.rule import (
    AggregationInfo,
    Case,
    Plan,
    PreAggregation,
    Rule,
    RuleState,
    Work,
)
from torchbft.tensors.aggregation.selection import CAF, CGE, FABA, MDA, NNA, SMEA, DnC
from torchbft.tensors.aggregation.span import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Mean,
    MultiKrum,
    WeightedMean,
)
from torchbft.tensors.aggregation.trust import FLTrust, Zeno
from torchbft.tensors.exact import Float64s

_RULES: dict[str, type[Rule]] = {
    rule.name: rule
    for rule in (
        *(Mean, Median, TrimmedMean, Krum, MultiKrum, GeometricMedian, CentredClipping),
        *(WeightedMean, MeaMed, Bulyan, MDA, SMEA, CGE, CAF, NNA, FABA, DnC, SignMajority),
        *(FLTrust, Zeno),
    )
}
_PRE_AGGREGATIONS: dict[str, type[PreAggregation]] = {
    stage.name: stage for stage in (NNM, ARC, NormClipping, StaticClipping, Bucketing)
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
            n = stage.rows_after(n, f)
        bounded = any(stage.bounds_influence for stage in self.stages)
        self._last.check(n=n, f=0 if bounded and self._last.name == Mean.name else f)

    def kappa(self, n: int, f: int) -> float | None:
        """The last rule's, as each stage before it changes it."""
        kappa = self._last.kappa(n, f) if not isinstance(self._last, Mean) or f == 0 else None
        for stage in reversed(self.stages):
            kappa = None if kappa is None else stage.kappa_after(kappa, n, f)
        return kappa

    def init(self, d: int, device: torch.device | str | None = None) -> RuleState:
        """The history of the last rule: pre-aggregations have none."""
        return self._last.init(d, device)

    def reads_gram(self, stages: tuple[PreAggregation, ...]) -> bool:
        """The last rule's."""
        return self._last.reads_gram(stages)

    def plan(self, gram_TT: Float64s | None, case: Case) -> Plan:
        """The last rule's."""
        return self._last.plan(gram_TT, case)

    def carry_out(self, work: Work, plan: Plan) -> AggregationInfo:
        """The last rule's."""
        return self._last.carry_out(work, plan)


def known() -> tuple[str, ...]:
    """Return the names of all rules, then of all pre-aggregations."""
    return (*_RULES, *_PRE_AGGREGATIONS)


def get(name: str) -> Rule:
    """Return the rule of a name such as ``"trimmed_mean"`` or ``"arc+nnm+trimmed_mean"``.

    Parameters stand in brackets: ``"bucketing(size=2)+krum(variant=allouah)"``.
    Raises PreconditionError for a name that is not known or does not end with a rule, and for
    parameters that a part does not take.
    """
    parts = [_PART.fullmatch(part) for part in _JOIN.split(name)]
    names = [part["name"] if part else "" for part in parts]
    if names[-1] not in _RULES or any(stage not in _PRE_AGGREGATIONS for stage in names[:-1]):
        raise PreconditionError(
            f"no aggregation rule {name[:80]!r}",
            where="aggregation",
            hint=f"join any of {', '.join(_PRE_AGGREGATIONS)} and one of {', '.join(_RULES)}"
            " with '+', the rule last",
        )
    given = [part["given"] if part else None for part in parts]
    *stages, last = (_build(part, text) for part, text in zip(names, given, strict=True))
    return Compose(*stages, last) if stages or not isinstance(last, Rule) else last


_JOIN = re.compile(r"\+(?![^(]*\))")
_PART = re.compile(r"(?P<name>\w+)(\((?P<given>[^()]*)\))?")


def _build(name: str, given: str | None) -> PreAggregation | Rule:
    cls: Any = {**_RULES, **_PRE_AGGREGATIONS}[name]
    pairs = [pair.partition("=") for pair in (given or "").split(",") if pair.strip()]
    try:
        part: PreAggregation | Rule = cls(**{key.strip(): _value(text) for key, _, text in pairs})
    except TypeError as error:
        raise PreconditionError(
            f"{name} cannot be made from its name: {error}",
            where="aggregation",
            hint=f"parameters by name, as in {name}{inspect.signature(cls)}",
        ) from None
    return part


def _value(text: str) -> int | float | bool | str:
    words: dict[str, int | float | bool | str] = {"true": True, "false": False}
    for number in (int, float):
        with suppress(ValueError):
            return number(text)
    return words.get(text.strip().lower(), text.strip())


@dataclass(frozen=True)
class Description:
    """What is known of a rule or a pre-aggregation: from its documentation, for tables and help."""

    name: str
    need: str
    cost: str
    source: str
    text: str
    inputs: tuple[str, ...]


_FACTS = {
    "need": re.compile(r"\bNeed (.+?)\.(?= [A-Z]|$)"),
    "cost": re.compile(r"\bCost (.+?)\.(?= [A-Z]|$)"),
    "source": re.compile(r"\bSource: (.+)"),
}


def describe(name: str) -> Description:
    """Return need, cost, source and text of the single rule or pre-aggregation of this name."""
    try:
        cls: Any = {**_RULES, **_PRE_AGGREGATIONS}[name]
    except KeyError:
        raise PreconditionError(f"no aggregation rule {name[:80]!r}", where="aggregation") from None
    text = inspect.cleandoc(cls.__doc__ or "")
    flat = " ".join(text.split())
    facts = {key: m[1] if (m := pattern.search(flat)) else "" for key, pattern in _FACTS.items()}
    return Description(name, text=text, inputs=getattr(cls, "inputs", ()), **facts)


def rules_that_fit(n: int, f: int) -> list[str]:
    """Return the standard compositions whose need holds for n contributions with f liars."""
    return [name for name in STANDARD if get(name).withstands(n=n, f=f)]
