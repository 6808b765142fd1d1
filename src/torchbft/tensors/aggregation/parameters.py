"""Rules on dictionaries of parameters and on streams of blocks, for a loop without node or keys.

Shapes: N contributions, B columns of one block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors.aggregation.inputs import check_updates
from torchbft.tensors.aggregation.rows import Parameters, Rows
from torchbft.tensors.aggregation.rule import AggregationInfo, Rule, RuleState
from torchbft.tensors.exact import Float64s, RowSource

Groups = str | Sequence[Sequence[str]]
"""``"vector"``: all entries as one vector; ``"layer"``: each entry by itself; or lists of names."""


@dataclass(frozen=True)
class Outcome:
    """What ``aggregate`` gives: parameters by name; history and info by group; rows left out."""

    parameters: dict[str, Tensor]
    state: dict[str, RuleState]
    info: dict[str, AggregationInfo]
    absent: dict[int, str]


def aggregate(
    rule: Rule,
    updates: Sequence[Parameters],
    f: int,
    *,
    per: Groups = "vector",
    state: Mapping[str, RuleState] | None = None,
    mode: str = "deterministic",
    out: Mapping[str, Tensor] | None = None,
    non_finite: str = "refuse",
) -> Outcome:
    """Aggregate dictionaries of float tensors with the same names and shapes, f of them a liar's.

    per: the rule runs once for each group of names. A rule by layer bounds the error of each layer
    and may follow different rows in each. state: what the last call's outcome held, by group (its
    first name; ``"vector"`` for one group). out: tensors to write to, by name. non_finite:
    ``"refuse"`` raises MisuseError for NaN and infinity; ``"absent"`` leaves such a row out and
    counts it among the f, so that the rule runs on the rest with one liar less.
    Entries come back in their own dtype, on the CPU for ``deterministic``.
    """
    if non_finite not in ("refuse", "absent"):
        raise MisuseError(f"unknown policy {non_finite!r}", where="non_finite")
    absent = _non_finite(updates) if non_finite == "absent" else {}
    if len(absent) > f:
        raise PreconditionError(
            f"{len(absent)} updates hold values that are no numbers, but f={f}",
            where="aggregation",
            hint=f"rows {', '.join(map(str, absent))}",
        )
    present = [one for row, one in enumerate(updates) if row not in absent]
    outcome = Outcome({}, {}, {}, absent)
    for key, names in _groups(updates, per).items():
        _aggregate_group(rule, present, f - len(absent), key, names, state, mode, out, outcome)
    return outcome


def _aggregate_group(
    rule: Rule,
    updates: Sequence[Parameters],
    f: int,
    key: str,
    names: Sequence[str],
    state: Mapping[str, RuleState] | None,
    mode: str,
    out: Mapping[str, Tensor] | None,
    outcome: Outcome,
) -> None:
    rows, device = _rows_of(updates, names)
    before = rule.init(rows.shape[1], device) if state is None else state[key]
    result_D, outcome.state[key], outcome.info[key] = rule.aggregate(rows, f, before, mode)
    first = 0
    for name in names:
        like = updates[0][name]
        piece = result_D[first : first + like.numel()].view(like.shape)
        first += like.numel()
        outcome.parameters[name] = piece.to(like.dtype) if out is None else out[name].copy_(piece)


def _rows_of(updates: Sequence[Parameters], names: Sequence[str]) -> tuple[RowSource, torch.device]:
    """Read dictionaries where they are; on another device than the CPU join them."""
    chosen = [{name: one[name] for name in names} for one in updates]
    device = next(iter(chosen[0].values())).device
    if device.type == "cpu":
        return Rows.of(chosen), device
    flat = [torch.cat([values.detach().reshape(-1) for values in one.values()]) for one in chosen]
    return torch.stack(flat), device


def _groups(updates: Sequence[Parameters], per: Groups) -> dict[str, Sequence[str]]:
    if not updates or not updates[0]:
        raise MisuseError("there is nothing to aggregate", where="aggregation")
    names = list(updates[0])
    for row, one in enumerate(updates):
        if one.keys() != updates[0].keys():
            raise MisuseError(f"row {row}: other names than row 0", where="aggregation")
    if per == "vector":
        return {"vector": names}
    groups = [[name] for name in names] if per == "layer" else [list(group) for group in per]
    if sorted(name for group in groups for name in group) != sorted(names):
        raise MisuseError(
            f"groups {per!r} do not hold each entry once",
            where="per",
            hint='"vector", "layer", or lists of names that cover all entries',
        )
    return {group[0]: group for group in groups}


def _non_finite(updates: Sequence[Parameters]) -> dict[int, str]:
    found = {}
    for row, one in enumerate(updates):
        for name, values in one.items():
            reason = check_updates([values.reshape(-1)], values.numel())[0]
            if reason is not None and not reason.startswith("wrong"):
                found[row] = f"{name}: {reason}"
                break
    return found


def stream(
    rule: Rule,
    blocks: Callable[[], Iterable[Tensor]],
    *,
    n: int,
    f: int,
    mode: str = "deterministic",
) -> Iterator[Tensor]:
    """Yield the aggregate block by block, of blocks (N, B) that ``blocks()`` gives in order.

    Rules that look at distances go through the blocks twice, so ``blocks`` is called again and must
    give the same. Rules without history and without ``inputs`` only.
    Raises PreconditionError (n and f) before the first block is read.
    """
    if rule.init(1) or rule.last.inputs:
        raise MisuseError(f"{rule.name} has a history, which has no blocks", where="stream")
    rule.check(n=n, f=f)
    gram_NN: Float64s | None = None
    if rule.last.reads_gram(rule.stages):
        for block_NB in blocks():
            part_NN = rule.partial_gram(block_NB, mode=mode)
            gram_NN = part_NN if gram_NN is None or part_NN is None else gram_NN + part_NN
    plan = rule.plan_for(gram_NN, n=n, f=f)
    for block_NB in blocks():
        yield rule.combine_slice(plan, block_NB, mode=mode)
