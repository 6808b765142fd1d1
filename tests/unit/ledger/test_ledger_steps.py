"""The steps of the ledger, one validator among puppets (n=4: f=1, quorum 3)."""

import pytest
from msgspec.structs import replace

from torchbft.primitives.abci import FinalizeResult, ValidatorUpdate
from torchbft.primitives.effects import Broadcast, Persist, Send, Tick
from torchbft.primitives.errors import MisuseError
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import (
    NO_DIGEST,
    Blocks,
    Body,
    FinalizedBlock,
    Kind,
    Proposal,
    Status,
    Timeout,
    TimeoutCertificate,
    Vote,
    Want,
    block_digest,
    decode_vote_record,
    vote_is_signed,
)
from torchbft.protocols.ledger.state import Finalized
from torchbft.sim.puppets import Puppets


def led_by_me(**options) -> Puppets:
    """p1 leads view 0 of height 1."""
    return Puppets(me=1, **options)


def led_by_p1(me: int = 0) -> Puppets:
    return Puppets(me=me)


def prepared_by_all(table: Puppets, digest: bytes, view: int = 0) -> None:
    for name in table.others[:2]:
        table.give(name, table.vote(name, Kind.PREPARE, digest, view=view))


def finalized_by_all(table: Puppets, digest: bytes, view: int = 0) -> None:
    for name in table.others[:2]:
        table.give(name, table.vote(name, Kind.FINALIZE, digest, view=view))


# -- 1. propose


def test_a_leader_proposes_at_once_when_the_gate_is_open() -> None:
    table = led_by_me()
    table.give_tx(b"tx")
    [proposal] = table.sent(Proposal)
    assert proposal.block.txs == (b"tx",)
    assert proposal.block.proposer == "p1"
    assert proposal.block.app_hash == table.application.info().last_app_hash
    assert proposal.justification is None
    assert [v.digest for v in table.voted(Kind.PREPARE)] == [block_digest(proposal.block)]


def test_a_leader_waits_for_the_gate_but_not_longer_than_the_proposal_wait() -> None:
    table = led_by_me(gate=lambda pending: len(pending) >= 3)
    table.give_tx(b"1")
    assert not table.sent(Proposal)
    table.wait(0.49)
    assert not table.sent(Proposal)
    table.give_tx(b"2")
    assert not table.sent(Proposal)
    table.wait(0.02)
    assert [p.block.txs for p in table.sent(Proposal)] == [(b"1", b"2")]


def test_the_gate_opens_with_the_last_transaction_it_waits_for() -> None:
    table = led_by_me(gate=lambda pending: len(pending) >= 3)
    for tx in (b"1", b"2"):
        table.give_tx(tx)
        assert not table.sent(Proposal)
    table.give_tx(b"3")
    assert [p.block.txs for p in table.sent(Proposal)] == [(b"1", b"2", b"3")]


def test_no_block_is_empty() -> None:
    table = led_by_me()
    table.wait(60)
    assert table.sent(Proposal) == []
    assert table.sent(Timeout) == [], "an idle ledger does not change views"


def test_a_leader_proposes_once_per_view() -> None:
    table = led_by_me()
    table.give_tx(b"1")
    table.give_tx(b"2")
    assert table.sent(Proposal) == []


def test_one_who_does_not_lead_does_not_propose() -> None:
    table = led_by_p1()
    table.give_tx(b"1")
    table.wait(1.0)
    assert table.sent(Proposal) == []


def test_an_application_that_proposes_too_much_is_our_own_mistake() -> None:
    table = led_by_me()
    table.application.prepare_proposal = lambda *a: [bytes(60_000)] * 20
    with pytest.raises(MisuseError, match="more than fits"):
        table.give_tx(b"1")


def test_an_application_may_propose_nothing() -> None:
    table = led_by_me()
    table.application.prepare_proposal = lambda *a: []
    table.give_tx(b"1")
    assert table.sent(Proposal) == []


# -- 2. prepare


def test_a_valid_block_is_made_durable_and_prepared() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    table.give(table.leader(), table.proposal(block))
    assert [v.digest for v in table.voted(Kind.PREPARE)] == [block_digest(block)]
    kinds = [type(effect) for effect in table.effects]
    assert kinds == [Persist, Persist, Broadcast]
    proposal, vote = (decode_vote_record(e.record) for e in table.effects[:2])
    assert proposal.block == block
    assert vote == table.voted(Kind.PREPARE)[0]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("run_id", bytes(32)),
        ("height", 2),
        ("previous", b"p" * 32),
        ("app_hash", b"a" * 32),
        ("proposer", "p2"),
        ("txs", (bytes(60_000),) * 18),
    ],
)
def test_a_block_with_one_wrong_field_is_not_prepared(field: str, value: object) -> None:
    table = led_by_p1()
    block = replace(table.block(b"tx"), **{field: value})
    table.give(table.leader(), table.proposal(block))
    assert table.voted(Kind.PREPARE) == []
    assert block_digest(block) not in table.machine._state.bodies


def test_a_block_that_the_application_refuses_is_not_prepared() -> None:
    table = led_by_p1()
    table.give(table.leader(), table.proposal(table.block(b"twice", b"twice")))
    assert table.voted(Kind.PREPARE) == []


def test_a_proposal_for_another_block_than_it_signs_is_not_prepared() -> None:
    table = led_by_p1()
    proposal = replace(table.proposal(table.block(b"1")), block=table.block(b"2"))
    table.give(table.leader(), proposal)
    assert table.voted(Kind.PREPARE) == []


def test_only_the_leader_of_the_view_may_propose() -> None:
    table = led_by_p1()
    block = table.block(b"1")
    vote = table.vote("p2", Kind.PROPOSE, block_digest(block))
    table.give("p2", Proposal(vote, block, None))
    assert table.voted(Kind.PREPARE) == []


def test_a_proposal_counts_from_its_author_only() -> None:
    table = led_by_p1()
    table.give("p2", table.proposal(table.block(b"1")))
    assert table.voted(Kind.PREPARE) == []


def test_the_second_proposal_of_a_view_is_not_prepared() -> None:
    table = led_by_p1()
    table.give("p1", table.proposal(table.block(b"1")))
    table.give("p1", table.proposal(table.block(b"2")))
    assert table.voted(Kind.PREPARE) == []


# -- 3. finalize


def test_a_prepare_certificate_is_made_durable_before_the_finalize_vote() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    table.give("p1", table.vote("p1", Kind.PREPARE, block_digest(block)))
    assert table.voted(Kind.FINALIZE) == []
    table.give("p2", table.vote("p2", Kind.PREPARE, block_digest(block)))
    assert [v.digest for v in table.voted(Kind.FINALIZE)] == [block_digest(block)]
    records = [decode_vote_record(e.record) for e in table.effects if isinstance(e, Persist)]
    assert records[0].certificate.digest == block_digest(block)
    assert records[1] == table.voted(Kind.FINALIZE)[0]


def test_a_quorum_of_finalize_votes_executes_the_block() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    prepared_by_all(table, block_digest(block))
    table.give("p1", table.vote("p1", Kind.FINALIZE, block_digest(block)))
    assert table.applied(Finalized) == []
    table.now = 0.25
    table.give("p2", table.vote("p2", Kind.FINALIZE, block_digest(block)))
    [finalized] = table.applied(Finalized)
    assert (finalized.height, finalized.view, finalized.block) == (1, 0, block)
    assert finalized.seconds_pending == 0.25
    assert finalized.result.app_hash == table.application.info().last_app_hash
    assert table.machine.height == 2
    assert table.machine.tip.digest == block_digest(block)
    assert [type(e) for e in table.effects] == [Persist, Finalized]
    assert table.effects[0].log == "blocks"


def test_votes_for_different_blocks_do_not_add_up() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    table.give("p1", table.vote("p1", Kind.PREPARE, b"1" * 32))
    table.give("p2", table.vote("p2", Kind.PREPARE, b"2" * 32))
    table.give("p3", table.vote("p3", Kind.PREPARE, block_digest(block)))
    assert table.voted(Kind.FINALIZE) == []


def test_a_repeated_vote_counts_once() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    for _ in range(5):
        table.give("p1", table.vote("p1", Kind.PREPARE, block_digest(block)))
    assert table.voted(Kind.FINALIZE) == []


def test_a_block_that_arrives_after_its_certificates_is_asked_for_and_executed() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    digest = block_digest(block)
    for name in table.others:
        table.give(name, table.vote(name, Kind.PREPARE, digest))
    assert len(table.voted(Kind.FINALIZE)) == 1, "the certificate is enough to vote"
    finalized_by_all(table, digest)
    assert [w.digest for w in table.sent(Want)] == [digest]
    assert table.applied(Finalized) == []
    table.give("p3", Body(table.block(b"another")))
    assert table.applied(Finalized) == [], "only the block that was asked for"
    table.give("p3", Body(block))
    assert [f.block for f in table.applied(Finalized)] == [block]


def test_a_late_proposal_serves_as_the_missing_block() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    for name in table.others:
        table.give(name, table.vote(name, Kind.PREPARE, block_digest(block)))
    finalized_by_all(table, block_digest(block))
    table.give("p1", table.proposal(block))
    assert [f.block for f in table.applied(Finalized)] == [block]


def test_a_block_in_use_is_handed_out_to_who_wants_it() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    table.give("p2", Want(Height(1), block_digest(block)))
    assert list(table.posts()) == [("p2", Body(block))]
    table.give("p2", Want(Height(1), b"?" * 32))
    assert list(table.posts()) == []


def test_the_next_height_begins_with_what_is_still_pending() -> None:
    table = Puppets(me=2)  # leads height 2
    for tx in (b"1", b"2"):
        table.give_tx(tx)
    block = table.block(b"1")
    table.give("p1", table.proposal(block))
    prepared_by_all(table, block_digest(block))
    finalized_by_all(table, block_digest(block))
    assert [p.block.txs for p in table.sent(Proposal)] == [(b"2",)]
    assert [type(e) for e in table.effects][-1] is Finalized, "persist, send, apply"


# -- 4. time-out


def test_a_view_without_progress_is_left_by_a_time_out() -> None:
    table = led_by_p1()
    table.give_tx(b"tx")
    table.wait(1.99)
    assert table.sent(Timeout) == []
    table.wait(0.02)
    [timeout] = table.sent(Timeout)
    assert (timeout.vote.view, timeout.vote.high, timeout.prepared) == (0, 0, None)
    assert timeout.vote.digest == NO_DIGEST


def test_after_a_time_out_nothing_is_signed_in_that_view() -> None:
    table = led_by_p1()
    table.give_tx(b"tx")
    table.wait(2.1)
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    assert table.voted(Kind.PREPARE) == []
    for name in table.others:
        table.give(name, table.vote(name, Kind.PREPARE, block_digest(block)))
        assert table.voted(Kind.FINALIZE) == []


def test_a_quorum_of_time_outs_begins_the_next_view_with_a_fresh_block() -> None:
    table = Puppets(me=2)  # leads view 1 of height 1
    table.give_tx(b"tx")
    table.wait(2.1)
    table.give("p0", table.timeout("p0"))
    assert table.machine.view == 0
    table.give("p3", table.timeout("p3"))
    assert table.machine.view == 1
    [proposal] = table.sent(Proposal)
    assert proposal.block.txs == (b"tx",)
    assert proposal.justification.view == 0
    assert proposal.justification.prepared is None


def test_the_certified_block_is_proposed_again() -> None:
    table = Puppets(me=2)
    table.give_tx(b"mine")
    block = table.block(b"theirs")
    table.give("p1", table.proposal(block))
    prepared = table.certificate(Kind.PREPARE, block_digest(block), signers=["p0", "p1", "p3"])
    table.wait(2.1)
    table.give("p0", table.timeout("p0"))
    table.give("p3", table.timeout("p3", prepared=prepared))
    [proposal] = table.sent(Proposal)
    assert proposal.block == block
    assert proposal.justification.prepared == prepared


def test_a_leader_that_lacks_the_certified_block_asks_for_it_first() -> None:
    table = Puppets(me=2)
    table.give_tx(b"mine")
    block = table.block(b"theirs")
    prepared = table.certificate(Kind.PREPARE, block_digest(block), signers=["p0", "p1", "p3"])
    table.wait(2.1)
    table.give("p0", table.timeout("p0"))
    table.give("p3", table.timeout("p3", prepared=prepared))
    assert table.sent(Proposal) == []
    assert [w.digest for w in table.sent(Want)] == [block_digest(block)]
    table.give("p3", Body(block))
    assert [p.block for p in table.sent(Proposal)] == [block]


def test_a_time_out_carries_the_certificate_that_binds() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    prepared_by_all(table, block_digest(block))
    table.wait(2.1)
    [timeout] = table.sent(Timeout)
    assert timeout.vote.high == 1
    assert timeout.prepared.digest == block_digest(block)


def test_time_outs_of_more_than_f_pull_along() -> None:
    table = led_by_p1()
    table.give("p2", table.timeout("p2", view=4))
    assert table.sent(Timeout) == []
    table.give("p3", table.timeout("p3", view=3))
    assert [t.vote.view for t in table.sent(Timeout)] == [3], "an honest one left view 3"


def test_one_liar_makes_no_idle_validator_change_views() -> None:
    table = led_by_p1()
    table.give("p2", table.timeout("p2", view=0))
    table.give("p2", table.vote("p2", Kind.PREPARE, b"x" * 32))
    table.wait(100)
    assert table.voted(Kind.TIME_OUT) == []
    assert table.machine.view == 0


def test_views_double_up_to_a_bound() -> None:
    config = Puppets().config
    assert [config.view_seconds(v) for v in range(8)] == [2, 4, 8, 16, 32, 64, 64, 64]


def test_a_proposal_of_a_later_view_needs_the_time_outs_of_the_view_before() -> None:
    table = led_by_p1()
    block = table.block(b"tx", view=1)
    table.give(table.leader(1), table.proposal(block, view=1))
    assert table.voted(Kind.PREPARE) == []
    table = led_by_p1()
    justification = table.timeouts(0)
    table.give(table.leader(1), table.proposal(block, view=1, justification=justification))
    assert [v.view for v in table.voted(Kind.PREPARE)] == [1]
    assert table.machine.view == 1


def test_a_proposal_that_ignores_the_certified_block_is_refused() -> None:
    table = led_by_p1()
    first = table.block(b"first")
    prepared = table.certificate(Kind.PREPARE, block_digest(first))
    other = table.block(b"other", view=1)
    justification = table.timeouts(0, prepared)
    table.give(table.leader(1), table.proposal(other, view=1, justification=justification))
    assert table.voted(Kind.PREPARE) == []
    again = table.proposal(first, view=1, justification=justification)
    table = led_by_p1()
    table.give(table.leader(1), again)
    assert [v.digest for v in table.voted(Kind.PREPARE)] == [block_digest(first)]


def test_a_certificate_of_a_later_view_moves_a_laggard_there() -> None:
    table = led_by_p1()
    prepared = table.certificate(Kind.PREPARE, b"d" * 32, view=5)
    table.give("p3", table.timeout("p3", view=6, prepared=prepared))
    assert table.machine.view == 5
    table.give("p3", table.timeouts(8))
    assert table.machine.view == 9


def test_far_time_outs_of_one_author_take_bounded_room() -> None:
    table = led_by_p1()
    for view in range(20, 60):
        table.give("p2", table.timeout("p2", view=view))
    held = [slot for slot, votes in table.machine._state.votes.items() if votes]
    assert held == [(Kind.TIME_OUT, 59)]


# -- 5. repetition and catching up


def test_messages_of_an_unfinished_height_are_sent_again_as_the_same_bytes() -> None:
    table = led_by_p1()
    table.give("p1", table.proposal(table.block(b"tx")))
    [vote] = [e.message for e in table.effects if isinstance(e, Broadcast)]
    again = [e.message for e in table.wait(0.6) if isinstance(e, Broadcast)]
    assert again == [vote]
    later = [e.message for e in table.wait(1.1) if isinstance(e, Broadcast)]
    assert later == [vote], "with doubled intervals"


def test_the_certificate_of_the_view_is_repeated_too() -> None:
    table = led_by_p1()
    table.give("p2", table.timeouts(0))
    table.wait(0.6)
    assert table.sent(TimeoutCertificate) == [table.timeouts(0)]


def test_a_laggard_is_given_finalized_blocks_and_takes_them() -> None:
    table = led_by_p1()
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    prepared_by_all(table, block_digest(block))
    finalized_by_all(table, block_digest(block))
    table.give("p3", Status(Height(1)))
    [blocks] = table.sent(Blocks)
    assert blocks.height == 2
    laggard = Puppets(me=3)
    laggard.give("p0", blocks)
    assert [f.block for f in laggard.applied(Finalized)] == [block]
    assert laggard.machine.tip == table.machine.tip


def test_who_hears_of_a_greater_height_asks_the_sender() -> None:
    table = led_by_p1()
    table.give("p2", table.vote("p2", Kind.PREPARE, b"x" * 32, height=9))
    assert list(table.posts()) == [("p2", Status(Height(1)))]
    table.give("p3", Status(Height(9)))
    assert list(table.posts()) == [], "not more often than every quarter of a second"
    table.now = 0.3
    table.give("p3", Status(Height(9)))
    assert list(table.posts()) == [("p3", Status(Height(1)))]


def test_after_a_batch_the_rest_is_asked_for() -> None:
    table = led_by_p1()
    first = table.finalized(table.block(b"1"))
    table.give("p2", Blocks(Height(7), (encode(first),)))
    assert table.machine.height == 2
    assert ("p2", Status(Height(2))) in list(table.posts())


def test_messages_of_the_next_height_wait_until_it_begins() -> None:
    ahead = Puppets(me=0)
    table = Puppets(me=0)
    first = table.finalized(table.block(b"1"))
    ahead.give("p1", Blocks(Height(2), (encode(first),)))
    second = ahead.proposal(ahead.block(b"2"))
    table.give(ahead.leader(), second)
    assert table.voted(Kind.PREPARE) == []
    table.give("p1", Blocks(Height(2), (encode(first),)))
    assert [v.height for v in table.voted(Kind.PREPARE)] == [2]


@pytest.mark.parametrize("flaw", ["few signers", "other run", "garbage", "wrong tip"])
def test_a_false_finalized_block_is_refused(flaw: str) -> None:
    table = led_by_p1()
    good = table.finalized(table.block(b"1"))
    bad = {
        "few signers": replace(
            good,
            certificate=table.certificate(
                Kind.FINALIZE, block_digest(good.block), signers=["p1", "p2"]
            ),
        ),
        "other run": table.finalized(replace(good.block, run_id=bytes(32))),
        "wrong tip": table.finalized(replace(good.block, previous=b"?" * 32)),
        "garbage": Status(Height(1)),
    }[flaw]
    table.give("p2", Blocks(Height(2), (encode(bad),)))
    assert table.machine.height == 1
    assert len(table.effects) == 1
    table.give("p2", Blocks(Height(2), (encode(good),)))
    assert table.machine.height == 2


def test_an_idle_validator_asks_one_peer_at_a_time_how_far_it_is() -> None:
    table = led_by_p1()
    table.wait(20)
    sends = [e for e in table.wait(12) if isinstance(e, Send)]
    assert len(sends) == 3
    assert len({e.to for e in sends}) == 3


def test_what_is_no_input_is_our_own_mistake() -> None:
    table = led_by_p1()
    with pytest.raises(MisuseError, match="is not an input"):
        table.machine.handle("tick", 0.0)
    table.machine.handle(Tick(), 0.0)


# -- observers and changing sets


def test_an_observer_follows_without_voting() -> None:
    table = Puppets(me=0)
    table.keys["p0"] = SigningKey.derive(bytes(32), "a stranger")
    table.records = {}
    table.restart()
    block = table.block(b"tx")
    table.give("p1", table.proposal(block))
    for name in table.others:
        table.give(name, table.vote(name, Kind.PREPARE, block_digest(block)))
        assert table.sent(Vote) == []
    for name in table.others:
        table.give(name, table.vote(name, Kind.FINALIZE, block_digest(block)))
    assert table.machine.height == 2
    assert set(table.records) == {"votes", "blocks"}
    assert len(table.records["votes"]) == 1, "its signer state alone"
    table.keys["p0"] = SigningKey.derive(bytes(32), "p0")
    second = table.block(b"2")
    signers = ["p0", "p1", "p2"]
    certificate = table.certificate(Kind.FINALIZE, block_digest(second), signers=signers)
    table.give("p1", Blocks(Height(3), (encode(FinalizedBlock(second, certificate)),)))
    assert table.machine.height == 3, "votes of its name's old key are not its own"


def test_validator_updates_are_in_force_two_heights_later() -> None:
    table = led_by_p1()
    gone = table.keys["p3"].public
    result = FinalizeResult((), b"h" * 32, (ValidatorUpdate(gone, 0),))
    table.application.finalize_block = lambda *a: result
    first = table.finalized(table.block(b"1"))
    table.give("p1", Blocks(Height(2), (encode(first),)))
    assert table.machine.validators.names == table.names, "height 2 is still the old set's"
    table.application.finalize_block = lambda *a: FinalizeResult((), b"h" * 32, ())
    certificate_of_two = table.finalized(table.block(b"2"))
    table.give("p1", Blocks(Height(3), (encode(certificate_of_two),)))
    assert table.machine.validators.names == ("p0", "p1", "p2")
    table.give("p3", table.vote("p3", Kind.PREPARE, b"x" * 32))
    assert table.machine._state.slot(Kind.PREPARE, 0) == {}


def test_a_key_that_joins_votes_from_its_first_height_on_and_not_before() -> None:
    """p0 is rotated in block 1: it signs height 2 with the old key, 3 with the new one."""
    table = led_by_p1()
    old, new = table.keys["p0"], SigningKey.derive(bytes(32), "p0/2")
    updates = (ValidatorUpdate(old.public, 0), ValidatorUpdate(new.public, 1))
    table.machine._config.names[new.public] = PeerId("p0")
    table._keep(table.machine.add_key(new))
    assert len(table.records["votes"]) == 2, "the new key is known before it signs"
    publics = []
    for height in (1, 2, 3):
        made = updates if height == 1 else ()
        result = FinalizeResult((), bytes([height]) * 32, made)
        table.application.finalize_block = lambda *a, result=result: result
        publics.append(table.machine.validators.publics["p0"])
        block = table.block(b"%d" % height)
        if block.proposer != "p0":
            table.give(block.proposer, table.proposal(block))
            (vote,) = table.voted(Kind.PREPARE)
            assert vote_is_signed(publics[-1], table.run_id, vote)
        table.give("p1", Blocks(Height(height + 1), (encode(table.finalized(block)),)))
    assert publics == [old.public, old.public, new.public]


def test_messages_of_a_validator_to_be_are_kept_until_its_first_height() -> None:
    table = led_by_p1()
    key = table.keys[PeerId("p9")] = SigningKey.derive(bytes(32), "p9")
    table.machine._config.names[key.public] = PeerId("p9")
    result = FinalizeResult((), b"h" * 32, (ValidatorUpdate(key.public, 1),))
    table.application.finalize_block = lambda *a: result
    table.give("p1", Blocks(Height(2), (encode(table.finalized(table.block(b"1"))),)))
    early = table.vote("p9", Kind.PREPARE, b"x" * 32, height=3)
    table.give("p9", early)
    table.give("p8", early)
    table.application.finalize_block = lambda *a: FinalizeResult((), b"h" * 32, ())
    table.give("p1", Blocks(Height(3), (encode(table.finalized(table.block(b"2"))),)))
    assert table.machine._state.slot(Kind.PREPARE, 0) == {"p9": early}
