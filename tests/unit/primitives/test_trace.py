"""Traces are read line by line; a torn or foreign line loses nothing else."""

from pathlib import Path

from torchbft.primitives.trace import (
    Evaluated,
    Notice,
    Refusal,
    RoundEnded,
    TraceWriter,
    read_trace,
)


def test_records_come_back_and_torn_lines_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    records = [
        Notice(at=1.0, text="waiting", waiting_for=("bank-b",)),
        RoundEnded(
            at=2.0,
            round=0,
            void=False,
            accepted=("a",),
            refusals=(Refusal("b", "late", "after the window closed"),),
        ),
        Evaluated(at=3.0, round=0, loss=0.5, accuracy=0.9),
    ]
    writer = TraceWriter(path)
    for record in records:
        writer.write(record)
    writer.close()
    with path.open("ab") as file:
        file.write(b'{"type":"unknown"}\n{"type":"eval","at":4.0,"rou')
    assert read_trace(path) == records


def test_a_missing_trace_is_empty(tmp_path: Path) -> None:
    assert read_trace(tmp_path / "none.jsonl") == []
