"""The payload path against a raw asyncio transfer of the same bytes, between two processes.

    python benchmarks/transport.py --json [--megabytes 256] [--repeats 5] [--congestion cubic]

A holder process serves; this process receives. Variants are interleaved, and each ratio is taken
within one repeat, because the machine's speed drifts. What each row times, from the request on a
warm connection:

- raw: until the last byte, into one reused buffer, nothing done with it (best of two sizes);
- clear, encrypted: our data plane, from the holder's file, until every chunk is checked against
  its blake3 digest; the bytes then go nowhere, so this is the path without the disk;
- clear_stored, encrypted_stored: the same, until the payload is durable under its root.

``ratio_to_raw`` is the median over the repeats, of elapsed times: it needs a quiet machine with two
free cores. ``ratio_of_best`` compares the fastest of each. The processor time of both processes
together stands beside them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import socket
import ssl
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchbft.node.storage.payloads import IncomingPayload, PayloadStore
from torchbft.node.transports import data
from torchbft.node.transports.data import DataPlane
from torchbft.node.transports.endpoint import Contact, Endpoint
from torchbft.node.transports.metering import Meter, Plane, congestion_of, set_congestion
from torchbft.primitives.digests import payload_root
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.keys import SigningKey

HOLDER, RECEIVER = PeerId("holder"), PeerId("receiver")
RAW_SIZES = (256 * 1024, 1024 * 1024)
ROUND = Round(1)
VARIANTS = ("clear", "encrypted", "clear_stored", "encrypted_stored")


def key_of(name: PeerId) -> SigningKey:
    return SigningKey.derive(bytes(32), name)


# Raw: the fastest that asyncio does without us.


class RawSender(asyncio.Protocol):
    """Answers a request of 8 + 4 bytes (total, buffer size) with that many bytes."""

    def __init__(self, congestion: str | None) -> None:
        self._congestion = congestion
        self._left, self._writable = 0, True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.set_write_buffer_limits(high=0)
        if self._congestion:
            set_congestion(transport.get_extra_info("socket"), self._congestion)

    def data_received(self, request: bytes) -> None:
        self._left = int.from_bytes(request[:8], "big")
        self._view = memoryview(os.urandom(int.from_bytes(request[8:], "big")))
        self._pump()

    def _pump(self) -> None:
        while self._writable and self._left:
            piece = self._view[: self._left]
            self._left -= len(piece)
            self._transport.write(piece)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        self._pump()


class RawReceiver(asyncio.BufferedProtocol):
    def __init__(self, total: int, size: int) -> None:
        self._buffer, self._left = memoryview(bytearray(size)), total
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left <= 0 and not self.done.done():
            self.done.set_result(None)


async def time_raw(port: int, total: int, size: int, congestion: str | None) -> float:
    loop = asyncio.get_running_loop()
    transport, receiver = await loop.create_connection(
        lambda: RawReceiver(total, size), "127.0.0.1", port
    )
    if congestion:
        set_congestion(transport.get_extra_info("socket"), congestion)
    began = time.perf_counter()
    transport.write(total.to_bytes(8, "big") + size.to_bytes(4, "big"))
    await receiver.done
    seconds = time.perf_counter() - began
    transport.close()
    return seconds


# Ours


class _Nowhere(IncomingPayload):
    """A payload file that keeps nothing: what remains is transfer and verification."""

    def __init__(self) -> None:
        pass

    def write(self, offset: int, data: bytes | memoryview) -> None:
        pass

    def finish(self, round: Round, chunks: list[bytes], *, passing: bool = False) -> None:
        pass

    def drop(self) -> None:
        pass


class ForgetfulStore(PayloadStore):
    def receive(self, root: bytes, length: int) -> IncomingPayload:
        return _Nowhere()


class Receiver:
    """One data plane that fetches the same payload again and again."""

    def __init__(self, endpoint: Endpoint, store: PayloadStore, encrypt: bool, length: int) -> None:
        self._store, self._length = store, length
        self._arrived = asyncio.Event()
        self.plane = DataPlane(
            endpoint,
            store,
            encrypt=encrypt,
            max_payload=length,
            on_stored=lambda peer, root: self._arrived.set(),
        )

    async def seconds(self, root: bytes) -> float:
        self._arrived.clear()
        self._store.release(Round(ROUND + 1))
        began = time.perf_counter()
        self.plane.fetch(root, self._length, [HOLDER], (ROUND, HOLDER))
        await self._arrived.wait()
        return time.perf_counter() - began


def endpoint_for(me: PeerId, port: int, congestion: str | None) -> Endpoint:
    roster = {
        HOLDER: Contact("127.0.0.1", port, key_of(HOLDER).public),
        RECEIVER: Contact("", 0, key_of(RECEIVER).public),
    }
    return Endpoint(me, key_of(me), roster, run_id=bytes(32), meter=Meter(), congestion=congestion)


async def hold(folder: Path, congestion: str | None) -> None:
    """The holder process: raw bytes on one port, the payload on two, clear and encrypted."""
    data.SERVES_PER_PAYLOAD = sys.maxsize  # a benchmark asks for one payload more often than a peer
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: RawSender(congestion), "127.0.0.1", 0)
    ports = [server.sockets[0].getsockname()[1]]
    store = PayloadStore(folder)
    for encrypt in (False, True):
        endpoint = endpoint_for(HOLDER, 0, congestion)
        DataPlane(
            endpoint,
            store,
            encrypt=encrypt,
            max_payload=2**40,
            on_stored=lambda peer, root: None,
        )
        ports.append(await endpoint.listen("127.0.0.1", 0))
    print(json.dumps(ports), flush=True)
    await loop.run_in_executor(None, sys.stdin.read)


@contextmanager
def scratch() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="torchbft-bench-") as folder:
        yield Path(folder)


async def measure(total: int, repeats: int, congestion: str | None) -> dict[str, object]:
    with scratch() as folder:
        payload = os.urandom(total)
        root = PayloadStore(folder / "holder").put(payload, ROUND)
        assert root == payload_root(payload)
        del payload
        holder = await asyncio.create_subprocess_exec(
            sys.executable,
            __file__,
            *("--hold", str(folder / "holder")),
            *(("--congestion", congestion) if congestion else ()),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert holder.stdout is not None
        raw, clear, encrypted = json.loads(await holder.stdout.readline())
        try:
            ports: dict[str | bool, int] = {"raw": raw, False: clear, True: encrypted}
            return await compare(folder, root, total, repeats, congestion, ports, holder.pid)
        finally:
            holder.kill()
            await holder.wait()


async def compare(
    folder: Path,
    root: bytes,
    total: int,
    repeats: int,
    congestion: str | None,
    ports: dict[str | bool, int],
    holder: int,
) -> dict[str, object]:
    receivers, endpoints = {}, {}
    for variant in VARIANTS:
        encrypt, stored = variant.startswith("encrypted"), variant.endswith("stored")
        endpoints[variant] = endpoint_for(RECEIVER, ports[encrypt], congestion)
        store = (PayloadStore if stored else ForgetfulStore)(folder / variant)
        receivers[variant] = Receiver(endpoints[variant], store, encrypt, total)
    times: dict[str, list[float]] = {name: [] for name in ("raw", *VARIANTS)}
    work: dict[str, list[float]] = {name: [] for name in times}
    for repeat in range(repeats + 1):
        for name in times:
            before = cpu_seconds(os.getpid()), cpu_seconds(holder)
            if name == "raw":
                tries = [await time_raw(ports["raw"], total, s, congestion) for s in RAW_SIZES]
                seconds, share = min(tries), 1 / len(tries)
            else:
                seconds, share = await receivers[name].seconds(root), 1.0
            after = cpu_seconds(os.getpid()), cpu_seconds(holder)
            if repeat:  # the first warms connections, caches and the send buffers' autotuning
                times[name].append(seconds)
                work[name].append(share * sum(b - a for a, b in zip(before, after, strict=True)))
    wire = {
        variant: endpoints[variant].meter.total(Plane.PAYLOAD).received / (repeats + 1) / total
        for variant in VARIANTS
    }
    for receiver in receivers.values():
        await receiver.plane.close()
    return report(total, times, work, wire)


def cpu_seconds(process: int) -> float:
    """Processor time of a process and all its threads so far; 0 where the system does not tell."""
    tasks = Path(f"/proc/{process}/task").glob("*/schedstat")
    return sum(int(task.read_text().split()[0]) for task in tasks) / 1e9


def report(
    total: int,
    times: dict[str, list[float]],
    work: dict[str, list[float]],
    wire: dict[str, float],
) -> dict[str, object]:
    probe = socket.socket()
    result: dict[str, object] = {
        "bytes": total,
        "repeats": len(times["raw"]),
        "congestion_default": congestion_of(probe),
        "gigabytes_per_second": {
            name: round(total / statistics.median(seconds) / 1e9, 3)
            for name, seconds in times.items()
        },
        "ratio_to_raw": {
            name: round(
                statistics.median(r / s for r, s in zip(times["raw"], mine, strict=True)), 3
            )
            for name, mine in times.items()
        },
        "ratio_of_best": {
            name: round(min(times["raw"]) / min(mine), 3) for name, mine in times.items()
        },
        "processor_seconds_per_gigabyte": {
            name: round(statistics.median(mine) / total * 1e9, 3) for name, mine in work.items()
        },
        "wire_bytes_per_payload_byte": {name: round(value, 5) for name, value in wire.items()},
        "machine": {
            "cpu": cpu_name(),
            "cores": os.cpu_count(),
            "load": round(os.getloadavg()[0], 2),
            "system": platform.platform(),
        },
        "versions": {"python": platform.python_version(), "openssl": ssl.OPENSSL_VERSION},
    }
    probe.close()
    return result


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--congestion", help="TCP_CONGESTION of every socket; default: system's")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--hold", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.hold is not None:
        asyncio.run(hold(options.hold, options.congestion))
        return
    total = options.megabytes * 1024 * 1024
    result = asyncio.run(measure(total, options.repeats, options.congestion))
    result["congestion"] = options.congestion or result["congestion_default"]
    if options.json:
        print(json.dumps(result))
        return
    for name, ratio in result["ratio_to_raw"].items():  # type: ignore[attr-defined]
        speed = result["gigabytes_per_second"][name]  # type: ignore[index]
        print(f"{name:17} {speed:7.3f} GB/s   {ratio:6.3f} of raw")
    print(f"congestion control {result['congestion']}; {result['machine']}; {result['versions']}")


if __name__ == "__main__":
    main()
