"""What must hold in every run, one property each, checked outside the code under test.

A checker sees what honest peers send and finalize. It keeps its own reading of the rules (quorum,
contradiction) and shares only the wire format and the signature check with the ledger. Those of
rounds are in ``round_checkers.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Effect
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import (
    Blocks,
    FinalizedBlock,
    Kind,
    Proposal,
    Timeout,
    Vote,
    decode_finalized,
    decode_message,
    vote_is_signed,
)
from torchbft.protocols.ledger.state import Accuse
from torchbft.protocols.round.messages import Parsed
from torchbft.protocols.round.state import Seat
from torchbft.sim.seating import power, quorum


class Checker:
    """Base: collects violations, each a line that names the peer and what broke."""

    def __init__(self) -> None:
        self.violations: list[str] = []

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        """An honest peer's apply effect."""

    def on_message(self, peer: PeerId, message: object) -> None:
        """A decoded message that an honest peer sends."""

    def on_start(self, peer: PeerId) -> None:
        """An honest peer starts or restarts."""

    def on_block(self, peer: PeerId, finalized: FinalizedBlock) -> None:
        """An honest peer wrote down a block as final."""

    def on_statement(self, peer: PeerId, statement: Parsed) -> None:
        """An honest peer wrote down a statement of a round, its own or one that it passes on."""

    def on_state(self, peer: PeerId, height: Height, digest: bytes) -> None:
        """An honest peer's application stands so after a height."""

    def on_receive(self, peer: PeerId, message: object) -> None:
        """A decoded message is about to reach an honest peer."""


class OneBlockPerHeight(Checker):
    """No two honest peers finalize different blocks at one height."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: dict[Height, bytes] = {}

    def on_block(self, peer: PeerId, finalized: FinalizedBlock) -> None:
        height = finalized.block.height
        digest = sha256("checker/block", encode(finalized.block))
        if self.blocks.setdefault(height, digest) != digest:
            self.violations.append(f"{peer} finalized another block at height {height}")


class HeightsInOrder(Checker):
    """Within one life a peer finalizes every height once, in order."""

    def __init__(self) -> None:
        super().__init__()
        self._last: dict[PeerId, Height] = {}

    def on_start(self, peer: PeerId) -> None:
        self._last.pop(peer, None)

    def on_block(self, peer: PeerId, finalized: FinalizedBlock) -> None:
        last, height = self._last.get(peer), finalized.block.height
        if last is not None and height != last + 1:
            self.violations.append(f"{peer} finalized {height} after {last}")
        self._last[peer] = height


class OneVotePerSlot(Checker):
    """An honest peer never signs two different votes for one slot, across any restarts, nor a
    time-out that hides a certificate by which it voted to finalize."""

    def __init__(self) -> None:
        super().__init__()
        self._signed: dict[tuple[PeerId, Height, Kind, int], tuple[bytes, int]] = {}
        self._finalized_in: dict[tuple[PeerId, Height], int] = {}

    def on_message(self, peer: PeerId, message: object) -> None:
        vote = message.vote if isinstance(message, Proposal | Timeout) else message
        if not isinstance(vote, Vote) or vote.author != peer:
            return
        slot = (peer, vote.height, vote.kind, vote.view)
        said = (vote.digest, vote.high)
        if self._signed.setdefault(slot, said) != said:
            self.violations.append(f"{peer} signed twice: {vote.kind.name} {slot[1]}/{slot[3]}")
        self._follow_lock(peer, vote)

    def _follow_lock(self, peer: PeerId, vote: Vote) -> None:
        key = (peer, vote.height)
        locked = self._finalized_in.get(key, -1)
        if vote.kind is Kind.FINALIZE:
            self._finalized_in[key] = max(locked, vote.view)
        elif vote.kind is Kind.TIME_OUT and locked >= 0 and vote.high <= min(locked, vote.view):
            self.violations.append(f"{peer} hid its certificate of {vote.height}/{locked}")


class CertificatesAreValid(Checker):
    """Every block that an honest peer serves was signed by n−f (of the power) of its height's
    validators, whom ``validators`` tells in order of name."""

    def __init__(self, run_id: bytes, validators: Callable[[int], Sequence[Seat]]) -> None:
        super().__init__()
        self._run_id, self._validators = run_id, validators

    def on_message(self, peer: PeerId, message: object) -> None:
        if isinstance(message, Blocks):
            for encoded in message.blocks:
                self.check(peer, decode_finalized(encoded))

    def check(self, peer: PeerId, finalized: FinalizedBlock) -> None:
        """Check a block that this peer has finalized."""
        certificate = finalized.certificate
        seats, valid = self._validators(certificate.height), set()
        for index, signature in zip(certificate.signers, certificate.signatures, strict=True):
            slot = (Kind.FINALIZE, certificate.height, certificate.view)
            seat = seats[index] if index < len(seats) else None
            name = seat.name if seat else ""
            vote = Vote(*slot, View(0), certificate.digest, name, signature)
            if seat and vote_is_signed(seat.voting, self._run_id, vote):
                valid.add(name)
        digest = sha256("ledger/block", encode(finalized.block))
        strangers = len(certificate.signers) > len(valid)
        if strangers or power(seats, valid) < quorum(seats) or digest != certificate.digest:
            height = finalized.block.height
            self.violations.append(f"{peer} holds a bad certificate at height {height}")


class OneApplicationState(Checker):
    """After one height all honest applications are in one state."""

    def __init__(self) -> None:
        super().__init__()
        self._digests: dict[Height, bytes] = {}

    def on_state(self, peer: PeerId, height: Height, digest: bytes) -> None:
        if self._digests.setdefault(height, digest) != digest:
            self.violations.append(f"{peer} has another state after height {height}")


class HonestAreNotAccused(Checker):
    """Evidence names Byzantine peers only."""

    def __init__(self, honest: frozenset[PeerId]) -> None:
        super().__init__()
        self._honest = honest
        self.accused: set[str] = set()

    def on_effect(self, peer: PeerId, effect: Effect) -> None:
        if isinstance(effect, Accuse):
            self.accused.add(effect.evidence.accused)
            if effect.evidence.accused in self._honest:
                self.violations.append(f"{peer} accused {effect.evidence.accused}, which is honest")


def decoded(message: bytes) -> object:
    """A message as the wire format reads it, or None."""
    try:
        return decode_message(message)
    except DecodeError:
        return None
