"""Hostile bytes against the round: whatever comes, a refusal or a value, never an error (C25)."""

import random
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "round"))

from round_world import World

from torchbft.primitives.effects import Persist, Received
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.evidence import Evidence
from torchbft.primitives.ids import PeerId
from torchbft.primitives.wire import MAX_ITEM_BYTES, encode
from torchbft.protocols.round import interface as io
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.admissible import admissible, check_equivocation
from torchbft.protocols.round.application import Application, proposal_complete
from torchbft.protocols.round.machine import RoundConfig, RoundMachine
from torchbft.protocols.round.outcomes import check_bad_opening, check_malformed
from torchbft.protocols.round.reader import apply_block
from torchbft.protocols.round.state import decode_state

WORLD = World(4, rounds=9).start()
WORLD.play_round(0)
WORLD.block(WORLD.rooted("peer-0", 0))
RAW = msgspec.msgpack.Encoder()
HOSTILE = (-1, 0, 1, 2, 3, 4, 63, 64, 255, 2**31, 2**32, 2**62, 2**62 + 1, 2**63, 2**64 - 1)


def samples() -> dict[str, bytes]:
    """One valid transaction, or vote, of every kind."""
    w = WORLD
    double = Evidence(
        "equivocation", "peer-1", 1, (w.commit("peer-1", 1), w.commit("peer-1", 1, b"2"))
    )
    return {
        "ready": w.ready("peer-0"),
        "commit": w.commit("peer-0", 1),
        "open": w.open("peer-0", 1),
        "attest": w.attest("peer-0", 1),
        "close": w.closing("peer-0", 1, "commit", w.names),
        "root": w.root_vote("peer-0", 1),
        "rooted": w.rooted("peer-0", 0),
        "void": w.void("peer-0", 0),
        "evidence": w.sign(m.EvidenceTx(*w.head("peer-0", 1), double)),
    }


SAMPLES = samples()


def resigned(fields: list, key: str = "peer-0") -> bytes:
    """A transaction of these raw fields, bounds or not, signed as an insider would."""
    body = RAW.encode(fields)
    return encode(m.Signed(body, WORLD.keys[key].sign(m.SIGN_DOMAIN, body)))


def survives(tx: bytes) -> None:
    """Everything that looks at a stranger's transaction, at once."""
    reason = admissible(tx, WORLD.state)
    applied = apply_block(WORLD.state, [tx])
    assert (applied.results[0].code == 1) == (reason is not None)
    if reason is not None:
        assert applied.state == WORLD.state
    proposal_complete(WORLD.state, [tx])
    application = Application(WORLD.genesis)
    application.state = WORLD.state
    assert application.process_proposal(1, [tx]) == (reason is None)


def integers(value: object, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
    """Places of all integers in nested lists."""
    if isinstance(value, list):
        return [found for i, part in enumerate(value) for found in integers(part, (*path, i))]
    return [path] if isinstance(value, int) and not isinstance(value, bool) else []


def put(value: list, path: tuple[int, ...], new: object) -> list:
    at, *rest = path
    copy = list(value)
    copy[at] = put(copy[at], tuple(rest), new) if rest else new
    return copy


@pytest.mark.parametrize("kind", SAMPLES)
def test_c25_every_integer_of_every_statement_may_be_anything(kind: str) -> None:
    fields = msgspec.msgpack.decode(m.parse(SAMPLES[kind]).body)
    for path in integers(fields):
        for number in HOSTILE:
            survives(resigned(put(fields, path, number)))


@pytest.mark.parametrize("kind", SAMPLES)
def test_c25_nobody_speaks_for_another(kind: str) -> None:
    fields = msgspec.msgpack.decode(m.parse(SAMPLES[kind]).body)
    for author in ("peer-1", "peer-9", "", "PEER-0", "a" * 33):
        tx = resigned(put(fields, (5,), author))
        assert admissible(tx, WORLD.state) is not None
        survives(tx)


@pytest.mark.parametrize("kind", SAMPLES)
def test_maps_and_lists_of_every_length_are_refused_or_fit(kind: str) -> None:
    fields = msgspec.msgpack.decode(m.parse(SAMPLES[kind]).body)
    for at in range(6, len(fields)):
        if isinstance(fields[at], bytes):
            for size in (0, 1, 2, 8, 9, 31, 33, 64, 65, 4000):
                survives(resigned(put(fields, (at,), b"\xff" * size)))
                survives(resigned(put(fields, (at,), bytes(size))))
        for wrong in (None, [], "x" * 5000, {"a": 1}, [[[[]]]], 1.5):
            survives(resigned(put(fields, (at,), wrong)))
    survives(resigned(fields[:-1]))
    survives(resigned([*fields, 1]))
    survives(resigned(["unknown", *fields[1:]]))


@settings(max_examples=150, deadline=None)
@given(kind=st.sampled_from(sorted(SAMPLES)), seed=st.integers(0, 2**32))
def test_garbled_transactions(kind: str, seed: int) -> None:
    chance = random.Random(seed)
    tx = bytearray(SAMPLES[kind])
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(tx))
        change = chance.choice(("flip", "cut", "insert"))
        if change == "flip":
            tx[at] ^= 1 << chance.randrange(8)
        elif change == "cut":
            del tx[at : at + chance.randint(1, 9)]
        else:
            tx[at:at] = chance.randbytes(chance.randint(1, 9))
        if not tx:
            break
    if bytes(tx) != SAMPLES[kind]:
        assert admissible(bytes(tx), WORLD.state) is not None, "signed bytes changed"
    survives(bytes(tx))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    survives(data)
    with pytest.raises(DecodeError):
        m.parse(data)
    with pytest.raises(DecodeError):
        decode_state(data)


def test_deep_and_large_bytes_cost_little() -> None:
    for data in (
        b"\x91" * 4000,
        b"\xdd\xff\xff\xff\xff" * 800,
        b"\xc6\xff\xff\xff\xff",
        bytes(10**6),
    ):
        survives(data)
    assert "more than" in admissible(bytes(MAX_ITEM_BYTES + 1), WORLD.state)


def test_evidence_checks_are_total() -> None:
    good = tuple(SAMPLES.values())
    cases = [(), (b"",), (b"junk", b"junk"), good[:2], good[1:3], good[3:4], good * 2]
    for statements in cases:
        for round_ in (0, 1, 2**62):
            evidence = Evidence("equivocation", "peer-0", round_, statements)
            public = WORLD.keys["peer-0"].public
            assert not check_equivocation(evidence, public)
            assert not check_equivocation(evidence, b"short")
            assert not check_bad_opening(evidence, public)
            assert not check_malformed(evidence, WORLD.state.current.seats, 1)


@settings(max_examples=60, deadline=None)
@given(
    data=st.one_of(
        st.binary(max_size=200), st.sampled_from(sorted(SAMPLES.values())), st.just(bytes(10**5))
    ),
    sender=st.sampled_from(["peer-0", "peer-1", "peer-3", "stranger"]),
)
def test_the_machine_does_nothing_durable_on_hostile_messages(data: bytes, sender: str) -> None:
    application = Application(WORLD.genesis)
    machine = RoundMachine(
        RoundConfig(PeerId("peer-2")), WORLD.keys["peer-2"], b"s" * 32, application
    )
    machine.start(0.0)
    for event in (io.Heard(data), Received(PeerId(sender), data)):
        effects = machine.handle(event, 0.1)
        assert not [effect for effect in effects if isinstance(effect, Persist | io.Submit)]


def test_a_flood_of_other_peoples_items_is_bounded() -> None:
    application = Application(WORLD.genesis)
    machine = RoundMachine(
        RoundConfig(PeerId("peer-2")), WORLD.keys["peer-2"], b"s" * 32, application
    )
    machine.start(0.0)
    for i in range(300):
        for number in (0, 1, 2, 7):
            machine.handle(io.Heard(WORLD.commit("peer-1", number, str(i).encode())), 0.1)
    assert sum(len(txs) for txs in machine._seen._heard.values()) <= 2 * 2
