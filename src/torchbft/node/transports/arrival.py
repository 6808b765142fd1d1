"""A payload on its way in: its chunks are checked and written while the next ones arrive.

Neither hashing nor the disk delays a vote: one thread checks and writes for all arrivals, in order;
another makes finished payloads durable, which may take long. What an arrival has reached survives
its connection; a new one begins only when nothing of the old one is left to be checked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import CancelledError, Executor, Future
from functools import partial
from typing import NamedTuple, Protocol

from torchbft.node.storage.payloads import IncomingPayload, PayloadStore
from torchbft.node.transports.holders import Holders
from torchbft.node.transports.messages import Start, chunk_count
from torchbft.node.transports.transfer import PayloadLink, Receiving
from torchbft.primitives.digests import CHUNK_BYTES, DIGEST_BYTES, chunk_digests, root_of_chunks
from torchbft.primitives.errors import StorageError
from torchbft.primitives.ids import PeerId, Round


class Label(NamedTuple):
    """What a payload is for."""

    round: Round
    author: PeerId


class ArrivalOwner(Protocol):
    """What an arrival needs from the data plane; called on the loop."""

    def lied(self, arrival: Arrival, link: PayloadLink, reason: str) -> None: ...
    def disk_failed(self, arrival: Arrival, error: StorageError) -> None: ...
    def complete(self, arrival: Arrival) -> None: ...
    def idle(self, arrival: Arrival) -> None: ...


class Arrival(Receiving):
    """One payload that is not held yet: how far it came, from whom, and who waits for it."""

    def __init__(
        self, root: bytes, length: int, store: PayloadStore, checker: Executor, owner: ArrivalOwner
    ) -> None:
        self.root, self.length = root, length
        self.reached = 0
        """Bytes handed over for checking; checked and written once ``pending`` is 0."""
        self.pending = 0
        self.settled = asyncio.Event()
        self.settled.set()
        self.storing = False
        """All bytes are there: nothing more is asked of anyone."""
        self.labels: set[Label] = set()
        self.chunks: list[bytes] = []
        self.link: PayloadLink | None = None
        self.attempt: asyncio.Future[bool] | None = None
        self.pushers: set[PayloadLink] = set()
        self.holders = Holders()
        self.passing = False
        """Of use for a while only: see ``PayloadStore``."""
        self.task: asyncio.Task[None] | None = None
        self._announced = False
        self._store, self._checker, self._owner = store, checker, owner
        self._loop = asyncio.get_running_loop()
        # Of the checking thread alone, unless nothing is pending:
        self._file: IncomingPayload | None = None
        self._good = 0
        self._broken = False

    # Attempts

    def free(self) -> bool:
        """Whether a new attempt may begin."""
        return self.link is None and not self.storing and not self.pending

    def begin(self, link: PayloadLink) -> None:
        """Receive from this link from now on."""
        self.link = link
        self.attempt = self._loop.create_future()
        self._announced = False

    def end(self, stored: bool) -> None:
        """The attempt is over; what was reached stays, up to the last whole chunk."""
        link, self.link = self.link, None
        if link is not None:
            link.abandon(self)
        if self.attempt is not None and not self.attempt.done():
            self.attempt.set_result(stored)

    def came(self) -> int:
        """Bytes reached, with those of a segment that is still arriving."""
        return self.reached + (self.link.partial(self) if self.link is not None else 0)

    def expects(self, link: PayloadLink) -> bool:
        """Whether a transfer may begin on this link: once for each attempt."""
        return self.link is link and not self.storing and not self._announced

    def takes(self, start: Start) -> str | None:
        """Why an announced transfer is not this payload's continuation; None when it is."""
        digests = chunk_count(self.length) * DIGEST_BYTES
        if (start.length, start.offset, len(start.chunks)) != (self.length, self.reached, digests):
            return "it announced another length, offset or number of chunks than was asked for"
        chunks = [start.chunks[at : at + DIGEST_BYTES] for at in range(0, digests, DIGEST_BYTES)]
        if root_of_chunks(self.length, chunks) != self.root:
            return "its chunk digests do not match the payload's root"
        self.chunks, self._announced = chunks, True
        return None

    # Bytes

    def segment(self, link: PayloadLink, data: memoryview, release: Callable[[], None]) -> None:
        """Hand the next chunks over for checking; ``release`` is called when that is done."""
        at, self.reached = self.reached, self.reached + len(data)
        self.storing = self.reached == self.length
        self.pending += 1
        self.settled.clear()
        done = partial(self._checked, link, release)
        job = self._checker.submit(self._check, at, data)
        job.add_done_callback(lambda ended: self._loop.call_soon_threadsafe(done, ended))

    def _check(self, at: int, data: memoryview) -> str:
        """On the checking thread: "" when the bytes are right and written, else what is wrong."""
        if self._broken:
            return ""
        self._broken = True  # unless all goes well
        found = chunk_digests(data)
        first = at // CHUNK_BYTES
        if found != self.chunks[first : first + len(found)]:
            return f"its bytes after {at} do not match their digest"
        if self._file is None:
            self._file = self._store.receive(self.root, self.length)
        self._file.write(at, data)
        self._good += len(data)
        self._broken = False
        return ""

    def _checked(self, link: PayloadLink, release: Callable[[], None], job: Future[str]) -> None:
        release()
        self.pending -= 1
        try:
            reason = job.result()
            if reason:
                self._owner.lied(self, link, reason)
                self._fail()
        except StorageError as error:
            self._owner.disk_failed(self, error)
            self._fail()
        except CancelledError:
            return
        if not self.pending:
            self._settle()

    def _fail(self) -> None:
        self.storing = False
        self.end(False)

    def _settle(self) -> None:
        """Nothing is pending: the loop may look at the thread's side."""
        self.reached = self._good
        self._broken = False
        self.settled.set()
        if self.storing:
            self._owner.complete(self)
        else:
            self._owner.idle(self)

    # The file's end

    def finish(self, round: Round) -> None:
        """On the durability thread, when all bytes are written. Raises StorageError."""
        if self._file is None:  # an empty payload
            self._file = self._store.receive(self.root, self.length)
        self._file.finish(round, self.chunks, passing=self.passing)

    def restart(self) -> None:
        """The disk refused and what lies on it is not known: begin anew, from the first byte."""
        self.drop_file()
        self._fail()
        self._broken = False
        self._good = self.reached = 0

    def drop_file(self) -> None:
        """Remove what has arrived. Nothing may be pending, or on the checking thread."""
        self._broken = True
        if self._file is not None:
            self._file.drop()
            self._file = None
