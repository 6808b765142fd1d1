"""From one agreed state to the next: the pure function that peers, verifier and simulator share.

Shape suffixes: N contributions in order of peer id, D parameter values, B float buffer values,
I integer buffer values, V BatchNorm variances.

Only parameters meet the aggregation rule and the outer optimizer. Float buffers are a group of
their own: a running variance in the thousands would otherwise decide every distance, and an outer
momentum would drive it below zero. Each group is pooled per coordinate:

* float buffers by the mean of what is left after dropping the f largest and f smallest values;
* BatchNorm variances as second moments about the pooled mean m: the same trimmed mean of
  var_i + (mean_i − m)². Without liars and trimming that is the variance of the union of the peers'
  data, (1/n) Σ (var_i + mean_i²) − m², but no term cancels, so it is never negative;
* integers by the median (of an even number: the mean of the middle two, rounded down).

Sums are taken in float64 in one order, values sorted first: the same bits on every CPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.primitives.ids import PeerId
from torchbft.tensors.aggregation import Rule
from torchbft.tensors.exact import sum_in_order
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.outer import OuterOptimizer
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update, check


@dataclass(frozen=True)
class LedgerFields:
    """The fields of the next state that the ledger alone decides."""

    round: int
    inner_step: int
    pass_index: int
    cursor: int
    membership_digest: bytes
    credit_digest: bytes


@dataclass(frozen=True)
class Advanced:
    """What the rule made of each contribution; for reports, no part of the state."""

    weights: Mapping[PeerId, float]
    refused_by_norm: tuple[PeerId, ...]
    norms: Mapping[PeerId, float]


def advance(
    state: AgreedState,
    updates: Sequence[tuple[PeerId, Update]],
    *,
    rule: Rule,
    f: int,
    outer: OuterOptimizer,
    ledger: LedgerFields,
) -> tuple[AgreedState, Advanced]:
    """Apply one round's accepted set, given in any order, to the state it was trained from.

    ``f`` is how many of these contributions may come from liars: the fault model's f less those
    already excluded by evidence. Raises PreconditionError when the rule or the buffers cannot work
    with so many, MisuseError on a duplicate or an update that ``check`` refuses: the decoder and
    the ledger have excluded both.
    """
    _refuse_flushed_subnormals()
    ordered = _ordered(updates, state.layout, f)
    peers = [peer for peer, _ in ordered]
    updates_ND = torch.stack([update.parameters_D for _, update in ordered])
    gradient_D, rule_state, info = rule.aggregate(
        updates_ND, f, dict(state.rule_state), mode="deterministic"
    )
    parameters_D, momentum_D = outer.step(state.parameters_D, state.outer_momentum_D, gradient_D)
    after = AgreedState(
        state.layout,
        parameters_D,
        pool_float_buffers([update.float_buffers_B for _, update in ordered], state.layout, f),
        integer_median(torch.stack([update.int_buffers_I for _, update in ordered])),
        momentum_D,
        rule_state,
        ledger.round,
        ledger.inner_step,
        ledger.pass_index,
        ledger.cursor,
        ledger.membership_digest,
        ledger.credit_digest,
    )
    return after, Advanced(
        dict(zip(peers, info.weights_N, strict=True)),
        tuple(peers[row] for row in info.refused_by_norm),
        dict(zip(peers, info.norms_N, strict=True)),
    )


def _refuse_flushed_subnormals() -> None:
    """``torch.set_flush_denormal`` and some libraries change the arithmetic of a whole thread."""
    if bool(torch.tensor([2.0**-127]) * 0.5 == 0):
        raise MisuseError(
            "this process rounds subnormal numbers to zero, so its model would diverge",
            where="advance",
            hint="call torch.set_flush_denormal(False), or find the library built with -ffast-math",
        )


def _ordered(
    updates: Sequence[tuple[PeerId, Update]], layout: StateLayout, f: int
) -> list[tuple[PeerId, Update]]:
    if f < 0 or len(updates) <= 2 * f:
        raise PreconditionError(
            f"{len(updates)} contributions cannot outvote f={f} liars: n > 2f is needed",
            where="advance",
        )
    ordered = sorted(updates, key=lambda item: item[0])
    if len({peer for peer, _ in ordered}) != len(ordered):
        raise MisuseError("one peer contributes twice", where="advance")
    for peer, update in ordered:
        reason = check(update, layout)
        if reason is not None:
            raise MisuseError(f"update of {peer} was let through: {reason}", where="advance")
    return ordered


def pool_float_buffers(rows: Sequence[Tensor], layout: StateLayout, f: int) -> Tensor:
    """One value per float buffer entry from n > 2f rows (float32 B each), f of them lies."""
    if layout.float_buffer_count == 0:
        return torch.zeros(0)
    rows_NB = torch.stack(list(rows)).to(torch.float64)
    mean_places_V, variance_places_V = layout.moments
    pooled_B = _trimmed_mean(rows_NB, f)
    offsets_NV = rows_NB[:, mean_places_V] - pooled_B[mean_places_V]
    moments_NV = rows_NB[:, variance_places_V] + offsets_NV * offsets_NV
    pooled_B[variance_places_V] = _trimmed_mean(moments_NV, f)
    return pooled_B.to(torch.float32)


def _trimmed_mean(rows_NB: Tensor, f: int) -> Tensor:
    """Mean of the n − 2f middle values of each column (Yin et al. 2018, definition 2)."""
    positive_zero_NB = rows_NB + 0.0  # a sort may leave −0 and +0 in either order
    kept_MB = positive_zero_NB.sort(dim=0).values[f : len(rows_NB) - f]
    return torch.from_numpy(sum_in_order(kept_MB.numpy(), axis=0)) / len(kept_MB)


def integer_median(rows_NI: Tensor) -> Tensor:
    """Median of each column (int64 N × I); between two middle values, their floored mean."""
    if rows_NI.numel() == 0:
        return rows_NI.new_zeros(rows_NI.shape[1])
    sorted_NI = rows_NI.sort(dim=0).values
    low_I, high_I = sorted_NI[(len(rows_NI) - 1) // 2], sorted_NI[len(rows_NI) // 2]
    return (low_I & high_I) + ((low_I ^ high_I) >> 1)  # their sum could overflow
