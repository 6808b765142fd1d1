"""RoundMachines among honest and lying peers, on virtual time."""

from round_swarm import Swarm


def test_all_honest():
    swarm = Swarm(4, rounds=4).start().play()
    swarm.check().honest_never_lost()
    assert sorted(swarm.fixed) == [0, 1, 2, 3]
    print(len(swarm.chain), swarm.now)
