"""C29: a validator that restarts signs nothing twice, forgets no lock, and finds its way back."""

import pytest

from torchbft.primitives.effects import Broadcast
from torchbft.primitives.errors import HaltError, MisuseError, StorageError
from torchbft.primitives.ids import Height
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import (
    Blocks,
    Kind,
    Proposal,
    SignerState,
    Timeout,
    Vote,
    block_digest,
    decode_finalized,
)
from torchbft.protocols.ledger.state import Finalized
from torchbft.sim.puppets import Puppets


def messages(table: Puppets) -> list[bytes]:
    return [e.message for e in table.effects if isinstance(e, Broadcast)]


def test_c29_a_restarted_leader_sends_its_proposal_again_and_no_other() -> None:
    table = Puppets(me=1)
    table.give_tx(b"1")
    before = messages(table)
    table.restart()
    assert messages(table) == before
    table.give_tx(b"2")
    assert table.sent(Proposal) == []


def test_c29_a_restarted_validator_prepares_no_second_block() -> None:
    table = Puppets()
    table.give("p1", table.proposal(table.block(b"1")))
    before = messages(table)
    table.restart()
    assert messages(table) == before
    table.give("p1", table.proposal(table.block(b"2")))
    assert table.voted(Kind.PREPARE) == []


def test_c29_the_lock_survives() -> None:
    table = Puppets()
    block = table.block(b"1")
    table.give("p1", table.proposal(block))
    for name in ("p1", "p2"):
        table.give(name, table.vote(name, Kind.PREPARE, block_digest(block)))
    assert len(table.voted(Kind.FINALIZE)) == 1
    table.restart()
    table.wait(2.1)
    [vote] = table.voted(Kind.TIME_OUT)
    assert vote.high == 1


def test_c29_a_time_out_survives() -> None:
    table = Puppets()
    table.give_tx(b"1")
    table.wait(2.1)
    [timeout] = table.sent(Timeout)
    table.restart()
    assert table.sent(Timeout) == [timeout]
    table.give("p1", table.proposal(table.block(b"1")))
    assert table.voted(Kind.PREPARE) == []


def test_the_view_survives_with_its_proposal() -> None:
    table = Puppets()
    block = table.block(b"1", view=1)
    table.give(table.leader(1), table.proposal(block, view=1, justification=table.timeouts(0)))
    table.restart()
    assert table.machine.view == 1


def test_a_block_that_was_prepared_can_be_handed_out_after_a_restart() -> None:
    table = Puppets()
    block = table.block(b"1")
    table.give("p1", table.proposal(block))
    table.restart()
    for name in ("p1", "p2"):
        table.give(name, table.vote(name, Kind.PREPARE, block_digest(block)))
    for name in ("p1", "p2"):
        table.give(name, table.vote(name, Kind.FINALIZE, block_digest(block)))
    assert [f.block for f in table.applied(Finalized)] == [block]


def with_blocks(count: int) -> Puppets:
    table = Puppets()
    for i in range(count):
        block = table.finalized(table.block(b"%d" % i))
        table.give("p1", Blocks(table.machine.height, (encode(block),)))
    assert table.machine.height == count + 1
    return table


def test_finalized_blocks_are_executed_again() -> None:
    table = with_blocks(5)
    tip, state = table.machine.tip, table.application.info()
    table.restart()
    assert table.machine.tip == tip
    assert table.application.info() == state
    assert table.applied(Finalized) == [], "they were reported before"


def test_votes_beyond_the_blocks_count_when_their_height_comes() -> None:
    """The blocks were lost, the votes were not: nothing of the later height is signed again."""
    table = with_blocks(2)
    block = table.block(b"late")
    table.give(table.leader(), table.proposal(block))
    [vote] = table.voted(Kind.PREPARE)
    blocks = table.records["blocks"]
    table.restart({"votes": table.records["votes"], "blocks": []})
    assert table.machine.height == 1
    table.give("p1", Blocks(table.machine.height, tuple(blocks)))
    assert table.machine.height == 3
    table.give(table.leader(), table.proposal(table.block(b"another")))
    assert table.voted(Kind.PREPARE) == []
    table.wait(1.0)
    assert vote in table.sent(Vote)


def test_lost_signing_state_halts() -> None:
    table = with_blocks(2)
    with pytest.raises(HaltError, match="signed votes is missing") as caught:
        table.restart({"blocks": table.records["blocks"]})
    assert "rotated" in caught.value.hint


@pytest.mark.parametrize("fields", [(bytes(32), None), (None, bytes(32))])
def test_signing_state_of_another_key_or_run_halts(fields) -> None:
    table = Puppets()
    run_id, public = fields
    own = (run_id or table.run_id, public or table.keys["p0"].public)
    with pytest.raises(HaltError, match="another key or run"):
        table.restart({"votes": [encode(SignerState(*own))]})


def test_a_log_that_begins_elsewhere_halts() -> None:
    table = Puppets()
    table.give("p1", table.proposal(table.block(b"1")))
    with pytest.raises(HaltError, match="does not begin"):
        table.restart({"votes": table.records["votes"][1:]})
    with pytest.raises(HaltError, match="does not begin"):
        table.restart({"votes": table.records["votes"][:1] * 2})


def test_an_unreadable_record_is_named() -> None:
    table = Puppets()
    with pytest.raises(StorageError, match="votes: record 1 is unreadable"):
        table.restart({"votes": [*table.records["votes"], b"\x00"]})
    table = Puppets()
    with pytest.raises(StorageError, match="blocks: a block is unreadable"):
        table.restart({"votes": table.records["votes"], "blocks": [b"\x00"]})


def test_blocks_that_do_not_chain_halt() -> None:
    table = with_blocks(3)
    first, second, third = table.records["blocks"]
    for blocks in ([first, third], [second], [first, first]):
        with pytest.raises(HaltError, match="blocks: block"):
            table.restart({"votes": table.records["votes"], "blocks": blocks})


def test_an_application_with_a_past_is_our_own_mistake() -> None:
    table = with_blocks(1)
    application = table.application
    arguments = (table.config, table.keys["p0"], table.validators, application, lambda p: True)
    with pytest.raises(MisuseError, match="genesis"):
        type(table.machine)(*arguments, {})


def test_signing_state_older_than_the_ledger_halts() -> None:
    """The votes come from a backup: a certificate shows a vote that they do not hold."""
    table = Puppets()
    backup = {log: list(records) for log, records in table.records.items()}
    block = table.block(b"1")
    table.give("p1", table.proposal(block))
    for name in ("p1", "p2"):
        table.give(name, table.vote(name, Kind.PREPARE, block_digest(block)))
    [mine] = table.voted(Kind.FINALIZE)
    for name in ("p1", "p2"):
        table.give(name, table.vote(name, Kind.FINALIZE, block_digest(block)))
    [finalized] = table.records["blocks"]
    assert mine.signature in decode_finalized(finalized).certificate.signatures
    whole = table.records
    table.restart(backup)
    with pytest.raises(HaltError, match="lacks one of height 1"):
        table.give("p1", Blocks(Height(2), (finalized,)))
    table.restart({"votes": whole["votes"]})
    table.give("p1", Blocks(Height(2), (finalized,)))
    assert table.machine.height == 2, "with the whole log all is well"
