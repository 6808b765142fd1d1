"""A random ledger as a script, and the embedded engine that plays it: to compare engines with."""

from __future__ import annotations

import random
import sys
from collections import deque
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "round"))  # for ``round_world``

from round_world import World

from torchbft.primitives.abci import FinalizeResult
from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Send, Tick
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.certificates import Validator, ValidatorSet
from torchbft.protocols.ledger.machine import LedgerMachine
from torchbft.protocols.ledger.messages import Transaction
from torchbft.protocols.ledger.state import Finalized, LedgerConfig
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.messages import Status
from torchbft.protocols.round.state import LedgerState, Phase, committed

MAX_STEPS = 80
"""A run of four rounds takes 20 or so."""
LIMIT = 600.0
"""Virtual seconds for one block; with every leader dead in turn it takes ten."""


@dataclass(frozen=True)
class Step:
    """Transactions that are handed to everyone, in this order, and who fails meanwhile."""

    txs: tuple[bytes, ...]
    stays_down: str = ""
    """Is down while the block is made, and comes back after it."""
    dies_committing: str = ""
    """Dies when the block is decided and before it is committed, and comes back at once."""
    restarts: str = ""
    """Is started anew before the block."""


def bearable(fault: str, state: LedgerState) -> str:
    """The fault, unless a convict has lost its vote: of three validators none may be missing."""
    few = any(member.convicted for member in state.members)
    return "restarts" if fault == "stays_down" and few else fault


class Script:
    """Random steps that follow from the ledger's state: absent and lying members, duplicates,
    garbage, early and late items, crashes. Equal seeds and equal states give equal steps."""

    def __init__(self, world: World, seed: int) -> None:
        self._world, self._random = world, random.Random(seed)
        self._said: list[bytes] = []

    def step(self, state: LedgerState) -> Step:
        self._world.state = state
        txs = [*self._expected(state), *self._noise(state)]
        self._random.shuffle(txs)
        self._said += txs
        victim = self._random.choice(self._world.names)
        fault = self._random.choice(("", "", "", "stays_down", "dies_committing", "restarts"))
        fault = bearable(fault, state)
        return Step(tuple(txs), **({fault: victim} if fault else {}))

    def _some(self, names: tuple[str, ...], often: float = 0.85) -> tuple[str, ...]:
        return tuple(name for name in names if self._random.random() < often)

    def _expected(self, state: LedgerState) -> list[bytes]:
        world, number = self._world, state.current.number
        match Phase(state.phase):
            case Phase.READY:
                return [world.ready(name) for name in self._some(world.names)]
            case Phase.COMMIT:
                due = state.unsigned
                certificate = [world.rooted(self._author(), due.number)] if due else []
                return [*certificate, *self._window(state, "commit", world.names)]
            case Phase.OPEN:
                return self._window(state, "open", tuple(sorted(committed(state.current))))
            case Phase.ATTEST:
                return [self._attest(name, number) for name in self._some(world.names, 0.9)]
            case Phase.ROOT:
                return [world.rooted(self._author(), number)]
        return []

    def _author(self) -> str:
        return self._random.choice(self._world.names)

    def _window(self, state: LedgerState, kind: str, names: tuple[str, ...]) -> list[bytes]:
        """Items of most members, now and then two of one, and mostly closings of a quorum."""
        world, number = self._world, state.current.number
        say = world.commit if kind == "commit" else world.open
        who = self._some(names)
        items = [say(name, number) for name in who]
        if self._random.random() < 0.1:
            items.append(say(self._author(), number, b"other"))
        if self._random.random() < 0.7:
            here = {slot.author for slot in state.current.of_kind(kind)} | set(who)
            listed = tuple(sorted(here))
            items += [world.closing(name, number, kind, listed) for name in world.names[:3]]
        return items

    def _attest(self, name: str, number: int) -> bytes:
        odd = (Status.MISSING, Status.MALFORMED, Status.NONE)
        but = {self._author(): self._random.choice(odd)} if self._random.random() < 0.2 else {}
        return self._world.attest(name, number, but)

    def _noise(self, state: LedgerState) -> list[bytes]:
        world, number, author = self._world, state.current.number, self._author()
        noise = [
            b"junk",
            world.commit(author, number + 1),
            world.commit(author, number + 3),
            world.open(author, max(number - 1, 0)),
            world.closing(author, number, "commit", ()),
            world.void(author, number),
            *self._random.sample(self._said, min(2, len(self._said))),
        ]
        flipped = bytearray(world.commit(author, number))
        flipped[self._random.randrange(len(flipped))] ^= 1 << self._random.randrange(8)
        noise.append(bytes(flipped))
        return self._random.sample(noise, self._random.randrange(4))


class Embedded:
    """Validators of the embedded ledger in memory; the gate opens when all was handed in."""

    def __init__(self, world: World) -> None:
        self.world, self.now, self._open = world, 0.0, False
        self._validators = ValidatorSet(
            Validator(PeerId(name), world.keys[name].public, 1) for name in world.names
        )
        self.records: dict[str, dict[str, list[bytes]]] = {n: {} for n in world.names}
        self.machines: dict[str, LedgerMachine] = {}
        self.applications: dict[str, Application] = {}
        self.blocks: list[tuple[bytes, ...]] = []
        self.results: list[FinalizeResult] = []
        self._dying = ""
        self._inbox: deque[tuple[str, object]] = deque()
        for name in world.names:
            self._up(name)

    @property
    def told(self) -> list[object]:
        """All events of all blocks."""
        return [event for result in self.results for event in result.events]

    @property
    def state(self) -> LedgerState:
        return self.applications[next(iter(self.machines))].state

    def play(self, step: Step) -> None:
        """Order the step's transactions in one block, if any is admissible."""
        if step.restarts:
            self._down(step.restarts)
            self._up(step.restarts)
        if step.stays_down:
            self._down(step.stays_down)
        self._dying = step.dies_committing
        height = max(machine.tip.height for machine in self.machines.values())
        for tx in step.txs:
            for name in self.world.names:
                self._inbox.append((name, Transaction(tx, None)))
        self._settle()
        if any(machine.pending for machine in self.machines.values()):
            self._open = True
            self._until(height + 1)
            self._open = False
        self._dying = ""
        if step.stays_down:
            self._up(step.stays_down)
            self._until(max(machine.tip.height for machine in self.machines.values()))

    def _up(self, name: str) -> None:
        application = Application(self.world.genesis)
        application.init_chain(encode(self.world.genesis))
        machine = LedgerMachine(
            LedgerConfig(run_id=self.world.genesis.run_id, me=PeerId(name)),
            self.world.keys[name],
            self._validators,
            application,
            lambda pending: self._open,
            self.records[name],
        )
        self.machines[name], self.applications[name] = machine, application
        self._take(name, machine.start(self.now))

    def _down(self, name: str) -> None:
        del self.machines[name]
        self._inbox = deque(each for each in self._inbox if each[0] != name)

    def _take(self, name: str, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Persist):
                self.records[name].setdefault(effect.log, []).append(effect.record)
                if effect.log == "blocks" and name == self._dying:
                    self._dying = ""
                    self._down(name)
                    self._up(name)
                    return
            elif isinstance(effect, Send):
                self._inbox.append((effect.to, Received(PeerId(name), effect.message)))
            elif isinstance(effect, Broadcast):
                for other in self.world.names:
                    if other != name:
                        self._inbox.append((other, Received(PeerId(name), effect.message)))
            elif isinstance(effect, Finalized) and effect.height == len(self.blocks) + 1:
                self.blocks.append(effect.block.txs)
                self.results.append(effect.result)

    def _settle(self) -> None:
        while self._inbox:
            name, event = self._inbox.popleft()
            if name in self.machines:
                self._take(name, self.machines[name].handle(event, self.now))  # type: ignore[arg-type]

    def _until(self, height: int) -> None:
        """Let time pass until all that are up have this height."""
        end = self.now + LIMIT
        for name in list(self.machines):
            self._take(name, self.machines[name].handle(Tick(), self.now))
        self._settle()
        while any(machine.tip.height < Height(height) for machine in self.machines.values()):
            times = [at for m in self.machines.values() if (at := m.deadline()) is not None]
            self.now = max(self.now, min(times))
            assert self.now < end, "the embedded engine makes no block"
            for name in list(self.machines):
                if name in self.machines:
                    self._take(name, self.machines[name].handle(Tick(), self.now))
            self._settle()
