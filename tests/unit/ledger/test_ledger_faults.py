"""What a validator makes of peers that lie: evidence, suspicion, and never an exception."""

import pytest
from msgspec.structs import replace

from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import Height, View
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.ledger.certificates import check_double_vote
from torchbft.protocols.ledger.messages import (
    NO_DIGEST,
    Kind,
    Prepared,
    Proposal,
    SignerState,
    Status,
    Timeout,
    Vote,
    block_digest,
)
from torchbft.protocols.ledger.state import Accuse, Finalized, Suspect
from torchbft.sim.puppets import Puppets


def accused(table: Puppets) -> list[str]:
    found = [effect.evidence for effect in table.applied(Accuse)]
    for evidence in found:
        public = table.keys[evidence.accused].public
        assert check_double_vote(evidence, public, table.run_id)
    return [evidence.accused for evidence in found]


def suspected(table: Puppets) -> list[tuple[str, str]]:
    return [(effect.peer, effect.fault) for effect in table.applied(Suspect)]


@pytest.mark.parametrize("kind", [Kind.PREPARE, Kind.FINALIZE])
def test_two_votes_in_one_slot_are_evidence_once(kind: Kind) -> None:
    table = Puppets()
    table.give("p2", table.vote("p2", kind, b"1" * 32))
    assert accused(table) == []
    table.give("p2", table.vote("p2", kind, b"2" * 32))
    assert accused(table) == ["p2"]
    table.give("p2", table.vote("p2", kind, b"3" * 32))
    assert accused(table) == [], "one piece of evidence is enough"


def test_two_proposals_of_one_view_are_evidence() -> None:
    table = Puppets()
    table.give("p1", table.proposal(table.block(b"1")))
    table.give("p1", table.proposal(table.block(b"2")))
    assert accused(table) == ["p1"]


def test_two_time_outs_of_one_view_that_differ_are_evidence() -> None:
    table = Puppets()
    prepared = table.certificate(Kind.PREPARE, b"d" * 32)
    table.give("p2", table.timeout("p2"))
    table.give("p2", table.timeout("p2", prepared=prepared))
    assert accused(table) == ["p2"]


def test_a_time_out_that_hides_the_certificate_of_a_finalize_vote_is_evidence() -> None:
    table = Puppets()
    table.give("p2", table.vote("p2", Kind.FINALIZE, b"d" * 32))
    table.give("p2", table.timeout("p2", view=1))
    assert accused(table) == ["p2"]
    table = Puppets()
    table.give("p2", table.timeout("p2", view=0))
    table.give("p2", table.vote("p2", Kind.FINALIZE, b"d" * 32))
    assert accused(table) == ["p2"], "in either order"


def test_a_second_vote_after_the_certificate_is_still_seen() -> None:
    """Surplus votes are not checked on arrival; a contradiction checks both."""
    table = Puppets()
    digest = block_digest(table.block(b"tx"))
    table.give("p1", table.proposal(table.block(b"tx")))
    table.give("p1", table.vote("p1", Kind.PREPARE, digest))
    table.give("p2", table.vote("p2", Kind.PREPARE, digest))
    assert (Kind.PREPARE, 0) in table.machine._state.certified
    table.give("p3", table.vote("p3", Kind.PREPARE, digest))
    table.give("p3", table.vote("p3", Kind.PREPARE, b"?" * 32))
    assert accused(table) == ["p3"]


def test_a_false_surplus_vote_accuses_nobody() -> None:
    table = Puppets()
    digest = block_digest(table.block(b"tx"))
    table.give("p1", table.proposal(table.block(b"tx")))
    for name in ("p1", "p2"):
        table.give(name, table.vote(name, Kind.PREPARE, digest))
    table.give("p3", replace(table.vote("p3", Kind.PREPARE, digest), signature=bytes(64)))
    table.give("p3", table.vote("p3", Kind.PREPARE, b"?" * 32))
    assert accused(table) == []


def test_an_equivocating_leader_is_found_through_those_it_split() -> None:
    """p1 shows block A to p0 and block B to p2; p2's vote for B makes p0 show A's proposal."""
    left, right = Puppets(me=0), Puppets(me=2)
    for_left, for_right = left.proposal(left.block(b"A")), left.proposal(left.block(b"B"))
    left.give("p1", for_left)
    right.give("p1", for_right)
    [vote] = right.voted(Kind.PREPARE)
    left.give("p2", vote)
    [(to, shown)] = left.posts()
    assert (to, shown) == ("p2", for_left.vote)
    right.give("p0", shown)
    assert accused(right) == ["p1"]


def test_the_split_is_shown_when_the_proposal_comes_after_the_vote() -> None:
    table = Puppets()
    table.give("p2", table.vote("p2", Kind.PREPARE, b"B" * 32))
    proposal = table.proposal(table.block(b"A"))
    table.give("p1", proposal)
    assert ("p2", proposal.vote) in list(table.posts())
    table.give("p2", table.vote("p2", Kind.PREPARE, b"B" * 32))
    assert list(table.posts()) == [], "once per view"


def test_a_false_signature_makes_its_sender_suspected() -> None:
    table = Puppets()
    vote = replace(table.vote("p2", Kind.PREPARE, b"d" * 32), signature=bytes(64))
    table.give("p2", vote)
    assert suspected(table) == [("p2", Fault.BAD_SIGNATURE)]
    table.give("p2", replace(vote, digest=b"e" * 32))
    assert suspected(table) == [], "said once"
    table.give("p2", table.vote("p2", Kind.PREPARE, b"d" * 32))
    assert table.machine._state.slot(Kind.PREPARE, View(0)).keys() == {"p2"}


def test_a_vote_in_the_name_of_another_suspects_the_sender_not_the_name() -> None:
    table = Puppets()
    table.give("p2", table.vote("p3", Kind.PREPARE, b"d" * 32))
    assert suspected(table) == [("p2", Fault.BAD_SIGNATURE)]
    table.give("p3", table.vote("p3", Kind.PREPARE, b"e" * 32))
    assert accused(table) == [], "a replayed vote frames nobody"


def test_the_key_of_one_validator_does_not_sign_for_another() -> None:
    table = Puppets()
    table.keys["p3"] = table.keys["p2"]
    table.give("p3", table.vote("p3", Kind.PREPARE, b"d" * 32))
    assert suspected(table) == [("p3", Fault.BAD_SIGNATURE)]


def test_a_vote_of_another_run_counts_nowhere() -> None:
    table, other = Puppets(), Puppets()
    other.run_id = bytes(32)
    table.give("p2", other.vote("p2", Kind.PREPARE, b"d" * 32))
    assert suspected(table) == [("p2", Fault.BAD_SIGNATURE)]


def test_a_stranger_is_not_heard() -> None:
    table = Puppets()
    table.keys["stranger"] = SigningKey.derive(bytes(32), "stranger")
    table.give("stranger", table.vote("stranger", Kind.PREPARE, b"d" * 32))
    assert table.effects == []
    assert table.machine._state.votes == {}


MALFORMED = "malformed-message"


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda t: t.vote("p2", Kind.TIME_OUT), MALFORMED),
        (lambda t: t.vote("p2", Kind.PREPARE, b"d" * 32, high=1), MALFORMED),
        (lambda t: Timeout(t.vote("p2", Kind.PREPARE, b"d" * 32), None), MALFORMED),
        (lambda t: Timeout(t.vote("p2", Kind.TIME_OUT, b"d" * 32), None), MALFORMED),
        (lambda t: Timeout(t.vote("p2", Kind.TIME_OUT, high=1), None), "bad-time-out"),
        (lambda t: SignerState(bytes(32), bytes(32)), MALFORMED),
        (lambda t: Prepared(t.certificate(Kind.PREPARE, b"d" * 32)), MALFORMED),
        (lambda t: t.proposal(t.block(b"1")), "bad-proposal"),
    ],
)
def test_what_has_not_its_form_is_dropped(make, fault: str) -> None:
    table = Puppets()
    table.give("p2", make(table))
    assert suspected(table) == [("p2", fault)]
    assert not any(table.machine._state.votes.values())


def test_a_time_out_with_a_false_certificate_is_dropped() -> None:
    table = Puppets()
    prepared = table.certificate(Kind.PREPARE, b"d" * 32, view=3)
    few = table.certificate(Kind.PREPARE, b"d" * 32, signers=["p1"])
    final = table.certificate(Kind.FINALIZE, b"d" * 32)
    for bad in (prepared, few, final, replace(few, height=Height(2))):
        vote = table.vote("p2", Kind.TIME_OUT, high=bad.view + 1)
        table = Puppets()
        table.give("p2", Timeout(vote, bad))
        assert suspected(table) == [("p2", "bad-time-out")]
        assert table.machine._state.signed.high is None


def test_a_false_time_out_certificate_moves_nobody() -> None:
    table = Puppets()
    good = table.timeouts(0)
    wrong = [
        replace(good, signers=good.signers[:2]),
        replace(good, highs=(View(1), *good.highs[1:])),
        replace(good, view=View(5)),
        replace(good, signers=(1, 1, 2)),
        replace(good, signers=(1, 2, 127)),
        replace(good, signatures=(bytes(64),) * 3),
        replace(good, prepared=table.certificate(Kind.PREPARE, b"d" * 32, view=7)),
    ]
    for certificate in wrong:
        table = Puppets()
        table.give("p2", certificate)
        assert table.machine.view == 0
        assert suspected(table) == [("p2", "bad-certificate")]
    table.give("p2", good)
    assert table.machine.view == 1


def test_a_proposal_with_time_outs_of_another_height_is_refused() -> None:
    table = Puppets()
    block = table.block(b"tx", view=1)
    other = replace(table.timeouts(0), height=Height(2))
    table.give(table.leader(1), table.proposal(block, view=1, justification=other))
    assert table.voted(Kind.PREPARE) == []


def test_noise_is_suspected_and_harmless() -> None:
    table = Puppets()
    for noise in (b"", b"\x00", b"\xc1" * 50, b"\xff" * 5_000_000):
        table.give_bytes("p2", noise)
        assert table.machine.height == 1
    assert table.machine._accusations._suspected == {("p2", MALFORMED)}


def test_huge_numbers_take_no_room() -> None:
    top = 2**62
    table = Puppets()
    table.give("p2", Status(Height(top)))
    table.give("p2", table.vote("p2", Kind.PREPARE, b"d" * 32, height=top))
    table.give("p2", table.vote("p2", Kind.PREPARE, b"d" * 32, view=top))
    table.give("p2", table.timeout("p2", view=top - 1))
    table.give("p3", Status(Height(top)))
    assert table.machine.view == 0
    table.wait(30)
    assert len(table.machine._state.votes) <= 2


def test_accepted_blocks_go_on_while_liars_shout() -> None:
    table = Puppets()
    block = table.block(b"tx")
    table.give("p3", table.vote("p3", Kind.PREPARE, b"x" * 32))
    table.give("p3", table.vote("p3", Kind.FINALIZE, b"x" * 32))
    table.give("p1", table.proposal(block))
    for kind in (Kind.PREPARE, Kind.FINALIZE):
        for name in ("p1", "p2"):
            table.give(name, table.vote(name, kind, block_digest(block)))
    assert [f.block for f in table.applied(Finalized)] == [block]


def test_a_leaders_vote_alone_is_no_proposal() -> None:
    table = Puppets()
    block = table.block(b"tx")
    vote = table.vote("p1", Kind.PROPOSE, block_digest(block))
    table.give("p1", vote)
    table.give("p2", vote)
    assert table.effects == []
    table.give("p1", Proposal(vote, block, None))
    assert len(table.voted(Kind.PREPARE)) == 1


def test_a_vote_with_a_digest_of_nothing_is_only_a_vote() -> None:
    table = Puppets()
    for name in table.others:
        table.give(name, table.vote(name, Kind.PREPARE, NO_DIGEST))
    for name in table.others:
        table.give(name, table.vote(name, Kind.FINALIZE, NO_DIGEST))
    assert table.applied(Finalized) == []
    assert table.machine.height == 1
    assert isinstance(table.vote("p1", Kind.PREPARE), Vote)
