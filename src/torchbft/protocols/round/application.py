"""The application under either engine: exactly ABCI's calls around the pure reader.

``finalize_block`` computes, ``commit`` makes visible. The application hash is the digest of the
state at the last block that fixed or voided a round; snapshots exist for those heights only, so
that a joiner can check one against the hash in the next block. The digest of the state after each
block stands in the last result's ``data``: the hash of its results, which CometBFT's next block
carries, covers what the application hash does not yet.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from torchbft.primitives.abci import (
    FinalizeResult,
    Info,
    Misbehaviour,
    Snapshot,
    TxResult,
    ValidatorUpdate,
)
from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import DecodeError, MisuseError, PreconditionError
from torchbft.primitives.evidence import Evidence
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.wire import Bytes32, Count, Wire, decode, encode
from torchbft.protocols.round.admissible import (
    OWN_CHECKS,
    UNCONVINCING,
    EvidenceChecks,
    admissible,
    crowded,
    unconvincing,
)
from torchbft.protocols.round.membership import validator_updates
from torchbft.protocols.round.messages import EvidenceTx, parse
from torchbft.protocols.round.reader import CODE_REFUSED, Applied, apply_block, record
from torchbft.protocols.round.state import (
    MAX_STATE_BYTES,
    QUOTA,
    GenesisConfig,
    LedgerState,
    Phase,
    RoundState,
    decode_state,
    genesis_state,
    state_digest,
)

MAX_GENESIS_BYTES = 64 * 1024
"""64 members of 120 bytes each, and room."""

SNAPSHOTS_KEPT = 2
"""The newest, and one that a joiner may be in the middle of."""

SNAPSHOT_CHUNK_BYTES = 256 * 1024
"""A chunk travels in one control message."""

TX_FRAME_BYTES = 8
"""Engines count what frames a transaction in a block as well: 6 bytes at the most under either."""

MAX_SAVED_BYTES = MAX_STATE_BYTES + 1024
"""A state, its height and its hash."""

MAX_SEEN_OF_AUTHOR = 64
"""Transactions of one author that may wait for a block: 3 rounds × 8 slots × 2, and some evidence.
An engine outside does not tell from whom a transaction comes, but every one is signed."""

MAX_UNCONVINCING = 4
"""False evidence of one author that is looked at between two blocks. By ZIP-215 a false signature
takes 3 ms, thirty times as long as any other statement: one liar could keep a core busy."""

MAX_SEEN = 4096
"""Transactions remembered for proposals: those of 64 members."""


class Saved(Wire, frozen=True):
    """What a commit leaves behind, for an engine that does not hand every block over again."""

    height: Count
    app_hash: Bytes32
    state: bytes


@dataclass(frozen=True, slots=True)
class _Computed:
    """A finalized block that is still to be committed."""

    height: Height
    applied: Applied
    encoded: bytes
    app_hash: bytes


@dataclass
class _Restoring:
    snapshot: Snapshot
    app_hash: bytes
    chunks: dict[int, bytes] = field(default_factory=dict)


class Application:
    """``abci.Application`` of rounds. ``state`` is what the last committed block left."""

    def __init__(self, genesis: GenesisConfig, checks: EvidenceChecks = OWN_CHECKS) -> None:
        fault = genesis.fault()
        if fault is not None:
            raise PreconditionError(fault, where="genesis")
        self._checks = checks
        self._height = Height(0)
        self.state: LedgerState = genesis_state(genesis)
        self._hash = self.state.digest()
        self._encoded = encode(self.state)
        self._computed: _Computed | None = None
        self._snapshots: dict[Height, bytes] = {}
        self._restoring: _Restoring | None = None
        self._seen: dict[bytes, None] = {}
        self._waiting: Counter[_Place] = Counter()
        self._verdicts: dict[bytes, str | None] = {}
        self._misled: Counter[str] = Counter()
        self.names: dict[bytes, PeerId] = {}
        """Whose each validator's key is or was, those of a coming epoch included."""
        self._learn_names(self.state)

    def _learn_names(self, state: LedgerState) -> None:
        self.names.update({key.voting: PeerId(key.name) for key in state.retired})
        self.names.update({seat.voting: PeerId(seat.name) for seat in state.current.validators})

    def info(self) -> Info:
        return Info(self._height, self._hash)

    def init_chain(self, genesis: bytes) -> bytes:
        """Check that the engine's genesis is ours; returns the first application hash."""
        if decode(genesis, GenesisConfig, limit=MAX_GENESIS_BYTES) != self.state.genesis:
            raise MisuseError("the engine was started with another genesis", where="init_chain")
        return self._hash

    def refusal(self, tx: bytes) -> str | None:
        """``admissible`` against the committed state, remembered until the next block."""
        if tx not in self._verdicts:
            if len(self._verdicts) >= MAX_SEEN:
                self._verdicts.clear()
            self._verdicts[tx] = admissible(tx, self.state, self._checks)
        return self._verdicts[tx]

    def unwelcome(self, tx: bytes) -> str | None:
        """Why not to look at a transaction that somebody sent, or what is wrong with it. Of blocks
        this is never asked: they are judged by what all know alike."""
        accuser = _accuser(tx) if tx not in self._verdicts else ""
        if self._misled[accuser] >= MAX_UNCONVINCING:
            return f"{accuser} has shown too much false evidence"
        reason = self.refusal(tx)
        if accuser and reason == UNCONVINCING:
            self._misled[accuser] += 1
        return reason

    def doubts(self, evidence: Evidence) -> str | None:
        """Why evidence would convict nobody, or nobody anew."""
        return unconvincing(evidence, self.state, self._checks)

    def check_tx(self, tx: bytes) -> TxResult:
        """Whether to keep a transaction for a block: admissible, and not one more where two of the
        slot, or many of the author, wait already (17). Remembered for the next proposal (19)."""
        reason = self.unwelcome(tx) or self._crowd(tx)
        if reason is not None:
            return TxResult(CODE_REFUSED, reason)
        self._remember(tx)
        return TxResult()

    def _crowd(self, tx: bytes) -> str | None:
        if tx in self._seen:
            return None
        author, slot = _places(tx)
        if self._waiting[slot] >= QUOTA:
            return "two different statements wait already"
        if self._waiting[author] >= MAX_SEEN_OF_AUTHOR:
            return f"{MAX_SEEN_OF_AUTHOR} statements of this author wait already"
        return "too many statements wait already" if len(self._seen) >= MAX_SEEN else None

    def _remember(self, tx: bytes) -> None:
        if tx not in self._seen:
            self._seen[tx] = None
            self._waiting.update(_places(tx))

    def prepare_proposal(self, height: Height, txs: Sequence[bytes], max_bytes: int) -> list[bytes]:
        """What was seen, in that order, then the rest of ``txs``: all that is admissible, within
        ``max_bytes``."""
        state, size, chosen = self.state, 0, []
        for tx in dict.fromkeys((*self._seen, *txs)):
            framed = len(tx) + TX_FRAME_BYTES
            if size + framed > max_bytes or self.refusal(tx) or crowded(tx, state):
                continue
            state, size = record(state, tx), size + framed
            chosen.append(tx)
        return chosen

    def process_proposal(self, height: Height, txs: Sequence[bytes]) -> bool:
        """Whether every transaction is admissible beside the others, in whatever order."""
        state = self.state
        for tx in txs:
            if self.refusal(tx) or crowded(tx, state):
                return False
            state = record(state, tx)
        return True

    def finalize_block(
        self, height: Height, txs: Sequence[bytes], misbehaviour: Sequence[Misbehaviour] = ()
    ) -> FinalizeResult:
        """Apply the block after the committed one. Raises MisuseError at any other height."""
        if height != self._height + 1:
            raise MisuseError(
                f"block {height} does not follow block {self._height}", where="finalize_block"
            )
        applied = apply_block(self.state, txs, self._checks)
        encoded = self._encoded if applied.state is self.state else encode(applied.state)
        digest = state_digest(encoded)
        app_hash = digest if applied.settled else self._hash
        self._computed = _Computed(height, applied, encoded, app_hash)
        last = tuple(replace(result, data=digest) for result in applied.results[-1:])
        results = (*applied.results[:-1], *last)
        return FinalizeResult(results, app_hash, self._updates(applied.state), applied.events)

    def _updates(self, state: LedgerState) -> tuple[ValidatorUpdate, ...]:
        """What the engine is told of a state: with the last round of an epoch the next one's
        validators, in force two heights later."""
        if state.epoch == self.state.epoch:
            return ()
        self._learn_names(state)
        return validator_updates(self.state.current.seats, state.current.seats)

    def commit(self) -> Height:
        """Make the finalized block's state visible. Raises MisuseError if there is none."""
        computed, self._computed = self._computed, None
        if computed is None:
            raise MisuseError("no block was finalized", where="commit")
        self._height, self._hash = computed.height, computed.app_hash
        self.state, self._encoded = computed.applied.state, computed.encoded
        if computed.applied.settled:
            self._snapshots[self._height] = self._encoded
            for old in sorted(self._snapshots)[:-SNAPSHOTS_KEPT]:
                del self._snapshots[old]
        self._verdicts.clear()
        self._misled.clear()
        waited, self._seen = self._seen, {}
        self._waiting.clear()
        for tx in waited:
            if self.refusal(tx) is None:
                self._remember(tx)
        return self._height

    def saved(self) -> bytes:
        """The last committed state, for ``resume``."""
        return encode(Saved(self._height, self._hash, self._encoded))

    def resume(self, saved: bytes) -> None:
        """Go on after a restart. Raises DecodeError if this is no saved state of this run."""
        found = decode(saved, Saved, limit=MAX_SAVED_BYTES)
        state = decode_state(found.state)
        if state.genesis != self.state.genesis:
            raise DecodeError("a saved state of another run")
        self._take_over(Height(found.height), found.app_hash, state, found.state)

    def pending(self) -> list[bytes]:
        """Admissible transactions that were seen and are not on the ledger yet."""
        return list(self._seen)

    def query(self, path: str, data: bytes) -> bytes:
        """``state``: the canonical state. ``height``: of the last committed block, decimal."""
        if path == "state":
            return encode(self.state)
        if path == "height":
            return str(self._height).encode()
        raise MisuseError(f"there is nothing at {path!r}", hint="state, height", where="query")

    def list_snapshots(self) -> list[Snapshot]:
        return [
            Snapshot(height, -(-len(data) // SNAPSHOT_CHUNK_BYTES), _digest(data))
            for height, data in sorted(self._snapshots.items())
        ]

    def load_snapshot_chunk(self, height: Height, chunk: int) -> bytes:
        """One chunk; empty if there is no such snapshot or chunk."""
        start = chunk * SNAPSHOT_CHUNK_BYTES
        return self._snapshots.get(height, b"")[start : start + SNAPSHOT_CHUNK_BYTES]

    def offer_snapshot(self, snapshot: Snapshot, app_hash: bytes) -> bool:
        """Begin to restore; ``app_hash`` is the verified one of the block after the snapshot."""
        if not 0 < snapshot.chunks * SNAPSHOT_CHUNK_BYTES <= MAX_STATE_BYTES:
            return False
        if snapshot.height <= self._height:
            return False
        self._restoring = _Restoring(snapshot, app_hash)
        return True

    def apply_snapshot_chunk(self, chunk: int, data: bytes) -> bool:
        """Take a chunk; False abandons the snapshot. The last one makes its state ours."""
        restoring = self._restoring
        if restoring is None or not 0 <= chunk < restoring.snapshot.chunks:
            return False
        restoring.chunks[chunk] = data[: SNAPSHOT_CHUNK_BYTES + 1]
        if len(restoring.chunks) < restoring.snapshot.chunks:
            return True
        self._restoring = None
        whole = b"".join(restoring.chunks[i] for i in range(restoring.snapshot.chunks))
        return self._restore(whole, restoring)

    def _restore(self, whole: bytes, restoring: _Restoring) -> bool:
        try:
            state = decode_state(whole)
        except DecodeError:
            return False
        if state.digest() != restoring.app_hash or state.genesis != self.state.genesis:
            return False
        self._take_over(restoring.snapshot.height, restoring.app_hash, state, whole)
        self._snapshots = {self._height: whole}
        return True

    def _take_over(self, height: Height, app_hash: bytes, state: LedgerState, data: bytes) -> None:
        self._height, self._hash, self.state, self._encoded = height, app_hash, state, data
        self._computed, self._snapshots = None, {}
        self._verdicts.clear()
        self._learn_names(state)


_Place = tuple[str, int, str]
"""Author, round and slot of a statement; all of an author stand at (author, −1, "")."""


def _places(tx: bytes) -> tuple[_Place, _Place]:
    """Where an admissible transaction is counted: with its author's, and in its slot."""
    parsed = parse(tx)
    statement = parsed.statement
    return (statement.author, -1, ""), (statement.author, statement.round, parsed.slot)


def _accuser(tx: bytes) -> str:
    """Who says to have signed evidence; nobody for any other transaction."""
    try:
        statement = parse(tx).statement
    except DecodeError:
        return ""
    return statement.author if isinstance(statement, EvidenceTx) else ""


def _digest(data: bytes) -> bytes:
    return sha256("round/snapshot", data)


def _authors(state: LedgerState, pending: Sequence[bytes]) -> dict[str, set[str]]:
    """Authors per slot of the current round, on the ledger or pending; ``rooted`` of any round."""
    current = state.current
    found: dict[str, set[str]] = {}
    for slot in current.slots:
        found.setdefault(slot.kind, set()).add(slot.author)
    for tx in pending:
        try:
            parsed = parse(tx)
        except DecodeError:
            continue
        statement = parsed.statement
        if statement.round == current.number or parsed.slot == "rooted":
            found.setdefault(parsed.slot, set()).add(statement.author)
    return found


def proposal_complete(state: LedgerState, pending: Sequence[bytes]) -> bool:
    """Whether a leader need not wait: with ``pending`` the current phase has all it waits for (19).

    Members waited for count, and validators that attested to the round before; a quorum of closings
    ends the wait as well. Signatures are not looked at: pending transactions were admitted.
    """
    current, found = state.current, _authors(state, pending)
    return _COMPLETE[Phase(state.phase)](state, current, found)


_Authors = dict[str, set[str]]


def _ready_complete(state: LedgerState, current: RoundState, found: _Authors) -> bool:
    return {seat.name for seat in current.validators} <= found.get("ready", set())


def _closed(current: RoundState, found: _Authors, window: str) -> bool:
    return current.power(found.get(f"close-{window}", set())) >= current.voting.quorum


def _commit_complete(state: LedgerState, current: RoundState, found: _Authors) -> bool:
    if state.unsigned is not None and not found.get("rooted"):
        return False
    here = found.get("commit", set())
    enough = set(current.waited) <= here and len(here) >= current.m_min
    return enough or _closed(current, found, "commit")


def _open_complete(state: LedgerState, current: RoundState, found: _Authors) -> bool:
    here = found.get("open", set())
    expected = set(current.waited) & found.get("commit", set())
    return (expected <= here and len(here) >= current.m_min) or _closed(current, found, "open")


def _attest_complete(state: LedgerState, current: RoundState, found: _Authors) -> bool:
    here = found.get("attest", set())
    previous = state.previous
    expected = {seat.name for seat in current.validators}
    if previous is not None and previous.accepted:
        expected &= {s.author for s in previous.slots if s.kind == "attest"}
    return expected <= here and current.power(here) >= current.voting.quorum


def _root_complete(state: LedgerState, current: RoundState, found: _Authors) -> bool:
    return bool(found.get("rooted"))


def _never(state: LedgerState, current: RoundState, found: _Authors) -> bool:
    return False


_COMPLETE = {
    Phase.READY: _ready_complete,
    Phase.COMMIT: _commit_complete,
    Phase.OPEN: _open_complete,
    Phase.ATTEST: _attest_complete,
    Phase.ROOT: _root_complete,
    Phase.FINISHED: _never,
}
