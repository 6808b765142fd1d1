"""Addresses: parsing, listening sockets for IPv4, IPv6 and names, and who holds a busy port."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import re
import socket
from pathlib import Path

from torchbft.primitives.errors import ConfigError

BACKLOG = 256
"""Connections the kernel queues while the loop is busy: 64 members that return at once, twice."""

EVERYWHERE = ("", "*")
PORT_TRIES = 8
"""Attempts to find one free port number on several addresses at once."""

_ADDRESS = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<host>[^:\[\]]*)):(?P<port>\d{1,5})")
_LISTEN_STATE = "0A"


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``host:port``, ``127.0.0.1:7700``, ``[::1]:7700``, ``[fe80::1%eth0]:7700``.

    An empty host or ``*`` means every interface, IPv4 and IPv6. Raises ConfigError.
    """
    match = _ADDRESS.fullmatch(text)
    if match is None or int(match["port"]) > 65535:
        raise ConfigError(
            f"{text[:80]!r} is not an address",
            hint="write host:port; an IPv6 address goes in brackets: [::1]:7700",
        )
    return match["v6"] if match["v6"] is not None else match["host"], int(match["port"])


def format_address(host: str, port: int) -> str:
    """The inverse of ``parse_address``."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether a host is reached from this machine alone, as far as its text says."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def listening_sockets(host: str, port: int) -> list[socket.socket]:
    """Bound, listening sockets for every address of a host, all with one port number.

    port 0 lets the system choose. ``::`` listens on IPv4 too where the system can. Raises
    ConfigError that names the process holding a busy port, where it can be found.
    """
    addresses = await _resolve(host, port)
    for attempt in range(PORT_TRIES):
        try:
            return _bind_all(addresses, port)
        except OSError as error:
            chosen_by_us = port == 0 and error.errno == errno.EADDRINUSE
            if not chosen_by_us or attempt == PORT_TRIES - 1:
                raise _cannot_listen(error, host, port) from error
    raise AssertionError("unreachable")


def check_port(host: str, port: int) -> None:
    """Raise what ``listening_sockets`` would, now; the port is free again at once."""
    for sock in asyncio.run(listening_sockets(host, port)):
        sock.close()


async def _resolve(host: str, port: int) -> list[tuple[int, tuple[object, ...]]]:
    loop = asyncio.get_running_loop()
    if host in EVERYWHERE:
        found = [(socket.AF_INET, ("0.0.0.0", port)), (socket.AF_INET6, ("::", port, 0, 0))]
        return list(found[: 2 if socket.has_ipv6 else 1])
    try:
        infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"the host name does not resolve ({error.strerror})",
            where=host,
            hint="use an address of this machine, or [::]:PORT for all of them",
        ) from error
    return list(dict.fromkeys((info[0], info[4]) for info in infos))


def _bind_all(addresses: list[tuple[int, tuple[object, ...]]], port: int) -> list[socket.socket]:
    bound: list[socket.socket] = []
    try:
        for family, address in addresses:
            sock = _bind(family, (address[0], port, *address[2:]), len(addresses) > 1)
            if sock is not None:
                bound.append(sock)
                port = port or sock.getsockname()[1]
        if not bound:
            raise OSError(errno.EADDRNOTAVAIL, "none of its addresses is on this machine")
    except OSError:
        for sock in bound:
            sock.close()
        raise
    return bound


def _bind(family: int, address: tuple[object, ...], one_of_many: bool) -> socket.socket | None:
    """None when the address is one of several and its family is switched off on this machine."""
    try:
        sock = socket.socket(family, socket.SOCK_STREAM)
    except OSError:
        if one_of_many:
            return None
        raise
    try:
        sock.setblocking(False)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            only_v6 = one_of_many or address[0] != "::"
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only_v6)
        sock.bind(address)
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        if one_of_many and error.errno == errno.EADDRNOTAVAIL:
            return None
        raise
    return sock


def _cannot_listen(error: OSError, host: str, port: int) -> ConfigError:
    where = format_address(host, port)
    if error.errno == errno.EADDRINUSE:
        holder = holder_of(port)
        return ConfigError(
            f"the port is in use{f' by {holder}' if holder else ''}",
            where=where,
            hint="stop that process, use --listen, or be admitted with another port",
        )
    return ConfigError(
        f"cannot listen here ({error.strerror})",
        where=where,
        hint="use an address of this machine, or [::]:PORT for all of them",
    )


def holder_of(port: int) -> str | None:
    """``process PID (name)`` that listens on a TCP port, as far as this user may see it."""
    inodes = {
        fields[9]
        for table in ("/proc/net/tcp", "/proc/net/tcp6")
        for fields in _table(Path(table))
        if fields[3] == _LISTEN_STATE and int(fields[1].rpartition(":")[2], 16) == port
    }
    links = {f"socket:[{inode}]" for inode in inodes}
    for process in Path("/proc").glob("[0-9]*") if links else ():
        if _holds(process, links):
            return f"process {process.name} ({_command(process)})"
    return None


def _table(path: Path) -> list[list[str]]:
    try:
        return [line.split() for line in path.read_text().splitlines()[1:]]
    except OSError:
        return []


def _holds(process: Path, links: set[str]) -> bool:
    try:
        return any(os.readlink(link) in links for link in (process / "fd").iterdir())
    except OSError:
        return False


def _command(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"
