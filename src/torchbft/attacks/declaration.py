"""What every attack says of itself; ``docs/guarantees.md`` repeats it and a test compares them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, Literal

Kind = Literal["vector", "agent"]


class Knowledge(StrEnum):
    """What a liar knows when it makes its contribution of a round."""

    OWN = "own"
    """Its own honest update."""
    HISTORY = "history"
    """Also the aggregates of earlier rounds: all that commit–reveal leaves a real liar."""
    OMNISCIENT = "omniscient"
    """Also the honest updates of this round, through an oracle outside the protocol."""


class Leaves(StrEnum):
    """What an attack leaves that others can show."""

    TRANSFERABLE = "transferable evidence"
    """Bytes signed by the liar that convince anyone offline."""
    OBSERVATIONS = "signed observations"
    """The word of at least f+1 validators, signed and on the ledger; one of them is honest."""
    RULE = "rule"
    """Only the outcome of the aggregation rule: a refusal by norm, a smaller weight."""
    NOTHING = "nothing"
    """An omission is seen, and suspected, by all; but nobody can show who lost what."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """Where a run of the default rule at default strength shows every liar.

    ``named`` is exact both ways. ``suspected`` and ``downweighted`` say what is sure to be seen;
    where they are False it may happen or not. No honest peer is ever named.
    """

    named: bool
    suspected: bool
    downweighted: bool


class Attack:
    """Base of all attacks: declarations only."""

    name: ClassVar[str]
    kind: ClassVar[Kind]
    knowledge: Knowledge
    leaves: ClassVar[Leaves]
    default_strength: ClassVar[float]
    """Meaning and unit in the docstring of each attack; 0 where an attack has no strength."""
    bites: ClassVar[bool] = False
    """Whether a run with a plain mean and no checks is asserted to lose at least 10 points."""
    expected: ClassVar[Expectation]
