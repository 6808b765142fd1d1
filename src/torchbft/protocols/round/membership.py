"""Who is a member of the next round: votes counted, changes checked and made, validators updated.

Source: ROUND.md 4 and ``docs/decisions/0004-epochs.md``. Pure functions of the reader's state. A
change passes by votes of a quorum of the power frozen for the round, and is made, with all that
passed in the round, when the round is settled; each is checked against the members that the ones
before it leave. Whatever their order in a block, changes are made in one order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchbft.primitives.abci import ValidatorUpdate
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.runspec import MAX_MEMBERS
from torchbft.primitives.wire import encode
from torchbft.protocols.round.changes import Admit, Change, Remove, Rotate, is_certified
from torchbft.protocols.round.messages import MEMBER_SLOT, MembershipVote
from torchbft.protocols.round.state import (
    MAX_NAMES,
    MAX_RETIRED_KEYS,
    GenesisConfig,
    LedgerState,
    Member,
    RetiredKey,
    RoundState,
    Seat,
    changed,
    seats_of,
)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a round of so many contributors withstands, and the fewest that make it count."""

    f: int
    m_min: int
    unmet: str = ""
    """Why the aggregation rule cannot do that; empty if it can."""


def bounds(genesis: GenesisConfig, contributors: int) -> Bounds:
    """f and m_min of a round with so many seated contributors.

    What the run file sets at its most (f = ⌊(n−1)/3⌋, m_min = n − f) follows n; what it sets lower
    stays, as far as n allows.
    """
    first = sum(member.contributor for member in genesis.members)
    n = max(contributors, 1)
    most = FaultModel(n).f
    f = most if genesis.f == FaultModel(first).f else min(genesis.f, most)
    m_min = n - f if genesis.m_min == first - genesis.f else min(genesis.m_min, n - f)
    need = _need(genesis, n, f)
    if need > n - f:
        return Bounds(f, m_min, f"the rule needs {need} contributions for f={f}, not {n - f}")
    return Bounds(f, max(m_min, need))


def _need(genesis: GenesisConfig, n: int, f: int) -> int:
    """Fewest contributions with which the rule withstands f. The first size of a run was checked at
    its start: only others bring the rules, and torch with them."""
    if not genesis.rule or n == sum(member.contributor for member in genesis.members):
        return 0
    from torchbft.tensors.recipe import needs_of

    needs = needs_of(genesis.rule)
    return needs[f] if f < len(needs) else 0


def bounds_met(genesis: GenesisConfig, contributors: int) -> Bounds:
    """The same, with f lowered until the rule can do it: who is missing was convicted, and a liar
    that is gone need not be withstood."""
    found = bounds(genesis, contributors)
    n = max(contributors, 1)
    for f in range(found.f, -1, -1) if found.unmet else ():
        if _need(genesis, n, f) <= n - f:
            return Bounds(f, n - f)
    return Bounds(0, n) if found.unmet else found


# --- making a change ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Roll:
    """Members as some changes leave them, in order of name, and the keys that went out of use."""

    members: tuple[Member, ...]
    retired: tuple[RetiredKey, ...]

    def member(self, name: str) -> Member | None:
        return next((member for member in self.members if member.name == name), None)

    def has_key(self, public: bytes) -> bool:
        """Whether this key is, or ever was, anyone's: a key is used once in a run."""
        held = any(public in (m.identity, m.voting) for m in self.members)
        return held or any(public == key.voting for key in self.retired)

    def put(self, member: Member) -> Roll:
        others = [each for each in self.members if each.name != member.name]
        ordered = tuple(sorted((*others, member), key=lambda each: each.name))
        return Roll(ordered, self.retired)

    def retire(self, member: Member, last: int) -> Roll:
        key = RetiredKey(member.name, member.voting, min(member.since, last), last)
        return Roll(self.members, (*self.retired, key))


def after(roll: Roll, change: Change, state: LedgerState) -> Roll | str:
    """The roll after a change, or why it cannot be made. Total."""
    reason = _unfit(roll, change)
    if reason is not None:
        return reason
    new = _made(roll, change, state.current.number)
    if len(new.members) > MAX_NAMES or len(new.retired) > MAX_RETIRED_KEYS:
        return "the run has had too many members or keys: begin a new one"
    seats = seats_of(new.members)
    if len(seats) > MAX_MEMBERS:
        return f"a run has at most {MAX_MEMBERS} members"
    if not any(m.validator and not m.convicted for m in new.members):
        return "no validator would be left"
    contributors = sum(seat.contributor for seat in seats)
    if not contributors:
        return "no contributor would be left"
    return bounds(state.genesis, contributors).unmet or new


def _unfit(roll: Roll, change: Change) -> str | None:
    member = roll.member(change.name)
    if isinstance(change, Admit):
        return _inadmissible_member(roll, change, member)
    if member is None or member.left:
        return f"{change.name} is no member"
    if isinstance(change, Remove):
        return None
    if member.convicted:
        return f"{change.name} is convicted"
    return _unfit_key(roll, member.identity, change)


def _inadmissible_member(roll: Roll, change: Admit, known: Member | None) -> str | None:
    if known is not None and not known.left:
        return f"{change.name} is a member already"
    if known is not None and known.convicted:
        return f"{change.name} is convicted"
    if known is not None and known.identity != change.identity:
        return f"the name {change.name} belongs to another identity"
    if known is None and roll.has_key(change.identity):
        return "its identity key is in use already"
    if change.identity == change.voting:
        return "identity and voting key are one"
    if not (change.contributor or change.validator):
        return f"{change.name} would neither contribute nor validate"
    return _unfit_key(roll, change.identity, change)


def _unfit_key(roll: Roll, identity: bytes, change: Admit | Rotate) -> str | None:
    if roll.has_key(change.voting):
        return "its voting key is or was in use"
    certified = is_certified(identity, change)
    return None if certified else f"the voting key is not certified by {change.name}'s identity"


def _made(roll: Roll, change: Change, last: int) -> Roll:
    """``last``: the round with which the old members end."""
    known = roll.member(change.name)
    if isinstance(change, Admit):
        member = Member(
            change.name,
            change.identity,
            change.voting,
            change.power,
            change.contributor,
            change.validator,
            change.host,
            change.port,
            last + 1,
            credit=known.credit if known else 0,
            spells=known.spells if known else 0,
        )
        return roll.put(member)
    assert known is not None, "checked before"
    if isinstance(change, Rotate):
        new = changed(known, voting=change.voting, since=last + 1)
        return roll.retire(known, last).put(new)
    gone = changed(known, left=True, contributor=False, validator=False, parked=False)
    return roll.retire(known, last).put(gone)


# --- votes, and the end of a round ----------------------------------------------------------------


def newly_passed(state: LedgerState) -> tuple[Change, ...]:
    """Changes for which a quorum of the current round's power has voted, in canonical order."""
    current = state.current
    voters: dict[bytes, set[str]] = {}
    changes: dict[bytes, Change] = {}
    for slot in current.slots:
        if slot.kind.startswith(MEMBER_SLOT) and not slot.late:
            said = slot.first.statement
            if isinstance(said, MembershipVote):
                key = encode(said.change)
                changes[key] = said.change
                voters.setdefault(key, set()).add(slot.author)
    quorum = current.voting.quorum
    passed = (key for key in sorted(voters) if current.power(voters[key]) >= quorum)
    return tuple(changes[key] for key in passed if changes[key] not in state.passed)


def planned(state: LedgerState) -> tuple[Roll, tuple[tuple[Change, str], ...]]:
    """The roll that the next round begins with, as far as it is known, and the changes that passed
    but cannot be made, each with the reason."""
    roll, refused = Roll(state.members, state.retired), []
    for change in state.passed:
        new = after(roll, change, state)
        if isinstance(new, str):
            refused.append((change, new))
        else:
            roll = new
    return roll, tuple(refused)


def refusal(state: LedgerState, change: Change) -> str | None:
    """Why nobody may vote for a change now: the members planned so far do not allow it."""
    if change in state.passed:
        return "it has passed already"
    new = after(planned(state)[0], change, state)
    return new if isinstance(new, str) else None


def in_force(state: LedgerState, change: Change) -> bool:
    """Whether the members are already as a change wants them."""
    member = state.member(change.name)
    if isinstance(change, Remove):
        return member is not None and member.left
    return member is not None and not member.left and member.voting == change.voting


def validator_updates(before: Iterable[Seat], now: Iterable[Seat]) -> tuple[ValidatorUpdate, ...]:
    """What turns one set of validators into another: each key once, removals first."""
    old = {seat.voting: seat.power for seat in before if seat.validator}
    new = {seat.voting: seat.power for seat in now if seat.validator}
    gone = [ValidatorUpdate(public, 0) for public in sorted(old.keys() - new.keys())]
    come = [
        ValidatorUpdate(public, power)
        for public, power in sorted(new.items())
        if old.get(public) != power
    ]
    return (*gone, *come)


def ends_epoch(current: RoundState, members: tuple[Member, ...]) -> bool:
    """Whether the round after ``current`` has other validators: its epoch then ends."""
    return bool(validator_updates(current.seats, seats_of(members)))
