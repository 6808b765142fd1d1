"""The safety rules one by one, and the claim at the head of ``safety.py`` by exhaustion."""

from itertools import permutations

import pytest

from torchbft.primitives.ids import Height, View
from torchbft.protocols.ledger.messages import (
    NO_DIGEST,
    Certificate,
    Kind,
    TimeoutCertificate,
    Vote,
)
from torchbft.protocols.ledger.safety import (
    Signed,
    contradict,
    may_finalize,
    may_prepare,
    may_propose,
    may_time_out,
    required_digest,
    unjustified,
)

A, B = b"A" * 32, b"B" * 32


def vote(
    kind: Kind, view: int, digest: bytes = A, high: int = 0, author: str = "p0", height: int = 1
) -> Vote:
    return Vote(kind, Height(height), View(view), View(high), digest, author, bytes(64))


def certificate(view: int, digest: bytes = A, kind: Kind = Kind.PREPARE) -> Certificate:
    return Certificate(kind, Height(1), View(view), digest, (), ())


def timeouts(view: int, prepared: Certificate | None = None) -> TimeoutCertificate:
    return TimeoutCertificate(Height(1), View(view), (), (), (), prepared)


def signed(*votes: Vote, high: Certificate | None = None) -> Signed:
    state = Signed(high=high)
    for each in votes:
        state.record(each)
    return state


def test_rule_1_each_kind_is_signed_once_per_view() -> None:
    state = signed(
        vote(Kind.PROPOSE, 0), vote(Kind.PREPARE, 0), vote(Kind.FINALIZE, 0), high=certificate(0)
    )
    assert not may_propose(state, View(0))
    assert not may_prepare(state, View(0), A, None)
    assert not may_finalize(state, certificate(0))
    assert may_time_out(state, View(0))
    assert may_propose(state, View(1))
    assert may_prepare(state, View(1), A, timeouts(0))


def test_after_a_time_out_nothing_is_signed_in_that_view_or_before() -> None:
    state = signed(vote(Kind.TIME_OUT, 3, NO_DIGEST))
    for view in range(4):
        assert not may_propose(state, View(view))
        assert not may_prepare(state, View(view), A, timeouts(view - 1) if view else None)
        assert not may_finalize(state, certificate(view))
        assert not may_time_out(state, View(view))
    assert may_propose(state, View(4))
    assert may_time_out(state, View(4))


@pytest.mark.parametrize(
    ("view", "digest", "justification", "reason"),
    [
        (0, A, None, None),
        (0, A, timeouts(0), "needs no time-outs"),
        (1, A, None, "lacks"),
        (1, A, timeouts(0), None),
        (2, A, timeouts(0), "lacks"),
        (2, A, timeouts(2), "lacks"),
        (2, A, timeouts(1, certificate(0, A)), None),
        (2, B, timeouts(1, certificate(0, A)), "differs"),
    ],
)
def test_rule_2_what_justifies_a_proposal(view, digest, justification, reason) -> None:
    found = unjustified(View(view), digest, justification)
    assert found is None if reason is None else reason in found
    assert may_prepare(Signed(), View(view), digest, justification) == (reason is None)


def test_what_must_be_proposed_again() -> None:
    assert required_digest(None) is None
    assert required_digest(timeouts(3)) is None
    assert required_digest(timeouts(3, certificate(1, B))) == B


def test_rule_3_a_finalize_vote_needs_a_prepare_certificate() -> None:
    assert may_finalize(Signed(), certificate(0))
    assert not may_finalize(Signed(), certificate(0, kind=Kind.FINALIZE))


def test_rule_4_a_time_out_speaks_of_the_highest_certificate() -> None:
    state = Signed()
    assert state.high_mark == 0
    for view in (1, 4, 2):
        state.learn(certificate(view))
    assert state.high.view == 4
    assert state.high_mark == 5
    assert not may_time_out(state, View(3)), "a view before the certificate's was left long ago"
    assert may_time_out(state, View(4))


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (vote(Kind.PREPARE, 0, A), vote(Kind.PREPARE, 0, B), True),
        (vote(Kind.PREPARE, 0, A), vote(Kind.PREPARE, 0, A), False),
        (vote(Kind.PREPARE, 0, A), vote(Kind.PREPARE, 1, B), False),
        (vote(Kind.PREPARE, 0, A), vote(Kind.FINALIZE, 0, B), False),
        (vote(Kind.PREPARE, 0, A), vote(Kind.PREPARE, 0, B, author="p1"), False),
        (vote(Kind.PREPARE, 0, A), vote(Kind.PREPARE, 0, B, height=2), False),
        (vote(Kind.PROPOSE, 2, A), vote(Kind.PROPOSE, 2, B), True),
        (vote(Kind.TIME_OUT, 2, NO_DIGEST, 1), vote(Kind.TIME_OUT, 2, NO_DIGEST, 2), True),
        (vote(Kind.TIME_OUT, 2, NO_DIGEST, 1), vote(Kind.TIME_OUT, 3, NO_DIGEST, 2), False),
        (vote(Kind.FINALIZE, 1, A), vote(Kind.TIME_OUT, 1, NO_DIGEST, 2), False),
        (vote(Kind.FINALIZE, 1, A), vote(Kind.TIME_OUT, 1, NO_DIGEST, 1), True),
        (vote(Kind.FINALIZE, 1, A), vote(Kind.TIME_OUT, 7, NO_DIGEST, 1), True),
        (vote(Kind.FINALIZE, 1, A), vote(Kind.TIME_OUT, 7, NO_DIGEST, 5), False),
        (vote(Kind.FINALIZE, 1, A), vote(Kind.TIME_OUT, 0, NO_DIGEST, 0), False),
    ],
)
def test_what_contradicts(first: Vote, second: Vote, expected: bool) -> None:
    assert contradict(first, second) is expected
    assert contradict(second, first) is expected


def test_no_order_of_events_makes_an_honest_validator_contradict_itself() -> None:
    """Every order of two views' proposals, certificates and time-outs, with a restart anywhere:
    whatever the rules allow is signed, and no two of the signed votes contradict each other."""
    events = [
        ("proposal", 0, A),
        ("proposal", 0, B),
        ("certificate", 0, A),
        ("time-out", 0, NO_DIGEST),
        ("proposal", 1, A),
        ("certificate", 1, A),
        ("time-out", 1, NO_DIGEST),
    ]
    for order in permutations(events):
        state, votes = Signed(), []
        for what, view, digest in order:
            made = react(state, what, View(view), digest)
            if made is not None:
                state.record(made)
                votes.append(made)
        assert not any(contradict(a, b) for a in votes for b in votes)


def react(state: Signed, what: str, view: View, digest: bytes) -> Vote | None:
    if what == "proposal":
        justification = timeouts(0, state.high) if view else None
        allowed = may_prepare(state, view, digest, justification)
        return vote(Kind.PREPARE, view, digest) if allowed else None
    if what == "certificate":
        state.learn(certificate(view, digest))
        allowed = may_finalize(state, certificate(view, digest))
        return vote(Kind.FINALIZE, view, digest) if allowed else None
    allowed = may_time_out(state, view)
    return vote(Kind.TIME_OUT, view, NO_DIGEST, state.high_mark) if allowed else None
