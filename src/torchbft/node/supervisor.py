"""Starts the two processes of each peer by forking, and brings back those that die.

The parent has torch loaded, so that seven peers start in seconds and share its memory. It must
not have run anything parallel before: a forked child would wait forever for threads it lacks.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from torchbft.primitives.errors import TorchbftError
from torchbft.primitives.ids import PeerId

MAX_RESTARTS = 100
"""Per peer; a peer that dies more often is left down, and the run goes on without it."""
MAX_BACKOFF = 5.0
"""Seconds between restarts at the most."""
QUICK_DEATH = 2.0
"""Seconds: a peer that lived longer starts its back-off anew."""
STOP_GRACE = 5.0
"""Seconds between asking and killing."""

EXIT_FINISHED = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_HALTED = 3
EXIT_RESTART = 75
"""The node asks to be started again (a simulated crash)."""

Role = Callable[[PeerId, socket.socket], int]
"""Runs in the child with one end of the link; returns the exit code."""


@dataclass(slots=True)
class Seat:
    """One peer's processes as its supervisor sees them."""

    name: PeerId
    pids: dict[str, int] = field(default_factory=dict)
    codes: dict[str, int] = field(default_factory=dict)
    restarts: int = 0
    started: float = 0.0
    start_again_at: float | None = None
    backoff: float = 0.1
    node_died: float | None = None

    @property
    def running(self) -> bool:
        return bool(self.pids) or self.start_again_at is not None

    @property
    def training(self) -> bool:
        """Whether its trainer is up: one that has trained and evaluated the last round is not."""
        return "trainer" in self.pids


def fork(role: Role, name: PeerId, sock: socket.socket, other: socket.socket, log: Path) -> int:
    """Run a role in a child whose output goes to ``log``. Returns its pid."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid:
        return pid
    code = EXIT_FAILED
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        other.close()
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        code = role(name, sock)
    except TorchbftError as error:
        print(f"error: {error}" + (f"\nhint: {error.hint}" if error.hint else ""), file=sys.stderr)
        code = EXIT_REFUSED
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else EXIT_FAILED
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


class Supervisor:
    """Keeps one node and one trainer per peer alive until the run is over."""

    def __init__(self, folders: Mapping[PeerId, Path], node: Role, trainer: Role) -> None:
        self._folders, self._node, self._trainer = dict(folders), node, trainer
        self.seats = {name: Seat(name) for name in sorted(folders)}

    def start(self) -> None:
        """Fork every peer's processes."""
        gc.collect()
        gc.freeze()  # children neither walk nor, by walking, copy what all share
        for seat in self.seats.values():
            self._start(seat)

    def _start(self, seat: Seat) -> None:
        left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        folder = self._folders[seat.name]
        seat.pids = {
            "node": fork(self._node, seat.name, left, right, folder / "node.log"),
            "trainer": fork(self._trainer, seat.name, right, left, folder / "trainer.log"),
        }
        left.close()
        right.close()
        seat.codes, seat.started, seat.start_again_at = {}, time.monotonic(), None
        seat.node_died = None

    def poll(self) -> None:
        """Reap what has ended and start again what should run. Call it a few times a second."""
        for seat in self.seats.values():
            self._reap(seat)
            if seat.start_again_at is not None and time.monotonic() >= seat.start_again_at:
                seat.restarts += 1
                self._start(seat)

    def _reap(self, seat: Seat) -> None:
        for role, pid in list(seat.pids.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del seat.pids[role]
                seat.codes[role] = os.waitstatus_to_exitcode(status)
                if role == "node":
                    seat.node_died = time.monotonic()
        self._end_half(seat)
        if not seat.pids and seat.codes and seat.start_again_at is None:
            self._consider_restart(seat)

    def _end_half(self, seat: Seat) -> None:
        """Half a peer is started again as a whole; a trainer may end by itself first."""
        if seat.codes.get("trainer", EXIT_FINISHED) < 0 and "node" in seat.pids:
            os.kill(seat.pids["node"], signal.SIGKILL)
        late = seat.node_died is not None and time.monotonic() > seat.node_died + STOP_GRACE
        if late and "trainer" in seat.pids and seat.codes["node"] < 0:
            os.kill(seat.pids["trainer"], signal.SIGKILL)

    def _consider_restart(self, seat: Seat) -> None:
        final = {EXIT_FINISHED, EXIT_REFUSED, EXIT_HALTED}
        if seat.codes.get("node") in final or seat.restarts >= MAX_RESTARTS:
            return
        lived = time.monotonic() - seat.started
        seat.backoff = 0.1 if lived > QUICK_DEATH else min(2 * seat.backoff, MAX_BACKOFF)
        seat.start_again_at = time.monotonic() + seat.backoff

    def kill(self, name: PeerId, role: str = "node") -> bool:
        """SIGKILL one process of a peer; it is started again. False if it was not running."""
        pid = self.seats[name].pids.get(role)
        if pid is None:
            return False
        os.kill(pid, signal.SIGKILL)
        return True

    @property
    def running(self) -> list[PeerId]:
        return [seat.name for seat in self.seats.values() if seat.running]

    def stop(self) -> None:
        """Ask every process to leave, then kill what stays. Leaves no child behind."""
        for seat in self.seats.values():
            seat.start_again_at = None
            seat.restarts = MAX_RESTARTS
        self._signal(signal.SIGTERM)
        until = time.monotonic() + STOP_GRACE
        while any(seat.pids for seat in self.seats.values()) and time.monotonic() < until:
            self.poll()
            time.sleep(0.02)
        self._signal(signal.SIGKILL)
        gc.unfreeze()  # or libraries complain at the end of what was not collected
        for seat in self.seats.values():
            for pid in seat.pids.values():
                os.waitpid(pid, 0)
            seat.pids = {}

    def _signal(self, number: signal.Signals) -> None:
        for seat in self.seats.values():
            for pid in seat.pids.values():
                os.kill(pid, number)
