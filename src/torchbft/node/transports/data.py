"""The data plane: payloads travel in checked chunks between members and end durably on disk.

A payload is named by its root. A holder first sends all chunk digests, which the receiver checks
against length and root; each segment is then checked chunk by chunk as it arrives, and a payload is
reported only once it is durable. So integrity needs no trust in the channel, and a payload that was
begun with one holder is finished with another from the chunk it reached.

- *Push*: an author offers its payload to the others. What a receiver takes before the ledger named
  it is bounded: one payload for each author and round, rounds near its own, each at most
  ``max_payload`` bytes.
- *Fetch*: a payload that the ledger named is asked for from its holders, one at a time, until it is
  held or no longer wanted. Whoever is slow, a pusher that came first included, is left for another
  (``holders.py``); one that sends a wrong chunk is reported and not asked again.
- *Rounds*: what belongs to rounds far behind our own is dropped, memory and connections' work.
- *Quotas*: frames, unwanted bytes and reads of our disk are bounded for each peer, over all its
  connections; how many it makes, the endpoint bounds.

Round-level deadlines are the protocol's; the bounds here only decide when to try another holder.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, cast

from torchbft.node.storage.payloads import PayloadStore
from torchbft.node.transports.arrival import Arrival, Label
from torchbft.node.transports.endpoint import (
    PAYLOADS,
    PAYLOADS_CLEAR,
    Endpoint,
    UnreachableError,
)
from torchbft.node.transports.holders import FIRST_PAUSE, LONGEST_PAUSE
from torchbft.node.transports.messages import (
    DONE,
    EAGER_BYTES,
    OFFER,
    REFUSE,
    SEGMENT_BYTES,
    SMALL_BYTES,
    START,
    WANT,
    Done,
    Offer,
    Refuse,
    Start,
    Want,
    chunk_count,
    frame_limits,
)
from torchbft.node.transports.metering import Quota
from torchbft.node.transports.outgoing import Sending
from torchbft.node.transports.transfer import PayloadLink, Receiving
from torchbft.primitives.digests import CHUNK_BYTES, DIGEST_BYTES
from torchbft.primitives.errors import StorageError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import PeerId, Round

ROUNDS_BEHIND, ROUNDS_AHEAD = 2, 2
"""Rounds around our own for which pushes are taken: peers are at most a round or two apart."""

ROUNDS_SERVED = 8
"""Rounds behind our own whose payloads are still found and served: who is further behind takes a
copy of the agreed state instead. The ledger itself asks for those of the last two."""

PUSHES_UNPLACED = 4
"""Pushes taken from one peer while we do not know our own round yet, as after a restart."""

LINKS_PER_PEER = 4
"""Each side's dial, before and after a restart; beyond it the oldest gives way."""

STALL_SECONDS = 10.0
"""Without one byte for this long a holder is left: two lost packets' longest repeats."""

BEST_MEMORY = 0.95
"""Each long fetch forgets so much of the best rate seen: what a network no longer gives is unlearnt
in some rounds, and no single slow holder, liars least, takes it away."""

MISBEHAVED_SECONDS = 5.0
"""No connection from or to a peer that broke a rule."""

SERVES_PER_PAYLOAD = 8
"""Times that one payload's bytes are sent to one peer, who may lose what it had to a full disk."""

T = TypeVar("T")


class DataPlane:
    """Sends, receives and serves payloads for one peer.

    on_stored(peer or None, root): a payload became held, durable and equal to its root; ``peer`` is
    who sent its last bytes, None when it was held already. May be called again for a held root.
    on_fault(peer, fault, reason): an authenticated peer broke a rule; no evidence for others.
    on_disk_error(error): the disk refused; the transfer is tried again.
    encrypt: False sends payloads in clear after a signed challenge (public data only).
    max_payload: bytes of the largest payload that is taken unasked, from the run file; ``limit``
    lowers it to what an update of this model can have.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        store: PayloadStore,
        *,
        encrypt: bool,
        max_payload: int,
        on_stored: Callable[[PeerId | None, bytes], None],
        on_fault: Callable[[PeerId, Fault, str], None] = lambda peer, fault, reason: None,
        on_disk_error: Callable[[StorageError], None] = lambda error: None,
    ) -> None:
        self._endpoint, self._store, self.max_payload = endpoint, store, max_payload
        self.meter = endpoint.meter
        self.limits = frame_limits(max_payload)
        self._service = PAYLOADS if encrypt else PAYLOADS_CLEAR
        self._on_stored, self._on_fault, self._on_disk_error = on_stored, on_fault, on_disk_error
        self._loop = asyncio.get_running_loop()
        self._checker = ThreadPoolExecutor(1, thread_name_prefix="payload-check")
        self._disk = ThreadPoolExecutor(1, thread_name_prefix="payload-disk")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="payload-read")
        self._quotas: dict[PeerId, Quota] = {}
        self._links: dict[PeerId, list[PayloadLink]] = {}
        self._dials: dict[PeerId, asyncio.Task[PayloadLink]] = {}
        self._arrivals: dict[tuple[bytes, int], Arrival] = {}
        """By root and length: a root binds its length, so a false one only harms itself."""
        self._cooling: dict[PeerId, float] = {}
        self._pushed: dict[Label, tuple[bytes, int]] = {}
        self._round: Round | None = None
        self._pushes: dict[tuple[Label, PeerId], asyncio.Task[None]] = {}
        self._answers: dict[tuple[PayloadLink, bytes], list[asyncio.Future[str]]] = {}
        self._delivered: dict[bytes, set[PeerId]] = {}
        self._served: Counter[tuple[PeerId, bytes]] = Counter()
        self._best_rate = 0.0
        self._jobs: set[asyncio.Task[Any]] = set()
        self._closed = False
        endpoint.serve(self._service, self._new_link)

    # What the host calls

    def advance(self, round: Round) -> None:
        """Our own round: pushes are taken for those around it, and what is far behind is dropped.
        Implied by push and fetch, whose rounds are our own or the one before."""
        if self._round is None or round > self._round:
            self._round = round
            self._cancel(lambda label: label.round < round - ROUNDS_BEHIND)
            self._spawn(self._release(Round(round - ROUNDS_SERVED)))

    def limit(self, nbytes: int) -> None:
        """No payload of an update has more bytes than this: the codec's bound, once the model is
        there. Larger ones that nobody fetches are dropped."""
        self.max_payload = min(self.max_payload, nbytes)
        for arrival in list(self._arrivals.values()):
            if arrival.length > self.max_payload and arrival.task is None:
                self._drop(arrival)
        longest = max((a.length for a in self._arrivals.values()), default=0)
        self.limits = frame_limits(max(self.max_payload, longest))

    def push(self, root: bytes, to: Iterable[PeerId], label: tuple[Round, PeerId]) -> None:
        """Offer a held payload to peers until each has it, refuses it, or it is cancelled."""
        named = Label(*label)
        self.advance(named.round)
        self._store.length(root)
        for peer in to:
            if peer != self._endpoint.me and (named, peer) not in self._pushes:
                task = self._spawn(self._push(root, peer, named))
                self._pushes[named, peer] = task
                task.add_done_callback(partial(self._pushed_out, (named, peer)))

    def _pushed_out(self, key: tuple[Label, PeerId], task: asyncio.Task[None]) -> None:
        if self._pushes.get(key) is task:
            del self._pushes[key]

    def fetch(
        self,
        root: bytes,
        length: int,
        holders: Sequence[PeerId],
        label: tuple[Round, PeerId],
        *,
        passing: bool = False,
    ) -> None:
        """Get a payload from any of its holders, however long it takes, until cancelled.

        Called again for the same root it adds holders. root, length: from the ledger.
        passing: a copy of the agreed state, which goes with the round in which it was last asked
        for, and not with its own: that may be long ago when rounds were void.
        """
        named = Label(*label)
        self.advance(named.round)
        if passing and self._round is not None:
            named = named._replace(round=self._round)
        self.limits[START] = max(self.limits[START], frame_limits(length)[START])
        if self._store.has(root):
            self._spawn(self._held_already(None, root, named.round))
            return
        arrival = self._arrival(root, length)
        arrival.passing = passing and (arrival.passing or not arrival.labels)
        arrival.labels.add(named)
        arrival.holders.add(peer for peer in holders if peer != self._endpoint.me)
        arrival.holders.add(link.peer for link in arrival.pushers)
        if arrival.task is None:
            arrival.task = self._spawn(self._fetch(arrival))

    def cancel(self, round: Round, author: PeerId | None = None) -> None:
        """Stop pushes and drop arrivals of a round, or of one author in it."""
        self._cancel(lambda label: label.round == round and author in (None, label.author))

    def delivered(self, root: bytes) -> set[PeerId]:
        """Peers that confirmed to hold a payload that we pushed."""
        return set(self._delivered.get(root, ()))

    def disconnect(self, peer: PeerId) -> None:
        """Drop all connections of a peer, as when it left the roster."""
        for link in list(self._links.get(peer, ())):
            link.abort("disconnected")

    async def close(self) -> None:
        """Stop everything; partial payloads are dropped. May be called twice."""
        self._closed = True
        jobs = [*self._jobs, *self._dials.values()]
        for job in jobs:
            job.cancel()
        await asyncio.gather(*jobs, return_exceptions=True)
        for peer in list(self._links):
            self.disconnect(peer)
        for arrival in list(self._arrivals.values()):
            self._drop(arrival)
        for executor in (self._checker, self._disk, self._reader):
            await self._loop.run_in_executor(None, executor.shutdown)

    # Small machinery

    def _spawn(self, job: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(job)
        self._jobs.add(task)
        task.add_done_callback(self._jobs.discard)
        return task

    async def _on_disk(self, call: Callable[..., T], *arguments: object) -> T:
        return await self._loop.run_in_executor(self._disk, call, *arguments)

    def quota(self, peer: PeerId) -> Quota:
        """What a peer may still cost us; kept while we live, for it may come back."""
        return self._quotas.setdefault(peer, Quota())

    def _arrival(self, root: bytes, length: int) -> Arrival:
        arrival = self._arrivals.get((root, length))
        if arrival is None:
            arrival = Arrival(root, length, self._store, self._checker, self)
            self._arrivals[root, length] = arrival
        return arrival

    def _is_current(self, arrival: Arrival) -> bool:
        return self._arrivals.get((arrival.root, arrival.length)) is arrival

    def _drop(self, arrival: Arrival) -> None:
        """Forget a payload that has not arrived."""
        self._arrivals.pop((arrival.root, arrival.length), None)
        if arrival.link is not None:
            arrival.link.send(REFUSE, Refuse(arrival.root, "no longer wanted"))
        for link in arrival.pushers:
            link.send(REFUSE, Refuse(arrival.root, "no longer wanted"))
        arrival.end(False)
        if arrival.task is not None:
            arrival.task.cancel()
        if not arrival.storing:
            self._checker.submit(arrival.drop_file)

    def _cancel(self, concerns: Callable[[Label], bool]) -> None:
        for (label, _), push in list(self._pushes.items()):
            if concerns(label):
                push.cancel()
        self._pushed = {k: root for k, root in self._pushed.items() if not concerns(k)}
        for arrival in list(self._arrivals.values()):
            kept = {label for label in arrival.labels if not concerns(label)}
            if arrival.labels and not kept:
                self._drop(arrival)
            arrival.labels = kept

    async def _release(self, before: Round) -> None:
        try:
            await self._on_disk(self._store.release, before)
        except StorageError as error:
            self._on_disk_error(error)
        self._served = Counter({k: v for k, v in self._served.items() if self._store.has(k[1])})
        self._delivered = {k: v for k, v in self._delivered.items() if self._store.has(k)}

    # Connections

    def _new_link(self, peer: PeerId) -> PayloadLink | None:
        refused = self._closed or self._cooling.get(peer, 0.0) > self._loop.time()
        return None if refused else PayloadLink(self, peer)

    def made(self, link: PayloadLink) -> None:
        """A connection is ready for use."""
        links = self._links.setdefault(link.peer, [])
        links.append(link)
        if len(links) > LINKS_PER_PEER:
            links[0].abort("too many connections")

    def lost(self, link: PayloadLink) -> None:
        """A connection ended: what it carried goes on elsewhere."""
        if link in self._links.get(link.peer, ()):
            self._links[link.peer].remove(link)
        for arrival in self._arrivals.values():
            arrival.pushers.discard(link)
            if arrival.link is link and not arrival.storing:
                arrival.end(False)
        for (on, _), answers in self._answers.items():
            for answer in answers:
                if on is link and not answer.done():
                    answer.set_exception(UnreachableError(link.reason))

    async def _link(self, peer: PeerId) -> PayloadLink:
        """The newest live connection to a peer, or a new one. Raises UnreachableError."""
        if self._cooling.get(peer, 0.0) > self._loop.time():
            raise UnreachableError(f"{peer} broke a rule a moment ago")
        if live := self._links.get(peer):
            return live[-1]
        dial = self._dials.get(peer)
        if dial is None:
            dial = self._dials[peer] = self._loop.create_task(self._dial(peer))
            dial.add_done_callback(partial(self._dialled, peer))
        link = await asyncio.shield(dial)
        if link.reason:
            raise UnreachableError(link.reason)
        return link

    def _dialled(self, peer: PeerId, dial: asyncio.Task[PayloadLink]) -> None:
        self._dials.pop(peer, None)
        if not dial.cancelled():
            dial.exception()  # told to who waits; it may have been cancelled meanwhile

    async def _dial(self, peer: PeerId) -> PayloadLink:
        link = await self._endpoint.dial(peer, self._service, self._new_link)
        return cast(PayloadLink, link)

    # Pushing

    async def _push(self, root: bytes, peer: PeerId, label: Label) -> None:
        pause = FIRST_PAUSE
        offer = Offer(root, self._store.length(root), label.round)
        while True:
            try:
                link = await self._link(peer)
                refusal = await self._offer(link, offer)
            except UnreachableError:
                await asyncio.sleep(pause * random.uniform(0.75, 1.25))
                pause = min(2 * pause, LONGEST_PAUSE)
                continue
            if not refusal:
                self._delivered.setdefault(root, set()).add(peer)
            return

    async def _offer(self, link: PayloadLink, offer: Offer) -> str:
        """Offer on a link; "" once the peer has stored it, else why not. UnreachableError."""
        answer: asyncio.Future[str] = self._loop.create_future()
        self._answers.setdefault((link, offer.root), []).append(answer)
        try:
            link.send(OFFER, offer)
            if offer.length <= EAGER_BYTES:
                await self._serve(link, Want(offer.root, 0))
            while not answer.done():
                moved = link.moved
                await asyncio.wait({answer}, timeout=STALL_SECONDS)
                if not answer.done() and link.moved == moved:
                    link.abort("no answer to an offer")
            return await answer
        finally:
            self._answers[link, offer.root].remove(answer)
            if not self._answers[link, offer.root]:
                del self._answers[link, offer.root]
                if not answer.done():
                    link.stop(offer.root)

    def done(self, link: PayloadLink, done: Done) -> None:
        """A peer has stored what we offered."""
        self._answer(link, done.root, "")

    def refused(self, link: PayloadLink, refuse: Refuse) -> None:
        """A peer does not want what we offer, or does not hold what we want."""
        link.stop(refuse.root)
        self._answer(link, refuse.root, refuse.reason or "refused")
        for arrival in self._arrivals.values():
            if (arrival.root, arrival.link) == (refuse.root, link) and not arrival.storing:
                arrival.end(False)

    def _answer(self, link: PayloadLink, root: bytes, refusal: str) -> None:
        for answer in self._answers.get((link, root), ()):
            if not answer.done():
                answer.set_result(refusal)

    # Serving

    def wanted(self, link: PayloadLink, want: Want) -> None:
        """A peer asks for a payload."""
        refusal = self._refusal(link.peer, want)
        if refusal:
            link.send(REFUSE, Refuse(want.root, refusal))
        else:
            self._spawn(self._serve(link, want))

    def _refusal(self, peer: PeerId, want: Want) -> str:
        if not self._store.has(want.root):
            return "not held"
        left = self._store.length(want.root) - want.offset
        if left < 0 or want.offset % CHUNK_BYTES:
            return "no such offset"
        length = self._store.length(want.root)
        head = SMALL_BYTES + chunk_count(length) * DIGEST_BYTES
        already = self._served[peer, want.root]
        if already > SERVES_PER_PAYLOAD * (length + head):
            return "asked for too often"
        reads = 0 if self._store.known_chunks(want.root) is not None else length
        if reads and not self.quota(peer).reads.permits(reads, self._loop.time()):
            return "asked for too much at once"
        self._served[peer, want.root] = already + left + head
        return ""

    async def _serve(self, link: PayloadLink, want: Want) -> None:
        def unsent(count: int) -> None:
            if (link.peer, want.root) in self._served:
                self._served[link.peer, want.root] -= count

        try:
            chunks = self._store.known_chunks(want.root)
            if chunks is None:
                read = self._loop.run_in_executor(self._reader, self._store.chunks, want.root)
                chunks = await read
            path, length = self._store.path(want.root), self._store.length(want.root)
        except StorageError as error:
            self._on_disk_error(error)
            link.send(REFUSE, Refuse(want.root, "its file cannot be read"))
            return
        link.serve(Sending(want.root, path, length, want.offset, chunks, unsent))

    # Receiving what is pushed

    def offered(self, link: PayloadLink, offer: Offer) -> None:
        """A peer offers a payload of its own."""
        label = Label(Round(offer.round), link.peer)
        refusal = self._unplaced(label, offer) or self._oversized(label, offer)
        if refusal:
            link.send(REFUSE, Refuse(offer.root, refusal))
            return
        if self._store.has(offer.root):
            self._spawn(self._held_already(link, offer.root, label.round))
            return
        arrival = self._arrival(offer.root, offer.length)
        arrival.labels.add(label)
        arrival.passing = False
        arrival.pushers.add(link)
        if arrival.task is not None:
            arrival.holders.add([link.peer])
        if arrival.free():
            arrival.begin(link)
            if offer.length > EAGER_BYTES:
                link.send(WANT, Want(offer.root, arrival.reached))

    def _unplaced(self, label: Label, offer: Offer) -> str:
        """Why a push is not taken; "" when it is. What the ledger names is fetched all the same."""
        offered = (offer.root, offer.length)
        if self._pushed.get(label, offered) != offered:
            return "another payload came for this round"
        if self._round is None:
            mine = [k for k in self._pushed if k.author == label.author and k != label]
            return "too many payloads before the first round" * (len(mine) >= PUSHES_UNPLACED)
        if not self._round - ROUNDS_BEHIND <= label.round <= self._round + ROUNDS_AHEAD:
            return f"round {label.round} is far from ours"
        return ""

    def _oversized(self, label: Label, offer: Offer) -> str:
        """Takes the label's place; refuses, and the first time reports, what is too large."""
        first = label not in self._pushed
        self._pushed[label] = (offer.root, offer.length)
        if offer.length <= self.max_payload:
            return ""
        reason = f"a payload of {offer.length} bytes where at most {self.max_payload} are allowed"
        if first:
            self._on_fault(label.author, Fault.OVERSIZED, reason)
        return reason

    async def _held_already(self, link: PayloadLink | None, root: bytes, round: Round) -> None:
        try:
            await self._on_disk(self._store.keep, root, round)
        except StorageError as error:
            self._on_disk_error(error)
            return
        if link is not None:
            link.send(DONE, Done(root))
        self._on_stored(None if link is None else link.peer, root)

    def started(self, link: PayloadLink, start: Start) -> Receiving | None:
        """A transfer begins: receive it, or let it fall on the floor when it is not awaited."""
        arrival = self._arrivals.get((start.root, start.length))
        if arrival is None or not arrival.expects(link):
            return None
        wrong = arrival.takes(start)
        if wrong is not None:
            self.lied(arrival, link, wrong)
            return None
        if arrival.reached == arrival.length:
            arrival.storing = True
            self.complete(arrival)
        return arrival

    # Writing

    def idle(self, arrival: Arrival) -> None:
        """Nothing of an arrival is being checked: go on with a pusher that waits, if any, unless a
        fetch decides who is asked."""
        for link in arrival.pushers if arrival.task is None else ():
            if arrival.free() and self._is_current(arrival):
                arrival.begin(link)
                link.send(WANT, Want(arrival.root, arrival.reached))

    def disk_failed(self, arrival: Arrival, error: StorageError) -> None:
        """Start this payload anew, from the first byte, when it is next asked for."""
        self._on_disk_error(error)
        if arrival.link is not None:
            arrival.link.send(REFUSE, Refuse(arrival.root, "the disk refuses"))
        self._spawn(self._restart(arrival))

    async def _restart(self, arrival: Arrival) -> None:
        await arrival.settled.wait()
        arrival.restart()
        for link in arrival.pushers:
            link.send(REFUSE, Refuse(arrival.root, "the disk refuses"))
        arrival.pushers.clear()

    def complete(self, arrival: Arrival) -> None:
        """All bytes are there and checked: make them durable, then tell everyone."""
        self._spawn(self._finish(arrival))

    async def _finish(self, arrival: Arrival) -> None:
        round = max((label.round for label in arrival.labels), default=Round(0))
        try:
            await self._on_disk(arrival.finish, round)
        except StorageError as error:
            self.disk_failed(arrival, error)
            return
        sender = arrival.link.peer if arrival.link is not None else None
        if self._is_current(arrival):
            del self._arrivals[arrival.root, arrival.length]
        arrival.end(True)
        for link in arrival.pushers:
            link.send(DONE, Done(arrival.root))
        self._on_stored(sender, arrival.root)

    # Fetching

    async def _fetch(self, arrival: Arrival) -> None:
        """Ask holders until the payload is held, beginning with who sends it already."""
        while not await self._watch(arrival):
            await arrival.settled.wait()
            now = self._loop.time()
            peer = arrival.holders.choose(now, {p for p, links in self._links.items() if links})
            if peer is None:
                await asyncio.sleep(arrival.holders.pause(now))
            else:
                await self._ask(arrival, peer)

    async def _ask(self, arrival: Arrival, peer: PeerId) -> None:
        """Begin to receive from a holder, unless somebody began meanwhile."""
        try:
            async with asyncio.timeout(arrival.holders.spell(peer)):  # wait_for swallows cancels
                link = await self._link(peer)
        except (UnreachableError, TimeoutError):
            arrival.holders.ended(peer, 0.0, self._loop.time())
            return
        await arrival.settled.wait()
        if arrival.free() and not link.reason and not self._store.has(arrival.root):
            arrival.begin(link)
            link.send(WANT, Want(arrival.root, arrival.reached))

    async def _watch(self, arrival: Arrival) -> bool:
        """Wait for the attempt under way, if any, while it is fast enough. True: stored."""
        attempt, link = arrival.attempt, arrival.link
        if attempt is None or link is None:
            return self._store.has(arrival.root)
        rate, began, at = 0.0, self._loop.time(), arrival.reached
        moved, moved_at = link.moved, began
        while not attempt.done():
            rate = await self._spell(arrival, attempt, link)
            now = self._loop.time()
            if link.moved != moved or arrival.storing:
                moved, moved_at = link.moved, now
            elif now - moved_at >= STALL_SECONDS:
                link.abort("it stalled")
                arrival.end(False)
        if arrival.attempt is attempt:
            arrival.attempt = None
        stored = attempt.result()
        if not stored:
            arrival.holders.ended(link.peer, rate, self._loop.time())
        elif arrival.length - at >= SEGMENT_BYTES:  # fewer bytes measure latency
            seconds = max(self._loop.time() - began, 1e-3)
            best = (arrival.length - at) / seconds
            self._best_rate = max(best, BEST_MEMORY * self._best_rate)
        return stored

    async def _spell(
        self, arrival: Arrival, attempt: asyncio.Future[bool], link: PayloadLink
    ) -> float:
        """Watch for a while and judge: ends an attempt that should be left. Bytes per second, 0
        when the attempt ended by itself."""
        holders = arrival.holders
        began, came = self._loop.time(), arrival.came()
        await asyncio.wait({attempt}, timeout=min(holders.spell(link.peer), STALL_SECONDS))
        if attempt.done() or arrival.storing:
            return 0.0
        now = self._loop.time()
        rate, left = (arrival.came() - came) / (now - began), arrival.length - arrival.came()
        if holders.should_leave(link.peer, rate, left, now, self._best_rate):
            arrival.end(False)
            link.send(REFUSE, Refuse(arrival.root, "another holder is asked"))
        return rate

    # Faults

    def lied(self, arrival: Arrival, link: PayloadLink, reason: str) -> None:
        """A peer sent bytes that are not the payload's: ask others, and never it for this one."""
        arrival.holders.exclude(link.peer)
        self.misbehaved(link, Fault.WITHHELD, reason)

    def misbehaved(self, link: PayloadLink, fault: Fault, reason: str) -> None:
        """A peer broke a rule: report it and end this connection."""
        self._cooling[link.peer] = self._loop.time() + MISBEHAVED_SECONDS
        self._on_fault(link.peer, fault, reason)
        link.abort(reason)
