"""Commits: whose votes count, how much power is needed, and what is refused beyond the engine."""

from collections.abc import Callable
from random import Random

import msgspec
import pytest

from torchbft.primitives.abci import FinalizeResult, TxResult, ValidatorUpdate
from torchbft.primitives.errors import MisuseError
from torchbft.protocols.chain.checks import (
    Genesis,
    application_fault,
    expected_after,
    expected_at_start,
    first_fault,
    in_order,
    link_fault,
    median_time,
    record_fault,
    updated,
)
from torchbft.protocols.chain.messages import (
    BlockId,
    ChainRecord,
    Commit,
    CommitSig,
    Flag,
    Timestamp,
    Validator,
)
from torchbft.sim.chain import ChainMaker

replace = msgspec.structs.replace
MakeChain = Callable[..., ChainMaker]


def fault(maker: ChainMaker) -> str | None:
    """What is wrong with the newest record, or how it follows the one before."""
    record = maker.records[-1]
    wrong = record_fault(record, maker.genesis.chain_id)
    if wrong or len(maker.records) == 1:
        return wrong or first_fault(record, maker.genesis)
    return link_fault(maker.records[-2], record)


@pytest.mark.parametrize(
    ("members", "absent", "good"),
    [
        (6, 2, False),  # exactly two thirds
        (6, 1, True),
        (4, 1, True),
        (4, 2, False),
        (3, 1, False),  # exactly two thirds
        (3, 0, True),
        (7, 2, True),
        (7, 3, False),
        (1, 0, True),
    ],
)
def test_a_commit_needs_more_than_two_thirds(
    make_chain: MakeChain, members: int, absent: int, good: bool
) -> None:
    maker = make_chain(members)
    maker.block(absent=range(absent))
    wrong = fault(maker)
    assert (wrong is None) is good
    if not good:
        assert "signed the block where" in str(wrong)


def test_votes_for_no_block_count_for_nothing(make_chain: MakeChain) -> None:
    maker = make_chain(4)
    maker.block(nil=[0])
    assert fault(maker) is None, "a nil vote beside a quorum is good"
    maker.block(nil=[0, 1])
    assert "power 20 signed the block where 27 is needed" in str(fault(maker))


def test_power_counts_and_not_heads(make_chain: MakeChain) -> None:
    maker = make_chain(4)
    big = maker.validators[0]
    maker.expect(next_validators=updated(maker.validators, [ValidatorUpdate(big.public, 100)]))
    maker.block()
    maker.block(absent=[1, 2, 3])
    assert "power 100 signed" not in str(fault(maker)), "100 of 130 is more than two thirds"
    maker.block(absent=[0])
    assert "power 30 signed the block where 87 is needed" in str(fault(maker))


def falsified(commit: Commit, place: int) -> Commit:
    places = list(commit.signatures)
    data = bytearray(places[place].signature)
    data[5] ^= 1
    places[place] = replace(places[place], signature=bytes(data))
    return replace(commit, signatures=tuple(places))


@pytest.mark.parametrize("nil", [(), (3,)])
def test_a_false_signature_that_is_not_needed_is_refused_too(
    make_chain: MakeChain, nil: tuple[int, ...]
) -> None:
    """The engine's light client stops at two thirds and skips nil votes, and would not look."""
    maker = make_chain(4)
    record = maker.block(nil=nil)
    false = replace(record, commit=falsified(record.commit, 3))
    wrong = record_fault(false, "a-chain")
    assert wrong == f"the signature of {maker.validators[3].address.hex()} is false"


def test_a_nil_vote_passed_off_as_one_for_the_block(make_chain: MakeChain) -> None:
    maker = make_chain(4)
    record = maker.block(nil=[2])
    places = [replace(one, flag=Flag.COMMIT) for one in record.commit.signatures]
    lifted = replace(record, commit=replace(record.commit, signatures=tuple(places)))
    assert "is false" in str(record_fault(lifted, "a-chain"))


def test_a_last_commit_with_a_false_signature_is_refused(make_chain: MakeChain) -> None:
    """A proposer that writes it signs its hash; no honest validator signs that block."""
    maker = make_chain(4)
    maker.block()
    maker.records[0] = replace(maker.records[0], commit=falsified(maker.records[0].commit, 1))
    maker.block()
    assert record_fault(maker.records[1], "a-chain") is None
    assert str(fault(maker)).startswith("in its last commit, the signature of")


def test_a_last_commit_of_another_block_of_that_height(make_chain: MakeChain) -> None:
    maker, other = make_chain(4), make_chain(4)
    maker.block([b"a"])
    other.block([b"b"])
    other.block()
    assert link_fault(maker.records[0], other.records[1]) is not None


def test_heights_follow_and_times_are_medians(make_chain: MakeChain) -> None:
    maker = make_chain(4)
    for _ in range(3):
        maker.block()
        assert fault(maker) is None
    assert "comes after block 1" in str(link_fault(maker.records[0], maker.records[2]))
    late = Timestamp(maker.records[2].header.time.seconds + 9, 0)
    maker.block(time=late)
    assert fault(maker) == "its time is not the median of its last commit's"
    maker.records.pop()
    maker.block(time=maker.records[-1].header.time)
    assert fault(maker) == "its time is not after that of the block before"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"chain_id": "b-chain"}, "is of chain 'b-chain'"),
        ({"block_version": 12}, "block version 12"),
        ({"proposer": bytes(20)}, "its proposer is not a validator"),
        ({"data_hash": bytes(32)}, "transactions do not fit"),
        ({"validators_hash": bytes(32)}, "validators do not fit"),
        ({"evidence_hash": bytes(32)}, "evidence do not fit"),
        ({"last_commit_hash": bytes(32)}, "last commit do not fit"),
        ({"last_block_id": BlockId(bytes(32), 1, bytes(32))}, "its last commit is for another"),
        ({"app_version": 7}, "the application version or the consensus parameters changed"),
        ({"consensus_hash": bytes(32)}, "the application version or the consensus parameters"),
        ({"height": 9}, "comes after block 1"),
    ],
)
def test_a_quorum_that_signs_nonsense_is_not_believed(
    make_chain: MakeChain, fields: dict[str, object], says: str
) -> None:
    maker = make_chain(4)
    maker.block()
    maker.block(**fields)
    assert says in str(fault(maker))


def test_validators_that_nobody_announced(make_chain: MakeChain) -> None:
    """A quorum of strangers signs a perfect block; only the block before tells."""
    maker, strangers = make_chain(4), make_chain(7)
    maker.block()
    strangers.block()
    strangers.records[0] = maker.records[0]
    record = strangers.block(time=median_time(maker.records[0].commit, maker.validators))
    assert record_fault(record, "a-chain") is None
    wrong = link_fault(maker.records[0], record)
    assert wrong == "its validators are not those that the block before it announced"


def test_a_set_that_the_engine_would_not_keep(make_chain: MakeChain) -> None:
    maker = make_chain(4)
    record = maker.block()
    first, second, *rest = record.validators
    for validators, says in (
        ((second, first, *rest), "not in the engine's order"),
        ((first, first, *rest), "share a key"),
        (tuple(replace(v, power=2**60) for v in record.validators), "more power"),
    ):
        assert says in str(record_fault(replace(record, validators=validators), "a-chain"))


def test_the_order_of_validators_is_by_power_and_then_by_address() -> None:
    random = Random(3)
    made = [Validator(random.randbytes(32), random.choice([1, 2, 3])) for _ in range(20)]
    ordered = in_order(made)
    assert [v.power for v in ordered] == sorted((v.power for v in made), reverse=True)
    threes = [v.address for v in ordered if v.power == 3]
    assert threes == sorted(threes)
    assert set(ordered) == set(made)


@pytest.mark.parametrize(
    ("powers", "median"),
    [((10, 10, 10, 10), 1), ((10, 10, 10), 1), ((1, 1, 1), 0), ((50, 10, 10), 0), ((10,), 0)],
)
def test_the_median_is_weighted_and_rounds_as_the_engine_does(
    powers: tuple[int, ...], median: int
) -> None:
    """With power 1 each, integer rounding picks the earliest of three."""
    validators = [Validator(bytes([i]) * 32, power) for i, power in enumerate(powers)]
    places = tuple(
        CommitSig(Flag.COMMIT, v.address, Timestamp(i, 0), b"") for i, v in enumerate(validators)
    )
    commit = Commit(1, 0, BlockId(bytes(32), 1, bytes(32)), places)
    assert median_time(commit, validators) == Timestamp(median, 0)
    nobody = tuple(replace(one, flag=Flag.NIL) for one in places)
    with pytest.raises(MisuseError):
        median_time(replace(commit, signatures=nobody), validators)


def test_updates_are_announced_a_block_later_and_vote_two_later(make_chain: MakeChain) -> None:
    maker = make_chain(4)
    gone = maker.validators[0]
    expected = expected_at_start(maker.genesis)
    records: list[ChainRecord] = []
    for height in range(1, 5):
        maker.expected = expected
        records.append(maker.block([bytes([height])]))
        assert application_fault(records[-1], expected) is None
        assert fault(maker) is None
        updates = (ValidatorUpdate(gone.public, 0),) if height == 1 else ()
        result = FinalizeResult((TxResult(data=b"digest"),), b"hash%d" % height, updates)
        expected = expected_after(expected, result)
    assert [gone in record.validators for record in records] == [True, True, False, False]
    assert records[1].header.next_validators_hash == records[2].header.validators_hash


def test_the_first_block_has_no_past(make_chain: MakeChain) -> None:
    maker = make_chain(4)
    maker.block()
    later = maker.block()
    assert first_fault(later, maker.genesis) == "block 2 is no first block"
    other = Genesis("a-chain", Timestamp(1, 0), maker.genesis.validators, bytes(32), b"")
    assert first_fault(maker.records[0], other) == "its time is not the genesis time"
