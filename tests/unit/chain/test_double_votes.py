"""Double votes under CometBFT: what convicts, what does not, and that nobody can be framed."""

from collections.abc import Callable

import msgspec
import pytest

from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import MAX_ITEM_BYTES, encode
from torchbft.protocols.chain.evidence import (
    SignedVote,
    check_double_vote,
    contradict,
    convict,
    double_vote,
    evidence_fault,
    evidence_in,
    votes_of,
)
from torchbft.protocols.chain.messages import (
    BlockId,
    DuplicateVote,
    Timestamp,
    Validator,
    Vote,
    VoteKind,
)
from torchbft.sim.chain import ChainMaker

replace = msgspec.structs.replace
MakeChain = Callable[..., ChainMaker]
LIAR = PeerId("liar")
TIME = Timestamp(1_700_000_100, 0)
IDS = [BlockId(bytes([k]) * 32, 1, bytes([k]) * 32) for k in range(3)]


@pytest.fixture
def maker(make_chain: MakeChain) -> ChainMaker:
    made = make_chain(4)
    made.block()
    return made


def vote(maker: ChainMaker, id_: BlockId | None = IDS[0], **change: object) -> Vote:
    fields = {"height": 1, "round_": 0, "id_": id_, "time": TIME, "kind": VoteKind.PREVOTE}
    return maker.vote(maker.validators[0], **(fields | change))  # type: ignore[arg-type]


def convicts(maker: ChainMaker, one: Vote, two: Vote, chain_id: str = "a-chain") -> bool:
    evidence = double_vote(chain_id, LIAR, one, two)
    return check_double_vote(evidence, maker.validators[0].public, "a-chain")


def test_two_blocks_in_one_slot_convict(maker: ChainMaker) -> None:
    for kind in VoteKind:
        assert convicts(maker, vote(maker, kind=kind), vote(maker, IDS[1], kind=kind))


def test_no_block_and_a_block_in_one_slot_convict(maker: ChainMaker) -> None:
    assert convicts(maker, vote(maker), vote(maker, None))


@pytest.mark.parametrize(
    "change",
    [
        {"time": Timestamp(1, 1)},
        {"id_": IDS[1], "round_": 1},
        {"id_": IDS[1], "height": 2},
        {"id_": IDS[1], "kind": VoteKind.PRECOMMIT},
    ],
)
def test_votes_that_an_honest_validator_may_sign(
    maker: ChainMaker, change: dict[str, object]
) -> None:
    """The same vote again at another time, and votes of other slots (amnesia among them)."""
    assert not convicts(maker, vote(maker), vote(maker, **change))  # type: ignore[arg-type]


def test_nobody_is_framed(maker: ChainMaker) -> None:
    one, two = vote(maker), vote(maker, IDS[1])
    assert convicts(maker, one, two)
    unsigned = replace(two, signature=one.signature)
    assert not convicts(maker, one, unsigned)
    assert not convicts(maker, one, one)
    assert not convicts(maker, one, two, chain_id="b-chain")
    evidence = double_vote("a-chain", LIAR, one, two)
    other = maker.validators[1].public
    assert not check_double_vote(evidence, other, "a-chain"), "another member's key"
    moved = [replace(said, address=maker.validators[1].address) for said in (one, two)]
    assert not check_double_vote(double_vote("a-chain", LIAR, *moved), other, "a-chain")
    foreign = [replace(said, address=Validator(other, 1).address) for said in (one, two)]
    assert not convicts(maker, *foreign), "signed, but told of another address"


def test_evidence_has_one_form(maker: ChainMaker) -> None:
    one, two = vote(maker), vote(maker, IDS[1])
    padded = replace(two, index=3, extension=b"not signed", extension_signature=bytes(64))
    evidence = double_vote("a-chain", LIAR, one, two)
    assert evidence == double_vote("a-chain", LIAR, padded, one)
    assert (evidence.fault, evidence.accused, evidence.round) == (Fault.DOUBLE_VOTE, LIAR, 1)
    assert len(encode(evidence)) < MAX_ITEM_BYTES // 4, "fits an item beside its signature"
    statements = tuple(encode(SignedVote("a-chain", said)) for said in (one, padded))
    loose = replace(evidence, statements=statements)
    public = maker.validators[0].public
    assert check_double_vote(evidence, public, "a-chain")
    assert not check_double_vote(loose, public, "a-chain"), "with what is not signed filled in"


@pytest.mark.parametrize(
    "change",
    [
        {"fault": Fault.EQUIVOCATION},
        {"round": 2},
        {"statements": ()},
        {"statements": (b"", b"")},
        {"statements": (b"\x92", b"\xff" * 5000)},
    ],
)
def test_malformed_evidence_convicts_nobody(maker: ChainMaker, change: dict[str, object]) -> None:
    evidence = replace(double_vote("a-chain", LIAR, vote(maker), vote(maker, IDS[1])), **change)
    assert not check_double_vote(evidence, maker.validators[0].public, "a-chain")


def test_evidence_is_checked_by_the_engines_rule_of_signatures(
    maker: ChainMaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a liar whose crafted votes the engine takes could not be convicted of them."""
    asked = []
    check = "torchbft.protocols.chain.evidence.verify_zip215"
    monkeypatch.setattr(check, lambda *signed: asked.append(signed) or True)
    assert convicts(maker, vote(maker), replace(vote(maker, IDS[1]), signature=bytes(64)))
    assert len(asked) == 2


def test_evidence_in_a_block_becomes_ours(maker: ChainMaker) -> None:
    liar = maker.validators[2]
    told = maker.double_vote(liar, 1)
    record = maker.block(evidence=[told])
    assert evidence_fault(told, maker.records[0]) is None
    (evidence,) = evidence_in(record, {liar.address: LIAR})
    assert evidence.accused == LIAR
    assert check_double_vote(evidence, liar.public, "a-chain")
    assert evidence_in(record, {}) == [], "a key that is no member's"


def test_evidence_against_a_stranger_or_with_false_figures_is_wrong(maker: ChainMaker) -> None:
    told = maker.double_vote(maker.validators[2], 1)
    stranger = Validator(SigningKey.derive(bytes(32), "stranger").public, 10).address
    first = replace(told.first, address=stranger)
    for other in (
        replace(told, first=first),
        replace(told, first=first, second=replace(told.second, address=stranger)),
        replace(told, power=9),
        replace(told, total_power=39),
        replace(told, time=TIME),
        replace(told, first=replace(told.first, time=TIME)),
    ):
        assert evidence_fault(other, maker.records[0]) is not None


def forked(make_chain: MakeChain, round_: int = 0) -> tuple[ChainMaker, ChainMaker]:
    """Two certified blocks at height 1: places 1 and 2 sign both."""
    one, two = make_chain(4), make_chain(4)
    one.block([b"a"], absent=[3])
    record = two.block([b"b"], absent=[0])
    header, validators = record.header, record.validators
    commit = two.commit(header, validators, absent=[0], round_=round_)
    two.records[0] = replace(record, commit=commit)
    return one, two


def test_a_fork_convicts_those_who_signed_both(make_chain: MakeChain) -> None:
    one, two = forked(make_chain)
    names = {v.address: PeerId(f"peer-{i}") for i, v in enumerate(one.validators)}
    found = convict(one.records[0], two.records[0], names)
    assert [evidence.accused for evidence in found] == ["peer-1", "peer-2"]
    for evidence, validator in zip(found, one.validators[1:3], strict=True):
        assert check_double_vote(evidence, validator.public, "a-chain")


def test_a_fork_over_two_rounds_convicts_nobody(make_chain: MakeChain) -> None:
    one, two = forked(make_chain, round_=1)
    names = {v.address: PeerId(f"peer-{i}") for i, v in enumerate(one.validators)}
    assert convict(one.records[0], two.records[0], names) == []


def test_votes_of_a_commit_are_the_votes_that_were_signed(make_chain: MakeChain) -> None:
    maker = make_chain(4)
    record = maker.block(absent=[1], nil=[2])
    votes = votes_of(record.commit)
    assert [said.index for said in votes] == [0, 2, 3]
    assert [said.block_id is None for said in votes] == [False, True, False]
    assert not contradict(votes[0], votes[1]), "of different validators"
    for said in votes:
        evidence = double_vote("a-chain", LIAR, said, replace(said, block_id=IDS[2]))
        assert isinstance(evidence, Evidence)
        assert not check_double_vote(evidence, record.validators[said.index].public, "a-chain")
    assert isinstance(maker.double_vote(record.validators[0], 1), DuplicateVote)
