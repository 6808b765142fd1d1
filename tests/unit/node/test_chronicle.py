"""What a node writes for people: phases, refusals, the status file; and what a full disk costs."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from torchbft.node.chronicle import MARKS, ROUNDS_KEPT, Chronicle
from torchbft.node.transports.metering import Meter
from torchbft.primitives import trace
from torchbft.primitives.evidence import Outcome
from torchbft.primitives.ids import Height, PeerId, Round
from torchbft.protocols.peer import BlockDone
from torchbft.protocols.round.events import (
    CommitmentsClosed,
    MemberOutcome,
    OpeningsClosed,
    RoundFixed,
    RoundVoid,
)
from torchbft.protocols.round.state import Accepted
from torchbft.tensors.advance import Advanced

A, B, C = (PeerId(f"peer-{letter}") for letter in "abc")


@pytest.fixture
def chronicle(tmp_path: Path) -> Iterator[Chronicle]:
    made = Chronicle(tmp_path, "peer-a", Meter())
    yield made
    made.close()


def records(folder: Path, kind: type[Any]) -> list[Any]:
    return [r for r in trace.read_trace(folder / "trace.jsonl") if isinstance(r, kind)]


def status(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "status.json").read_bytes()))


def item(author: PeerId) -> Accepted:
    return Accepted(author, bytes(32), 8, bytes(32))


def block(*events: object, height: int = 1, txs: int = 3) -> BlockDone:
    return BlockDone(Height(height), 0, txs, 900, 0.25, events)


def fixed(round_: int) -> RoundFixed:
    outcomes = (
        MemberOutcome(A, Outcome.ACCEPTED, "", ""),
        MemberOutcome(B, Outcome.ACCEPTED, "", ""),
        MemberOutcome(C, Outcome.UNOPENED, "no-opening", ""),
    )
    return RoundFixed(Round(round_), (item(A), item(B)), outcomes)


def lived(chronicle: Chronicle, round_: int = 0) -> None:
    """A round with each moment one second after the one before, evaluation included."""
    chronicle.mark(round_, "start", 100.0)
    chronicle.evaluated(round_ - 1, 0.5, 0.9, 0.4, 0.25)
    chronicle.mark(round_, "trained", 101.0)
    chronicle.contributed(round_, 4096, 0.5)
    chronicle.block(block(CommitmentsClosed(Round(round_), (A, B, C))), round_, 102.0, 103.0)
    chronicle.block(block(OpeningsClosed(Round(round_), (item(A),))), round_, None, 104.0)
    chronicle.block(block(fixed(round_)), round_, None, 105.0)
    chronicle.block(block(txs=0), round_, None, 105.5)  # CometBFT proves each new hash by one
    chronicle.mark(round_, "fetch", 106.0)
    chronicle.mark(round_, "aggregate", 107.0)
    chronicle.aggregated(round_, Advanced({A: 0.75, B: 0.25}, (), {A: 1.0, B: 1.0}))
    chronicle.mark(round_, "root", 108.0)
    chronicle.round_ended(round_, 108.0, root=b"\x11" * 32)


def test_the_phases_of_a_round_add_up_and_evaluation_is_no_part_of_training(
    chronicle: Chronicle, tmp_path: Path
) -> None:
    lived(chronicle)
    phases = {r.name: r.seconds for r in records(tmp_path, trace.Phase)}
    assert phases == {
        "train": 0.5, "encode": 0.25, "wait": 1.0, "commit": 1.0, "reveal": 1.0, "decide": 1.0,
        "fetch": 1.0, "aggregate": 1.0, "root": 1.0,
    }  # fmt: skip
    (ended,) = records(tmp_path, trace.RoundEnded)
    assert (ended.train_seconds, ended.consensus_seconds) == (0.5, 6.25)
    assert (ended.blocks, ended.payload_bytes, ended.root) == (3, 4096, "11" * 32)
    assert ended.accepted == ("peer-a", "peer-b")
    assert ended.weights == {"peer-a": 0.75, "peer-b": 0.25}
    assert not ended.void


def test_moments_that_never_came_or_came_in_another_order_cost_no_negative_time(
    chronicle: Chronicle, tmp_path: Path
) -> None:
    times = dict(zip(MARKS, (5.0, 9.0, 4.0, 8.0, 8.5), strict=False))
    for moment, at in times.items():
        chronicle.mark(0, moment, at)
    chronicle.mark(0, "start", 1.0)  # only the first time counts
    chronicle.round_ended(0, 10.0, void="too few")
    phases = {r.name: r.seconds for r in records(tmp_path, trace.Phase)}
    assert phases == {"train": 0.0, "encode": 4.0, "wait": 0.0, "commit": 0.0, "reveal": 0.0}


@pytest.mark.parametrize("lacking", ["start", "commit", "reveal", "decide", "fetch", "root"])
def test_a_round_that_was_not_lived_through_is_not_measured(
    chronicle: Chronicle, tmp_path: Path, lacking: str
) -> None:
    """After a restart, or with a copied state: no time at all, which is another thing than 0 s."""
    for at, moment in enumerate(moment for moment in MARKS if moment != lacking):
        chronicle.mark(0, moment, float(at))
    chronicle.round_ended(0, 10.0, root=bytes(32))
    (ended,) = records(tmp_path, trace.RoundEnded)
    assert ended.consensus_seconds is None
    assert ended.train_seconds is None
    assert records(tmp_path, trace.Phase) == []


@pytest.mark.parametrize("lacking", ["trained", "heard", "aggregate"])
def test_who_does_not_train_measures_agreement_all_the_same(
    chronicle: Chronicle, tmp_path: Path, lacking: str
) -> None:
    for at, moment in enumerate(MARKS):
        if moment != lacking:
            chronicle.mark(0, moment, float(at))
    chronicle.round_ended(0, 10.0, root=bytes(32))
    (ended,) = records(tmp_path, trace.RoundEnded)
    assert ended.consensus_seconds is not None
    assert (ended.train_seconds is None) == (lacking == "trained")


def test_a_void_round_accepts_nobody_and_names_its_reason(
    chronicle: Chronicle, tmp_path: Path
) -> None:
    absent = MemberOutcome(B, Outcome.ABSENT, "no-commitment", "")
    chronicle.block(block(RoundVoid(Round(4), "1 of 3 contributions", (absent,))), 4, None, 1.0)
    chronicle.round_ended(4, 2.0, void="1 of 3 contributions")
    (ended,) = records(tmp_path, trace.RoundEnded)
    assert (ended.void, ended.reason, ended.accepted) == (True, "1 of 3 contributions", ())
    assert [(r.peer, r.reason) for r in ended.refusals] == [("peer-b", "no-commitment")]
    assert chronicle.outcome(4, "peer-b") == (False, "no-commitment")


def test_c07_every_refusal_stands_in_the_record_with_reason_and_kind_of_proof(
    chronicle: Chronicle, tmp_path: Path
) -> None:
    lie = MemberOutcome(C, Outcome.MALFORMED, "non-finite", "f+1 signed observations")
    event = RoundFixed(Round(0), (item(A), item(B)), (lie,))
    chronicle.block(block(event), 0, None, 1.0)
    chronicle.aggregated(0, Advanced({A: 1.0, B: 0.0}, (B,), {A: 1.0, B: 99.0}))
    chronicle.round_ended(0, 2.0, root=bytes(32))
    (ended,) = records(tmp_path, trace.RoundEnded)
    assert [(r.peer, r.outcome, r.reason, r.evidence) for r in ended.refusals] == [
        ("peer-c", "malformed", "non-finite", "f+1 signed observations"),
        ("peer-b", "rejected-by-rule", "norm-outlier", "rule"),
    ]


def test_a_round_is_told_once(chronicle: Chronicle, tmp_path: Path) -> None:
    lived(chronicle)
    chronicle.round_ended(0, 999.0, root=b"\x22" * 32)
    assert len(records(tmp_path, trace.RoundEnded)) == 1


def test_a_round_is_told_once_over_restarts_and_never_without_those_who_counted(
    chronicle: Chronicle, tmp_path: Path
) -> None:
    lived(chronicle)
    again = Chronicle(tmp_path, "peer-a", Meter())
    again.round_ended(0, 5.0, root=bytes(32))
    again.decided(1, ["peer-a", "peer-b"])  # fixed before the restart, signed after it
    again.round_ended(1, 6.0, root=bytes(32))
    again.close()
    told = records(tmp_path, trace.RoundEnded)
    assert [(r.round, r.accepted) for r in told] == [(n, ("peer-a", "peer-b")) for n in (0, 1)]


def test_outcomes_are_known_for_the_trainer(chronicle: Chronicle) -> None:
    lived(chronicle)
    assert chronicle.outcome(0, "peer-a") == (True, "")
    assert chronicle.outcome(0, "peer-c") == (False, "no-opening")
    assert chronicle.outcome(0, "peer-z") == (False, "")


def test_a_trainer_that_comes_many_rounds_late_is_answered(chronicle: Chronicle) -> None:
    for number in range(20, 30):
        chronicle.mark(number, "start", float(number))
    chronicle.mark(3, "trained", 30.0)
    chronicle.contributed(3, 17, 0.0)
    assert chronicle.outcome(3, "peer-a") == (False, "")
    assert sorted(chronicle._accounts) == [26, 27, 28, 29]


def test_accounts_do_not_grow_with_the_run(chronicle: Chronicle) -> None:
    for number in range(200):
        lived(chronicle, number)
    assert len(chronicle._accounts) == ROUNDS_KEPT


def test_blocks_notices_and_evaluations_are_written(chronicle: Chronicle, tmp_path: Path) -> None:
    chronicle.block(block(height=9), 0, None, 1.0)
    chronicle.notice("waiting for 2 more of quorum 3: peer-b, peer-c", ("peer-b", "peer-c"))
    chronicle.evaluated(2, 0.125, None, 0.25, 1.0)
    (done,) = records(tmp_path, trace.BlockFinalized)
    assert (done.height, done.txs, done.bytes, done.seconds) == (9, 3, 900, 0.25)
    (notice,) = records(tmp_path, trace.Notice)
    assert notice.waiting_for == ("peer-b", "peer-c")
    (found,) = records(tmp_path, trace.Evaluated)
    assert (found.round, found.loss, found.accuracy, found.train_loss) == (2, 0.125, None, 0.25)
    assert chronicle.height == 9


def test_the_status_file_is_whole_replaced_not_too_often_and_at_once_when_it_matters(
    chronicle: Chronicle, tmp_path: Path
) -> None:
    chronicle.show(force=True, phase="commit", round=3)
    first = status(tmp_path)
    assert (first["peer"], first["phase"], first["round"]) == ("peer-a", "commit", 3)
    chronicle.show(phase="open")
    assert status(tmp_path) == first, "within a moment it is not written again"
    chronicle.show(force=True, waiting_for=("peer-b",))
    now = status(tmp_path)
    assert (now["phase"], now["waiting_for"]) == ("open", ["peer-b"])
    assert not (tmp_path / "status.part").exists()


def test_a_disk_that_refuses_costs_a_record_and_never_the_node(
    chronicle: Chronicle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    chronicle.show(force=True, phase="commit")
    before = status(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(trace.TraceWriter, "write", full)
        patch.setattr(Path, "write_bytes", full)
        patch.setattr("builtins.print", full)
        chronicle.notice("nobody can read this")
        chronicle.show(force=True, phase="open")
        lived(chronicle)
    assert status(tmp_path) == before
    chronicle.notice("there is space again")
    assert [r.text for r in records(tmp_path, trace.Notice)] == ["there is space again"]
