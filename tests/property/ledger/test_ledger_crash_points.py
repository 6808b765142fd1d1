"""C29: a validator is killed after every single effect and restarted; it never signs twice, and
the rest never notices more than a delay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft.primitives.effects import Broadcast, Persist, Send
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import (
    Kind,
    Proposal,
    Timeout,
    Vote,
    block_digest,
    decode_message,
)
from torchbft.protocols.ledger.safety import contradict
from torchbft.sim.ledgers import Ledgers
from torchbft.sim.puppets import Puppets


def script(table: Puppets):
    """Everything that happens at one height to one validator, as functions of the table."""
    block, other = table.block(b"tx"), table.block(b"other")
    digest = block_digest(block)
    again = table.block(b"again", view=1)
    prepared = table.certificate(Kind.PREPARE, digest)
    yield lambda t: t.give_tx(b"tx")
    yield lambda t: t.give("p1", t.proposal(block))
    yield lambda t: t.give("p1", t.proposal(other))
    for name in ("p1", "p2", "p3"):
        yield lambda t, n=name: t.give(n, t.vote(n, Kind.PREPARE, digest))
    yield lambda t: t.wait(2.5)
    yield lambda t: t.give("p2", t.timeout("p2"))
    yield lambda t: t.give("p3", t.timeout("p3", prepared=prepared))
    timeouts = table.timeouts(0, prepared)
    yield lambda t: t.give("p2", t.proposal(block, view=1, justification=timeouts))
    yield lambda t: t.give("p2", t.proposal(again, view=1, justification=timeouts))
    for kind in (Kind.PREPARE, Kind.FINALIZE):
        for name in ("p1", "p2", "p3"):
            yield lambda t, n=name, k=kind: t.give(n, t.vote(n, k, digest, view=1))


STEPS = len(list(script(Puppets())))


def own_votes(effects, me: str) -> list[Vote]:
    messages = [decode_message(e.message) for e in effects if isinstance(e, Send | Broadcast)]
    votes = [m.vote if isinstance(m, Proposal | Timeout) else m for m in messages]
    return [v for v in votes if isinstance(v, Vote) and v.author == me]


def one_life(die_at: int, die_after: int, double: bool) -> tuple[list[Vote], Puppets]:
    """Run the script; in step ``die_at`` only the first ``die_after`` effects are carried out, then
    the validator restarts from what was durable; ``double``: it dies in its first step again."""
    table, sent = Puppets(), []
    for number, step in enumerate(script(Puppets())):
        before = {log: list(records) for log, records in table.records.items()}
        effects = step(table)
        if number != die_at:
            sent += own_votes(effects, table.me)
            continue
        done = effects[:die_after]
        sent += own_votes(done, table.me)
        for effect in done:
            if isinstance(effect, Persist):
                before.setdefault(effect.log, []).append(effect.record)
        for _ in range(2 if double else 1):
            sent += own_votes(table.restart(before), table.me)
        sent += own_votes(step(table), table.me)
    return sent, table


def effects_of(step_number: int) -> int:
    table = Puppets()
    for number, step in enumerate(script(Puppets())):
        effects = step(table)
        if number == step_number:
            return len(effects)
    raise AssertionError


CRASHES = [(step, count) for step in range(STEPS) for count in range(effects_of(step) + 1)]


def test_the_script_meets_every_kind_of_vote() -> None:
    sent, table = one_life(-1, 0, False)
    assert {v.kind for v in sent} == {Kind.PREPARE, Kind.FINALIZE, Kind.TIME_OUT}
    assert table.machine.height == 2
    assert len(CRASHES) > 30


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize(("step", "count"), CRASHES)
def test_c29_no_crash_point_makes_a_validator_contradict_itself(
    step: int, count: int, double: bool
) -> None:
    sent, table = one_life(step, count, double)
    assert not any(contradict(a, b) for a in sent for b in sent)
    by_slot = {(v.height, *v.slot): encode(v) for v in sent}
    assert all(by_slot[(v.height, *v.slot)] == encode(v) for v in sent), "the same bytes"
    assert table.machine.height == 2, "and it still finalizes"


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.floats(0, 3), st.integers(0, 8)), max_size=8),
    st.integers(0, 1000),
)
def test_c29_whole_swarms_survive_any_schedule_of_crashes(crashes, seed: int) -> None:
    ledgers = Ledgers(4, seed=seed)
    cluster, names = ledgers.cluster, ledgers.names
    cluster.start()
    for i in range(6):
        cluster.clock.at(i * 0.5, lambda i=i: ledgers.submit(b"%d" % i))
    for who, at, effects in crashes:
        name = names[who]
        cluster.clock.at(at, lambda n=name, e=effects: cluster.crash_in(n, e))
        cluster.clock.at(at + 1.0, lambda n=name: cluster.start(n))
    cluster.run(5.0)
    cluster.start()
    for node in cluster.nodes.values():
        node.crash_in = None
    ledgers.submit(b"last")
    assert cluster.run(200.0, lambda: ledgers.applied([b"last"], names))
    assert ledgers.violations() == []
