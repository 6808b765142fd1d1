"""The pretend world: time that jumps, links that delay and lose, disks that tear."""

from random import Random

import pytest

from torchbft.primitives.errors import MisuseError
from torchbft.primitives.ids import PeerId
from torchbft.sim.clock import Clock
from torchbft.sim.disk import Disk
from torchbft.sim.network import Conditions, Network

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
PLAIN = Conditions(latency=0.1, jitter=1e-6, bandwidth=1000.0)


def network(conditions: Conditions = PLAIN) -> Network:
    return Network(Random(1), conditions)


# -- clock


def test_time_jumps_from_event_to_event_in_order() -> None:
    clock, seen = Clock(), []
    clock.at(3600.0, lambda: seen.append((clock.now, "late")))
    clock.after(1.0, lambda: seen.append((clock.now, "first")))
    clock.at(1.0, lambda: seen.append((clock.now, "second")))
    assert clock.run(10_000.0) is False
    assert seen == [(1.0, "first"), (1.0, "second"), (3600.0, "late")]
    assert clock.now == 10_000.0


def test_an_event_may_schedule_others_and_the_past_means_now() -> None:
    clock, seen = Clock(), []
    clock.at(5.0, lambda: clock.at(1.0, lambda: seen.append(clock.now)))
    clock.run(6.0)
    assert seen == [5.0]
    with pytest.raises(MisuseError):
        clock.after(-1.0, lambda: None)


def test_running_stops_when_told() -> None:
    clock, seen = Clock(), []
    for i in range(5):
        clock.at(float(i), lambda i=i: seen.append(i))
    assert clock.run(10.0, lambda: len(seen) == 2)
    assert seen == [0, 1]
    assert clock.now == 1.0
    clock.run(2.5)
    assert seen == [0, 1, 2]


# -- network


def test_latency_is_not_transmission_time() -> None:
    [small] = network().arrivals(A, B, 1, 0.0)
    [large] = network().arrivals(A, B, 1000, 0.0)
    assert small == pytest.approx(0.1 + 0.001, abs=1e-4)
    assert large == pytest.approx(0.1 + 1.0, abs=1e-4)


def test_an_uplink_is_shared_by_all_receivers() -> None:
    net = network()
    first, second = (net.arrivals(A, to, 1000, 0.0)[0] for to in (B, C))
    assert first == pytest.approx(1.1, abs=1e-4)
    assert second == pytest.approx(2.1, abs=1e-4)
    assert net.arrivals(B, C, 1, 0.0)[0] < 0.2, "other uplinks are free"


def test_a_downlink_is_shared_by_all_senders() -> None:
    net = network()
    assert [net.downlink(C, 1000, at) for at in (5.0, 5.0, 5.5)] == [5.0, 6.0, 7.0]
    assert net.downlink(B, 1000, 5.5) == 5.5
    assert net.downlink(C, 1000, 20.0) == 20.0


def test_a_busy_link_is_free_again_later() -> None:
    net = network()
    net.arrivals(A, B, 1000, 0.0)
    assert net.arrivals(A, B, 1, 50.0)[0] == pytest.approx(50.101, abs=1e-3)


def share(net: Network, sender: PeerId, to: PeerId) -> float:
    return sum(len(net.arrivals(sender, to, 1, 0.0)) for _ in range(2000)) / 2000


def test_loss_and_duplicates_have_their_shares() -> None:
    assert share(network(), A, B) == 1.0
    assert share(network(Conditions(loss=0.25)), A, B) == pytest.approx(0.75, abs=0.05)
    assert share(network(Conditions(duplicate=0.25)), A, B) == pytest.approx(1.25, abs=0.05)


def test_a_link_may_be_bad_one_way() -> None:
    net = network()
    net.degrade(A, B, 0.9)
    assert share(net, A, B) == pytest.approx(0.1, abs=0.05)
    assert share(net, B, A) == 1.0
    net.heal(PLAIN)
    assert share(net, A, B) == 1.0


def test_partitions_cut_between_groups_and_heal() -> None:
    net = network()
    net.partition([A, B])
    assert (share(net, A, B), share(net, A, C), share(net, C, B)) == (1.0, 0.0, 0.0)
    net.partition([A], [B, C])
    assert (share(net, A, B), share(net, C, B)) == (0.0, 1.0)
    net.heal(PLAIN)
    assert share(net, A, B) == 1.0


def test_reordering_lets_later_messages_pass() -> None:
    net = network(Conditions(latency=0.1, jitter=1e-6, reorder=0.5))
    arrivals = [net.arrivals(A, B, 1, i * 0.01)[0] for i in range(200)]
    assert arrivals != sorted(arrivals)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    harsh = Conditions(loss=0.2, duplicate=0.2, reorder=0.2, jitter=0.1)
    one, two, other = (Network(Random(s), harsh) for s in (7, 7, 8))
    drawn = [[n.arrivals(A, B, 10, float(i)) for i in range(50)] for n in (one, two, other)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != drawn[2]


# -- disk


def test_records_come_back_by_log_in_order() -> None:
    disk = Disk()
    for log, record in (("votes", b"1"), ("blocks", b"x"), ("votes", b"2"), ("votes", b"")):
        disk.append(log, record)
    assert disk.read() == {"votes": [b"1", b"2", b""], "blocks": [b"x"]}


def test_a_crash_keeps_what_is_durable_and_tears_the_rest_anywhere() -> None:
    left = set()
    for seed in range(200):
        disk = Disk()
        disk.append("votes", b"durable")
        disk.sync()
        assert not disk.dirty
        disk.append("votes", b"a" * 30)
        disk.append("blocks", b"b" * 30)
        assert disk.dirty
        disk.crash(Random(seed))
        logs = disk.read()
        assert logs["votes"][0] == b"durable"
        left.add((len(logs["votes"]), len(logs.get("blocks", []))))
    assert left == {(1, 0), (2, 0)} or left == {(1, 0), (2, 0), (2, 1)}


def test_writing_goes_on_after_a_torn_record() -> None:
    for seed in range(50):
        disk = Disk()
        disk.append("votes", b"1" * 100)
        disk.crash(Random(seed))
        before = disk.read().get("votes", [])
        disk.append("votes", b"2")
        disk.sync()
        assert disk.read()["votes"] == [*before, b"2"]
