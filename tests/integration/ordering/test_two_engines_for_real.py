"""CometBFT and the embedded engine, given the same random transactions, crashes and faults: the
same blocks of transactions, accepted sets and states. (With a fake engine, and many more ledgers:
``tests/unit/node/ordering/test_two_engines.py``.)
"""

from __future__ import annotations

import asyncio
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "node"))

from comet_swarm import SECONDS, free_ports, needs_cometbft
from fake_engine import until
from round_world import World
from two_engines import Embedded, Script, Step, bearable

from torchbft.node.ordering.calls import Calls, init_chain_of
from torchbft.node.ordering.cometbft import CometEngine
from torchbft.node.ordering.genesis import POWER_OF_A_SEAT, genesis_document
from torchbft.node.ordering.orderer import Orderer
from torchbft.primitives.abci import CODE_OK
from torchbft.primitives.errors import HaltError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Data, Ledger, RunSpec, Training, new_member
from torchbft.protocols.peer import CommitBlock, application_of
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.events import RoundFixed, RoundVoid

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms"), needs_cometbft]

ROUNDS = 3
FAULTS = ("", "dies_committing", "restarts", "", "stays_down", "")
"""Of the steps in turn, so that each is there however the script goes."""
MAX_STEPS = 16


class RunWorld(World):
    """A world whose members and genesis are those of a run."""

    def __init__(self, run: RunSpec, voting: dict[str, SigningKey]) -> None:
        super().__init__(len(run.members))
        assert self.names == tuple(member.name for member in run.members)
        self.keys, self.genesis = voting, application_of(run).state.genesis
        self.secrets = {key.public: key for key in voting.values()}
        self.state = application_of(run).state

    def head(self, *place: Any) -> tuple[object, ...]:
        version, _, *rest = super().head(*place)
        return (version, self.genesis.run_id, *rest)


class Member:
    """One member's application and CometBFT, as its node would run them."""

    def __init__(self, outside: Outside, name: str) -> None:
        self._outside, self._name = outside, name
        self.saved, self.full, self.dying = b"", 0, False
        self.notices: list[str] = []
        self.orderer: Orderer | None = None

    async def up(self) -> None:
        run, name = self._outside.run, PeerId(self._name)
        self.application = application_of(run)
        if self.saved:
            self.application.resume(self.saved)
        calls = Calls(
            self.application,
            init_chain_of(genesis_document(run)),
            lambda: frozenset(member.ledger_id for member in run.members),
            wait=run.ledger.proposal_wait,
            tell=self._tell,
            seat_power=POWER_OF_A_SEAT,
        )
        engine = CometEngine(
            run,
            name,
            self._outside.folder / name,
            identity=self._outside.identity[name],
            voting=self._outside.voting[name],
            notice=self.notices.append,
        )
        self.orderer = Orderer(engine, calls, lambda event: None, self.notices.append)
        await self.orderer.start()

    async def down(self) -> None:
        if self.orderer is not None:
            await self.orderer.stop()
            self.orderer = None

    def _tell(self, block: object) -> None:
        if self.dying:
            self.dying = False
            raise HaltError("dies between finalize and commit", where="test")
        assert isinstance(block, CommitBlock)
        self.application.commit()
        self.full += bool(block.txs)
        self.saved = self.application.saved()

    def hand_in(self, tx: bytes) -> bool:
        assert self.orderer is not None
        if self.application.check_tx(tx).code != CODE_OK:
            return False
        self.orderer.order(tx)
        return True


class Outside:
    """Four members under CometBFT."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        names = [f"peer-{number}" for number in range(4)]
        ports = free_ports(8)
        self.identity = {name: SigningKey.derive(b"i" * 32, name) for name in names}
        self.voting = {name: SigningKey.derive(b"v" * 32, name) for name in names}
        self.run = RunSpec(
            name="two-engines",
            seed="44" * 32,
            members=tuple(
                new_member(
                    name, self.identity[name], self.voting[name], port=port, ledger_port=ledger
                )
                for name, port, ledger in zip(names, ports[:4], ports[4:], strict=True)
            ),
            data=Data(samples=1000),
            training=Training(rounds=ROUNDS),
            ledger=Ledger(kind="cometbft"),
        )
        self.members = {name: Member(self, name) for name in names}

    def world(self) -> RunWorld:
        return RunWorld(self.run, self.voting)

    async def play(self, step: Step, full: int) -> None:
        """Hand the step's transactions to all that are up at once, as their authors do, and wait
        for the block that holds them."""
        if step.restarts:
            await self.members[step.restarts].down()
            await self.members[step.restarts].up()
        if step.stays_down:
            await self.members[step.stays_down].down()
        here = [member for member in self.members.values() if member.orderer is not None]
        if step.dies_committing:
            self.members[step.dies_committing].dying = True
        for tx in step.txs:
            assert len({member.hand_in(tx) for member in here}) == 1
        await self._reached(here, full)
        if step.stays_down:
            await self.members[step.stays_down].up()
            await self._reached([self.members[step.stays_down]], full)

    async def _reached(self, members: list[Member], full: int) -> None:
        try:
            await asyncio.wait_for(until(lambda: all(m.full >= full for m in members)), SECONDS)
        except TimeoutError:
            stand = [(m.full, m.application.info().last_height) for m in members]
            notices = {name: m.notices[-5:] for name, m in self.members.items()}
            raise AssertionError(f"no block {full}: {stand}, {notices}") from None


def test_cometbft_and_the_embedded_engine_leave_the_same_states(tmp_path: Path) -> None:
    outside = Outside(tmp_path)
    embedded, script = Embedded(outside.world()), Script(outside.world(), seed=11)
    faults: set[str] = set()

    async def story() -> None:
        for member in outside.members.values():
            await member.up()
        for number in range(MAX_STEPS):
            if embedded.state.phase == "finished":
                break
            step = script.step(embedded.state)
            victim = step.stays_down or step.dies_committing or step.restarts or "peer-1"
            fault = bearable(FAULTS[number % len(FAULTS)], embedded.state)
            step = replace(Step(step.txs), **({fault: victim} if fault else {}))
            faults.add(fault)
            embedded.play(step)
            await outside.play(step, len(embedded.blocks))
            for member in outside.members.values():
                same(member.application, embedded)

    async def main() -> None:
        try:
            await story()
        finally:
            for member in outside.members.values():
                await member.down()

    asyncio.run(main())
    assert faults == set(FAULTS)
    verdicts = {str(event.reason) for event in embedded.told if isinstance(event, RoundVoid)}
    fixed = [event for event in embedded.told if isinstance(event, RoundFixed)]
    assert fixed, f"no round was fixed; void: {verdicts}"


def same(application: Application, embedded: Embedded) -> None:
    state = application.state
    assert state == embedded.state
    assert state.digest() == embedded.state.digest()
    settled = embedded.results[-1]
    assert application.info().last_app_hash == settled.app_hash
