"""From a run file and a peer's folder to a running node."""

from __future__ import annotations

from pathlib import Path

from torchbft.primitives.errors import ConfigError
from torchbft.pytorch.link import NodeLink

PEERS = "peers"
"""Beside the run file: one folder a peer, with its keys, log and checkpoints."""


def peer_folder(run: str | Path | object, folder: str | Path | None, name: str | None) -> Path:
    """The folder of the peer that joins. Raises ConfigError when it is not clear which.

    Given, or ``peers/<name>`` beside the run file, or the only folder there.
    """
    if folder is not None:
        return Path(folder)
    if not isinstance(run, str | Path):
        raise ConfigError("a run without its file needs folder= or link=", where="join")
    place = Path(run).resolve().parent / PEERS
    if name is not None:
        return place / name
    found = sorted(path.name for path in place.glob("*") if (path / "identity.key").exists())
    if len(found) != 1:
        raise ConfigError(
            f"{len(found)} peers have keys in {place}" + (f": {', '.join(found)}" if found else ""),
            where="join",
            hint="say which: name=…" if found else "make keys first: torchbft init --name …",
        )
    return place / found[0]


def connect(run: str | Path | object, folder: Path, listen: str = "") -> NodeLink:
    """Start the node of ``folder`` for the run file ``run``; returns the trainer's end.

    ``listen``: HOST:PORT, by default the roster's address of this peer.
    """
    if not isinstance(run, str | Path):
        raise ConfigError("a node is started from the path of a run file", where="join")
    from torchbft.node.launch import spawn
    from torchbft.pytorch.process import ProcessLink

    endpoint, _ = spawn(Path(run).resolve(), folder.resolve(), listen)
    return ProcessLink(endpoint)
