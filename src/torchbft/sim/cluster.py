"""n sans-I/O machines on a pretend network and pretend disks, in one line from any test.

The host of ``sim/``: it carries effects out in order, makes everything persisted durable before the
next send, and hands unknown (*apply*) effects to a callback. A crash may fall between any two
effects. Byzantine peers are machines like the others, so they may send what they like.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any, Protocol

from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Send, Tick
from torchbft.primitives.errors import HaltError, MisuseError
from torchbft.primitives.ids import PeerId
from torchbft.sim.clock import Clock
from torchbft.sim.disk import Disk
from torchbft.sim.network import Network

STUCK_TICKS = 1000
"""Ticks in a row at one time; more means that a machine's deadline does not move."""


class Machine(Protocol):
    """The shape that every protocol machine and every composite of them has."""

    def start(self, now: float) -> list[Effect]: ...

    def handle(self, event: Any, now: float) -> list[Effect]: ...

    def deadline(self) -> float | None: ...


Records = Mapping[str, Sequence[bytes]]
Build = Callable[[PeerId, Records], Machine]
"""Makes a peer's machine from what its disk holds: at the first start and at each restart."""

OnEffect = Callable[[PeerId, Effect, float], Iterable[tuple[float, object]]]
"""Carries out an apply effect; gives events to feed back to the same peer, each after a delay."""

OnMessage = Callable[[PeerId, bytes], None]
"""Sees every message when it is sent."""


class Watcher:
    """Sees what happens to peers beside effects and messages; does nothing by itself."""

    def on_record(self, peer: PeerId, log: str, record: bytes) -> None:
        """A peer wrote a record; it may still be lost."""

    def on_receive(self, peer: PeerId, event: Received) -> None:
        """A message reached a peer that is up; its machine has not seen it yet."""

    def on_halt(self, peer: PeerId, error: HaltError) -> None:
        """A peer's machine refuses to go on. It is down from now on, unless this raises."""
        raise error


@dataclass(slots=True)
class Node:
    """One peer: its disk outlives its machine. Its clock shows ``skew + rate · time``."""

    name: PeerId
    disk: Disk = field(default_factory=Disk)
    machine: Machine | None = None
    skew: float = 0.0
    rate: float = 1.0
    life: int = 0
    """Counts starts; what was meant for an earlier life is dropped."""
    tick_at: float | None = None
    stuck: tuple[float, int] = (-1.0, 0)
    """Time of the last tick, and how many there were at that time."""
    crash_in: int | None = None
    """Effects until an injected crash."""

    def local(self, time: float) -> float:
        """What this peer's clock shows."""
        return self.skew + self.rate * time

    def when(self, local: float) -> float:
        """When this peer's clock will show this."""
        return (local - self.skew) / self.rate


class Cluster:
    """Hosts machines until told to stop; the same inputs give the same ``trace_hash``."""

    def __init__(
        self,
        peers: Iterable[str],
        build: Build,
        network: Network,
        random: Random,
        *,
        on_effect: OnEffect = lambda peer, effect, now: (),
        on_message: OnMessage = lambda peer, message: None,
        watcher: Watcher | None = None,
        sync_seconds: float = 0.002,
    ) -> None:
        self.clock, self.network = Clock(), network
        self.nodes = {PeerId(name): Node(PeerId(name)) for name in peers}
        self._build, self._random = build, random
        self._on_effect, self._on_message = on_effect, on_message
        self._watcher = watcher or Watcher()
        self._sync_seconds = sync_seconds
        self._trace = hashlib.sha256()
        self.messages = 0
        self.on_crash: Callable[[PeerId], None] = lambda peer: None
        """Told of every peer that goes down."""

    @property
    def trace_hash(self) -> str:
        """Digest of every event delivered so far, with its time and receiver."""
        return self._trace.hexdigest()

    def is_up(self, peer: PeerId) -> bool:
        """Whether a peer runs."""
        return self.nodes[peer].machine is not None

    def start(self, *peers: PeerId) -> None:
        """Start these peers, or all that are down, from what their disks hold."""
        for name in peers or tuple(self.nodes):
            node = self.nodes[name]
            if node.machine is None:
                node.life += 1
                node.crash_in = None
                self._note(name, b"start")
                self._guarded(node, partial(self._first_effects, node))

    def crash(self, peer: PeerId) -> None:
        """Kill a peer: its machine is gone, and what was not durable may be."""
        node = self.nodes[peer]
        if node.machine is not None:
            self._note(peer, b"crash")
            node.machine, node.tick_at = None, None
            node.disk.crash(self._random)
            self.on_crash(peer)

    def crash_in(self, peer: PeerId, effects: int) -> None:
        """Kill a peer after it has carried out this many more effects."""
        self.nodes[peer].crash_in = effects

    def feed(self, peer: PeerId, event: object, delay: float = 0.0) -> None:
        """Give an event to a peer; lost if it is down by then, or restarts before."""
        node = self.nodes[peer]
        life = node.life
        self.clock.after(delay, lambda: self._deliver(node, event, life))

    def run(self, seconds: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Let time pass; whether ``stop()`` became true."""
        return self.clock.run(self.clock.now + seconds, stop)

    def _first_effects(self, node: Node) -> list[Effect]:
        node.machine = self._build(node.name, node.disk.read())
        return node.machine.start(node.local(self.clock.now))

    def _guarded(self, node: Node, act: Callable[[], list[Effect]]) -> None:
        """Carry out what a machine wants; one that halts is down."""
        try:
            effects = act()
        except HaltError as error:
            self._watcher.on_halt(node.name, error)
            self.crash(node.name)
        else:
            self._carry_out(node, effects)

    def _note(self, peer: PeerId, what: bytes) -> None:
        self._trace.update(f"{self.clock.now:.9f} {peer} {len(what)} ".encode() + what)

    def _deliver(self, node: Node, event: object, life: int | None = None) -> None:
        machine = node.machine
        if machine is None or (life is not None and life != node.life):
            return
        self._note(node.name, _fingerprint(event))
        if isinstance(event, Received):
            self._watcher.on_receive(node.name, event)
        now = node.local(self.clock.now)
        self._guarded(node, lambda: machine.handle(event, now))

    def _carry_out(self, node: Node, effects: Sequence[Effect]) -> None:
        """In order: a record is durable before the next send; a crash may come in between."""
        delay = 0.0
        for effect in effects:
            if node.crash_in is not None:
                node.crash_in -= 1
                if node.crash_in < 0:
                    node.crash_in = None
                    self.crash(node.name)
                    return
            if isinstance(effect, Persist):
                node.disk.append(effect.log, effect.record)
                self._watcher.on_record(node.name, effect.log, effect.record)
                continue
            if node.disk.dirty:
                node.disk.sync()
                delay += self._sync_seconds
            self._apply(node, effect, delay)
            if node.machine is None:  # its host stopped it
                return
        self._schedule_tick(node)

    def _apply(self, node: Node, effect: Effect, delay: float) -> None:
        if isinstance(effect, Send):
            self._transmit(node.name, effect.to, effect.message, delay)
        elif isinstance(effect, Broadcast):
            for peer in self.nodes:
                if peer != node.name:
                    self._transmit(node.name, peer, effect.message, delay)
        else:
            for after, event in self._on_effect(node.name, effect, self.clock.now):
                self.feed(node.name, event, after)

    def _transmit(self, sender: PeerId, to: PeerId, message: bytes, delay: float) -> None:
        self.messages += 1
        self._on_message(sender, message)
        node = self.nodes.get(to)
        if node is None:
            return
        event = Received(sender, message)
        for at in self.network.arrivals(sender, to, len(message), self.clock.now + delay):
            self.clock.at(at, lambda: self._arrive(node, event))

    def _arrive(self, node: Node, event: Received) -> None:
        done = self.network.downlink(node.name, len(event.message), self.clock.now)
        if done > self.clock.now:
            self.clock.at(done, lambda: self._deliver(node, event))
        else:
            self._deliver(node, event)

    def _schedule_tick(self, node: Node) -> None:
        deadline = None if node.machine is None else node.machine.deadline()
        if deadline is None:
            node.tick_at = None
            return
        at = max(node.when(deadline), self.clock.now)
        if node.tick_at is None or at < node.tick_at:
            node.tick_at = at
            life = node.life
            self.clock.at(at, lambda: self._tick(node, at, life))

    def _tick(self, node: Node, at: float, life: int) -> None:
        machine = node.machine
        if node.life != life or machine is None or node.tick_at != at:
            return
        node.tick_at = None
        deadline = machine.deadline()
        if deadline is None or node.when(deadline) > at:
            self._schedule_tick(node)
            return
        node.stuck = (at, node.stuck[1] + 1 if node.stuck[0] == at else 1)
        if node.stuck[1] > STUCK_TICKS:
            raise MisuseError(f"the deadline of {node.name} does not move")
        self._note(node.name, b"tick")
        now = max(node.local(at), deadline)
        self._guarded(node, lambda: machine.handle(Tick(), now))


def _fingerprint(event: object) -> bytes:
    if isinstance(event, Received):
        return event.sender.encode() + event.message
    return repr(event).encode()
