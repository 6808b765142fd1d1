"""Whom a round waits for (ROUND.md 9).

At most f contributors are *parked*, not waited for: those without an accepted contribution in the
last two non-void rounds, longest absent first, ties by id. After its j-th such spell a member is
waited for again once its items reached the ledger, late ones included, in 2^j ≤ 64 rounds in a
row. Otherwise one bad spell leaves only liars waited for, and a flickering liar costs a time-out
each round.
"""

from __future__ import annotations

from torchbft.protocols.round.state import Member, RoundState, changed

ABSENT_ROUNDS = 2
"""Non-void rounds in a row without an accepted contribution that make a member a candidate."""

LONGEST_STREAK = 64
"""Rounds in a row that a member must show up in at most, however often it went missing."""


def _showed_up(member: Member, ended: RoundState) -> bool:
    """Whether the member's items of a round are on the ledger by now, late ones included."""
    if ended.slot("commit", member.name) is None:
        return False
    return not ended.reached_open or ended.slot("open", member.name) is not None


def _streaked(member: Member, ended: RoundState) -> Member:
    if not member.parked or ended.seat(member.name) is None:
        return member
    streak = member.streak + 1 if _showed_up(member, ended) else 0
    if streak >= min(2**member.spells, LONGEST_STREAK):
        return changed(member, parked=False, absent=0, streak=0)
    return changed(member, streak=streak)


def _parked(member: Member) -> Member:
    return changed(member, parked=True, spells=min(member.spells + 1, LONGEST_STREAK), streak=0)


def reconsidered(
    members: tuple[Member, ...], ended: RoundState | None, f: int
) -> tuple[Member, ...]:
    """Members with their parking as the next round freezes it; ``f`` is that round's.

    ``ended`` is the round before the one just settled: its late items have come by now.
    """
    if ended is not None:
        members = tuple(_streaked(member, ended) for member in members)
    seated = [m for m in members if m.contributor and not m.convicted]
    free = f - sum(m.parked for m in seated)
    absent = [m for m in seated if m.absent >= ABSENT_ROUNDS and not m.parked]
    longest = sorted(absent, key=lambda m: (-m.absent, m.name))[: max(free, 0)]
    chosen = {member.name for member in longest}
    return tuple(_parked(m) if m.name in chosen else m for m in members)


def waited_for(members: tuple[Member, ...], *, after_void: bool = False) -> tuple[str, ...]:
    """After a void round everyone is waited for: a parked honest member may be the one without
    whom liars that withhold would make the next round void as well."""
    seated = (m for m in members if m.contributor and not m.convicted)
    return tuple(m.name for m in seated if after_void or not m.parked)


def after_round(members: tuple[Member, ...], accepted: frozenset[str]) -> tuple[Member, ...]:
    """Credit and absence after a fixed round."""

    def settled(member: Member) -> Member:
        if not member.contributor:
            return member
        if member.name in accepted:
            return changed(member, absent=0, credit=member.credit + 1)
        return changed(member, absent=member.absent + 1)

    return tuple(settled(member) for member in members)


def restored(members: tuple[Member, ...], standing: tuple[Member, ...]) -> tuple[Member, ...]:
    """Credit and absence as they were before a round that votes made void."""
    before = {member.name: member for member in standing}
    return tuple(
        changed(m, absent=before[m.name].absent, credit=before[m.name].credit)
        if m.name in before
        else m
        for m in members
    )
