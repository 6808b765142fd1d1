"""Any bytes from the engine's end of the signer's socket: an answer or a dropped connection."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft.node.ordering import signing
from torchbft.node.ordering.delimited import Frames, framed
from torchbft.node.ordering.proto import privval_pb2 as pb
from torchbft.node.ordering.signing import Signer, parse
from torchbft.node.ordering.signstate import SignState
from torchbft.primitives.errors import DecodeError

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "node" / "ordering"))
from comet_run import CHAIN, NAMES, VOTING, proposal, vote

KEY = VOTING[NAMES[0]]
GOOD = [message.SerializeToString() for message in (vote(1, 5), vote(2, 5, of=None), proposal(5))]


@pytest.fixture(scope="module")
def signer(tmp_path_factory: pytest.TempPathFactory) -> Signer:
    path = tmp_path_factory.mktemp("signer") / "state"
    SignState.create(path, KEY.public, CHAIN)
    return Signer(CHAIN, KEY, SignState(path, KEY.public, CHAIN))


def answered(signer: Signer, data: bytes) -> pb.Message | None:
    """The answer, or None where the connection is dropped. Nothing else may happen."""
    before = signer.state.last.slot
    try:
        answer = signer.answer(parse(data))
    except DecodeError:
        assert signer.state.last.slot == before
        return None
    assert signer.state.last.slot >= before
    return answer


@settings(max_examples=150, deadline=None)
@given(data=st.binary(max_size=300))
def test_any_bytes(signer: Signer, data: bytes) -> None:
    answered(signer, data)


@settings(max_examples=250, deadline=None)
@given(
    good=st.sampled_from(GOOD),
    at=st.integers(0, 400),
    change=st.binary(min_size=1, max_size=6),
    cut=st.integers(0, 6),
)
def test_damaged_requests(signer: Signer, good: bytes, at: int, change: bytes, cut: int) -> None:
    """What is signed of them is a vote or a proposal with every field in its bounds."""
    at %= len(good)
    answer = answered(signer, good[:at] + change + good[at + cut :])
    if answer is None:
        return
    for signed in (answer.signed_vote_response.vote, answer.signed_proposal_response.proposal):
        if signed.signature:
            assert 1 <= signed.height <= signing.MAX_HEIGHT
            assert signed.round >= 0
            assert len(signed.block_id.hash) in (0, 32)


def test_too_large_a_message_is_refused_before_it_is_read() -> None:
    with pytest.raises(DecodeError, match="at most"):
        parse(bytes(signing.MAX_REQUEST_BYTES + 1))

    for head in (b"\xff\xff\xff\xff\x0f", b"\x81\x80\x01", b"\xff" * 9):
        with pytest.raises(DecodeError, match="more than"):
            list(Frames(signing.MAX_REQUEST_BYTES).feed(head))


@given(cuts=st.lists(st.integers(1, 60), min_size=1, max_size=9))
def test_requests_may_come_in_any_pieces(cuts: list[int]) -> None:
    stream = b"".join(framed(pb.Message.FromString(good)) for good in GOOD)
    frames, found = Frames(signing.MAX_REQUEST_BYTES), []
    while stream:
        for cut in cuts:
            found += frames.feed(stream[:cut])
            stream = stream[cut:]
    assert found == GOOD
