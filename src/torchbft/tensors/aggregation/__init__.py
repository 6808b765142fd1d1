"""Robust aggregation rules: many contributions in, one vector out, at most f of them a liar's."""

from torchbft.tensors.aggregation.compose import Compose, get, known, rules_that_fit
from torchbft.tensors.aggregation.coordinate import CoordinateRule, Median, TrimmedMean
from torchbft.tensors.aggregation.inputs import check_updates
from torchbft.tensors.aggregation.preaggregation import ARC, NNM, NormClipping
from torchbft.tensors.aggregation.rule import AggregationInfo, PreAggregation, Rule, RuleState
from torchbft.tensors.aggregation.span import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Mean,
    MultiKrum,
    SpanRule,
)

__all__ = [
    "ARC",
    "NNM",
    "AggregationInfo",
    "CentredClipping",
    "Compose",
    "CoordinateRule",
    "GeometricMedian",
    "Krum",
    "Mean",
    "Median",
    "MultiKrum",
    "NormClipping",
    "PreAggregation",
    "Rule",
    "RuleState",
    "SpanRule",
    "TrimmedMean",
    "check_updates",
    "get",
    "known",
    "rules_that_fit",
]
