"""Memory that is used again: an allocator gives large blocks back to the system, and the page
faults of the next round would cost more than its arithmetic."""

from __future__ import annotations

import threading
from math import prod
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

MOST_HELD_BYTES = 1 << 23
"""One buffer that a thread keeps: eight times the work block of a few rows. Larger requests, for
many rows, are allocated each time; beside their work the faults are few."""


class _Held(threading.local):
    def __init__(self) -> None:
        self.buffers: dict[str, NDArray[np.uint8]] = {}


_held = _Held()


def workspace(name: str, *shape: int, dtype: DTypeLike = np.float64) -> NDArray[Any]:
    """Return an uninitialised array, valid until this thread asks for ``name`` again."""
    size = prod(shape) * np.dtype(dtype).itemsize
    if size > MOST_HELD_BYTES:
        return np.empty(shape, dtype)
    flat = _held.buffers.get(name)
    if flat is None or len(flat) < size:
        flat = _held.buffers[name] = np.empty(size, np.uint8)
    return flat[:size].view(dtype).reshape(shape)
