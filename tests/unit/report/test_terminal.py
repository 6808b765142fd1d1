"""The live view says everything without colour, follows a run, and falls back to plain lines."""

import io
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from torchbft.primitives.evidence import Outcome
from torchbft.primitives.trace import (
    NOT_CONNECTED,
    Accused,
    Notice,
    Record,
    Refusal,
    RoundEnded,
)
from torchbft.report.answers import cost as cost_answer
from torchbft.report.gather import Cell, PeerStatus, gather
from torchbft.report.html import render
from torchbft.report.terminal import (
    LiveView,
    phase_of,
    picture,
    refused,
    seen,
    sparkline,
)
from torchbft.report.words import LEGEND, look, seconds, sentence, size, span

Make = Callable[..., Path]
NOW = 1_800_000_020.0
NAMES = tuple(f"peer-{letter}" for letter in "abcdefg")


def shown(run_dir: Path, *, width: int = 110, ascii_only: bool = False, total: int = 0) -> str:
    stream = io.StringIO()
    console = Console(file=stream, width=width, no_color=True, force_terminal=False)
    view = gather(run_dir)
    console.print(picture(view, total=total, now=NOW, width=width, ascii_only=ascii_only))
    return stream.getvalue()


def plain_view(run_dir: Path, total: int = 0) -> tuple[LiveView, io.StringIO]:
    stream = io.StringIO()
    return LiveView(run_dir, total, console=Console(file=stream, width=200)), stream


def add(run_dir: Path, peer: str, record: Record) -> None:
    with (run_dir / "peers" / peer / "trace.jsonl").open("ab") as file:
        file.write(msgspec.json.encode(record) + b"\n")


def set_status(run_dir: Path, peer: str, **fields: object) -> None:
    path = run_dir / "peers" / peer / "status.json"
    path.write_bytes(msgspec.json.encode({"at": NOW, "peer": peer, **fields}))


def without_end(run_dir: Path) -> None:
    for path in run_dir.glob("peers/*/trace.jsonl"):
        path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def test_picture_holds_quorum_margin_losses_and_matrix(make_run: Make) -> None:
    text = shown(make_run(8))
    assert "8/8 rounds" in text
    assert "quorum 5 of 7, f = 2" in text
    assert "margin +0" in text
    row = next(line for line in text.splitlines() if line.startswith("peer-f"))
    assert row.endswith("◐◐◐M◐◐◐M")
    assert re.search(r"peer-c .*UUUUUUUU", text)
    assert "named peer-f: malformed-payload in round 3" in text
    assert "suspected peer-c: unopened" in text


def test_picture_in_ascii_says_the_same(make_run: Make) -> None:
    text = shown(make_run(8), ascii_only=True)
    assert not [c for c in text if ord(c) > 127 and c not in "–∅"]
    assert re.search(r"peer-f .*dddMdddM", text)


def test_a_glyph_that_looks_like_blame_is_explained(make_run: Make) -> None:
    text = " ".join(shown(make_run(4)).split())
    assert "◐ accepted, at less than half an equal share; that accuses nobody" in text
    without = make_run(4)
    for path in without.glob("peers/*/trace.jsonl"):
        path.write_text(re.sub(r'"weights":{[^}]*}', '"weights":{}', path.read_text()))
    assert "◐" not in shown(without), "only where there is one"


def test_in_ones_own_folder_the_others_are_named_all_the_same(make_run: Make) -> None:
    run_dir = make_run(4)
    for name in NAMES[1:]:
        shutil.rmtree(run_dir / "peers" / name)
    set_status(run_dir, "peer-a", phase="train", connected=["peer-b", "peer-d"])
    lines = shown(run_dir, width=160).splitlines()
    rows = [line.split()[0] for line in lines if line.startswith("peer-")]
    assert rows == list(NAMES)
    assert "seen by peer-a alone, connected to peer-b, peer-d; the others keep" in "".join(lines)
    assert "seen by" not in shown(make_run(4)), "where all folders are"


def never_came(run_dir: Path, *, reason: str = NOT_CONNECTED, came: int | None = None) -> Path:
    """peer-g is absent in all rounds but one, and suspected for it by everybody."""
    gone = Refusal("peer-g", "absent", "no-commitment")
    for peer in NAMES[:6]:
        for number in range(4):
            accepted = NAMES if number == came else NAMES[:6]
            refusals = () if number == came else (gone,)
            add(run_dir, peer, RoundEnded(at=1.0, round=number, void=False, accepted=accepted,
                                          refusals=refusals, root=f"{number:064x}"))  # fmt: skip
            add(run_dir, peer, Accused(at=1.0, peer="peer-g", fault="absent", round=number,
                                       named=False, reason=reason))  # fmt: skip
    return run_dir


def test_who_never_connected_is_absent_and_not_suspected(make_run: Make) -> None:
    run_dir = never_came(make_run(4))
    text = shown(run_dir)
    assert "absent peer-g: never connected (round 0–3)" in text
    assert "suspected peer-g" not in text
    view, stream = plain_view(run_dir)
    with view:
        view.refresh()
    assert "absent: peer-g, never connected" in stream.getvalue()
    assert re.search(r"round 0 .* absent peer-g$", stream.getvalue(), re.MULTILINE)
    page = render(gather(run_dir))
    assert "1 never connected" in page
    assert "<td>absent</td>" in page


@pytest.mark.parametrize("changed", [{"came": 2}, {"reason": "no-commitment"}])
def test_who_was_there_at_times_is_suspected_for_the_others(
    make_run: Make, changed: dict[str, Any]
) -> None:
    text = shown(never_came(make_run(4), **changed))
    assert "suspected peer-g: absent" in text
    assert "never connected" not in text


def test_a_repeated_notice_is_told_again_once_for_all_peers(make_run: Make) -> None:
    run_dir = make_run(1)
    view, stream = plain_view(run_dir)
    with view:
        for times in (1, 2):
            for peer in ("peer-a", "peer-b"):
                add(run_dir, peer, Notice(at=float(times), text="waiting for peer-c"))
            view.refresh()
            view.refresh()
            assert stream.getvalue().count("waiting for peer-c") == times


def test_a_round_that_nobody_measured_is_not_told_as_quick(make_run: Make) -> None:
    run_dir = make_run(3)
    for path in run_dir.glob("peers/*/trace.jsonl"):
        lines = [line for line in path.read_text().splitlines()
                 if not ('"type":"phase"' in line and '"round":1' in line)]  # fmt: skip
        lines = [re.sub(r',"(train|consensus)_seconds":[0-9.e-]+', "", line)
                 if '"type":"round"' in line and '"round":1' in line else line
                 for line in lines]  # fmt: skip
        path.write_text("\n".join(lines) + "\n")
    view, stream = plain_view(run_dir)
    with view:
        view.refresh()
    told = [line for line in stream.getvalue().splitlines() if line.startswith("round")]
    assert ["not measured" in line for line in told] == [False, True, False]
    gathered = gather(run_dir)
    assert [cost.round for cost in gathered.measured()] == [0, 2]
    whole = gather(make_run(3))
    assert cost_answer(gathered).split("inner step")[0] == cost_answer(whole).split("inner step")[0]
    assert "not measured" in render(gathered)
    assert "not measured" not in render(whole)


def test_void_rounds_show_in_every_row(make_run: Make) -> None:
    text = shown(make_run(8, void=frozenset({7})))
    assert "last round: void" in text
    assert re.search(r"peer-a .*●∅$", text, re.MULTILINE)
    assert "∅ void round" in text


def test_matrix_of_a_long_run_shows_the_last_rounds(make_run: Make) -> None:
    text = shown(make_run(120), width=80)
    row = next(line for line in text.splitlines() if line.startswith("peer-a"))
    assert len(row) <= 80
    assert "110" in text
    assert "●" in row


def test_c13_whom_a_stuck_run_waits_for_and_how_long_is_shown(make_run: Make) -> None:
    run_dir = make_run(3)
    without_end(run_dir)
    for peer in ("peer-a", "peer-b"):
        set_status(run_dir, peer, phase="commit", waiting_for=["peer-g"], until=NOW + 4)
    set_status(run_dir, "peer-c", phase="train")
    text = shown(run_dir, total=10)
    assert "commit (waits at most 4 s) for peer-g" in text
    assert "3/10 rounds" in text
    assert "left" in text


def test_phase_of_a_finished_run_is_its_end(make_run: Make) -> None:
    assert phase_of(gather(make_run(2))) == ("finished", (), None)


def test_phase_before_anything_happened(tmp_path: Path) -> None:
    (tmp_path / "peers").mkdir()
    assert phase_of(gather(tmp_path)) == ("starting", (), None)
    assert "starting" in shown(tmp_path)


def test_seen_counts_peers_that_wrote_lately(make_run: Make) -> None:
    view = gather(make_run(2))
    assert seen(view, NOW - 10) == 7
    assert seen(view, NOW + 3600) == 0
    view.peers["peer-a"].status = PeerStatus(at=NOW + 3590)
    assert seen(view, NOW + 3600) == 1


def test_plain_lines_tell_each_round_once(make_run: Make) -> None:
    view, stream = plain_view(make_run(3))
    with view:
        view.refresh()
        first = stream.getvalue()
        view.refresh()
        assert stream.getvalue() == first
    told = [line for line in stream.getvalue().splitlines() if line.startswith("round")]
    assert [line.split()[1] for line in told] == ["0", "1", "2"]
    assert "accepted 6/7" in told[0]
    assert "loss 2.3800" in told[0]
    assert "refused peer-c unopened" in told[0]


def test_plain_lines_tell_void_rounds_and_notices_once(make_run: Make) -> None:
    run_dir = make_run(2, void=frozenset({1}))
    for peer in ("peer-a", "peer-b"):
        add(run_dir, peer, Notice(at=1.0, text="waiting for peer-c", waiting_for=("peer-c",)))
    view, stream = plain_view(run_dir)
    with view:
        view.refresh()
    text = stream.getvalue()
    assert text.count("waiting for peer-c") == 1
    assert text.count("named: peer-f") == 1
    assert "void: 4 of 5 contributions" in text


def test_an_unevaluated_last_round_waits_for_its_loss(make_run: Make) -> None:
    run_dir = make_run(2)
    for path in run_dir.glob("peers/*/trace.jsonl"):
        lines = path.read_bytes().splitlines(keepends=True)
        gone = [line for line in lines if b'"eval"' in line and b'"round":1' in line]
        gone += [line for line in lines if b'"end"' in line]
        path.write_bytes(b"".join(line for line in lines if line not in gone))
    view, stream = plain_view(run_dir)
    with view:
        view.refresh()
        assert "round 0 " in stream.getvalue()
        assert "round 1 " not in stream.getvalue()
    assert "round 1 " in stream.getvalue(), "told at the end in any case"


def test_run_ends_when_told_and_returns_the_view(make_run: Make) -> None:
    view, _ = plain_view(make_run(2))
    asked = iter([False, False, True])
    assert view.run(lambda: next(asked), interval=0).last_round == 1


def test_live_picture_on_a_terminal(make_run: Make) -> None:
    stream = io.StringIO()
    console = Console(file=stream, width=100, force_terminal=True, no_color=True)
    with LiveView(make_run(2), 2, console=console) as view:
        view.refresh()
    assert "peer-a" in stream.getvalue()
    assert "round 0 (" not in stream.getvalue(), "no plain lines beside the picture"


def test_control_characters_of_a_peer_never_reach_the_terminal(make_run: Make) -> None:
    run_dir = make_run(2)
    evil = "\x1b]0;owned\x07\x1b[2J\x9b1m"
    for peer in ("peer-a", "peer-b", "peer-d"):
        add(run_dir, peer, Accused(at=1.0, peer=evil, fault=evil, round=0, named=True, reason=evil))
        add(run_dir, peer, Notice(at=1.0, text=evil))
    view, stream = plain_view(run_dir)
    with view:
        view.refresh()
    for text in (stream.getvalue(), shown(run_dir)):
        assert "owned" in text
        assert not {"\x1b", "\x07", "\x9b"} & set(text)


def test_refused_groups_rounds(make_run: Make) -> None:
    assert ("peer-c", "unopened, committed, did not open", "0–7") in refused(
        gather(make_run(8)).matrix()
    )


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([1.0, 2.0, 3.0], "▁▅█"),
        ([5.0], "▁"),
        ([], ""),
        ([1.0, float("nan"), float("inf"), 2.0], "▁!!█"),
        ([float("nan")], "!"),
    ],
)
def test_sparkline(values: list[float], bars: str) -> None:
    assert sparkline(values) == bars


def test_every_outcome_has_a_look_of_its_own() -> None:
    looks = [look(Cell(outcome.value)) for outcome in Outcome]
    assert len({item.label for item in looks}) == len(Outcome)
    assert len({item.glyph for item in LEGEND}) == len(LEGEND)
    assert len({item.plain for item in LEGEND}) == len(LEGEND)
    assert all(item.plain.isascii() for item in LEGEND)
    assert look(Cell("from-the-future")).label == "unknown"
    assert look(None).label == "not a contributor"


def test_sentence_says_outcome_reason_proof_and_weight() -> None:
    cell = Cell("rejected-by-rule", "norm-outlier", "rule", 0.0, 0.2)
    assert sentence(cell) == (
        "rejected by rule; norm-outlier; proof: rule; weight 0.00 of an equal share"
    )


@pytest.mark.parametrize(
    ("rounds", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2, 5), "0–2, 5"), ((4, 2, 3), "2–4"), ((1, 3), "1, 3")],
)
def test_span(rounds: tuple[int, ...], text: str) -> None:
    assert span(rounds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(2e-6, "2 µs"), (0.0123, "12.3 ms"), (1.5, "1.5 s"), (125.0, "2 min 05 s")],
)
def test_seconds(value: float, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**20, "3 MiB"), (5 * 2**30, "5 GiB")],
)
def test_size(value: float, text: str) -> None:
    assert size(value) == text
