"""``docs/guarantees.md`` and the registry of attacks say the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchbft import attacks
from torchbft.attacks.agents.agent import Agent
from torchbft.primitives.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs" / "guarantees.md"
HEAD = (
    "| attack | acts on | knows | strength | leaves | named | suspected | down-weighted | bites |"
)
ISSUE_LIST = {
    *("sign_flip", "gaussian", "alie", "ipm", "label_flip", "nan", "inf", "scaled", "copycat"),
    *("equivocator", "withholder", "bad_opener", "replayer", "straggler", "crasher"),
    *("double_voter", "forger", "oversized", "censoring_leader", "selective_sender"),
    *("flickerer", "silent_validator"),
}


def table(text: str) -> dict[str, list[str]]:
    """The rows under the head of the attack table, by name."""
    lines = text.splitlines()
    found: dict[str, list[str]] = {}
    for line in lines[lines.index(HEAD) + 2 :]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert cells[0] not in found
        found[cells[0].strip("`")] = cells[1:]
    return found


def row(attack: type[attacks.Attack]) -> list[str]:
    """What the page must say of an attack."""
    knows = attack.most_knowledge if issubclass(attack, attacks.VectorAttack) else attack.knowledge
    expected = attacks.expectation(attack)

    def sure(flag: bool) -> str:
        return "yes" if flag else "–"

    return [
        "tensors" if attack.kind == "vector" else "protocol",
        knows.value,
        f"{attack.default_strength:g}",
        attack.leaves.value,
        "yes" if expected.named else "no",
        sure(expected.suspected),
        sure(expected.downweighted),
        sure(attack.bites),
    ]


def test_the_table_repeats_the_registry() -> None:
    assert table(PAGE.read_text()) == {n: row(a) for n, a in attacks.known().items()}


def test_the_comparison_sees_a_changed_cell_and_a_missing_row() -> None:
    text = PAGE.read_text()
    expected = {name: row(attack) for name, attack in attacks.known().items()}
    line = next(line for line in text.splitlines() if line.startswith("| `withholder`"))
    assert table(text.replace(line + "\n", "")) != expected
    assert table(text.replace(line, line.replace("nothing", "rule"))) != expected


def test_the_page_states_the_limits_of_the_round() -> None:
    text = PAGE.read_text()
    for promise in ("2^f", "f+1 honest validators", "void", "4 KiB", "8 bytes", "(2+B²)"):
        assert promise in text


def test_known_attacks_are_those_that_the_demo_promises() -> None:
    assert set(attacks.known()) == ISSUE_LIST
    assert {n for n, a in attacks.known().items() if a.bites} >= {
        *("sign_flip", "ipm", "nan", "scaled", "gaussian")
    }


def test_a_member_is_named_exactly_when_something_is_left_to_show() -> None:
    shown = {attacks.Leaves.TRANSFERABLE, attacks.Leaves.OBSERVATIONS}
    for attack in attacks.known().values():
        assert attack.expected.named == (attack.leaves in shown)


@pytest.mark.parametrize("name", sorted(ISSUE_LIST))
def test_every_attack_is_found_by_either_spelling(name: str) -> None:
    kind = attacks.get(name.replace("_", "-"))
    assert kind is attacks.known()[name] is attacks.known(kind.kind)[name]
    assert kind.name == name, "the table of homes has it under another name"
    assert issubclass(kind, Agent if kind.kind == "agent" else attacks.VectorAttack)


def test_an_unknown_attack_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="no attack is named 'withold'") as caught:
        attacks.get("withold")
    assert "withholder" in caught.value.hint
