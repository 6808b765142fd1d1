"""What the offline verifier found: counts of what held, and the places of what did not."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

MAX_PROBLEMS_PER_FILE = 5
"""One false record can break everything after it; the first few say what to look at."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and the file (and byte, block or round) where."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class MemberResult:
    """How a member's contribution to a round ended, and the kind of its proof, off the ledger."""

    peer: str
    outcome: str
    reason: str
    proof: str
    detail: str = ""
    """Of a malformed payload: what the verifier found in it."""


@dataclass(frozen=True, slots=True)
class VerifiedRound:
    """One round as the ledger decides it. ``root`` is empty until a quorum signed it."""

    round: int
    void: bool
    reason: str
    accepted: tuple[str, ...]
    results: tuple[MemberResult, ...]
    root: str = ""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's answer. ``rounds`` and ``convicted`` are read off the ledger alone."""

    checked: dict[str, int]
    problems: tuple[Problem, ...] = ()
    rounds: tuple[VerifiedRound, ...] = ()
    convicted: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if something was checked and nothing was wrong."""
        return not self.problems and self.checked.get("blocks", 0) > 0


@dataclass(slots=True)
class Findings:
    """Collects the verdict while the verifier goes along."""

    checked: Counter[str] = field(default_factory=Counter)
    problems: list[Problem] = field(default_factory=list)
    _told: Counter[str] = field(default_factory=Counter)

    def count(self, what: str, number: int = 1) -> None:
        self.checked[what] += number

    def problem(self, where: str, what: str) -> None:
        file = where.split(", record")[0]
        self._told[file] += 1
        if self._told[file] <= MAX_PROBLEMS_PER_FILE:
            self.problems.append(Problem(where, what))
