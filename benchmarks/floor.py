"""What a round's messages cost with no protocol at all: the limit beside ``round.py``.

``python benchmarks/floor.py [--rounds 30] [--json]``: seven processes in a full mesh of asyncio TLS
streams send what a round of seven members sends: in three blocks each a hop of transactions, one of
the proposal and two of votes; one hop of payloads of 154 kB; one of root signatures. Each peer
signs, makes durable and broadcasts its own statement of a hop, and waits until it has verified that
of all the others. There is no decoding, no state, no aggregation, no training: what remains is
Python's event loop, TLS, Ed25519 and the disk, with seven processes on the cores of this machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from torchbft.node.transports.certificates import client_context, server_context
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey, verify

PEERS, BLOCKS, WARM_UP = 7, 3, 5
STATEMENT_BYTES, PROPOSAL_BYTES, PAYLOAD_BYTES = 250, 2500, 153_552
NAMES = [PeerId(f"peer-{number}") for number in range(1, PEERS + 1)]
KEYS = {name: SigningKey.derive(bytes(32), name) for name in NAMES}
PUBLIC = {name: key.public for name, key in KEYS.items()}
PROTOCOL = "floor"


class Mesh:
    """One process's ends of all connections, and its log."""

    def __init__(self, me: int, log: Path) -> None:
        self.me, self.log = me, log.open("wb", buffering=0)
        self.links: dict[int, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.complete = asyncio.Event()

    async def connect(self, ports: list[int], listening: Any) -> None:
        name = NAMES[self.me]
        context = server_context(name, KEYS[name], PUBLIC, [PROTOCOL])
        server = await asyncio.start_server(self._taken, sock=listening, ssl=context)
        for peer in range(self.me):
            dial = client_context(name, KEYS[name], PUBLIC, PROTOCOL)
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", ports[peer], ssl=dial, server_hostname=NAMES[peer]
            )
            writer.write(bytes([self.me]))
            self._linked(peer, reader, writer)
        await self.complete.wait()
        server.close()

    async def _taken(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._linked((await reader.readexactly(1))[0], reader, writer)

    def _linked(self, peer: int, *link: Any) -> None:
        self.links[peer] = link
        if len(self.links) == PEERS - 1:
            self.complete.set()

    async def hop(self, size: int, senders: range, *, signed: bool = True) -> None:
        """Broadcast what is ours to send, and take in what the others send."""
        if self.me in senders:
            body = bytes(size)
            if signed:
                body += KEYS[NAMES[self.me]].sign(PROTOCOL, body)
                self.log.write(body)
                os.fdatasync(self.log.fileno())
            for _, writer in self.links.values():
                writer.write(body)
        expected = [peer for peer in senders if peer != self.me]
        await asyncio.gather(*(self._take(peer, size, signed) for peer in expected))

    async def _take(self, peer: int, size: int, signed: bool) -> None:
        body = await self.links[peer][0].readexactly(size + 64 * signed)
        if signed:
            assert verify(PUBLIC[NAMES[peer]], PROTOCOL, body[:size], body[size:])

    async def round(self, number: int) -> None:
        everybody = range(PEERS)
        for block in range(BLOCKS):
            leader = (number * BLOCKS + block) % PEERS
            await self.hop(STATEMENT_BYTES, everybody)
            if block == 1:
                await self.hop(PAYLOAD_BYTES, everybody, signed=False)
            await self.hop(PROPOSAL_BYTES, range(leader, leader + 1))
            await self.hop(STATEMENT_BYTES, everybody)
            await self.hop(STATEMENT_BYTES, everybody)
        await self.hop(STATEMENT_BYTES, everybody)


def _peer(me: int, ports: list[int], listening: Any, rounds: int, folder: Path, told: Any) -> None:
    async def run() -> None:
        mesh = Mesh(me, folder / f"{me}.log")
        await mesh.connect(ports, listening)
        spans = []
        for number in range(rounds):
            began = time.perf_counter()
            await mesh.round(number)
            spans.append(1e3 * (time.perf_counter() - began))
        cpu = time.process_time() * 1e3
        told.put((spans[WARM_UP:], (cpu - started) / rounds))
        for _, writer in mesh.links.values():
            writer.close()

    started = time.process_time() * 1e3
    asyncio.run(run())


def measure(rounds: int) -> dict[str, Any]:
    """Medians over rounds and peers, in milliseconds."""
    fork = get_context("fork")
    told = fork.Queue()
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in NAMES]
    ports = [held.getsockname()[1] for held in sockets]
    with tempfile.TemporaryDirectory(prefix="torchbft-floor-") as folder:
        peers = [
            fork.Process(target=_peer, args=(me, ports, held, rounds, Path(folder), told))
            for me, held in enumerate(sockets)
        ]
        for peer in peers:
            peer.start()
        found = [told.get(timeout=60 + 2 * rounds) for _ in peers]
        for peer in peers:
            peer.join()
    return {
        "round_ms_median": statistics.median(ms for spans, _ in found for ms in spans),
        "cpu_ms_per_peer_and_round": statistics.median(cpu for _, cpu in found),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    report = {
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "load": os.getloadavg(),
        "peers": PEERS,
        **measure(given.rounds),
    }
    print(json.dumps(report, indent=2) if given.json else report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
