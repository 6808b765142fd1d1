"""The payload decoder against arbitrary and damaged bytes: a value or DecodeError, bounded memory.

Whatever decodes is canonical: encoding it again gives the very bytes that were read.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchbft.primitives.errors import DecodeError
from torchbft.tensors.compression import Residual, get_codec, max_payload_bytes
from torchbft.tensors.compression.wire import HEADER
from torchbft.tensors.state import AgreedState, StateLayout
from torchbft.tensors.update import Update

NAMES = ["float32", "bfloat16", "int8", "topk:64:9", "topk:128:5:float32", "topk:64:64:int8"]
MODEL = nn.Sequential(nn.Linear(30, 10), nn.BatchNorm1d(10))
LAYOUT = StateLayout.from_module(MODEL)
MUTATIONS = 250
LARGEST_TENSOR = 8 * (LAYOUT.parameter_count + 256)
"""Eight bytes (int64) a parameter, and room for one padded block: what a decoder may allocate."""


class LargestTensor(TorchFunctionMode):
    """Remembers the most bytes that one call into torch returned."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.nbytes = max(self.nbytes, result.untyped_storage().nbytes())
        return result


def sound_payload(name: str) -> bytes:
    state = AgreedState.initial(MODEL)
    values = torch.randn(LAYOUT.parameter_count, generator=torch.Generator().manual_seed(6))
    update = Update(values, state.float_buffers_B, state.int_buffers_I)
    return get_codec(name).encode(update)[0]


def reads(name: str, payload: bytes) -> bool:
    """Decode under the memory bound; what decodes must be canonical. Only DecodeError passes."""
    codec = get_codec(name)
    with LargestTensor() as largest:
        try:
            update = codec.decode(payload, LAYOUT)
        except DecodeError:
            update = None
    assert largest.nbytes <= LARGEST_TENSOR
    if update is None:
        return False
    assert canonical(name, update) == payload
    return True


def canonical(name: str, update: Update) -> bytes:
    """Encode, keeping negative zeros: adding a residual of −0 changes no value and no sign."""
    residual = Residual(torch.full((LAYOUT.parameter_count,), -0.0))
    return get_codec(name).encode(update, residual)[0]


def mutated(payload: bytes, rng: random.Random) -> bytes:
    data = bytearray(payload)
    for _ in range(rng.choice((1, 1, 1, 2, 8))):
        kind, place = rng.randrange(6), rng.randrange(len(data) or 1)
        if kind == 0:
            data[place : place + 1] = bytes([data[place] ^ (1 << rng.randrange(8))])
        elif kind == 1:
            data[place : place + 1] = rng.randbytes(1)
        elif kind == 2:
            del data[place : place + rng.choice((1, 2, 4, 8, 64))]
        elif kind == 3:
            data[place:place] = rng.randbytes(rng.choice((1, 2, 4, 8)))
        elif kind == 4:
            data[place : place + 8] = rng.choice((bytes(8), b"\xff" * 8, b"\xff" * 7 + b"\x7f"))
        else:
            header = rng.randrange(HEADER.size)
            data[header : header + 1] = rng.randbytes(1)
        if not data:
            return bytes(data)
    return bytes(data)


@pytest.mark.parametrize("name", NAMES)
def test_damaged_payloads(name: str) -> None:
    payload, rng = sound_payload(name), random.Random(f"payload {name}")
    assert reads(name, payload)
    outcomes = [reads(name, mutated(payload, rng)) for _ in range(MUTATIONS)]
    assert True in outcomes, "no mutation reached the values"
    assert outcomes.count(False) > MUTATIONS // 5


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation(name: str) -> None:
    payload = sound_payload(name)
    assert not any(reads(name, payload[:length]) for length in range(0, len(payload), 13))


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=300))
def test_arbitrary_bytes(name: str, data: bytes) -> None:
    assert not reads(name, data)


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_arbitrary_bodies_behind_a_sound_header(name: str, data: st.DataObject) -> None:
    payload = bytearray(sound_payload(name))
    start = data.draw(st.integers(HEADER.size, len(payload) - 1))
    patch = data.draw(st.binary(max_size=min(64, len(payload) - start)))
    payload[start : start + len(patch)] = patch
    reads(name, bytes(payload))


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_beyond_the_bound_is_refused_before_it_is_read(name: str) -> None:
    bound = max_payload_bytes(LAYOUT, get_codec(name))
    with LargestTensor() as largest, pytest.raises(DecodeError, match="oversized"):
        get_codec(name).decode(bytes(bound + 1), LAYOUT)
    assert largest.nbytes == 0


def test_the_memory_watch_sees_a_large_tensor() -> None:
    with LargestTensor() as largest:
        torch.zeros(LARGEST_TENSOR)
    assert largest.nbytes > LARGEST_TENSOR
