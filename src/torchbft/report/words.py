"""How each outcome, kind of proof and figure is shown: one glyph, colour and sentence for all."""

from __future__ import annotations

from dataclasses import dataclass

from torchbft.primitives.evidence import Outcome
from torchbft.report.gather import VOID, Accusation, Cell


@dataclass(frozen=True, slots=True)
class Look:
    """``style`` is a class name in the page and, through ``TERMINAL``, a colour in a terminal."""

    glyph: str
    plain: str
    """ASCII, for terminals without Unicode."""
    label: str
    meaning: str
    style: str


ACCEPTED = Look("●", "o", "accepted", "counted in the agreed model", "ok")
DOWN_WEIGHTED = Look(
    "◐",
    "d",
    "down-weighted",
    "accepted, at less than half an equal share; that accuses nobody: the rule weighs whatever lies"
    " apart from the others so, also honest peers with unusual data",
    "low",
)
UNKNOWN = Look("?", "?", "unknown", "an outcome that this version does not know", "bad")
VOIDED = Look("∅", "v", "void round", "too few contributions: the model stayed as it was", "idle")
NOTHING = Look(" ", " ", "not a contributor", "nothing was expected", "none")

_REFUSED = {
    Outcome.ABSENT: Look("·", ".", "absent", "no commitment in the window", "idle"),
    Outcome.LATE: Look("L", "L", "late", "its item came after the window closed", "idle"),
    Outcome.UNOPENED: Look("U", "U", "unopened", "committed, then did not open", "warn"),
    Outcome.MISSING: Look("W", "W", "missing", "opened, but too few hold its payload", "warn"),
    Outcome.MALFORMED: Look("M", "M", "malformed", "f+1 attest that it does not decode", "bad"),
    Outcome.EQUIVOCATED: Look("E", "E", "equivocated", "signed two different statements", "bad"),
    Outcome.REJECTED_BY_RULE: Look(
        "R", "R", "rejected by rule", "the rule gave it weight 0", "low"
    ),
}
_BY_WORD = {str(outcome): shown for outcome, shown in _REFUSED.items()}
LEGEND = (ACCEPTED, DOWN_WEIGHTED, *_REFUSED.values(), VOIDED)

PHASES = {
    "train": "the inner steps",
    "wait": "for the slowest member to train",
    "encode": "state handed to the trainer, update encoded and stored",
    "commit": "a block fixes the hidden digests",
    "reveal": "a block takes the openings; updates go to everybody",
    "decide": "a block takes the attestations and fixes which updates count",
    "fetch": "updates that have not come are fetched",
    "aggregate": "the rule, and the step of the agreed model",
    "root": "a quorum signs the digest of the new model",
}
"""What happens in each phase of a round."""

TERMINAL = {
    "ok": "green",
    "low": "yellow",
    "idle": "dim",
    "warn": "magenta",
    "bad": "bold red",
    "none": "dim",
}

PROOF = {
    "transferable": "two signed statements, or a signed opening that does not fit the signed "
    "commitment: anyone can check it offline, so it cannot be a mere difference of opinion",
    "f+1 signed observations": "more than f validators signed that they saw it, so at least one "
    "honest peer did; a value that decodes is never refused this way, however odd it is",
    "rule": "nothing is proven: the aggregation rule compared it with the others and gave it less "
    "weight; rules accuse nobody",
    "": "nothing is proven: something of it did not come in time, which also happens to honest "
    "peers; it costs the round's credit and nothing else",
}
"""What sets a refused contribution apart from one that is merely different, by kind of proof."""


def look(cell: Cell | None) -> Look:
    """How to show a cell of the matrix."""
    if cell is None:
        return NOTHING
    if cell.accepted:
        return DOWN_WEIGHTED if cell.down_weighted else ACCEPTED
    return VOIDED if cell.outcome == VOID else _BY_WORD.get(cell.outcome, UNKNOWN)


def sentence(cell: Cell) -> str:
    """A cell in words: outcome, reason, proof and weight."""
    parts = [look(cell).label]
    if cell.reason:
        parts.append(cell.reason)
    if cell.evidence:
        parts.append(f"proof: {cell.evidence}")
    if cell.relative is not None:
        parts.append(f"weight {cell.relative:.2f} of an equal share")
    return "; ".join(parts)


def printable(text: str) -> str:
    """What a peer wrote, without control characters that would steer a terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def span(rounds: tuple[int, ...]) -> str:
    """``(0, 1, 2, 5)`` as ``0–2, 5``."""
    runs: list[list[int]] = []
    for number in sorted(rounds):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def accusation(item: Accusation) -> tuple[str, str]:
    """The word for an accusation, and what it is about."""
    if item.absent:
        return "absent", f"{item.peer}: never connected (round {span(item.rounds)})"
    words = f"{item.peer}: {item.fault} in round {span(item.rounds)}: {item.reason}"
    return ("named" if item.named else "suspected"), words


def seconds(value: float | None) -> str:
    """A duration with a unit that fits it."""
    if value is None:
        return "not measured"
    if value < 1e-3:
        return f"{value * 1e6:.0f} µs"
    if value < 1:
        return f"{value * 1e3:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    return f"{int(value // 60)} min {int(value % 60):02d} s"


def size(value: float) -> str:
    """Bytes with a binary unit."""
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.3g} {unit}"
        value /= 1024
    return f"{value:.3g} GiB"


def percent(share: float) -> str:
    """0 to 1 as a percentage with one digit."""
    return f"{100 * share:.1f} %"
