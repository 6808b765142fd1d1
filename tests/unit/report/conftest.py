"""Run folders: one of invented traces (five honest peers, a withholder, a poisoner), one proven."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch

from torchbft.attacks import registry
from torchbft.attacks.agents.liar import builder
from torchbft.node.model import START
from torchbft.node.ordering.follower import CHAIN_LOG
from torchbft.node.storage.checkpoints import Checkpoints
from torchbft.node.storage.log import AppendLog
from torchbft.primitives.digests import payload_root, sha256
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Data, Ledger, RunSpec, Task, Training, dump_run, new_member
from torchbft.primitives.trace import (
    Accused,
    BlockFinalized,
    Evaluated,
    Phase,
    Record,
    Refusal,
    RoundEnded,
    RunEnded,
    RunStarted,
    TraceWriter,
)
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.messages import decode_finalized
from torchbft.protocols.peer import PeerMachine, application_of
from torchbft.protocols.round import interface
from torchbft.protocols.round.state import Phase as LedgerPhase
from torchbft.report.cometbft import genesis_of
from torchbft.report.replay import fields_after
from torchbft.sim.chain import ChainMaker
from torchbft.sim.cluster import Cluster, Records
from torchbft.sim.network import Conditions, Network
from torchbft.tensors.advance import advance
from torchbft.tensors.recipe import Recipe
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update

NAMES = tuple(f"peer-{letter}" for letter in "abcdefg")
WITHHOLDER, POISONER = "peer-c", "peer-f"
STARTED_AT = 1_800_000_000.0
PHASES = {
    "train": 0.3,
    "wait": 0.03,
    "commit": 0.02,
    "reveal": 0.015,
    "decide": 0.02,
    "aggregate": 0.01,
}
NAN = "holds values that are not finite"


def make_spec(names: tuple[str, ...] = NAMES, *, rounds: int = 20, signers: int = 5) -> RunSpec:
    keys = {name: SigningKey.derive(bytes(32), name) for name in names}
    voting = {name: SigningKey.derive(bytes(32), name + "/voting") for name in names}
    spec = RunSpec(
        name="digits",
        seed="11" * 32,
        members=tuple(new_member(name, keys[name], voting[name]) for name in sorted(names)),
        training=Training(rounds=rounds, inner_steps=20),
    )
    for name in sorted(names)[:signers]:
        spec = spec.signed(name, keys[name])
    return spec


def started(peer: str) -> RunStarted:
    return RunStarted(
        at=STARTED_AT, peer=peer, run_id="ab" * 32, name="digits", members=NAMES, validators=7,
        contributors=7, f=2, quorum=5, rule="arc+nnm+trimmed_mean", codec="float32",
        engine="embedded", inner_steps=20, batch_size=32, encrypted=True, parameters=38_282,
        machine="two cores", versions={"torchbft": "0.1.0"},
    )  # fmt: skip


def outcome(number: int) -> tuple[tuple[str, ...], tuple[Refusal, ...], dict[str, float]]:
    """The withholder never opens; every fourth round the poisoner sends NaN, else it is weighed."""
    refusals = [Refusal(WITHHOLDER, "unopened", "committed, did not open")]
    if number % 4 == 3:
        refusals.append(Refusal(POISONER, "malformed", NAN, "f+1 signed observations"))
    gone = {refusal.peer for refusal in refusals}
    accepted = tuple(name for name in NAMES if name not in gone)
    honest = [name for name in accepted if name != POISONER]
    weights = {name: 0.98 / len(honest) for name in honest}
    weights |= {POISONER: 0.02} if POISONER in accepted else {}
    return accepted, tuple(refusals), weights


def round_records(peer: str, number: int, *, void: bool = False) -> list[Record]:
    at, skew = STARTED_AT + 0.4 * (number + 1), 1 + 0.05 * NAMES.index(peer)
    accepted, refusals, weights = outcome(number)
    records: list[Record] = [
        Phase(at=at, round=number, name=name, seconds=length * skew)
        for name, length in PHASES.items()
    ]
    records += [
        BlockFinalized(at=at, height=3 * number + k + 1, view=0, txs=7, bytes=2000, seconds=0.01)
        for k in range(3)
    ]
    ended = RoundEnded(
        at=at, round=number, void=void, reason="4 of 5 contributions" if void else "",
        accepted=() if void else accepted, refusals=refusals, weights={} if void else weights,
        root=f"{number:064x}", blocks=3, sent_control=40_000, received_control=41_000,
        sent_payload=918_000, received_payload=900_000, payload_bytes=153_000,
        train_seconds=0.3 * skew, consensus_seconds=0.065 * skew,
    )  # fmt: skip
    loss = 2.3 * math.exp(-number / 6) + 0.08
    return [*records, ended, Evaluated(at=at, round=number, loss=loss, accuracy=1 - loss / 2.6)]


def write_peer(run_dir: Path, peer: str, records: list[Record]) -> Path:
    folder = run_dir / "peers" / peer
    folder.mkdir(parents=True, exist_ok=True)
    writer = TraceWriter(folder / "trace.jsonl")
    for record in records:
        writer.write(record)
    writer.close()
    return folder / "trace.jsonl"


def peer_records(peer: str, rounds: int, *, void: frozenset[int] = frozenset()) -> list[Record]:
    records: list[Record] = [started(peer)]
    for number in range(rounds):
        records += round_records(peer, number, void=number in void)
    if peer != POISONER:
        records.append(Accused(at=STARTED_AT, peer=POISONER, fault="malformed-payload", round=3,
                               named=True, reason=NAN))  # fmt: skip
        records.append(Accused(at=STARTED_AT, peer=WITHHOLDER, fault="unopened", round=0,
                               named=False, reason="committed, did not open"))  # fmt: skip
    return [*records, RunEnded(at=STARTED_AT + 9, status="finished", rounds=rounds, root="0" * 64)]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """``make_run(rounds=20, void={7})`` writes a run folder and gives its path."""

    def make(rounds: int = 20, *, void: frozenset[int] = frozenset()) -> Path:
        (tmp_path / "run.toml").write_text(dump_run(make_spec(rounds=rounds)))
        for peer in NAMES:
            write_peer(tmp_path, peer, peer_records(peer, rounds, void=void))
        return tmp_path

    return make


# A run folder with real logs: four peers' machines on the simulated network, a tiny model.

VERIFIED = tuple(f"peer-{letter}" for letter in "abcd")
LIAR = "peer-d"


class SimulatedRun:
    """Hosts ``PeerMachine`` s, does their payloads and models, and writes what a node would.

    ``spoilt``: rounds in which the liar's payload holds NaN. ``attack``: the agent that the liar's
    machine is given to. ``engine``: what the run file names; ``write`` has the blocks as that would
    have left them, though the simulated ledger ordered them.
    """

    def __init__(
        self, rounds: int = 3, *, spoilt: tuple[int, ...] = (), attack: str = "", seed: int = 1,
        engine: str = "embedded",
    ) -> None:  # fmt: skip
        self.spoilt = spoilt
        self.engine = engine
        self.attack = attack
        self.keys = {name: SigningKey.derive(bytes(32), name) for name in VERIFIED}
        self.voting = {name: SigningKey.derive(bytes(32), name + "/voting") for name in VERIFIED}
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4))
        self.spec = self._spec(rounds, model)
        self.recipe = Recipe.of(self.spec)
        self.start = AgreedState.initial(model, rule=self.recipe.rule)
        self.states = dict.fromkeys(VERIFIED, self.start)
        self.payloads: dict[bytes, bytes] = {}
        self.rounds: dict[bytes, int] = {}
        self.events: list[object] = []
        self.cluster = Cluster(
            VERIFIED, self._build, Network(Random(seed), Conditions()), Random(seed),
            on_effect=self._on_effect,
        )  # fmt: skip
        self.machines: dict[str, PeerMachine] = {}

    def _spec(self, rounds: int, model: torch.nn.Module) -> RunSpec:
        spec = RunSpec(
            name="tiny",
            seed="22" * 32,
            members=tuple(
                new_member(n, self.keys[n], self.voting[n], port=7000 + 10 * i)
                for i, n in enumerate(VERIFIED)
            ),
            ledger=Ledger(kind=self.engine),
            training=Training(rounds=rounds, inner_steps=2, batch_size=4),
            data=Data(samples=64),
        )
        start = AgreedState.initial(model, rule=Recipe.of(spec).rule)
        spec = msgspec.structs.replace(spec, task=Task(start_root=start.root().hex()))
        for name in VERIFIED[:3]:
            spec = spec.signed(name, self.keys[name])
        return spec

    def _build(self, name: PeerId, records: Records) -> PeerMachine:
        secret = sha256("test/secret", name.encode())
        make: Any = PeerMachine
        if name == LIAR and self.attack:
            make = builder(registry.get(self.attack), seed=bytes(32), liars=[name])
        machine = make(self.spec, name, self.voting[name], secret, records)
        self.machines[name] = machine
        return machine

    def run(self) -> None:
        self.cluster.start()
        for name in VERIFIED:
            genesis = interface.StateAdvanced(interface.GENESIS_ROUND, self.start.root())
            self.cluster.feed(PeerId(name), genesis)
        assert self.cluster.run(600.0, self._finished), "the simulated run did not finish"

    def _finished(self) -> bool:
        honest = [machine for name, machine in self.machines.items() if name != LIAR]
        phases = {machine.application.state.phase for machine in honest}
        return phases == {LedgerPhase.FINISHED}

    def _on_effect(self, peer: PeerId, effect: object, now: float) -> list[tuple[float, object]]:
        match effect:
            case interface.StartTraining():
                return [(0.01, self._trained(peer, effect.round))]
            case interface.OfferPayload():
                for other in VERIFIED:
                    if other != peer:
                        fetched = self._arrived(other, effect.round, peer, effect.payload_root)
                        self.cluster.feed(PeerId(other), fetched, 0.01)
            case interface.FetchPayload():
                return [
                    (0.01, self._arrived(peer, effect.round, effect.author, effect.payload_root))
                ]
            case interface.Advance():
                return [(0.001, self._advanced(peer, effect))]
        return []

    def _trained(self, peer: PeerId, number: int) -> object:
        spread = torch.Generator().manual_seed(1000 * number + VERIFIED.index(peer))
        layout, state = self.start.layout, self.states[peer]
        parameters = torch.randn(layout.parameter_count, generator=spread)
        if peer == LIAR and number in self.spoilt:
            parameters[3] = math.nan
        update = Update(parameters, state.float_buffers_B, state.int_buffers_I)
        payload, _ = self.recipe.codec.encode(update)
        root = payload_root(payload)
        self.payloads[root], self.rounds[root] = payload, number
        return interface.Trained(number, len(payload), root, bytes(32))

    def _arrived(self, peer: str, number: int, author: PeerId, root: bytes) -> object:
        try:
            self.recipe.codec.decode(self.payloads[root], self.start.layout)
        except DecodeError:
            return interface.PayloadRefused(number, author, root, "not-finite")
        return interface.PayloadStored(number, author, root)

    def _advanced(self, peer: PeerId, effect: interface.Advance) -> object:
        before = self.states[peer]
        ended = self.machines[peer].application.state.round_of(effect.round)
        updates = [
            (PeerId(a.author), self.recipe.codec.decode(self.payloads[a.payload_root],
                                                        before.layout))
            for a in effect.accepted
        ]  # fmt: skip
        after, _ = advance(
            before, updates, rule=self.recipe.rule, f=ended.f, outer=self.recipe.outer,
            ledger=fields_after(self.spec, before, ended),
        )  # fmt: skip
        self.states[peer] = after
        return interface.StateAdvanced(effect.round, after.root())

    def write(self, run_dir: Path) -> Path:
        """Everything as a node leaves it."""
        (run_dir / "run.toml").write_text(dump_run(self.spec))
        for name in VERIFIED:
            folder = run_dir / "peers" / name
            folder.mkdir(parents=True)
            for log, records in self.cluster.nodes[PeerId(name)].disk.read().items():
                written = AppendLog(folder / f"{log}.log")
                for record in records:
                    written.append(record)
                written.close()
            if self.engine == "cometbft":
                self._reordered(folder)
            self.start.save(folder / START)
            for root, payload in self.payloads.items():
                path = folder / "payloads" / str(self.rounds[root]) / root.hex()
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(payload)
            Checkpoints(folder / "checkpoints").save(
                Round(self.states[name].round), self.states[name].save
            )
        return run_dir

    def chain(self, peer: str = "peer-a") -> ChainMaker:
        """The same blocks as CometBFT would have made them, signed by all four."""
        application = application_of(self.spec)
        maker = ChainMaker(
            genesis_of(self.spec, application.info().last_app_hash), self.voting.values()
        )
        records = self.cluster.nodes[PeerId(peer)].disk.read()["blocks"]
        maker.drive(application, [decode_finalized(record).block.txs for record in records])
        return maker

    def _reordered(self, folder: Path) -> None:
        """Replace the embedded ledger's logs by the follower's."""
        for name in ("blocks.log", "votes.log"):
            (folder / name).unlink()
        written = AppendLog(folder / CHAIN_LOG)
        for record in self.chain().records:
            written.append(encode(record))
        written.close()


@pytest.fixture(scope="session")
def ordered_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[SimulatedRun, Path]:
    """The same as ``proven`` under CometBFT: the run and its folder; do not change it."""
    run = SimulatedRun(3, spoilt=(1,), engine="cometbft")
    run.run()
    return run, run.write(tmp_path_factory.mktemp("ordered"))


@pytest.fixture(scope="session")
def proven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of four peers and three rounds; do not change it (see ``copied``)."""
    run = SimulatedRun(3, spoilt=(1,))
    run.run()
    return run.write(tmp_path_factory.mktemp("proven"))


@pytest.fixture
def attacked(tmp_path: Path) -> Callable[[str], Path]:
    """``attacked("equivocator")``: a finished run in which one of four peers did that."""

    def make(attack: str) -> Path:
        run = SimulatedRun(3, attack=attack)
        run.run()
        return run.write(tmp_path)

    return make


@pytest.fixture
def copied(proven: Path, tmp_path: Path) -> Path:
    """A copy of ``proven`` that a test may damage."""
    return Path(shutil.copytree(proven, tmp_path / "run"))
