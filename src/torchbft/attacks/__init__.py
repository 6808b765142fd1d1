"""Adversaries: *vectors* act on what a liar contributes, *agents* on what its protocol sends.

``names()`` lists them, ``get(name)`` gives the class; each class declares what it knows, how
strong it is and what it leaves behind. Nothing in a run needs this room; a node may not import it.
What acts on tensors is loaded, and torch with it, once it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchbft.attacks.declaration import Attack, Expectation, Knowledge, Leaves
from torchbft.attacks.registry import expectation, get, known, names

if TYPE_CHECKING:
    from torchbft.attacks.adversary import Adversary, HonestWitness
    from torchbft.attacks.oracle import Oracle
    from torchbft.attacks.vectors.alie import ALittleIsEnough as ALIE
    from torchbft.attacks.vectors.view import VectorAttack, VectorView

__all__ = [
    "ALIE",
    "Adversary",
    "Attack",
    "Expectation",
    "HonestWitness",
    "Knowledge",
    "Leaves",
    "Oracle",
    "VectorAttack",
    "VectorView",
    "expectation",
    "get",
    "known",
    "names",
]

_HOMES = {
    "ALIE": ("vectors.alie", "ALittleIsEnough"),
    "Adversary": ("adversary", "Adversary"),
    "HonestWitness": ("adversary", "HonestWitness"),
    "Oracle": ("oracle", "Oracle"),
    "VectorAttack": ("vectors.view", "VectorAttack"),
    "VectorView": ("vectors.view", "VectorView"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'torchbft.attacks' has no attribute {name!r}")
    module, held = _HOMES[name]
    return getattr(import_module(f"torchbft.attacks.{module}"), held)
