"""Whatever bytes lie in a run folder, reports show them and commands name them in one line."""

import random
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from torchbft.cli.admit import with_member
from torchbft.cli.main import main
from torchbft.cli.request import parse_request
from torchbft.primitives.errors import ConfigError, TorchbftError
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec, new_member
from torchbft.primitives.trace import Accused, Evaluated, Phase, Refusal, RoundEnded, TraceWriter
from torchbft.report.chart import Series, line_chart, nice_ticks, stacked_bars
from torchbft.report.gather import gather
from torchbft.report.html import render
from torchbft.report.terminal import LiveView, picture, sparkline
from torchbft.report.words import printable, seconds, size, span

QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
Names = st.text(max_size=12)
Floats = st.floats(width=32)
Counts = st.integers(min_value=0, max_value=2**40)
Refusals = st.lists(st.builds(Refusal, Names, Names, Names, Names), max_size=3).map(tuple)
Records = st.one_of(
    st.builds(
        RoundEnded,
        at=Floats, round=st.integers(0, 3), void=st.booleans(), reason=Names,
        accepted=st.lists(Names, max_size=4).map(tuple), refusals=Refusals,
        weights=st.dictionaries(Names, Floats, max_size=3), root=Names, blocks=Counts,
        sent_control=Counts, sent_payload=Counts, train_seconds=Floats, consensus_seconds=Floats,
    ),
    st.builds(Evaluated, at=Floats, round=st.integers(0, 3), loss=Floats, accuracy=Floats),
    st.builds(Phase, at=Floats, round=st.integers(0, 3), name=Names, seconds=Floats),
    st.builds(
        Accused, at=Floats, peer=Names, fault=Names, round=st.integers(0, 3),
        named=st.booleans(), reason=Names,
    ),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """``folder(trace=b"…", status=b"…", demo=b"…", run=b"…")`` writes a run folder."""
    places = {"trace": "peers/a/trace.jsonl", "status": "peers/a/status.json",
              "demo": "demo.json", "run": "run.toml"}  # fmt: skip

    def make(**contents: bytes) -> Path:
        (tmp_path / "peers" / "a").mkdir(parents=True, exist_ok=True)
        for name, place in places.items():
            path = tmp_path / place
            path.unlink(missing_ok=True)
            if name in contents:
                path.write_bytes(contents[name])
        return tmp_path

    return make


@QUICK
@given(trace=st.binary(max_size=300), status=st.binary(max_size=80), demo=st.binary(max_size=80))
def test_any_bytes_in_a_folder_are_shown(
    folder: Callable[..., Path], trace: bytes, status: bytes, demo: bytes
) -> None:
    view = gather(folder(trace=trace, status=status, demo=demo))
    assert render(view).startswith("<!doctype html>")
    picture(view, now=1.0)


@QUICK
@given(records=st.lists(Records, max_size=8))
def test_any_records_are_shown_and_never_as_markup(
    folder: Callable[..., Path], records: list[object]
) -> None:
    run_dir = folder()
    writer = TraceWriter(run_dir / "peers" / "a" / "trace.jsonl")
    for record in records:
        writer.write(record)  # type: ignore[arg-type]
    writer.close()
    view = gather(run_dir)
    text = render(view)
    assert text.count("<script>") == 1
    assert text.count("<html") == 1
    stream = StringIO()
    Console(file=stream, width=100).print(picture(view, now=1.0, total=3))
    with LiveView(run_dir, console=Console(file=stream, width=100)) as live:
        live.refresh()
    assert "\x1b" not in stream.getvalue()


@QUICK
@given(text=st.one_of(st.text(max_size=200), st.binary(max_size=200).map(repr)))
def test_any_text_that_is_no_request_is_one_error(text: str) -> None:
    with pytest.raises(ConfigError, match=r"x\.toml: is no request"):
        parse_request(text, "x.toml")


COMMANDS = ("status", "report", "verify")


@pytest.mark.parametrize("seed", range(12))
def test_any_run_file_ends_in_a_documented_exit_code(
    folder: Callable[..., Path], seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    draw = random.Random(seed)
    pieces = ["name", "=", '"', "[members]", "[[members]]", "1", "\n", "port", "{", "é", "\0", "''"]
    run = "".join(draw.choice(pieces) for _ in range(draw.randint(0, 40))).encode()
    run_dir = folder(run=run + draw.randbytes(draw.choice([0, 3])))
    for command in COMMANDS:
        code = main([command, str(run_dir), "--json"])
        assert code in (0, 1, 2), capsys.readouterr().err
        assert "Traceback" not in capsys.readouterr().err
    for command in (["doctor"], ["request"], ["admit"]):
        code = main([*command, str(run_dir / "run.toml")])
        assert code in (1, 2), capsys.readouterr().err
        assert "Traceback" not in capsys.readouterr().err


@QUICK
@given(values=st.lists(st.floats(), max_size=20))
def test_any_values_make_a_sparkline_and_charts(values: list[float]) -> None:
    assert len(sparkline(values)) == len(values)
    points = [(float(i), value) for i, value in enumerate(values)]
    for svg in (
        line_chart([Series("a", points)], title="t", y_label="y"),
        stacked_bars([Series("a", [(x, abs(y)) for x, y in points])], title="t", y_label="y"),
    ):
        assert "nan" not in svg
        assert "inf" not in svg


@QUICK
@given(low=st.floats(-1e12, 1e12), spread=st.floats(0, 1e30))
def test_ticks_always_span(low: float, spread: float) -> None:
    ticks = nice_ticks(low, low + spread)
    tolerance = 1e-6 * max(1.0, abs(low), spread)
    assert ticks[0] <= low + tolerance
    assert ticks[-1] >= low + spread - tolerance
    assert 2 <= len(ticks) <= 15


@QUICK
@given(numbers=st.sets(st.integers(0, 60)))
def test_a_span_names_exactly_its_rounds(numbers: set[int]) -> None:
    found: set[int] = set()
    for part in filter(None, span(tuple(numbers)).split(", ")):
        first, _, last = part.partition("–")
        found |= set(range(int(first), int(last or first) + 1))
    assert found == numbers


@QUICK
@given(text=st.text())
def test_printable_text_steers_no_terminal(text: str) -> None:
    assert printable(text).isprintable()
    assert len(printable(text)) == len(text)


@QUICK
@given(value=st.floats(0, 1e12))
def test_durations_and_sizes_have_a_unit(value: float) -> None:
    assert seconds(value).split()[-1] in {"µs", "ms", "s"}
    assert size(value).split()[-1] in {"B", "KiB", "MiB", "GiB"}


@QUICK
@given(order=st.permutations(["a", "b", "c", "d"]))
def test_a_roster_does_not_depend_on_the_order_of_admission(order: list[str]) -> None:
    def member(name: str) -> object:
        return new_member(
            name, SigningKey.derive(bytes(32), name), SigningKey.derive(bytes(32), name + "/v")
        )

    first = member("m")
    run = RunSpec(name="r", seed="00" * 32, members=(first,))  # type: ignore[arg-type]
    for name in order:
        run = with_member(run, member(name), "x")  # type: ignore[arg-type]
    run.check()
    assert [each.name for each in run.members] == ["a", "b", "c", "d", "m"]
    other = SigningKey.derive(bytes(32), "other")
    stranger = new_member("a", other, SigningKey.derive(bytes(32), "other/v"))
    with pytest.raises(TorchbftError, match="taken by another key"):
        with_member(run, stranger, "x")
