"""The host of one peer in the world: carries out the effects of its machine under asyncio.

One event loop owns the machine, the connections and the logs; one thread decodes, aggregates and
stores. An ordering engine outside, if the run has one, is a child process (``ordering``). Effects
are carried out in order, and everything persisted is durable before the next send or apply. What
the machine asks for and when it may act is all decided in ``protocols``; here is only how.
"""

from __future__ import annotations

import asyncio
import platform
import signal
import time
import traceback
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

from torchbft.node import wish
from torchbft.node.chronicle import Chronicle
from torchbft.node.link import Delivery, Endpoint, Evaluation, Hello, Leave, Submit
from torchbft.node.members import Members
from torchbft.node.model import Applied, ModelKeeper
from torchbft.node.ordering.orderer import Engine, Orderer, orderer_of
from torchbft.node.statecopy import RETRY_SECONDS, StateCopies, StateOffered
from torchbft.node.storage.checkpoints import Checkpoints
from torchbft.node.storage.lock import FolderLock
from torchbft.node.storage.log import AppendLog
from torchbft.node.storage.payloads import PayloadStore
from torchbft.node.storage.saved import load_value, save_value
from torchbft.node.supervisor import EXIT_FAILED, EXIT_FINISHED, EXIT_HALTED
from torchbft.node.trainer import Assigned, Ended, TrainerPort
from torchbft.node.transports.control import ControlChannel
from torchbft.node.transports.data import DataPlane
from torchbft.node.transports.endpoint import Endpoint as NetEndpoint
from torchbft.node.transports.metering import Meter
from torchbft.primitives import trace
from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Send, Tick
from torchbft.primitives.errors import HaltError, TorchbftError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.keys import KeyRing, SigningKey
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.peer import BlockDone, Order, SaveApplication, Suspected, peer_of
from torchbft.protocols.round import interface as rounds
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.assignment import Share, positions
from torchbft.protocols.round.events import OpeningsClosed
from torchbft.protocols.round.state import Accepted, Phase
from torchbft.tensors.advance import LedgerFields
from torchbft.tensors.recipe import Recipe
from torchbft.tensors.state import AgreedState

LOGS = ("votes", "blocks", "statements")
LOGS_UNDER_ENGINE = ("statements",)
"""An ordering engine outside keeps its own votes and blocks."""
APPLICATION = "application.state"
"""Under an engine outside: the ledger's state after its last block."""
APPLICATION_HINT = "remove it: the ordering engine hands its blocks over again"
MAX_ACCUSATIONS = 4096
"""Accusations remembered as told: 64 members with 8 faults in 8 rounds."""
STATE = b"\x03"
"""First byte of control messages about copies of the agreed state (``statecopy.py``)."""
LINGER_SECONDS = 20.0
"""After the end a node still serves blocks and payloads to those behind, so long as any is
connected and at most so long, unless it is told to stop before."""
NOBODY_HERE = (
    "; they have not started, cannot be reached (torchbft doctor tells), or are done with the run:"
    " a node serves those behind for 20 s after the end (their torchbft status tells)"
)
MAX_INSPECTED = 512
"""Verdicts on payloads kept: those of 64 members in the four rounds around the current one, twice.
The payloads themselves are kept for the audit and dispute windows: until audits exist, always."""

_T = TypeVar("_T")


class Machine(Protocol):
    """What the host runs: what ``peer_of`` builds, or what a test builds around it."""

    @property
    def application(self) -> Application: ...
    def last_commitment(self, number: int) -> float | None: ...
    def start(self, now: float) -> list[Effect]: ...
    def handle(self, event: object, now: float) -> list[Effect]: ...
    def deadline(self) -> float | None: ...


Voting = SigningKey | KeyRing
BuildPeer = Callable[[RunSpec, PeerId, Voting, bytes, Mapping[str, Sequence[bytes]]], Machine]
"""Makes the machine from run, me, voting keys, secret and records. Another one than ``peer_of`` is
a test switch: an adversary around it."""


class PeerHost:
    """One peer: build it inside a running loop and await ``run()``, which returns an exit code.

    ``identity`` authenticates connections, ``voting`` signs, ``secret`` seeds salts and shares;
    ``link`` is the trainer's socket, None for a peer without one; ``engine`` takes the place of the
    ordering engine outside that the run names.
    """

    def __init__(
        self,
        run: RunSpec,
        me: PeerId,
        folder: Path,
        *,
        identity: SigningKey,
        voting: SigningKey,
        secret: bytes,
        link: Endpoint | None = None,
        build: BuildPeer = peer_of,
        listen: tuple[str, int] | None = None,
        engine: Engine | None = None,
    ) -> None:
        self._run, self._me, self._folder = run, me, folder
        self._identity, self._voting, self._secret = identity, voting, secret
        self._link, self._build, self._listen = link, build, listen
        self._engine, self._orderer = engine, cast(Orderer | None, None)
        self._recipe = Recipe.of(run)
        self._loop = asyncio.get_running_loop()
        self._done: asyncio.Future[int] = self._loop.create_future()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tensors")
        self._inbox: deque[object] = deque()
        self._handling = False
        self._timer: asyncio.TimerHandle | None = None
        self._dirty: set[str] = set()
        self._inspected: dict[bytes, str | None] = {}
        self._voids: dict[int, str] = {}
        self._pending_advance: rounds.Advance | None = None
        self._asking: asyncio.TimerHandle | None = None
        self._told: set[tuple[str, str, int]] = set()
        self._answering: set[PeerId] = set()
        self._finished = False

    async def run(self) -> int:
        """Take part until the run is over or this peer is told to stop."""
        with ExitStack() as stack:
            stack.callback(self._thread.shutdown, cancel_futures=True)
            lock = FolderLock(self._folder)
            stack.callback(lock.release)
            self._open_storage(stack)
            await self._open_network()
            self._loop.add_signal_handler(signal.SIGTERM, self._stop, "stopped", "told to stop")
            self._loop.add_signal_handler(wish.LOOK, self._look_for_wish)
            try:
                self._begin()
                await self._begin_ordering()
                code = await self._done
            finally:
                if self._timer is not None:
                    self._timer.cancel()
                if self._orderer is not None:
                    await self._orderer.stop()
                await self._close_network()
            return code

    # --- opening and closing ----------------------------------------------------------------------

    def _open_storage(self, stack: ExitStack) -> None:
        self._meter = Meter()
        self._chronicle = Chronicle(self._folder, self._me, self._meter)
        stack.callback(self._chronicle.close)
        names = LOGS if self._run.ledger.kind == "embedded" else LOGS_UNDER_ENGINE
        self._logs = {name: AppendLog(self._folder / f"{name}.log") for name in names}
        for log in self._logs.values():
            stack.callback(log.close)
            if log.dropped:
                self._chronicle.notice(f"{log.path.name}: dropped a torn last record")
        records: dict[str, Sequence[bytes]] = dict(self._logs)
        saved = load_value(self._folder / APPLICATION, APPLICATION_HINT)
        records["application"] = [saved] if saved is not None else []
        self._members = Members(
            self._run, self._me, self._folder, self.feed, self._chronicle.notice
        )
        keys = self._members.keys(self._voting)
        self._machine = self._build(self._run, self._me, keys, self._secret, records)
        self._block_round = self._current_round()
        self._payloads = PayloadStore(self._folder / "payloads")
        self._keeper = ModelKeeper(
            self._run,
            self._recipe,
            self._folder,
            Checkpoints(self._folder / "checkpoints"),
            self._payloads,
        )

    async def _open_network(self) -> None:
        roster = self._members.roster(self._machine.application.state)
        self._network = NetEndpoint(
            self._me, self._identity, roster, run_id=self._run.run_id, meter=self._meter
        )
        self._control = ControlChannel(
            self._network, self._on_message, self._on_peer, self._on_channel_fault
        )
        self._data = DataPlane(
            self._network,
            self._payloads,
            encrypt=self._run.transport.encrypt_payloads,
            max_payload=self._run.transport.max_payload_bytes,
            on_stored=self._on_stored,
            on_fault=self._on_channel_fault,
            on_disk_error=lambda error: self._chronicle.notice(f"{error}; {error.hint}"),
        )
        self._copies = StateCopies(self._keeper, self._payloads)
        await self._network.listen(*(self._listen or self._members.address))
        self._control.connect_all()

    async def _close_network(self) -> None:
        await self._data.close()
        await self._control.close()
        await self._network.close()

    def _begin(self) -> None:
        peers = tuple(sorted(m.name for m in self._run.members))
        self._trainer = (
            TrainerPort(self._link, self._loop, self._on_trainer, peers) if self._link else None
        )
        self._tell_start()
        resumed = self._keeper.resume()
        for line in self._keeper.unusable:
            self._chronicle.notice(f"passed over a saved state: {line}")
        if resumed:
            self._limit_payloads()
        self._chronicle.show(force=True, phase="starting", round=0)
        self._carry_out(self._machine.start(self._loop.time()))
        self._members.look()
        if resumed:
            self._state_is_at()
        self._reschedule()

    def _limit_payloads(self) -> None:
        layout = self._keeper.current().layout
        self._data.limit(self._recipe.codec.max_bytes(layout))

    async def _begin_ordering(self) -> None:
        """Start the ordering engine outside, if this run has one."""
        if self._run.ledger.kind == "embedded":
            return
        self._orderer = orderer_of(
            self._run,
            self._me,
            self._folder,
            self._machine.application,
            identity=self._identity,
            voting=self._voting,
            feed=self.feed,
            notice=self._chronicle.notice,
            reachable=self._control.connected,
            engine=self._engine,
        )
        await self._orderer.start()
        self._orderer.failed.add_done_callback(self._engine_failed)

    def _engine_failed(self, failed: asyncio.Future[None]) -> None:
        if not failed.cancelled() and (error := failed.exception()) is not None:
            self._fail(error)

    def _tell_start(self) -> None:
        run, faults = self._run, self._run.contributor_faults
        self._chronicle.write(
            trace.RunStarted(
                at=time.time(),
                peer=self._me,
                run_id=run.run_id.hex(),
                name=run.name,
                members=tuple(m.name for m in run.members),
                validators=len(run.validators),
                contributors=len(run.contributors),
                f=faults.f,
                quorum=run.validator_faults.quorum,
                rule=run.aggregation.rule,
                codec=run.aggregation.codec,
                engine=run.ledger.kind,
                inner_steps=run.training.inner_steps * run.training.accumulate,
                batch_size=run.training.batch_size,
                encrypted=run.transport.encrypt_payloads,
                parameters=0 if not self._keeper.ready else self._parameters(),
                machine=f"{platform.system()} {platform.machine()}",
                versions={"python": platform.python_version(), "torch": version("torch")},
            )
        )

    def _parameters(self) -> int:
        return self._keeper.current().layout.parameter_count

    # --- the machine's loop -----------------------------------------------------------------------

    def feed(self, event: object) -> None:
        """Give the machine an input, after those that wait already."""
        self._inbox.append(event)
        if self._handling:
            return
        self._handling = True
        try:
            while self._inbox and not self._done.done():
                now = self._loop.time()
                self._carry_out(self._machine.handle(self._inbox.popleft(), now))
        except Exception as error:  # ours: a peer's fault never raises
            self._fail(error)
        finally:
            self._handling = False
        self._reschedule()

    def _reschedule(self) -> None:
        """Have a timer that fires no later than the machine's deadline; early firing is harmless,
        and cheaper than to move the timer with every input."""
        at = self._machine.deadline()
        if at is None or self._done.done():
            return
        if self._timer is not None and self._loop.time() < self._timer.when() <= at:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.feed(Tick())

    def _carry_out(self, effects: Sequence[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Persist):
                self._logs[effect.log].append(effect.record)
                self._dirty.add(effect.log)
                continue
            self._make_durable()
            if isinstance(effect, Broadcast):
                self._control.broadcast(effect.message)
            elif isinstance(effect, Send):
                self._control.send(effect.to, effect.message)
            else:
                self._apply(effect)
        self._make_durable()

    def _make_durable(self) -> None:
        for name in self._dirty:
            self._logs[name].sync()
        self._dirty.clear()

    def _apply(self, effect: Effect) -> None:
        handler = _HANDLERS.get(type(effect))
        if handler is not None:
            handler(self, effect)

    def _in_thread(self, work: Callable[[], _T], then: Callable[[_T], None]) -> None:
        """Run ``work`` on the tensor thread, then ``then`` on the loop."""

        def done(future: asyncio.Future[_T]) -> None:
            if future.cancelled() or (future.exception() and self._done.done()):
                return  # too late to matter
            try:
                result = future.result()
                if not self._done.done():
                    then(result)
            except BaseException as error:  # of the work, or ours in taking its result
                self._fail(error)

        asyncio.ensure_future(self._loop.run_in_executor(self._thread, work)).add_done_callback(
            done
        )

    def _order(self, effect: Order) -> None:
        if self._orderer is not None:
            self._orderer.order(effect.tx)

    def _save_application(self, effect: SaveApplication) -> None:
        save_value(self._folder / APPLICATION, effect.record)

    # --- what comes in ----------------------------------------------------------------------------

    def _on_message(self, sender: PeerId, message: bytes) -> None:
        if message[:1] == STATE:
            self._on_state_message(sender, message[1:])
        else:
            self.feed(Received(sender, message))

    def _on_peer(self, peer: PeerId, connected: bool) -> None:
        self._chronicle.show(connected=sorted(self._control.connected()))

    def _on_channel_fault(self, peer: PeerId, fault: Fault | None, reason: str) -> None:
        self._accuse(peer, fault or "misbehaviour", self._current_round(), False, reason)

    def _on_stored(self, sender: PeerId | None, root: bytes) -> None:
        """A payload is held whole; a copy of the agreed state is not inspected as an update."""
        if self._done.done():
            return
        if self._copies.expects(root):
            self._in_thread(lambda: self._copies.adopt(root), self._after_copy)
        else:
            self._inspect(root)

    def _on_trainer(self, delivery: Delivery | None) -> None:
        port = self._trainer
        if port is None or self._done.done():
            return
        if delivery is None:
            port.gone()
            if not self._finished:
                self._chronicle.notice(
                    "the trainer of this peer is gone; the node goes on without it"
                )
            self._maybe_linger()
            return
        message = delivery.message
        if isinstance(message, Hello):
            self._on_hello(delivery, port)
        elif isinstance(message, Submit):
            self._on_submit(message, delivery.take(), port)
        elif isinstance(message, Evaluation):
            self._chronicle.evaluated(
                message.round, message.loss, message.accuracy, message.train_loss, message.seconds
            )
        elif isinstance(message, Leave) and not self._finished:
            self._stop("stopped", "this peer left")

    def _on_hello(self, delivery: Delivery, port: TrainerPort) -> None:
        initial = AgreedState.decode(delivery.take())

        def ready(fresh: bool) -> None:
            if fresh:
                self._tell_start()  # once more, now that the model and its size are known
            self._limit_payloads()
            port.begin(self._ended, self._keeper.saved())
            self._state_is_at()

        def begin() -> bool:
            fresh = not self._keeper.ready
            if fresh:
                self._keeper.begin(initial)
            return fresh

        self._in_thread(begin, ready)

    def _on_submit(self, message: Submit, payload: bytes, port: TrainerPort) -> None:
        round_ = Round(message.round)

        def stored(root: bytes) -> None:
            self._chronicle.mark(round_, "trained", self._loop.time())
            self._chronicle.contributed(round_, len(payload), message.seconds)
            port.submitted(round_, self._ended, self._keeper.saved())
            self.feed(rounds.Trained(round_, len(payload), root, message.trace_root))

        self._in_thread(lambda: self._payloads.put(payload, round_), stored)

    # --- payloads ---------------------------------------------------------------------------------

    def _inspect(self, root: bytes) -> None:
        if not self._keeper.ready:
            return  # the machine asks again once the model is there
        if root in self._inspected:
            self._tell_payload(root)
            return

        def inspected(reason: str | None) -> None:
            if len(self._inspected) >= MAX_INSPECTED:
                self._inspected.pop(next(iter(self._inspected)))  # inspected anew, if needed
            self._inspected[root] = reason
            self._tell_payload(root)

        def inspect() -> str | None:
            if self._payloads.length(root) > self._data.max_payload:
                return "oversized"  # before it is read into memory
            return self._keeper.inspect(root)

        self._in_thread(inspect, inspected)

    def _tell_payload(self, root: bytes) -> None:
        """Tell the machine of a payload for everyone who opened it, copies included."""
        for number, item in self._opened():
            if item.payload_root == root:
                self._tell_item(number, item, self._inspected[root])
        self._try_advance()

    def _tell_item(self, number: int, item: Accepted, reason: str | None) -> None:
        author, root = PeerId(item.author), item.payload_root
        if item.payload_length != self._payloads.length(root):
            reason = "wrong-length"  # what an opening claims sets time-outs
        if reason is None:
            self.feed(rounds.PayloadStored(Round(number), author, root))
        else:
            self.feed(rounds.PayloadRefused(Round(number), author, root, reason))

    def _opened(self) -> list[tuple[int, Accepted]]:
        state = self._machine.application.state
        known = [r for r in (state.previous, state.current) if r is not None]
        return [(r.number, item) for r in known for item in r.opened]

    def _offer(self, effect: rounds.OfferPayload) -> None:
        others = [name for name in self._network.roster if name != self._me]
        to = getattr(effect, "to", None) or others
        self._data.push(effect.payload_root, to, (effect.round, self._me))

    def _fetch(self, effect: rounds.FetchPayload) -> None:
        root = effect.payload_root
        if self._payloads.keep(root, effect.round):
            self._inspect(root)
        elif effect.length > self._data.max_payload:
            self.feed(rounds.PayloadRefused(effect.round, effect.author, root, "oversized"))
        else:
            label = (effect.round, effect.author)
            self._data.fetch(root, effect.length, effect.holders, label)

    # --- the agreed state -------------------------------------------------------------------------

    def _advance(self, effect: rounds.Advance) -> None:
        self._chronicle.mark(effect.round, "fetch", self._loop.time())
        self._pending_advance = effect
        self._try_advance()

    def _try_advance(self) -> None:
        effect = self._pending_advance
        if effect is None or not self._keeper.ready:
            return
        self._pending_advance = None
        fixed = self._machine.application.state.round_of(effect.round)
        accepted = [(PeerId(item.author), item.payload_root) for item in effect.accepted]
        before = self._keeper.current()
        fields = LedgerFields(
            round=effect.round + 1,
            inner_step=before.inner_step + self._run.training.inner_steps,
            pass_index=effect.ledger.pass_index,
            cursor=effect.ledger.cursor,
            membership_digest=effect.ledger.membership_digest,
            credit_digest=effect.ledger.credit_digest,
        )
        f = fixed.f if fixed is not None else self._run.contributor_faults.f
        self._in_thread(
            lambda: self._keeper.apply(effect.round, effect.from_root, accepted, f, fields),
            self._applied,
        )

    def _applied(self, applied: Applied | None) -> None:
        if applied is None:
            return  # what took the place of that state has been told
        self._chronicle.mark(applied.round, "aggregate", self._loop.time())
        self._chronicle.aggregated(applied.round, applied.advanced)
        for peer in applied.advanced.refused_by_norm:
            self._accuse(peer, Fault.NORM_OUTLIER, applied.round, False, "norm-outlier")
        self.feed(rounds.StateAdvanced(Round(applied.round), applied.root))

    def _state_is_at(self) -> None:
        state = self._keeper.current()
        self.feed(rounds.StateAdvanced(Round(state.round - 1), state.root()))
        for number, item in self._opened():
            if self._payloads.keep(item.payload_root, Round(number)):
                self._inspect(item.payload_root)

    def _root_agreed(self, effect: rounds.RootAgreed) -> None:
        now = self._loop.time()
        fixed = self._machine.application.state.round_of(effect.round)
        if fixed is not None:
            self._chronicle.decided(effect.round, [item.author for item in fixed.accepted])
        self._chronicle.mark(effect.round, "root", now)
        self._chronicle.round_ended(effect.round, now, root=effect.root)

    def _drop_round(self, effect: rounds.DropRound) -> None:
        self._voids[effect.round] = effect.reason
        self._chronicle.notice(f"round {effect.round} is void: {effect.reason}")
        self._chronicle.round_ended(effect.round, self._loop.time(), void=effect.reason)

        def taken_back(undone: bool) -> None:
            if undone:
                self._state_is_at()

        self._in_thread(lambda: self._keeper.take_back(effect.round), taken_back)

    def _copy_state(self, effect: rounds.CatchUp | rounds.Diverged) -> None:
        signed = effect.root if isinstance(effect, rounds.CatchUp) else effect.signed_root
        what = "is behind" if isinstance(effect, rounds.CatchUp) else "diverged"
        self._chronicle.notice(
            f"this peer {what} at round {effect.round}: copying the agreed state of root "
            f"{signed.hex()[:16]}… from {', '.join(effect.holders) or 'nobody'}",
            effect.holders,
        )
        self._copies.want(effect.round, signed, effect.holders)
        if self._asking is not None:
            self._asking.cancel()
        self._ask_for_copy()

    def _ask_for_copy(self) -> None:
        """Ask until a copy is there, for messages may be lost and holders die."""
        messages = self._copies.ask()
        for holder, message in messages:
            self._control.send(holder, STATE + message)
        if messages and not self._done.done():
            self._asking = self._loop.call_later(RETRY_SECONDS, self._ask_for_copy)

    def _on_state_message(self, sender: PeerId, message: bytes) -> None:
        if sender in self._answering:
            return  # one question at a time; who needs more asks again
        self._answering.add(sender)

        def answered(reply: bytes | StateOffered | None) -> None:
            self._answering.discard(sender)
            if isinstance(reply, bytes):
                self._control.send(sender, STATE + reply)
            elif reply is not None:
                label = (Round(reply.round), sender)
                self._data.fetch(reply.payload_root, reply.length, [sender], label, passing=True)

        self._in_thread(lambda: self._copies.received(sender, message), answered)

    def _after_copy(self, refused: str | None) -> None:
        if refused is None:
            self._state_is_at()
        else:
            self._chronicle.notice(f"a copy of the agreed state was left: {refused}")

    # --- rounds, and their end --------------------------------------------------------------------

    def _current_round(self) -> int:
        return self._machine.application.state.current.number

    def _start_training(self, effect: rounds.StartTraining) -> None:
        now = self._loop.time()
        self._chronicle.mark(effect.round, "start", now)
        self._chronicle.show(phase="train", round=effect.round, waiting_for=(), until=None)
        if self._trainer is not None:
            assigned = Assigned(effect.round, self._positions(effect.assignment))
            self._trainer.assign(assigned, self._ended, self._keeper.saved())

    def _positions(self, share: Share) -> Sequence[int] | None:
        if self._run.data.mode == "private":
            return None
        return [position for part in share for position in positions(part)]

    def _ended(self, round_: int) -> Ended:
        accepted, reason = self._chronicle.outcome(round_, self._me)
        void = self._voids.get(round_, "")
        return Ended(accepted and not void, bool(void), void or reason)

    def _block_done(self, done: BlockDone) -> None:
        now = self._loop.time()
        before = self._before_block()
        state = self._machine.application.state
        self._members.follow(state, self._network, self._control, self._data)
        self._chronicle.block(done, before, self._machine.last_commitment(before), now)
        leader = getattr(self._machine, "leader", "")
        phase = state.phase
        if phase == Phase.FINISHED and not self._finished:
            phase = Phase.ROOT  # the ledger's part is over; this peer has no agreed state yet
        self._chronicle.show(phase=str(phase), round=state.current.number, leader=str(leader))
        for event in done.events:
            if isinstance(event, OpeningsClosed):
                for item in event.opened:
                    held = self._payloads.keep(item.payload_root, Round(event.round))
                    if held and item.payload_root in self._inspected:
                        self._tell_item(event.round, item, self._inspected[item.payload_root])

    def _before_block(self) -> int:
        """The round to which a block belongs: the one that was current before it."""
        state = self._machine.application.state
        number = self._block_round
        self._block_round = state.current.number
        self._data.advance(Round(self._block_round))
        for old in range(max(number - 1, 0), self._block_round - 1):
            self._data.cancel(Round(old))  # nobody pushes or fetches for a settled round
        return number

    def _waiting(self, effect: rounds.Waiting) -> None:
        now, names = self._loop.time(), ", ".join(effect.for_whom) or "the ledger"
        ends = f", at most {max(effect.until - now, 0):.0f} s more" if effect.until else ""
        connected = self._control.connected()
        away = [p for p in effect.for_whom if p not in connected and p != self._me]
        reachable = f" (not connected: {', '.join(away)})" if away else ""
        if away and not connected:
            reachable += NOBODY_HERE
        quorum = self._run.validator_faults.quorum
        more = quorum - len(self._run.members) + len(effect.for_whom)
        lead = f"waiting for {max(more, 1)} more of quorum {quorum}" if away else "waiting for"
        self._chronicle.notice(
            f"round {effect.round}, {effect.phase}: {lead}: {names}{reachable}{ends}",
            effect.for_whom,
        )
        until = time.time() + effect.until - now if effect.until else None
        self._chronicle.show(
            force=True, phase=effect.phase, waiting_for=effect.for_whom, until=until
        )

    def _accused(self, effect: rounds.Accuse) -> None:
        reason = effect.reason
        if effect.fault == Fault.ABSENT and effect.peer not in self._control.connected():
            reason = trace.NOT_CONNECTED
        self._accuse(effect.peer, effect.fault, effect.round, effect.named, reason)

    def _suspected(self, effect: Suspected) -> None:
        self._accuse(effect.peer, effect.fault, self._current_round(), False, effect.reason)

    def _accuse(self, peer: PeerId, fault: str, round_: int, named: bool, reason: str) -> None:
        """Write an accusation down, once per peer, fault and round: liars may repeat themselves."""
        told = (peer, str(fault), round_)
        if told in self._told:
            return
        if len(self._told) >= MAX_ACCUSATIONS:
            self._told.clear()
        self._told.add(told)
        self._chronicle.write(
            trace.Accused(
                at=time.time(),
                peer=peer,
                fault=str(fault),
                round=round_,
                named=named,
                reason=reason,
            )
        )

    def _look_for_wish(self) -> None:
        """``torchbft vote``; and ``void``: the operator would rather void a round than wait for its
        root."""
        self._members.look()
        reason, due = wish.taken(self._folder), self._machine.application.state.unsigned
        if reason is None:
            return
        if due is None:
            self._chronicle.notice("asked to void a round, but none waits for its root")
            return
        self._chronicle.notice(f"round {due.number}: this peer votes to void it: {reason}")
        self.feed(rounds.PreferVoid(Round(due.number), reason))

    def _finish(self, effect: rounds.Finished) -> None:
        self._finished = True
        self._over("finished", "")
        self._maybe_linger()

    def _halt(self, effect: rounds.Halt) -> None:
        self._over("halted", effect.reason)
        print(f"halted: {effect.reason}", flush=True)
        self._end(EXIT_HALTED)

    def _over(self, status: str, reason: str) -> None:
        root = self._keeper.current().root().hex() if self._keeper.ready else ""
        self._chronicle.write(
            trace.RunEnded(
                at=time.time(),
                status=status,
                reason=reason,
                rounds=self._current_round() + (status == "finished"),
                root=root,
            )
        )
        self._chronicle.show(force=True, phase=status, waiting_for=(), until=None, root=root)
        if self._trainer is not None and self._keeper.ready:
            self._trainer.finish(status, reason, self._ended, self._keeper.saved())

    def _maybe_linger(self) -> None:
        """Serve those behind for a while after the end."""
        if self._finished and (self._trainer is None or self._trainer.idle):
            self._loop.call_later(LINGER_SECONDS, self._end, EXIT_FINISHED)

    def _stop(self, status: str, reason: str) -> None:
        if not self._finished:
            self._over(status, reason)
        self._end(EXIT_FINISHED)

    def _fail(self, error: BaseException) -> None:
        hint = getattr(error, "hint", "")
        try:
            if self._trainer is not None and not self._trainer.attached:
                self._trainer.refuse(error)
            self._over("halted", f"{error}; {hint}" if hint else str(error))
            if not isinstance(error, TorchbftError):
                traceback.print_exception(error)
            print(f"error: {error}" + (f"\nhint: {hint}" if hint else ""), flush=True)
        finally:  # even where a full disk takes no last words
            self._end(EXIT_HALTED if isinstance(error, HaltError) else EXIT_FAILED)

    def _end(self, code: int) -> None:
        if not self._done.done():
            self._done.set_result(code)


_HANDLERS: dict[type, Callable[[Any, Any], None]] = {
    rounds.StartTraining: PeerHost._start_training,
    rounds.OfferPayload: PeerHost._offer,
    rounds.FetchPayload: PeerHost._fetch,
    rounds.Advance: PeerHost._advance,
    rounds.DropRound: PeerHost._drop_round,
    rounds.CatchUp: PeerHost._copy_state,
    rounds.Diverged: PeerHost._copy_state,
    rounds.RootAgreed: PeerHost._root_agreed,
    rounds.Halt: PeerHost._halt,
    rounds.Finished: PeerHost._finish,
    rounds.Accuse: PeerHost._accused,
    rounds.Waiting: PeerHost._waiting,
    rounds.ChangeTold: lambda host, effect: host._members.told(effect),
    BlockDone: PeerHost._block_done,
    Order: PeerHost._order,
    SaveApplication: PeerHost._save_application,
    Suspected: PeerHost._suspected,
}
