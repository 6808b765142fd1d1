"""A run's chain as CometBFT ordered it, proven from the run file alone, without CometBFT.

The genesis is derived from the signed run file (``node/ordering/genesis.py``); from there on every
header, commit, set of validators, transaction and piece of evidence is checked against what came
before it (``protocols/chain/checks.py``), and the hashes that the application owes (its state, its
results, its changes of validators) against our own application, fed with the same blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from torchbft.node.ordering.answers import time_of
from torchbft.node.ordering.genesis import (
    APP_VERSION,
    GENESIS_TIME,
    MAX_BLOCK_BYTES,
    MAX_GAS,
    POWER_OF_A_SEAT,
)
from torchbft.primitives.abci import FinalizeResult, Misbehaviour
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.chain.checks import (
    Expected,
    Genesis,
    application_fault,
    expected_after,
    expected_at_start,
    first_fault,
    link_fault,
    record_fault,
)
from torchbft.protocols.chain.evidence import convict, evidence_fault, misbehaviour_in
from torchbft.protocols.chain.hashes import consensus_hash, header_hash
from torchbft.protocols.chain.messages import (
    ChainRecord,
    DuplicateVote,
    Flag,
    Validator,
    address_of,
    chain_id_of,
    decode_record,
)
from torchbft.protocols.round.application import Application
from torchbft.report.findings import Findings
from torchbft.report.logs import LogRecord


def genesis_of(run: RunSpec, app_hash: bytes) -> Genesis:
    """What the chain of a run starts from; ``app_hash`` is the application's at genesis."""
    return Genesis(
        chain_id_of(run.run_id),
        time_of(GENESIS_TIME),
        tuple(
            Validator(bytes.fromhex(member.voting), POWER_OF_A_SEAT * member.power)
            for member in run.validators
        ),
        consensus_hash(MAX_BLOCK_BYTES, MAX_GAS),
        app_hash,
        APP_VERSION,
    )


def seats_times_power(result: FinalizeResult) -> FinalizeResult:
    """The result with the engine's powers in its changes of validators, as the engine hears it."""
    updates = [
        replace(each, power=each.power * POWER_OF_A_SEAT) for each in result.validator_updates
    ]
    return replace(result, validator_updates=tuple(updates))


@dataclass(slots=True)
class CometChain:
    """``Ordered`` of CometBFT: records of all followers' logs, one per height, or a conflict."""

    run: RunSpec
    findings: Findings
    blocks: dict[int, ChainRecord] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    convicted: set[str] = field(default_factory=set)
    rivals: dict[int, list[tuple[ChainRecord, str]]] = field(default_factory=dict)
    """Other blocks of a height, and where: anybody can sign one with validators of its own."""
    _application: Application | None = None
    _expected: Expected | None = None
    _genesis: Genesis | None = None

    def names(self, at: ChainRecord) -> Mapping[bytes, PeerId]:
        """Whose the keys of a height's validators are, by address; those of keys that came later
        are known once their blocks were read."""
        known = {bytes.fromhex(member.voting): member.name for member in self.run.members}
        if self._application is not None:
            known |= self._application.names
        return {
            validator.address: PeerId(
                known.get(validator.public, f"key-{validator.public.hex()[:28]}")
            )
            for validator in at.validators
        }

    def add(self, records: Sequence[LogRecord]) -> None:
        """Check one follower's log and compare it with the others'. A log may lack heights that its
        engine never had; none may be out of order."""
        before: ChainRecord | None = None
        for told in records:
            try:
                record = decode_record(told.data)
            except DecodeError as error:
                self.findings.problem(told.place, f"is no block with its commit: {error.what}")
                return
            wrong = self._wrong(record, before)
            if wrong:
                self.findings.problem(told.place, f"block {record.header.height}: {wrong}")
                return
            self.findings.count("certificates")
            voted = sum(one.flag != Flag.ABSENT for one in record.commit.signatures)
            self.findings.count("certificate signatures", voted)
            self._compare(record, told.place)
            before = record

    def _wrong(self, record: ChainRecord, before: ChainRecord | None) -> str | None:
        height = record.header.height
        if before is not None and height <= before.header.height:
            return f"comes after block {before.header.height}"
        wrong = record_fault(record, chain_id_of(self.run.run_id))
        if wrong or before is None or height > before.header.height + 1:
            return wrong
        return link_fault(before, record)

    def _compare(self, record: ChainRecord, place: str) -> None:
        height = record.header.height
        known = self.blocks.setdefault(height, record)
        self.places.setdefault(height, place)
        if header_hash(known.header) == header_hash(record.header):
            return
        self.rivals.setdefault(height, []).append((record, place))
        guilty = sorted({one.accused for one in convict(known, record, self.names(known))})
        self.convicted.update(guilty)
        self.findings.problem(
            place,
            f"block {height} differs from the one in {self.places[height]}, both certified;"
            f" this convicts {', '.join(guilty) or 'nobody by votes of one round'}",
        )

    def begin(self, application: Application) -> None:
        self._application = application
        self._genesis = genesis_of(self.run, application.info().last_app_hash)
        self._expected = expected_at_start(self._genesis)

    def fault(self, height: int) -> str | None:
        first = (self.blocks[height], self.places[height])
        wrong = self._fault(first[0], height)
        for record, place in self.rivals.get(height, ()) if wrong else ():
            if self._fault(record, height) is None:
                self.findings.problem(first[1], f"block {height} {wrong}")
                self.blocks[height], self.places[height] = record, place
                return None
        return wrong

    def _fault(self, record: ChainRecord, height: int) -> str | None:
        assert self._genesis is not None, "begin comes first"
        assert self._expected is not None, "begin comes first"
        if height == 1:
            wrong = first_fault(record, self._genesis)
        else:
            wrong = link_fault(self.blocks[height - 1], record)
        return wrong or application_fault(record, self._expected)

    def txs(self, height: int) -> Sequence[bytes]:
        return self.blocks[height].txs

    def misbehaviour(self, height: int) -> Sequence[Misbehaviour]:
        assert self._application is not None, "begin comes first"
        members = self._application.state.members
        keys = {address_of(member.voting): member.voting for member in members}
        return misbehaviour_in(self.blocks[height], keys)

    def applied(self, height: int, result: FinalizeResult) -> None:
        assert self._expected is not None, "begin comes first"
        self._expected = expected_after(self._expected, seats_times_power(result))
        for one in self.blocks[height].evidence:
            self._evidence(one, height)

    def _evidence(self, duplicate: DuplicateVote, height: int) -> None:
        """Two votes of one slot convict whether or not anybody put them to the application."""
        at = self.blocks.get(duplicate.first.height)
        wrong = evidence_fault(duplicate, at) if at is not None else "is of a height to come"
        if wrong or at is None:
            self.findings.problem(self.places[height], f"evidence in block {height} {wrong}")
            return
        self.findings.count("double votes")
        self.convicted.add(self.names(at)[duplicate.first.address])
