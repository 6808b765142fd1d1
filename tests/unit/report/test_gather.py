"""What a run view says is what most traces say, and costs are medians over peers."""

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from torchbft.primitives.errors import ConfigError
from torchbft.primitives.trace import Accused, Refusal, RoundEnded, RunStarted
from torchbft.report.gather import Cell, Follower, RunView, gather, round_cells

NAMES = tuple(f"peer-{letter}" for letter in "abcdefg")
Make = Callable[..., Path]


def lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def append(run_dir: Path, peer: str, *records: object) -> None:
    with (run_dir / "peers" / peer / "trace.jsonl").open("ab") as file:
        for record in records:
            file.write(msgspec.json.encode(record) + b"\n")


def accusation(peer: str, *, named: bool = True) -> Accused:
    return Accused(at=1.0, peer=peer, fault="bad-opening", round=2, named=named, reason="no fit")


def test_matrix_tells_how_each_contribution_ended_and_why(make_run: Make) -> None:
    matrix = gather(make_run(8)).matrix()
    assert list(matrix) == list(NAMES)
    assert {number for row in matrix.values() for number in row} == set(range(8))
    assert all(cell.accepted for cell in matrix["peer-a"].values())
    assert {cell.outcome for cell in matrix["peer-c"].values()} == {"unopened"}
    assert matrix["peer-f"][3].outcome == "malformed"
    assert matrix["peer-f"][3].evidence == "f+1 signed observations"
    assert "not finite" in matrix["peer-f"][3].reason


def test_weight_below_half_an_equal_share_is_down_weighted(make_run: Make) -> None:
    matrix = gather(make_run(2)).matrix()
    assert matrix["peer-f"][0].down_weighted
    assert not matrix["peer-a"][0].down_weighted
    assert matrix["peer-f"][0].relative == pytest.approx(0.02 * 6)


@pytest.mark.parametrize(("weight", "expected"), [(0.1, True), (0.124, True), (0.126, False)])
def test_down_weighted_threshold(weight: float, expected: bool) -> None:
    assert Cell("accepted", weight=weight, equal_share=0.25).down_weighted is expected


def test_cell_without_a_recorded_weight_is_not_judged() -> None:
    assert Cell("accepted").relative is None
    assert not Cell("accepted").down_weighted


def test_void_round_gives_nobody_a_place(make_run: Make) -> None:
    matrix = gather(make_run(3, void=frozenset({1}))).matrix()
    assert matrix["peer-a"][1].outcome == "void"
    assert matrix["peer-a"][1].reason == "4 of 5 contributions"
    assert matrix["peer-c"][1].outcome == "unopened"
    assert not any(row[1].accepted for row in matrix.values())


def test_refused_by_rule_overrides_accepted() -> None:
    ended = RoundEnded(at=0, round=0, void=False, accepted=("a", "b"), weights={"a": 1.0, "b": 0.0})
    refused = Refusal("b", "rejected-by-rule", "norm-outlier", "rule")
    cells = round_cells(msgspec.structs.replace(ended, refusals=(refused,)), ("a", "b"))
    assert cells["b"].outcome == "rejected-by-rule"
    assert cells["b"].relative == 0.0
    assert cells["a"].relative == 2.0


def test_costs_are_medians_over_peers(make_run: Make) -> None:
    costs = gather(make_run(4)).costs()
    assert [cost.round for cost in costs] == [0, 1, 2, 3]
    middle = 1 + 0.05 * 3  # the fourth of seven peers
    assert costs[0].consensus == pytest.approx(0.065 * middle)
    assert costs[0].train == pytest.approx(0.3 * middle)
    assert costs[0].wait == pytest.approx(0.03 * middle)
    assert costs[0].share == pytest.approx(0.065 / 0.395)
    assert costs[0].steps == 20
    assert costs[0].seconds_per_step == pytest.approx(costs[0].consensus / 20)
    assert costs[0].bytes_per_step == pytest.approx((40_000 + 918_000) / 20)


def test_one_lying_trace_changes_no_median_and_no_outcome(make_run: Make) -> None:
    run_dir = make_run(3)
    honest = gather(run_dir)
    trace = run_dir / "peers" / "peer-f" / "trace.jsonl"
    lie = RoundEnded(at=9e9, round=1, void=True, reason="lies", consensus_seconds=1e9)
    trace.write_bytes(msgspec.json.encode(lie) + b"\n")
    lied_to = gather(run_dir)
    assert lied_to.matrix() == honest.matrix()
    assert lied_to.costs()[1].consensus < 1.0


def test_own_trace_of_the_accused_is_not_heard(make_run: Make) -> None:
    run_dir = make_run(2)
    append(run_dir, "peer-a", accusation("peer-a"))
    assert "peer-a" not in {item.peer for item in gather(run_dir).accusations()}


def test_named_needs_more_traces_than_liars(make_run: Make) -> None:
    run_dir = make_run(2)
    append(run_dir, "peer-c", accusation("peer-a"))
    append(run_dir, "peer-f", accusation("peer-a"))
    (found,) = [item for item in gather(run_dir).accusations() if item.peer == "peer-a"]
    assert not found.named, "two liars of f=2 must not name an honest peer"
    append(run_dir, "peer-b", accusation("peer-a"))
    (found,) = [item for item in gather(run_dir).accusations() if item.peer == "peer-a"]
    assert found.named
    assert found.accusers == ("peer-b", "peer-c", "peer-f")


def test_a_lone_folder_is_believed(make_run: Make) -> None:
    run_dir = make_run(2)
    for name in NAMES[1:]:
        (run_dir / "peers" / name / "trace.jsonl").unlink()
        (run_dir / "peers" / name).rmdir()
    named = {item.peer for item in gather(run_dir).accusations() if item.named}
    assert named == {"peer-f"}


def test_accusations_are_grouped(make_run: Make) -> None:
    found = {(a.peer, a.fault): a for a in gather(make_run(2)).accusations()}
    assert found["peer-f", "malformed-payload"].named
    assert not found["peer-c", "unopened"].named
    assert len(found["peer-f", "malformed-payload"].accusers) == 6


def test_follower_reads_only_what_was_appended(make_run: Make) -> None:
    run_dir = make_run(2)
    trace = run_dir / "peers" / "peer-a" / "trace.jsonl"
    whole = lines(trace)
    trace.write_bytes(b"".join(whole[:-3]) + whole[-3][:10])
    follower = Follower(run_dir)
    before = len(follower.refresh().peers["peer-a"].accusations)
    trace.write_bytes(b"".join(whole))
    after = follower.refresh().peers["peer-a"].accusations
    assert len(after) == before + 2, "the torn line is read once it is whole"
    assert len(follower.refresh().peers["peer-a"].accusations) == len(after), "and only once"


def test_garbage_lines_are_left_out(make_run: Make) -> None:
    run_dir = make_run(2)
    with (run_dir / "peers" / "peer-a" / "trace.jsonl").open("ab") as file:
        file.write(b'\xff\xfe{"type":"round"}\n{"type":"nobody"}\n[1,2\n')
    assert gather(run_dir).matrix() == gather(run_dir).matrix()
    assert len(gather(run_dir).peers["peer-a"].rounds) == 2


def test_a_restart_takes_the_end_back(make_run: Make) -> None:
    run_dir = make_run(1)
    started = next(p.started for p in gather(run_dir).peers.values() if p.started)
    append(run_dir, "peer-a", msgspec.structs.replace(started, at=started.at + 20))
    view = gather(run_dir)
    assert view.peers["peer-a"].ended is None
    assert isinstance(view.peers["peer-a"].started, RunStarted)


def test_status_and_demo_are_taken_in_when_they_are_there(make_run: Make) -> None:
    run_dir = make_run(1)
    status = {"at": 5.0, "phase": "commit", "waiting_for": ["peer-b"], "root": "surplus"}
    (run_dir / "peers" / "peer-a" / "status.json").write_bytes(msgspec.json.encode(status))
    (run_dir / "peers" / "peer-b" / "status.json").write_text("{torn")
    (run_dir / "demo.json").write_text('{"liars": ["peer-c"]}')
    view = gather(run_dir)
    assert view.peers["peer-a"].status is not None
    assert view.peers["peer-a"].status.waiting_for == ("peer-b",)
    assert view.peers["peer-b"].status is None
    assert view.demo == {"liars": ["peer-c"]}


def test_a_folder_without_a_run_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run") as caught:
        gather(tmp_path)
    assert caught.value.hint


def test_an_unreadable_run_file_leaves_the_traces_readable(make_run: Make) -> None:
    run_dir = make_run(1)
    (run_dir / "run.toml").write_text("name = 3")
    view = gather(run_dir)
    assert view.spec is None
    assert "run.toml" in view.spec_problem
    assert view.members == NAMES


def test_an_empty_run_has_no_rounds(tmp_path: Path) -> None:
    (tmp_path / "peers" / "peer-a").mkdir(parents=True)
    view = gather(tmp_path)
    assert isinstance(view, RunView)
    assert (view.last_round, view.rounds(), view.costs(), view.end) == (-1, [], [], None)


def test_weights_come_from_a_trace_that_has_them(make_run: Callable[..., Path]) -> None:
    run_dir = make_run()
    view = gather(run_dir)
    number = next(r.round for r in view.rounds() if r.weights)
    first = next(peer for peer in view.peers.values() if number in peer.rounds)
    full = first.rounds[number]
    first.rounds[number] = msgspec.structs.replace(full, weights={})
    agreed = view.agreed(number)
    assert agreed is not None
    assert agreed.weights == full.weights
