"""What a run file says about tensors, as objects: rule, codec, outer optimizer, and their needs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from torchbft.primitives.errors import ConfigError, PreconditionError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.runspec import MAX_MEMBERS, RunSpec
from torchbft.tensors import aggregation
from torchbft.tensors.aggregation import Rule
from torchbft.tensors.compression import Codec, get_codec
from torchbft.tensors.outer import OuterSGD


@dataclass(frozen=True)
class Recipe:
    """How a run's contributions become bytes and an agreed state."""

    rule: Rule
    codec: Codec
    outer: OuterSGD

    @staticmethod
    def of(run: RunSpec) -> Recipe:
        """Build and check it. Raises ConfigError unless the rule holds for the fewest
        contributions that a round may have, ``m_min``, with all f liars among them."""
        f = run.contributor_faults.f
        try:
            rule = aggregation.get(run.aggregation.rule)
            codec = get_codec(run.aggregation.codec)
            codec.check(rule.name, f)
        except PreconditionError as error:
            raise _refusal(run, error, error.hint) from None
        try:
            rule.check(n=run.m_min, f=f)
            if rule.last.inputs:
                raise PreconditionError(
                    f"{rule.name} needs {', '.join(rule.last.inputs)}, which no run has"
                )
        except PreconditionError as error:
            fitting = ", ".join(aggregation.rules_that_fit(run.m_min, f)) or "none; raise m_min"
            raise _refusal(run, error, f"rules that fit: {fitting}") from None
        return Recipe(rule, codec, outer_of(run))


def _refusal(run: RunSpec, error: PreconditionError, hint: str) -> ConfigError:
    f = run.contributor_faults.f
    return ConfigError(
        f"{error.what} (a round counts from {run.m_min} contributions with f={f})",
        where=f"run file {run.name!r}, [aggregation]",
        hint=hint,
    )


@cache
def needs_of(rule: str) -> tuple[int, ...]:
    """For f = 0, 1, …: the fewest contributions with which an aggregation rule withstands f of
    them. Empty for a rule that nobody knows: no run starts with it."""
    try:
        known = aggregation.get(rule)
    except PreconditionError:
        return ()
    sizes = range(1, MAX_MEMBERS + 1)
    most = FaultModel(MAX_MEMBERS).f
    return tuple(
        next((n for n in sizes if known.withstands(n=n, f=f)), MAX_MEMBERS + 1)
        for f in range(most + 1)
    )


def outer_of(run: RunSpec) -> OuterSGD:
    """DiLoCo's outer optimizer for pseudo-gradients; plain SGD for gradients and their momentum,
    whose history the contribution already holds (DESIGN §3, step 1)."""
    if run.training.contribution != "pseudo_gradient":
        return OuterSGD(run.outer.learning_rate)
    nesterov = run.outer.nesterov and run.outer.momentum > 0
    return OuterSGD(run.outer.learning_rate, run.outer.momentum, nesterov)
