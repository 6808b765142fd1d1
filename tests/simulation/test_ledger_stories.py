"""What happens to seven validators, from beginning to end. Every checker watches each story."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import PeerId
from torchbft.protocols.ledger.messages import TimeoutCertificate, decode_message
from torchbft.protocols.ledger.state import Finalized
from torchbft.sim.byzantine import ADVERSARIES
from torchbft.sim.ledgers import Ledgers, peer_names
from torchbft.sim.network import Conditions

NAMES = peer_names(7)


@contextmanager
def story(*liars: str, **options) -> Iterator[Ledgers]:
    """Seven peers; the last ones lie."""
    seats = dict(zip(reversed(NAMES), liars, strict=False))
    ledgers = Ledgers(7, liars=seats, **options)
    ledgers.cluster.start()
    yield ledgers
    assert ledgers.violations() == []


def told(ledgers: Ledgers, *txs: bytes, within: float, peers: list[PeerId] | None = None) -> None:
    """These peers (all honest ones) apply these transactions within so many seconds."""
    names = peers or list(ledgers.honest)
    assert ledgers.cluster.run(within, lambda: ledgers.applied(txs, names))


def views(ledgers: Ledgers) -> list[int]:
    """Collects the view in which each height is first finalized."""
    first: dict[int, int] = {}
    ledgers.listeners.append(
        lambda peer, effect: (
            first.setdefault(effect.height, effect.view) if isinstance(effect, Finalized) else None
        )
    )
    return first  # type: ignore[return-value]


def test_all_is_well_and_a_block_takes_three_hops() -> None:
    with story(conditions=Conditions(latency=0.05, jitter=1e-9), sync_seconds=0.0) as ledgers:
        ledgers.cluster.run(1.0)
        start = ledgers.cluster.clock.now
        for tx in (b"1", b"2", b"3", b"4"):
            ledgers.submit(tx)
        told(ledgers, b"1", b"4", within=1.0)
        assert ledgers.cluster.clock.now - start == pytest.approx(3 * 0.05, abs=0.01)
        assert {ledgers.height(name) for name in NAMES} == {1}


def test_a_lone_transaction_waits_for_the_proposal_wait_only() -> None:
    with story() as ledgers:
        ledgers.submit(b"alone")
        told(ledgers, b"alone", within=0.2 + 0.3)


def test_an_idle_ledger_makes_no_blocks_and_few_messages() -> None:
    with story() as ledgers:
        ledgers.cluster.run(60.0)
        before = ledgers.cluster.messages
        ledgers.cluster.run(60.0)
        assert {ledgers.height(name) for name in NAMES} == {0}
        assert ledgers.cluster.messages - before <= 7 * 60 / 4 + 7


def test_the_leader_dies_and_the_next_one_takes_over() -> None:
    with story() as ledgers:
        leader = ledgers.machine(NAMES[0]).leader
        ledgers.cluster.crash(leader)
        ledgers.submit(b"tx")
        rest = [name for name in NAMES if name != leader]
        told(ledgers, b"tx", within=3.0, peers=rest)
        ledgers.cluster.start(leader)
        told(ledgers, b"tx", within=2.0, peers=[leader])


def test_a_dead_leader_costs_one_time_out_in_many_heights() -> None:
    with story() as ledgers:
        first = views(ledgers)
        ledgers.cluster.crash(NAMES[3])
        rest = [name for name in NAMES if name != NAMES[3]]
        for i in range(16):
            ledgers.submit(b"%d" % i)
            told(ledgers, b"%d" % i, within=5.0, peers=rest)
        assert sum(view > 0 for view in first.values()) == 1


def test_f_dead_peers_stop_nothing_and_one_more_stops_all() -> None:
    with story() as ledgers:
        ledgers.cluster.crash(NAMES[5])
        ledgers.cluster.crash(NAMES[6])
        ledgers.submit(b"1")
        told(ledgers, b"1", within=10.0, peers=list(NAMES[:5]))
        ledgers.cluster.crash(NAMES[4])
        ledgers.submit(b"2")
        assert not ledgers.cluster.run(300.0, lambda: ledgers.applied([b"2"], NAMES[:1]))
        ledgers.cluster.start(NAMES[4])
        told(ledgers, b"2", within=130.0, peers=list(NAMES[:5]))


def test_all_lose_power_at_once_and_go_on() -> None:
    with story() as ledgers:
        ledgers.submit(b"before")
        told(ledgers, b"before", within=2.0)
        ledgers.submit(b"during")
        ledgers.cluster.run(0.25)
        for name in NAMES:
            ledgers.cluster.crash(name)
        ledgers.cluster.run(5.0)
        ledgers.cluster.start()
        ledgers.submit(b"during")
        told(ledgers, b"before", b"during", within=10.0)


def test_a_peer_away_for_seventy_blocks_catches_up_in_seconds() -> None:
    with story() as ledgers:
        away, rest = NAMES[0], list(NAMES[1:])
        ledgers.cluster.crash(away)
        for i in range(70):  # more than one batch
            ledgers.submit(b"%d" % i, rest)
            told(ledgers, b"%d" % i, within=5.0, peers=rest)
        ledgers.cluster.start(away)
        told(ledgers, b"0", b"69", within=2.0, peers=[away])


def test_a_peer_that_missed_the_last_votes_asks_and_gets_the_block() -> None:
    with story() as ledgers:
        deaf = NAMES[0]
        for name in NAMES[1:]:
            ledgers.cluster.network.degrade(name, deaf, 1.0)
        ledgers.submit(b"tx")
        told(ledgers, b"tx", within=5.0, peers=list(NAMES[1:]))
        ledgers.cluster.network.heal(Conditions())
        told(ledgers, b"tx", within=5.0, peers=[deaf])


def test_a_minority_finalizes_nothing_and_joins_again_after_the_partition() -> None:
    with story() as ledgers:
        few, many = NAMES[:2], NAMES[2:]
        ledgers.cluster.network.partition(few, many)
        ledgers.submit(b"few", few)
        ledgers.submit(b"many", many)
        told(ledgers, b"many", within=10.0, peers=list(many))
        ledgers.cluster.run(30.0)
        assert {ledgers.height(name) for name in few} == {0}
        ledgers.cluster.network.heal(Conditions())
        ledgers.submit(b"few")
        told(ledgers, b"few", b"many", within=130.0)


def test_halves_finalize_nothing_until_they_meet() -> None:
    with story() as ledgers:
        ledgers.cluster.network.partition(NAMES[:3], NAMES[3:])
        ledgers.submit(b"tx")
        ledgers.cluster.run(20.0)
        assert {ledgers.height(name) for name in NAMES} == {0}
        ledgers.cluster.network.heal(Conditions())
        told(ledgers, b"tx", within=130.0)


@pytest.mark.parametrize("loss", [0.1, 0.4])
def test_a_lossy_network_delays_and_stops_nothing(loss: float) -> None:
    with story(conditions=Conditions(loss=loss, duplicate=0.1, reorder=0.2)) as ledgers:
        for i in range(5):
            ledgers.submit(b"%d" % i)
            told(ledgers, b"%d" % i, within=200.0)


def test_clocks_that_show_different_times_do_not_matter() -> None:
    ledgers = Ledgers(7)
    for i, node in enumerate(ledgers.cluster.nodes.values()):
        node.skew, node.rate = 3600.0 * i, 1.0 + 0.02 * (i - 3)
    ledgers.cluster.start()
    for i in range(5):
        ledgers.submit(b"%d" % i)
        told(ledgers, b"%d" % i, within=10.0)
    assert ledgers.violations() == []


@pytest.mark.parametrize("liar", sorted(ADVERSARIES))
def test_two_liars_of_a_kind_stop_nothing_and_frame_nobody(liar: str) -> None:
    with story(liar, liar) as ledgers:
        for i in range(12):
            txs = [b"%c/%d" % (author, i) for author in b"abc"]
            for tx in txs:
                ledgers.submit(tx)
            told(ledgers, *txs, within=60.0)


def test_double_voters_are_convicted() -> None:
    with story("double-voter", "double-voter") as ledgers:
        ledgers.submit(b"tx")
        told(ledgers, b"tx", within=60.0)
        assert ledgers.accused == (NAMES[5], NAMES[6])


def test_equivocating_leaders_are_convicted_once_their_halves_talk() -> None:
    with story("equivocator", "equivocator") as ledgers:
        for i in range(14):
            ledgers.submit(b"%d" % i)
            told(ledgers, b"%d" % i, within=60.0)
        assert ledgers.accused == (NAMES[5], NAMES[6])


@pytest.mark.parametrize("liar", ["silent", "censoring-leader", "selective-leader", "forger"])
def test_who_leaves_no_evidence_is_not_accused(liar: str) -> None:
    with story(liar, liar) as ledgers:
        for i in range(10):
            ledgers.submit(b"a/%d" % i)
            told(ledgers, b"a/%d" % i, within=60.0)
        assert ledgers.accused == ()


def test_a_censored_author_is_heard_under_the_next_leader() -> None:
    with story("censoring-leader", "censoring-leader") as ledgers:
        for i in range(10):
            ledgers.submit(b"a/%d" % i)
            ledgers.submit(b"b/%d" % i)
            told(ledgers, b"a/%d" % i, b"b/%d" % i, within=20.0)


class TooSmall(FaultModel):
    """A wrong quorum: two of these need not share an honest member."""

    __slots__ = ()

    @property
    def quorum(self) -> int:
        return self.f + 1


def test_with_too_small_a_quorum_a_partition_forks_the_ledger_and_the_checkers_say_so() -> None:
    ledgers = Ledgers(7, faults=TooSmall(7))
    ledgers.cluster.start()
    ledgers.cluster.network.partition(NAMES[:3], NAMES[3:])
    ledgers.submit(b"left", NAMES[:3])
    ledgers.submit(b"right", NAMES[3:])
    ledgers.cluster.run(30.0)
    found = " ".join(ledgers.violations())
    assert "finalized another block at height 1" in found
    assert "bad certificate at height 1" in found
    assert "another state after height 1" in found


def test_time_out_certificates_travel_when_views_change() -> None:
    """Control for the view-change stories: they do change views by certificate."""
    seen = []
    with story() as ledgers:
        ledgers.cluster._on_message = lambda peer, data: seen.append(decode_message(data))
        ledgers.cluster.crash(ledgers.machine(NAMES[0]).leader)
        ledgers.submit(b"tx")
        ledgers.cluster.run(5.0)
    carried = [getattr(m, "justification", None) for m in seen]
    assert any(isinstance(c, TimeoutCertificate) for c in carried)
