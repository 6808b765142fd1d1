"""A peer whose blocks an engine outside orders: what it is told, what it asks for, and when."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

from torchbft import attacks
from torchbft.attacks.agents.liar import LiarPeer, OrderedLiar, builder
from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Tick
from torchbft.primitives.errors import MisuseError, StorageError
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Data, Ledger, RunSpec, Training, new_member
from torchbft.protocols.peer import (
    LEDGER,
    ROUND,
    TRANSACTION,
    BlockDone,
    CommitBlock,
    EngineStarted,
    Order,
    OrderedPeer,
    PeerMachine,
    SaveApplication,
    Suspected,
    peer_of,
)
from torchbft.protocols.round import interface as rounds
from torchbft.protocols.round.state import Phase

START_ROOT = sha256("test/start")
A, B, C, D = NAMES = tuple(PeerId(f"peer-{i}") for i in range(4))
_T = TypeVar("_T")


def key_of(name: str) -> SigningKey:
    return SigningKey.derive(bytes(32), name)


def run_of(kind: Any = "cometbft", seed: str = "07") -> RunSpec:
    identity = b"\1" * 32
    return RunSpec(
        name="room",
        seed=seed * 32,
        members=tuple(
            new_member(name, SigningKey.derive(identity, name), key_of(name)) for name in NAMES
        ),
        data=Data(samples=1000),
        training=Training(rounds=2),
        ledger=Ledger(kind=kind),
    )


RUN = run_of()


def peer(name: PeerId = A, records: dict[str, list[bytes]] | None = None) -> OrderedPeer:
    made = peer_of(RUN, name, key_of(name), sha256("secret", name.encode()), records or {})
    assert isinstance(made, OrderedPeer)
    return made


def of_type(effects: Iterable[Effect], kind: type[_T]) -> list[_T]:
    return [effect for effect in effects if isinstance(effect, kind)]


def ready_of(name: PeerId) -> bytes:
    (order,) = of_type(peer(name).start(0.0), Order)
    return order.tx


READY = [ready_of(name) for name in NAMES]


def finalized(machine: OrderedPeer, txs: list[bytes]) -> CommitBlock:
    """What an engine does before it commits the next block."""
    height = Height(machine.application.info().last_height + 1)
    result = machine.application.finalize_block(height, txs)
    return CommitBlock(len(txs), sum(map(len, txs)), 0.5, result.events)


def test_a_run_file_chooses_the_engine() -> None:
    made = peer_of(run_of("embedded"), A, key_of(A), bytes(32), {})
    assert isinstance(made, PeerMachine)
    assert not isinstance(peer(), PeerMachine)


def test_an_own_statement_is_durable_then_sent_to_all_then_ordered() -> None:
    effects = peer().start(0.0)
    kinds = [type(e) for e in effects if isinstance(e, Persist | Broadcast | Order)]
    assert kinds == [Persist, Broadcast, Order]
    (sent,), (order,) = of_type(effects, Broadcast), of_type(effects, Order)
    assert sent.message == TRANSACTION + order.tx == TRANSACTION + READY[0]


def test_an_authors_transaction_is_handed_to_the_own_engine_each_time_it_comes() -> None:
    machine = peer()
    machine.start(0.0)
    for _ in range(2):  # an engine that was restarted has forgotten it
        heard = machine.handle(Received(B, TRANSACTION + READY[1]), 0.1)
        assert of_type(heard, Order) == [Order(READY[1])]
        assert not of_type(heard, Broadcast)
    assert machine.application.pending() == [READY[0], READY[1]]


@pytest.mark.parametrize("tx", [b"", b"junk", bytes(5000), READY[1][:-1] + b"x"])
def test_what_is_not_admissible_never_reaches_the_engine(tx: bytes) -> None:
    machine = peer()
    machine.start(0.0)
    assert of_type(machine.handle(Received(B, TRANSACTION + tx), 0.1), Order) == []
    assert machine.application.pending() == [READY[0]]


@pytest.mark.parametrize("message", [b"", LEDGER + b"x", b"\x7f", b"\xff\x00"])
def test_a_message_for_nobody_makes_its_sender_suspected(message: bytes) -> None:
    machine = peer()
    (told,) = machine.handle(Received(D, message), 1.0)
    assert isinstance(told, Suspected)
    assert told.peer == D


def test_a_message_for_the_round_is_not_ordered() -> None:
    machine = peer()
    machine.start(0.0)
    assert machine.handle(Received(B, ROUND + READY[1]), 0.1) == []


def test_a_committed_block_is_saved_before_anything_follows_from_it() -> None:
    machine = peer()
    machine.start(0.0)
    machine.handle(rounds.StateAdvanced(rounds.GENESIS_ROUND, START_ROOT), 0.0)
    block = finalized(machine, READY)
    assert machine.height == 0
    effects = machine.handle(block, 1.0)
    assert machine.height == 1
    assert isinstance(effects[0], SaveApplication)
    assert effects[1] == BlockDone(Height(1), 0, 4, block.size, 0.5, block.events)
    assert [told.round for told in of_type(effects, rounds.StartTraining)] == [0]
    assert machine.application.pending() == []


def test_a_commit_without_a_finalized_block_is_our_mistake() -> None:
    with pytest.raises(MisuseError, match="no block was finalized"):
        peer().handle(CommitBlock(0, 0, 0.0, ()), 0.0)


def test_a_restarted_peer_stands_at_its_last_commit() -> None:
    machine = peer()
    started = machine.start(0.0)
    (saved,) = of_type(machine.handle(finalized(machine, READY), 1.0), SaveApplication)
    finalized(machine, [])  # and dies before it is committed
    statements = [e.record for e in of_type(started, Persist)]
    again = peer(records={"statements": statements, "application": [saved.record]})
    assert (again.height, again.application.state.phase) == (1, Phase.COMMIT)
    assert not of_type(again.start(2.0), Persist), "nothing that was signed is signed anew"
    again.handle(finalized(again, []), 3.0)
    assert again.height == 2


def test_without_a_saved_state_it_starts_at_genesis_and_is_handed_the_blocks_again() -> None:
    machine = peer()
    begun = machine.start(0.0)
    machine.handle(finalized(machine, READY), 1.0)
    again = peer(records={"statements": [e.record for e in of_type(begun, Persist)]})
    assert again.height == 0
    again.start(2.0)
    again.handle(finalized(again, READY), 2.0)
    assert again.application.saved() == machine.application.saved()


def test_a_saved_state_of_another_run_stops_the_peer_with_a_hint() -> None:
    other = peer_of(run_of(seed="08"), A, key_of(A), bytes(32), {})
    with pytest.raises(StorageError, match="another run") as caught:
        peer(records={"application": [other.application.saved()]})
    assert "hands its blocks over again" in caught.value.hint


def test_an_engine_that_starts_again_gets_all_that_waits() -> None:
    machine = peer()
    machine.start(0.0)
    assert machine.handle(EngineStarted(), 0.1) == [Order(READY[0])]
    machine.handle(Received(C, TRANSACTION + READY[2]), 0.1)
    assert machine.handle(EngineStarted(), 0.2) == [Order(READY[0]), Order(READY[2])]
    machine.handle(finalized(machine, [READY[0], READY[1], READY[2]]), 0.3)
    assert machine.handle(EngineStarted(), 0.4) == []


def test_own_statements_are_sent_again_until_they_are_on_the_ledger() -> None:
    machine = peer()
    machine.start(0.0)
    at = machine.deadline()
    assert at is not None
    assert machine.handle(Tick(), at / 2) == []
    while not (orders := of_type(machine.handle(Tick(), at), Order)):
        at = machine.deadline()
        assert at is not None
    assert orders == [Order(READY[0])]
    machine.handle(finalized(machine, [READY[0]]), at)
    late = at + 2.0
    assert of_type(machine.handle(Tick(), late), Order) == []


def test_a_liar_under_an_engine_outside_does_not_stop_and_screens_its_own() -> None:
    build = builder(attacks.get("forger"), seed=b"s", liars=[A])
    liar = build(RUN, A, key_of(A), sha256("secret", A.encode()), {})
    assert isinstance(liar.machine, OrderedLiar)
    embedded = build(run_of("embedded"), A, key_of(A), bytes(32), {})
    assert isinstance(embedded.machine, LiarPeer)
    for machine in (peer(), liar):
        block = finalized(machine, READY)  # with a statement of its own that no log of it has
        stops = of_type(machine.handle(block, 1.0), rounds.Halt)
        assert bool(stops) == (machine is not liar)
    liar = build(RUN, A, key_of(A), sha256("secret", A.encode()), {})
    liar.machine.screen = lambda tx: False
    effects = liar.start(0.0)
    assert of_type(effects, Broadcast)
    assert not of_type(effects, Order)
    assert of_type(liar.handle(Received(B, TRANSACTION + READY[1]), 0.1), Order)
