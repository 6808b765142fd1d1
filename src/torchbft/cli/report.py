"""``torchbft report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchbft.cli.output import Json, emit, say


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run.")] = Path(),
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default DIR/report.html.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write one HTML page on a run.

    It holds the loss curve, the peer x round matrix with the reason for each refusal, bytes and
    phase times, and answers from the trace: who may lie and how Sybils are kept out, what
    agreement adds per inner step, how refused contributions were told from different ones.
    The page needs no network. With --json the figures themselves go to stdout.

    Example: torchbft report ./run --out run.html
    """
    from torchbft.report.gather import gather
    from torchbft.report.html import render

    view = gather(run_dir)
    page = out or run_dir / "report.html"
    page.write_text(render(view), encoding="utf-8")
    say(f"wrote {page}")
    figures = {"page": str(page), "rounds": view.costs(), "matrix": view.matrix()}
    emit(figures | {"accusations": view.accusations()}, as_json=as_json, text=str(page))
