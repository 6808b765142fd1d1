"""Copies of the agreed state between peers: lost questions, liars, holders that die (C08, C27)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torchbft.node.statecopy import StateCopies, StateOffered, StateWanted
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.wire import decode, encode
from torchbft.tensors.state import AgreedState

A, B, C, STRANGER = (PeerId(f"peer-{letter}") for letter in "abcz")


@pytest.fixture
def holder(peer: Any, initial: AgreedState) -> Any:
    """A peer that has applied one round, and its copies."""
    made = peer("holder")
    made.keeper.begin(initial)
    made.apply(0)
    return made, StateCopies(made.keeper, made.store)


@pytest.fixture
def behind(peer: Any, initial: AgreedState) -> Any:
    """A peer that is still at the start, and its copies."""
    made = peer("behind")
    made.keeper.begin(initial)
    return made, StateCopies(made.keeper, made.store)


def carry(data: bytes, into: Any) -> bytes:
    """What the data plane does: the payload lies in the other store, whole and checked."""
    return bytes(into.store.put(data, Round(0)))


def offer_of(copies: StateCopies, sender: PeerId, answer: bytes) -> StateOffered:
    offered = copies.received(sender, answer)
    assert isinstance(offered, StateOffered)
    return offered


def test_who_is_behind_asks_gets_an_offer_and_adopts_the_signed_state(
    holder: Any, behind: Any
) -> None:
    (rich, answers), (poor, asks) = holder, behind
    signed = rich.keeper.current().root()
    messages = asks.want(0, signed, [A, B])
    assert [to for to, _ in messages] == [A, B]
    answer = answers.received(C, messages[0][1])
    assert isinstance(answer, bytes)
    offered = offer_of(asks, A, answer)
    assert (offered.round, offered.root) == (0, signed)
    assert offered.length == rich.store.length(offered.payload_root)
    assert asks.expects(offered.payload_root)
    assert carry(rich.store.get(offered.payload_root), poor) == offered.payload_root
    assert asks.adopt(offered.payload_root) is None
    assert poor.keeper.current().root() == signed
    assert not asks.expects(offered.payload_root)
    assert asks.ask() == []


def test_it_asks_again_until_it_has_a_copy_for_messages_may_be_lost(
    holder: Any, behind: Any
) -> None:
    (rich, _), (_, asks) = holder, behind
    assert asks.ask() == []
    first = asks.want(0, rich.keeper.current().root(), [A, B])
    assert asks.ask() == first == asks.ask()


def test_an_offer_that_comes_twice_after_a_second_question_is_one_copy(
    holder: Any, behind: Any
) -> None:
    (rich, answers), (_, asks) = holder, behind
    messages = asks.want(0, rich.keeper.current().root(), [A])
    first, second = (answers.received(C, messages[0][1]) for _ in range(2))
    assert first == second
    offered = offer_of(asks, A, first)
    assert offer_of(asks, A, second) == offered
    assert len(rich.store.roots()) == 2, "the round's payload and one copy of the state"


def test_who_does_not_hold_the_state_says_nothing(holder: Any) -> None:
    _, answers = holder
    assert answers.received(C, encode(StateWanted(0, bytes(32)))) is None


@pytest.mark.parametrize("message", [b"", b"\x00", b"\xc1", b"\x93\x01\x02\x03", b"x" * 5000])
def test_bytes_that_are_no_message_of_ours_are_left_alone(holder: Any, message: bytes) -> None:
    _, answers = holder
    assert answers.received(C, message) is None


def test_offers_from_strangers_of_other_rounds_or_roots_are_ignored(
    holder: Any, behind: Any
) -> None:
    (rich, _), (_, asks) = holder, behind
    signed = rich.keeper.current().root()
    good = StateOffered(0, signed, bytes(32), 100)
    assert asks.received(A, encode(good)) is None, "nothing is wanted yet"
    asks.want(0, signed, [A])
    assert asks.received(STRANGER, encode(good)) is None
    assert asks.received(A, encode(StateOffered(0, bytes(32), bytes(32), 100))) is None
    # The round labels the transfer; a false one would move what this peer takes for its own round.
    assert asks.received(A, encode(StateOffered(2**61, signed, bytes(32), 100))) is None
    assert not asks.expects(bytes(32))
    assert asks.received(A, encode(good)) == good


def test_an_offer_beyond_any_state_of_this_model_is_ignored(holder: Any, behind: Any) -> None:
    (rich, _), (_, asks) = holder, behind
    signed = rich.keeper.current().root()
    asks.want(0, signed, [A])
    assert asks.received(A, encode(StateOffered(0, signed, bytes(32), 2**40))) is None


def test_a_liar_has_one_offer_open_at_a_time(holder: Any, behind: Any) -> None:
    (rich, _), (_, asks) = holder, behind
    signed = rich.keeper.current().root()
    asks.want(0, signed, [A])
    for index in range(100):
        asks.received(A, encode(StateOffered(0, signed, index.to_bytes(32, "big"), 100)))
    assert not asks.expects((98).to_bytes(32, "big"))
    assert asks.expects((99).to_bytes(32, "big"))


def test_c27_the_first_holder_dies_or_lies_and_another_takes_over(
    holder: Any, behind: Any, initial: AgreedState
) -> None:
    (rich, answers), (poor, asks) = holder, behind
    signed = rich.keeper.current().root()
    messages = dict(asks.want(0, signed, [A, B]))
    forged = AgreedState(
        initial.layout,
        torch.full_like(initial.parameters_D, 666.0),
        initial.float_buffers_B,
        initial.int_buffers_I,
        initial.outer_momentum_D,
        initial.rule_state,
        round=1,
    ).encode()
    lie = carry(forged, poor)
    offer_of(asks, A, encode(StateOffered(0, signed, lie, len(forged))))
    refused = asks.adopt(lie)
    assert refused is not None
    assert "signed root" in refused
    assert poor.keeper.current().root() == initial.root()
    rubbish = carry(b"no state at all", poor)
    offer_of(asks, A, encode(StateOffered(0, signed, rubbish, 15)))
    assert asks.adopt(rubbish)
    assert asks.adopt(bytes(32)), "a copy that is not held is no copy"
    # B answers the same question; what A sent stands in nobody's way.
    answer = answers.received(C, messages[B])
    assert isinstance(answer, bytes)
    offered = offer_of(asks, B, answer)
    carry(rich.store.get(offered.payload_root), poor)
    assert asks.adopt(offered.payload_root) is None
    assert poor.keeper.current().root() == signed


def test_a_later_wish_replaces_the_earlier_one(holder: Any, behind: Any) -> None:
    (rich, answers), (poor, asks) = holder, behind
    old = rich.keeper.current().root()
    question = asks.want(0, old, [A])[0][1]
    answer = answers.received(C, question)
    assert isinstance(answer, bytes)
    offered = offer_of(asks, A, answer)
    new = rich.apply(1)
    asks.want(1, new, [B])
    assert not asks.expects(offered.payload_root)
    carry(rich.store.get(offered.payload_root), poor)
    assert asks.adopt(offered.payload_root), "the older state is not the one that is wanted"
    assert [to for to, _ in asks.ask()] == [B]


def test_a_copy_never_puts_a_peer_back_behind_what_it_computed_itself(
    holder: Any, behind: Any
) -> None:
    (rich, answers), (poor, asks) = holder, behind
    signed = rich.keeper.current().root()
    answer = answers.received(C, asks.want(0, signed, [A])[0][1])
    assert isinstance(answer, bytes)
    offered = offer_of(asks, A, answer)
    carry(rich.store.get(offered.payload_root), poor)
    poor.apply(0)
    own = poor.apply(1)
    assert asks.adopt(offered.payload_root)
    assert poor.keeper.current().root() == own
    assert asks.ask() == []


def test_a_peer_without_a_model_takes_no_offer(peer: Any, holder: Any) -> None:
    (rich, _), fresh = holder, peer("fresh")
    asks = StateCopies(fresh.keeper, fresh.store)
    signed = rich.keeper.current().root()
    asks.want(0, signed, [A])
    small = encode(StateOffered(0, signed, bytes(32), 100))
    assert asks.received(A, small) is None


def test_the_start_state_is_asked_for_as_round_0(holder: Any, initial: AgreedState) -> None:
    _, answers = holder
    asked = StateCopies(None, None).want(-1, initial.root(), [A])[0][1]  # type: ignore[arg-type]
    assert decode(asked, StateWanted) == StateWanted(0, initial.root())
    assert isinstance(answers.received(C, asked), bytes)
