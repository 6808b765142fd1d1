"""What the seeded swarm found in the round's machine, each as a test named after what happened."""

from round_swarm import Peer, Swarm

from torchbft.primitives.ids import PeerId
from torchbft.protocols.round import interface as io


class Deprived(Peer):
    """Never gets peer-1's payload, nor a copy of the agreed state."""

    def take(self, number: int, author: PeerId, root: bytes, quality: str) -> None:
        if author != "peer-1":
            super().take(number, author, root, quality)

    def take_state(self, number: int, root: bytes) -> None:
        pass

    def tell(self, event: io.Input) -> None:
        super().tell(event)
        wake = self.machine.deadline() if self.up else None
        assert wake is None or wake > self.swarm.now, "asks to be woken at once, again and again"


def test_a_peer_that_waits_for_a_copy_of_the_state_is_not_woken_all_the_time() -> None:
    """Its time to fetch a payload had passed, and stood as its deadline from then on."""
    swarm = Swarm(4, rounds=2, seed=1, liars={0: Deprived}).start()
    peer = swarm.peers[0]
    swarm.run(lambda: any(isinstance(effect, io.CatchUp) for effect in peer.effects))
    asked = swarm.now
    swarm.run(lambda: swarm.now > asked + 30.0 or all(p.finished for p in swarm.peers[1:]))
    assert not peer.finished
