"""Robust aggregation rules: many contributions in, one vector out, at most f of them a liar's."""

from torchbft.tensors.aggregation.bulyan import (
    Bulyan,
)
from torchbft.tensors.aggregation.compose import (
    Compose,
    Description,
    describe,
    get,
    known,
    rules_that_fit,
)
from torchbft.tensors.aggregation.coordinate import (
    CoordinateRule,
    MeaMed,
    Median,
    SignMajority,
    TrimmedMean,
)
from torchbft.tensors.aggregation.inputs import (
    check_updates,
)
from torchbft.tensors.aggregation.parameters import (
    Outcome,
    aggregate,
    stream,
)
from torchbft.tensors.aggregation.preaggregation import (
    ARC,
    NNM,
    Bucketing,
    NormClipping,
    StaticClipping,
)
from torchbft.tensors.aggregation.rows import (
    Rows,
)
from torchbft.tensors.aggregation.rule import (
    AggregationInfo,
    Plan,
    PreAggregation,
    Rule,
    RuleState,
)
from torchbft.tensors.aggregation.selection import (
    CAF,
    CGE,
    FABA,
    MDA,
    NNA,
    SMEA,
    DnC,
)
from torchbft.tensors.aggregation.span import (
    CentredClipping,
    GeometricMedian,
    Krum,
    Mean,
    MultiKrum,
    SpanRule,
    WeightedMean,
)
from torchbft.tensors.aggregation.trust import (
    FLTrust,
    Zeno,
)

__all__ = [
    "ARC",
    "CAF",
    "CGE",
    "FABA",
    "MDA",
    "NNA",
    "NNM",
    "SMEA",
    "AggregationInfo",
    "Bucketing",
    "Bulyan",
    "CentredClipping",
    "Compose",
    "CoordinateRule",
    "Description",
    "DnC",
    "FLTrust",
    "GeometricMedian",
    "Krum",
    "MeaMed",
    "Mean",
    "Median",
    "MultiKrum",
    "NormClipping",
    "Outcome",
    "Plan",
    "PreAggregation",
    "Rows",
    "Rule",
    "RuleState",
    "SignMajority",
    "SpanRule",
    "StaticClipping",
    "TrimmedMean",
    "WeightedMean",
    "Zeno",
    "aggregate",
    "check_updates",
    "describe",
    "get",
    "known",
    "rules_that_fit",
    "stream",
]
