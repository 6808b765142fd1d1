"""Negative controls: each checker reports the one thing it is for, and is silent otherwise."""

from msgspec.structs import replace

from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.certificates import double_vote
from torchbft.protocols.ledger.messages import Blocks, FinalizedBlock, Kind, block_digest
from torchbft.protocols.ledger.state import Accuse
from torchbft.protocols.round.state import Seat
from torchbft.sim.checkers import (
    CertificatesAreValid,
    HeightsInOrder,
    HonestAreNotAccused,
    OneApplicationState,
    OneBlockPerHeight,
    OneVotePerSlot,
    decoded,
)
from torchbft.sim.puppets import Puppets

TABLE = Puppets()
A, B = PeerId("p1"), PeerId("p2")


def final(tx: bytes = b"1", height: int = 1) -> FinalizedBlock:
    return TABLE.finalized(replace(TABLE.block(tx), height=Height(height)))


def test_two_blocks_at_one_height() -> None:
    checker = OneBlockPerHeight()
    checker.on_block(A, final(b"1"))
    checker.on_block(B, final(b"1"))
    checker.on_block(A, final(b"2", height=2))
    assert checker.violations == []
    checker.on_block(B, final(b"3", height=2))
    assert checker.violations == ["p2 finalized another block at height 2"]


def test_heights_out_of_order() -> None:
    checker = HeightsInOrder()
    for height in (1, 2):
        checker.on_block(A, final(height=height))
    checker.on_start(A)
    for height in (3, 4):
        checker.on_block(A, final(height=height))
    assert checker.violations == []
    checker.on_block(A, final(height=4))
    checker.on_block(A, final(height=6))
    assert checker.violations == ["p1 finalized 4 after 4", "p1 finalized 6 after 4"]


def test_two_votes_in_one_slot() -> None:
    checker = OneVotePerSlot()
    checker.on_message(A, TABLE.vote(A, Kind.PREPARE, b"1" * 32))
    checker.on_message(A, TABLE.vote(A, Kind.PREPARE, b"1" * 32))
    checker.on_message(A, TABLE.vote(A, Kind.FINALIZE, b"2" * 32))
    checker.on_message(A, TABLE.vote(B, Kind.PREPARE, b"2" * 32))
    assert checker.violations == []
    checker.on_message(A, TABLE.vote(A, Kind.PREPARE, b"2" * 32))
    assert checker.violations == ["p1 signed twice: PREPARE 1/0"]
    checker.on_message(A, TABLE.proposal(TABLE.block(b"1")))
    checker.on_message(A, TABLE.proposal(TABLE.block(b"2")))
    assert len(checker.violations) == 2


def test_a_hidden_lock() -> None:
    checker = OneVotePerSlot()
    checker.on_message(A, TABLE.vote(A, Kind.FINALIZE, b"d" * 32, view=2))
    prepared = TABLE.certificate(Kind.PREPARE, b"d" * 32, view=2)
    checker.on_message(A, TABLE.timeout(A, 2, prepared))
    assert checker.violations == []
    checker.on_message(A, TABLE.timeout(A, 3))
    assert checker.violations == ["p1 hid its certificate of 1/2"]


def test_a_certificate_without_a_quorum() -> None:
    seats = [Seat(name, key.public, 1, True, True) for name, key in sorted(TABLE.keys.items())]
    checker = CertificatesAreValid(TABLE.run_id, lambda height: seats)
    good = TABLE.finalized(TABLE.block(b"1"))
    checker.on_message(A, Blocks(Height(2), (encode(good),)))
    assert checker.violations == []
    digest = block_digest(good.block)
    few = TABLE.certificate(Kind.FINALIZE, digest, signers=["p1", "p2"])
    prepared = TABLE.certificate(Kind.PREPARE, digest)
    for bad in (
        replace(good, certificate=few),
        replace(good, certificate=prepared),
        replace(good, certificate=replace(good.certificate, signers=(1, 1, 1))),
        replace(good, block=TABLE.block(b"2")),
    ):
        checker.check(A, bad)
    assert checker.violations == ["p1 holds a bad certificate at height 1"] * 4


def test_states_that_differ() -> None:
    checker = OneApplicationState()
    checker.on_state(A, Height(1), b"h" * 32)
    checker.on_state(B, Height(1), b"h" * 32)
    assert checker.violations == []
    checker.on_state(B, Height(1), b"x" * 32)
    assert checker.violations == ["p2 has another state after height 1"]


def test_an_honest_peer_accused() -> None:
    checker = HonestAreNotAccused(frozenset([A]))
    votes = [TABLE.vote(B, Kind.PREPARE, d * 32) for d in (b"1", b"2")]
    checker.on_effect(A, Accuse(double_vote(TABLE.run_id, *votes)))
    assert (checker.violations, checker.accused) == ([], {"p2"})
    votes = [TABLE.vote(A, Kind.PREPARE, d * 32) for d in (b"1", b"2")]
    checker.on_effect(B, Accuse(double_vote(TABLE.run_id, *votes)))
    assert checker.violations == ["p2 accused p1, which is honest"]


def test_what_is_no_message_is_none() -> None:
    assert decoded(b"\xc1") is None
    vote = TABLE.vote(A, Kind.PREPARE, b"1" * 32)
    assert decoded(encode(vote)) == vote
