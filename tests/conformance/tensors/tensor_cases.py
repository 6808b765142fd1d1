"""Generated values of states, codecs and the round's step, as bytes, for frozen hashes.

Inputs come from a counter and integer arithmetic alone, so that they are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from torchbft.primitives.ids import PeerId
from torchbft.tensors import aggregation
from torchbft.tensors.advance import LedgerFields, advance, pool_float_buffers
from torchbft.tensors.compression import Residual, get_codec
from torchbft.tensors.outer import DILOCO, OuterSGD
from torchbft.tensors.state import AgreedState
from torchbft.tensors.state_root import tensor_view
from torchbft.tensors.update import Update

CODECS = ("float32", "bfloat16", "int8", "topk:4096:64", "topk:256:16:float32", "topk:256:16:int8")
PEERS, LIARS = 7, 2


def numbers(size: int, seed: int) -> Tensor:
    """Float32 values of mixed magnitude: 20 hashed bits times 2^-20 … 2^-5."""
    counter = np.arange(size, dtype=np.uint64) + np.uint64(seed << 40)
    mixed = (counter * np.uint64(0x9E3779B97F4A7C15)) ^ (counter >> np.uint64(7))
    mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
    mantissa = (mixed >> np.uint64(44)).astype(np.int64) - (1 << 19)
    exponent = ((mixed >> np.uint64(20)) & np.uint64(15)).astype(np.int64) - 39
    return torch.from_numpy(np.ldexp(mantissa.astype(np.float64), exponent).astype(np.float32))


def model() -> nn.Module:
    """Enough parameters for torch to use several threads, ragged tiles and every group."""
    return nn.Sequential(nn.Linear(300, 257), nn.BatchNorm1d(257), nn.Conv1d(3, 5, 7))


def start(rule: str = "mean") -> AgreedState:
    state = AgreedState.initial(model(), rule=aggregation.get(rule))
    return replace(
        state,
        parameters_D=numbers(state.layout.parameter_count, 1),
        outer_momentum_D=numbers(state.layout.parameter_count, 2),
        round=3,
        inner_step=60,
        pass_index=1,
        cursor=1234,
        membership_digest=bytes(range(32)),
        credit_digest=bytes(range(32, 64)),
    )


def update(state: AgreedState, seed: int) -> Update:
    buffers_B = numbers(state.layout.float_buffer_count, 100 + seed).abs()
    return Update(numbers(state.layout.parameter_count, 10 + seed), buffers_B, torch.tensor([seed]))


def encoding(codec_name: str) -> bytes:
    """Two payloads in a row, the second with the residual of the first, and what is left."""
    state, codec = start(), get_codec(codec_name)
    first, pending = codec.encode(update(state, 0), Residual.zero(state.layout))
    second, pending = codec.encode(update(state, 1), pending.settled(accepted=True))
    refused = pending.settled(accepted=False).values_D
    return first + second + bytes(tensor_view(refused))


def outer_steps() -> bytes:
    out = b""
    for outer in (OuterSGD(0.7), OuterSGD(0.3, 0.9), DILOCO):
        stepped = outer.step(numbers(100_000, 1), numbers(100_000, 2), numbers(100_000, 3))
        out += b"".join(bytes(tensor_view(values)) for values in stepped)
    return out


def pooling() -> bytes:
    state = start()
    rows = [update(state, seed).float_buffers_B for seed in range(PEERS)]
    return bytes(tensor_view(pool_float_buffers(rows, state.layout, LIARS)))


def advanced(rule: str, f: int) -> bytes:
    """The root two rounds on: rule, outer step, buffers, history and counters."""
    state = start(rule)
    for number in range(2):
        updates = [(PeerId(f"p{i}"), update(state, number * PEERS + i)) for i in range(PEERS)]
        ledger = LedgerFields(4 + number, 80, 1, 5000, bytes(32), bytes(32))
        chosen = aggregation.get(rule)
        state, _ = advance(state, updates, rule=chosen, f=f, outer=DILOCO, ledger=ledger)
    return state.root()


CASES: dict[str, Callable[[], bytes]] = {
    "layout": lambda: start().layout.digest(),
    "state_root": lambda: start("centred_clipping").root(),
    "outer_steps": outer_steps,
    "pooling": pooling,
    **{f"codec/{name}": lambda name=name: encoding(name) for name in CODECS},
    "advance/mean": lambda: advanced("mean", 0),
    "advance/arc+nnm+trimmed_mean": lambda: advanced("arc+nnm+trimmed_mean", LIARS),
    "advance/centred_clipping": lambda: advanced("centred_clipping", LIARS),
}
