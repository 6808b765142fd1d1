"""Computations whose bits must be the same on any CPU, thread count, vector width and BLAS.

``CASES`` maps a name to a function that returns bytes; add an entry to put another computation
under the test. ``CONTROLS`` are computations that are known to differ along some axis of the grid:
they show that the grid does change what the libraries do. Run as a script, this file prints one
JSON object {threads: {name: sha256}} for the environment it was started in.

Inputs come from NumPy's integer generator: their bits depend on nothing that is varied here.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable

import numpy as np
import torch
from tensors.tensor_cases import CASES as TENSOR_CASES  # beside this file, which runs as a script

from torchbft import robust
from torchbft.tensors.exact import gram, matmul_in_order, row_norms, sqrt, weighted_sum

THREADS = (1, 2, 4)
"""torch.set_num_threads goes above the number of cores, unlike OMP_NUM_THREADS."""


def rows(seed: int, n: int, d: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows with 24-bit mantissas, magnitudes over 2^12, zeros of both signs and one long row."""
    rng = np.random.default_rng(seed)
    mantissa_ND = rng.integers(-(2**23), 2**23, size=(n, d)).astype(np.float64)
    x_ND = np.ldexp(mantissa_ND, rng.integers(-36, -24, size=(n, d)))
    x_ND[:, : d // 10] = 0.0
    x_ND[::2, : d // 10] *= -1.0
    x_ND[0] *= 50.0
    return torch.from_numpy(x_ND).to(dtype)


def to_bytes(*tensors: torch.Tensor) -> bytes:
    return b"".join(t.contiguous().view(torch.uint8).numpy().tobytes() for t in tensors)


def array_bytes(*values: np.ndarray | list[float]) -> bytes:
    return b"".join(np.asarray(part, np.float64).tobytes() for part in values)


def rule_bits(
    name: str,
    d: int = 9_000,
    dtype: torch.dtype = torch.float32,
    *,
    huge: bool = False,
    n: int = 9,
) -> bytes:
    """Result, history and info of two rounds, as bytes."""
    f = 0 if name.endswith("mean") and "+" not in name and name != "trimmed_mean" else n // 4
    f = 1 if name == "bulyan" else f
    rule, out = robust.get(name), b""
    state = rule.init(d)
    for round_ in range(2):
        x_ND = rows(round_, n, d, dtype)
        if huge:
            x_ND[1] = 1e20
        state |= {key: rows(99, 1, d, dtype)[0] for key in rule.last.inputs}
        result_D, state, info = rule.aggregate(x_ND, f, state)
        numbers = (*info.weights_N, *info.norms_N)
        out += to_bytes(result_D, *state.values()) + struct.pack(f"<{len(numbers)}d", *numbers)
    return out


def _weights(seed: int, m: int, n: int) -> np.ndarray:
    whole_MN = np.random.default_rng(seed).integers(1, 1000, size=(m, n)).astype(np.float64)
    return whole_MN / whole_MN.sum(axis=1, keepdims=True)


_RULES = (
    *("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"),
    *("centred_clipping", "nnm+trimmed_mean", "arc+nnm+trimmed_mean", "norm_clipping+mean"),
    *("nnm+arc+median", "arc+centred_clipping", "weighted_mean", "meamed", "bulyan", "mda", "smea"),
    *("cge", "caf", "nna", "faba", "dnc", "sign_majority", "fltrust", "bucketing+median"),
    *(
        "krum(variant=allouah)",
        "centred_clipping(history=false)",
        "static_clipping(threshold=9)+median",
    ),
)
CASES: dict[str, Callable[[], bytes]] = {
    **{name: lambda name=name: rule_bits(name) for name in _RULES},  # type: ignore[misc]
    "krum, allouah": lambda: rule_bits("krum(variant=allouah)"),
    "centred_clipping, memoryless": lambda: rule_bits("centred_clipping(history=false)"),
    "static_clipping": lambda: rule_bits("static_clipping(threshold=9)+median"),
    "default, float64": lambda: rule_bits("arc+nnm+trimmed_mean", 9_000, torch.float64),
    "default, bfloat16": lambda: rule_bits("arc+nnm+trimmed_mean", 9_000, torch.bfloat16),
    "default, float16": lambda: rule_bits("arc+nnm+trimmed_mean", 9_000, torch.float16),
    "default, a row of 1e20": lambda: rule_bits("arc+nnm+trimmed_mean", huge=True),
    "default, 31 rows, mixed by a product": lambda: rule_bits("arc+nnm+trimmed_mean", n=31),
    "default, 40,000 coordinates": lambda: rule_bits("arc+nnm+trimmed_mean", 40_000, n=7),
    "default, 13 coordinates": lambda: rule_bits("arc+nnm+trimmed_mean", 13),
    "gram": lambda: array_bytes(gram(rows(7, 20, 9_000)), row_norms(rows(8, 20, 9_000))),
    "weighted_sum": lambda: to_bytes(weighted_sum(_weights(9, 1, 3)[0], rows(9, 3, 40_000))),
    **{
        name: TENSOR_CASES[name]
        for name in (
            *("outer_steps", "pooling", "advance/arc+nnm+trimmed_mean"),
            *("codec/bfloat16", "codec/int8", "codec/topk:256:16:int8"),
        )
    },
    "sqrt": lambda: to_bytes(sqrt(rows(12, 1, 40_000).abs()), sqrt(rows(13, 1, 9).double().abs())),
    "matmul_in_order": lambda: array_bytes(
        matmul_in_order(_weights(10, 40, 50), _weights(11, 50, 40))
    ),
}


def _float64_product() -> bytes:
    x_ND = rows(20, 30, 50_000, torch.float64)
    return to_bytes(x_ND @ x_ND.t())


def _fused_multiply_add() -> bytes:
    x_ND = rows(21, 2, 50_000)
    return to_bytes(x_ND[0].add(x_ND[1], alpha=0.3))


def _float32_sum() -> bytes:
    return to_bytes(rows(22, 1, 300_001).sum().reshape(1))


def _mkl_square_root() -> bytes:
    return to_bytes(rows(25, 1, 50_000).abs().sqrt())


def _onednn_convolution() -> bytes:
    x_ND = rows(23, 4, 32 * 16 * 16).view(4, 32, 16, 16)
    return to_bytes(torch.nn.functional.conv2d(x_ND, rows(24, 64, 32 * 9).view(64, 32, 3, 3)))


def _numpy_exponential() -> bytes:
    return to_bytes(torch.from_numpy(np.exp(rows(26, 1, 50_000, torch.float64).numpy() / 2.0**8)))


CONTROLS: dict[str, Callable[[], bytes]] = {
    "float64 mm (threads, MKL_CBWR)": _float64_product,
    "add with alpha (ATEN_CPU_CAPABILITY)": _fused_multiply_add,
    "float32 sum (threads)": _float32_sum,
    "square root (MKL_CBWR)": _mkl_square_root,
    "convolution (ONEDNN_MAX_CPU_ISA)": _onednn_convolution,
    "exponential (NPY_DISABLE_CPU_FEATURES)": _numpy_exponential,
}


def digests() -> dict[str, dict[str, str]]:
    """Return {threads: {name: sha256}} for every case and control in this process."""
    found: dict[str, dict[str, str]] = {}
    for threads in THREADS:
        torch.set_num_threads(threads)
        with torch.no_grad():
            found[str(threads)] = {
                name: hashlib.sha256(case()).hexdigest()
                for name, case in {**CASES, **CONTROLS}.items()
            }
    return found


if __name__ == "__main__":
    print(json.dumps({"capability": torch.backends.cpu.get_cpu_capability(), "by": digests()}))
