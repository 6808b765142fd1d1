"""The offline verifier."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong, and the file (and byte, block or round) where."""

    where: str
    what: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """The verifier's answer: what was checked, how often, and what did not hold."""

    checked: dict[str, int]
    problems: tuple[Problem, ...] = ()

    @property
    def ok(self) -> bool:
        return not self.problems
