"""Changes of the membership that this peer's operator is for: voted for anew in each round."""

from __future__ import annotations

from collections.abc import Iterable

from torchbft.primitives.effects import Effect
from torchbft.protocols.round import membership
from torchbft.protocols.round.changes import Change
from torchbft.protocols.round.interface import ChangeTold
from torchbft.protocols.round.messages import MembershipVote
from torchbft.protocols.round.state import LedgerState, Phase
from torchbft.protocols.round.statements import Statements


class Wishes:
    """Wants each change until it is in force, or is not wanted any more. A change that cannot be
    made now may become possible; what stands in its way is told once."""

    def __init__(self, own: Statements) -> None:
        self._own = own
        self._wanted: tuple[Change, ...] = ()
        self._told: set[tuple[Change, str]] = set()

    def replace(self, changes: Iterable[Change]) -> None:
        """Be for these and no others."""
        self._wanted = tuple(dict.fromkeys(changes))
        self._told = {told for told in self._told if told[0] in self._wanted}

    def due(self, state: LedgerState, head: tuple[int, bytes, int, int, str]) -> list[Effect]:
        """Votes of the current round, and news of what became of a change."""
        effects: list[Effect] = []
        for change in self._wanted:
            if membership.in_force(state, change):
                self._wanted = tuple(c for c in self._wanted if c != change)
                effects.append(ChangeTold(change, True, ""))
            elif state.phase != Phase.FINISHED and change not in state.passed:
                effects += self._vote(state, change, head)
        return effects

    def _vote(
        self, state: LedgerState, change: Change, head: tuple[int, bytes, int, int, str]
    ) -> list[Effect]:
        vote = MembershipVote(*head, change)
        if self._own.has(vote):
            return []
        reason = membership.refusal(state, change)
        if reason is None:
            return self._own.make(vote)
        if (change, reason) in self._told:
            return []
        self._told.add((change, reason))
        return [ChangeTold(change, False, reason)]
