"""Crash and restart of a peer between any two effects: nothing is signed twice, the run goes on."""

import pytest
from round_swarm import TIMING, Peer, Swarm
from round_world import World

from torchbft.primitives.effects import Broadcast, Persist, Tick
from torchbft.primitives.errors import CorruptLogError, MisuseError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.round import interface as io
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.machine import RoundConfig, RoundMachine

STEPS = Swarm(4, rounds=2, seed=1).start().play().peers[0].steps


@pytest.mark.parametrize("step", range(STEPS))
def test_c29_a_crash_between_two_effects_is_survived(step: int) -> None:
    """After the restart the same bytes are sent (``check``), and all roots are equal."""
    swarm = Swarm(4, rounds=2, seed=1)
    swarm.peers[0].crash_after = step
    swarm.start().play().check()
    assert swarm.peers[0].life == 2
    assert swarm.peers[0].roots[1] == swarm.peers[1].roots[1]
    assert not swarm.void


class Forgetful(Peer):
    """Trains to another payload whenever it is asked again: training need not repeat itself."""

    def payload_root(self, number: int) -> bytes:
        return super().payload_root(number)[:31] + bytes([self.life])


@pytest.mark.parametrize("step", [3, 4, 5, 6, 7])
def test_a_payload_trained_again_does_not_replace_the_one_committed(step: int) -> None:
    swarm = Swarm(4, rounds=2, seed=1, liars={0: Forgetful})
    swarm.peers[0].crash_after = step
    swarm.start().play().check()


def test_all_peers_crash_together_and_go_on() -> None:
    swarm = Swarm(4, rounds=3, seed=2)
    swarm.start().run(lambda: 1 in swarm.fixed)
    for peer in swarm.peers:
        peer.crash()
        swarm.at(1.0 + 0.1 * swarm.random.random(), peer.start)
    swarm.play().check()
    assert sorted(swarm.fixed) == [0, 1, 2]


def machine(world: World, records: tuple[bytes, ...], key: SigningKey | None = None):
    application = Application(world.genesis)
    config = RoundConfig(PeerId("peer-0"), TIMING)
    key = key or world.keys["peer-0"]
    return application, RoundMachine(config, key, b"s" * 32, application, records)


def run_blocks(application: Application, *blocks: list[bytes]) -> None:
    for txs in blocks:
        application.finalize_block(application.info().last_height + 1, txs)
        application.commit()


def test_a_torn_write_between_opening_and_commitment_is_completed() -> None:
    """The log holds the opening alone: the commitment is made again, the very same."""
    world = World(4)
    ready = [world.ready(name) for name in world.names[1:]]
    application, first = machine(world, ())
    first.start(0.0)
    run_blocks(application, ready)
    first.handle(io.LedgerAdvanced(1, ()), 0.0)
    effects = first.handle(io.Trained(0, 10, b"p" * 32, b"t" * 32), 0.0)
    records = [effect.record for effect in effects if isinstance(effect, Persist)]
    kinds = [m.kind_of(m.parse(record).statement) for record in records]
    assert kinds == ["open", "commit"]
    application, second = machine(world, (world.ready("peer-0"), records[0]))
    run_blocks(application, ready)
    effects = second.start(1.0)
    assert Persist("statements", records[1]) in effects
    assert io.Submit(records[1]) in effects
    assert effects.index(Persist("statements", records[1])) < effects.index(io.Submit(records[1]))


def test_a_lost_log_halts_the_validator_instead_of_signing_twice() -> None:
    world = World(4)
    application, lost = machine(world, ())
    run_blocks(application, [world.ready(n) for n in world.names], [world.commit("peer-0", 0)])
    effects = lost.start(0.0)
    assert [type(effect) for effect in effects] == [io.Halt]
    assert "the log was lost, or the key is used twice" in effects[0].reason
    assert lost.handle(Tick(), 1.0) == []
    assert lost.deadline() is None


def test_a_record_that_is_no_statement_is_named_by_its_place() -> None:
    world = World(4)
    with pytest.raises(CorruptLogError) as caught:
        machine(world, (world.ready("peer-0"), b"junk"))
    assert "log statements" in str(caught.value)


def test_a_short_secret_is_our_own_misuse() -> None:
    world = World(4)
    with pytest.raises(MisuseError):
        RoundMachine(
            RoundConfig(PeerId("peer-0")),
            world.keys["peer-0"],
            b"short",
            Application(world.genesis),
        )


def test_root_votes_are_sent_again_after_a_restart_and_never_replaced() -> None:
    swarm = Swarm(4, rounds=2, seed=3)
    peer = swarm.peers[0]
    swarm.start().run(lambda: any(slot == "root" for _, slot in peer.said))
    peer.crash()
    peer.disk.states[0], peer.disk.at = b"another root, from another build", 0
    peer.start()
    votes = [e for e in peer.effects if isinstance(e, Broadcast)]
    assert len({vote.message for vote in votes}) == 1
