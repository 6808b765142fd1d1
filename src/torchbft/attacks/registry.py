"""All attacks by name, in the order in which reports list them.

A class is imported when it is asked for: agents need no torch, and help needs no class.
"""

from __future__ import annotations

from importlib import import_module

from torchbft.attacks.declaration import Attack, Expectation, Kind
from torchbft.primitives.errors import ConfigError

_HOMES: dict[str, str] = {
    "sign_flip": "vectors.scaling:SignFlip",
    "ipm": "vectors.scaling:InnerProductManipulation",
    "alie": "vectors.alie:ALittleIsEnough",
    "gaussian": "vectors.noise:Gaussian",
    "nan": "vectors.noise:NotANumber",
    "inf": "vectors.noise:Infinite",
    "scaled": "vectors.scaling:Scaled",
    "label_flip": "vectors.poisoning:LabelFlip",
    "copycat": "vectors.scaling:Copycat",
    "equivocator": "agents.contribution:Equivocator",
    "withholder": "agents.contribution:Withholder",
    "bad_opener": "agents.contribution:BadOpener",
    "replayer": "agents.delivery:Replayer",
    "straggler": "agents.delivery:Straggler",
    "crasher": "agents.delivery:Crasher",
    "double_voter": "agents.ordering:DoubleVoter",
    "forger": "agents.delivery:Forger",
    "oversized": "agents.contribution:Oversized",
    "censoring_leader": "agents.ordering:CensoringLeader",
    "selective_sender": "agents.delivery:SelectiveSender",
    "flickerer": "agents.contribution:Flickerer",
    "silent_validator": "agents.contribution:SilentValidator",
}
"""Module and class of each, below this package; a test holds the keys to the classes' names."""


def names() -> tuple[str, ...]:
    """Every attack's name."""
    return tuple(_HOMES)


def known(kind: Kind | None = None) -> dict[str, type[Attack]]:
    """Every attack by name, or those of one kind: agents come without torch."""
    wanted = f"{kind}s." if kind else ""
    return {name: get(name) for name, home in _HOMES.items() if home.startswith(wanted)}


def get(name: str) -> type[Attack]:
    """The attack of this name (``sign-flip`` means ``sign_flip``). Raises ConfigError."""
    home = _HOMES.get(name.replace("-", "_"))
    if home is None:
        raise ConfigError(f"no attack is named {name[:40]!r}", hint=f"known: {', '.join(_HOMES)}")
    module, _, held = home.partition(":")
    found: type[Attack] = getattr(import_module(f"torchbft.attacks.{module}"), held)
    return found


def expectation(attack: str | type[Attack]) -> Expectation:
    """Where a demo at default strength shows the liars: named, suspected, down-weighted."""
    return (get(attack) if isinstance(attack, str) else attack).expected
