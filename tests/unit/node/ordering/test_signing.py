"""What a voting key signs for CometBFT: one thing a height, round and step, whatever dies."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from comet_run import CHAIN, NAMES, VOTING, proposal, vote
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft.node.ordering import signing
from torchbft.node.ordering.delimited import framed
from torchbft.node.ordering.proto import privval_pb2 as pb
from torchbft.node.ordering.signing import PRECOMMIT, PREVOTE, Signer
from torchbft.node.ordering.signstate import SLOT_BYTES, SignState
from torchbft.primitives.errors import DecodeError, MisuseError, StorageError
from torchbft.primitives.keys import SigningKey

KEY = VOTING[NAMES[0]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    SignState.create(tmp_path / "state", KEY.public, CHAIN)
    return tmp_path / "state"


@pytest.fixture
def signer(path: Path) -> Iterator[Signer]:
    made = Signer(CHAIN, KEY, SignState(path, KEY.public, CHAIN))
    yield made
    made.state.close()


def signed(signer: Signer, request: pb.Message) -> pb.Vote | pb.Proposal | str:
    """The signed vote or proposal, or why it was refused."""
    answer = signer.answer(request)
    vote_, proposal_ = answer.signed_vote_response, answer.signed_proposal_response
    if vote_.error.description or proposal_.error.description:
        assert not vote_.vote.signature
        assert not proposal_.proposal.signature
        return str(vote_.error.description or proposal_.error.description)
    return vote_.vote if answer.HasField("signed_vote_response") else proposal_.proposal


def reopened(signer: Signer) -> Signer:
    """The same after a restart."""
    signer.state.close()
    return Signer(CHAIN, KEY, SignState(signer.state.path, KEY.public, CHAIN))


# --- the bytes under a signature ------------------------------------------------------------------

# Written out from CometBFT's canonical.proto: tag, then value, field after field.
_BLOCK = "0a20" + "01" * 32 + "1224" + "0801" + "1220" + "01" * 32
_CHAIN = "28" + CHAIN.encode().hex()
_PREVOTE = "0801" + "110500000000000000" + "190200000000000000" + "2248" + _BLOCK
_PROPOSAL = "0820" + "110500000000000000" + "20ffffffffffffffffff01" + "2a48" + _BLOCK


def behind_length(body: str) -> bytes:
    return bytes.fromhex(f"{len(body) // 2 & 0x7F | 0x80:02x}{len(body) // 2 >> 7:02x}" + body)


def test_the_canonical_bytes_are_those_of_the_specification(signer: Signer) -> None:
    asked = signing.canonical_vote(vote(PREVOTE, 5, 2).sign_vote_request.vote, CHAIN)
    assert framed(asked) == behind_length(_PREVOTE + "2a0408091005" + "32" + _CHAIN)
    other = signing.canonical_proposal(proposal(5).sign_proposal_request.proposal, CHAIN)
    assert framed(other) == behind_length(_PROPOSAL + "32020809" + "3a" + _CHAIN)


def test_a_vote_for_no_block_has_no_block_id_and_a_time_even_if_it_is_zero() -> None:
    request = vote(PRECOMMIT, 5, of=None).sign_vote_request.vote
    request.ClearField("timestamp")
    body = "0802" + "110500000000000000" + "2a00" + "32" + _CHAIN
    asked = signing.canonical_vote(request, CHAIN)
    assert framed(asked) == bytes.fromhex(f"{len(body) // 2:02x}" + body)


def test_the_signature_is_plain_ed25519_over_those_bytes(signer: Signer) -> None:
    answer = signed(signer, vote(PREVOTE, 5))
    assert isinstance(answer, pb.Vote)
    public = Ed25519PublicKey.from_public_bytes(KEY.public)
    public.verify(answer.signature, framed(signing.canonical_vote(answer, CHAIN)))


def test_fields_that_are_unknown_to_us_are_not_signed(signer: Signer) -> None:
    request = vote(PREVOTE, 5).sign_vote_request.vote
    extra = pb.Vote.FromString(request.SerializeToString() + bytes.fromhex("fa7f0161"))
    nested = request.block_id.SerializeToString() + bytes.fromhex("fa7f0161")
    extra.block_id.ParseFromString(nested)
    assert signing.canonical_vote(extra, CHAIN) == signing.canonical_vote(request, CHAIN)
    plain = signing.canonical_vote(request, CHAIN).SerializeToString()
    assert signing.canonical_vote(extra, CHAIN).SerializeToString() == plain


def test_bytes_under_our_own_domain_are_never_signed_for_another_protocol() -> None:
    with pytest.raises(MisuseError, match="under its domain"):
        KEY.sign_foreign(b"torchbft/1/ledger/vote\0body")


# --- the rules ------------------------------------------------------------------------------------


def test_the_key_is_told_to_the_chain_that_it_is_for(signer: Signer) -> None:
    request = pb.Message(pub_key_request=pb.PubKeyRequest(chain_id=CHAIN))
    assert signer.answer(request).pub_key_response.pub_key.ed25519 == KEY.public
    request.pub_key_request.chain_id = "other"
    assert "another chain" in signer.answer(request).pub_key_response.error.description
    ping = signer.answer(pb.Message(ping_request=pb.Ping()))
    assert ping.WhichOneof("sum") == "ping_response"


def test_a_height_is_signed_step_by_step(signer: Signer) -> None:
    for request in (proposal(1), vote(PREVOTE, 1), vote(PRECOMMIT, 1), vote(PREVOTE, 2, of=None)):
        assert not isinstance(signed(signer, request), str)
    assert signer.state.last.slot == (2, 0, 2)


@pytest.mark.parametrize(
    "later",
    [
        vote(PREVOTE, 4, 9),
        vote(PRECOMMIT, 5, 2),
        proposal(5, 3),
        vote(PREVOTE, 5, 3, of=2),
        vote(PREVOTE, 5, 3, of=None),
        vote(PREVOTE, 5, 3, of=2, seconds=10),
    ],
    ids=["height", "round", "step", "other-block", "no-block", "other-block-and-time"],
)
def test_nothing_earlier_and_nothing_else_is_signed(signer: Signer, later: pb.Message) -> None:
    first = signed(signer, vote(PREVOTE, 5, 3))
    assert isinstance(first, pb.Vote)
    assert isinstance(signed(signer, later), str)
    assert signer.state.last.slot == (5, 3, 2)
    again = reopened(signer)
    assert isinstance(signed(again, later), str)
    assert signed(again, vote(PREVOTE, 5, 3)) == first
    again.state.close()


@pytest.mark.parametrize(
    "ask",
    [
        lambda seconds: vote(PREVOTE, 5, 3, seconds=seconds),
        lambda seconds: vote(PRECOMMIT, 5, 3, of=None, seconds=seconds),
        lambda seconds: proposal(5, 3, pol_round=1, seconds=seconds),
    ],
)
def test_the_same_again_gets_the_signature_that_it_has(
    signer: Signer, ask: Callable[[int], pb.Message]
) -> None:
    first = signed(signer, ask(9))
    assert not isinstance(first, str)
    assert signed(signer, ask(9)) == first
    assert signed(signer, ask(99)) == first, "the old time belongs to the old signature"
    again = reopened(signer)
    assert signed(again, ask(1)) == first
    assert again.state.last.sequence == 1
    again.state.close()


def test_a_proposal_for_another_lock_is_another_proposal(signer: Signer) -> None:
    assert not isinstance(signed(signer, proposal(5, 3, pol_round=1)), str)
    assert "another one is signed" in str(signed(signer, proposal(5, 3, pol_round=2)))


def edited(request: pb.Message, **fields: object) -> pb.Message:
    message = pb.Message.FromString(request.SerializeToString())
    which = message.sign_vote_request if message.HasField("sign_vote_request") else None
    target = which.vote if which is not None else message.sign_proposal_request.proposal
    for name, value in fields.items():
        setattr(target, name, value)
    return message


def without_parts(request: pb.Message) -> pb.Message:
    message = pb.Message.FromString(request.SerializeToString())
    message.sign_vote_request.vote.block_id.ClearField("part_set_header")
    return message


@pytest.mark.parametrize(
    ("request_", "why"),
    [
        (edited(vote(PREVOTE, 1), type=32), "no type of vote"),
        (edited(vote(PREVOTE, 1), type=0), "no type of vote"),
        (edited(vote(PREVOTE, 1), height=0), "height 0"),
        (edited(vote(PREVOTE, 1), height=-1), "height -1"),
        (edited(vote(PREVOTE, 1), height=2**62 + 1), "can be signed"),
        (edited(vote(PREVOTE, 1), round=-1), "round -1"),
        (edited(vote(PRECOMMIT, 1), extension=b"x"), "no extension"),
        (without_parts(vote(PREVOTE, 1)), "no block's"),
        (edited(proposal(1), type=1), "no proposal"),
        (edited(proposal(1), pol_round=0), "no earlier round"),
        (edited(proposal(1, 2), pol_round=2), "no earlier round"),
        (edited(proposal(1), pol_round=-2), "no earlier round"),
    ],
)
def test_what_no_engine_of_ours_asks_for_is_refused_and_leaves_no_trace(
    signer: Signer, request_: pb.Message, why: str
) -> None:
    assert why in str(signed(signer, request_))
    assert signer.state.last.sequence == 0


def test_odd_block_ids_and_times_are_refused(signer: Signer) -> None:
    short = vote(PREVOTE, 1)
    short.sign_vote_request.vote.block_id.hash = b"short"
    assert "no block's" in str(signed(signer, short))
    odd = vote(PREVOTE, 1)
    odd.sign_vote_request.vote.timestamp.nanos = 10**9
    assert "no second" in str(signed(signer, odd))
    none = proposal(1)
    none.sign_proposal_request.proposal.ClearField("block_id")
    assert "no proposal" in str(signed(signer, none))


def test_another_chain_is_refused(signer: Signer) -> None:
    request = vote(PREVOTE, 1)
    request.sign_vote_request.chain_id = "f" * 40
    assert "another chain" in str(signed(signer, request))


@pytest.mark.parametrize("request_", [pb.Message(), pb.Message(ping_response=pb.Ping())])
def test_what_is_no_request_is_an_error(signer: Signer, request_: pb.Message) -> None:
    with pytest.raises(DecodeError):
        signer.answer(request_)


# --- the state ------------------------------------------------------------------------------------


def test_a_lost_state_is_never_made_anew(path: Path) -> None:
    path.unlink()
    with pytest.raises(StorageError, match="lost") as caught:
        SignState(path, KEY.public, CHAIN)
    assert "rotate" in caught.value.hint


def test_a_state_is_made_once(path: Path) -> None:
    with pytest.raises(StorageError, match="there already"):
        SignState.create(path, KEY.public, CHAIN)


def test_a_second_process_is_refused(signer: Signer) -> None:
    with pytest.raises(StorageError, match="another process"):
        SignState(signer.state.path, KEY.public, CHAIN)


@pytest.mark.parametrize(("public", "chain"), [(b"x" * 32, CHAIN), (KEY.public, "0" * 40)])
def test_a_state_of_another_key_or_chain_is_refused(path: Path, public: bytes, chain: str) -> None:
    with pytest.raises(StorageError, match="another key or run"):
        SignState(path, public, chain)


def test_damage_of_both_slots_is_an_error_and_of_the_older_one_is_not(signer: Signer) -> None:
    for height in (1, 2, 3):
        signed(signer, vote(PREVOTE, height))
    data = bytearray(signer.state.path.read_bytes())
    data[50] ^= 1  # the slot of the second signature
    signer.state.path.write_bytes(data)
    again = reopened(signer)
    assert again.state.last.height == 3
    again.state.close()
    data[SLOT_BYTES + 50] ^= 1
    signer.state.path.write_bytes(data)
    with pytest.raises(StorageError, match="damaged"):
        SignState(signer.state.path, KEY.public, CHAIN)


def test_a_rotated_key_signs_above_its_height_and_the_old_one_no_more(
    signer: Signer, tmp_path: Path
) -> None:
    signed(signer, vote(PREVOTE, 7))
    new = SigningKey.derive(bytes(32), "new")
    SignState.create(tmp_path / "new", new.public, CHAIN, height=9)
    signer.use(new, SignState(tmp_path / "new", new.public, CHAIN))
    request = pb.Message(pub_key_request=pb.PubKeyRequest(chain_id=CHAIN))
    assert signer.answer(request).pub_key_response.pub_key.ed25519 == new.public
    assert isinstance(signed(signer, vote(PREVOTE, 9)), str)
    assert isinstance(signed(signer, vote(PRECOMMIT, 9)), str)
    assert not isinstance(signed(signer, vote(PREVOTE, 10)), str)


# --- crashes --------------------------------------------------------------------------------------


class Crash(BaseException):
    """The process dies here."""


EFFECTS = ("before the write", "inside the write", "after the write", "after the sync")
"""At the last one the signature is durable and has not left; every earlier one loses it or not."""


class DyingDisk:
    """Dies at one effect of the next signature, and says what of the file survives."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, effect: str, kept: bool) -> None:
        self._effect, self._kept = effect, kept
        self._write, self._sync = os.pwrite, os.fdatasync
        monkeypatch.setattr(os, "pwrite", self.pwrite)
        monkeypatch.setattr(os, "fdatasync", self.fdatasync)

    def pwrite(self, descriptor: int, data: memoryview, offset: int) -> int:
        if self._effect == "before the write":
            raise Crash
        if self._effect == "inside the write":
            self._write(descriptor, bytes(data)[: 40 if self._kept else 200], offset)
            raise Crash
        if self._effect == "after the write" and not self._kept:
            raise Crash  # the page never reached the disk
        return self._write(descriptor, data, offset)

    def fdatasync(self, descriptor: int) -> None:
        self._sync(descriptor)
        raise Crash


@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("effect", EFFECTS)
@pytest.mark.parametrize("before", [0, 1, 2])
def test_whatever_survives_a_crash_no_slot_gets_two_signatures(
    signer: Signer, monkeypatch: pytest.MonkeyPatch, effect: str, kept: bool, before: int
) -> None:
    for height in range(1, before + 1):
        assert not isinstance(signed(signer, vote(PREVOTE, height)), str)
    with monkeypatch.context() as patched:
        DyingDisk(patched, effect, kept)
        with pytest.raises(Crash):
            signer.answer(vote(PREVOTE, 5, of=1))
    again = reopened(signer)
    for height in range(1, before + 1):
        assert isinstance(signed(again, vote(PREVOTE, height, of=2)), str)
    other, same = signed(again, vote(PREVOTE, 5, of=2)), signed(again, vote(PREVOTE, 5, of=1))
    assert isinstance(other, str) != isinstance(same, str), "one of the two, and only one"
    if effect == "after the sync":
        assert isinstance(other, str)
    again.state.close()


def test_a_signature_does_not_leave_before_it_is_durable(
    signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    write, sync = os.pwrite, os.fdatasync

    def pwrite(descriptor: int, data: memoryview, offset: int) -> int:
        steps.append("write")
        return write(descriptor, data, offset)

    def fdatasync(descriptor: int) -> None:
        steps.append("sync")
        sync(descriptor)

    monkeypatch.setattr(os, "pwrite", pwrite)
    monkeypatch.setattr(os, "fdatasync", fdatasync)
    signer.answer(vote(PREVOTE, 5))
    assert steps == ["write", "sync"]


def test_a_disk_that_refuses_stops_the_signer(
    signer: Signer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fdatasync", full)
        assert "disk is full" in str(signed(signer, vote(PREVOTE, 5)))
    assert "disk is full" in str(signed(signer, vote(PREVOTE, 6))), "nothing more until reopened"
    again = reopened(signer)
    assert not isinstance(signed(again, vote(PREVOTE, 6)), str)
    again.state.close()


REQUESTS = st.builds(
    lambda kind, height, round_, of, seconds: (
        proposal(height, round_, of or 1, seconds=seconds)
        if kind == 32
        else vote(kind, height, round_, of, seconds)
    ),
    st.sampled_from([PREVOTE, PRECOMMIT, 32]),
    st.integers(1, 3),
    st.integers(0, 1),
    st.sampled_from([None, 1, 2]),
    st.integers(1, 3),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(st.tuples(REQUESTS, st.booleans()), max_size=25))
def test_any_sequence_with_restarts_signs_one_thing_a_slot(
    steps: list[tuple[pb.Message, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("signer") / "state"
    SignState.create(path, KEY.public, CHAIN)
    signer = Signer(CHAIN, KEY, SignState(path, KEY.public, CHAIN))
    seen: dict[tuple[int, int, int], bytes] = {}
    newest = (0, 0, 0)
    for request, restart in steps:
        answer = signed(signer, request)
        if not isinstance(answer, str):
            slot = (answer.height, answer.round, signing.STEPS[answer.type])
            assert slot >= newest
            newest = slot
            assert seen.setdefault(slot, answer.signature) == answer.signature
        signer = reopened(signer) if restart else signer
    signer.state.close()


def test_the_file_is_frozen(tmp_path: Path) -> None:
    """A version that could not read what an older one wrote would lose every key's state."""
    SignState.create(tmp_path / "state", KEY.public, "c" * 40)
    state = SignState(tmp_path / "state", KEY.public, "c" * 40)
    state.save((5, 1, 2), b"signed", b"s" * 64)
    state.close()
    assert hashlib.sha256((tmp_path / "state").read_bytes()).hexdigest() == (
        "ce43df1143d375d02a2a9e3362c4f3a76b7b55c622fc9059cdb382ee7c44f66b"
    )
