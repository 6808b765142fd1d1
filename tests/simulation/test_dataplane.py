"""The pretend data plane: what arrives when, what is lost, whom a fetch asks."""

from random import Random

from torchbft.primitives.ids import PeerId
from torchbft.sim.cluster import Cluster
from torchbft.sim.dataplane import TRY_SECONDS, DataPlane
from torchbft.sim.network import Conditions, Network

A, B, C = (PeerId(name) for name in "abc")
ROOT, SIZE = b"r" * 32, 100_000
LATENCY, BANDWIDTH = 0.1, 1e6
ARRIVAL = LATENCY + SIZE / BANDWIDTH
"""The downlink works while the uplink does."""


class Idle:
    def start(self, now: float) -> list[object]:
        return []

    def handle(self, event: object, now: float) -> list[object]:
        return []

    def deadline(self) -> None:
        return None


class Plane:
    """Three peers that are up; ``told`` notes who stored what, and when."""

    def __init__(self, silent: tuple[PeerId, ...] = ()) -> None:
        conditions = Conditions(latency=LATENCY, jitter=1e-9, bandwidth=BANDWIDTH)
        network = Network(Random(1), conditions)
        self.cluster = Cluster([A, B, C], lambda name, records: Idle(), network, Random(2))
        self.cluster.start()
        self.told: list[tuple[float, PeerId]] = []
        self.asked: list[PeerId] = []
        self.plane = DataPlane(self.cluster, self._store, self._serves)
        self._silent = silent
        self.wanted = True

    def _store(self, peer: PeerId, root: bytes) -> None:
        assert root == ROOT
        self.told.append((round(self.cluster.clock.now, 4), peer))

    def _serves(self, holder: PeerId) -> bool:
        self.asked.append(holder)
        return holder not in self._silent

    def fetch(self, *holders: PeerId) -> None:
        self.plane.fetch(A, ROOT, SIZE, holders, lambda: self.wanted)


def test_a_push_takes_latency_and_the_time_of_its_bytes() -> None:
    swarm = Plane()
    swarm.plane.put(A, ROOT, SIZE)
    swarm.plane.push(A, ROOT, (A, B, C))
    swarm.cluster.run(5.0)
    assert swarm.told == [(round(ARRIVAL, 4), B), (round(ARRIVAL + SIZE / BANDWIDTH, 4), C)]
    assert swarm.plane.holders(ROOT) == (A, B, C)
    assert swarm.plane.length(B, ROOT) == SIZE


def test_what_is_not_held_is_not_pushed() -> None:
    swarm = Plane()
    swarm.plane.push(A, ROOT, (B, C))
    swarm.cluster.run(5.0)
    assert swarm.told == []


def test_a_push_to_a_peer_that_is_down_or_cut_off_is_lost() -> None:
    swarm = Plane()
    swarm.plane.put(A, ROOT, SIZE)
    swarm.cluster.crash(B)
    swarm.cluster.network.partition([C])
    swarm.plane.push(A, ROOT, (B, C))
    swarm.cluster.run(5.0)
    swarm.cluster.start(B)
    swarm.cluster.run(5.0)
    assert swarm.plane.holders(ROOT) == (A,)


def test_a_blob_outlives_a_crash() -> None:
    swarm = Plane()
    swarm.plane.put(A, ROOT, SIZE)
    swarm.cluster.crash(A)
    swarm.cluster.start(A)
    assert swarm.plane.has(A, ROOT)
    swarm.plane.drop(A, ROOT)
    assert not swarm.plane.has(A, ROOT)


def test_a_fetch_asks_one_holder_after_the_other() -> None:
    swarm = Plane(silent=(B,))
    for holder in (B, C):
        swarm.plane.put(holder, ROOT, SIZE)
    swarm.fetch(A, B, C)
    swarm.cluster.run(20.0)
    assert swarm.asked == [B, C]
    assert [peer for _, peer in swarm.told] == [A]
    at = swarm.told[0][0]
    assert TRY_SECONDS < at < TRY_SECONDS + 2 * SIZE / BANDWIDTH + 2 * ARRIVAL


def test_a_fetch_waits_for_a_holder_to_come_back() -> None:
    swarm = Plane()
    swarm.plane.put(B, ROOT, SIZE)
    swarm.cluster.crash(B)
    swarm.fetch(B)
    swarm.cluster.run(10.0)
    assert swarm.told == []
    swarm.cluster.start(B)
    swarm.cluster.run(5.0)
    assert [peer for _, peer in swarm.told] == [A]


def test_a_fetch_takes_new_holders() -> None:
    swarm = Plane()
    swarm.plane.put(C, ROOT, SIZE)
    swarm.fetch(B)
    swarm.cluster.run(3.0)
    swarm.fetch(C)
    swarm.cluster.run(5.0)
    assert [peer for _, peer in swarm.told] == [A]


def test_a_fetch_ends_when_nobody_wants_it_and_can_begin_again() -> None:
    swarm = Plane(silent=(B,))
    swarm.plane.put(B, ROOT, SIZE)
    swarm.fetch(B)
    swarm.cluster.run(3.0)
    swarm.wanted = False
    swarm.cluster.run(3.0)
    tries = len(swarm.asked)
    assert tries >= 2
    swarm.cluster.run(10.0)
    assert len(swarm.asked) == tries
    swarm.wanted = True
    swarm.fetch(B)
    swarm.cluster.run(1.0)
    assert len(swarm.asked) == tries + 1


def test_a_fetch_dies_with_its_peer() -> None:
    swarm = Plane()
    swarm.plane.put(B, ROOT, SIZE)
    swarm.cluster.crash(B)
    swarm.fetch(B)
    swarm.cluster.run(0.5)
    swarm.cluster.crash(A)
    swarm.cluster.start(A, B)
    swarm.cluster.run(20.0)
    assert swarm.told == []
    swarm.fetch(B)
    swarm.cluster.run(5.0)
    assert [peer for _, peer in swarm.told] == [A]
