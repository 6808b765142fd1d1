"""Reads what peers left on disk, distrusting every byte: logs record by record, payloads whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from torchbft.node.storage.log import HEAD_BYTES, MAGIC, read_log
from torchbft.node.storage.payloads import INCOMING, PASSING
from torchbft.primitives.digests import DIGEST_BYTES, payload_root
from torchbft.primitives.errors import DecodeError, StorageError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.ledger.certificates import (
    check_certificate,
    check_timeouts,
)
from torchbft.protocols.ledger.messages import (
    Kind,
    Prepared,
    Proposal,
    SignerState,
    Timeout,
    TimeoutCertificate,
    Vote,
    decode_vote_record,
    vote_is_signed,
)
from torchbft.protocols.round.messages import parse
from torchbft.report.findings import Findings
from torchbft.report.sets import Sets

Publics = Callable[[str], Iterable[bytes]]
"""The voting keys that a member has or had."""


@dataclass(frozen=True, slots=True)
class LogRecord:
    """A record of a log and its place, for problems: file, number, first byte."""

    place: str
    data: bytes


def log_records(path: Path, findings: Findings) -> Iterator[LogRecord]:
    """The records of a log up to the first damage, which becomes a problem. None if no file."""
    if not path.exists():
        return
    offset = len(MAGIC)
    try:
        for index, data in enumerate(read_log(path, strict=True)):
            findings.count("log records")
            yield LogRecord(f"{path}, record {index} (byte {offset})", data)
            offset += HEAD_BYTES + len(data) + DIGEST_BYTES
    except StorageError as error:
        findings.problem(error.where or str(path), error.what)


def check_votes(
    path: Path, run: RunSpec, sets: Sets, findings: Findings
) -> list[TimeoutCertificate]:
    """Check the log of a validator's own votes; gives the time-outs that it holds."""
    held: list[TimeoutCertificate] = []
    for record in log_records(path, findings):
        try:
            said = decode_vote_record(record.data)
        except DecodeError as error:
            findings.problem(record.place, f"is no record of votes: {error.what}")
            continue
        if isinstance(said, SignerState):
            wrong = None if said.run_id == run.run_id else "belongs to another run"
        elif isinstance(said, Prepared):
            validators = sets.at(said.certificate.height)
            wrong = check_certificate(said.certificate, Kind.PREPARE, validators, run.run_id)
        else:
            wrong = _wrong_vote(said, sets, run.run_id, held)
        if wrong:
            findings.problem(record.place, wrong)
        else:
            findings.count("votes")
    return held


def _wrong_vote(
    said: Vote | Proposal | Timeout,
    sets: Sets,
    run_id: bytes,
    held: list[TimeoutCertificate],
) -> str | None:
    vote = said if isinstance(said, Vote) else said.vote
    validators = sets.at(vote.height)
    public = validators.publics.get(PeerId(vote.author))
    if public is None or not vote_is_signed(public, run_id, vote):
        return f"holds a vote that {vote.author} did not sign"
    if isinstance(said, Proposal) and said.justification is not None:
        held.append(said.justification)
        return check_timeouts(said.justification, validators, run_id)
    return None


def check_statements(path: Path, run: RunSpec, publics: Publics, findings: Findings) -> None:
    """Check the log of round statements: each signed by its author, for this run."""
    for record in log_records(path, findings):
        wrong = wrong_transaction(record.data, run, publics)
        if wrong:
            findings.problem(record.place, wrong)
        else:
            findings.count("statements")


def wrong_transaction(tx: bytes, run: RunSpec, publics: Publics) -> str | None:
    """Why a transaction is not a statement that a member signed for this run; None if it is."""
    try:
        parsed = parse(tx)
    except DecodeError as error:
        return f"is no statement: {error.what}"
    statement = parsed.statement
    if statement.run_id != run.run_id:
        return "is a statement of another run"
    if not any(parsed.signed_by(public) for public in publics(statement.author)):
        return f"is a statement that {statement.author} did not sign"
    return None


def check_payloads(folder: Path, findings: Findings) -> dict[bytes, Path]:
    """Hash every stored payload of a peer; gives those whose bytes match their name."""
    good: dict[bytes, Path] = {}
    for path in sorted(folder.glob("*/*")):
        if path.parent.name in (INCOMING, PASSING):
            continue
        try:
            root = payload_root(path.read_bytes())
        except OSError as error:
            findings.problem(str(path), f"cannot be read ({error.strerror})")
            continue
        if root.hex() != path.name:
            findings.problem(str(path), f"its bytes have the root {root.hex()[:16]}…, not its name")
            continue
        findings.count("payload files")
        good[root] = path
    return good
