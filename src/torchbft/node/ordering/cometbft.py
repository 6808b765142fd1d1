"""One CometBFT below one peer: home folder, process, signer and RPC put together.

The application must be served at ``application`` before ``start``; everything else is done here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from pathlib import Path

from torchbft.node.ordering.binary import find_binary
from torchbft.node.ordering.genesis import chain_id
from torchbft.node.ordering.home import FOLDER, Home
from torchbft.node.ordering.process import EngineProcess, Notice
from torchbft.node.ordering.rpc import Rpc, RpcError
from torchbft.node.ordering.settings import bind_host, settings
from torchbft.node.ordering.signer import SignerServer
from torchbft.node.ordering.signing import Signer
from torchbft.node.ordering.signstate import SignState, state_path
from torchbft.node.transports import clock
from torchbft.node.transports.ports import listening_sockets
from torchbft.primitives.errors import ConfigError, HaltError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Member, RunSpec, connection_id, connection_key

POLL_SECONDS = 0.05
"""Between questions whether a starting engine answers; it takes a second or two."""
READY_SECONDS = 60.0
"""For ``ready``: replaying a long chain takes longer, and may be awaited again."""
WATCH_SECONDS = 1.0
"""Between looks at an engine's connections."""
SILENT = 30.0
"""Seconds without an answer of an engine that answered before; one that replays does not yet."""
UNCONNECTED_SECONDS = 12.0
"""An engine that does not reach reachable members for so long is started again: in the first two
minutes it dials every 5 to 8 s by itself, then it backs off to hours, and then gives up."""
MAX_UNCONNECTED_SECONDS = 240.0
"""Doubled with each restart that did not help, up to here."""
PROBE_SECONDS = 1.0
"""For one connection to a member: a handshake round the globe takes a third of a second."""
PROBES = 3
"""The fastest counts: what a busy machine adds is not the network's."""


CLOCK_SECONDS = 30.0
"""Between looks at the others' clocks; ours may be set while we run."""


class CometEngine:
    """CometBFT of member ``me``, in ``folder`` (the peer's).

    reachable: names of the members that the control channel reaches now. listen: where the engine
    listens instead of the roster's place. metrics_port: of its own Prometheus metrics on loopback,
    0 for none. application: one of the engine's own instead of ours, as ``kvstore``.
    """

    def __init__(
        self,
        run: RunSpec,
        me: PeerId,
        folder: Path,
        *,
        identity: SigningKey,
        voting: SigningKey,
        notice: Notice,
        reachable: Callable[[], Collection[str]] | None = None,
        listen: tuple[str, int] | None = None,
        metrics_port: int = 0,
        application: str = "",
    ) -> None:
        if connection_id(identity) != run.member(me).ledger_id:
            raise ConfigError(
                f"the ledger_id of {me!r} is not that of its identity key",
                where="run file",
                hint="let the member make its entry anew: torchbft init, then torchbft request",
            )
        self._run, self._me, self._notice = run, me, notice
        self._identity, self._connection = identity, connection_key(identity)
        self._voting = voting
        self._reachable, self._listen, self._metrics = reachable, listen, metrics_port
        self._other_application = application
        self.home = Home(folder / FOLDER)
        self._sockets = self.home.sockets()
        self.application = self._sockets.application
        """Path of the unix socket on which the application is to be served."""
        self.rpc = Rpc(self._sockets.rpc)
        self._signer: Signer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._process = EngineProcess(self._prepare, self.home.folder, notice)
        self._patience = UNCONNECTED_SECONDS

    @property
    def process(self) -> EngineProcess:
        """The child: its pid, its restarts, and the future ``failed``."""
        return self._process

    async def start(self) -> None:
        """Start the engine and all that belongs to it. Raises ConfigError, StorageError, and
        HaltError for a clock that is off."""
        self._binary = find_binary()
        await self._check_port()
        await self._check_clock()
        state = self._open_state()
        self._signer = Signer(chain_id(self._run), self._voting, state)
        try:
            await self._process.start()
        except BaseException:
            state.close()
            raise
        server = SignerServer(self._sockets.signer, self._signer, self.rpc.commit, self._notice)
        work = (server.run(), self._watch(), self._watch_clock())
        self._tasks = [asyncio.create_task(each) for each in work]

    async def _check_port(self) -> None:
        """Raise ConfigError, which names the holder, where the engine could only end again."""
        member = self._run.member(self._me)
        host, port = self._listen or (bind_host(member.host), member.ledger_address[1])
        for sock in await listening_sockets(host, port):
            sock.close()

    async def _check_clock(self) -> None:
        """Raise HaltError if the other members' clocks say that ours is off."""
        off = clock.off_by(self._run, await clock.readings(self._run, self._me, self._identity))
        if off is not None:
            raise HaltError(
                f"this machine's clock is {clock.words(off)}",
                where="ledger",
                hint="set it (timedatectl set-ntp true) and start again: blocks carry their time",
            )

    async def _watch_clock(self) -> None:
        while True:
            await asyncio.sleep(CLOCK_SECONDS)
            try:
                await self._check_clock()
            except HaltError as error:
                self._process.fail(error)
                return

    async def ready(self, seconds: float = READY_SECONDS) -> None:
        """Wait until the engine answers calls. Raises RpcError after ``seconds``, HaltError."""
        until = asyncio.get_running_loop().time() + seconds
        while True:
            if self._process.failed.done():
                self._process.failed.result()
            try:
                await self.rpc.status()
                return
            except RpcError:
                if asyncio.get_running_loop().time() > until:
                    raise
            await asyncio.sleep(POLL_SECONDS)

    async def stop(self) -> None:
        """End the engine, then its signer. Leaves no process behind. May be called twice."""
        await self._process.stop()
        for task in self._tasks:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks = []
        if self._signer is not None:
            self._signer.state.close()
            self._signer = None

    def rotate(self, voting: SigningKey, height: int) -> None:
        """Vote with another key, which never signed, above ``height``. Raises StorageError."""
        path = state_path(self.home.folder, voting.public)
        SignState.create(path, voting.public, chain_id(self._run), height)
        if self._signer is not None:
            self._signer.use(voting, SignState(path, voting.public, chain_id(self._run)))
        self._voting = voting

    def _open_state(self) -> SignState:
        """The voting key's signing state; made where this member's engine was never prepared."""
        path, chain = state_path(self.home.folder, self._voting.public), chain_id(self._run)
        if self.home.fresh and not path.exists():
            self.home.make()
            SignState.create(path, self._voting.public, chain)
        return SignState(path, self._voting.public, chain)

    async def _prepare(self) -> list[str]:
        """Write what the engine reads at its start; returns its command."""
        measured = await round_trip(self._run, self._me)
        chosen = settings(
            self._run,
            self._me,
            self._sockets,
            round_trip=measured,
            listen=self._listen,
            metrics_port=self._metrics,
            application=self._other_application,
        )
        self.home.prepare(self._run, self._connection, chosen)
        for left in (self._sockets.signer, self._sockets.rpc):  # of an engine that was killed
            Path(left).unlink(missing_ok=True)
        return [str(self._binary), "start", "--home", str(self.home.folder)]

    async def _watch(self) -> None:
        """Start an engine again that fell silent, or does not find its way back to the others."""
        since: float | None = None
        answered: tuple[int | None, float] = (None, 0.0)
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                missing = await self._missing()
            except RpcError:  # it is starting or ending, or hangs
                pid, last = answered
                if pid is not None and pid == self._process.pid and loop.time() > last + SILENT:
                    self._process.restart(f"it has not answered for {SILENT:g} s")
                    answered = (None, 0.0)
                continue
            answered = (self._process.pid, loop.time())
            if not self._too_many(missing):
                since = None
                self._patience = UNCONNECTED_SECONDS if not missing else self._patience
                continue
            since = loop.time() if since is None else since
            patient = loop.time() < since + self._patience
            if patient or not self._too_many(await _listening(missing)):
                continue
            names = ", ".join(member.name for member in missing)
            self._process.restart(f"it stays unconnected with {names}, who can be reached")
            since, self._patience = None, min(2 * self._patience, MAX_UNCONNECTED_SECONDS)

    async def _missing(self) -> list[Member]:
        """Validators that the node reaches and its engine does not."""
        connected = await self.rpc.connected()
        reachable = None if self._reachable is None else set(self._reachable())
        return [
            member
            for member in self._run.validators
            if member.name != self._me
            and member.ledger_id not in connected
            and (reachable is None or member.name in reachable)
        ]

    def _too_many(self, members: Collection[Member]) -> bool:
        """More than f, in power: fewer cannot stop the chain, and may be liars that want us to
        restart."""
        return sum(member.power for member in members) > self._run.validator_faults.f


async def round_trip(run: RunSpec, me: PeerId) -> float:
    """Seconds to a quorum of validators and back, as a TCP handshake takes; 0 if none is there.

    A refused connection is a round trip as well.
    """
    others = [member for member in run.validators if member.name != me]
    times = sorted(
        seconds
        for seconds in await asyncio.gather(*(_handshake(m.host, m.port) for m in others))
        if seconds is not None
    )
    needed = run.validator_faults.quorum - run.member(me).power
    return times[min(max(needed, 1), len(times)) - 1] if times else 0.0


async def _handshake(host: str, port: int) -> float | None:
    loop, best = asyncio.get_running_loop(), None
    for _ in range(PROBES):
        started = loop.time()
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, writer = await asyncio.open_connection(host, port)
            writer.close()
        except ConnectionRefusedError:
            pass
        except (OSError, TimeoutError):
            return best
        seconds = loop.time() - started
        best = seconds if best is None else min(best, seconds)
    return best


async def _listening(members: Collection[Member]) -> list[Member]:
    """Those whose engines accept connections."""

    async def accepts(member: Member) -> bool:
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                _, writer = await asyncio.open_connection(*member.ledger_address)
        except (OSError, TimeoutError):
            return False
        writer.close()
        return True

    answers = await asyncio.gather(*(accepts(member) for member in members))
    return [member for member, there in zip(members, answers, strict=True) if there]
