"""The calls between an ordering engine and the application above it: ABCI 2.0's, no more.

Source: CometBFT, "ABCI 2.0 specification" (vote extensions are left out). The embedded ledger and
CometBFT drive the same application through these; nothing above the application knows which.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torchbft.primitives.ids import Height

CODE_OK = 0


@dataclass(frozen=True, slots=True)
class Info:
    """Where the application stands: the last committed height (0 = none) and its hash."""

    last_height: Height
    last_app_hash: bytes


@dataclass(frozen=True, slots=True)
class TxResult:
    """Outcome of one transaction; a code other than 0 means no effect, and ``log`` says why."""

    code: int = CODE_OK
    log: str = ""
    data: bytes = b""
    """Agreed, unlike ``log``: the last result of a block holds the digest of the state after it."""


@dataclass(frozen=True, slots=True)
class ValidatorUpdate:
    """New voting power of a key; 0 removes it."""

    public: bytes
    power: int


@dataclass(frozen=True, slots=True)
class Misbehaviour:
    """An engine's report that a validator signed twice at a height."""

    public: bytes
    height: Height


@dataclass(frozen=True, slots=True)
class FinalizeResult:
    """What a finalized block did: a result per transaction, new validators, the state's hash."""

    tx_results: tuple[TxResult, ...]
    app_hash: bytes
    validator_updates: tuple[ValidatorUpdate, ...] = ()
    events: tuple[object, ...] = field(default=())


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A state that a joiner may fetch in chunks."""

    height: Height
    chunks: int
    digest: bytes


class Application(Protocol):
    """A deterministic state machine. State changes in ``finalize_block`` and becomes visible, and
    durable under engines that expect it, in ``commit``. No call blocks."""

    def info(self) -> Info: ...

    def init_chain(self, genesis: bytes) -> bytes: ...

    def check_tx(self, tx: bytes) -> TxResult: ...

    def prepare_proposal(
        self, height: Height, txs: Sequence[bytes], max_bytes: int
    ) -> list[bytes]: ...

    def process_proposal(self, height: Height, txs: Sequence[bytes]) -> bool: ...

    def finalize_block(
        self, height: Height, txs: Sequence[bytes], misbehaviour: Sequence[Misbehaviour] = ()
    ) -> FinalizeResult: ...

    def commit(self) -> Height: ...

    def query(self, path: str, data: bytes) -> bytes: ...

    def list_snapshots(self) -> list[Snapshot]: ...

    def load_snapshot_chunk(self, height: Height, chunk: int) -> bytes: ...

    def offer_snapshot(self, snapshot: Snapshot, app_hash: bytes) -> bool: ...

    def apply_snapshot_chunk(self, chunk: int, data: bytes) -> bool: ...
