"""What may go wrong in a swarm's first phase, and the healing after it: crashes, partitions, links.

Everything is drawn from one source of randomness, so that a seed tells the whole story.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from torchbft.primitives.ids import PeerId
from torchbft.sim.cluster import Cluster
from torchbft.sim.network import Conditions

HEALTHY = Conditions(latency=0.02, jitter=0.005)
"""A network between cities on a good day."""

BAD_LINK_LOSS = 0.9
"""Loss on one direction of one link, in half of the swarms: nearly, but not quite, cut."""

LONG_DOWN = 0.2
"""Per second: crashed peers are down, and partitions after a finalized block last, five seconds."""


class Chaos:
    """Plans misfortune for a cluster, and ends it. ``start`` starts one peer that is down."""

    def __init__(
        self,
        cluster: Cluster,
        honest: Sequence[PeerId],
        random: Random,
        conditions: Conditions,
        start: Callable[[PeerId], None],
    ) -> None:
        self._cluster, self._honest, self._random = cluster, tuple(honest), random
        self._conditions, self._start = conditions, start
        self._names = tuple(cluster.nodes)
        self.is_harsh = True
        cluster.on_crash = self._crashed
        for node in cluster.nodes.values():
            node.skew, node.rate = random.random() * 1e4, random.uniform(0.99, 1.01)

    def plan(self, seconds: float, *, crashes: int, partitions: int, effects: int) -> None:
        """Spread crashes (each within some ``effects`` of a moment) and partitions over a time."""
        clock, random = self._cluster.clock, self._random
        for _ in range(crashes):
            at, name = random.random() * seconds, random.choice(self._honest)
            clock.at(at, partial(self._doom, name, random.randint(0, effects)))
        for _ in range(partitions):
            clock.at(random.random() * seconds, self._split)
            clock.at(random.random() * seconds, self._mend)
        if random.random() < 0.5 and len(self._names) > 1:
            sender, to = random.sample(self._names, 2)
            self._cluster.network.degrade(sender, to, BAD_LINK_LOSS)

    def _crashed(self, peer: PeerId) -> None:
        if self.is_harsh:
            self._cluster.clock.after(self._random.expovariate(0.5), partial(self._restart, peer))

    def isolate(self, peer: PeerId) -> None:
        """Cut a peer off for a while: whoever is the first to know something keeps it to itself."""
        self._cluster.network.partition([peer])
        self._cluster.clock.after(self._random.expovariate(LONG_DOWN), self._mend)

    def heal(self, core: Sequence[PeerId]) -> None:
        """A good network from now on; the core is up, and other honest peers are down for good."""
        self.is_harsh = False
        self._cluster.network.heal(HEALTHY)
        for name in self._honest:
            self._cluster.nodes[name].crash_in = None
            if name not in core:
                self._cluster.crash(name)
        for name in core:
            self._start(name)

    def _doom(self, peer: PeerId, effects: int) -> None:
        if self.is_harsh:
            self._cluster.crash_in(peer, effects)

    def _restart(self, peer: PeerId) -> None:
        if self.is_harsh:
            self._start(peer)

    def _split(self) -> None:
        if not self.is_harsh:
            return
        names = self._random.sample(self._names, len(self._names))
        cut = self._random.randint(0, len(names))
        self._cluster.network.partition(names[:cut], names[cut:])

    def _mend(self) -> None:
        if self.is_harsh:
            self._cluster.network.heal(self._conditions)
