"""Records of what a peer saw and did; one JSON object a line in ``trace.jsonl``.

The report reads these. They prove nothing (the ledger does); they hold times and bytes, which no
ledger may depend on. Seconds are of the peer's monotonic clock; ``at`` is UNIX time.
"""

from __future__ import annotations

from pathlib import Path

import msgspec


class Record(msgspec.Struct, frozen=True, tag_field="type", kw_only=True, omit_defaults=True):
    """Base of all trace records."""

    at: float


class RunStarted(Record, frozen=True, tag="run"):
    peer: str
    run_id: str
    name: str
    members: tuple[str, ...]
    validators: int
    contributors: int
    f: int
    quorum: int
    rule: str
    codec: str
    engine: str
    inner_steps: int
    batch_size: int
    encrypted: bool
    parameters: int
    machine: str
    versions: dict[str, str]


class BlockFinalized(Record, frozen=True, tag="block"):
    height: int
    view: int
    txs: int
    bytes: int
    seconds: float
    """From the moment this peer had something to order to the block's finalization."""


class Phase(Record, frozen=True, tag="phase"):
    """``name`` is one of train, wait, encode, commit, reveal, decide, fetch, aggregate, root."""

    round: int
    name: str
    seconds: float


class Refusal(msgspec.Struct, frozen=True):
    peer: str
    outcome: str
    reason: str
    evidence: str = ""
    """Kind of proof: transferable, f+1 signed observations, rule, or empty."""


class RoundEnded(Record, frozen=True, tag="round"):
    round: int
    void: bool
    reason: str = ""
    accepted: tuple[str, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    weights: dict[str, float] = {}
    """Share of each accepted contribution in the aggregate; 0 where a rule refused it."""
    root: str = ""
    blocks: int = 0
    """That hold transactions."""
    sent_control: int = 0
    received_control: int = 0
    sent_payload: int = 0
    received_payload: int = 0
    payload_bytes: int = 0
    train_seconds: float | None = None
    """None where this peer did not train in the round."""
    consensus_seconds: float | None = None
    """Everything of the round but training and evaluation; None where this peer did not live
    through the whole of it: it started in the middle, or copied the state that came out."""


class Evaluated(Record, frozen=True, tag="eval"):
    round: int
    loss: float
    accuracy: float | None = None
    train_loss: float | None = None


NOT_CONNECTED = "not connected"
"""Reason of a suspicion against a peer to which the writer had no connection."""


class Accused(Record, frozen=True, tag="accused"):
    peer: str
    fault: str
    round: int
    named: bool
    """True with evidence; False for a suspicion."""
    reason: str


class Notice(Record, frozen=True, tag="notice"):
    text: str
    waiting_for: tuple[str, ...] = ()


class RunEnded(Record, frozen=True, tag="end"):
    status: str
    """``finished``, ``halted`` or ``stopped``."""
    reason: str = ""
    rounds: int = 0
    root: str = ""


TraceRecord = (
    RunStarted | BlockFinalized | Phase | RoundEnded | Evaluated | Accused | Notice | RunEnded
)
_DECODER = msgspec.json.Decoder(TraceRecord)


class TraceWriter:
    """Appends records to a file; a line is written whole, so a reader may follow along."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def write(self, record: Record) -> None:
        self._file.write(msgspec.json.encode(record) + b"\n")

    def close(self) -> None:
        self._file.close()


def read_trace(path: Path) -> list[TraceRecord]:
    """All whole, valid records of a trace; a torn last line is left out."""
    records: list[TraceRecord] = []
    for line in path.read_bytes().split(b"\n") if path.exists() else []:
        try:
            if line:
                records.append(_DECODER.decode(line))
        except msgspec.DecodeError:
            continue
    return records
