"""Peers of one run in one event loop: real hosts, sockets and disks; trainers of a few lines."""

from __future__ import annotations

import asyncio
import gc
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from torchbft.cli.local import free_ports
from torchbft.node import driver
from torchbft.node.driver import PeerHost
from torchbft.node.launch import Keys
from torchbft.node.link import Close, Endpoint, Hello, Open, Over, Submit, endpoints
from torchbft.node.supervisor import EXIT_FINISHED
from torchbft.primitives import trace
from torchbft.primitives.errors import HaltError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import (
    Aggregation,
    Data,
    Ledger,
    Member,
    RunSpec,
    Task,
    Timing,
    Training,
    new_member,
)
from torchbft.protocols.peer import peer_of
from torchbft.tensors.compression import get_codec
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update

LIMIT = 90.0
"""Seconds that a run of a few rounds may take before its test fails; idle it takes about one."""
PAUSE = 0.01
TIMING = Timing(commit_floor=1.0, open_floor=0.5, attest_floor=0.5, root_floor=2.0, first_round=6.0)

EMBEDDED = Ledger(view_timeout=1.0)

Payload = Callable[[PeerId, int], bytes]


@cache
def initial_state() -> AgreedState:
    """Made once: trainers in threads share torch's random generator."""
    torch.manual_seed(5)
    return AgreedState.initial(nn.Linear(3, 2))


def update(value: float, size: int = 8) -> bytes:
    values_D = torch.full((size,), value)
    return get_codec("float32").encode(
        Update(values_D, torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    )[0]


def honest(name: PeerId, round_: int) -> bytes:
    """An update that depends on who sends it and when."""
    return update(0.01 * (ord(name[-1]) - ord("a") + 1) + 0.1 * round_)


@dataclass
class Trainee:
    """A trainer in a thread: hands over a payload for each round that it is given."""

    name: PeerId
    endpoint: Endpoint
    payload: Payload
    opened: list[int] = field(default_factory=list)
    closed: list[Close] = field(default_factory=list)
    over: Over | None = None

    def start(self) -> None:
        threading.Thread(target=self._train, daemon=True, name=f"trainee-{self.name}").start()

    def _train(self) -> None:
        initial = initial_state()
        try:
            self.endpoint.send(Hello(initial.root()), initial.encode())
            while (delivery := self.endpoint.receive()) is not None and self.over is None:
                self._heard(delivery.message)
                for blob in delivery.blobs:
                    blob.close()
        except HaltError:
            pass
        self.endpoint.close()

    def _heard(self, message: Any) -> None:
        if isinstance(message, Open):
            self.opened.append(message.round)
            payload = self.payload(self.name, message.round)
            self.endpoint.send(Submit(message.round, bytes(32), bytes(32), 0.0), payload)
        elif isinstance(message, Close):
            self.closed.append(message)
        elif isinstance(message, Over):
            self.over = message


class LocalSwarm:
    """A run's folder and whichever of its peers are up."""

    def __init__(
        self,
        folder: Path,
        count: int = 4,
        rounds: int = 3,
        ledger: Ledger = EMBEDDED,
        limit: float = LIMIT,
    ) -> None:
        self.limit = limit
        names = [PeerId(f"peer-{letter}") for letter in "abcdefg"[:count]]
        self.folder = folder
        self.keys = {name: Keys.create(folder / name) for name in names}
        ports = free_ports(2 * count)
        members = tuple(
            new_member(
                name,
                self.keys[name].identity,
                self.keys[name].voting,
                port=port,
                ledger_port=ledger_port,
            )
            for name, port, ledger_port in zip(names, ports[::2], ports[1::2], strict=True)
        )
        self.run = RunSpec(
            name="swarm",
            seed="33" * 32,
            members=members,
            training=Training(rounds=rounds, inner_steps=1),
            aggregation=Aggregation(rule="trimmed_mean" if count > 3 else "mean"),
            data=Data(mode="private"),
            task=Task(start_root=initial_state().root().hex()),
            timing=TIMING,
            ledger=ledger,
        )
        for name in names:
            self.run = self.run.signed(name, self.keys[name].identity)
        self.names = names
        self.entries: dict[PeerId, Member] = {}
        """Of members that are admitted during the run."""
        self.hosts: dict[PeerId, PeerHost] = {}
        self.trainees: dict[PeerId, Trainee] = {}
        self.tasks: dict[PeerId, asyncio.Task[int]] = {}

    def up(
        self,
        name: PeerId,
        payload: Payload = honest,
        build: Any = peer_of,
        engine: Any = None,
        **changes: Any,
    ) -> PeerHost:
        """Start a peer with a trainer of its own, or start it again."""
        ours, theirs = endpoints()
        keys = self.keys[name]
        member = self.entries.get(name) or self.run.member(name)
        host = PeerHost(
            msgspec.structs.replace(self.run, **changes),
            name,
            self.folder / name,
            identity=keys.identity,
            voting=keys.voting,
            secret=keys.secret.seed(),
            link=ours,
            build=build,
            engine=engine,
            listen=("127.0.0.1", member.port),
        )
        self.hosts[name] = host
        self.trainees[name] = Trainee(name, theirs, payload)
        self.tasks[name] = asyncio.get_running_loop().create_task(self._run(host, ours))
        self.trainees[name].start()
        return host

    async def _run(self, host: PeerHost, link: Endpoint) -> int:
        try:
            return await host.run()
        finally:
            link.socket.shutdown(socket.SHUT_RDWR)  # as the end of a process would

    async def down(self, name: PeerId) -> None:
        """Stop a peer; its folder stays."""
        task = self.tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def close(self) -> None:
        for name in list(self.tasks):
            await self.down(name)

    async def until(self, reached: Callable[[], bool]) -> None:
        """Let the peers run until something holds. One that failed fails the test, unless the test
        has taken it out of ``tasks``."""
        async with asyncio.timeout(self.limit):
            while not reached():
                for name, task in self.tasks.items():
                    assert not task.done() or task.result() == EXIT_FINISHED, f"{name} failed"
                await asyncio.sleep(PAUSE)

    async def finished(self, *names: PeerId) -> None:
        await self.until(
            lambda: all(self.phase(name) == "finished" for name in names or self.names)
        )

    # --- what they left ---------------------------------------------------------------------------

    def status(self, name: PeerId) -> Mapping[str, Any]:
        path = self.folder / name / "status.json"
        return msgspec.json.decode(path.read_bytes()) if path.exists() else {}

    def phase(self, name: PeerId) -> str:
        return str(self.status(name).get("phase", ""))

    def root(self, name: PeerId) -> str:
        return str(self.status(name).get("root", ""))

    def records(self, name: PeerId, kind: type[Any]) -> list[Any]:
        found = trace.read_trace(self.folder / name / "trace.jsonl")
        return [record for record in found if isinstance(record, kind)]

    def rounds(self, name: PeerId) -> dict[int, trace.RoundEnded]:
        return {r.round: r for r in self.records(name, trace.RoundEnded)}

    def notices(self, name: PeerId) -> str:
        return "\n".join(r.text for r in self.records(name, trace.Notice))


def run_swarm(swarm: LocalSwarm, story: Callable[[LocalSwarm], Any]) -> None:
    """Run a story about a swarm, leave no peer behind, and let no task fail unheard."""
    faults: list[dict[str, Any]] = []

    async def told() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        try:
            await story(swarm)
        finally:
            await swarm.close()
            gc.collect()  # what was never retrieved is told when it is collected

    driver.LINGER_SECONDS = 0.2
    asyncio.run(told())
    assert faults == []
