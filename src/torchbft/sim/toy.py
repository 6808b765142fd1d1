"""The smallest application with the calls of ABCI: a list of distinct transactions and its hash."""

from __future__ import annotations

from collections.abc import Sequence

from torchbft.primitives.abci import FinalizeResult, Info, Misbehaviour, Snapshot, TxResult
from torchbft.primitives.digests import sha256
from torchbft.primitives.ids import Height


class ToyApplication:
    """Takes each transaction once. A ``censored`` prefix is never proposed by this peer."""

    def __init__(self, censored: bytes | None = None) -> None:
        self.applied: dict[bytes, Height] = {}
        self._height = Height(0)
        self._hash = sha256("toy/genesis")
        self._censored = censored

    def info(self) -> Info:
        return Info(self._height, self._hash)

    def init_chain(self, genesis: bytes) -> bytes:
        return self._hash

    def check_tx(self, tx: bytes) -> TxResult:
        return TxResult(1, "already applied") if tx in self.applied else TxResult()

    def prepare_proposal(self, height: Height, txs: Sequence[bytes], max_bytes: int) -> list[bytes]:
        chosen: list[bytes] = []
        for tx in txs:
            max_bytes -= len(tx)
            if max_bytes >= 0 and not (self._censored and tx.startswith(self._censored)):
                chosen.append(tx)
        return chosen

    def process_proposal(self, height: Height, txs: Sequence[bytes]) -> bool:
        return len(set(txs)) == len(txs) and not any(tx in self.applied for tx in txs)

    def finalize_block(
        self, height: Height, txs: Sequence[bytes], misbehaviour: Sequence[Misbehaviour] = ()
    ) -> FinalizeResult:
        results = tuple(self.check_tx(tx) for tx in txs)
        for tx in txs:
            self.applied.setdefault(tx, height)
        self._height = height
        self._hash = sha256("toy/state", self._hash, *txs)
        return FinalizeResult(results, self._hash)

    def commit(self) -> Height:
        return self._height

    def query(self, path: str, data: bytes) -> bytes:
        return str(self.applied.get(data, "")).encode()

    def list_snapshots(self) -> list[Snapshot]:
        return []

    def load_snapshot_chunk(self, height: Height, chunk: int) -> bytes:
        return b""

    def offer_snapshot(self, snapshot: Snapshot, app_hash: bytes) -> bool:
        return False

    def apply_snapshot_chunk(self, chunk: int, data: bytes) -> bool:
        return False
