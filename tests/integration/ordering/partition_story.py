"""Four engines in network namespaces of their own: cut 2/2, cut 3/1, and packets lost.

    unshare --net --mount python partition_story.py FOLDER SECONDS

Everything is made inside the two namespaces that ``unshare`` gives it, and is gone with them.
Prints one JSON object; ``heal_seconds`` is from the end of the cut to the next block at all
members. Without the kernel's ``netem`` no packets are lost, and ``blocks_under_loss`` is null.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
from comet_swarm import PAUSE, Swarm, until

from torchbft.node.ordering.cometbft import CometEngine
from torchbft.node.ordering.rpc import RpcError
from torchbft.primitives.ids import PeerId

NETWORK = "10.77.0"
LOSS = "5%"
DEAD_SECONDS = 3.0
"""So long nothing is finalized in a cut: several time-outs of a proposal and its votes."""


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)


class Net:
    """A namespace per member on one of two bridges; moving members to the other one cuts them off
    without a word, as a broken cable does."""

    def __init__(self, names: list[PeerId]) -> None:
        Path("/run/netns").mkdir(exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "none", "/run/netns"], check=True)
        ip("link set lo up")
        for bridge in ("one", "two"):
            ip(f"link add {bridge} type bridge")
            ip(f"link set {bridge} up")
        ip(f"addr add {NETWORK}.1/24 dev one")
        self._cut: set[PeerId] = set()
        self.names = names
        for number, name in enumerate(names):
            ip(f"netns add {name}")
            ip(f"link add v{number} type veth peer name eth0 netns {name}")
            ip(f"link set v{number} master one up")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} addr add {NETWORK}.{10 + number}/24 dev eth0")
            ip(f"-n {name} link set eth0 up")

    def cut(self, *names: PeerId) -> None:
        """These on one side, the others on the other; nobody heals."""
        self._cut = set(names)
        for number, name in enumerate(self.names):
            ip(f"link set v{number} master {'two' if name in names else 'one'}")

    def lose(self, share: str) -> bool:
        """Drop a share of all packets; whether this kernel can."""
        words = f"tc qdisc replace dev eth0 root netem loss {share}".split()
        return all(
            subprocess.run(["ip", "netns", "exec", name, *words], check=False).returncode == 0
            for name in self.names
        )

    def reached_by(self, me: PeerId) -> Collection[str]:
        """Whom this member's control channel would reach."""
        return [name for name in self.names if (name in self._cut) == (me in self._cut)]


class Namespaced(CometEngine):
    """An engine in its member's namespace; its unix sockets are reached from everywhere."""

    async def _prepare(self) -> list[str]:
        return ["/usr/bin/env", "ip", "netns", "exec", self._me, *await super()._prepare()]


class CutSwarm(Swarm):
    """Members at addresses of their namespaces."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.net = Net(self.names)
        members = tuple(
            msgspec.structs.replace(member, host=f"{NETWORK}.{10 + number}")
            for number, member in enumerate(self.run.members)
        )
        self.run = msgspec.structs.replace(self.run, members=members)

    def engine(self, name: PeerId, **options: Any) -> CometEngine:
        made = Namespaced(
            self.run,
            name,
            self.folder / name,
            identity=self.identity[name],
            voting=self.voting[name],
            notice=self.told[name].append,
            reachable=lambda: self.net.reached_by(name),
            application="kvstore",
        )
        self.engines[name] = made
        return made

    async def heights(self) -> list[int]:
        return [await self.height(name) for name in self.names]

    async def try_at(self, tx: bytes, *names: PeerId) -> None:
        for name in names:
            with contextlib.suppress(RpcError):  # it was started again just now
                await self.engines[name].rpc.submit(tx)

    async def healed(self, key: bytes) -> float:
        """Seconds until all members have a block that was made from now on."""
        started, goal = time.monotonic(), max(await self.heights()) + 2

        async def there() -> bool:
            await self.try_at(key + b"%d=1" % time.monotonic_ns(), *self.names)
            return min(await self.heights()) >= goal

        await until(there, "not healed", self.told)
        return time.monotonic() - started


async def story(folder: Path, seconds: float) -> dict[str, Any]:
    swarm = CutSwarm(folder)
    first, _, third, last = swarm.names
    found: dict[str, Any] = {}
    try:
        await swarm.start()
        await swarm.order(b"a=1", first)

        swarm.net.cut(third, last)
        await asyncio.sleep(PAUSE)
        before = await swarm.heights()
        await swarm.try_at(b"b=1", first, third)
        await asyncio.sleep(max(DEAD_SECONDS, seconds))
        found["finalized_in_two_halves"] = [
            after - height for after, height in zip(await swarm.heights(), before, strict=True)
        ]
        swarm.net.cut()
        found["heal_seconds"] = round(await swarm.healed(b"c"), 1)

        swarm.net.cut(last)
        for key in range(4):
            await swarm.order(b"d%d=1" % key, first)
        behind = await swarm.height(first) - await swarm.height(last)
        found["blocks_of_three"] = behind
        swarm.net.cut()
        found["return_seconds"] = round(await swarm.healed(b"e"), 1)

        found["blocks_under_loss"] = None
        if swarm.net.lose(LOSS):
            before = [await swarm.height(first)]
            for key in range(4):
                await swarm.order(b"f%d=1" % key, first)
            found["blocks_under_loss"] = await swarm.height(first) - before[0]
        found["restarts"] = [swarm.engines[name].process.restarts for name in swarm.names]
    finally:
        await swarm.stop()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(story(Path(sys.argv[1]), float(sys.argv[2])))), flush=True)
