"""Order statistics of rows by a network of elementwise minima and maxima.

Source: Batcher 1968, "Sorting networks and their applications" (odd-even merge sort). Comparators
on which no wanted output depends are left out. A comparator is one minimum and one maximum of two
rows of a block that fits the cache: no sort, no topk, no quantile, so nothing depends on how a
device orders NaN or breaks ties. On a CPU the rows are NumPy's, whose calls cost a third of
torch's; elsewhere they are tensors.

Shapes: N rows, B columns of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchbft.tensors.exact import workspace

Block = Any
"""Rows of one float dtype, or one of them: an array on a CPU, a tensor on another device."""


def as_block(rows_NB: Tensor) -> Block:
    """Return float32 or float64 rows as the network takes them; shares memory."""
    return rows_NB.numpy() if rows_NB.device.type == "cpu" else rows_NB


def functions_of(block_NB: Block) -> Any:
    """Return the library, NumPy or torch, whose elementwise functions take the block."""
    return np if isinstance(block_NB, np.ndarray) else torch


class Comparator(NamedTuple):
    """Put the smaller of two rows at ``low``, the larger at ``high``, where they are wanted."""

    low: int
    high: int
    wants_low: bool
    wants_high: bool


def _merge_exchange(n: int) -> Iterator[tuple[int, int]]:
    """Yield the pairs of Batcher's network for n inputs (those of the next power of two, cut)."""
    span = 1
    while span < n:
        gap = span
        while gap:
            for start in range(gap % span, n - gap, 2 * gap):
                for low in range(start, min(start + gap, n - gap)):
                    if low // (2 * span) == (low + gap) // (2 * span):
                        yield low, low + gap
            gap //= 2
        span *= 2


@cache
def comparators(n: int, first: int, last: int) -> tuple[Comparator, ...]:
    """Return the comparators that place ranks first <= r < last of n rows (ranks from 0)."""
    wanted = set(range(first, last))
    kept = []
    for low, high in reversed(list(_merge_exchange(n))):
        if low in wanted or high in wanted:
            kept.append(Comparator(low, high, low in wanted, high in wanted))
            wanted |= {low, high}
    return tuple(reversed(kept))


class _Step(NamedTuple):
    """Write the minimum or the maximum of two slots to a third."""

    maximum: bool
    left: int
    right: int
    out: int


@cache
def _program(n: int, first: int, last: int) -> tuple[tuple[_Step, ...], int, tuple[int, ...]]:
    """Return the network's steps, how many slots they use, and the slots of the wanted ranks.

    Slots below n are the rows themselves, which are only read. The slot that was freed last is
    filled next, while the cache holds it.
    """
    slots, free = list(range(n)), list(range(2 * n + 1, n - 1, -1))
    steps: list[_Step] = []
    for low, high, wants_low, wants_high in comparators(n, first, last):
        below, above = slots[low], slots[high]
        if wants_low:
            slots[low] = free.pop()
            steps.append(_Step(False, below, above, slots[low]))
        if wants_high:
            slots[high] = free.pop()
            steps.append(_Step(True, below, above, slots[high]))
        free += [slot for slot in (below, above) if slot >= n]
    used = max((step.out + 1 for step in steps), default=n)
    return tuple(steps), used, tuple(slots[first:last])


def order_statistics(block_NB: Block, first: int, last: int) -> list[Block]:
    """Return the rows that hold ranks first <= r < last of each column, smallest first.

    Finite floats; the block is not changed. The result points into it, or into a workspace that the
    next call overwrites. A zero may come out with either sign, since -0 and +0 compare equal (add
    +0 to settle it).
    """
    n, width = block_NB.shape
    steps, used, kept = _program(n, first, last)
    on_cpu = isinstance(block_NB, np.ndarray)
    minimum, maximum = functions_of(block_NB).minimum, functions_of(block_NB).maximum
    if on_cpu:
        slots = [*block_NB, *workspace("network", used - n, width, dtype=block_NB.dtype)]
    else:
        slots = [*block_NB, *block_NB.new_empty(used - n, width)]
    for larger, left, right, out in steps:
        (maximum if larger else minimum)(slots[left], slots[right], out=slots[out])
    return [slots[slot] for slot in kept]


def median_of(block_NB: Block) -> Block:
    """Return the true median of each column: the mean of both middle ranks when N is even.

    The mean is taken in float64 and rounded once to the block's dtype.
    """
    n = block_NB.shape[0]
    return mean_of(order_statistics(block_NB, (n - 1) // 2, n // 2 + 1))


def mean_of(rows: list[Block], *, exact: bool = True) -> Block:
    """Return the mean of equally long rows: added in float64 in the order given, divided once.

    Never -0. Not exact: added in their own dtype, in which a sum may overflow.
    """
    if len(rows) == 1:
        return rows[0] + 0
    if not exact:
        quick_B = rows[0] + rows[1]
        for row_B in rows[2:]:
            quick_B += row_B
        quick_B *= 1.0 / len(rows)
        return quick_B
    if isinstance(rows[0], np.ndarray):
        total_B = rows[0] + np.float64(0.0)  # settles the sign of zero
        for row_B in rows[1:]:
            np.add(total_B, row_B, out=total_B)
        return np.divide(total_B, len(rows), out=total_B).astype(rows[0].dtype)
    total = torch.zeros_like(rows[0], dtype=torch.float64)
    for row in rows:
        total.add_(row)
    # a tensor, since a device may turn division by a Python number into a product with 1/n
    return total.div_(total.new_tensor(len(rows))).to(rows[0].dtype)
