"""Agents that lie about a contribution: with what they sign, or by what they leave out."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from torchbft.attacks.agents.agent import Agent
from torchbft.attacks.declaration import Expectation, Leaves
from torchbft.primitives.effects import Broadcast, Effect
from torchbft.primitives.wire import MAX_ITEM_BYTES
from torchbft.protocols.ledger.messages import MAX_TX_BYTES
from torchbft.protocols.peer import TRANSACTION
from torchbft.protocols.round.interface import OfferPayload, Trained
from torchbft.protocols.round.messages import (
    Attestation,
    Commitment,
    Opening,
    Parsed,
    Statement,
    Status,
)
from torchbft.protocols.round.state import CONVICTABLE

OVERSIZED_LENGTH = 2**40
"""Bytes that an oversized payload claims to have: beyond what any run file allows."""


def flipped(digest: bytes) -> bytes:
    """Another digest of the same size."""
    return bytes([digest[0] ^ 1]) + digest[1:]


class Equivocator(Agent):
    """Signs two different commitments, openings or attestations in a round, the kind changing from
    round to round, and sends one to each half of the others.

    Both reach the ledger through different leaders, and two signatures of one key for one slot
    convict. Source: Bano et al., "Twins: BFT systems made robust" (OPODIS 2021).
    """

    name = "equivocator"
    leaves = Leaves.TRANSFERABLE
    expected = Expectation(named=True, suspected=False, downweighted=False)

    def says(self, effect: Effect, now: float) -> list[Effect]:
        parsed = self.mine(effect)
        if parsed is None or not isinstance(effect, Broadcast) or not self._doubles(parsed):
            return [effect]
        return self.split(effect.message, self.signed(twin(parsed.statement)))

    def _doubles(self, parsed: Parsed) -> bool:
        return parsed.slot == CONVICTABLE[parsed.statement.round % len(CONVICTABLE)]


def twin(statement: Statement) -> Statement:
    """Another statement for the same slot."""
    match statement:
        case Commitment():
            return replace(statement, digest=flipped(statement.digest))
        case Opening():
            return replace(statement, payload_root=flipped(statement.payload_root))
        case Attestation():
            swap = {Status.HELD: Status.MISSING, Status.MISSING: Status.HELD}
            changed = bytes(swap.get(status, Status.MISSING) for status in statement.statuses)
            return replace(statement, statuses=changed)
        case _:
            return statement


class BadOpener(Agent):
    """Opens another contribution than it committed to: the commitment says one payload root, the
    opening another. Both are signed, so together they prove it."""

    name = "bad_opener"
    leaves = Leaves.TRANSFERABLE
    expected = Expectation(named=True, suspected=False, downweighted=False)

    def says(self, effect: Effect, now: float) -> list[Effect]:
        parsed = self.mine(effect)
        if parsed is not None and isinstance(parsed.statement, Opening):
            return [Broadcast(self.signed(twin(parsed.statement)))]
        return [effect]

    def hands_in(self, tx: bytes) -> bool:
        parsed = self.own(tx)
        return parsed is None or parsed.slot != "open"


class _Omitting(Agent):
    """Leaves some of its own statements out, and the payload with the opening."""

    def omits(self, slot: str, round: int) -> bool:
        """Whether the own statement in this slot of this round is never sent."""
        raise NotImplementedError

    def says(self, effect: Effect, now: float) -> list[Effect]:
        if isinstance(effect, OfferPayload):
            return [] if self.omits("open", effect.round) else [effect]
        parsed = self.mine(effect)
        omitted = parsed is not None and self.omits(parsed.slot, parsed.statement.round)
        return [] if omitted else [effect]

    def hands_in(self, tx: bytes) -> bool:
        parsed = self.own(tx)
        return parsed is None or not self.omits(parsed.slot, parsed.statement.round)


class Withholder(_Omitting):
    """Commits in every round and never opens: an omission, which the closed window shows."""

    name = "withholder"
    leaves = Leaves.NOTHING
    expected = Expectation(named=False, suspected=True, downweighted=False)

    def omits(self, slot: str, round: int) -> bool:
        return slot == "open"


class Flickerer(_Omitting):
    """Contributes nothing in every third round, so that it is waited for again and again.

    Strength: the period, in rounds.
    """

    name = "flickerer"
    leaves = Leaves.NOTHING
    default_strength = 3.0
    expected = Expectation(named=False, suspected=True, downweighted=False)

    def omits(self, slot: str, round: int) -> bool:
        return slot in ("commit", "open") and round % int(self.strength) == int(self.strength) - 1


class SilentValidator(_Omitting):
    """Contributes like an honest peer, and neither closes windows nor attests."""

    name = "silent_validator"
    leaves = Leaves.NOTHING
    expected = Expectation(named=False, suspected=False, downweighted=False)

    def omits(self, slot: str, round: int) -> bool:
        return slot == "attest" or slot.startswith("close-")


class Oversized(Agent):
    """Commits to and opens a payload of 2^40 bytes, which nobody can fetch, and sends transactions
    beyond their bounds with it."""

    name = "oversized"
    leaves = Leaves.OBSERVATIONS
    expected = Expectation(named=True, suspected=False, downweighted=False)

    def hears(self, event: Any, now: float) -> list[Any]:
        if not isinstance(event, Trained):
            return [event]
        claim = Trained(event.round, OVERSIZED_LENGTH, event.payload_root, event.trace_root)
        return [claim]

    def says(self, effect: Effect, now: float) -> list[Effect]:
        if not isinstance(effect, OfferPayload):
            return [effect]
        too_large = (MAX_ITEM_BYTES + 1, MAX_TX_BYTES + 1)
        return [Broadcast(TRANSACTION + self.random.randbytes(size)) for size in too_large]
