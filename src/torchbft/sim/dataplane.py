"""A pretend data plane: content-addressed blobs on peers' disks, pushed and fetched.

Blobs outlive crashes. A transfer takes the network's latency and, apart from it, the time that its
bytes need; it may be lost whole, and a holder that is down, or does not serve, costs a try.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

from torchbft.primitives.ids import PeerId
from torchbft.sim.cluster import Cluster

REQUEST_BYTES = 100
"""A request is a small message: a root, and where to begin."""

TRY_SECONDS = 1.0
"""Until the next holder is asked, beside the time that the bytes need."""


@dataclass(slots=True)
class _Fetch:
    """A blob that one life of a peer looks for."""

    life: int
    length: int
    wanted: Callable[[], bool]
    holders: list[PeerId]
    turn: int = 0


@dataclass(slots=True)
class _Shelf:
    """A peer's durable blobs by root, and what it is looking for."""

    blobs: dict[bytes, int] = field(default_factory=dict)
    """Root to length in bytes: contents are pretended."""
    fetches: dict[bytes, _Fetch] = field(default_factory=dict)


class DataPlane:
    """``on_stored`` is told when a transfer brought a blob to a peer that is up; ``serves`` whether
    a holder answers this time."""

    def __init__(
        self,
        cluster: Cluster,
        on_stored: Callable[[PeerId, bytes], None],
        serves: Callable[[PeerId], bool] = lambda holder: True,
    ) -> None:
        self._cluster, self._on_stored, self._serves = cluster, on_stored, serves
        self._shelves = {name: _Shelf() for name in cluster.nodes}

    def has(self, peer: PeerId, root: bytes) -> bool:
        """Whether a peer's disk holds a blob."""
        return root in self._shelves[peer].blobs

    def holders(self, root: bytes) -> tuple[PeerId, ...]:
        """Everyone whose disk holds a blob."""
        return tuple(name for name in self._shelves if self.has(name, root))

    def length(self, peer: PeerId, root: bytes) -> int:
        """Bytes of a blob that a peer holds."""
        return self._shelves[peer].blobs[root]

    def put(self, peer: PeerId, root: bytes, length: int) -> None:
        """Store a blob durably."""
        self._shelves[peer].blobs[root] = length

    def drop(self, peer: PeerId, root: bytes) -> None:
        """Remove a blob."""
        self._shelves[peer].blobs.pop(root, None)

    def push(self, sender: PeerId, root: bytes, to: Iterable[PeerId]) -> None:
        """Send a held blob to some peers, once."""
        for peer in to:
            if self.has(sender, root) and peer != sender:
                self._transfer(sender, peer, root)

    def fetch(
        self,
        peer: PeerId,
        root: bytes,
        length: int,
        holders: Iterable[PeerId],
        wanted: Callable[[], bool],
    ) -> None:
        """Ask one holder after the other until the blob is here or not wanted any more. Called
        again for the same root it replaces the holders."""
        life = self._cluster.nodes[peer].life
        fetches = self._shelves[peer].fetches
        known = fetches.get(root)
        asked = [name for name in holders if name != peer]
        if known is not None and known.life == life:
            known.holders = asked
            return
        fetches[root] = _Fetch(life, length, wanted, asked)
        self._try(peer, root, fetches[root])

    def _try(self, peer: PeerId, root: bytes, fetch: _Fetch) -> None:
        fetches, node = self._shelves[peer].fetches, self._cluster.nodes[peer]
        if fetches.get(root) is not fetch:
            return
        over = node.machine is None or node.life != fetch.life
        if over or self.has(peer, root) or not fetch.wanted():
            del fetches[root]
            return
        if fetch.holders:
            holder = fetch.holders[fetch.turn % len(fetch.holders)]
            fetch.turn += 1
            self._ask(peer, holder, root)
        bandwidth = self._cluster.network.conditions.bandwidth
        again = TRY_SECONDS + 2 * fetch.length / bandwidth
        self._cluster.clock.after(again, partial(self._try, peer, root, fetch))

    def _ask(self, peer: PeerId, holder: PeerId, root: bytes) -> None:
        clock, network = self._cluster.clock, self._cluster.network
        for at in network.arrivals(peer, holder, REQUEST_BYTES, clock.now)[:1]:
            clock.at(at, partial(self._answer, holder, peer, root))

    def _answer(self, holder: PeerId, peer: PeerId, root: bytes) -> None:
        here = holder in self._shelves and self._cluster.is_up(holder) and self.has(holder, root)
        if here and self._serves(holder):
            self._transfer(holder, peer, root)

    def _transfer(self, sender: PeerId, to: PeerId, root: bytes) -> None:
        clock, network = self._cluster.clock, self._cluster.network
        length = self.length(sender, root)
        for at in network.arrivals(sender, to, length, clock.now)[:1]:
            clock.at(at, partial(self._through, to, root, length))

    def _through(self, to: PeerId, root: bytes, length: int) -> None:
        clock = self._cluster.clock
        at = self._cluster.network.downlink(to, length, clock.now)
        clock.at(at, partial(self._store, to, root, length))

    def _store(self, to: PeerId, root: bytes, length: int) -> None:
        if self._cluster.is_up(to):
            self.put(to, root, length)
            self._on_stored(to, root)
