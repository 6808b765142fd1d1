"""verify, report and status on a run whose log holds, and on the same one damaged."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from torchbft.cli.main import main
from torchbft.primitives.runspec import load_run
from torchbft.primitives.trace import RunStarted, TraceWriter

Ran = tuple[int, str, str]
Torchbft = Callable[..., Ran]


@pytest.fixture
def torchbft(capsys: pytest.CaptureFixture[str]) -> Torchbft:
    def run(*arguments: object) -> Ran:
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return int(code), captured.out, captured.err

    return run


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(bytes(data))


def as_data(ran: Ran) -> Any:
    return json.loads(ran[1])


def test_verify_says_yes_with_counts(torchbft: Torchbft, proven: Path) -> None:
    code, out, err = torchbft("verify", proven)
    assert code == 0
    assert out.startswith("verified: ")
    assert "3 rounds aggregated again" in out
    assert err == ""
    data = as_data(torchbft("verify", proven, "--json"))
    assert data["ledger_verified"] is True
    assert data["problems"] == []
    assert data["checked"]["signed roots"] == 3


@pytest.mark.parametrize("name", ["blocks.log", "votes.log", "statements.log", "payload"])
def test_verify_says_no_with_the_place(torchbft: Torchbft, copied: Path, name: str) -> None:
    folder = copied / "peers" / "peer-a"
    path = next(folder.glob("payloads/0/*")) if name == "payload" else folder / name
    damage(path)
    ran = torchbft("verify", copied, "--json")
    assert ran[0] == 1
    data = as_data(ran)
    assert data["ledger_verified"] is False
    assert any(str(path) in problem["where"] for problem in data["problems"])
    assert f"problem: {path}" in ran[2]
    _, out, err = torchbft("verify", copied)
    assert out.startswith("NOT verified: 1 problem, first in " + str(path))
    assert "signatures" not in out, "what did hold is no part of the verdict"
    assert "what did hold: 3 run file signatures" in err


def test_verify_of_an_edited_run_file(torchbft: Torchbft, copied: Path) -> None:
    path = copied / "run.toml"
    path.write_text(path.read_text().replace("learning_rate = 0.7", "learning_rate = 0.8"))
    code, out, err = torchbft("verify", copied)
    assert code == 1
    assert out == "NOT verified: 1 problem, first in run file 'tiny'\n"
    assert "0 of 3 needed members signed this content" in err


def test_status_warns_of_a_run_file_that_nobody_signed(torchbft: Torchbft, copied: Path) -> None:
    assert "warning" not in torchbft("status", copied)[2]
    assert as_data(torchbft("status", copied, "--json"))["run_file_problem"] == ""
    path = copied / "run.toml"
    path.write_text(path.read_text().replace("learning_rate = 0.7", "learning_rate = 0.8"))
    code, _, err = torchbft("status", copied)
    assert code == 0
    assert err.startswith("warning: run file 'tiny': 0 of 3 needed members signed this content")
    assert "edited" in as_data(torchbft("status", copied, "--json"))["run_file_problem"]


def test_status_warns_of_a_run_file_that_is_another_run_s(torchbft: Torchbft, copied: Path) -> None:
    writer = TraceWriter(copied / "peers" / "peer-a" / "trace.jsonl")
    run = load_run(copied / "run.toml")
    for run_id, warned in ((run.run_id.hex(), False), ("ab" * 32, True)):
        writer.write(RunStarted(
            at=1.0, peer="peer-a", run_id=run_id, name="tiny", members=("peer-a",), validators=4,
            contributors=4, f=1, quorum=3, rule="", codec="", engine="", inner_steps=1,
            batch_size=1, encrypted=True, parameters=1, machine="", versions={},
        ))  # fmt: skip
        assert ("it was changed after they had started" in torchbft("status", copied)[2]) == warned
    writer.close()


def test_a_comment_in_the_run_file_changes_nothing(torchbft: Torchbft, copied: Path) -> None:
    path = copied / "run.toml"
    path.write_text("# a remark of ours\n" + path.read_text().replace(" = ", "  =  "))
    assert torchbft("verify", copied)[0] == 0


def test_report_shows_that_the_log_is_proven(torchbft: Torchbft, copied: Path) -> None:
    code, out, _ = torchbft("report", copied)
    assert code == 0
    page = Path(out.strip()).read_text()
    assert ">proven<" in page
    assert "each block&#x27;s certificate" in page or "each block's certificate" in page
    assert "rounds aggregated again" in page


def test_report_shows_that_the_log_is_not(torchbft: Torchbft, copied: Path) -> None:
    log = copied / "peers" / "peer-a" / "blocks.log"
    damage(log)
    ran = torchbft("report", copied, "--json")
    assert ran[0] == 1, "the page is written, but nobody may take it for a proven one"
    assert f"problem: {log}" in ran[2]
    assert "NOT verified: " in ran[2]
    assert as_data(ran)["ledger_verified"] is False
    page = (copied / "report.html").read_text()
    assert ">FALSE<" in page
    assert "blocks.log" in page


def test_report_without_verification_claims_nothing(torchbft: Torchbft, copied: Path) -> None:
    ran = torchbft("report", copied, "--no-verify", "--json")
    assert as_data(ran)["ledger_verified"] is None
    page = (copied / "report.html").read_text()
    assert ">proven<" not in page
    assert "offline verifier" not in page


def test_report_into_a_folder_that_is_not_there(torchbft: Torchbft, copied: Path) -> None:
    code, _, err = torchbft("report", copied, "--out", copied / "no" / "page.html", "--no-verify")
    assert code == 2
    assert err.startswith("error: ")
    assert "Traceback" not in err


def test_status_of_a_run_without_traces(torchbft: Torchbft, proven: Path) -> None:
    data = as_data(torchbft("status", proven, "--json"))
    assert data["members"] == ["peer-a", "peer-b", "peer-c", "peer-d"]
    assert data["rounds"] == 0
    assert data["total_rounds"] == 3
    assert data["phase"] == "starting"
