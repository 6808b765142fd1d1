"""What a restarted validator reads back from its log ``votes`` before it may sign again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchbft.primitives.errors import DecodeError, HaltError, StorageError
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.protocols.ledger.messages import (
    Certificate,
    Prepared,
    Proposal,
    SignerState,
    Timeout,
    Vote,
    VoteRecord,
    block_digest,
    decode_vote_record,
)
from torchbft.protocols.ledger.state import HeightState

Records = dict[Height, list[tuple[VoteRecord, bytes]]]
"""Records of log ``votes`` by height, each with its bytes, in order."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """The log ``votes``: what was signed at each height, and by which keys at all."""

    by_height: Records
    signers: set[bytes]


def read_votes(records: Sequence[bytes], run_id: bytes) -> Recorded:
    """Sort the log by height. Raises HaltError if it is not of this run, StorageError if it cannot
    be read."""
    recorded = Recorded({}, set())
    for index, data in enumerate(records):
        try:
            record = decode_vote_record(data)
        except DecodeError as error:
            raise StorageError(f"record {index} is unreadable: {error}", where="votes") from None
        if index == 0 and not isinstance(record, SignerState):
            raise lost("the log of signed votes does not begin with its signer")
        if isinstance(record, SignerState):
            if record.run_id != run_id:
                raise lost("the log of signed votes belongs to another key or run")
            recorded.signers.add(record.public)
        else:
            recorded.by_height.setdefault(_height(record), []).append((record, data))
    return recorded


def check_signers(signers: set[bytes], publics: Sequence[bytes], *, blocks: int) -> None:
    """Raise HaltError if a log without blocks, in which no key was rotated yet, is another key's.

    Beside blocks the replay finds out which keys should be in the log: see ``_check_signer``.
    """
    if signers and not blocks and signers.isdisjoint(publics):
        raise lost("the log of signed votes belongs to another key or run")


def lost(what: str) -> HaltError:
    return HaltError(what, where="votes", hint="restore it, or have this voting key rotated")


def _height(record: Proposal | Prepared | Vote | Timeout) -> Height:
    if isinstance(record, Vote):
        return record.height
    return record.certificate.height if isinstance(record, Prepared) else record.vote.height


def restore(state: HeightState, recorded: Records, me: PeerId) -> None:
    """Put back what this validator signed and knew at the height that begins; drop older ones."""
    for record, data in recorded.get(state.height, ()):
        if isinstance(record, Prepared):
            state.signed.learn(record.certificate)
            _reach(state, record.certificate.view)
        elif isinstance(record, Vote):
            _restore_vote(state, record, data, me)
        elif isinstance(record, Timeout):
            if record.prepared is not None:
                state.signed.learn(record.prepared)
            _restore_vote(state, record.vote, data, me)
        elif isinstance(record, Proposal):
            state.keep_body(block_digest(record.block), record.block)
            state.slot(*record.vote.slot)[PeerId(record.vote.author)] = record.vote
            if record.vote.view > state.view:
                state.enter(record.vote.view, record.justification)
            if record.vote.author == me:
                _restore_vote(state, record.vote, data, me)
    for height in [h for h in recorded if h <= state.height]:
        del recorded[height]


def check_own_vote(certificate: Certificate, state: HeightState, me: PeerId) -> None:
    """Raise HaltError if a valid certificate holds a vote of ours that our log does not: the log is
    older than the ledger (a restored backup), and nobody knows what else was signed."""
    names = state.validators.names
    signed = me in {names[index] for index in certificate.signers}
    if signed and (certificate.kind, certificate.view) not in state.signed.votes:
        raise lost(f"the log of signed votes lacks one of height {certificate.height}")


def _reach(state: HeightState, view: View) -> None:
    if view > state.view:
        state.enter(view, None)


def _restore_vote(state: HeightState, vote: Vote, data: bytes, me: PeerId) -> None:
    state.signed.record(vote)
    state.mine[vote.slot] = data
    state.slot(*vote.slot)[me] = vote
