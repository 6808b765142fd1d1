"""Follows the engine's chain: block, commit and validators of each height go to a log of ours.

The engine's own store can be read only with the engine, and blocks reach the application without
their signatures; the log ``chain`` has all that a verifier needs years later (``report/verify``).
It is filled over RPC from where it ends to the engine's head, at start (whatever was missed while
this peer or its engine was down), after blocks, and before the engine is stopped: the commit of the
last block stands in no other block. Each height is checked before it is written, so that a false
one is noticed while there is still an engine to ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from torchbft.node.ordering.answers import heights_of, record_of, validators_of
from torchbft.node.storage.log import AppendLog
from torchbft.primitives.errors import CorruptLogError, DecodeError
from torchbft.primitives.ids import Height
from torchbft.protocols.chain.checks import link_fault, record_fault
from torchbft.protocols.chain.messages import ChainRecord, decode_record

CHAIN_LOG = "chain.log"
SYNC_EVERY = 64
"""Records that a crash of the machine may cost; the engine still has their blocks."""


class Answers(Protocol):
    """The engine's RPC as far as it is needed here: results as plain JSON values of bounded size,
    or TorchbftError. ``validators`` gives all of a height at once."""

    async def status(self) -> Any: ...

    async def block(self, height: Height) -> Any: ...

    async def commit(self, height: Height) -> Any: ...

    async def validators(self, height: Height) -> Any: ...


class Follower:
    """The log ``chain`` of one peer, open for appending: one writer.

    ``seen`` hears every record that is appended, in order of height; before them, at the first
    ``catch_up``, those of earlier starts that hold evidence, since nobody knows what was made of
    it. Opening raises CorruptLogError on damage and StorageError when the disk refuses.
    """

    def __init__(
        self,
        path: Path,
        rpc: Answers,
        chain_id: str,
        seen: Callable[[ChainRecord], None] = lambda record: None,
    ) -> None:
        self._log, self._rpc, self._chain_id, self._seen = AppendLog(path), rpc, chain_id, seen
        self._turn = asyncio.Lock()
        self._untold: list[ChainRecord] = []
        self.last: ChainRecord | None = None
        self._read()

    @property
    def height(self) -> int:
        """Of the newest record; 0 if there is none."""
        return self.last.header.height if self.last else 0

    def _read(self) -> None:
        for number, data in enumerate(self._log):
            try:
                self.last = decode_record(data)
            except DecodeError as error:
                raise CorruptLogError(
                    f"record {number} is none of a chain ({error.what})",
                    where=str(self._log.path),
                    offset=0,
                ) from None
            if self.last.evidence:
                self._untold.append(self.last)

    async def catch_up(self) -> int:
        """Append all heights from the log's end to the engine's head; how many that were.

        Heights that the engine no longer has (it was given a snapshot) are left out: other peers'
        logs have them. Raises DecodeError at an answer that does not hold; what came before it is
        kept, and the next call asks again.
        """
        async with self._turn:
            while self._untold:
                self._seen(self._untold.pop(0))
            first, head = heights_of(await self._rpc.status())
            start = max(first, self.height + 1, 1)
            try:
                for height in range(start, head + 1):
                    await self._append(Height(height))
            finally:
                self._log.sync()
            return max(head + 1 - start, 0)

    async def _append(self, height: Height) -> None:
        block, commit = await self._rpc.block(height), await self._rpc.commit(height)
        validators = validators_of(await self._rpc.validators(height))
        record, data = record_of(block, commit, validators)
        wrong = self._fault(record, height)
        if wrong:
            raise DecodeError(
                f"the ordering engine's block {height} {wrong}",
                where=str(self._log.path),
                hint="check that the RPC port is this run's engine's, and its home folder whole",
            )
        self._log.append(data)
        self.last = record
        if len(self._log) % SYNC_EVERY == 0:
            self._log.sync()
        self._seen(record)

    def _fault(self, record: ChainRecord, height: int) -> str | None:
        if record.header.height != height:
            return f"is of height {record.header.height}"
        wrong = record_fault(record, self._chain_id)
        if wrong or self.last is None or self.height + 1 != height:
            return wrong
        return link_fault(self.last, record)

    async def close(self, seconds: float) -> None:
        """Fetch what is new, as far as ``seconds`` allow, and close the log. Before the engine is
        stopped: nobody else can be asked for the commit of the last block."""
        try:
            await asyncio.wait_for(self.catch_up(), seconds)
        finally:
            self._log.close()
