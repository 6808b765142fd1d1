"""The folder that one CometBFT lives in, and the folder of its sockets.

config/config.toml    written anew at each start: time-outs follow the network
config/genesis.json   written once, of the run file; another content is refused
config/node_key.json  the derived connection key, 0600; never the identity key
data/                 the engine's own
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

from torchbft.node.ordering.genesis import chain_id, check_genesis, genesis_bytes
from torchbft.node.ordering.settings import Sockets
from torchbft.node.storage.durable import replace_file, storage_error
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec

MAX_SOCKET_PATH = 100
"""The kernel takes 107 bytes (103 on some systems), less the file's name."""
FOLDER = "cometbft"
"""Below the peer's folder."""
APPLICATION, SIGNER, RPC = "abci", "signer", "rpc"
PRIVATE_FOLDER = 0o700


class Home:
    """CometBFT's folder of one peer. ``prepare`` it before each start."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = folder / "config"
        self.data = folder / "data"

    @property
    def fresh(self) -> bool:
        """Whether no engine was ever prepared here."""
        return not (self.config / "genesis.json").exists()

    def make(self) -> None:
        """Make the folders. Raises ConfigError, StorageError."""
        for folder in (self.folder, self.config, self.data):
            private_folder(folder)

    def check(self, run: RunSpec) -> str:
        """The chain that this folder is for. Raises ConfigError if it is another run's."""
        path = self.config / "genesis.json"
        check_genesis(_read(path), run, str(path))
        return f"that of chain {chain_id(run)}"

    def prepare(self, run: RunSpec, connection: SigningKey, settings: dict[str, Any]) -> None:
        """Write what the engine reads at its start. Raises ConfigError, StorageError."""
        self.make()
        _write(self.config / "node_key.json", node_key(connection))
        _write(self.config / "config.toml", tomli_w.dumps(settings).encode())
        if self.fresh:
            _write(self.config / "genesis.json", genesis_bytes(run))
        self.check(run)

    def sockets(self) -> Sockets:
        """Paths of the sockets, in a folder that only this user may enter.

        Below the home, or where its path is too long for a socket, in the system's folder for
        temporary files. Raises ConfigError if somebody else made that one.
        """
        folder = self.folder / "sockets"
        if len(os.fsencode(folder.absolute())) > MAX_SOCKET_PATH - len(APPLICATION) - 2:
            name = hashlib.sha256(os.fsencode(self.folder.absolute())).hexdigest()[:16]
            folder = Path(tempfile.gettempdir()) / f"torchbft-{os.getuid()}-{name}"
        else:
            private_folder(self.folder)
        private_folder(folder)
        at = folder.absolute()
        return Sockets(str(at / APPLICATION), str(at / SIGNER), str(at / RPC))


def private_folder(folder: Path) -> None:
    """Make a folder that its owner alone may enter. Raises ConfigError if it is not that."""
    try:
        folder.mkdir(mode=PRIVATE_FOLDER, parents=True, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise storage_error(error, folder, "making a folder") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
        raise ConfigError(
            "this is not a folder of this user's own", where=str(folder), hint="move it away"
        )
    if found.st_mode & 0o077:
        raise ConfigError(
            "this folder is open to other users", where=str(folder), hint=f"chmod 700 {folder}"
        )


def node_key(connection: SigningKey) -> bytes:
    """The content of ``node_key.json``: seed and public key, as CometBFT writes it."""
    value = base64.b64encode(connection.seed() + connection.public).decode()
    key = {"priv_key": {"type": "tendermint/PrivKeyEd25519", "value": value}}
    return json.dumps(key).encode()


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise storage_error(error, path, "reading a file") from error


def _write(path: Path, content: bytes) -> None:
    """Replace a file whole; nobody else may read it."""

    def fill(at: Path) -> None:
        with open(os.open(at, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)

    replace_file(path, fill)
