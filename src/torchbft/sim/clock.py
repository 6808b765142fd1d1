"""Virtual time that jumps from event to event. The idea is that of trio's autojump clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from torchbft.primitives.errors import MisuseError


class Clock:
    """A queue of things to do, in order of time; equal times in order of scheduling."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._scheduled = 0

    def at(self, time: float, action: Callable[[], None]) -> None:
        """Do this at a time, or now if the time has passed."""
        self._scheduled += 1
        heapq.heappush(self._queue, (max(time, self.now), self._scheduled, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do this after some seconds."""
        if seconds < 0:
            raise MisuseError(f"{seconds} seconds from now lie in the past")
        self.at(self.now + seconds, action)

    def run(self, until: float, stop: Callable[[], bool] = lambda: False) -> bool:
        """Do everything up to a time, or until ``stop()``; whether it stopped early."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, action = heapq.heappop(self._queue)
            action()
            if stop():
                return True
        self.now = max(self.now, until)
        return False
