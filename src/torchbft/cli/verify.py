"""``torchbft verify``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from torchbft.cli.output import ExitCode, Json, emit, say, stop
from torchbft.report.findings import Verdict


def verify(
    run_dir: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run.")] = Path(),
    as_json: Json = False,
) -> None:
    """Prove a run's log offline, without trusting any peer.

    Signatures of the run file, every byte of every log, the chain of blocks and their
    certificates, every statement; then the rounds are read and aggregated again, and each root
    must be the one that a quorum signed. Ends with 1 and the place if anything is off.

    Example: torchbft verify ./run --json
    """
    from torchbft.report.verify import verify as prove

    verdict = prove(run_dir)
    say_problems(verdict)
    counts = ", ".join(f"{count:,} {name}" for name, count in verdict.checked.items())
    text = f"verified: {counts}" if verdict.ok else told(verdict)
    if not verdict.ok and counts:
        say(f"what did hold: {counts}")
    data: dict[str, object] = {"ledger_verified": verdict.ok, "checked": verdict.checked}
    emit(data | {"problems": verdict.problems}, as_json=as_json, text=text)
    if not verdict.ok:
        raise stop(ExitCode.CHECK_FAILED)


def say_problems(verdict: Verdict) -> None:
    """Each problem with its place, for people."""
    for problem in verdict.problems:
        say(f"problem: {problem.where}: {problem.what}")


def told(verdict: Verdict) -> str:
    """A verdict that is not yes, in one line."""
    count = len(verdict.problems)
    if not count:
        return "NOT verified: there was nothing to check"
    return (
        f"NOT verified: {count} problem{'s' if count > 1 else ''}, first in"
        f" {verdict.problems[0].where}"
    )
