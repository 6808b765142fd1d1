"""C25: no bytes, no number and no index from a peer stops a validator or moves it wrongly."""

from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Evidence
from torchbft.primitives.ids import Height
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.certificates import (
    check_double_vote,
    double_vote,
    verify_finalized,
)
from torchbft.protocols.ledger.messages import (
    Blocks,
    Body,
    Kind,
    Prepared,
    SignerState,
    Status,
    Want,
    block_digest,
    decode_finalized,
    decode_message,
    decode_vote_record,
)
from torchbft.protocols.ledger.state import Accuse, Finalized
from torchbft.sim.puppets import Puppets

TABLE = Puppets()
BLOCK = TABLE.block(b"tx", b"another")
DIGEST = block_digest(BLOCK)
PREPARED = TABLE.certificate(Kind.PREPARE, DIGEST)
FINALIZED = TABLE.finalized(BLOCK)
MESSAGES = [
    TABLE.vote("p1", Kind.PREPARE, DIGEST),
    TABLE.vote("p2", Kind.FINALIZE, DIGEST),
    TABLE.proposal(BLOCK),
    TABLE.proposal(BLOCK, view=1, justification=TABLE.timeouts(0, PREPARED)),
    TABLE.timeout("p2"),
    TABLE.timeout("p3", 2, PREPARED),
    TABLE.timeouts(3, PREPARED),
    Status(Height(5)),
    Want(Height(1), DIGEST),
    Body(BLOCK),
    Blocks(Height(2), (encode(FINALIZED),)),
]
DECODERS = [decode_message, decode_vote_record, decode_finalized]
HOSTILE = [
    0,
    1,
    2,
    3,
    4,
    126,
    127,
    128,
    255,
    2**31,
    2**62 - 1,
    2**62,
    2**63,
    2**64 - 1,
    -1,
    -(2**63),
]


@pytest.mark.parametrize("decoder", DECODERS)
@settings(max_examples=300)
@given(data=st.binary(max_size=400))
def test_any_bytes_give_a_value_or_the_one_error(decoder, data: bytes) -> None:
    try:
        value = decoder(data)
    except DecodeError:
        return
    assert encode(value) == data


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_truncated_or_padded_message_is_no_message(message) -> None:
    data = encode(message)
    assert decode_message(data) == message
    for end in range(len(data)):
        with pytest.raises(DecodeError):
            decode_message(data[:end])
    with pytest.raises(DecodeError):
        decode_message(data + b"\x00")


def places(value, path=()):
    """Paths of every integer, byte string and list in a decoded MessagePack value."""
    if isinstance(value, list):
        yield path
        for i, item in enumerate(value):
            yield from places(item, (*path, i))
    elif isinstance(value, int | bytes | str):
        yield path


def changed(value, path, new):
    if not path:
        return new
    copy = list(value)
    copy[path[0]] = changed(copy[path[0]], path[1:], new)
    return copy


def variants(data: bytes):
    """Every integer replaced by every hostile one; every string, list and byte string bent."""
    tree = msgspec.msgpack.decode(data)
    for path in places(tree):
        at = tree
        for index in path:
            at = at[index]
        if isinstance(at, int) and not isinstance(at, bool):
            bent = [n for n in HOSTILE if n != at]
        elif isinstance(at, bytes):
            bent = [b"", at[:-1], at + b"\x00", bytes(len(at)), at[::-1]]
        elif isinstance(at, str):
            bent = ["", "p0", "p2", "P2", "x" * 33, "p2\n", at + "-"]
        else:
            bent = [[], at[:-1], at + at[-1:], at[::-1], at * 50, None]
        for new in bent:
            if new != at:
                yield msgspec.msgpack.encode(changed(tree, path, new))


def is_unmoved(table: Puppets) -> bool:
    """Nothing was finalized that a quorum did not sign, nobody honest accused, nothing grew."""
    for finalized in table.applied(Finalized):
        record = decode_finalized(table.records["blocks"][finalized.height - 1])
        if verify_finalized(record, table.validators, table.run_id) is not None:
            return False
    state = table.machine._state
    held = sum(len(votes) for votes in state.votes.values())
    return not table.applied(Accuse) and held <= 40 and len(state.bodies) <= 64


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_c25_every_integer_and_index_of_every_message(message) -> None:
    table = Puppets()
    table.give("p1", TABLE.proposal(BLOCK))
    for data in variants(encode(message)):
        for sender in ("p1", "p2"):
            table.give_bytes(sender, data)
            assert is_unmoved(table)
    table.wait(1.0)
    assert table.machine.height <= 2


def test_the_variants_reach_behind_the_decoder() -> None:
    """Control: many of them are well-formed, so that the checks behind the decoder are met too."""
    formed = 0
    for message in MESSAGES:
        for data in variants(encode(message)):
            try:
                decode_message(data)
                formed += 1
            except DecodeError:
                pass
    assert formed > 200


def test_random_damage_moves_nobody() -> None:
    random, table = Random(5), Puppets()
    table.give("p1", TABLE.proposal(BLOCK))
    for _ in range(1500):
        data = bytearray(encode(random.choice(MESSAGES)))
        for _ in range(random.randint(1, 3)):
            data[random.randrange(len(data))] ^= 1 << random.randrange(8)
        table.give_bytes(random.choice(table.others), bytes(data))
        assert is_unmoved(table)


def test_every_message_from_every_sender_in_any_order_is_harmless() -> None:
    random = Random(6)
    for _ in range(40):
        table = Puppets()
        for _ in range(40):
            table.give(random.choice([*table.others, "stranger"]), random.choice(MESSAGES))
            assert is_unmoved(table)


def test_records_with_hostile_numbers_are_refused_or_harmless() -> None:
    for record in (
        SignerState(TABLE.run_id, TABLE.keys["p0"].public),
        Prepared(PREPARED),
        MESSAGES[3],
        MESSAGES[5],
    ):
        for data in variants(encode(record)):
            try:
                decode_vote_record(data)
            except DecodeError:
                continue
            assert encode(decode_vote_record(data)) == data


def test_bent_evidence_never_convicts_and_never_raises() -> None:
    votes = [TABLE.vote("p2", Kind.PREPARE, d * 32) for d in (b"1", b"2")]
    good = double_vote(TABLE.run_id, *votes)
    public = TABLE.keys["p2"].public
    assert check_double_vote(good, public)
    for index in (0, 1):
        for data in variants(good.statements[index]):
            statements = [*good.statements]
            statements[index] = data
            bent = Evidence(good.fault, good.accused, good.round, tuple(statements))
            assert not check_double_vote(bent, public)
