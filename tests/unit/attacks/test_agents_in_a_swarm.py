"""Agents among honest peers, whole protocol, virtual time: the run goes on, and says who lied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from torchbft import attacks
from torchbft.primitives.evidence import Fault

AGENTS = [name for name, attack in attacks.known().items() if attack.kind == "agent"]
ROUNDS = 4
EVIDENCE = {
    "equivocator": Fault.EQUIVOCATION,
    "double_voter": Fault.DOUBLE_VOTE,
    "bad_opener": Fault.BAD_OPENING,
    "oversized": Fault.MALFORMED_PAYLOAD,
}
LONGER = {"crasher": {"rounds": 12, "strength": 2.5}}
"""Its moments are random and its default is meant for rounds of seconds."""

Make = Callable[..., Any]


def test_without_liars_nobody_is_accused(swarm: Make) -> None:
    honest = swarm(rounds=ROUNDS)
    assert honest.go()
    assert len(honest.finished) == 7
    assert (honest.named, honest.suspected, honest.sets.void) == ({}, {}, {})
    assert [len(authors) for authors in honest.sets.fixed.values()] == [7] * ROUNDS
    assert honest.violations() == []


@pytest.mark.parametrize("name", AGENTS)
def test_two_liars_of_seven_change_nothing_but_their_own_standing(swarm: Make, name: str) -> None:
    attacked = swarm(name, **({"rounds": ROUNDS} | LONGER.get(name, {})))
    assert attacked.go(), attacked.halted
    assert attacked.finished == set(attacked.honest)
    assert attacked.violations() == []
    assert len({attacked.homes[peer].root for peer in attacked.honest}) == 1
    assert attacked.sets.void == {}
    for accepted in attacked.sets.fixed.values():
        assert set(attacked.honest) <= set(accepted)

    expected = attacks.expectation(name)
    liars = set(attacked.liars)
    assert set(attacked.named) == (liars if expected.named else set())
    assert set(attacked.suspected) <= liars
    if expected.suspected:
        assert set(attacked.suspected) == liars
    if expected.named:
        assert all(EVIDENCE[name] in faults for faults in attacked.named.values())


@pytest.mark.parametrize("name", ["withholder", "double_voter", "bad_opener"])
def test_more_than_f_liars_stop_the_run_or_are_convicted_and_nothing_wrong_is_final(
    swarm: Make, name: str
) -> None:
    """Four peers stand f=1; two lie."""
    liars = ("peer-1", "peer-2")
    beyond = swarm(name, rounds=ROUNDS, peers=4, liars=liars)
    beyond.go(seconds=900.0)
    assert set(beyond.named) <= set(liars)
    assert beyond.sets.violations == []
    assert beyond.roots.violations == []
    stopped = beyond.halted or beyond.sets.void or not beyond.finished
    assert stopped or len(beyond.named) >= 2


def test_the_same_seed_gives_the_same_run(swarm: Make) -> None:
    def trace() -> str:
        run = swarm("forger", rounds=2, peers=4, liars=("peer-2",))
        run.go()
        return str(run.cluster.trace_hash)

    assert trace() == trace()
