"""One pass over the traces of a run folder into one ``RunView``, which every report reads.

Traces prove nothing: a liar writes what it likes into its own. So whatever peers agree on (which
contributions counted, and why) is read by plurality over the traces, and times and bytes are
reported as medians over peers, never from one peer alone. Proof is the verifier's matter.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from torchbft.primitives.errors import ConfigError, TorchbftError
from torchbft.primitives.evidence import Outcome
from torchbft.primitives.runspec import RunSpec, load_run
from torchbft.primitives.trace import (
    NOT_CONNECTED,
    Accused,
    BlockFinalized,
    Evaluated,
    Notice,
    Phase,
    Refusal,
    RoundEnded,
    RunEnded,
    RunStarted,
    TraceRecord,
)

PHASES = ("train", "wait", "encode", "commit", "reveal", "decide", "fetch", "aggregate", "root")
"""In the order of a round. ``wait`` is for the slowest member to finish training, as in any
synchronous training; what comes after it is what agreement adds."""
AGREEMENT = PHASES[2:]
VOID = "void"
"""Outcome of a contribution that nothing was wrong with, in a round that did not count."""
DOWN_WEIGHTED = 0.5
"""Share of an equal weight (1/m) below which an accepted contribution is called down-weighted."""
MAX_READ_BYTES = 256 * 1024 * 1024
"""Of one trace in one refresh; 200 rounds write about 1 MiB."""

_T = TypeVar("_T")
_DECODER = msgspec.json.Decoder(TraceRecord)


class PeerStatus(msgspec.Struct, frozen=True):
    """What a running node says of itself in ``status.json``; rewritten whole at each change."""

    at: float = 0.0
    """UNIX time of the write."""
    peer: str = ""
    phase: str = ""
    round: int = 0
    height: int = 0
    waiting_for: tuple[str, ...] = ()
    until: float | None = None
    """UNIX time at which the present wait ends by itself."""
    pid: int = 0
    connected: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Cell:
    """How one contribution ended: a cell of the peer × round matrix."""

    outcome: str
    reason: str = ""
    evidence: str = ""
    weight: float | None = None
    """Share in the aggregate; None where nobody recorded it."""
    equal_share: float = 0.0
    """1/m of this round, what a plain mean would give."""

    @property
    def accepted(self) -> bool:
        return self.outcome == Outcome.ACCEPTED

    @property
    def relative(self) -> float | None:
        """Weight over the equal share: 1 is a full voice, 0 none."""
        if self.weight is None or not self.equal_share:
            return None
        return self.weight / self.equal_share

    @property
    def down_weighted(self) -> bool:
        return self.accepted and self.relative is not None and self.relative < DOWN_WEIGHTED


Matrix = dict[str, dict[int, Cell]]
"""``matrix[peer][round]``."""


@dataclass(slots=True)
class PeerView:
    """All that one peer's trace says."""

    name: str
    started: RunStarted | None = None
    ended: RunEnded | None = None
    last_at: float = 0.0
    rounds: dict[int, RoundEnded] = field(default_factory=dict)
    phases: dict[int, dict[str, float]] = field(default_factory=dict)
    evaluations: dict[int, Evaluated] = field(default_factory=dict)
    blocks: dict[int, BlockFinalized] = field(default_factory=dict)
    accusations: list[Accused] = field(default_factory=list)
    notices: list[Notice] = field(default_factory=list)
    status: PeerStatus | None = None

    def add(self, record: TraceRecord) -> None:
        """Take in one record; a later one on the same subject replaces an earlier one."""
        self.last_at = max(self.last_at, record.at)
        match record:
            case RunStarted():
                self.started, self.ended = record, None
            case RunEnded():
                self.ended = record
            case RoundEnded():
                self.rounds[record.round] = record
            case Phase():
                times = self.phases.setdefault(record.round, {})
                times[record.name] = times.get(record.name, 0.0) + record.seconds
            case Evaluated():
                self.evaluations[record.round] = record
            case BlockFinalized():
                self.blocks[record.height] = record
            case Accused():
                self.accusations.append(record)
            case Notice():
                self.notices.append(record)


@dataclass(frozen=True, slots=True)
class RoundCost:
    """One round's times (seconds) and bytes per peer: medians over the peers that recorded it."""

    round: int
    void: bool
    train: float | None
    """None where nobody trained."""
    wait: float
    consensus: float | None
    """None where no peer lived through the whole round, so nothing was measured."""
    steps: int
    """Inner steps that the round took; the divisor of every figure per step."""
    blocks: float
    sent_control: float
    sent_payload: float
    payload: float
    """Size of one contribution."""
    phases: dict[str, float]

    @property
    def share(self) -> float:
        """Consensus as a share of training, waiting and consensus, 0 to 1."""
        whole = (self.train or 0.0) + self.wait + (self.consensus or 0.0)
        return (self.consensus or 0.0) / whole if whole else 0.0

    @property
    def seconds_per_step(self) -> float:
        return (self.consensus or 0.0) / self.steps

    @property
    def bytes_per_step(self) -> float:
        return (self.sent_control + self.sent_payload) / self.steps


@dataclass(frozen=True, slots=True)
class Accusation:
    """A peer accused of a fault: how often, in which rounds, by how many other peers' traces."""

    peer: str
    fault: str
    named: bool
    rounds: tuple[int, ...]
    accusers: tuple[str, ...]
    reason: str
    absent: bool = False
    """It contributed to no round and nobody was ever connected to it: it is away, no more."""


@dataclass(slots=True)
class RunView:
    """A run as its traces show it."""

    run_dir: Path
    peers: dict[str, PeerView]
    spec: RunSpec | None = None
    demo: dict[str, Any] = field(default_factory=dict)
    spec_problem: str = ""
    """Why the run file is not to be trusted: it cannot be read, or is not what was signed."""
    _agreed: dict[int, tuple[tuple[int, ...], RoundEnded]] = field(default_factory=dict)

    @property
    def started(self) -> RunStarted | None:
        """The description of the run that most peers recorded."""
        records = [peer.started for peer in self.peers.values() if peer.started]
        return _plurality(records, lambda r: (r.run_id, r.members)) if records else None

    @property
    def members(self) -> tuple[str, ...]:
        """Roster in order of peer id: the run file's, else what the traces say."""
        if self.spec:
            return tuple(member.name for member in self.spec.members)
        return self.started.members if self.started else tuple(sorted(self.peers))

    @property
    def last_round(self) -> int:
        return max((r for peer in self.peers.values() for r in peer.rounds), default=-1)

    def agreed(self, number: int) -> RoundEnded | None:
        """A round as most traces tell it."""
        told = [peer.rounds[number] for peer in self.peers.values() if number in peer.rounds]
        if not told:
            return None
        these = tuple(map(id, told))  # a live view asks for old rounds again and again
        if self._agreed.get(number, ((), None))[0] != these:
            # A peer may hear the signed root before it has aggregated: its record has no weights.
            told.sort(key=lambda r: not r.weights)
            self._agreed[number] = these, _plurality(told, lambda r: (r.void, r.accepted, r.root))
        return self._agreed[number][1]

    def rounds(self) -> list[RoundEnded]:
        """All recorded rounds in order, each as most traces tell it."""
        numbers = sorted({r for peer in self.peers.values() for r in peer.rounds})
        return [ended for number in numbers if (ended := self.agreed(number))]

    def matrix(self) -> Matrix:
        """``matrix[peer][round]``: how each member's contribution ended, with the reason."""
        cells: Matrix = {name: {} for name in self.members}
        for ended in self.rounds():
            for name, cell in round_cells(ended, self.members).items():
                cells.setdefault(name, {})[ended.round] = cell
        return cells

    def costs(self) -> list[RoundCost]:
        """Times and bytes of each round, medians over peers."""
        return [cost for ended in self.rounds() if (cost := self.cost(ended.round))]

    def measured(self) -> list[RoundCost]:
        """Those of rounds that counted and whose agreement was measured: what averages are of."""
        return [cost for cost in self.costs() if not cost.void and cost.consensus is not None]

    def cost(self, number: int) -> RoundCost | None:
        """Times and bytes of one round; None if nobody recorded it."""
        ended = self.agreed(number)
        if ended is None:
            return None
        told = [peer.rounds[number] for peer in self.peers.values() if number in peer.rounds]
        times = [p.phases[ended.round] for p in self.peers.values() if ended.round in p.phases]
        names = [name for name in PHASES if any(name in each for each in times)]
        return RoundCost(
            round=ended.round,
            void=ended.void,
            train=_measured(r.train_seconds for r in told),
            wait=_median(each.get("wait", 0.0) for each in times),
            consensus=_measured(r.consensus_seconds for r in told),
            steps=self.steps_per_round,
            blocks=_median(r.blocks for r in told),
            sent_control=_median(r.sent_control for r in told),
            sent_payload=_median(r.sent_payload for r in told),
            payload=_median(r.payload_bytes for r in told),
            phases={name: _median(each.get(name, 0.0) for each in times) for name in names},
        )

    @property
    def steps_per_round(self) -> int:
        """Inner optimizer steps of a round (H)."""
        if self.spec:
            return self.spec.training.inner_steps
        return max(1, self.started.inner_steps) if self.started else 1

    def accusations(self) -> list[Accusation]:
        """Accusations grouped by peer and fault; the accused peer's own trace is not heard."""
        groups: dict[tuple[str, str], list[tuple[str, Accused]]] = {}
        for observer, peer in self.peers.items():
            for accused in peer.accusations:
                if accused.peer != observer:
                    key = (accused.peer, accused.fault)
                    groups.setdefault(key, []).append((observer, accused))
        enough = min(self.one_honest, len(self.peers))
        found = [_grouped(key, told, enough) for key, told in sorted(groups.items())]
        return [replace(item, absent=self._never_there(item)) for item in found]

    def _never_there(self, item: Accusation) -> bool:
        if item.named or item.reason != NOT_CONNECTED:
            return False
        cells = [round_cells(ended, self.members).get(item.peer) for ended in self.rounds()]
        return {cell.outcome for cell in cells if cell} <= {Outcome.ABSENT, VOID}

    @property
    def one_honest(self) -> int:
        """f + 1: so many traces hold at least one honest peer's."""
        return max(1, (self.started.f if self.started else 0) + 1)

    @property
    def end(self) -> RunEnded | None:
        """How the run ended, as most peers that ended tell it."""
        ends = [peer.ended for peer in self.peers.values() if peer.ended]
        return _plurality(ends, lambda end: (end.status, end.root)) if ends else None


def _grouped(key: tuple[str, str], told: list[tuple[str, Accused]], enough: int) -> Accusation:
    """``named`` needs ``enough`` traces that say so: a liar's own trace names nobody."""
    return Accusation(
        peer=key[0],
        fault=key[1],
        named=len({observer for observer, accused in told if accused.named}) >= enough,
        rounds=tuple(sorted({accused.round for _, accused in told})),
        accusers=tuple(sorted({observer for observer, _ in told})),
        reason=Counter(accused.reason for _, accused in told).most_common(1)[0][0],
    )


def round_cells(ended: RoundEnded, members: Iterable[str]) -> dict[str, Cell]:
    """How each member's contribution to one round ended; in a void one nobody's counts."""
    share = 1.0 / len(ended.accepted) if ended.accepted else 0.0
    cells = {name: Cell(VOID, ended.reason) for name in members} if ended.void else {}
    cells |= {
        name: Cell(Outcome.ACCEPTED, "", "", ended.weights.get(name), share)
        for name in ended.accepted
    }
    for refusal in ended.refusals:
        cells[refusal.peer] = _refused(refusal, ended, share)
    return cells


def _refused(refusal: Refusal, ended: RoundEnded, share: float) -> Cell:
    weight = ended.weights.get(refusal.peer)
    return Cell(refusal.outcome, refusal.reason, refusal.evidence, weight, share)


def _median(values: Iterable[float]) -> float:
    known = list(values)
    return float(statistics.median(known)) if known else 0.0


def _measured(values: Iterable[float | None]) -> float | None:
    """The median of those that were measured, if any."""
    known = [value for value in values if value is not None]
    return _median(known) if known else None


def _plurality(records: list[_T], subject: Callable[[_T], object]) -> _T:
    """The first record of the most frequent subject; at least one record is needed."""
    most = Counter(subject(record) for record in records).most_common(1)[0][0]
    return next(record for record in records if subject(record) == most)


class Follower:
    """Reads a run folder again and again, taking in only what was appended since."""

    def __init__(self, run_dir: Path) -> None:
        self.view = RunView(run_dir, {})
        self._offsets: dict[Path, int] = {}

    def refresh(self) -> RunView:
        """The run as it stands now."""
        self._read_demo()
        for folder in sorted((self.view.run_dir / "peers").glob("*/")):
            peer = self.view.peers.setdefault(folder.name, PeerView(folder.name))
            for record in self._appended(folder / "trace.jsonl"):
                peer.add(record)
            peer.status = read_status(folder / "status.json") or peer.status
        self._read_spec()
        return self.view

    def _read_spec(self) -> None:
        view = self.view
        if view.spec is not None and not view.spec_problem:
            return
        view.spec_problem = ""
        try:
            view.spec = load_run(view.run_dir / "run.toml")
            view.spec.check_signed()
        except TorchbftError as error:
            view.spec_problem = f"{error}; {error.hint}" if error.hint else str(error)
            return
        if view.started and view.started.run_id != view.spec.run_id.hex():
            view.spec_problem = (
                f"the run file's id is {view.spec.run_id.hex()[:16]}…, but the peers here took part"
                f" in {view.started.run_id[:16]}…: it was changed after they had started"
            )

    def _read_demo(self) -> None:
        path = self.view.run_dir / "demo.json"
        try:
            found = msgspec.json.decode(path.read_bytes())
        except (OSError, msgspec.DecodeError):
            return
        self.view.demo = found if isinstance(found, dict) else {}

    def _appended(self, path: Path) -> Iterable[TraceRecord]:
        try:
            with path.open("rb") as file:
                file.seek(self._offsets.get(path, 0))
                data = file.read(MAX_READ_BYTES)
        except OSError:
            return
        whole = data[: data.rfind(b"\n") + 1]  # a torn last line is read when it is whole
        self._offsets[path] = self._offsets.get(path, 0) + len(whole)
        for line in whole.splitlines():
            try:
                yield _DECODER.decode(line)
            except msgspec.DecodeError:
                continue


def read_status(path: Path) -> PeerStatus | None:
    """A node's own word on what it does, or None where there is none."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=PeerStatus)
    except (OSError, msgspec.DecodeError):
        return None


def gather(run_dir: Path) -> RunView:
    """All traces of a run folder. Raises ConfigError if there is no run in it."""
    if not (run_dir / "peers").is_dir() and not (run_dir / "run.toml").is_file():
        raise ConfigError(
            "holds no run (neither run.toml nor peers/)",
            where=str(run_dir),
            hint="name the folder that holds run.toml",
        )
    return Follower(run_dir).refresh()
