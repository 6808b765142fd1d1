"""What a review found that one liar could do to a round, each excluded by a test."""

from types import SimpleNamespace
from typing import Any

from torchbft.protocols.round.accusations import lying_closings
from torchbft.protocols.round.state import Member
from torchbft.protocols.round.waiting import waited_for

KEY = bytes(32)


def member(name: str, **fields: Any) -> Member:
    return Member(name, KEY, KEY, 1, True, True, **fields)


def test_after_a_void_round_a_parked_member_is_waited_for_but_no_convict() -> None:
    members = (member("a"), member("b", parked=True), member("c", convicted=True))
    assert waited_for(members) == ("a",)
    assert waited_for(members, after_void=True) == ("a", "b")


def test_attestations_are_no_closings_that_could_lie() -> None:
    nobody: Any = SimpleNamespace()  # not even looked at
    assert lying_closings(nobody, "attest") == 0
