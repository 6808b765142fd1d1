"""The host: order of effects, durability, crashes between effects, ticks, feeding back."""

from dataclasses import dataclass
from random import Random

import pytest

from torchbft.primitives.effects import Broadcast, Persist, Received, Send, Tick
from torchbft.primitives.errors import MisuseError
from torchbft.primitives.ids import PeerId
from torchbft.sim.cluster import Cluster
from torchbft.sim.network import Conditions, Network

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")


@dataclass(frozen=True)
class Do:
    """Event: have these effects."""

    effects: tuple


class Scripted:
    """A machine that does what it is fed and remembers what it received."""

    def __init__(self, records) -> None:
        self.records, self.seen, self.wakes = dict(records), [], []
        self.alarm = None

    def start(self, now):
        return []

    def handle(self, event, now):
        if isinstance(event, Do):
            return list(event.effects)
        if isinstance(event, Tick):
            self.wakes.append(now)
            self.alarm = None
        self.seen.append((round(now, 3), event))
        return []

    def deadline(self):
        return self.alarm


def cluster(**options) -> tuple[Cluster, dict]:
    machines = {}

    def build(name, records):
        machines[name] = Scripted(records)
        return machines[name]

    conditions = Conditions(latency=0.1, jitter=1e-9)
    made = Cluster(["a", "b", "c"], build, Network(Random(1), conditions), Random(2), **options)
    made.start()
    return made, machines


def received(machine: Scripted) -> list[tuple[str, bytes]]:
    return [(e.sender, e.message) for _, e in machine.seen if isinstance(e, Received)]


def test_sends_and_broadcasts_reach_who_they_are_for() -> None:
    host, machines = cluster()
    host.feed(A, Do((Send(B, b"to b"), Broadcast(b"all"), Send(PeerId("nobody"), b"x"))))
    host.run(1.0)
    assert sorted(received(machines[B])) == [("a", b"all"), ("a", b"to b")]
    assert received(machines[C]) == [("a", b"all")]
    assert received(machines[A]) == []


def test_a_record_is_durable_before_the_next_send_and_that_takes_time() -> None:
    host, machines = cluster(sync_seconds=0.5)
    host.feed(A, Do((Persist("log", b"1"), Send(B, b"m"))))
    host.run(0.55)
    assert received(machines[B]) == []
    host.run(0.1)
    assert received(machines[B]) == [("a", b"m")]
    assert not host.nodes[A].disk.dirty


def test_what_is_only_written_may_be_lost() -> None:
    kept = set()
    for _ in range(40):
        host, _machines = cluster()
        host._random = Random(_)
        host.feed(A, Do((Persist("log", b"1" * 50),)))
        host.run(0.1)
        host.crash(A)
        kept.add(len(host.nodes[A].disk.read().get("log", [])))
    assert 0 in kept


def test_a_crash_may_fall_between_any_two_effects() -> None:
    effects = (Persist("log", b"1"), Send(B, b"1"), Persist("log", b"2"), Send(B, b"2"))
    for count in range(5):
        host, machines = cluster()
        host.crash_in(A, count)
        host.feed(A, Do(effects))
        host.run(1.0)
        assert len(received(machines[B])) == count // 2
        assert host.is_up(A) == (count == 4)


def test_a_restarted_peer_gets_its_records_and_no_old_events() -> None:
    host, machines = cluster()
    host.feed(A, Do((Persist("log", b"1"), Send(B, b"x"))))
    host.feed(A, "for the old life", delay=0.5)
    host.run(0.2)
    host.crash(A)
    host.crash(A)
    host.start(A)
    host.run(1.0)
    assert machines[A].records == {"log": [b"1"]}
    assert machines[A].seen == []


def test_messages_to_a_peer_that_is_down_are_lost() -> None:
    host, machines = cluster()
    host.crash(B)
    host.feed(A, Do((Send(B, b"x"),)))
    host.run(1.0)
    host.start(B)
    host.run(1.0)
    assert received(machines[B]) == []


def test_apply_effects_go_to_the_callback_and_its_events_come_back() -> None:
    calls = []

    def on_effect(peer, effect, now):
        calls.append((peer, effect, now))
        return [(0.25, "later"), (0.0, "now")]

    host, machines = cluster(on_effect=on_effect)
    host.feed(A, Do(("apply this",)))
    host.run(1.0)
    assert calls == [(A, "apply this", 0.0)]
    assert machines[A].seen == [(0.0, "now"), (0.25, "later")]


def test_deadlines_become_ticks_in_the_peers_own_time() -> None:
    host, machines = cluster()
    host.nodes[A].skew, host.nodes[A].rate = 1000.0, 2.0
    machines[A].alarm = 1006.0
    host.feed(A, "look at the clock")
    host.run(2.9)
    assert machines[A].wakes == []
    host.run(0.2)
    assert machines[A].wakes == [1006.0]


def test_a_deadline_that_moves_away_does_not_fire_early() -> None:
    host, machines = cluster()
    machines[A].alarm = 1.0
    host.feed(A, "arm")
    host.run(0.5)
    machines[A].alarm = 3.0
    host.run(2.0)
    assert machines[A].wakes == []
    host.run(1.0)
    assert machines[A].wakes == [3.0]


def test_a_deadline_that_does_not_move_is_a_mistake() -> None:
    host, machines = cluster()
    machines[A].deadline = lambda: 0.5
    host.feed(A, "arm")
    with pytest.raises(MisuseError, match="does not move"):
        host.run(1.0)


def test_the_tap_sees_every_message() -> None:
    seen = []
    host, _ = cluster(on_message=lambda peer, message: seen.append((peer, message)))
    host.feed(A, Do((Broadcast(b"x"), Send(B, b"y"))))
    host.run(1.0)
    assert seen == [(A, b"x"), (A, b"x"), (A, b"y")]
    assert host.messages == 3


def test_the_trace_hash_is_of_what_happened() -> None:
    def trace(message: bytes, at: float) -> str:
        host, _ = cluster()
        host.feed(A, Do((Send(B, message),)), delay=at)
        host.run(1.0)
        return host.trace_hash

    assert trace(b"x", 0.1) == trace(b"x", 0.1)
    assert len({trace(b"x", 0.1), trace(b"y", 0.1), trace(b"x", 0.2)}) == 3
