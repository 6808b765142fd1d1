"""The memory benchmark sees growth where there is some, and none where there is none."""

from __future__ import annotations

import math
import mmap
import os
import sys
from importlib import util
from pathlib import Path

import pytest

_SPEC = util.spec_from_file_location(
    "benchmark_memory", Path(__file__).parents[3] / "benchmarks" / "memory.py"
)
assert _SPEC is not None
assert _SPEC.loader is not None
memory = util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(memory)

MB = 1_000_000


def test_the_slope_is_that_after_the_warm_up() -> None:
    flat = [(number, 40 * MB + min(number, 50) * MB) for number in range(200)]
    leaking = [(number, 40 * MB + number * MB // 4) for number in range(200)]
    assert abs(memory.slope(flat)) < 1e-6
    assert memory.slope(leaking) == pytest.approx(0.25, abs=0.01)
    assert math.isnan(memory.slope(flat[:20]))


def test_the_worst_peer_of_each_role_is_reported() -> None:
    samples = {
        ("a", "node"): [(50, 30 * MB), (150, 30 * MB)],
        ("b", "node"): [(50, 31 * MB), (150, 51 * MB)],
        ("a", "trainer"): [(50, 10 * MB), (150, 10 * MB)],
    }
    report = memory.figures(samples)
    assert report["node"] == {"most_mb": 51.0, "steepest_mb_per_round": 0.2}
    assert report["trainer"]["steepest_mb_per_round"] == 0


@pytest.mark.skipif(sys.platform != "linux", reason="smaps_rollup is Linux's")
def test_private_bytes_grow_with_what_is_allocated() -> None:
    before = memory.private_bytes(os.getpid())
    with mmap.mmap(-1, 20 * MB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as fresh:
        fresh.write(b"x" * len(fresh))
        assert memory.private_bytes(os.getpid()) - before > 15 * MB
    assert memory.private_bytes(2**22 + 1) == 0
