"""The three answers hold the trace's own numbers, and say only what the trace shows."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from torchbft.primitives.trace import Refusal, RoundEnded
from torchbft.report.answers import cost, liars, refusals, table, threshold
from torchbft.report.gather import PHASES, RoundCost, gather
from torchbft.report.words import PHASES as WORDS_OF_PHASES
from torchbft.report.words import PROOF, percent

Make = Callable[..., Path]
NAMES = tuple(f"peer-{letter}" for letter in "abcdefg")


class Tables(HTMLParser):
    """All tables of a piece of HTML, as lists of rows of cell texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
            self.inside = True

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th"):
            self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.rows[-1][-1] += data


def rows_of(text: str) -> dict[str, list[str]]:
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in Tables(text).rows}


def edit_rounds(run_dir: Path, change: Callable[[RoundEnded], RoundEnded]) -> None:
    """Rewrite the round records of all traces."""
    decoder = msgspec.json.Decoder(RoundEnded)
    for path in run_dir.glob("peers/*/trace.jsonl"):
        lines = path.read_bytes().splitlines()
        for index, line in enumerate(lines):
            if b'"type":"round"' in line:
                lines[index] = msgspec.json.encode(change(decoder.decode(line)))
        path.write_bytes(b"\n".join(lines) + b"\n")


def test_cost_table_holds_the_medians_of_the_trace(make_run: Make) -> None:
    rows = rows_of(cost(gather(make_run(5))))
    assert rows["agreement, time per inner step"] == ["3.74 ms"] * 3
    assert rows["agreement, time per round"][0] == "74.8 ms"
    assert rows["training, time per round"][0] == "345 ms"
    assert rows["waiting for the slowest member to train"][0] == "34.5 ms"
    assert rows["control bytes sent per inner step"][0] == "1.95 KiB"
    assert rows["payload bytes sent per inner step"][0] == "44.8 KiB"
    assert rows["size of one contribution"][0] == "149 KiB"
    assert rows["blocks per round"] == ["3", "3", "3"]


def test_cost_table_tells_median_from_largest(make_run: Make) -> None:
    run_dir = make_run(20)
    edit_rounds(
        run_dir,
        lambda r: msgspec.structs.replace(r, consensus_seconds=2.0 if r.round == 9 else 0.1),
    )
    assert rows_of(cost(gather(run_dir)))["agreement, time per round"] == ["100 ms", "2 s", "2 s"]


def test_phases_share_out_the_whole(make_run: Make) -> None:
    rows = rows_of(cost(gather(make_run(5))))
    phases = {name: rows[name] for name in ("commit", "reveal", "decide", "aggregate")}
    shares = [float(cells[-1].split()[0]) for cells in phases.values()]
    assert sum(shares) == pytest.approx(100.0, abs=0.2)
    assert "train" not in rows
    assert "wait" not in rows
    assert phases["commit"][:2] == ["a block fixes the hidden digests", "23 ms"]
    assert phases["commit"][2] == "1.15 ms", "divided by H = 20"


def test_share_counts_training_waiting_and_agreement() -> None:
    costs = RoundCost(0, False, 0.6, 0.2, 0.2, 10, 3, 100, 300, 50, {})
    assert costs.share == pytest.approx(0.2)
    assert costs.seconds_per_step == pytest.approx(0.02)
    assert costs.bytes_per_step == 40
    idle = RoundCost(0, False, 0.0, 0.0, 0.0, 10, 3, 0, 0, 0, {})
    assert idle.share == 0.0


def test_control_share_of_bytes(make_run: Make) -> None:
    text = cost(gather(make_run(3)))
    assert f"{percent(40_000 / 958_000)} are the agreement itself" in text


def test_refused_contributions_are_told_apart_by_their_proof(make_run: Make) -> None:
    run_dir = make_run(6)
    proofs = {0: "transferable", 1: "f+1 signed observations", 2: "rule", 3: ""}
    outcomes = {0: "equivocated", 1: "malformed", 2: "rejected-by-rule", 3: "absent"}

    def change(r: RoundEnded) -> RoundEnded:
        kind = r.round % 4
        refused = Refusal("peer-g", outcomes[kind], f"code-{kind}", proofs[kind])
        accepted = tuple(name for name in r.accepted if name != "peer-g")
        return msgspec.structs.replace(r, accepted=accepted, refusals=(refused,))

    edit_rounds(run_dir, change)
    rows = [row for row in Tables(refusals(gather(run_dir))).rows if row[0] == "peer-g"]
    told = {row[1]: row for row in rows if len(row) == 5}
    assert told["equivocated"][4].startswith("transferable: two signed statements")
    assert told["malformed"][4].startswith("f+1 signed observations: more than f")
    assert told["rejected by rule"][4].startswith("rule: nothing is proven: the aggregation rule")
    assert told["absent"][4].startswith("no proof: nothing is proven: something of it")
    assert told["equivocated"][2] == "2 (0, 4)"
    assert "code-1" in told["malformed"][3]


def test_proofs_that_name_are_told_from_those_that_do_not() -> None:
    assert "nothing is proven" not in PROOF["transferable"] + PROOF["f+1 signed observations"]
    assert "nothing is proven" in PROOF["rule"]
    assert "nothing is proven" in PROOF[""]


def test_an_unknown_proof_is_shown_as_it_is(make_run: Make) -> None:
    run_dir = make_run(2)
    odd = (Refusal("peer-c", "unopened", "x", "from <the> future"),)
    edit_rounds(run_dir, lambda r: msgspec.structs.replace(r, refusals=odd))
    assert "from &lt;the&gt; future" in refusals(gather(run_dir))


def test_weights_of_accepted_contributions(make_run: Make) -> None:
    rows = Tables(refusals(gather(make_run(4)))).rows
    weights = {row[0].strip(): row[1:] for row in rows if len(row) == 4}
    assert weights["peer-f"][0].strip() == "0.12"
    assert weights["peer-f"][2] == "3 of 3"
    assert weights["peer-a"][2] == "0 of 4"
    assert "peer-c" not in weights, "never accepted"


def test_weights_are_told_in_a_sentence_and_the_rule_in_its_own_words(make_run: Make) -> None:
    run_dir = make_run(8)
    text = refusals(gather(run_dir))
    assert "Of 8 rounds, less than half an equal share: peer-f in 6." in text
    parts = re.findall(r"<li><code>(\w+)</code>: ([^<]+)</li>", text)
    assert [name for name, _ in parts] == ["arc", "nnm", "trimmed_mean"]
    assert parts[2][1] == "Mean of each coordinate without its f smallest and f largest values."
    edit_rounds(run_dir, lambda r: msgspec.structs.replace(r, weights=dict.fromkeys(NAMES, 1 / 7)))
    assert "less than half an equal share: nobody in any." in refusals(gather(run_dir))


def test_every_phase_of_a_round_is_explained() -> None:
    assert tuple(WORDS_OF_PHASES) == PHASES


def test_nothing_refused_nobody_accused(make_run: Make) -> None:
    run_dir = make_run(2)
    edit_rounds(run_dir, lambda r: msgspec.structs.replace(r, refusals=(), weights={}))
    for path in run_dir.glob("peers/*/trace.jsonl"):
        kept = [line for line in path.read_bytes().splitlines() if b'"accused"' not in line]
        path.write_bytes(b"\n".join(kept) + b"\n")
    text = refusals(gather(run_dir))
    assert "No contribution was refused:" in text
    assert "Nobody was accused of anything." in text
    assert "how much did it count" not in text, "no weights were recorded"


def test_a_void_round_refuses_only_those_at_fault(make_run: Make) -> None:
    text = refusals(gather(make_run(2, void=frozenset({0, 1}))))
    assert "2 contributions were refused" in text
    assert "peer-a" not in text


def test_named_and_suspected_stand_apart(make_run: Make) -> None:
    rows = [row for row in Tables(refusals(gather(make_run(4)))).rows if len(row) == 6]
    accused = {row[0].strip(): row[1:] for row in rows[1:]}
    assert accused["peer-f"][:2] == ["named", "malformed-payload"]
    assert accused["peer-c"][:2] == ["suspected", "unopened"]
    assert accused["peer-f"][-1] == "6"


@pytest.mark.parametrize("demo", [{}, {"liars": "peer-a"}, {"liars": None}, {"liars": {"a": 1}}])
def test_demo_without_a_list_of_liars(make_run: Make, demo: object) -> None:
    run_dir = make_run(1)
    (run_dir / "demo.json").write_text(json.dumps(demo))
    assert liars(gather(run_dir)) == ()


def test_margin_counts_the_fewest_contributions(make_run: Make) -> None:
    text = threshold(gather(make_run(8, void=frozenset({2}))), None)
    assert "7 rounds counted, 1 void" in text
    assert (
        "The fewest contributions in a round were 5 (margin +0 over 5), the median 6 of 7" in text
    )


def test_roster_lists_every_seat_and_signature(make_run: Make) -> None:
    rows = rows_of(threshold(gather(make_run(1)), None))
    assert rows["peer-a"][1:] == ["1", "one seat", "signed"]
    assert rows["peer-g"][1:] == ["1", "one seat", "not signed"]
    assert re.fullmatch(r"[0-9a-f]{16}…", rows["peer-a"][0])


def test_table_escapes_heads_and_captions() -> None:
    text = table(("<a>", "b"), [("ready", "<b>made</b>")], caption="<c>")
    assert "&lt;a&gt;" in text
    assert "&lt;c&gt;" in text
    assert "<b>made</b>" in text, "cells are ready HTML"
