"""``torchbft report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchbft.cli.output import ExitCode, Json, emit, say, stop
from torchbft.cli.verify import say_problems, told
from torchbft.report.findings import Verdict


def report(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run.")] = Path(),
    out: Annotated[
        Path | None, typer.Option(help="Where to write the page; default DIR/report.html.")
    ] = None,
    prove: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Verify the log as well.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Write one HTML page on a run.

    It holds the loss curve, the peer x round matrix with the reason for each refusal, bytes and
    phase times, and answers from the trace: who may lie and how Sybils are kept out, what
    agreement adds per inner step, how refused contributions were told from different ones.
    The page needs no network, and says whether the log was verified offline. With --json the
    figures themselves go to stdout. Ends with 1, after writing the page, if the log is not proven.

    Example: torchbft report ./run --out run.html
    """
    from torchbft.report.gather import gather
    from torchbft.report.html import render

    view, verdict = gather(run_dir), _verdict(run_dir) if prove else None
    page = out or run_dir / "report.html"
    page.write_text(render(view, verdict), encoding="utf-8")
    say(f"wrote {page}")
    figures = {
        "page": str(page),
        "ledger_verified": verdict.ok if verdict else None,
        "rounds": view.costs(),
        "matrix": view.matrix(),
        "accusations": view.accusations(),
    }
    emit(figures, as_json=as_json, text=str(page))
    if verdict is not None and not verdict.ok:
        say_problems(verdict)
        say(f"{told(verdict)}; the page says so as well")
        raise stop(ExitCode.CHECK_FAILED)


def _verdict(run_dir: Path) -> Verdict:
    from torchbft.report.verify import verify

    return verify(run_dir)
