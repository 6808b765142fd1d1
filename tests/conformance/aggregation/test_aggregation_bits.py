"""Aggregation gives one value over threads, vector widths, BLAS modes and oneDNN levels.

The full grid: ``python tests/conformance/aggregation/bits.py --all``.
"""

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BITS = Path(__file__).with_name("bits.py")
X86 = platform.machine() in ("x86_64", "AMD64")


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    finished = subprocess.run([sys.executable, str(BITS)], capture_output=True, text=True)
    assert finished.stdout, finished.stderr
    found: dict[str, Any] = json.loads(finished.stdout)
    return found


def test_every_case_has_one_value_over_the_grid(report: dict[str, Any]) -> None:
    assert report["unequal"] == []
    assert len(report["cases"]) >= 20


def test_every_case_has_its_frozen_value(report: dict[str, Any]) -> None:
    """A change of arithmetic is a new version of it: approve with ``bits.py --freeze``."""
    assert report["not_as_frozen"] == []
    assert report["frozen_only"] == []


def test_each_value_of_each_axis_was_run(report: dict[str, Any]) -> None:
    seen = {pair for one in report["environments"] for pair in one.items()}
    assert {value for name, value in seen if name == "MKL_CBWR"} == {"COMPATIBLE", "AVX2"}
    assert {value for name, value in seen if name == "ONEDNN_MAX_CPU_ISA"} == {"SSE41", "AVX2"}
    assert {v for n, v in seen if n == "ATEN_CPU_CAPABILITY"} == {"default", "avx2", "avx512"}
    assert len({value for name, value in seen if name == "NPY_DISABLE_CPU_FEATURES"}) == 2


@pytest.mark.skipif(not X86, reason="the grid varies x86 libraries")
def test_the_grid_does_change_what_ordinary_operations_return(report: dict[str, Any]) -> None:
    """Negative control: a float64 product, a sum, a fused add and an exponential differ over it.

    The product and the sum depend on the number of threads (and the product on MKL_CBWR), adding
    with alpha= on the vector width. So equal bits above are the code's doing, not the grid's.
    """
    controls = report["controls"]
    assert controls["float64 mm (threads, MKL_CBWR)"] > 1
    assert controls["float32 sum (threads)"] > 1
    if len(report["capabilities"]) > 1:
        assert controls["exponential (NPY_DISABLE_CPU_FEATURES)"] > 1
        assert controls["add with alpha (ATEN_CPU_CAPABILITY)"] > 1
