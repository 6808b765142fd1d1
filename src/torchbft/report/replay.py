"""Replays a run from its logs: the chain, the rounds, and the model of every signed root.

Trusts nobody: blocks count by their certificates, statements by their signatures, payloads by the
roots on the ledger, and the model by aggregating it again from the start state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from torchbft.node.model import START
from torchbft.node.storage.checkpoints import Checkpoints
from torchbft.primitives.abci import FinalizeResult, Misbehaviour
from torchbft.primitives.errors import DecodeError, StorageError, TorchbftError
from torchbft.primitives.evidence import Evidence, Fault, Outcome
from torchbft.primitives.ids import Height, PeerId, Round
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.ledger.certificates import (
    convict,
    verify_finalized,
)
from torchbft.protocols.ledger.messages import (
    FinalizedBlock,
    TimeoutCertificate,
    block_digest,
    decode_finalized,
)
from torchbft.protocols.ledger.state import GENESIS_DIGEST
from torchbft.protocols.peer import application_of, checks_of
from torchbft.protocols.round.admissible import check_equivocation
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.events import (
    Convicted,
    MemberOutcome,
    RootSigned,
    RoundFixed,
    RoundVoid,
)
from torchbft.protocols.round.outcomes import OBSERVATIONS, check_bad_opening, check_malformed
from torchbft.protocols.round.state import Accepted, RoundState
from torchbft.report.findings import Findings, MemberResult, VerifiedRound
from torchbft.report.logs import LogRecord, wrong_transaction
from torchbft.report.sets import Sets
from torchbft.tensors.advance import LedgerFields, advance
from torchbft.tensors.recipe import Recipe
from torchbft.tensors.state import AgreedState


class Ordered(Protocol):
    """The blocks of all logs together, whatever ordered them: one per height, or a conflict."""

    convicted: set[str]
    places: dict[int, str]
    """Heights that some log holds, and where."""

    def add(self, records: Sequence[LogRecord]) -> None:
        """Check one peer's log of blocks and compare it with the others'."""

    def begin(self, application: Application) -> None:
        """What comes after is read in order of height, along with this application."""

    def fault(self, height: int) -> str | None:
        """Why the block does not follow from those before it and what the application made of
        them."""

    def txs(self, height: int) -> Sequence[bytes]: ...

    def misbehaviour(self, height: int) -> Sequence[Misbehaviour]:
        """Double votes that the engine reported to the application with the block."""

    def applied(self, height: int, result: FinalizeResult) -> None:
        """Take what the application made of the block."""


@dataclass(slots=True)
class Chain:
    """``Ordered`` of the embedded ledger."""

    run_id: bytes
    sets: Sets
    findings: Findings
    blocks: dict[int, FinalizedBlock] = field(default_factory=dict)
    places: dict[int, str] = field(default_factory=dict)
    conflicts: list[tuple[FinalizedBlock, FinalizedBlock, str]] = field(default_factory=list)
    convicted: set[str] = field(default_factory=set)
    app_hash: bytes = b""
    _by: dict[int, bytes] = field(default_factory=dict)
    """Digest of the set by which a block's certificate was checked: the newest known then."""

    def add(self, records: Sequence[LogRecord]) -> None:
        before: FinalizedBlock | None = None
        for record in records:
            try:
                finalized = decode_finalized(record.data)
            except DecodeError as error:
                self.findings.problem(record.place, f"is no finalized block: {error.what}")
                return
            wrong = self._wrong(finalized, before)
            if wrong:
                self.findings.problem(record.place, wrong)
                return
            self.findings.count("certificates")
            self.findings.count("certificate signatures", len(finalized.certificate.signers))
            self._compare(finalized, record.place)
            before = finalized

    def _wrong(self, finalized: FinalizedBlock, before: FinalizedBlock | None) -> str | None:
        wrong = verify_finalized(finalized, self.sets.at(finalized.block.height), self.run_id)
        if wrong:
            return f"block {finalized.block.height}: {wrong}"
        if before is None:
            return None
        if finalized.block.height != before.block.height + 1:
            return f"block {finalized.block.height} comes after block {before.block.height}"
        follows = finalized.block.previous == block_digest(before.block)
        return None if follows else f"block {finalized.block.height} does not follow the one before"

    def _compare(self, finalized: FinalizedBlock, place: str) -> None:
        height = finalized.block.height
        known = self.blocks.setdefault(height, finalized)
        self.places.setdefault(height, place)
        if known is finalized:
            self._by[height] = self.sets.at(height).digest
            self.sets.follow(finalized.block)
        elif block_digest(known.block) != block_digest(finalized.block):
            self.conflicts.append((known, finalized, place))

    def convict(self, timeouts: Sequence[TimeoutCertificate]) -> None:
        """Say who is to blame where two certified blocks of one height differ."""
        for known, other, place in self.conflicts:
            height = known.block.height
            held = [t for t in timeouts if t.height == height]
            proof = convict(known, other, held, self.sets.at(height), self.run_id)
            guilty = sorted({evidence.accused for evidence in proof})
            self.convicted.update(guilty)
            self.findings.problem(
                place,
                f"block {height} differs from the one in {self.places[height]}, both certified;"
                f" this convicts {', '.join(guilty) or 'nobody with the time-outs at hand'}",
            )

    def begin(self, application: Application) -> None:
        self.app_hash = application.info().last_app_hash

    def fault(self, height: int) -> str | None:
        finalized, before = self.blocks[height], self.blocks.get(height - 1)
        previous = block_digest(before.block) if before else GENESIS_DIGEST
        if finalized.block.previous != previous:
            return "does not follow the one before"
        if finalized.block.app_hash != self.app_hash:
            return "carries a false application hash"
        validators = self.sets.at(height)
        if validators.digest == self._by[height]:
            return None
        return verify_finalized(finalized, validators, self.run_id)

    def txs(self, height: int) -> Sequence[bytes]:
        return self.blocks[height].block.txs

    def misbehaviour(self, height: int) -> Sequence[Misbehaviour]:
        return ()

    def applied(self, height: int, result: FinalizeResult) -> None:
        self.app_hash = result.app_hash
        self.sets.follow(self.blocks[height].block)


@dataclass(slots=True)
class Models:
    """The agreed states, aggregated again from the start."""

    run: RunSpec
    recipe: Recipe
    payloads: dict[bytes, Path]
    checkpoints: list[Path]
    findings: Findings
    state: AgreedState | None = None

    def begin(self, starts: Sequence[Path]) -> None:
        """Load the start state: one for all peers, and the one that the run file names."""
        roots: dict[Path, str] = {}
        for path in starts:
            try:
                roots[path] = AgreedState.load(path).root().hex()
                self.findings.count("start states")
            except TorchbftError as error:
                self.findings.problem(str(path), error.what)
        if not starts:
            self.findings.problem(START, "no peer kept the start state, so nothing can be redone")
        if not roots:
            return
        named = self.run.task.start_root
        right = named or Counter(roots.values()).most_common(1)[0][0]
        what = "is not the start that the run file names" if named else "differs from most starts"
        for path in (path for path, root in roots.items() if root != right):
            self.findings.problem(str(path), what)
        chosen = next((path for path, root in roots.items() if root == right), None)
        self.state = AgreedState.load(chosen or next(iter(roots)))

    def redo(self, ended: RoundState, accepted: Sequence[Accepted], signed: bytes) -> None:
        """Aggregate a round again; its root must be the signed one."""
        if self.state is None:
            return
        where = f"round {ended.number}"
        after: AgreedState | None = None
        try:
            after = self._advanced(self.state, ended, accepted)
        except StorageError as error:
            after = self._from_checkpoint(ended.number, signed)
            if after is None:
                self.findings.problem(where, error.what)
        except TorchbftError as error:
            self.findings.problem(where, f"cannot be aggregated again: {error}")
        self.state = after
        if after is None:
            return
        if after.root() != signed:
            self.findings.problem(
                where,
                f"aggregating again gives root {after.root().hex()[:16]}…,"
                f" but a quorum signed {signed.hex()[:16]}…",
            )
        self._check_saved(ended.number, signed)

    def _check_saved(self, number: int, signed: bytes) -> None:
        """A state that a peer saved after a round is what people take as the result: it must have
        the root that the quorum signed."""
        for folder in self.checkpoints:
            path = Checkpoints(folder).path(Round(number + 1))
            if not path.exists():
                continue
            try:
                root = AgreedState.load(path).root()
            except TorchbftError as error:
                self.findings.problem(str(path), error.what)
                continue
            self.findings.count("saved states")
            if root != signed:
                self.findings.problem(str(path), "does not have the root that a quorum signed")

    def _advanced(
        self, before: AgreedState, ended: RoundState, accepted: Sequence[Accepted]
    ) -> AgreedState:
        updates = []
        for item in accepted:
            data = self._payload(item)
            updates.append((PeerId(item.author), self.recipe.codec.decode(data, before.layout)))
        after, _ = advance(
            before,
            updates,
            rule=self.recipe.rule,
            f=ended.f,
            outer=self.recipe.outer,
            ledger=fields_after(self.run, before, ended),
        )
        self.findings.count("rounds aggregated again")
        return after

    def why_malformed(self, item: Accepted) -> str | None:
        """What is wrong with a payload that f+1 attested as malformed; None if nothing is, and
        empty where nobody kept it."""
        path = self.payloads.get(item.payload_root)
        if self.state is None:
            return ""
        most = self.recipe.codec.max_bytes(self.state.layout)
        if item.payload_length > most:
            return f"{item.payload_length} bytes where an update has at most {most}"
        if path is None:
            return ""
        try:
            self.recipe.codec.decode(path.read_bytes(), self.state.layout)
        except DecodeError as error:
            return error.what
        return None

    def _payload(self, item: Accepted) -> bytes:
        path = self.payloads.get(item.payload_root)
        if path is None:
            raise StorageError(f"nobody kept the payload of {item.author}")
        data = path.read_bytes()
        if len(data) != item.payload_length:
            raise DecodeError(f"the payload of {item.author} has another length than it opened")
        return data

    def _from_checkpoint(self, number: int, signed: bytes) -> AgreedState | None:
        """Where payloads were collected, a kept state with the signed root does instead."""
        for folder in self.checkpoints:
            path = Checkpoints(folder).path(Round(number + 1))
            try:
                state = AgreedState.load(path)
            except TorchbftError:
                continue
            if state.root() == signed:
                self.findings.count("rounds taken from a signed checkpoint")
                return state
        return None


def fields_after(run: RunSpec, before: AgreedState, ended: RoundState) -> LedgerFields:
    """The ledger's part of the agreed state after a fixed round."""
    agreed = ended.agreed
    assert agreed is not None, "a fixed round has its ledger fields"
    return LedgerFields(
        round=ended.number + 1,
        inner_step=before.inner_step + run.training.inner_steps,
        pass_index=agreed.pass_index,
        cursor=agreed.cursor,
        membership_digest=agreed.membership_digest,
        credit_digest=agreed.credit_digest,
    )


@dataclass(slots=True)
class Replay:
    """Feeds the chain to the application and checks what comes out."""

    run: RunSpec
    models: Models
    findings: Findings
    rounds: dict[int, VerifiedRound] = field(default_factory=dict)
    convicted: set[str] = field(default_factory=set)
    fixed: dict[int, tuple[RoundState, tuple[Accepted, ...]]] = field(default_factory=dict)
    application: Application = field(init=False)

    def __post_init__(self) -> None:
        self.application = application_of(self.run)

    def publics(self, name: str) -> tuple[bytes, ...]:
        """The voting keys that a member has or had by the block that was read last."""
        return tuple(public for public, _, _ in self.application.state.keys_of(name))

    def through(self, chain: Ordered) -> None:
        """All blocks from the first on, as far as they go without a gap."""
        application = self.application
        chain.begin(application)
        for height in range(1, len(chain.places) + 1):
            if height not in chain.places:
                self.findings.problem(f"block {height}", "no log holds it, but later ones are here")
                return
            place, wrong = chain.places[height], chain.fault(height)
            if wrong:
                self.findings.problem(place, f"block {height} {wrong}")
                return
            txs = chain.txs(height)
            self._transactions(txs, place)
            result = application.finalize_block(Height(height), txs, chain.misbehaviour(height))
            application.commit()
            chain.applied(height, result)
            self.findings.count("blocks")
            for event in result.events:
                self._event(event, application.state.round_of, place)

    def _transactions(self, txs: Sequence[bytes], place: str) -> None:
        for index, tx in enumerate(txs):
            wrong = wrong_transaction(tx, self.run, self.publics)
            if wrong:
                self.findings.problem(place, f"transaction {index} {wrong}")
            else:
                self.findings.count("transactions")

    def _event(
        self, event: object, round_of: Callable[[int], RoundState | None], place: str
    ) -> None:
        match event:
            case RoundFixed():
                ended = round_of(event.round)
                assert ended is not None, "a round that was just fixed is current or previous"
                self._round_fixed(event, ended, place)
            case RoundVoid():
                self.fixed.pop(event.round, None)
                results = self._results(event.outcomes, round_of(event.round), place)
                self.rounds[event.round] = VerifiedRound(
                    event.round, True, event.reason, (), results
                )
                self._evidence(event.outcomes, round_of(event.round), place)
            case RootSigned():
                self._root_signed(event, place)
            case Convicted():
                self.convicted.add(event.peer)
                self._convicted(event.evidence, place)

    def _round_fixed(self, event: RoundFixed, ended: RoundState, place: str) -> None:
        self.fixed[event.round] = (ended, event.accepted)
        accepted = tuple(item.author for item in event.accepted)
        results = self._results(event.outcomes, ended, place)
        self.rounds[event.round] = VerifiedRound(event.round, False, "", accepted, results)
        self.findings.count("rounds")
        self._evidence(event.outcomes, ended, place)

    def _results(
        self, outcomes: Sequence[MemberOutcome], ended: RoundState | None, place: str
    ) -> tuple[MemberResult, ...]:
        """Outcomes for people; a payload called malformed is decoded, and must not decode."""
        opened = {item.author: item for item in ended.opened} if ended else {}
        results = []
        for told in outcomes:
            detail: str | None = ""
            if told.outcome == Outcome.MALFORMED and told.proof == OBSERVATIONS:
                detail = self.models.why_malformed(opened[told.peer])
                if detail is None:
                    self.findings.problem(place, f"the payload of {told.peer} is not malformed")
            results.append(
                MemberResult(told.peer, str(told.outcome), told.reason, told.proof, detail or "")
            )
        return tuple(results)

    def _root_signed(self, event: RootSigned, place: str) -> None:
        told, fixed = self.rounds.get(event.round), self.fixed.pop(event.round, None)
        if told is None or fixed is None:
            self.findings.problem(place, f"signs a root of round {event.round}, which is not fixed")
            return
        self.findings.count("signed roots")
        root = event.root.hex()
        self.rounds[event.round] = VerifiedRound(
            told.round, told.void, told.reason, told.accepted, told.results, root
        )
        self.models.redo(*fixed, event.root)

    def _evidence(
        self, outcomes: Sequence[MemberOutcome], ended: RoundState | None, place: str
    ) -> None:
        """Evidence that the ledger names must convince an outsider too."""
        for outcome in outcomes:
            evidence = outcome.evidence
            if evidence is None or ended is None:
                continue
            if self._convinces(evidence, ended):
                self.findings.count("evidence")
            else:
                self.findings.problem(place, f"evidence against {evidence.accused} does not hold")

    def _convinces(self, evidence: Evidence, ended: RoundState) -> bool:
        seat = ended.seat(evidence.accused)
        if seat is None:
            return False
        if evidence.fault == Fault.MALFORMED_PAYLOAD:
            return check_malformed(evidence, ended.seats, ended.voting.f)
        if evidence.fault == Fault.BAD_OPENING:
            return check_bad_opening(evidence, seat.voting)
        return check_equivocation(evidence, seat.voting)

    def _convicted(self, evidence: Evidence, place: str) -> None:
        check = checks_of(self.run).get(evidence.fault)
        keys = self.publics(evidence.accused)
        holds = check is not None and any(check(evidence, public) for public in keys)
        if holds:
            self.findings.count("convictions")
        else:
            self.findings.problem(place, f"{evidence.accused} is convicted without proof")
