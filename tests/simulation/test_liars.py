"""What each liar's seat does with an honest peer's effects, and that all of them are harmless."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Send, Tick
from torchbft.primitives.errors import HaltError
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.wire import WIRE_VERSION, encode
from torchbft.protocols.ledger.messages import Kind, Vote, decode_message, sign_vote
from torchbft.protocols.peer import LEDGER, ROUND, TRANSACTION
from torchbft.protocols.round.interface import OfferPayload
from torchbft.protocols.round.messages import Attestation, RootVote, Status, parse, sign
from torchbft.sim.byzantine import DoubleVoter, Seat, Silent
from torchbft.sim.chaos import HEALTHY
from torchbft.sim.liars import LIARS, Deaf, LedgerLiar, Liar, Perjurer, RootLiar, Twins
from torchbft.sim.peers import Peers, Trainer, key_of, run_of

NAMES = tuple(PeerId(name) for name in "abcd")
A, B, C, D = NAMES
RUN_ID = b"r" * 32
HEAD = (WIRE_VERSION, RUN_ID, 0, 0, D)
STORED = Persist("votes", b"kept")


class Script:
    """A peer's machine that answers every input with the same effects."""

    application: Any = SimpleNamespace()

    def __init__(self, *effects: Effect) -> None:
        self.effects, self.heard = list(effects), []

    def start(self, now: float) -> list[Effect]:
        return self.effects

    def handle(self, event: Any, now: float) -> list[Effect]:
        self.heard.append(event)
        return self.effects

    def deadline(self) -> float | None:
        return 7.0


def vote() -> Vote:
    return sign_vote(key_of(D), RUN_ID, D, Kind.PREPARE, 1, 0, b"d" * 32)  # type: ignore[arg-type]


def agent(kind: type[Any], *effects: Effect, liars: tuple[PeerId, ...] = (D,)) -> Any:
    options = {"name": D, "keys": key_of(D), "seed": b"s", "peers": NAMES, "liars": liars}
    return kind(Script(*effects), **options)


def test_a_liar_does_nothing_where_an_honest_peer_would_halt() -> None:
    class Ashamed(Script):
        def handle(self, event: Any, now: float) -> list[Effect]:
            raise HaltError("somebody else has this key")

    liar = Liar(Ashamed(STORED))  # type: ignore[arg-type]
    assert liar.start(0.0) == [STORED]
    assert liar.handle(Tick(), 0.0) == []
    assert liar.deadline() == 7.0
    assert liar.application is Script.application


def ledger_liar(kind: type[Any], *effects: Effect) -> LedgerLiar:
    seat = Seat(RUN_ID, D, NAMES, key_of(D), Random(1), lambda censored: SimpleNamespace())  # type: ignore[arg-type, return-value]
    return LedgerLiar(Script(*effects), seat, kind)  # type: ignore[arg-type]


def test_a_ledger_liar_changes_the_ledgers_messages_and_nothing_else() -> None:
    statement = Broadcast(TRANSACTION + b"x")
    garbage = Broadcast(LEDGER + b"\xc1")
    said = Broadcast(LEDGER + encode(vote()))
    silent = ledger_liar(Silent, statement, STORED, said, garbage, Send(A, said.message))
    assert silent.handle(Tick(), 0.0) == [statement, STORED, garbage]
    first, second = ledger_liar(DoubleVoter, said).start(0.0)
    assert first == said
    assert isinstance(second, Broadcast)
    assert second.message[:1] == LEDGER
    other = decode_message(second.message[1:])
    assert isinstance(other, Vote)
    assert other.slot == vote().slot
    assert other.digest != vote().digest


def test_twins_speak_to_one_half_each() -> None:
    one, two = Script(Broadcast(b"1"), Send(A, b"to a"), STORED), Script(Broadcast(b"2"))
    twins = Twins((Liar(one), Liar(two)), [A, B, C])  # type: ignore[arg-type]
    expected = [Send(A, b"1"), Send(A, b"to a"), STORED, Send(B, b"2"), Send(C, b"2")]
    assert twins.start(0.0) == expected
    assert twins.handle(Tick(), 0.0) == expected
    assert one.heard == two.heard == [Tick()]
    assert twins.deadline() == 7.0
    assert twins.application is Script.application


def test_a_deaf_peer_knows_its_friends_only() -> None:
    script = Script(Broadcast(b"all"), Send(A, b"a"), Send(B, b"b"), STORED)
    deaf = Deaf(script, [C, A])  # type: ignore[arg-type]
    assert deaf.handle(Received(B, b"x"), 0.0) == []
    assert deaf.handle(Received(C, b"y"), 0.0) == [
        Send(A, b"all"), Send(C, b"all"), Send(A, b"a"), STORED
    ]  # fmt: skip
    assert script.heard == [Received(C, b"y")]


def test_a_perjurer_attests_for_its_own_against_all_others() -> None:
    honest = Attestation(*HEAD, bytes([Status.HELD, Status.HELD, Status.MISSING, Status.NONE]))
    tx = sign(honest, key_of(D))
    offer = OfferPayload(Round(0), b"p" * 32, 9)
    perjurer = agent(Perjurer, Broadcast(TRANSACTION + tx), offer, STORED, liars=(C, D))
    changed, kept = perjurer.start(0.0)
    assert kept == STORED
    parsed = parse(changed.message[1:])
    assert parsed.signed_by(key_of(D).public)
    malformed, held = Status.MALFORMED, Status.HELD
    assert parsed.statement == replace(honest, statuses=bytes([malformed, malformed, held, held]))
    assert not perjurer.hands_in(tx)
    assert perjurer.hands_in(sign(replace(honest, author=A), key_of(A)))


def test_a_root_liar_signs_two_roots_that_it_did_not_compute() -> None:
    honest = RootVote(*HEAD, b"r" * 32)
    other = Broadcast(ROUND + sign(replace(honest, author=A), key_of(A)))
    liar = agent(RootLiar, Broadcast(ROUND + sign(honest, key_of(D))), other, STORED)
    *sent, last, kept = liar.start(0.0)
    assert (last, kept) == (other, STORED)
    assert [effect.to for effect in sent] == [A, B, C]
    votes = [parse(effect.message[1:]) for effect in sent]
    assert all(one.signed_by(key_of(D).public) for one in votes)
    roots = [one.statement.root for one in votes]
    assert roots[0] != roots[1] == roots[2]
    assert honest.root not in roots


@pytest.mark.parametrize("name", [name for name in LIARS if name.startswith(("ledger/", "d", "t"))])
def test_one_liar_of_four_stops_nothing(name: str) -> None:
    """The attack room's agents have tests of their own."""
    liars = {D: LIARS[name](b"seed", (D,))}
    swarm = Peers(
        run_of(NAMES, rounds=2), liars=liars, conditions=HEALTHY, trainer=Trainer(seconds=0.1)
    )
    swarm.start()
    assert swarm.cluster.run(600.0, lambda: swarm.finished == {A, B, C})
    assert swarm.violations() == []
    assert set(swarm.accusations.named) <= {D}
