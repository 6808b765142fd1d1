"""Validator sets, certificates and evidence, as an outsider checks them offline."""

import pytest
from msgspec.structs import replace

from torchbft.primitives.abci import ValidatorUpdate
from torchbft.primitives.errors import DecodeError, PreconditionError
from torchbft.primitives.evidence import CONVICTS, Evidence
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.certificates import (
    Validator,
    ValidatorSet,
    check_certificate,
    check_double_vote,
    check_timeouts,
    convict,
    double_vote,
    make_certificate,
    make_timeout_certificate,
    verify_finalized,
)
from torchbft.protocols.ledger.messages import (
    NO_DIGEST,
    Kind,
    SignedVote,
    block_digest,
    decode_finalized,
    vote_is_signed,
)
from torchbft.sim.puppets import Puppets


@pytest.fixture
def table() -> Puppets:
    return Puppets(7)


def key(name: str) -> SigningKey:
    return SigningKey.derive(bytes(32), name)


def validator(name: str, power: int = 1) -> Validator:
    return Validator(PeerId(name), key(name).public, power)


# -- sets


def test_a_set_is_sorted_by_name_and_its_digest_says_what_is_in_it() -> None:
    one = ValidatorSet([validator("b"), validator("a", 3), validator("c")])
    two = ValidatorSet([validator("c"), validator("b"), validator("a", 3)])
    assert one.names == two.names == ("a", "b", "c")
    assert one.digest == two.digest
    assert one.digest != ValidatorSet([validator("a"), validator("b"), validator("c")]).digest


def test_counts_are_sums_of_power() -> None:
    members = ValidatorSet([validator("a", 4), validator("b", 2), validator("c", 1)])
    assert (members.faults.n, members.faults.f, members.faults.quorum) == (7, 2, 5)
    assert members.power_of(["a", "c", "stranger"]) == 5


@pytest.mark.parametrize(
    "members",
    [
        [],
        [validator("a"), validator("a")],
        [validator("a"), Validator(PeerId("b"), key("a").public)],
        [validator("a", 0)],
        [validator(f"v{i}") for i in range(129)],
    ],
)
def test_a_set_that_cannot_be_is_refused(members: list[Validator]) -> None:
    with pytest.raises(PreconditionError):
        ValidatorSet(members)


def test_updates_add_change_and_remove() -> None:
    members = ValidatorSet([validator("a"), validator("b"), validator("c")])
    updates = [
        ValidatorUpdate(key("a").public, 0),
        ValidatorUpdate(key("b").public, 5),
        ValidatorUpdate(key("d").public, 2),
        ValidatorUpdate(key("e").public, 1),
    ]
    after = members.updated(updates, {key("d").public: PeerId("d")})
    stranger = PeerId("key-" + key("e").public.hex()[:28])
    assert after.powers == {"b": 5, "c": 1, "d": 2, stranger: 1}
    assert members.updated([], {}) is members


# -- certificates


def test_a_certificate_of_a_quorum_is_valid(table: Puppets) -> None:
    certificate = table.certificate(Kind.PREPARE, b"d" * 32)
    assert certificate.signers == (1, 2, 3, 4, 5)
    assert check_certificate(certificate, Kind.PREPARE, table.validators, table.run_id) is None


def flaws(certificate):
    yield "expected", replace(certificate, kind=Kind.FINALIZE)
    yield "false", replace(certificate, digest=b"e" * 32)
    yield "false", replace(certificate, height=Height(2))
    yield "false", replace(certificate, view=View(1))
    yield "false", replace(certificate, signers=(0, 2, 3, 4, 5))
    yield "differ", replace(certificate, signers=(1, 2, 3, 4, 5, 6))
    yield "differ", replace(certificate, signatures=certificate.signatures[:-1])
    yield "order", replace(certificate, signers=(1, 2, 3, 4, 4))
    yield "order", replace(certificate, signers=(2, 1, 3, 4, 5))
    yield "not a validator", replace(certificate, signers=(1, 2, 3, 4, 7))
    yield "false", replace(certificate, signatures=certificate.signatures[::-1])
    four = certificate.signers[:4]
    yield "quorum", replace(certificate, signers=four, signatures=certificate.signatures[:4])
    yield "quorum", replace(certificate, signers=(), signatures=())


def test_a_certificate_with_a_flaw_is_refused_and_says_why(table: Puppets) -> None:
    certificate = table.certificate(Kind.PREPARE, b"d" * 32)
    for reason, bad in flaws(certificate):
        assert reason in check_certificate(bad, Kind.PREPARE, table.validators, table.run_id)
    other_run = check_certificate(certificate, Kind.PREPARE, table.validators, bytes(32))
    assert "false" in other_run


def test_power_makes_a_quorum_not_heads() -> None:
    table = Puppets(4)
    heavy = [
        Validator(v.name, v.public, 10 if v.name == "p3" else 1)
        for v in table.validators.validators
    ]
    members = ValidatorSet(heavy)
    light = table.certificate(Kind.PREPARE, b"d" * 32, signers=["p0", "p1", "p2"])
    assert "quorum" in check_certificate(light, Kind.PREPARE, members, table.run_id)
    alone = table.certificate(Kind.PREPARE, b"d" * 32, signers=["p3"])
    assert check_certificate(alone, Kind.PREPARE, members, table.run_id) is None


def test_time_outs_with_their_highest_certificate_are_valid(table: Puppets) -> None:
    prepared = table.certificate(Kind.PREPARE, b"d" * 32, view=2)
    votes = {
        name: table.timeout(name, 4, prepared if name == "p3" else None).vote
        for name in table.others[:5]
    }
    certificate = make_timeout_certificate(votes, table.validators, prepared)
    assert certificate.highs == (0, 0, 3, 0, 0)
    assert check_timeouts(certificate, table.validators, table.run_id) is None
    later = table.certificate(Kind.PREPARE, b"d" * 32, view=4)
    higher = replace(certificate, prepared=later)
    assert check_timeouts(higher, table.validators, table.run_id) is None, "a higher lock is safe"
    for bad in (None, table.certificate(Kind.PREPARE, b"d" * 32, view=1)):
        assert check_timeouts(replace(certificate, prepared=bad), table.validators, table.run_id), (
            "the lock that a signer spoke of cannot be left out"
        )
    beyond = table.certificate(Kind.PREPARE, b"d" * 32, view=5)
    assert check_timeouts(replace(certificate, prepared=beyond), table.validators, table.run_id)


# -- finalized blocks


def test_a_finalized_block_verifies_offline(table: Puppets) -> None:
    finalized = table.finalized(table.block(b"1", b"2"))
    assert verify_finalized(finalized, table.validators, table.run_id) is None
    assert decode_finalized(encode(finalized)) == finalized


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("version", 2),
        ("run_id", b"r" * 32),
        ("height", Height(2)),
        ("previous", b"p" * 32),
        ("app_hash", b"a" * 32),
        ("proposer", "p6"),
        ("txs", (b"1",)),
        ("txs", (b"2", b"1")),
    ],
)
def test_any_changed_field_of_a_finalized_block_shows(
    table: Puppets, field: str, value: object
) -> None:
    finalized = table.finalized(table.block(b"1", b"2"))
    bad = replace(finalized, block=replace(finalized.block, **{field: value}))
    assert verify_finalized(bad, table.validators, table.run_id)


def test_any_flipped_bit_of_a_finalized_block_shows(table: Puppets) -> None:
    data = bytearray(encode(table.finalized(table.block(b"1"))))
    for at in range(0, len(data), 7):
        data[at] ^= 1
        try:
            finalized = decode_finalized(bytes(data))
        except DecodeError:
            pass
        else:
            assert verify_finalized(finalized, table.validators, table.run_id)
        data[at] ^= 1


def test_prepare_votes_finalize_nothing(table: Puppets) -> None:
    block = table.block(b"1")
    prepared = table.certificate(Kind.PREPARE, block_digest(block))
    bad = replace(table.finalized(block), certificate=prepared)
    assert "FINALIZE" in verify_finalized(bad, table.validators, table.run_id)


# -- evidence


def evidence(table: Puppets) -> Evidence:
    first = table.vote("p2", Kind.PREPARE, b"1" * 32)
    return double_vote(table.run_id, first, table.vote("p2", Kind.PREPARE, b"2" * 32))


def test_two_votes_for_one_slot_convict_offline(table: Puppets) -> None:
    found = evidence(table)
    assert found.fault in CONVICTS
    assert (found.accused, found.round) == ("p2", 1)
    public = table.keys["p2"].public
    assert check_double_vote(found, public)
    assert check_double_vote(found, public, table.run_id)
    assert not check_double_vote(found, public, bytes(32)), "of another run"
    assert not check_double_vote(found, table.keys["p3"].public)


def test_both_finders_write_the_same_evidence(table: Puppets) -> None:
    a = table.vote("p2", Kind.PREPARE, b"1" * 32)
    b = table.vote("p2", Kind.PREPARE, b"2" * 32)
    assert double_vote(table.run_id, a, b) == double_vote(table.run_id, b, a)


def test_evidence_that_proves_nothing_is_refused(table: Puppets) -> None:
    found = evidence(table)
    public = table.keys["p2"].public
    one, two = found.statements
    same = table.vote("p2", Kind.PREPARE, b"1" * 32)
    unsigned = encode(SignedVote(table.run_id, replace(same, signature=bytes(64))))
    of_p3 = encode(SignedVote(table.run_id, table.vote("p3", Kind.PREPARE, b"2" * 32)))
    other_run = encode(SignedVote(bytes(32), table.vote("p2", Kind.PREPARE, b"2" * 32)))
    for statements in (
        (one, one),
        (one,),
        (one, two, two),
        (one, unsigned),
        (one, of_p3),
        (one, other_run),
        (one, b"\xc1"),
        (),
    ):
        assert not check_double_vote(replace(found, statements=statements), public)
    assert not check_double_vote(replace(found, fault="late"), public)
    assert not check_double_vote(replace(found, accused="p3"), public)
    assert not check_double_vote(replace(found, round=2), public)


def test_two_certificates_of_one_view_convict_more_than_f(table: Puppets) -> None:
    one, two = table.block(b"1"), table.block(b"2")
    left = replace(
        table.finalized(one),
        certificate=table.certificate(Kind.FINALIZE, block_digest(one), signers=table.names[:5]),
    )
    right = replace(
        table.finalized(two),
        certificate=table.certificate(Kind.FINALIZE, block_digest(two), signers=table.names[2:]),
    )
    found = convict(left, right, [], table.validators, table.run_id)
    assert [e.accused for e in found] == ["p2", "p3", "p4"]
    assert table.validators.power_of(e.accused for e in found) >= table.validators.faults.one_honest
    assert all(check_double_vote(e, table.keys[e.accused].public) for e in found)


def test_certificates_of_two_views_convict_with_the_time_outs_between(table: Puppets) -> None:
    """p0..p4 finalize in view 0, then p2..p6 claim in time-outs that nothing was prepared."""
    one, two = table.block(b"1"), table.block(b"2", view=1)
    left = replace(
        table.finalized(one),
        certificate=table.certificate(Kind.FINALIZE, block_digest(one), signers=table.names[:5]),
    )
    right = replace(
        table.finalized(two),
        certificate=table.certificate(
            Kind.FINALIZE, block_digest(two), view=1, signers=table.names[2:]
        ),
    )
    assert convict(left, right, [], table.validators, table.run_id) == []
    votes = {name: table.timeout(name, 0).vote for name in table.names[2:]}
    timeouts = make_timeout_certificate(votes, table.validators, None)
    found = convict(left, right, [timeouts], table.validators, table.run_id)
    assert [e.accused for e in found] == ["p2", "p3", "p4"]
    assert all(check_double_vote(e, table.keys[e.accused].public) for e in found)


def test_equal_blocks_with_different_signers_convict_nobody(table: Puppets) -> None:
    block = table.block(b"1")
    left, right = (
        table.finalized(block),
        replace(
            table.finalized(block),
            certificate=(
                table.certificate(Kind.FINALIZE, block_digest(block), signers=table.names[2:])
            ),
        ),
    )
    assert left != right
    assert convict(left, right, [], table.validators, table.run_id) == []


# -- votes


def test_every_field_of_a_vote_is_signed(table: Puppets) -> None:
    vote = table.vote("p2", Kind.PREPARE, b"1" * 32)
    public = table.keys["p2"].public
    assert vote_is_signed(public, table.run_id, vote)
    assert not vote_is_signed(public, bytes(32), vote)
    for change in (
        {"kind": Kind.FINALIZE},
        {"height": Height(2)},
        {"view": View(1)},
        {"high": View(1)},
        {"digest": NO_DIGEST},
        {"author": "p3"},
        {"signature": bytes(64)},
    ):
        assert not vote_is_signed(public, table.run_id, replace(vote, **change)), change


def test_the_digest_of_a_block_does_not_depend_on_the_view(table: Puppets) -> None:
    block = table.block(b"1")
    at_0 = table.proposal(block)
    at_7 = table.proposal(block, view=7, justification=table.timeouts(6))
    assert at_0.vote.digest == at_7.vote.digest == block_digest(block)
    assert make_certificate(
        {n: table.vote(n, Kind.PREPARE, at_0.vote.digest) for n in table.names}, table.validators
    ).digest == block_digest(block)
