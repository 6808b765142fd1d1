"""No bytes from a log of CometBFT's blocks stop the reader: a value, a reason or DecodeError."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Evidence
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import encode
from torchbft.protocols.chain.checks import Genesis, link_fault, record_fault
from torchbft.protocols.chain.evidence import (
    SignedVote,
    check_double_vote,
    convict,
    double_vote,
    evidence_fault,
)
from torchbft.protocols.chain.messages import (
    MAX_RECORD_BYTES,
    ChainRecord,
    Timestamp,
    Validator,
    address_of,
    decode_record,
)
from torchbft.sim.chain import ChainMaker

KEYS = [SigningKey.derive(bytes(32), f"fuzz/{i}") for i in range(4)]
GENESIS = Genesis(
    "fuzz", Timestamp(0, 0), tuple(Validator(key.public, 10) for key in KEYS), bytes(32), b""
)


def made() -> tuple[ChainRecord, ...]:
    maker = ChainMaker(GENESIS, KEYS)
    maker.block([b"one"])
    maker.block([b"two"], nil=[1], evidence=[maker.double_vote(maker.validators[0], 1)])
    maker.block([b"three"], absent=[2])
    return tuple(maker.records)


RECORDS = made()
BYTES = [encode(record) for record in RECORDS]
FOUND = RECORDS[1].evidence[0]
EVIDENCE = double_vote("fuzz", PeerId("liar"), FOUND.first, FOUND.second)
LIAR = next(key for key in KEYS if address_of(key.public) == FOUND.first.address)


@st.composite
def damaged(draw: st.DrawFn, bases: list[bytes]) -> bytes:
    """Good bytes with a few cut out, put in or written over."""
    data = bytearray(draw(st.sampled_from(bases)))
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        data[at : at + draw(st.integers(0, 4))] = draw(st.binary(max_size=4))
    return bytes(data)


@given(st.one_of(st.binary(max_size=400), damaged(BYTES)))
@settings(max_examples=150, deadline=None)
def test_a_record_is_read_or_refused_and_never_raises_otherwise(data: bytes) -> None:
    try:
        record = decode_record(data)
    except DecodeError:
        return
    assert encode(record) == data, "one encoding for one value"
    wrong = record_fault(record, "fuzz")
    if wrong is None:
        following = [link_fault(before, record) for before in RECORDS]
        assert data in BYTES or all(following), "only the true ones follow"


@given(damaged(BYTES))
@settings(max_examples=100, deadline=None)
def test_a_fork_of_nonsense_convicts_nobody_who_did_not_sign(data: bytes) -> None:
    try:
        record = decode_record(data)
    except DecodeError:
        return
    names = {address_of(key.public): PeerId(f"p{i}") for i, key in enumerate(KEYS)}
    for evidence in convict(RECORDS[0], record, names):
        public = KEYS[int(evidence.accused[1:])].public
        assert not check_double_vote(evidence, public, "fuzz")
    for one in record.evidence:
        assert one == FOUND or evidence_fault(one, RECORDS[0]) is not None


@given(damaged(list(EVIDENCE.statements)), st.booleans())
@settings(max_examples=100, deadline=None)
def test_damaged_evidence_convicts_nobody(data: bytes, first: bool) -> None:
    one, two = EVIDENCE.statements
    statements = (data, two) if first else (one, data)
    evidence = msgspec.structs.replace(EVIDENCE, statements=statements)
    same = evidence == EVIDENCE
    assert check_double_vote(evidence, LIAR.public, "fuzz") is same


@given(
    st.lists(st.binary(max_size=80), max_size=4),
    st.integers(0, 3),
    st.sampled_from(["double-vote", "equivocation", ""]),
)
@settings(max_examples=60, deadline=None)
def test_invented_evidence_convicts_nobody(
    statements: list[bytes], round_: int, fault: str
) -> None:
    evidence = Evidence(fault, "liar", round_, tuple(statements))
    assert not check_double_vote(evidence, LIAR.public, "fuzz")


def test_too_much_is_refused_before_it_is_read() -> None:
    with pytest.raises(DecodeError, match="at most"):
        decode_record(bytes(MAX_RECORD_BYTES + 1))
    assert len(encode(SignedVote("fuzz", FOUND.first))) < 300


def test_the_controls_are_good() -> None:
    assert [record_fault(decode_record(data), "fuzz") for data in BYTES] == [None] * 3
    assert check_double_vote(EVIDENCE, LIAR.public, "fuzz")
    assert evidence_fault(FOUND, RECORDS[0]) is None
