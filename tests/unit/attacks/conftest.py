"""Seven whole peers in virtual time, some of them agents, with every checker beside them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from torchbft import attacks
from torchbft.attacks.agents.agent import Agent
from torchbft.primitives.ids import PeerId
from torchbft.sim.liars import BuildMachine, agent
from torchbft.sim.network import Conditions
from torchbft.sim.peers import Peers, run_of


class Attacked(Peers):
    """Peers of whom some attack, on a good network."""

    def __init__(self, names: list[str], rounds: int, liars: dict[PeerId, BuildMachine]) -> None:
        conditions = Conditions(latency=0.005, jitter=0.002)
        super().__init__(run_of(names, rounds=rounds), liars=liars, conditions=conditions)

    @property
    def named(self) -> dict[PeerId, set[str]]:
        return self.accusations.named

    @property
    def suspected(self) -> dict[PeerId, set[str]]:
        return self.accusations.suspected

    def go(self, seconds: float = 400.0) -> bool:
        """Run until every honest peer is finished or halted; whether all did."""
        self.start()
        return self.cluster.run(
            seconds, lambda: all(n in self.finished or n in self.halted for n in self.honest)
        )


@pytest.fixture
def swarm() -> Callable[..., Attacked]:
    def make(
        attack: str = "",
        *,
        rounds: int = 6,
        peers: int = 7,
        liars: tuple[str, ...] = ("peer-2", "peer-5"),
        strength: float | None = None,
    ) -> Attacked:
        names = [f"peer-{i}" for i in range(peers)]
        if not attack:
            return Attacked(names, rounds, {})
        kind = attacks.get(attack)
        assert issubclass(kind, Agent)
        seats = tuple(PeerId(name) for name in liars)
        build = agent(kind, strength)(b"t" * 32, seats)
        return Attacked(names, rounds, dict.fromkeys(seats, build))

    return make
