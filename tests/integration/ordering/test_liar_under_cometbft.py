"""A validator that signs two votes in CometBFT is banned in our run, and the run verifies."""

from pathlib import Path
from typing import Any

import pytest
from comet_swarm import needs_cometbft, two_votes
from node_swarm import LocalSwarm, run_swarm

from torchbft.node.ordering.rpc import Rpc
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.runspec import Ledger, dump_run
from torchbft.report.verify import verify

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms"), needs_cometbft]

A, LIAR = PeerId("peer-a"), PeerId("peer-d")
SIGNED_AT = Height(2)
"""Some height that is past when the evidence is handed in."""
ROUNDS = 500
"""More than come to pass: the run is stopped once a round without the liar is over."""


def private(host: Any, *names: str) -> Any:
    """What stands behind a host's private names; None before it is there."""
    for name in names:
        host = getattr(host, name, None)
    return host


def test_two_votes_in_one_slot_convict_and_the_run_is_proven(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path / "peers", rounds=ROUNDS, ledger=Ledger(kind="cometbft"))
    (tmp_path / "run.toml").write_text(dump_run(swarm.run))

    def convicted() -> list[PeerId]:
        machines = [private(swarm.hosts[name], "_machine") for name in swarm.names]
        return [
            name
            for name, machine in zip(swarm.names, machines, strict=True)
            if machine is not None
            and any(m.convicted and m.name == LIAR for m in machine.application.state.members)
        ]

    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(
            lambda: (
                (m := private(swarm.hosts[A], "_machine")) is not None
                and m.application.info().last_height > SIGNED_AT
            )
        )
        rpc: Rpc = private(swarm.hosts[A], "_orderer", "_engine", "rpc")
        block = (await rpc.block(SIGNED_AT))["block"]
        await rpc.broadcast_evidence(two_votes(swarm.keys[LIAR].voting, block))
        await swarm.until(lambda: len(convicted()) == len(swarm.names))
        ended = max(swarm.rounds(A), default=-1)
        await swarm.until(lambda: max(swarm.rounds(A), default=-1) > ended + 1)

    run_swarm(swarm, story)
    verdict = verify(tmp_path)
    assert verdict.problems == ()
    assert verdict.convicted == (LIAR,)
    assert verdict.checked["double votes"] == verdict.checked["convictions"] == 1
    assert LIAR not in verdict.rounds[-1].accepted
