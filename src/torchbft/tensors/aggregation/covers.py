"""Which rows to leave out so that no two of the rest conflict: vertex cover, by bounded search.

Sets of rows are the bits of an integer.
"""

from __future__ import annotations


def cover_fits(conflicts: list[int], alive: int, budget: int) -> bool:
    """Whether leaving out at most ``budget`` of the alive rows ends all conflicts among them.

    conflicts: for each row, the rows that it conflicts with. Branches on the row of most conflicts
    (either it goes or all of these do), so that at most 1.47^budget cases are looked at (Downey and
    Fellows 1999, "Parameterized complexity", section 3.2).
    """
    degrees = {row: (conflicts[row] & alive).bit_count() for row in members(alive)}
    row, degree = max(degrees.items(), key=lambda item: item[1], default=(0, 0))
    if degree == 0:
        return True
    if sum(degrees.values()) > 2 * degree * budget:
        return False
    if degree <= 2:
        return _paths_and_cycles(conflicts, alive) <= budget
    without = alive & ~(1 << row)
    if cover_fits(conflicts, without, budget - 1):
        return True
    return degree <= budget and cover_fits(conflicts, without & ~conflicts[row], budget - degree)


def _paths_and_cycles(conflicts: list[int], alive: int) -> int:
    """Return the least cover where no row has more than two conflicts: half of each path."""
    least = 0
    while alive:
        part, grown = 0, alive & -alive
        while grown != part:
            part = grown
            for row in members(part):
                grown |= conflicts[row] & alive
        edges = sum((conflicts[row] & part).bit_count() for row in members(part)) // 2
        least += (edges + 1) // 2
        alive &= ~part
    return least


def first_without_conflict(conflicts: list[int], budget: int) -> list[int]:
    """Return the rows that stay when at most ``budget`` go: of all choices the one of lowest ids.

    ``cover_fits`` must hold for all rows.
    """
    alive, chosen = (1 << len(conflicts)) - 1, []
    for row, conflict in enumerate(conflicts):
        if not alive >> row & 1:
            continue
        alive &= ~(1 << row)
        left = budget - (conflict & alive).bit_count()
        if left >= 0 and cover_fits(conflicts, alive & ~conflict, left):
            chosen.append(row)
            alive, budget = alive & ~conflict, left
        else:
            budget -= 1
    return chosen


def members(rows: int) -> list[int]:
    """Return the rows of a set, lowest first."""
    found = []
    while rows:
        lowest = rows & -rows
        found.append(lowest.bit_length() - 1)
        rows ^= lowest
    return found
