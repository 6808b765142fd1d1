"""Agents that attack the ledger: what is ordered, and who votes for it."""

from __future__ import annotations

from typing import Any

from torchbft.attacks.agents.agent import Agent, ledger_message, parsed_or_none
from torchbft.attacks.agents.contribution import flipped
from torchbft.attacks.declaration import Expectation, Leaves
from torchbft.primitives.effects import Broadcast, Effect, Received
from torchbft.primitives.ids import PeerId
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import Kind, Proposal, Vote, sign_vote
from torchbft.protocols.peer import LEDGER, TRANSACTION


class DoubleVoter(Agent):
    """Signs, beside each prepare and finalize vote, one for another block in the same slot, and
    sends both to all. Beyond f such votes can certify two blocks, and then convict f+1 signers."""

    name = "double_voter"
    leaves = Leaves.TRANSFERABLE
    expected = Expectation(named=True, suspected=False, downweighted=False)

    def says(self, effect: Effect, now: float) -> list[Effect]:
        message = ledger_message(effect.message) if isinstance(effect, Broadcast) else None
        if not isinstance(message, Vote) or message.kind not in (Kind.PREPARE, Kind.FINALIZE):
            return [effect]
        return [effect, Broadcast(LEDGER + encode(self._second(message)))]

    def _second(self, vote: Vote) -> Vote:
        run_id = self.application.state.genesis.run_id
        digest = flipped(vote.digest)
        return sign_vote(self._key, run_id, self.me, vote.kind, vote.height, vote.view, digest)


class CensoringLeader(Agent):
    """Leaves one honest peer's items out of its own proposals, and votes for no other's proposal
    that holds them. f of them change nothing but time: n−f others suffice, and closings of a quorum
    keep a window open until every item that f+1 honest validators hold is in."""

    name = "censoring_leader"
    leaves = Leaves.NOTHING
    expected = Expectation(named=False, suspected=False, downweighted=False)

    @property
    def censored(self) -> PeerId | None:
        """Whose items are left out: all liars choose the same peer."""
        return self.victims[0] if self.victims else None

    def hears(self, event: Any, now: float) -> list[Any]:
        if not isinstance(event, Received):
            return [event]
        if event.message[:1] == TRANSACTION:
            return [] if self._hides(event.message[1:]) else [event]
        message = ledger_message(event.message)
        hidden = isinstance(message, Proposal) and any(map(self._hides, message.block.txs))
        return [] if hidden else [event]

    def _hides(self, tx: bytes) -> bool:
        parsed = parsed_or_none(tx)
        return parsed is not None and parsed.statement.author == self.censored
