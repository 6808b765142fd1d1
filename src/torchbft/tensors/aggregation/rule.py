"""What every rule shares: precondition, call, history, and the pipeline from rows to result.

A rule is pre-aggregations (``stages``, none for a single rule) and one last step.

Shapes: N contributions, T contributions and references, D coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, overload

import torch
from torch import Tensor

from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors.aggregation.inputs import as_rows
from torchbft.tensors.exact import Float64s, all_finite

RuleState = dict[str, Tensor]
"""A rule's history, named float tensors of shape (D,); empty for rules without history."""

MODES = ("deterministic", "fast")


@dataclass(frozen=True)
class AggregationInfo:
    """What a rule did with each contribution, in the order of the rows. Accuses nobody.

    weights_N: effective shares, of sum 1 (all 0 if every row was clipped to nothing). For
    coordinate rules the share of coordinates (of at most some thousands, evenly spaced) in which
    the row, or the mixtures it is part of, lay within the kept range. refused_by_norm: rows that
    got weight 0 because of their distance to the coordinate-wise median. norms_N: Euclidean norms
    of the rows.
    """

    weights_N: list[float]
    refused_by_norm: tuple[int, ...]
    norms_N: list[float]


@dataclass(frozen=True)
class Work:
    """One call: checked rows, and how to aggregate them. info: norms and shares are wanted."""

    rows_ND: Tensor
    f: int
    stages: tuple[PreAggregation, ...]
    state: RuleState
    exact: bool
    info: bool


class Stage(ABC):
    """Anything with a name and a need on n and f."""

    name: str
    requirement: ClassVar[str] = "2f < n"
    """The need, in words."""

    def fits(self, n: int, f: int) -> bool:
        """Whether n contributions, at most f of them a liar's, are enough."""
        return 2 * f < n

    def check(self, *, n: int, f: int) -> None:
        """Raise PreconditionError unless n contributions with f liars among them are enough."""
        self.need(n >= 1 and f >= 0 and self.fits(n, f), self.requirement, n=n, f=f)

    def need(self, holds: bool, bound: str, *, n: int, f: int) -> None:
        """Raise PreconditionError, naming rule, n, f and the bound, unless ``holds``."""
        if n < 1 or f < 0 or not holds:
            raise PreconditionError(
                f"{self.name} needs {bound}, but n={n}, f={f}",
                where="aggregation",
                hint="take a rule that fits (rules_that_fit) or admit more peers",
            )


class PreAggregation(Stage):
    """Turns contributions into mixtures of them before a rule runs."""

    bounds_influence = False
    """True if a plain mean of this stage's output is moved only a bounded distance by f rows."""

    def rows_after(self, n: int, f: int) -> int:
        """How many rows come out of n."""
        return n

    def kappa_after(self, kappa: float, n: int, f: int) -> float | None:
        """The proven κ of this stage and a rule of κ behind it; None if none is published."""
        return None

    @abstractmethod
    def select(self, gram_TT: Float64s, *, n: int, f: int, refs: Mapping[str, int]) -> Float64s:
        """Return mixing_NT: each mixed row's coefficients over rows and references, sum 1.

        gram_TT: inner products of n rows and of the references, placed where refs says.
        """


class Rule(Stage):
    """An aggregation rule. Composed rules are rules."""

    stages: tuple[PreAggregation, ...] = ()
    inputs: ClassVar[tuple[str, ...]] = ()
    """What a caller must supply beside the updates: vectors in ``state``, or a function. A run
    knows the contributions only, so it cannot use such a rule."""

    @property
    def last(self) -> Rule:
        """The rule that runs after the stages."""
        return self

    def kappa(self, n: int, f: int) -> float | None:
        """The proven coefficient, or None if none is published.

        ‖F(x) − x̄_S‖² <= κ·(1/|S|)·Σ_{i∈S} ‖x_i − x̄_S‖² for each set S of n − f rows (Allouah et al.
        2023, "Fixing by mixing", definition 2). n and f fit.
        """
        return None

    def init(self, d: int, device: torch.device | str | None = None) -> RuleState:
        """Return the history before the first round, for vectors of d entries.

        The rule's ``inputs`` stand in it as zeros, to be replaced.
        """
        return {name: torch.zeros(d, device=device) for name in self.inputs}

    def advance(self, state: RuleState, result_D: Tensor) -> RuleState:
        """Return the history after a round that gave ``result_D`` (in the working dtype)."""
        return {}

    @overload
    def __call__(
        self,
        updates_ND: Tensor,
        f: int,
        *,
        state: RuleState | None = None,
        mode: str = "deterministic",
        return_info: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        updates_ND: Tensor,
        f: int,
        *,
        state: RuleState | None = None,
        mode: str = "deterministic",
        return_info: Literal[True],
    ) -> tuple[Tensor, AggregationInfo]: ...

    def __call__(
        self,
        updates_ND: Tensor,
        f: int,
        *,
        state: RuleState | None = None,
        mode: str = "deterministic",
        return_info: bool = False,
    ) -> Tensor | tuple[Tensor, AggregationInfo]:
        """Aggregate updates of shape (N, ...), f liars among them, to one of shape (...).

        dtype: float32 in, float32 out; float16 and bfloat16 are computed in float32 and rounded
        to their own dtype at the end; float64 stays float64. Rows are read in the caller's order,
        which is peer id. The input is neither changed nor aliased. ``state`` is read, never
        written: rules with history go on through ``aggregate``.
        Raises PreconditionError (n and f), MisuseError (dtype, shape, non-finite values, mode).
        """
        outcome = self._run(updates_ND, f, state, mode, want_info=return_info)
        return (outcome[0], outcome[2]) if return_info else outcome[0]

    def aggregate(
        self, updates_ND: Tensor, f: int, state: RuleState, mode: str = "deterministic"
    ) -> tuple[Tensor, RuleState, AggregationInfo]:
        """Aggregate as ``__call__`` does; return result, next history and what was done."""
        return self._run(updates_ND, f, state, mode, want_info=True)

    @torch.no_grad()
    def _run(
        self, updates: Tensor, f: int, state: RuleState | None, mode: str, *, want_info: bool
    ) -> tuple[Tensor, RuleState, AggregationInfo]:
        if mode not in MODES:
            raise MisuseError(f"unknown mode {mode!r}", where=self.name, hint=f"one of {MODES}")
        rows_ND = as_rows(updates)
        self.check(n=rows_ND.shape[0], f=f)
        state, exact = self._checked(state, rows_ND), mode == "deterministic"
        if exact:  # on the CPU, whatever holds the rows
            rows_ND = rows_ND.cpu()
            state = {name: vector_D.cpu() for name, vector_D in state.items()}
        work = Work(rows_ND, f, self.stages, state, exact=exact, info=want_info)
        result_D, info = self.last.run(work)
        result_D = result_D.to(updates.device)
        result = result_D.reshape(updates.shape[1:]).to(updates.dtype, copy=True)
        return result, self.last.advance(state, result_D), info

    def _checked(self, state: RuleState | None, rows_ND: Tensor) -> RuleState:
        first = self.init(rows_ND.shape[1], rows_ND.device)
        if state is None:
            if self.last.inputs and first:
                raise MisuseError(
                    f"{self.name} needs {', '.join(self.last.inputs)}",
                    where=self.name,
                    hint="hand each over by name: state={name: vector}",
                )
            return first
        shapes = {name: vector_D.shape for name, vector_D in state.items()}
        if shapes != {name: vector_D.shape for name, vector_D in first.items()}:
            raise MisuseError(
                f"the history holds {shapes}",
                where=self.name,
                hint=f"start from init({rows_ND.shape[1]}) and pass on what aggregate returns",
            )
        if not all(all_finite(vector_D) for vector_D in state.values()):
            raise MisuseError("the history holds a non-finite value", where=self.name)
        return state

    @abstractmethod
    def run(self, work: Work) -> tuple[Tensor, AggregationInfo]:
        """Return the result (D,) in the working dtype, and what was done if ``work.info``."""
