"""The host of one peer: real sockets and disks, several peers in one loop, trainers of few lines.

What happens to it here: trainers that come late, die or send rubbish; restarts of one peer and of
all; lost questions for the agreed state; full disks, damaged logs, occupied ports; our own defects.
"""

from __future__ import annotations

import errno
import math
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from node_swarm import LIMIT, LocalSwarm, honest, initial_state, run_swarm, update

from torchbft.node import driver
from torchbft.node.driver import STATE, PeerHost
from torchbft.node.storage.log import AppendLog, read_log
from torchbft.node.supervisor import EXIT_FAILED, EXIT_FINISHED
from torchbft.node.transports import data
from torchbft.primitives import trace
from torchbft.primitives.digests import payload_root
from torchbft.primitives.effects import Broadcast, Effect, Received
from torchbft.primitives.errors import ConfigError, CorruptLogError, StorageError
from torchbft.primitives.ids import PeerId
from torchbft.protocols.ledger import catchup
from torchbft.protocols.peer import ROUND, PeerMachine
from torchbft.protocols.round.roots import read_vote
from torchbft.protocols.round.state import Phase

A, B, C, D = (PeerId(f"peer-{letter}") for letter in "abcd")


def equal_roots(swarm: LocalSwarm) -> bool:
    roots = {swarm.root(name) for name in swarm.names}
    return len(roots) == 1 and roots != {""}


def test_four_peers_train_to_the_same_root(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.finished()
        codes = [await swarm.tasks[name] for name in swarm.names]
        assert codes == [EXIT_FINISHED] * 4

    swarm = LocalSwarm(tmp_path)
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    for name in swarm.names:
        rounds = swarm.rounds(name)
        assert [rounds[r].accepted for r in range(3)] == [tuple(swarm.names)] * 3
        trainee = swarm.trainees[name]
        assert trainee.opened == [0, 1, 2]
        assert [(c.round, c.accepted, c.void) for c in trainee.closed] == [
            (r, True, False) for r in range(3)
        ]
        assert trainee.over is not None
        assert trainee.over.status == "finished"


def test_one_peer_alone_is_a_run(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        swarm.up(A)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path, count=1)
    run_swarm(swarm, story)
    assert len(swarm.rounds(A)) == 3


MALFORMED = (
    update(1.0, size=7),
    update(1.0)[:-3],
    b"",
    update(math.nan),
    update(1.0) * 40,
    b"\xff" * 60,
)
"""Of a wrong shape, truncated, empty, not finite, oversized, and no payload at all."""


def test_a01_a05_malformed_payloads_are_refused_by_name_and_stop_nobody(tmp_path: Path) -> None:
    def payload(name: PeerId, round_: int) -> bytes:
        return MALFORMED[round_ % len(MALFORMED)] if name == D else honest(name, round_)

    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name, payload)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path, rounds=len(MALFORMED))
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    for name in (A, B, C):
        for ended in swarm.rounds(name).values():
            assert "peer-d" not in ended.accepted
        refusals = [r for ended in swarm.rounds(name).values() for r in ended.refusals]
        judged = [r for r in refusals if r.outcome == "malformed"]
        assert {r.peer for r in judged} == {"peer-d"}
        assert {r.evidence for r in judged} == {"f+1 signed observations"}
        named = {r.peer for r in swarm.records(name, trace.Accused) if r.named}
        assert named == {"peer-d"}
    assert not any(closed.accepted for closed in swarm.trainees[D].closed)


def test_a_trainer_that_dies_leaves_a_node_that_votes(tmp_path: Path) -> None:
    def payload(name: PeerId, round_: int) -> bytes:
        if name == D and round_ == 1:
            swarm.trainees[D].endpoint.socket.shutdown(socket.SHUT_RDWR)
        return honest(name, round_)

    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name, payload)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path)
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    assert "the trainer of this peer is gone" in swarm.notices(D)
    assert swarm.rounds(A)[2].accepted == ("peer-a", "peer-b", "peer-c")


def test_c08_a_restarted_peer_resumes_and_its_trainer_gets_the_round_at_once(
    tmp_path: Path,
) -> None:
    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(lambda: 1 in swarm.rounds(B))
        before = swarm.trainees[B]
        await swarm.down(B)
        swarm.up(B)
        await swarm.finished()
        assert before.opened[-1] <= swarm.trainees[B].opened[0] + 1

    swarm = LocalSwarm(tmp_path, rounds=8)
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    assert swarm.trainees[B].opened, "the restarted trainer was given no round"


def test_c10_all_peers_stop_at_once_and_resume_to_the_same_root(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(lambda: all(1 in swarm.rounds(name) for name in swarm.names))
        await swarm.close()
        for name in swarm.names:
            swarm.up(name)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path, rounds=6)
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    ended = {r: e for name in swarm.names for r, e in swarm.rounds(name).items()}
    assert sorted(ended) == list(range(6))
    trained = [swarm.trainees[name].opened for name in swarm.names]
    assert all(trained), "after a restart of all, somebody was given nothing to train"


class VotesOneRoot:
    """A peer's machine that after round 0 neither sends nor hears root votes, as a silent liar."""

    def __init__(self, *arguments: Any) -> None:
        self._machine = PeerMachine(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._machine, name)

    def start(self, now: float) -> list[Effect]:
        return [e for e in self._machine.start(now) if not _is_late_vote(e)]

    def handle(self, event: object, now: float) -> list[Effect]:
        if _is_late_vote(event):
            return []
        return [e for e in self._machine.handle(event, now) if not _is_late_vote(e)]


def _is_late_vote(what: object) -> bool:
    if not isinstance(what, Broadcast | Received) or what.message[:1] != ROUND:
        return False
    vote = read_vote(what.message[1:])
    return vote is not None and vote.statement.round > 0


def test_a_peer_that_is_needed_and_behind_asks_until_it_gets_the_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quorum of roots needs the one that is behind, and its questions for the agreed state are
    lost: if it asked once, all would wait for ever."""
    monkeypatch.setattr(driver, "RETRY_SECONDS", 0.2)
    lost = []

    async def story(swarm: LocalSwarm) -> None:
        for name in (A, B, D):
            swarm.up(name, build=VotesOneRoot if name == D else PeerMachine)
        await swarm.until(lambda: 0 in swarm.rounds(A) and swarm.hosts[A]._current_round() == 2)
        host = swarm.up(C)
        await swarm.until(lambda: hasattr(host, "_control"))
        send = host._control.send

        def lossy(to: PeerId, message: bytes) -> None:
            if message[:1] == STATE and len(lost) < 9:
                lost.append(to)
            else:
                send(to, message)

        monkeypatch.setattr(host._control, "send", lossy)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path)
    run_swarm(swarm, story)
    assert len(lost) == 9
    assert equal_roots(swarm)
    assert "copying the agreed state" in swarm.notices(C)
    assert 1 in swarm.rounds(A)


def test_a_peer_that_lacks_the_last_state_does_not_call_itself_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story(swarm: LocalSwarm) -> None:
        driver.LINGER_SECONDS = LIMIT
        monkeypatch.setattr(driver, "RETRY_SECONDS", 0.2)
        for name in (A, B, D):
            swarm.up(name)
        await swarm.finished(A, B, D)
        host = swarm.up(C)
        await swarm.until(lambda: hasattr(host, "_control"))
        send, held = host._control.send, []

        def holding(to: PeerId, message: bytes) -> None:
            if message[:1] == STATE and released is False:
                held.append(to)
            else:
                send(to, message)

        released = False
        monkeypatch.setattr(host._control, "send", holding)
        await swarm.until(lambda: len(held) > 3)
        assert host._machine.application.state.phase == Phase.FINISHED
        host._chronicle.show(force=True)
        assert swarm.phase(C) != "finished"
        released = True
        await swarm.finished()

    swarm = LocalSwarm(tmp_path)
    run_swarm(swarm, story)
    assert equal_roots(swarm)


def test_blocks_that_left_the_memory_are_served_from_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(catchup, "HISTORY_BYTES", 1)

    async def story(swarm: LocalSwarm) -> None:
        driver.LINGER_SECONDS = LIMIT
        for name in (A, B, D):
            swarm.up(name)
        await swarm.finished(A, B, D)
        swarm.up(C)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path)
    run_swarm(swarm, story)
    assert equal_roots(swarm)


def test_a_state_that_was_damaged_on_the_disk_is_copied_from_the_others(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(lambda: 2 in swarm.rounds(C))
        await swarm.down(C)
        for path in [*(tmp_path / C / "checkpoints").iterdir(), tmp_path / C / "start.safetensors"]:
            path.write_bytes(path.read_bytes()[:50])
        swarm.up(C)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path, rounds=8)
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    assert "passed over a saved state" in swarm.notices(C)


# --- bad input ------------------------------------------------------------------------------------


def test_an_occupied_port_names_its_holder_to_the_trainer_and_leaves_nothing_running(
    tmp_path: Path,
) -> None:
    async def story(swarm: LocalSwarm) -> None:
        with socket.create_server(("127.0.0.1", swarm.run.member(A).port)):
            host = swarm.up(A)
            with pytest.raises(ConfigError, match=f"in use by process {os.getpid()}") as refused:
                await swarm.tasks.pop(A)
        assert "--listen" in refused.value.hint
        assert not hasattr(host, "_trainer")
        swarm.up(A)
        await swarm.finished()

    run_swarm(LocalSwarm(tmp_path, count=1), story)


def test_a_folder_that_another_process_uses_is_left_alone(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        swarm.up(A)
        await swarm.until(lambda: swarm.phase(A) != "")
        second = swarm.tasks[A]
        swarm.up(A)
        with pytest.raises(StorageError, match="in use by process"):
            await swarm.tasks[A]
        swarm.tasks[A] = second

    run_swarm(LocalSwarm(tmp_path), story)


def test_c28_a_torn_last_record_is_dropped_with_a_line_and_the_peer_goes_on(
    tmp_path: Path,
) -> None:
    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(lambda: 1 in swarm.rounds(C))
        await swarm.down(C)
        for log in driver.LOGS:
            with (tmp_path / C / f"{log}.log").open("ab") as file:
                file.write(b"\x00\x00\x01")
        swarm.up(C)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path, rounds=5)
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    for log in driver.LOGS:
        assert f"{log}.log: dropped a torn last record" in swarm.notices(C)


@pytest.mark.parametrize(
    ("log", "where"), [("votes", "last"), ("blocks", "middle"), ("statements", "last")]
)
def test_c28_a_damaged_record_is_refused_with_its_offset_and_the_others_go_on(
    tmp_path: Path, log: str, where: str
) -> None:
    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(lambda: 1 in swarm.rounds(C))
        await swarm.down(C)
        path = tmp_path / C / f"{log}.log"
        whole = path.read_bytes()
        place = 60 if where == "middle" else len(whole) - 40
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
        swarm.up(C)
        with pytest.raises(CorruptLogError, match=r"damaged at byte \d+") as refused:
            await swarm.tasks.pop(C)
        assert str(path) in str(refused.value)
        assert 0 < refused.value.offset <= place
        assert path.stat().st_size == len(whole), "nothing was repaired or cut"
        await swarm.finished(A, B, D)

    swarm = LocalSwarm(tmp_path, rounds=4)
    run_swarm(swarm, story)
    assert len({swarm.root(name) for name in (A, B, D)}) == 1


@pytest.mark.parametrize("where", ["log", "payload", "checkpoint"])
def test_a_full_disk_stops_its_peer_with_one_line_and_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    full = OSError(errno.ENOSPC, "No space left on device")

    def refuse(host: PeerHost) -> None:
        def fails(*_: object, **__: object) -> Any:
            raise StorageError("writing failed: the disk is full", where="here", hint="free space")

        if where == "log":
            monkeypatch.setattr(host._logs["votes"], "append", fails)
        elif where == "payload":
            monkeypatch.setattr(host._payloads, "put", fails)
        else:
            monkeypatch.setattr(host._keeper._checkpoints, "save", fails)

        def trace_fails(*_: object) -> None:
            raise full

        monkeypatch.setattr(host._chronicle._writer, "write", trace_fails)

    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(lambda: 0 in swarm.rounds(C))
        refuse(swarm.hosts[C])
        assert await swarm.tasks.pop(C) == EXIT_FAILED
        await swarm.finished(A, B, D)

    swarm = LocalSwarm(tmp_path, rounds=4)
    run_swarm(swarm, story)
    assert len({swarm.root(name) for name in (A, B, D)}) == 1
    over = swarm.trainees[C].over
    assert over is not None
    assert (over.status, over.reason) == (
        "halted",
        "here: writing failed: the disk is full; free space",
    )


def test_what_was_durable_before_the_disk_was_full_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise StorageError("the disk is full")

    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(lambda: 1 in swarm.rounds(C))
        with monkeypatch.context() as patch:
            patch.setattr(swarm.hosts[C]._logs["statements"], "append", fails)
            assert await swarm.tasks.pop(C) == EXIT_FAILED
        records = {log: list(read_log(tmp_path / C / f"{log}.log")) for log in driver.LOGS}
        assert all(records.values())
        swarm.up(C)
        await swarm.finished()

    swarm = LocalSwarm(tmp_path, rounds=6)
    run_swarm(swarm, story)
    assert equal_roots(swarm)


@pytest.mark.parametrize("place", ["machine", "work", "result"])
def test_a_defect_of_ours_ends_the_node_and_never_leaves_it_deaf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def broken(*_: object) -> Any:
        raise ZeroDivisionError("a defect")

    async def story(swarm: LocalSwarm) -> None:
        host = swarm.up(A)
        await swarm.until(lambda: 0 in swarm.rounds(A))
        target = {
            "machine": (host._machine, "handle"),
            "work": (host._keeper, "inspect"),
            "result": (host._chronicle, "contributed"),
        }[place]
        monkeypatch.setattr(*target, broken)
        if place == "work":
            host._inspected.clear()
            host._in_thread(lambda: host._keeper.inspect(bytes(32)), lambda _: None)
        assert await swarm.tasks.pop(A) == EXIT_FAILED

    run_swarm(LocalSwarm(tmp_path, count=1, rounds=50), story)


def test_old_rounds_are_pushed_to_nobody(tmp_path: Path) -> None:
    """A member that never comes would otherwise cost one waiting task for each round."""

    async def story(swarm: LocalSwarm) -> None:
        for name in (A, B, C):
            swarm.up(name)
        await swarm.until(lambda: 7 in swarm.rounds(A))
        waiting = {label.round for label, _ in swarm.hosts[A]._data._pushes}
        assert len(waiting) <= 4
        await swarm.finished(A, B, C)

    swarm = LocalSwarm(tmp_path, rounds=10)
    run_swarm(swarm, story)


def test_the_same_bytes_in_each_round_are_kept_as_long_as_a_round_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old payloads are let go of; one that a later round opens again is not old, even if nobody
    pushed it again. Their files stay, so the run can be verified."""
    monkeypatch.setattr(data, "ROUNDS_SERVED", 1)
    push = data.DataPlane.push

    def once(plane: Any, root: bytes, to: Any, label: Any) -> None:
        if label[0] == 0:
            push(plane, root, to, label)

    monkeypatch.setattr(data.DataPlane, "push", once)

    async def story(swarm: LocalSwarm) -> None:
        hosts = [
            swarm.up(name, lambda name, r: update(1.0) if name in (A, B) else honest(name, r))
            for name in swarm.names
        ]
        await swarm.finished()
        for host in hosts:
            held = host._payloads.roots()
            assert payload_root(update(1.0)) in held
            assert min(held.values()) >= 2, "what was given in early rounds only is released"
            assert len(list((tmp_path / A / "payloads").glob("[0-9]*/*"))) == 2 * 5 + 1

    swarm = LocalSwarm(tmp_path, rounds=5)
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    for name in swarm.names:
        assert [swarm.rounds(name)[r].accepted for r in range(5)] == [tuple(swarm.names)] * 5


def test_who_was_never_connected_is_told_so_and_the_trace_has_the_model_s_size(
    tmp_path: Path,
) -> None:
    async def story(swarm: LocalSwarm) -> None:
        for name in (A, B, C):
            swarm.up(name)
        await swarm.finished(A, B, C)

    swarm = LocalSwarm(tmp_path, rounds=1)
    run_swarm(swarm, story)
    (accused,) = swarm.records(A, trace.Accused)
    assert (accused.peer, accused.named, accused.reason) == ("peer-d", False, trace.NOT_CONNECTED)
    told = [record.parameters for record in swarm.records(A, trace.RunStarted)]
    assert told == [0, initial_state().layout.parameter_count]


def test_verdicts_on_payloads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "MAX_INSPECTED", 3)

    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.finished()
        assert len(swarm.hosts[A]._inspected) <= 3

    swarm = LocalSwarm(tmp_path, rounds=5)
    run_swarm(swarm, story)
    assert equal_roots(swarm)
    assert [len(swarm.rounds(A)[r].accepted) for r in range(5)] == [4] * 5


def test_c11_a_peer_that_waits_says_for_whom(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        swarm.up(A)
        await swarm.until(lambda: "waiting for 2 more of quorum 3" in swarm.notices(A))

    swarm = LocalSwarm(tmp_path)
    run_swarm(swarm, story)
    notice = next(r for r in swarm.records(A, trace.Notice) if "waiting for" in r.text)
    assert notice.waiting_for == ("peer-b", "peer-c", "peer-d")
    assert "not connected: peer-b, peer-c, peer-d" in notice.text
    assert "or are done with the run" in notice.text, (
        "who comes after the end must not wait unknowing"
    )
    assert swarm.status(A)["waiting_for"] == ["peer-b", "peer-c", "peer-d"]


def test_effects_are_carried_out_in_order_and_durable_before_they_are_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Persist, then send: what a peer signed is on its disk before anybody can hold it."""
    order: list[str] = []
    append, sync = AppendLog.append, AppendLog.sync

    def appended(log: AppendLog, record: bytes) -> None:
        order.append("append")
        append(log, record)

    def synced(log: AppendLog) -> None:
        order.append("sync")
        sync(log)

    async def story(swarm: LocalSwarm) -> None:
        monkeypatch.setattr(AppendLog, "append", appended)
        monkeypatch.setattr(AppendLog, "sync", synced)
        host = swarm.up(A, build=PeerMachine)
        await swarm.until(lambda: hasattr(host, "_control"))
        for call in ("send", "broadcast"):
            monkeypatch.setattr(host._control, call, lambda *_: order.append("send"))
        await swarm.finished()

    run_swarm(LocalSwarm(tmp_path, count=1), story)
    assert "send" in order
    pending = False
    for step in order:
        pending = step == "append" or (pending and step != "sync")
        assert not (pending and step == "send")
