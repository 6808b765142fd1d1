"""What holds for every agent, whatever its machine wants to send and whatever it hears."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft import attacks
from torchbft.attacks.agents.agent import Agent
from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Send, Tick
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import WIRE_VERSION
from torchbft.protocols.peer import TRANSACTION
from torchbft.protocols.round.interface import OfferPayload, StateAdvanced, Trained
from torchbft.protocols.round.messages import Attestation, Commitment, parse, sign

AGENTS = [name for name, attack in attacks.known().items() if attack.kind == "agent"]
PEERS = tuple(PeerId(name) for name in ("anna", "bert", "cleo", "liar"))
KEYS = {name: SigningKey.derive(bytes(32), name) for name in PEERS}


class Scripted:
    """Answers its k-th input with the k-th list of effects."""

    def __init__(self, script: list[list[Effect]]) -> None:
        self.script = list(script)
        self.told: list[Any] = []

    def start(self, now: float) -> list[Effect]:
        return []

    def handle(self, event: Any, now: float) -> list[Effect]:
        self.told.append(event)
        return self.script.pop(0) if self.script else []

    def deadline(self) -> float | None:
        return None


def statement(author: str, round: int, attests: bool) -> bytes:
    head = (WIRE_VERSION, b"\7" * 32, 0, round, author)
    said = Attestation(*head, b"\1\1\2\0") if attests else Commitment(*head, b"\3" * 32, b"")
    return TRANSACTION + sign(said, KEYS[PeerId(author)])


messages = st.one_of(
    st.binary(max_size=80),
    st.binary(max_size=80).map(lambda data: b"\0" + data),
    st.builds(statement, st.sampled_from(PEERS), st.integers(0, 5), st.booleans()),
)
rounds = st.integers(0, 5).map(Round)
effects = st.one_of(
    st.builds(Broadcast, messages),
    st.builds(Send, st.sampled_from(PEERS[:3]), messages),
    st.builds(Persist, st.just("statements"), st.binary(max_size=8)),
    st.builds(OfferPayload, rounds, st.just(b"r" * 32), st.integers(0, 9)),
)
events = st.one_of(
    st.just(Tick()),
    st.builds(Received, st.sampled_from(PEERS[:3]), messages),
    st.builds(Trained, rounds, st.integers(0, 9), st.just(b"r" * 32), st.just(b"t" * 32)),
    st.builds(StateAdvanced, rounds, st.just(b"s" * 32)),
)
scripts = st.lists(st.tuples(events, st.lists(effects, max_size=4)), max_size=8)


def play(name: str, script: list[tuple[Any, list[Effect]]]) -> tuple[list[Effect], Scripted]:
    kind = attacks.get(name)
    assert issubclass(kind, Agent)
    machine = Scripted([wanted for _, wanted in script])
    liar = kind(machine, name=PEERS[3], keys=KEYS[PEERS[3]], seed=b"s", peers=PEERS, liars=[])
    left = liar.start(0.0)
    for step, (event, _) in enumerate(script):
        left += liar.handle(event, float(step))
    for _ in range(64):  # let what is held back leave
        at = liar.deadline()
        if at is None or at > 500.0:
            break
        left += liar.handle(Tick(), at)
    return left, machine


@pytest.mark.parametrize("name", AGENTS)
@settings(max_examples=25, deadline=None)
@given(script=scripts)
def test_agents_are_total_deterministic_and_sign_for_nobody_else(
    name: str, script: list[tuple[Any, list[Effect]]]
) -> None:
    left, machine = play(name, script)
    assert left == play(name, script)[0]
    wanted = [effect for _, effects in script for effect in effects]
    if not machine.script:  # every input reached the machine
        assert [e for e in left if isinstance(e, Persist)] == [
            e for e in wanted if isinstance(e, Persist)
        ]
    known = {e.message for e in wanted if isinstance(e, Broadcast | Send)}
    known |= {event.message for event, _ in script if isinstance(event, Received)}
    for effect in left:
        if isinstance(effect, Broadcast | Send) and effect.message not in known:
            assert_not_forged(effect.message)


def assert_not_forged(message: bytes) -> None:
    """A message that the agent made up carries no other peer's valid signature."""
    try:
        parsed = parse(message[1:])
    except DecodeError:
        return
    author = PeerId(parsed.statement.author)
    assert author == PEERS[3] or not parsed.signed_by(KEYS[author].public)
