"""Runs CometBFT as a child: follows its log, starts it again when it fails, never leaves it behind.

The engine says little about its own failures: after a panic in consensus the process lives on and
its RPC answers; when the application's connection ends, it ends with exit code 0, or hangs. So a
failure is any exit that was not asked for, certain words in its log, or what its owner finds
(``restart``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec

from torchbft.primitives.errors import HaltError

FIRST_BACKOFF, MAX_BACKOFF = 0.1, 10.0
"""Seconds before a restart, doubled with each quick death."""
QUICK_DEATH = 20.0
"""Seconds: an engine that lived longer starts its back-off anew; replay may take several."""
MAX_QUICK_DEATHS = 10
"""In a row: then something is wrong that no restart mends."""
STOP_GRACE = 5.0
"""Seconds between asking and killing."""
MAX_LINE_BYTES = 1 << 16
"""Longer lines of the log are cut: a stack of goroutines comes in short ones."""
MAX_TEXT = 400
"""Characters of one line that go into our log."""
LINES, LINES_SECONDS = 20, 10.0
"""So many lines of its log go into ours in such a span; the rest is counted."""
FAILURE = re.compile(r"CONSENSUS FAILURE|\w+ connection terminated\. Did the application crash\?")
"""What begins the message of a failure. After the second it should end itself, and now and then
hangs for ever instead. Values beside a message, and its rest, may be another member's words."""
PANIC = "panic: "
"""What begins the line that the language's runtime writes."""
LEASH = Path(__file__).with_name("leash.py")

Notice = Callable[[str], None]


class EngineProcess:
    """Keeps one engine alive from ``start`` to ``stop``.

    ``prepare`` is awaited before each start and returns the command; ``notice`` takes lines for
    our log. ``failed`` gets a HaltError if restarting does not help.
    """

    def __init__(self, prepare: Callable[[], Awaitable[list[str]]], cwd: Path, notice: Notice):
        self._prepare, self._cwd, self._notice = prepare, cwd, notice
        self._loop = asyncio.get_running_loop()
        self._child: asyncio.subprocess.Process | None = None
        self._task: asyncio.Task[None] | None = None
        self._fault: asyncio.Future[str] = self._loop.create_future()
        self._allowed, self._left_out, self._span_ends = LINES, 0, 0.0
        self._stopping = False
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self.restarts = 0

    @property
    def pid(self) -> int | None:
        """The engine's process; None while there is none."""
        return self._child.pid if self._child and self._child.returncode is None else None

    @property
    def uptime(self) -> float:
        """Seconds since this engine was started; 0 while there is none."""
        return self._loop.time() - self._started if self.pid is not None else 0.0

    async def start(self) -> None:
        """Start the engine; what keeps it from a first start raises."""
        await self._spawn()
        self._task = asyncio.create_task(self._keep())

    async def stop(self) -> None:
        """End the engine and wait until it is gone. May be called twice, and without ``start``."""
        self._stopping = True  # what it says while it ends is of no use to anyone
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        await self._end()
        if not self.failed.done():
            self.failed.cancel()

    def restart(self, why: str) -> None:
        """End this engine as failed; it is started again."""
        if not self._fault.done():
            self._fault.set_result(why)

    async def _keep(self) -> None:
        backoff, quick = FIRST_BACKOFF, 0
        while True:
            why = await self._until_it_fails()
            lived = self._loop.time() - self._started
            await self._end()
            quick = 0 if lived > QUICK_DEATH else quick + 1
            if quick > MAX_QUICK_DEATHS:
                self._give_up(why)
                return
            backoff = FIRST_BACKOFF if quick <= 1 else min(2 * backoff, MAX_BACKOFF)
            self._notice(f"CometBFT failed: {why}; starting it again in {backoff:g} s")
            await asyncio.sleep(backoff)
            self.restarts += 1
            try:
                await self._spawn()
            except Exception as error:  # a full disk, a binary that went away
                self._fault.set_result(f"it cannot be started ({error})")

    def fail(self, error: HaltError) -> None:
        """Tell the owner that starting the engine again would not help."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _give_up(self, why: str) -> None:
        self.fail(
            HaltError(
                f"CometBFT failed {MAX_QUICK_DEATHS + 1} times in a row: {why}",
                where="ledger",
                hint="its last lines are in this peer's log; torchbft doctor looks for causes",
            )
        )

    async def _spawn(self) -> None:
        self._fault = self._loop.create_future()
        self._started = self._loop.time()
        command = await self._prepare()
        leash = [sys.executable, "-I", "-S", str(LEASH), str(os.getpid())]
        self._child = await asyncio.create_subprocess_exec(
            *leash,
            *command,
            cwd=self._cwd,
            # Variables named CMT_… would change its configuration behind our back.
            env={"HOME": str(self._cwd), "PATH": os.environ.get("PATH", os.defpath)},
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # Control-C reaches the node, which stops its engine
        )
        self._follower = asyncio.create_task(self._follow(self._child))

    async def _until_it_fails(self) -> str:
        """Why the engine that was started is no good any more."""
        child = self._child
        if child is None or self._fault.done():
            return await self._fault
        ended: asyncio.Future[Any] = asyncio.ensure_future(child.wait())
        first: set[asyncio.Future[Any]] = {ended, self._fault}
        try:
            await asyncio.wait(first, return_when=asyncio.FIRST_COMPLETED)
        finally:
            ended.cancel()
        if self._fault.done():
            return self._fault.result()
        return f"it ended with exit code {child.returncode}, which nobody asked for"

    async def _end(self) -> None:
        """Ask the engine to end, then kill it. Returns when it is gone."""
        child = self._child
        if child is None:
            return
        for number, grace in ((signal.SIGTERM, STOP_GRACE), (signal.SIGKILL, None)):
            if child.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    child.send_signal(number)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(child.wait(), grace)
        await self._follower
        self._child = None

    async def _follow(self, child: asyncio.subprocess.Process) -> None:
        """Its log into ours, until it ends."""
        assert child.stdout is not None
        async for line in lines_of(child.stdout):
            if self._stopping:
                continue
            text = readable(line)
            self._write(text)
            if is_failure(line):
                self.restart(text)

    def _write(self, text: str) -> None:
        now = self._loop.time()
        if now > self._span_ends:
            if self._left_out:
                self._notice(f"CometBFT: {self._left_out} lines more")
            self._allowed, self._left_out, self._span_ends = LINES, 0, now + LINES_SECONDS
        if self._allowed:
            self._allowed -= 1
            self._notice(f"CometBFT: {text}")
        else:
            self._left_out += 1


async def lines_of(stream: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """The lines of a stream, but for those longer than its limit, of which nothing is taken."""
    whole = True
    while True:
        try:
            line = await stream.readuntil()
        except asyncio.LimitOverrunError as error:
            await stream.readexactly(error.consumed)
            whole = False
            continue
        except asyncio.IncompleteReadError as error:
            if error.partial and whole:
                yield error.partial
            return
        if whole:
            yield line
        whole = True


def _fields(line: bytes) -> dict[str, Any] | None:
    """What a line of JSON says; None for any other."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return fields if {"level", "_msg"} <= fields.keys() else None


def is_failure(line: bytes) -> bool:
    """Whether the engine says of itself that it failed. Members choose words that it repeats, so
    only where it speaks itself counts."""
    fields = _fields(line)
    if fields is None:
        return line.decode("utf-8", "replace").startswith(PANIC)
    return FAILURE.match(str(fields["_msg"])) is not None


def readable(line: bytes) -> str:
    """One line of its log as one of ours: JSON becomes ``module: message (key=value …)``."""
    fields = _fields(line)
    if fields is None:
        text = line.decode("utf-8", "replace").rstrip()
    else:
        level, message, module = (fields.pop(k, "main") for k in ("level", "_msg", "module"))
        fields.pop("ts", None)
        more = " ".join(f"{key}={value}" for key, value in sorted(fields.items()))
        text = f"{level} in {module}: {message}" + (f" ({more})" if more else "")
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    return printable[:MAX_TEXT]
