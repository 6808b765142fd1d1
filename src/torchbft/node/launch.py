"""Starts a node: in this process, in a forked child, or as a program of its own."""

from __future__ import annotations

import asyncio
import gc
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from torchbft.node.entries import entry, own_entry
from torchbft.node.link import Endpoint, endpoints, refusal
from torchbft.primitives.errors import ConfigError, HaltError, TorchbftError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey, load_key, save_key
from torchbft.primitives.runspec import RunSpec, load_run

if TYPE_CHECKING:
    from torchbft.node.driver import BuildPeer

KEY_FILES = ("identity.key", "voting.key", "secret.key")
"""In a peer's folder, in the order of the fields of ``Keys``."""


@dataclass(frozen=True)
class Keys:
    """A peer's three secrets: who it is, what it votes with, what salts and shares derive from."""

    identity: SigningKey
    voting: SigningKey
    secret: SigningKey

    @staticmethod
    def generate() -> Keys:
        """Fresh keys, nowhere saved."""
        return Keys(*(SigningKey.generate() for _ in KEY_FILES))

    @staticmethod
    def create(folder: Path) -> Keys:
        """Make what is missing of a folder's keys (files of mode 0600), and read all of them."""
        Keys.generate()._save(folder, [name for name in KEY_FILES if not (folder / name).exists()])
        return Keys.load(folder)

    @staticmethod
    def load(folder: Path) -> Keys:
        """Read a peer's keys. Raises ConfigError."""
        return Keys(*(load_key(folder / name) for name in KEY_FILES))

    def save(self, folder: Path) -> None:
        """Write all three key files. Raises ConfigError rather than overwrite one."""
        self._save(folder, KEY_FILES)

    def _save(self, folder: Path, names: Sequence[str]) -> None:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        keys = dict(zip(KEY_FILES, (self.identity, self.voting, self.secret), strict=True))
        for name in names:
            save_key(folder / name, keys[name])

    def check(self, run: RunSpec, name: str, folder: Path | None = None) -> None:
        """Raise ConfigError unless these are the keys that the roster has under this name. With the
        peer's ``folder`` a member that is admitted during the run is known by its own entry."""
        member = entry(run, folder, name) if folder is not None else run.member(name)
        for what, key, listed in (
            ("identity", self.identity, member.identity),
            ("voting", self.voting, member.voting),
        ):
            if key.public.hex() != listed:
                raise ConfigError(
                    f"the {what} key of {name!r} is not the one in the roster",
                    where=str(folder) if folder is not None else f"run file {run.name!r}",
                    hint="use the folder with the keys that were admitted, or ask to be admitted",
                )


def peer_name(run: RunSpec, folder: Path) -> PeerId:
    """Which member a folder's keys belong to. Raises ConfigError if none."""
    identity = load_key(folder / KEY_FILES[0]).public.hex()
    for member in (*run.members, *own_entry(folder)):
        if member.identity == identity:
            return PeerId(member.name)
    raise ConfigError(
        f"no member of run {run.name!r} has the identity key in {folder}",
        where="run file",
        hint="ask the members to admit it: torchbft request run.toml, then torchbft admit",
    )


def run_node(
    run: RunSpec,
    me: PeerId,
    folder: Path,
    sock: socket.socket | None,
    *,
    keys: Keys | None = None,
    build: BuildPeer | None = None,
    listen: tuple[str, int] | None = None,
) -> int:
    """Run a node in this process until it ends; returns its exit code.

    ``build``: a test switch, see ``driver.BuildPeer``. Imports torch; uses one thread of it.
    """
    import torch

    from torchbft.node.driver import PeerHost
    from torchbft.protocols.peer import peer_of

    torch.set_num_threads(1)

    async def host(mine: Keys) -> int:
        peer = PeerHost(
            run,
            me,
            folder,
            identity=mine.identity,
            voting=mine.voting,
            secret=mine.secret.seed(),
            link=Endpoint(sock) if sock is not None else None,
            build=build or peer_of,
            listen=listen,
        )
        return await peer.run()

    with _told_to(sock):
        run.check_signed()
        mine = keys or Keys.load(folder)
        mine.check(run, me, folder)
        gc.collect()
        gc.freeze()  # torch's objects live as long as the node: no collection has to walk them
        try:
            return asyncio.run(host(mine))
        finally:
            gc.unfreeze()  # or libraries complain at the end of what was not collected


@contextmanager
def _told_to(sock: socket.socket | None) -> Iterator[None]:
    """What keeps a node from starting is told to its trainer as well."""
    try:
        yield
    except TorchbftError as error:
        with suppress(HaltError):
            if sock is not None:
                Endpoint(sock).send(refusal(error))
        raise


def spawn(
    run_path: Path, folder: Path, listen: str = ""
) -> tuple[Endpoint, subprocess.Popen[bytes]]:
    """Start a node as a program of its own, which writes to ``node.log``. Returns the trainer's end
    of its link and the process."""
    ours, theirs = endpoints()
    descriptor = theirs.socket.fileno()
    command = [sys.executable, "-m", "torchbft.node", str(run_path), str(folder), str(descriptor)]
    with (folder / "node.log").open("ab") as log:
        process = subprocess.Popen(
            [*command, *([listen] if listen else [])],
            pass_fds=[descriptor],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Control-C reaches the trainer, which tells its node
        )
    theirs.close()
    return ours, process


def main(arguments: list[str]) -> int:
    """``python -m torchbft.node RUN FOLDER [DESCRIPTOR|-] [HOST:PORT]``."""
    from torchbft.node.transports.ports import parse_address

    run_path, folder = Path(arguments[0]), Path(arguments[1])
    run = load_run(run_path)
    descriptor = arguments[2] if len(arguments) > 2 else "-"
    sock = None if descriptor == "-" else socket.socket(fileno=os.dup(int(descriptor)))
    with _told_to(sock):
        listen = parse_address(arguments[3]) if len(arguments) > 3 else None
        me = peer_name(run, folder)
    return run_node(run, me, folder, sock, listen=listen)
