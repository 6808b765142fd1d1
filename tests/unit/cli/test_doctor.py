"""doctor finds what would keep a member from taking part, names it, and says what to do."""

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

import torchbft.cli.doctor as doctor
from torchbft.cli.doctor import clock, examine, reachability
from torchbft.node.launch import Keys
from torchbft.node.ordering import binary
from torchbft.node.ordering.genesis import chain_id
from torchbft.node.ordering.home import FOLDER, Home
from torchbft.node.ordering.signstate import SignState, state_path
from torchbft.node.storage.lock import FolderLock
from torchbft.node.storage.log import AppendLog
from torchbft.node.transports import clock as clocks
from torchbft.node.transports.clock import Reading
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import (
    Ledger,
    Member,
    connection_key,
    dump_run,
    load_run,
    new_member,
)

Torchbft = Callable[..., Any]


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def run_file(torchbft: Torchbft, tmp_path: Path, free_port: int) -> Path:
    """A run of one, whose port is free."""
    file = tmp_path / "run.toml"
    assert torchbft("init", file, "--name", "a", "--port", free_port).code == 0
    return file


def states(file: Path, **options: str) -> dict[str, str]:
    return {finding.check: finding.state for finding in examine(file, **options)}


def finding(file: Path, check: str, **options: str) -> doctor.Finding:
    return next(f for f in examine(file, **options) if f.check == check)


def edit(file: Path, **fields: object) -> None:
    """Change the run file and let its only member sign it again."""
    from torchbft.primitives.keys import load_key

    run = msgspec.structs.replace(load_run(file), signatures=(), **fields)
    key = load_key(file.parent / "peers" / "a" / "identity.key")
    file.write_text(dump_run(run.signed("a", key)))


def test_a_healthy_member_passes(torchbft: Torchbft, run_file: Path, free_port: int) -> None:
    ran = torchbft("doctor", run_file, "--json")
    assert ran.code == 0, ran.out
    assert ran.data["ok"] is True
    found = {item["check"]: item["state"] for item in ran.data["findings"]}
    expected = {"run file", "signatures", "rule", "keys", f"port {free_port}", "clock", "versions"}
    assert expected <= set(found)
    assert set(found.values()) == {"ok"}


def test_words_for_people(torchbft: Torchbft, run_file: Path) -> None:
    out = torchbft("doctor", run_file).out
    assert "ok    run file: 'run', id " in out
    assert "GiB free" in out


def test_an_edited_run_file_fails(torchbft: Torchbft, run_file: Path) -> None:
    run_file.write_text(run_file.read_text().replace("rounds = 40", "rounds = 400"))
    ran = torchbft("doctor", run_file)
    assert ran.code == 1
    assert "fail  signatures: run file 'run': 0 of 1 needed members signed this content" in ran.out
    assert "hint: it was edited after signing" in ran.out


@pytest.mark.parametrize("content", ["", "name = 1", "[[["])
def test_an_unreadable_run_file_still_examines_the_machine(run_file: Path, content: str) -> None:
    run_file.write_text(content)
    found = states(run_file)
    assert found["run file"] == "fail"
    assert found["versions"] == "ok"


def test_a_member_that_is_not_in_the_roster_fails(run_file: Path) -> None:
    found = finding(run_file, "roster", name="b")
    assert found.state == "fail"
    assert "'b' is not in the roster" in found.detail
    assert "torchbft request" in found.hint


def test_keys_open_to_others_fail(run_file: Path) -> None:
    key = run_file.parent / "peers" / "a" / "secret.key"
    key.chmod(0o640)
    found = finding(run_file, "keys")
    assert found.state == "fail"
    assert "secret.key: the key file is open to other users" in found.detail
    assert "chmod 600" in found.hint


def test_another_voting_key_than_the_admitted_one_fails(torchbft: Torchbft, run_file: Path) -> None:
    (run_file.parent / "peers" / "a" / "voting.key").unlink()
    torchbft("init", run_file, "--name", "a")
    found = finding(run_file, "keys")
    assert found.state == "fail"
    assert "voting key of 'a' is not the one in the roster" in found.detail


def test_an_occupied_port_fails(run_file: Path, free_port: int) -> None:
    with socket.create_server(("", free_port)):
        found = finding(run_file, f"port {free_port}")
    assert found.state == "fail"
    assert f"the port is in use by process {os.getpid()}" in found.detail
    assert "be admitted with another port" in found.hint


def test_a_port_held_by_ones_own_running_node_is_fine(run_file: Path, free_port: int) -> None:
    with socket.create_server(("", free_port)):
        with FolderLock(run_file.parent / "peers" / "a"):
            assert finding(run_file, f"port {free_port}").state == "ok"
        assert finding(run_file, f"port {free_port}").state == "fail"


def member(name: str, host: str, port: int) -> Member:
    return Member(
        name=name, identity="00" * 32, voting="11" * 32, voting_certificate="22" * 64,
        host=host, port=port,
    )  # fmt: skip


def test_reachability_tells_listening_from_refused_and_unknown(free_port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        found = reachability((
            member("up", "127.0.0.1", port),
            member("down", "127.0.0.1", free_port),
            member("lost", "no-such-host.invalid", 7700),
        ))  # fmt: skip
    assert [f.state for f in found] == ["ok", "warn", "fail"]
    assert "not started, or done" in found[1].detail
    assert "is unknown" in found[2].detail
    assert reachability(()) == []


def test_a_port_that_does_not_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def silent(place: object, timeout: float) -> None:
        raise TimeoutError

    monkeypatch.setattr(socket, "create_connection", silent)
    (found,) = reachability((member("far", "192.0.2.1", 7700),))
    assert found.state == "fail"
    assert "192.0.2.1:7700: no answer within 2 s" in found.detail
    assert "firewall" in found.hint


def test_unstarted_others_are_only_a_warning(torchbft: Torchbft, tmp_path: Path) -> None:
    """A doctor before the first start must be able to say yes."""
    found = reachability((member("down", "127.0.0.1", 9),))
    assert found[0].state == "warn"


def test_a_clock_an_hour_behind_the_runs_files_fails(run_file: Path) -> None:
    found = clock(run_file.parent, time.time() - 3600)
    assert found.state == "fail"
    assert "3600 s behind" in found.detail or "3599 s behind" in found.detail
    assert clock(run_file.parent, time.time()).state == "ok"


def test_a_clock_behind_another_members_trace_fails(run_file: Path) -> None:
    from torchbft.primitives.trace import Notice, TraceWriter

    writer = TraceWriter(run_file.parent / "peers" / "a" / "trace.jsonl")
    writer.write(Notice(at=time.time() + 7200, text="from a member whose clock is right"))
    writer.close()
    assert clock(run_file.parent, time.time()).state == "fail"


# --- a run on CometBFT ----------------------------------------------------------------------------


@pytest.fixture
def engine_port(free_port: int) -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


@pytest.fixture
def engine_file(run_file: Path, monkeypatch: pytest.MonkeyPatch, engine_port: int) -> Path:
    """The same run, ordered by a CometBFT that is there."""
    monkeypatch.setattr(binary, "check_version", lambda path: None)
    monkeypatch.setenv(binary.VARIABLE, "/opt/cometbft")
    member = msgspec.structs.replace(load_run(run_file).members[0], ledger_port=engine_port)
    edit(run_file, members=(member,), ledger=Ledger(kind="cometbft"))
    return run_file


def test_a_run_on_cometbft_is_looked_at_too(engine_file: Path, engine_port: int) -> None:
    found = finding(engine_file, "CometBFT")
    assert (found.state, found.detail) == ("ok", "v0.40.0 at /opt/cometbft")
    assert states(engine_file)[f"port {engine_port}"] == "ok"
    with socket.create_server(("127.0.0.1", engine_port)):
        assert states(engine_file)[f"port {engine_port}"] == "fail"


def test_a_missing_cometbft_fails_with_what_to_run(
    engine_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv(binary.VARIABLE)
    monkeypatch.setattr(binary, "TOOLS", tmp_path)
    monkeypatch.setenv("PATH", "")
    found = finding(engine_file, "CometBFT")
    assert found.state == "fail"
    assert "make cometbft" in found.hint


def test_a_lost_signing_state_and_another_genesis_fail(engine_file: Path) -> None:
    run = load_run(engine_file)
    folder = engine_file.parent / "peers" / "a"
    keys = Keys.load(folder)
    home = Home(folder / FOLDER)
    assert "genesis" not in states(engine_file), "nothing was started yet"
    home.prepare(run, connection_key(keys.identity), {})
    assert states(engine_file)["genesis"] == "ok"
    lost = finding(engine_file, "signing state")
    assert (lost.state, "rotate" in lost.hint) == ("fail", True)
    state = state_path(home.folder, keys.voting.public)
    SignState.create(state, keys.voting.public, chain_id(run), height=7)
    assert finding(engine_file, "signing state").detail == "up to height 7"
    with FolderLock(folder):
        assert "signing state" not in states(engine_file), "its own node holds it"
    (home.config / "genesis.json").write_text("{}")
    assert states(engine_file)["genesis"] == "fail"


def test_engines_of_the_others_are_dialled(free_port: int, engine_port: int) -> None:
    keys = SigningKey.generate(), SigningKey.generate()
    other = new_member("b", *keys, host="127.0.0.1", port=free_port, ledger_port=engine_port)
    with socket.create_server(("127.0.0.1", engine_port)):
        found = {f.check: f.state for f in reachability((other,), "cometbft")}
    assert found == {"reach b": "warn", "reach b's CometBFT": "ok"}


@pytest.mark.parametrize(("kind", "state"), [("embedded", "warn"), ("cometbft", "fail")])
def test_a_clock_that_the_others_call_wrong_fails_where_blocks_carry_time(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, kind: Any, state: str
) -> None:
    edit(run_file, ledger=Ledger(kind=kind))
    other = load_run(run_file).members[0]

    async def readings(*_: object) -> list[Reading]:
        return [Reading(other, 61.0, 0.0)]

    assert states(run_file)["clock of others"] == "ok"
    monkeypatch.setattr(clocks, "readings", readings)
    found = finding(run_file, "clock of others")
    assert found.state == state
    assert "61 s behind" in found.detail


def test_a_rule_that_does_not_fit_fails_and_lists_those_that_do(run_file: Path) -> None:
    from torchbft.primitives.runspec import Aggregation

    edit(run_file, aggregation=Aggregation(rule="bulyan"))
    found = finding(run_file, "rule")
    assert found.state == "fail"
    assert found.hint


def test_a_full_disk_fails(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MIN_FREE_BYTES", 1 << 80)
    assert finding(run_file, "disk").state == "fail"


def test_a_missing_package_fails(run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PACKAGES", ("torchbft", "no-such-package"))
    found = finding(run_file, "versions")
    assert found.state == "fail"
    assert "no-such-package" in found.detail


def test_a_damaged_log_fails_and_a_torn_one_does_not(run_file: Path) -> None:
    path = run_file.parent / "peers" / "a" / "votes.log"
    log = AppendLog(path)
    for index in range(3):
        log.append(bytes([index]) * 50)
    log.close()
    whole = path.read_bytes()
    assert finding(run_file, "votes.log").detail == "3 records"
    path.write_bytes(whole[:-7])
    assert finding(run_file, "votes.log").state == "ok", "the node drops a torn last record"
    path.write_bytes(whole[:40] + bytes([whole[40] ^ 1]) + whole[41:])
    found = finding(run_file, "votes.log")
    assert found.state == "fail"
    assert "at byte 16" in found.detail
    assert "restore this file" in found.hint


def test_another_task_fails(run_file: Path, tmp_path: Path) -> None:
    from torchbft.primitives.runspec import Task

    edit(run_file, task=Task(name="X", digest="00" * 32, start_root="11" * 32))
    source = tmp_path / "task.py"
    source.write_text("raise SystemExit('never run')")
    found = finding(run_file, "task", task=f"{source}:X")
    assert found.state == "fail"
    assert "its sha256 is" in found.detail
