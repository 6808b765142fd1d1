"""Run ``cases.py`` over a grid of environments and compare the bits.

    python tests/conformance/aggregation/bits.py            a few processes that cover every value
    python tests/conformance/aggregation/bits.py --all      the full cross product
    python tests/conformance/aggregation/bits.py --freeze   write frozen_bits.json anew: approving

Axes: ATEN_CPU_CAPABILITY x MKL_CBWR x ONEDNN_MAX_CPU_ISA, one process each, with
NPY_DISABLE_CPU_FEATURES such that each pair of values occurs; threads 1, 2 and 4 inside each
process. Prints JSON; exits 1 when a case has more than one value or not the frozen one.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import defaultdict
from itertools import product
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CASES = HERE.parent / "cases.py"
FROZEN = HERE.parent / "frozen_bits.json"
SOURCE = HERE.parents[2] / "src"

AXES = {
    "ATEN_CPU_CAPABILITY": ("default", "avx2", "avx512"),
    "MKL_CBWR": (None, "COMPATIBLE", "AVX2"),
    "ONEDNN_MAX_CPU_ISA": (None, "SSE41", "AVX2"),
}
NUMPY = "NPY_DISABLE_CPU_FEATURES"
WITHOUT = (None, "X86_V4 AVX512_ICL AVX512_SPR", "X86_V3 X86_V4 AVX512_ICL AVX512_SPR")
"""Vector instructions that NumPy does without: none, AVX-512, and AVX2 as well."""
Environment = dict[str, str | None]
FULL: list[Environment] = [
    {**dict(zip(AXES, values, strict=True)), NUMPY: WITHOUT[sum(places) % len(WITHOUT)]}
    for values, places in zip(
        product(*AXES.values()), product(*(range(len(axis)) for axis in AXES.values())), strict=True
    )
]
PRUNED: list[Environment] = [
    dict(zip((*AXES, NUMPY), values, strict=True))
    for values in zip(*AXES.values(), WITHOUT, strict=True)
]
"""Latin: every value of every axis occurs, with threads 1, 2 and 4 each."""
PROCESS_TIMEOUT_S = 300.0
"""A process takes a few seconds; a loaded machine may take many times that."""


def run(environment: Environment) -> dict[str, Any]:
    """Return what cases.py prints in one environment."""
    settings = {name: value for name, value in environment.items() if value is not None}
    base = {name: value for name, value in os.environ.items() if name not in {*AXES, NUMPY}}
    finished = subprocess.run(
        [sys.executable, str(CASES)],
        env={**base, "PYTHONPATH": str(SOURCE), **settings},
        capture_output=True,
        text=True,
        timeout=PROCESS_TIMEOUT_S,
        check=True,
    )
    result: dict[str, Any] = json.loads(finished.stdout)
    return {"environment": settings, **result}


def gather(environments: list[Environment]) -> dict[str, Any]:
    """Return the digests that each name had, with how often, and the frozen digests it missed."""
    runs = [run(environment) for environment in environments]
    seen: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    for one in runs:
        for by_name in one["by"].values():
            for name, digest in by_name.items():
                seen[name][digest] += 1
    controls = {name for name in seen if "(" in name}
    frozen = json.loads(FROZEN.read_text()) if FROZEN.exists() else {}
    cases = {name: values for name, values in seen.items() if name not in controls}
    return {
        "environments": [one["environment"] for one in runs],
        "capabilities": sorted({one["capability"] for one in runs}),
        "processes": len(runs),
        "controls": {name: len(seen[name]) for name in sorted(controls)},
        "cases": {name: sorted(values) for name, values in sorted(cases.items())},
        "unequal": sorted(name for name, values in cases.items() if len(values) > 1),
        "not_as_frozen": sorted(n for n, v in cases.items() if sorted(v) != [frozen.get(n)]),
        "frozen_only": sorted(set(frozen) - set(cases)),
    }


def freeze(report: dict[str, Any]) -> None:
    """Write the digests of a run in which every case had one value."""
    if report["unequal"]:
        raise SystemExit(f"not frozen: more than one value for {report['unequal']}")
    one_each = {name: values[0] for name, values in report["cases"].items()}
    FROZEN.write_text(json.dumps(one_each, indent=1, sort_keys=True) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="run the full cross product")
    parser.add_argument("--freeze", action="store_true", help="approve the digests found")
    arguments = parser.parse_args()
    report = gather(FULL if arguments.all else PRUNED)
    if arguments.freeze:
        freeze(report)
        report["not_as_frozen"] = []
    print(json.dumps(report, indent=1))
    return 1 if report["unequal"] or report["not_as_frozen"] else 0


if __name__ == "__main__":
    sys.exit(main())
