"""The page: self-contained, escaped, well-formed, and its numbers are those of the trace."""

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

import torchbft.report.html as html
from torchbft.primitives.trace import Accused, Notice, Refusal, RoundEnded
from torchbft.report.answers import cost, refusals, threshold
from torchbft.report.chart import MAX_BARS, Scale, Series, line_chart, nice_ticks, stacked_bars
from torchbft.report.findings import MemberResult, Problem, Verdict, VerifiedRound
from torchbft.report.gather import gather
from torchbft.report.html import render

Make = Callable[..., Path]
VOID_ELEMENTS = {"meta", "br", "hr", "img", "input", "link", "circle", "rect", "line", "polyline"}


class Page(HTMLParser):
    """Checks that tags nest, and collects what the page shows and refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.shown: list[str] = []
        self.tips: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        known = dict(attrs)
        self.links += [str(known[key]) for key in ("src", "href") if key in known]
        self.tips += [str(known["data-tip"])] if "data-tip" in known else []
        self.ids += [str(known["id"])] if "id" in known else []
        if tag not in VOID_ELEMENTS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID_ELEMENTS:
            assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.shown.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.shown).split())


def page_of(run_dir: Path, verdict: Verdict | None = None) -> Page:
    return Page(render(gather(run_dir), verdict))


def test_page_is_well_formed_and_self_contained(make_run: Make) -> None:
    text = render(gather(make_run(12)))
    page = Page(text)
    assert page.links == []
    assert "http:" not in text
    assert "https:" not in text
    assert "@import" not in text
    assert "url(" not in text
    assert "default-src 'none'" in text
    assert len(page.ids) == len(set(page.ids))


def test_page_answers_the_three_questions(make_run: Make) -> None:
    text = page_of(make_run(12)).text
    assert "7 votes, of which at most f = ⌊(7 − 1)/3⌋ = 2 may be Byzantine" in text
    assert "every decision needs n − f = 5" in text
    assert "5 of 7 members signed it (5 needed: enough)" in text
    assert "Agreement adds 3.74 ms per inner step, 16.5 % of a round's time" in text
    assert "46.8 KiB sent per peer and inner step" in text
    assert "How was a refused contribution told from a merely different one?" in text
    assert "f+1 signed observations" in text


def test_matrix_has_a_reason_for_every_cell(make_run: Make) -> None:
    page = page_of(make_run(5, void=frozenset({4})))
    cells = [tip for tip in page.tips if tip.startswith("peer-")]
    assert len(cells) == 7 * 5
    assert "peer-c, round 2: unopened; committed, did not open" in cells
    (poison,) = [tip for tip in cells if tip.startswith("peer-f, round 3")]
    assert "malformed; holds values that are not finite; proof: f+1 signed observations" in poison
    assert "peer-a, round 4: void round; 4 of 5 contributions" in cells


def test_what_peers_write_is_escaped(make_run: Make) -> None:
    run_dir = make_run(2)
    evil = "<script>alert(1)</script><img src=\"x\" onerror='steal()'>"
    ended = RoundEnded(
        at=9e9, round=2, void=False, accepted=(evil,), weights={evil: 1.0},
        refusals=(Refusal(evil, evil, evil, evil),), root=evil,
    )  # fmt: skip
    accused = Accused(at=1.0, peer=evil, fault=evil, round=1, named=True, reason=evil)
    (run_dir / "demo.json").write_text(json.dumps({"liars": [evil], "attack": evil, evil: evil}))
    for path in run_dir.glob("peers/*/trace.jsonl"):
        with path.open("ab") as file:
            for record in (ended, accused, Notice(at=1.0, text=evil)):
                file.write(msgspec.json.encode(record) + b"\n")
    text = render(gather(run_dir), Verdict({evil: 1}, (Problem(evil, evil),)))
    page = Page(text)
    assert evil in page.text, "it is shown"
    assert page.links == [], "but never as markup"
    assert text.count("<script>") == 1


def test_nothing_recorded_still_makes_a_page(tmp_path: Path) -> None:
    (tmp_path / "peers" / "peer-a").mkdir(parents=True)
    assert "No round has been finished" in page_of(tmp_path).text


def test_verdict_is_shown(make_run: Make) -> None:
    run_dir = make_run(2)
    good = page_of(run_dir, Verdict({"blocks": 6, "certificates": 42}))
    assert "proven" in good.text
    assert "at least 5 of 7 votes (6 blocks, 42 certificates)" in good.text
    bad = page_of(run_dir, Verdict({"blocks": 6}, (Problem("blocks.log", "byte 7 is damaged"),)))
    assert "FALSE" in bad.text
    assert "byte 7 is damaged" in bad.text
    assert "at least 5 of 7 votes (" not in bad.text


def test_verifier_says_what_was_wrong_with_a_malformed_payload(make_run: Make) -> None:
    result = MemberResult("peer-f", "malformed", "payload", "f+1 signed observations", "odd bytes")
    told = VerifiedRound(3, False, "", (), (result,))
    text = page_of(make_run(4), Verdict({"blocks": 1}, (), (told,))).text
    assert "f+1 attest that it does not decode; odd bytes" in text


def test_demo_marks_liars_but_judges_by_the_trace_alone(make_run: Make) -> None:
    run_dir = make_run(4)
    before = refusals(gather(run_dir))
    (run_dir / "demo.json").write_text('{"liars": ["peer-a"], "reference_accuracy": 98.1}')
    after = refusals(gather(run_dir))
    assert "liar (demo)" not in before
    mark = ' <span class="liar">liar (demo)</span>'
    assert after.replace(mark, "") == before


def test_peers_with_equal_curves_share_a_line_and_others_stand_out(make_run: Make) -> None:
    run_dir = make_run(4)
    trace = run_dir / "peers" / "peer-b" / "trace.jsonl"
    trace.write_bytes(re.sub(rb'"loss":2\.\d+', b'"loss":9.5', trace.read_bytes()))
    text = page_of(run_dir).text
    assert "6 peers: peer-a … peer-g" in text


def test_differing_roots_are_called_out(make_run: Make) -> None:
    run_dir = make_run(2)
    assert "hold the same model, bit for bit" in page_of(run_dir).text
    trace = run_dir / "peers" / "peer-b" / "trace.jsonl"
    trace.write_bytes(trace.read_bytes().replace(b"%064x" % 1, b"%064x" % 999))
    assert "2 different roots were recorded after round 1" in page_of(run_dir).text


def test_long_runs_say_what_is_left_out(make_run: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(html, "MAX_MATRIX_ROUNDS", 10)
    text = page_of(make_run(15)).text
    assert "The first 5 rounds are left out here." in text


def test_costs_leave_void_rounds_out(make_run: Make) -> None:
    view = gather(make_run(3, void=frozenset({0, 1, 2})))
    assert "nothing was measured" in cost(view)
    assert "Agreement adds" in cost(gather(make_run(3)))


def test_threshold_without_a_run_file_says_so(make_run: Make) -> None:
    run_dir = make_run(2)
    (run_dir / "run.toml").unlink()
    text = threshold(gather(run_dir), None)
    assert "every decision needs n − f = 5" in text
    assert "admission cannot be checked" in text


def test_threshold_shows_too_few_signatures(make_run: Make) -> None:
    run_dir = make_run(2)
    text = (run_dir / "run.toml").read_text()
    (run_dir / "run.toml").write_text(text.replace("inner_steps = 20", "inner_steps = 21"))
    assert "0 of 7 members signed it (5 needed: <strong>too few</strong>)" in threshold(
        gather(run_dir), None
    )


# Charts


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.03, 0.97), (-5.0, 5.0), (3.0, 3.0), (0.0, 1e-9), (1e6, 3e6)]
)
def test_ticks_are_round_and_span_the_values(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert ticks[0] <= low + 1e-12
    assert ticks[-1] >= high - 1e-12
    assert 2 <= len(ticks) <= 12
    steps = {round((b - a) / (ticks[1] - ticks[0]), 6) for a, b in pairwise(ticks)}
    assert steps == {1.0}


def test_scale_maps_ends_to_ends() -> None:
    scale = Scale(2.0, 4.0, 100.0, 0.0)
    assert [scale(2.0), scale(3.0), scale(4.0)] == [100.0, 50.0, 0.0]


def test_bars_are_as_high_as_their_values() -> None:
    svg = stacked_bars(
        [Series("one", [(0, 1.0), (1, 2.0)]), Series("two", [(0, 1.0), (1, 1.0)])],
        title="t", y_label="y",
    )  # fmt: skip
    bars = re.findall(
        r'class="bar (c\d)" x="[\d.]+" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', svg
    )
    sizes = {(name, i): float(h) for i, (name, _, h) in enumerate(bars)}
    assert sizes["c0", 1] == pytest.approx(2 * sizes["c0", 0], abs=0.2)
    tops = [float(y) for _, y, _ in bars]
    assert tops[2] == pytest.approx(tops[0] - sizes["c1", 2], abs=0.2), "stacked on the first"


def test_many_rounds_become_few_bars() -> None:
    points = [(float(i), 1.0) for i in range(1000)]
    svg = stacked_bars([Series("one", points)], title="t", y_label="y")
    assert svg.count('class="bar c0" x=') <= MAX_BARS + 1


def test_lines_leave_out_what_is_not_finite() -> None:
    points = [(0.0, 1.0), (1.0, float("nan")), (2.0, float("inf")), (3.0, 2.0)]
    svg = line_chart([Series("loss", points)], title="t", y_label="y")
    (drawn,) = re.findall(r'points="([^"]+)"', svg)
    assert len(drawn.split()) == 2
    assert "nan" not in svg


def test_chart_of_nothing_says_so() -> None:
    assert "nothing was recorded" in line_chart([], title="Loss", y_label="y")
    empty = [Series("zero", [(0, 0.0)])]
    assert "nothing was recorded" in stacked_bars(empty, title="Bytes", y_label="y")


def test_one_round_makes_a_chart() -> None:
    assert "<polyline" in line_chart([Series("l", [(0.0, 1.0)])], title="t", y_label="y")


def test_chart_names_are_escaped() -> None:
    svg = line_chart([Series("<b>", [(0, 1), (1, 2)])], title="<i>", y_label="<u>")
    assert "<b>" not in svg
    assert "<i>" not in svg
    assert "<u>" not in svg
