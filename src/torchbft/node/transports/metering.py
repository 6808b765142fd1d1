"""Bytes on the wire per plane, measured at the socket, and allowances that bound what a peer costs.

What is measured: the TCP stream's bytes as the kernel counts them (``TCP_INFO``: bytes sent with
retransmissions, bytes received), so TLS records and handshakes are in it and IP and TCP headers are
not. Where the kernel does not tell (not Linux), the bytes handed to and read from the socket's
transport are counted instead, without TLS's overhead; ``Meter.source`` says which.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass
from enum import StrEnum

_TCP_INFO = getattr(socket, "TCP_INFO", None)
_INFO_BYTES = 208
_RECEIVED_AT, _SENT_AT = 128, 200
"""Offsets of ``tcpi_bytes_received`` and ``tcpi_bytes_sent`` in Linux's ``struct tcp_info``, which
only ever grows at its end; a kernel before 4.19 returns fewer bytes and counts as not telling."""


class Plane(StrEnum):
    """The two kinds of traffic (DESIGN §3)."""

    CONTROL = "control"
    PAYLOAD = "payload"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes sent and received."""

    sent: int = 0
    received: int = 0


def _kernel_counts(sock: socket.socket) -> tuple[int, int] | None:
    if _TCP_INFO is None:
        return None
    try:
        info = sock.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _INFO_BYTES)
    except (OSError, ValueError):
        return None
    if len(info) < _INFO_BYTES:
        return None
    received, sent = (struct.unpack_from("=Q", info, at)[0] for at in (_RECEIVED_AT, _SENT_AT))
    return sent, received


class MeteredSocket:
    """One connection's counts: the kernel's last figures plus what was handed over since."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._sent = self._received = 0
        self._sent_since = self._received_since = 0
        self.exact = _kernel_counts(sock) is not None

    def wrote(self, count: int) -> None:
        """Bytes were handed to the transport."""
        self._sent_since += count

    def read(self, count: int) -> None:
        """Bytes came from the transport."""
        self._received_since += count

    def traffic(self) -> Traffic:
        """Counts up to now; after the socket closed, up to its end."""
        counts = _kernel_counts(self._sock)
        if counts is not None:
            self._sent, self._received = counts
            self._sent_since = self._received_since = 0
        return Traffic(self._sent + self._sent_since, self._received + self._received_since)


class Meter:
    """Totals per plane over all connections, closed ones included."""

    def __init__(self) -> None:
        self._open: dict[Plane, list[MeteredSocket]] = {plane: [] for plane in Plane}
        self._closed = {plane: Traffic() for plane in Plane}
        self.source = "none yet"
        self.congestion: set[str] = set()
        """Congestion control of the sockets seen, as the kernel reports it."""

    def opened(self, plane: Plane, sock: socket.socket) -> MeteredSocket:
        """Begin to count a connection."""
        metered = MeteredSocket(sock)
        self._open[plane].append(metered)
        self.source = "kernel (TCP_INFO)" if metered.exact else "bytes handed to the transport"
        self.congestion.add(congestion_of(sock))
        return metered

    def closed(self, plane: Plane, metered: MeteredSocket) -> None:
        """A connection ended; its counts stay in the total."""
        if metered in self._open[plane]:
            self._open[plane].remove(metered)
            self._closed[plane] = _sum(self._closed[plane], metered.traffic())

    def total(self, plane: Plane) -> Traffic:
        """Everything sent and received on a plane until now."""
        total = self._closed[plane]
        for metered in self._open[plane]:
            total = _sum(total, metered.traffic())
        return total


def _sum(a: Traffic, b: Traffic) -> Traffic:
    return Traffic(a.sent + b.sent, a.received + b.received)


def congestion_of(sock: socket.socket) -> str:
    """Name of a socket's congestion control; "unknown" where the system does not tell."""
    option = getattr(socket, "TCP_CONGESTION", None)
    try:
        name = b"" if option is None else sock.getsockopt(socket.IPPROTO_TCP, option, 16)
    except OSError:
        name = b""
    return name.rstrip(b"\0").decode("ascii", "replace") or "unknown"


def set_congestion(sock: socket.socket, name: str) -> bool:
    """Choose a socket's congestion control; False where the kernel has none of that name."""
    option = getattr(socket, "TCP_CONGESTION", None)
    try:
        if option is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, name.encode())
    except OSError:
        return False
    return option is not None


DISCARD_RATE, DISCARD_BURST = 1e6, 64e6
"""Unwanted bytes read from one peer per second, and at once: re-sent offers after a restart."""

FRAMES_RATE, FRAMES_BURST = 500.0, 2000.0
"""Small frames: a round takes a handful of each peer, and thirty rounds a second are beyond us."""

READ_RATE, READ_BURST = 20e6, 256e6
"""Bytes of our files hashed at one peer's request, for digests that are not in memory: 21 liars
keep a third of one thread busy, of those that serve nothing else."""


class Allowance:
    """A token bucket: ``rate`` units a second, saved up to ``burst``."""

    def __init__(self, rate: float, burst: float) -> None:
        self._rate, self._burst = rate, burst
        self._left, self._at = burst, 0.0

    def spend(self, amount: float, now: float) -> float:
        """Take units that were already used; returns the seconds until the debt is paid, or 0."""
        self._left = min(self._burst, self._left + (now - self._at) * self._rate) - amount
        self._at = now
        return max(0.0, -self._left / self._rate)

    def permits(self, amount: float, now: float) -> bool:
        """Take units before they are used, unless a debt is still open: then nothing is taken."""
        if self.spend(0.0, now) > 0:
            return False
        self.spend(amount, now)
        return True


class Quota:
    """What one peer may cost on the data plane, over all its connections together, old and new: who
    comes back finds its debts again."""

    def __init__(self) -> None:
        self.unwanted = Allowance(DISCARD_RATE, DISCARD_BURST)
        self.frames = Allowance(FRAMES_RATE, FRAMES_BURST)
        self.reads = Allowance(READ_RATE, READ_BURST)
