"""What a node writes down for people: the trace of each round, and its present status.

Times are of the event loop's clock; ``at`` is UNIX time. Nothing here is agreed or signed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from torchbft.node.transports.metering import Meter, Plane, Traffic
from torchbft.primitives import trace
from torchbft.primitives.evidence import Outcome
from torchbft.primitives.ids import PeerId
from torchbft.protocols.peer import BlockDone
from torchbft.protocols.round.events import (
    CommitmentsClosed,
    MemberOutcome,
    OpeningsClosed,
    RoundFixed,
    RoundVoid,
)
from torchbft.tensors.advance import Advanced

STATUS_SECONDS = 0.25
"""The status file is rewritten at most so often."""
ROUNDS_KEPT = 4
"""Open accounts of rounds: the last, the current and the next, and a spare."""

MARKS = ("start", "trained", "heard", "commit", "reveal", "decide", "fetch", "aggregate", "root")
"""Moments of a round in order. The phase named like a moment ends there; before ``trained`` lie
``train`` (the trainer's own measure of its inner steps) and ``encode`` (the rest: state handed
over, payload encoded and stored). ``wait`` ends when the last counted commitment was heard: any
synchronous training waits for its slowest member, so it is no part of agreement."""
AGREEMENT = ("encode", "commit", "reveal", "decide", "fetch", "aggregate", "root")


@dataclass(slots=True)
class _Account:
    """One round as this peer lived it."""

    marks: dict[str, float] = field(default_factory=dict)
    evaluation: float = 0.0
    training: float = 0.0
    blocks: int = 0
    payload_bytes: int = 0
    accepted: tuple[str, ...] = ()
    outcomes: tuple[MemberOutcome, ...] = ()
    advanced: Advanced | None = None

    def measured(self, *, void: bool) -> bool:
        """Whether this peer lived through the round: its costs are those of the whole round."""
        needed = ("start",) if void else ("start", "commit", "reveal", "decide", "fetch", "root")
        return all(mark in self.marks for mark in needed)

    def phases(self) -> dict[str, float]:
        """Seconds per phase; a moment that never came takes no time."""
        spans: dict[str, float] = {}
        names = {"trained": "encode", "heard": "wait"}
        before = self.marks.get("start")
        for mark in MARKS[1:]:
            at = self.marks.get(mark)
            if at is not None and before is not None:
                spans[names.get(mark, mark)] = max(at - before, 0.0)
                before = max(at, before)
        if "encode" in spans:
            here = max(spans["encode"] - self.evaluation, 0.0)
            spans["train"] = min(self.training, here)
            spans["encode"] = here - spans["train"]
        return spans


class Chronicle:
    """Writes ``trace.jsonl`` and ``status.json`` of one peer."""

    def __init__(self, folder: Path, peer: str, meter: Meter) -> None:
        before = trace.read_trace(folder / "trace.jsonl")
        self._told = {record.round for record in before if isinstance(record, trace.RoundEnded)}
        self._writer = trace.TraceWriter(folder / "trace.jsonl")
        self._status_path, self._peer, self._meter = folder / "status.json", peer, meter
        self._accounts: dict[int, _Account] = {}
        self._evaluation = 0.0
        self._before = (Traffic(), Traffic())
        self._wrote_status = 0.0
        self.height = 0
        self.status: dict[str, object] = {}

    def write(self, record: trace.Record) -> None:
        """Append a record to the trace. A disk that refuses costs the record and nothing else:
        what must last is in the logs, which stop the node."""
        with suppress(OSError):
            self._writer.write(record)

    def notice(self, text: str, waiting_for: Iterable[str] = ()) -> None:
        """A line for the trace and for the node's own log."""
        with suppress(OSError):
            print(text, flush=True)
        self.write(trace.Notice(at=time.time(), text=text, waiting_for=tuple(waiting_for)))

    def _account(self, round_: int) -> _Account:
        """The account of a round; that of a round long past is not kept."""
        account = self._accounts.setdefault(round_, _Account())
        for old in sorted(self._accounts)[:-ROUNDS_KEPT]:
            del self._accounts[old]
        return account

    def mark(self, round_: int, moment: str, now: float) -> None:
        """Note the first time that a moment of a round comes."""
        account = self._account(round_)
        account.marks.setdefault(moment, now)
        if moment == "trained":
            account.evaluation, self._evaluation = self._evaluation, 0.0

    def contributed(self, round_: int, payload_bytes: int, training: float) -> None:
        """The trainer handed over a payload after so many seconds of inner steps."""
        account = self._account(round_)
        account.payload_bytes, account.training = payload_bytes, training

    def evaluated(
        self,
        round_: int,
        loss: float,
        accuracy: float | None,
        train_loss: float | None,
        seconds: float,
    ) -> None:
        """The trainer measured the agreed model; its time is no part of training."""
        self._evaluation += seconds
        self.write(
            trace.Evaluated(
                at=time.time(), round=round_, loss=loss, accuracy=accuracy, train_loss=train_loss
            )
        )

    def block(self, done: BlockDone, current: int, heard_at: float | None, now: float) -> None:
        """A block was finalized while round ``current`` was being decided."""
        self.height = done.height
        self._account(current).blocks += done.txs > 0  # an engine outside makes empty ones, too
        self.write(
            trace.BlockFinalized(
                at=time.time(),
                height=done.height,
                view=done.view,
                txs=done.txs,
                bytes=done.size,
                seconds=done.seconds,
            )
        )
        for event in done.events:
            if isinstance(event, CommitmentsClosed):
                self.mark(event.round, "heard", heard_at if heard_at is not None else now)
                self.mark(event.round, "commit", now)
            elif isinstance(event, OpeningsClosed):
                self.mark(event.round, "reveal", now)
            elif isinstance(event, RoundFixed):
                self.mark(event.round, "decide", now)
                account = self._account(event.round)
                account.accepted = tuple(item.author for item in event.accepted)
                account.outcomes = event.outcomes
            elif isinstance(event, RoundVoid):
                self._account(event.round).outcomes = event.outcomes

    def decided(self, round_: int, accepted: Iterable[str]) -> None:
        """Who counted in a round that was fixed before this start, and whose block is not seen."""
        account = self._account(round_)
        account.accepted = account.accepted or tuple(accepted)

    def aggregated(self, round_: int, advanced: Advanced) -> None:
        self._account(round_).advanced = advanced

    def outcome(self, round_: int, peer: str) -> tuple[bool, str]:
        """Whether a peer's contribution counted, and the reason code."""
        account = self._account(round_)
        found = next((o for o in account.outcomes if o.peer == peer), None)
        return peer in account.accepted, found.reason if found is not None else ""

    def round_ended(self, round_: int, now: float, *, root: bytes = b"", void: str = "") -> None:
        """Write a round's record, once."""
        account = self._account(round_)
        if round_ in self._told:
            return
        self._told.add(round_)
        whole = account.measured(void=bool(void))
        phases = account.phases() if whole else {}
        for name, seconds in phases.items():
            self.write(trace.Phase(at=time.time(), round=round_, name=name, seconds=seconds))
        control, data = self._meter.total(Plane.CONTROL), self._meter.total(Plane.PAYLOAD)
        was_control, was_data = self._before
        self._before = (control, data)
        weights: Mapping[PeerId, float] = account.advanced.weights if account.advanced else {}
        self.write(
            trace.RoundEnded(
                at=time.time(),
                round=round_,
                void=bool(void),
                reason=void,
                accepted=() if void else account.accepted,
                refusals=_refusals(account),
                weights={str(peer): share for peer, share in weights.items()},
                root=root.hex(),
                blocks=account.blocks,
                sent_control=control.sent - was_control.sent,
                received_control=control.received - was_control.received,
                sent_payload=data.sent - was_data.sent,
                received_payload=data.received - was_data.received,
                payload_bytes=account.payload_bytes,
                train_seconds=phases.get("train"),
                consensus_seconds=sum(phases.get(name, 0.0) for name in AGREEMENT)
                if whole
                else None,
            )
        )

    def show(self, *, force: bool = False, **fields: object) -> None:
        """Update ``status.json``; the file is replaced whole, and not too often."""
        self.status.update(fields)
        now = time.monotonic()
        if not force and now < self._wrote_status + STATUS_SECONDS:
            return
        self._wrote_status = now
        content = {
            "at": time.time(),
            "peer": self._peer,
            "pid": os.getpid(),
            "height": self.height,
            **self.status,
        }
        draft = self._status_path.with_suffix(".part")
        with suppress(OSError):
            draft.write_bytes(msgspec.json.encode(content))
            draft.replace(self._status_path)

    def close(self) -> None:
        self._writer.close()


def _refusals(account: _Account) -> tuple[trace.Refusal, ...]:
    by_ledger = [
        trace.Refusal(o.peer, str(o.outcome), o.reason, o.proof)
        for o in account.outcomes
        if o.outcome != Outcome.ACCEPTED
    ]
    refused: Sequence[str] = account.advanced.refused_by_norm if account.advanced else ()
    by_rule = [
        trace.Refusal(peer, str(Outcome.REJECTED_BY_RULE), "norm-outlier", "rule")
        for peer in refused
    ]
    return (*by_ledger, *by_rule)
