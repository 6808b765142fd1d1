"""Adversaries: *vectors* act on what a liar contributes, *agents* on what its protocol sends.

``known()`` lists them, ``get(name)`` gives the class; each class declares what it knows, how
strong it is and what it leaves behind. Nothing in a run needs this room; a node may not import it.
"""

from torchbft.attacks.adversary import Adversary, HonestWitness
from torchbft.attacks.declaration import Attack, Expectation, Knowledge, Leaves
from torchbft.attacks.oracle import Oracle
from torchbft.attacks.registry import expectation, get, known
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
]
