"""CPU time of the aggregation rules, beside a pass over memory and beside other libraries.

    python benchmarks/aggregation.py                 a table
    python benchmarks/aggregation.py --json          the same as one JSON object
    python benchmarks/aggregation.py --rules krum,median --n 10,30 --d 100000

One thread, one process; contenders take turns, and of each the least CPU time of some repetitions
counts, so that a loaded machine changes all alike. ``passes`` is time over that of reading the
matrix once; ``peak_matrices`` the memory used beside the input, in input matrices (Linux).
``speedup_vs_best_library`` compares ``fast`` with the fastest library whose result is finite.
ByzFL, ByzPy and krum take part where they can be imported: in an environment of their own, since
byzpy pins torch < 2.6 and krum asks for Python 3.12 (``pip install --no-deps
--ignore-requires-python byzfl byzpy krum``).
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import time
import types
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from torchbft import robust

Call = Callable[[torch.Tensor], Any]

RULES = (
    *("trimmed_mean", "median", "krum", "multi_krum", "geometric_median", "centred_clipping"),
    *("mda", "bulyan", "nnm+trimmed_mean", "arc+nnm+trimmed_mean", "meamed", "cge", "caf"),
)
ITERATIONS = 10
"""Of the libraries' iterative rules; ours iterate in weight space, at no cost per coordinate."""
MOST_SETS_N = 10
"""MDA of the libraries looks at all sets of rows: at n=30 for seconds, at n=64 memory runs out."""
FAULTS = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""What a library raises on input that it cannot take."""
CLEAR_PEAK = "5"
"""Written to clear_refs it sets the peak of resident memory back (man 5 proc)."""


def liars(rule: str, n: int) -> int:
    """n/4, or the most that Bulyan allows."""
    return (n - 3) // 4 if rule == "bulyan" else n // 4


def libraries(rule: str, n: int, f: int) -> dict[str, Call]:
    """The same rule in other libraries, as far as they are installed and have it."""
    if rule == "mda" and n > MOST_SETS_N:
        return {}
    found: dict[str, Call] = {}
    for name, builder in (("byzfl", _byzfl), ("byzpy", _byzpy), ("krum", _krum)):
        with suppress(ImportError):
            call = builder(rule, n, f)
            if call is not None:
                found[name] = call
    return found


def _byzfl(rule: str, n: int, f: int) -> Call | None:
    # its own benchmark, which its package imports, wants torchvision and data sets
    sys.modules.setdefault("byzfl.benchmark", types.ModuleType("byzfl.benchmark"))
    rules = importlib.import_module("byzfl.aggregators.aggregators")
    stages = importlib.import_module("byzfl.aggregators.preaggregators")
    builders: dict[str, Callable[[], Call]] = {
        "trimmed_mean": lambda: rules.TrMean(f),
        "median": rules.Median,
        "krum": lambda: rules.Krum(f),
        "multi_krum": lambda: rules.MultiKrum(f),
        "geometric_median": lambda: rules.GeometricMedian(T=ITERATIONS),
        "centred_clipping": lambda: rules.CenteredClipping(L=ITERATIONS),
        "mda": lambda: rules.MDA(f),
        "meamed": lambda: rules.Meamed(f),
        "caf": lambda: rules.CAF(f),
        "nnm+trimmed_mean": lambda: _chain(stages.NNM(f), rules.TrMean(f)),
        "arc+nnm+trimmed_mean": lambda: _chain(stages.ARC(f), stages.NNM(f), rules.TrMean(f)),
    }
    return builders[rule]() if rule in builders else None


def _byzpy(rule: str, n: int, f: int) -> Call | None:
    columns = importlib.import_module("byzpy.aggregators.coordinate_wise")
    geometry = importlib.import_module("byzpy.aggregators.geometric_wise")
    norms = importlib.import_module("byzpy.aggregators.norm_wise")
    stages = importlib.import_module("byzpy.pre_aggregators.nnm")
    trimmed = columns.CoordinateWiseTrimmedMean(f)
    builders: dict[str, Callable[[], Call]] = {
        "trimmed_mean": lambda: trimmed.aggregate,
        "median": lambda: columns.CoordinateWiseMedian().aggregate,
        "krum": lambda: geometry.Krum(f).aggregate,
        "multi_krum": lambda: geometry.MultiKrum(f, n - f).aggregate,
        "geometric_median": lambda: geometry.GeometricMedian(max_iter=ITERATIONS).aggregate,
        "centred_clipping": lambda: norms.CenteredClipping(c_tau=1e3, M=ITERATIONS).aggregate,
        "mda": lambda: geometry.MinimumDiameterAveraging(f).aggregate,
        "caf": lambda: norms.CAF(f).aggregate,
        "cge": lambda: norms.ComparativeGradientElimination(f).aggregate,
        "nnm+trimmed_mean": lambda: _chain(
            stages.NearestNeighborMixing(f).pre_aggregate, trimmed.aggregate
        ),
    }
    return _of_rows(builders[rule]()) if rule in builders else None


def _krum(rule: str, n: int, f: int) -> Call | None:
    names = {
        "trimmed_mean": ("trimmed_mean", "TrimmedMean", {}),
        "median": ("median", "Median", {}),
        "krum": ("krum", "Krum", {}),
        "multi_krum": ("multikrum", "MultiKrum", {}),
        "geometric_median": ("geometric_median", "GeometricMedian", {}),
        "bulyan": ("bulyan", "Bulyan", {"m": 1}),
        "mda": ("brute", "Brute", {}),
    }
    if rule not in names:
        return None
    module, name, options = names[rule]
    cls = getattr(importlib.import_module(f"krum.primitives.aggregators.{module}"), name)
    return _of_rows(lambda rows: cls.aggregate(rows, n=n, f=f, **options))


def _chain(*calls: Call) -> Call:
    def chained(x: Any) -> Any:
        for call in calls:
            x = call(x)
        return x

    return chained


def _of_rows(call: Call) -> Call:
    return lambda updates_ND: call(list(updates_ND))


def cpu_ms(call: Call, updates_ND: torch.Tensor) -> float:
    """CPU time of one call."""
    start = time.process_time()
    call(updates_ND)
    return 1e3 * (time.process_time() - start)


def peak_bytes(call: Call, updates_ND: torch.Tensor) -> int:
    """Resident memory at its highest during the call, less that before; 0 where unknown."""
    try:
        Path("/proc/self/clear_refs").write_text(CLEAR_PEAK)
        before = _status("VmRSS")
        call(updates_ND)
        return max(0, _status("VmHWM") - before)
    except OSError:
        return 0


def _status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(field)).split()[1])


def usable(call: Call, updates_ND: torch.Tensor) -> bool:
    """Whether a library runs at all on this input and returns numbers."""
    try:
        return bool(torch.isfinite(torch.as_tensor(call(updates_ND))).all())
    except (
        ArithmeticError,
        AttributeError,
        LookupError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:
        print(f"left out: {type(error).__name__}: {error}"[:200], file=sys.stderr)
        return False


def measure(name: str, n: int, d: int, repetitions: int) -> dict[str, Any]:
    """Time one rule in both modes, a read pass and the libraries, in turns."""
    f = liars(name, n)
    generator = torch.Generator().manual_seed(n)
    updates_ND = torch.randn(n, d, generator=generator) + 0.1
    rule, out_D = robust.get(name), torch.empty(d)
    ours: dict[str, Call] = {
        mode: lambda x, mode=mode: rule(x, f, mode=mode, out=out_D)  # type: ignore[misc]
        for mode in ("fast", "deterministic")
    }
    others = {
        library: call for library, call in libraries(name, n, f).items() if usable(call, updates_ND)
    }
    contenders = {"read": lambda x: x.sum(), **ours, **others}
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(repetitions + 1):  # the first touches memory and fills caches
        for key, call in contenders.items():
            best[key] = min(best[key], cpu_ms(call, updates_ND))
    fastest = min(others, key=best.__getitem__, default=None)
    matrix = updates_ND.numel() * updates_ND.element_size()
    return {
        "rule": name,
        "n": n,
        "f": f,
        "d": d,
        "cpu_ms": best["fast"],
        "passes": best["fast"] / best["read"],
        "read_ms": best["read"],
        "deterministic_ms": best["deterministic"],
        "deterministic_over_fast": best["deterministic"] / best["fast"],
        "peak_matrices": peak_bytes(ours["fast"], updates_ND) / matrix,
        "libraries_ms": {library: best[library] for library in others},
        "best_library": fastest,
        "speedup_vs_best_library": best[fastest] / best["fast"] if fastest else None,
        "deterministic_speedup": best[fastest] / best["deterministic"] if fastest else None,
    }


def versions() -> dict[str, str]:
    """What ran."""
    found = {"python": platform.python_version(), "cpu": torch.backends.cpu.get_cpu_capability()}
    for package in ("torch", "numpy", "byzfl", "byzpy", "krum"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def line(result: dict[str, Any]) -> str:
    """One row of the table."""
    speedup = result["speedup_vs_best_library"]
    against = f"{speedup:6.1f}x {result['best_library']}" if speedup else "     – no library"
    return (
        f"{result['rule']:22} n={result['n']:<3} {result['cpu_ms']:8.1f} ms"
        f" {result['passes']:6.1f} passes  det {result['deterministic_over_fast']:4.1f}x"
        f"  {result['peak_matrices']:5.2f} matrices  {against}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rules", default=",".join(RULES))
    parser.add_argument("--n", default="10,30,64")
    parser.add_argument("--d", type=int, default=1_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for n in map(int, arguments.n.split(",")):
        for rule in arguments.rules.split(","):
            results.append(measure(rule, n, arguments.d, arguments.repetitions))
            print(line(results[-1]), file=sys.stderr if arguments.json else sys.stdout, flush=True)
    if arguments.json:
        print(json.dumps({"versions": versions(), "results": results}, indent=1))


if __name__ == "__main__":
    main()
