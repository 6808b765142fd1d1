"""The engine's process: brought back when it fails, followed, and never left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from torchbft.node.ordering import process as processes
from torchbft.node.ordering.process import EngineProcess, is_failure, readable
from torchbft.primitives.errors import HaltError

LIMIT = 60.0
"""Seconds for what takes a tenth of one on an idle machine."""
LIVES = "import signal; print('up', flush=True); signal.pause()"
STUBBORN = (
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
    "print('up', flush=True); [signal.pause() for _ in range(9)]"
)


class Heard:
    """Notices of a process, which can be waited for."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._more = asyncio.Event()

    def __call__(self, line: str) -> None:
        self.lines.append(line)
        self._more.set()

    async def heard(self, words: str, times: int = 1) -> None:
        async with asyncio.timeout(LIMIT):
            while sum(words in line for line in self.lines) < times:
                self._more.clear()
                await self._more.wait()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def watched(
    folder: Path,
    programs: list[str],
    work: Callable[[EngineProcess, Heard], Awaitable[Any]],
) -> list[str]:
    """Run ``work`` on a process that runs these programs one after the other, the last for good."""
    told: list[str] = []

    async def main() -> None:
        heard = Heard()
        waiting = list(programs)

        async def prepare() -> list[str]:
            script = waiting.pop(0) if len(waiting) > 1 else waiting[0]
            return [sys.executable, "-c", script]

        process = EngineProcess(prepare, folder, heard)
        try:
            await process.start()
            await work(process, heard)
        finally:
            pid = process.pid
            await process.stop()
            assert pid is None or not alive(pid)
            told.extend(heard.lines)

    asyncio.run(main())
    return told


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "FIRST_BACKOFF", 0.001)
    monkeypatch.setattr(processes, "MAX_BACKOFF", 0.004)


def test_it_runs_until_it_is_stopped(tmp_path: Path) -> None:
    async def work(process: EngineProcess, heard: Heard) -> None:
        await heard.heard("CometBFT: up")
        assert process.pid is not None
        assert process.uptime > 0

    lines = watched(tmp_path, [LIVES], work)
    assert lines == ["CometBFT: up"], "what was asked for is not told as a failure"


def test_one_that_does_not_listen_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "STOP_GRACE", 0.01)
    watched(tmp_path, [STUBBORN], lambda _, heard: heard.heard("up"))


@pytest.mark.parametrize(
    ("failing", "why"),
    [
        ("import sys; sys.exit(0)", "exit code 0, which nobody asked for"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.kill(os.getpid(), 9)", "exit code -9"),
        (
            'import signal; print(\'{"level":"error","module":"consensus","_msg":'
            '"CONSENSUS FAILURE!!!","err":"no way"}\', flush=True); signal.pause()',
            "CONSENSUS FAILURE!!! (err=no way)",
        ),
        ("import signal; print('panic: boom', flush=True); signal.pause()", "panic: boom"),
        (
            'import signal; print(\'{"level":"error","module":"proxy","_msg":"mempool connection'
            " terminated. Did the application crash? Please restart CometBFT\"}', flush=True);"
            " signal.pause()",
            "Did the application crash?",
        ),
    ],
)
def test_any_end_that_was_not_asked_for_and_a_consensus_failure_are_crashes(
    tmp_path: Path, failing: str, why: str
) -> None:
    """Exit code 0 is what the death of the application gives; a failed consensus lives on."""

    async def work(process: EngineProcess, heard: Heard) -> None:
        await heard.heard("CometBFT: up")
        assert process.restarts == 1

    lines = watched(tmp_path, [failing, LIVES], work)
    assert any(why in line and "starting it again" in line for line in lines)


def test_its_owner_may_find_it_failed(tmp_path: Path) -> None:
    async def work(process: EngineProcess, heard: Heard) -> None:
        await heard.heard("CometBFT: up")
        first = process.pid
        process.restart("it stays unconnected")
        await heard.heard("CometBFT: up", times=2)
        assert process.pid != first
        assert first is not None
        assert not alive(first)

    assert any("it stays unconnected" in line for line in watched(tmp_path, [LIVES], work))


def test_one_that_never_lives_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_QUICK_DEATHS", 2)

    async def work(process: EngineProcess, heard: Heard) -> None:
        async with asyncio.timeout(LIMIT):
            with pytest.raises(HaltError, match=r"3 times in a row.*exit code 7"):
                await process.failed
        assert process.pid is None

    watched(tmp_path, ["import sys; sys.exit(7)"], work)


def test_a_long_life_starts_the_count_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MAX_QUICK_DEATHS", 1)
    monkeypatch.setattr(processes, "QUICK_DEATH", -1.0)

    async def work(process: EngineProcess, heard: Heard) -> None:
        await heard.heard("starting it again", times=4)
        assert not process.failed.done()

    watched(tmp_path, ["raise SystemExit(1)"], work)


def test_a_start_that_cannot_be_prepared_is_told_and_tried_again(tmp_path: Path) -> None:
    async def main() -> list[str]:
        heard, calls = Heard(), 0

        async def prepare() -> list[str]:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise OSError(28, "No space left on device")
            return [sys.executable, "-c", LIVES if calls > 2 else "raise SystemExit(1)"]

        process = EngineProcess(prepare, tmp_path, heard)
        await process.start()
        await heard.heard("CometBFT: up")
        await process.stop()
        return heard.lines

    assert any("cannot be started" in line for line in asyncio.run(main()))


def test_what_keeps_it_from_a_first_start_is_raised(tmp_path: Path) -> None:
    async def main() -> None:
        async def prepare() -> list[str]:
            raise HaltError("no")

        process = EngineProcess(prepare, tmp_path, lambda _: None)
        with pytest.raises(HaltError):
            await process.start()
        await process.stop()

    asyncio.run(main())


def test_stopping_between_two_lives_starts_none(tmp_path: Path) -> None:
    async def work(process: EngineProcess, heard: Heard) -> None:
        await heard.heard("starting it again")

    watched(tmp_path, ["raise SystemExit(1)"], work)


def test_a_flood_of_lines_is_bounded_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "LINES", 5)
    monkeypatch.setattr(processes, "LINES_SECONDS", 0.0)
    flood = (
        f"import signal; [print('x' * {processes.MAX_LINE_BYTES * 2}) for _ in range(3)];"
        "[print('line', i) for i in range(200)]; print('panic: end', flush=True); signal.pause()"
    )

    async def work(process: EngineProcess, heard: Heard) -> None:
        await heard.heard("panic: end")

    lines = watched(tmp_path, [flood, LIVES], work)
    assert all(len(line) < 2 * processes.MAX_TEXT for line in lines)


WORDS = "panic: CONSENSUS FAILURE!!! proxy connection terminated. Did the application crash?"


@pytest.mark.parametrize(
    "said",
    [
        {"_msg": "Peer sent us invalid block", "msg": f'block:<chain_id:"{WORDS}" >'},
        {"_msg": f"Invalid evidence: no. Evidence: {WORDS}"},
        {"_msg": "Error dialing peer", "err": WORDS},
    ],
)
def test_what_a_member_makes_the_engine_repeat_is_no_failure_of_it(said: dict[str, str]) -> None:
    line = json.dumps({"level": "error", "module": "p2p", **said}).encode() + b"\n"
    assert WORDS in readable(line)
    assert not is_failure(line)
    assert not is_failure(b"  " + WORDS.encode())


def test_the_end_of_a_line_that_is_too_long_is_no_line(tmp_path: Path) -> None:
    """Else a member who makes the engine repeat a block could write any line."""
    long = (
        f"import signal, sys; [sys.stdout.write('x' * {processes.MAX_LINE_BYTES * 2}) and"
        " sys.stdout.flush() for _ in range(3)]; print('panic: ' * 9000, flush=True);"
        " print('after', flush=True); signal.pause()"
    )

    async def work(process: EngineProcess, heard: Heard) -> None:
        await heard.heard("CometBFT: after")
        assert process.restarts == 0

    assert watched(tmp_path, [long], work) == ["CometBFT: after"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (
            b'{"level":"error","module":"p2p","_msg":"no","peer":"ab","err":1,"ts":"t"}\n',
            "error in p2p: no (err=1 peer=ab)",
        ),
        (b'{"level":"info","_msg":"hello"}\n', "info in main: hello"),
        (b"goroutine 7 [running]:\n", "goroutine 7 [running]:"),
        (b'{"level":"error"}\n', '{"level":"error"}'),
        (b"[1]\n", "[1]"),
        (b"\xff\x1b[31m\n", "\ufffd [31m"),
        (b"y" * 5000, "y" * processes.MAX_TEXT),
    ],
)
def test_lines_become_readable_and_harmless(line: bytes, text: str) -> None:
    assert readable(line) == text


# --- the leash ------------------------------------------------------------------------------------

PARENT = """
import asyncio, sys
from pathlib import Path
from torchbft.node.ordering.process import EngineProcess

async def main():
    async def prepare():
        return [sys.executable, "-c", "import signal; print('up', flush=True); signal.pause()"]
    process = EngineProcess(prepare, Path(sys.argv[1]), lambda line: print(line, flush=True))
    await process.start()
    print(process.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it takes half a second longer")
def test_it_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert b"up" in parent.stdout.readline(), "before that the leash sees by itself"
        descriptor = os.pidfd_open(pid)
        try:
            assert alive(pid)
            parent.kill()
            parent.wait()
            gone = subprocess.run(
                [sys.executable, "-c", WAIT_FOR, str(descriptor)],
                pass_fds=[descriptor],
                timeout=LIMIT,
                check=False,
            )
            assert gone.returncode == 0
        finally:
            os.close(descriptor)


WAIT_FOR = textwrap.dedent(
    """
    import select, sys
    ready = select.select([int(sys.argv[1])], [], [], 50)[0]
    sys.exit(0 if ready else 1)
    """
)


def test_it_does_not_start_for_a_parent_that_is_gone() -> None:
    """The parent may die before the child has asked to be told."""
    leash = [sys.executable, "-I", "-S", str(processes.LEASH), "1", "/bin/sh", "-c", "exit 0"]
    assert subprocess.run(leash, timeout=LIMIT, check=False).returncode == 1


def test_the_other_leash_ends_the_program_with_its_parent(tmp_path: Path) -> None:
    """Where the kernel gives no such promise, the leash stays and watches."""
    code = "import leash, os, sys; sys.exit(leash.watch(int(sys.argv[1]), sys.argv[2:]))"
    folder = processes.LEASH.parent

    def run(parent: int, *command: str) -> int:
        arguments = [sys.executable, "-c", code, str(parent), *command]
        return subprocess.run(arguments, cwd=folder, timeout=LIMIT, check=False).returncode

    assert run(os.getpid(), "/bin/sh", "-c", "exit 5") == 5
    assert run(1, "/bin/sleep", "600") in (-signal.SIGKILL, 256 - signal.SIGKILL)
