"""Order statistics of rows by a network of elementwise minima and maxima.

Source: Batcher 1968, "Sorting networks and their applications" (odd-even merge sort). Comparators
on which no wanted output depends are left out. A comparator is one minimum and one maximum of two
rows of a block that fits the cache: no sort, no topk, no quantile, so nothing depends on how a
device orders NaN or breaks ties.

Shapes: N rows, B columns of one block.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor


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


def order_statistics(block_NB: Tensor, first: int, last: int) -> list[Tensor]:
    """Return the rows that hold ranks first <= r < last of each column, smallest first.

    block_NB is the workspace: it is overwritten and the result points into it. Finite floats; a
    zero may come out with either sign, since -0 and +0 compare equal (add +0 to settle it).
    """
    rows = list(block_NB.unbind(0))
    spare = torch.empty_like(rows[0])
    for low, high, wants_low, wants_high in comparators(len(rows), first, last):
        if wants_low and wants_high:
            torch.minimum(rows[low], rows[high], out=spare)
            torch.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare = spare, rows[low]
        elif wants_low:
            torch.minimum(rows[low], rows[high], out=rows[low])
        else:
            torch.maximum(rows[low], rows[high], out=rows[high])
    return rows[first:last]


def median_of(block_NB: Tensor) -> Tensor:
    """Return the true median of each column: the mean of both middle ranks when N is even.

    block_NB is overwritten. The mean is taken in float64 and rounded once to the block's dtype.
    """
    n = block_NB.shape[0]
    return mean_of(order_statistics(block_NB, (n - 1) // 2, n // 2 + 1))


def mean_of(rows: list[Tensor]) -> Tensor:
    """Return the mean of equally long rows: added in float64 in the order given, divided once."""
    total_B = torch.zeros_like(rows[0], dtype=torch.float64)
    for row_B in rows:
        total_B.add_(row_B)
    # a tensor, since a device may turn division by a Python number into a product with 1/n
    return total_B.div_(total_B.new_tensor(len(rows))).to(rows[0].dtype)
