"""What every rule shares: precondition, call, history, and the pipeline from rows to result.

A rule is pre-aggregations (``stages``, none for a single rule) and one last step.

Shapes: N contributions, T contributions and references, D coordinates.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, overload

import numpy as np
import torch
from torch import Tensor

from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors.aggregation.geometry import centred_gram
from torchbft.tensors.aggregation.inputs import as_rows
from torchbft.tensors.exact import Float64s, RowSource, all_finite, working_dtype

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


ZERO = "zero"
"""The reference vector 0."""


@dataclass(frozen=True)
class Case:
    """What a Gram matrix is of: n rows, f of them a liar's, then the references ``names``."""

    n: int
    f: int
    stages: tuple[PreAggregation, ...]
    names: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """What a rule does to the rows, slice by slice, once it knows how they lie to each other.

    mixing_MT: the coefficients of each mixed row over the rows and the references (the zero vector,
    then the history); None leaves the rows as they are. f: liars left after refusals.
    """

    mixing_MT: Float64s | None
    f: int
    refused: tuple[int, ...] = ()
    norms_N: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Work:
    """One call: checked rows, and how to aggregate them. info: norms and shares are wanted.

    out_D: where the result goes, in the working dtype and on the device of the rows. precise: as
    the rule says.
    """

    rows_ND: RowSource
    f: int
    stages: tuple[PreAggregation, ...]
    state: RuleState
    exact: bool
    info: bool
    out_D: Tensor
    precise: bool = False

    def gram(self) -> Float64s:
        """Inner products of the rows, the zero vector and the history, by one pass."""
        zero_D = torch.zeros(1, dtype=self.out_D.dtype, device=self.rows_ND.device)
        references = [zero_D.expand(self.rows_ND.shape[1]), *self.state.values()]
        gram_TT = centred_gram(
            self.rows_ND, references, self.f, exact=self.exact, precise=self.precise
        )
        if not np.isfinite(gram_TT).all():
            raise MisuseError("squared lengths overflow", where="aggregation")
        return gram_TT


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

    def withstands(self, *, n: int, f: int) -> bool:
        """Whether ``check`` passes, that of every stage included."""
        try:
            self.check(n=n, f=f)
        except PreconditionError:
            return False
        return True

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

    precise: ClassVar[bool] = False
    """Whether even ``fast`` needs inner products in float64, because short rows are divided by
    their length."""

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
        updates_ND: Tensor | RowSource,
        f: int,
        *,
        state: RuleState | None = None,
        mode: str = "deterministic",
        out: Tensor | None = None,
        return_info: Literal[False] = False,
    ) -> Tensor: ...

    @overload
    def __call__(
        self,
        updates_ND: Tensor | RowSource,
        f: int,
        *,
        state: RuleState | None = None,
        mode: str = "deterministic",
        out: Tensor | None = None,
        return_info: Literal[True],
    ) -> tuple[Tensor, AggregationInfo]: ...

    def __call__(
        self,
        updates_ND: Tensor | RowSource,
        f: int,
        *,
        state: RuleState | None = None,
        mode: str = "deterministic",
        out: Tensor | None = None,
        return_info: bool = False,
    ) -> Tensor | tuple[Tensor, AggregationInfo]:
        """Aggregate updates of shape (N, ...), f liars among them, to one of shape (...).

        dtype: float32 in, float32 out; float16 and bfloat16 are computed in float32 and rounded
        to their own dtype at the end; float64 stays float64. Rows are read in the caller's order,
        which is peer id. The input is neither changed nor aliased. ``state`` is read, never
        written: rules with history go on through ``aggregate``. ``out`` takes the result if it is
        given: of its shape and dtype, and no part of the input. Rows that do not fit in memory come
        as a ``Rows`` object and are read by blocks.
        Raises PreconditionError (n and f), MisuseError (dtype, shape, non-finite values, mode).
        """
        outcome = self._run(updates_ND, f, state, mode, out, want_info=return_info)
        return (outcome[0], outcome[2]) if return_info else outcome[0]

    def aggregate(
        self,
        updates_ND: Tensor | RowSource,
        f: int,
        state: RuleState,
        mode: str = "deterministic",
        out: Tensor | None = None,
    ) -> tuple[Tensor, RuleState, AggregationInfo]:
        """Aggregate as ``__call__`` does; return result, next history and what was done."""
        return self._run(updates_ND, f, state, mode, out, want_info=True)

    @torch.no_grad()
    def _run(
        self,
        updates: Tensor | RowSource,
        f: int,
        state: RuleState | None,
        mode: str,
        out: Tensor | None,
        *,
        want_info: bool,
    ) -> tuple[Tensor, RuleState, AggregationInfo]:
        work, result = self._work(updates, f, state, mode, out=out, want_info=want_info)
        self.check(n=work.rows_ND.shape[0], f=f)
        info = self.last.run(work)
        after = {  # a copy, since the caller may write to the result
            name: vector_D.to(result.device, copy=True)
            for name, vector_D in self.last.advance(work.state, work.out_D).items()
        }
        return _delivered(work.out_D, result), after, info

    def _work(
        self,
        updates: Tensor | RowSource,
        f: int,
        state: RuleState | None,
        mode: str,
        *,
        out: Tensor | None,
        want_info: bool,
    ) -> tuple[Work, Tensor]:
        """Return the work, and the tensor that the result is delivered in."""
        if mode not in MODES:
            raise MisuseError(f"unknown mode {mode!r}", where=self.name, hint=f"one of {MODES}")
        rows_ND: RowSource = as_rows(updates) if isinstance(updates, Tensor) else updates
        state, exact = self._checked(state, rows_ND), mode == "deterministic"
        result = _checked_out(out, updates, self.name)
        if exact and isinstance(rows_ND, Tensor):  # on the CPU, whatever holds the rows
            rows_ND = rows_ND.cpu()
        device = torch.device("cpu") if exact else rows_ND.device
        state = {name: vector_D.detach().to(device) for name, vector_D in state.items()}
        dtype, d = working_dtype(rows_ND.dtype), rows_ND.shape[1]
        fits = result.dtype == dtype and result.device == device and result.is_contiguous()
        out_D = result.view(d) if fits else torch.empty(d, dtype=dtype, device=device)
        precise = self.last.precise
        return Work(rows_ND, f, self.stages, state, exact, want_info, out_D, precise), result

    def _checked(self, state: RuleState | None, rows_ND: RowSource) -> RuleState:
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

    def reads_gram(self, stages: tuple[PreAggregation, ...]) -> bool:
        """Whether the plan depends on the rows at all."""
        return True

    @abstractmethod
    def plan(self, gram_TT: Float64s | None, case: Case) -> Plan:
        """Decide from the Gram matrix of the rows and of the references."""

    @abstractmethod
    def carry_out(self, work: Work, plan: Plan) -> AggregationInfo:
        """Write the result to ``work.out_D``; say what was done if ``work.info``."""

    def run(self, work: Work) -> AggregationInfo:
        """Plan and carry out."""
        gram_TT = work.gram() if self.reads_gram(work.stages) else None
        case = Case(work.rows_ND.shape[0], work.f, work.stages, (ZERO, *work.state))
        return self.carry_out(work, self.plan(gram_TT, case))

    def partial_gram(
        self, slice_NB: Tensor, state: RuleState | None = None, mode: str = "deterministic"
    ) -> Float64s | None:
        """Return the Gram matrix of a slice of all rows (and of the same slice of the history).

        Matrices of slices add up to that of the whole, from which ``plan_for`` decides. None if the
        rule decides without one.
        """
        if not self.last.reads_gram(self.stages):
            return None
        return self._work(slice_NB, 0, state, mode, out=None, want_info=False)[0].gram()

    def plan_for(self, gram_TT: Float64s | None, *, n: int, f: int) -> Plan:
        """Decide for n rows, f of them a liar's, from the sum of the slices' Gram matrices."""
        self.check(n=n, f=f)
        return self.last.plan(gram_TT, Case(n, f, self.stages, (ZERO, *self.init(1))))

    def combine_slice(
        self,
        plan: Plan,
        slice_NB: Tensor,
        state: RuleState | None = None,
        mode: str = "deterministic",
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the result of a slice (N, ...) by the plan for the whole."""
        work, result = self._work(slice_NB, plan.f, state, mode, out=out, want_info=False)
        self.last.carry_out(work, plan)
        return _delivered(work.out_D, result)


def _checked_out(out: Tensor | None, updates: Tensor | RowSource, where: str) -> Tensor:
    shape = updates.shape[1:]
    if out is None:
        return torch.empty(shape, dtype=updates.dtype, device=updates.device)
    if (out.shape, out.dtype) != (shape, updates.dtype) or out.requires_grad:
        raise MisuseError(
            f"out is a {out.dtype} of shape {tuple(out.shape)}",
            where=where,
            hint=f"a {updates.dtype} of shape {tuple(shape)} without gradient",
        )
    return out


def _delivered(out_D: Tensor, result: Tensor) -> Tensor:
    """Copy the result to where it is wanted, unless it is there."""
    if out_D.data_ptr() != result.data_ptr() or out_D.dtype != result.dtype:
        result.copy_(out_D.view(result.shape))
    return result
