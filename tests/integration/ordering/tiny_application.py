"""An application of a few lines before a real engine, which fails once at each call it is told."""

from __future__ import annotations

import hashlib

from torchbft.node.ordering.proto import abci_pb2 as pb

ACCEPT = 1


class TinyApplication:
    """Its state is a digest of all transactions; only ``commit`` keeps what a block did."""

    def __init__(self, failing: tuple[str, ...] = ()) -> None:
        self.failing = list(failing)
        self.failed: list[str] = []
        self.height, self.digest = 0, b""
        self.txs: list[bytes] = []
        self._next: tuple[int, bytes, list[bytes]] = (0, b"", [])

    async def answer(self, request: pb.Request) -> pb.Response:
        kind = str(request.WhichOneof("value"))
        if self.failing and self.failing[0] == kind:
            self.failed.append(self.failing.pop(0))
            raise RuntimeError(f"{kind} fails")
        answer = getattr(self, kind, None)
        if answer is not None:
            return pb.Response(**{kind: answer(getattr(request, kind))})
        response = pb.Response()
        getattr(response, kind).SetInParent()
        return response

    def info(self, _: pb.Empty) -> pb.ResponseInfo:
        return pb.ResponseInfo(
            app_version=1, last_block_height=self.height, last_block_app_hash=self.digest
        )

    def prepare_proposal(self, asked: pb.RequestPrepareProposal) -> pb.ResponsePrepareProposal:
        return pb.ResponsePrepareProposal(txs=asked.txs)

    def process_proposal(self, _: pb.RequestProcessProposal) -> pb.ResponseVerdict:
        return pb.ResponseVerdict(result=ACCEPT)

    def finalize_block(self, asked: pb.RequestFinalizeBlock) -> pb.ResponseFinalizeBlock:
        digest = self.digest
        for tx in asked.txs:
            digest = hashlib.sha256(digest + tx).digest()
        self._next = (asked.height, digest, list(asked.txs))
        return pb.ResponseFinalizeBlock(
            tx_results=[pb.ExecTxResult() for _ in asked.txs], app_hash=digest
        )

    def commit(self, _: pb.Empty) -> pb.ResponseCommit:
        self.height, self.digest, txs = self._next
        self.txs += txs
        return pb.ResponseCommit()
