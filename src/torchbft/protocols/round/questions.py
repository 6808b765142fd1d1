"""Small questions that the sending side asks about a round and the state at hand."""

from __future__ import annotations

from collections.abc import Sequence

from torchbft.primitives.ids import PeerId
from torchbft.primitives.ids import Round as RoundNumber
from torchbft.protocols.round.interface import GENESIS_ROUND, FetchPayload, StateAdvanced
from torchbft.protocols.round.state import Accepted, RoundState, SignedRoot


def need(current: RoundState) -> int:
    """n − f of the contributors: so many arrivals measure a phase."""
    return max(len(current.contributors) - current.f, 1)


def awaits(current: RoundState, lacking: Sequence[Accepted]) -> bool:
    """Whether a payload of somebody waited for is among those that are lacking."""
    return any(item.author in current.waited for item in lacking)


def is_at(applied: StateAdvanced, signed: SignedRoot | None) -> bool:
    """Whether the own state is the signed one (None: the start state)."""
    if signed is None:
        return applied.round == GENESIS_ROUND
    return (applied.round, applied.root) == (signed.round, signed.root)


def fetch(number: int, item: Accepted, holders: tuple[PeerId, ...]) -> FetchPayload:
    """The request for an opened payload."""
    author = PeerId(item.author)
    return FetchPayload(
        RoundNumber(number), author, item.payload_root, item.payload_length, holders
    )
