"""The one port of a peer: accepts and dials connections, and hands on only authenticated ones.

A dialer introduces itself (``introduction.py``); then comes TLS, the challenge in clear
(``challenge.py``), or a question for the time (``clock.py``). A service sees a connection only once
its peer has proved to be a member. Strangers hold one of a bounded number of places for a bounded
time, until they are known to be strangers; members' handshakes have places of their own.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
import ssl
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from torchbft.node.transports import challenge, clock
from torchbft.node.transports.certificates import client_context, raw_public, server_context
from torchbft.node.transports.introduction import (
    INTRODUCTION_BYTES,
    Introductions,
    introduction,
)
from torchbft.node.transports.metering import Allowance, Meter, set_congestion
from torchbft.node.transports.ports import format_address, listening_sockets
from torchbft.primitives.errors import ConfigError, DecodeError, MisuseError, TorchbftError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey

CONTROL = "torchbft-control/1"
PAYLOADS = "torchbft-payloads/1"
PAYLOADS_CLEAR = "torchbft-payloads-clear/1"

CONNECT_SECONDS = 5.0
"""For one address to answer: longer than a lost SYN and its first two repeats."""

HANDSHAKE_SECONDS = 5.0
"""For TLS or the challenge: four round trips of 500 ms and a busy machine."""

MAX_PENDING = 128
"""Connections accepted and not yet introduced; beyond it the oldest gives way. An introduction is
under way when a member's connection is accepted, so its place there is needed for a moment only."""

PENDING_PER_MEMBER = 8
"""Handshakes in one member's name, each service's dial before and after a restart, twice over;
beyond it the oldest gives way."""

HANDSHAKES_RATE, HANDSHAKES_BURST = 1.0, 64.0
"""Handshakes in one member's name per second, and at once, on all services together: each costs a
millisecond of ours. Honest connections last; a restart makes a few."""

DEFER_SECONDS = 5
"""The system keeps connections that send nothing from us for so long, where it can."""

ACCEPTS_PER_WAKE = 32
"""Connections accepted before other work of the loop gets its turn."""

NO_DESCRIPTOR_SECONDS = 1.0
"""Pause in accepting when the process is out of file descriptors."""

_SERVICES = {CONTROL: 1, PAYLOADS: 2, PAYLOADS_CLEAR: 3}
"""``clock.SERVICE`` is 4."""
Factory = Callable[[PeerId], "asyncio.BaseProtocol | None"]


@dataclass(frozen=True, slots=True)
class Contact:
    """Where a member listens, and its 32-byte identity key. An empty host: it only dials out."""

    host: str
    port: int
    public: bytes


class UnreachableError(TorchbftError):
    """A member could not be reached, or did not prove who it is; ``what`` says which."""


class _Lobby(asyncio.Protocol):
    """Stands in until the TLS handshake is done, then gives its place to the service's protocol."""

    def __init__(self, admit: Callable[[asyncio.Transport], asyncio.BaseProtocol | None]) -> None:
        self._admit = admit
        self.protocol: asyncio.BaseProtocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stream = cast(asyncio.Transport, transport)
        self.protocol = self._admit(stream)
        if self.protocol is None:
            stream.abort()
        else:
            stream.set_protocol(self.protocol)
            self.protocol.connection_made(stream)


class Endpoint:
    """Listens and dials for all services of one peer. Must be used inside a running event loop.

    congestion: ``TCP_CONGESTION`` for every socket, None for the system's choice; ConfigError when
    the kernel does not have it. ``strangers`` counts refused connections; ``last_stranger`` says
    where the last one came from and why it was refused.
    """

    def __init__(
        self,
        me: PeerId,
        key: SigningKey,
        roster: Mapping[PeerId, Contact],
        *,
        run_id: bytes,
        meter: Meter,
        congestion: str | None = None,
    ) -> None:
        self.me, self.run_id, self.meter = me, run_id, meter
        self._key, self._congestion = key, congestion
        self._services: dict[str, Factory] = {}
        self._sockets: list[socket.socket] = []
        self._pending: dict[asyncio.Task[None], None] = {}
        self._places: dict[bytes, dict[asyncio.Task[None], None]] = {}
        self._handshakes: dict[bytes, Allowance] = {}
        self._admitting: set[asyncio.Task[None]] = set()
        self._contexts: dict[str, ssl.SSLContext] = {}
        self.strangers, self.last_stranger = 0, ""
        self.update_roster(roster)

    def update_roster(self, roster: Mapping[PeerId, Contact]) -> None:
        """Use another roster from now on; open connections are the services' to close."""
        publics = {contact.public: name for name, contact in roster.items()}
        if self.me not in roster or roster[self.me].public != self._key.public:
            raise MisuseError(f"{self.me} is not in the roster with the key it holds")
        if len(publics) < len(roster):
            raise MisuseError("two members of the roster have one key")
        self.roster = dict(roster)
        self._by_public = publics
        self._introductions = Introductions(self._key.public, frozenset(publics))
        self._contexts.clear()

    def _publics(self) -> dict[PeerId, bytes]:
        return {name: contact.public for name, contact in self.roster.items()}

    def serve(self, service: str, factory: Factory) -> None:
        """Hand accepted connections for a service to ``factory(peer)``; None refuses one."""
        self._services[service] = factory
        self._contexts.clear()

    # Listening

    async def listen(self, host: str = "", port: int = 0) -> int:
        """Accept connections; returns the port. May be called for several addresses.

        Raises ConfigError that names the address, and the process that holds a busy port.
        """
        sockets = await listening_sockets(host, port)
        for sock in sockets:
            self._check_congestion(sock)
            _defer_accept(sock)
            self._watch(sock)
        self._sockets += sockets
        return int(sockets[0].getsockname()[1])

    def _check_congestion(self, sock: socket.socket) -> None:
        if self._congestion is not None and not set_congestion(sock, self._congestion):
            raise ConfigError(
                f"this kernel has no congestion control {self._congestion!r}",
                hint="see /proc/sys/net/ipv4/tcp_available_congestion_control",
            )

    def _watch(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(sock.fileno(), self._accept, sock)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_WAKE):
            try:
                sock, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._out_of_descriptors(listening, error)
                return
            sock.setblocking(False)
            where = format_address(address[0], address[1])
            task = asyncio.get_running_loop().create_task(self._admit(sock, where))
            _take_place(self._pending, task, MAX_PENDING)
            self._admitting.add(task)
            task.add_done_callback(self._left)

    def _left(self, task: asyncio.Task[None]) -> None:
        self._admitting.discard(task)
        for places in (self._pending, *self._places.values()):
            places.pop(task, None)

    def _out_of_descriptors(self, listening: socket.socket, error: OSError) -> None:
        loop = asyncio.get_running_loop()
        if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
            raise error
        loop.remove_reader(listening.fileno())
        loop.call_later(NO_DESCRIPTOR_SECONDS, self._watch, listening)

    async def _admit(self, sock: socket.socket, where: str) -> None:
        """Authenticate one accepted connection and hand it on, or close it."""
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                data = await challenge.exactly(sock, INTRODUCTION_BYTES)
                public, service = self._introductions.read(data)
                self._seat(public)
                if service == _SERVICES[PAYLOADS_CLEAR]:
                    await self._admit_clear(sock)
                elif service == clock.SERVICE:
                    await clock.answer(sock, self.me, self._key, self.run_id)
                else:
                    await self._admit_tls(sock, where)
        except asyncio.CancelledError:
            sock.close()
            raise
        except (OSError, DecodeError, TimeoutError) as error:
            sock.close()
            self._refuse(where, _cause(error))

    def _seat(self, public: bytes) -> None:
        """Give this connection a place for its handshake among those of the member it names."""
        task = cast("asyncio.Task[None]", asyncio.current_task())
        self._pending.pop(task, None)
        fresh = Allowance(HANDSHAKES_RATE, HANDSHAKES_BURST)
        now = asyncio.get_running_loop().time()
        if not self._handshakes.setdefault(public, fresh).permits(1.0, now):
            raise DecodeError("it connects again and again")
        _take_place(self._places.setdefault(public, {}), task, PENDING_PER_MEMBER)

    async def _admit_tls(self, sock: socket.socket, where: str) -> None:
        services = [name for name in self._services if name != PAYLOADS_CLEAR]
        context = self._contexts.get("")
        if context is None:
            context = server_context(self.me, self._key, self._publics(), services)
            self._contexts[""] = context
        lobby = _Lobby(lambda transport: self._admitted(transport, where))
        await asyncio.get_running_loop().connect_accepted_socket(
            lambda: lobby, sock, ssl=context, ssl_handshake_timeout=HANDSHAKE_SECONDS
        )

    def _admitted(self, transport: asyncio.Transport, where: str) -> asyncio.BaseProtocol | None:
        handshake = transport.get_extra_info("ssl_object")
        peer = self._by_public.get(raw_public(handshake.getpeercert(True)) or b"")
        factory = self._services.get(handshake.selected_alpn_protocol() or "")
        if peer is None or peer == self.me:
            self._refuse(where, "its key is our own" if peer else "its key is not in the roster")
            return None
        return None if factory is None else factory(peer)

    async def _admit_clear(self, sock: socket.socket) -> None:
        factory = self._services.get(PAYLOADS_CLEAR)
        if factory is None:
            raise DecodeError("it wants payloads in clear, which are not served here")
        peer = await challenge.check_as_listener(
            sock, self.me, self._key, self.run_id, self._publics()
        )
        await self._adopt(sock, factory(peer))

    async def _adopt(self, sock: socket.socket, protocol: asyncio.BaseProtocol | None) -> None:
        if protocol is None:
            sock.close()
        else:
            accepted = protocol
            await asyncio.get_running_loop().create_connection(lambda: accepted, sock=sock)

    def _refuse(self, where: str, reason: str) -> None:
        self.strangers += 1
        self.last_stranger = f"{where}: {reason}"

    # Dialling

    async def dial(self, peer: PeerId, service: str, factory: Factory) -> asyncio.BaseProtocol:
        """Connect to a member, prove both identities, and return ``factory(peer)`` connected.

        Raises UnreachableError with one line that says what was wrong, and where.
        """
        contact = self.roster.get(peer)
        if contact is None or not contact.host:
            raise UnreachableError(f"{peer} has no address: it must dial us")
        where = format_address(contact.host, contact.port)
        sock: socket.socket | None = None
        try:
            sock = await self._connect(contact)
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                hello = introduction(self._key, contact.public, _SERVICES[service])
                await asyncio.get_running_loop().sock_sendall(sock, hello)
                if service == PAYLOADS_CLEAR:
                    return await self._dial_clear(sock, peer, factory)
                return await self._dial_tls(sock, peer, service, factory)
        except (OSError, DecodeError, TimeoutError) as error:
            _close(sock)
            cause = _cause(error)
            if sock is not None and isinstance(error, ConnectionError | ssl.SSLEOFError):
                cause = f"it hung up on us: is it {peer}, and is our key in its roster?"
            raise UnreachableError(cause, where=f"{peer} at {where}") from error
        except BaseException:
            _close(sock)
            raise

    async def _connect(self, contact: Contact) -> socket.socket:
        """A connected socket at the first of the host's addresses that answers."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(contact.host, contact.port, type=socket.SOCK_STREAM)
        failure: OSError = OSError("its host name has no address")
        for family, _, _, _, address in found:
            sock = socket.socket(family, socket.SOCK_STREAM)
            sock.setblocking(False)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            try:
                self._check_congestion(sock)
                async with asyncio.timeout(CONNECT_SECONDS):
                    await loop.sock_connect(sock, address)
                return sock
            except OSError as error:  # TimeoutError is one
                sock.close()
                failure = error
            except BaseException:
                sock.close()
                raise
        raise failure

    async def _dial_tls(
        self, sock: socket.socket, peer: PeerId, service: str, factory: Factory
    ) -> asyncio.BaseProtocol:
        context = self._contexts.get(service)
        if context is None:
            context = client_context(self.me, self._key, self._publics(), service)
            self._contexts[service] = context
        lobby = _Lobby(lambda transport: self._dialled(transport, peer, service, factory))
        await asyncio.get_running_loop().create_connection(
            lambda: lobby,
            sock=sock,
            ssl=context,
            server_hostname="torchbft",
            ssl_handshake_timeout=HANDSHAKE_SECONDS,
        )
        if lobby.protocol is None:
            raise DecodeError(
                f"it proved to be another peer than {peer}, or serves another version"
            )
        return lobby.protocol

    def _dialled(
        self, transport: asyncio.Transport, peer: PeerId, service: str, factory: Factory
    ) -> asyncio.BaseProtocol | None:
        handshake = transport.get_extra_info("ssl_object")
        proved = raw_public(handshake.getpeercert(True)) == self.roster[peer].public
        served = handshake.selected_alpn_protocol() == service
        return factory(peer) if proved and served else None

    async def _dial_clear(
        self, sock: socket.socket, peer: PeerId, factory: Factory
    ) -> asyncio.BaseProtocol:
        public = self.roster[peer].public
        await challenge.prove_as_dialer(sock, self.me, self._key, self.run_id, peer, public)
        protocol = factory(peer)
        if protocol is None:
            raise DecodeError("the connection is no longer wanted")
        await self._adopt(sock, protocol)
        return protocol

    async def close(self) -> None:
        """Stop listening and drop connections that are not authenticated yet."""
        loop = asyncio.get_running_loop()
        for sock in self._sockets:
            loop.remove_reader(sock.fileno())
            sock.close()
        self._sockets.clear()
        admitting = list(self._admitting)
        for task in admitting:
            task.cancel()
        await asyncio.gather(*admitting, return_exceptions=True)


def _close(sock: socket.socket | None) -> None:
    if sock is not None:
        sock.close()


def _take_place(
    places: dict[asyncio.Task[None], None], task: asyncio.Task[None], most: int
) -> None:
    if len(places) >= most:
        oldest = next(iter(places))
        del places[oldest]
        oldest.cancel()
    places[task] = None


def _defer_accept(listening: socket.socket) -> None:
    if hasattr(socket, "TCP_DEFER_ACCEPT"):
        with contextlib.suppress(OSError):
            listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, DEFER_SECONDS)


def _cause(error: Exception) -> str:
    """One line, in the user's words, for what went wrong at the other end."""
    if isinstance(error, ConnectionRefusedError):
        return "nothing listens there"
    if isinstance(error, TimeoutError):
        return "no answer in time"
    if isinstance(error, ssl.SSLCertVerificationError):
        return "its key is not in the roster"
    if isinstance(error, ssl.SSLError):
        return f"TLS failed ({(error.reason or 'closed').lower().replace('_', ' ')})"
    if isinstance(error, socket.gaierror):
        return "its host name does not resolve"
    if isinstance(error, ConnectionError):
        return "it closed the connection"
    if isinstance(error, TorchbftError):
        return error.what
    return getattr(error, "strerror", None) or str(error)
