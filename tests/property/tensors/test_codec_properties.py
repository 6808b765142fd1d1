"""Every codec, over arbitrary bit patterns: one byte string per update, and nothing lost."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchbft.primitives.errors import DecodeError
from torchbft.tensors.compression import Residual, get_codec, max_payload_bytes
from torchbft.tensors.state import StateLayout, TensorSpec
from torchbft.tensors.update import Update

NAMES = ["float32", "bfloat16", "int8", "topk:16:3", "topk:16:16:float32", "topk:32:4:int8"]
EXAMPLES = settings(max_examples=40, deadline=None)

bit_patterns = st.lists(st.integers(0, 2**32 - 1), max_size=80).map(
    lambda words: torch.from_numpy(np.array(words, dtype=np.uint32).view(np.float32))
)
moderate = st.lists(
    st.one_of(st.just(0.0), st.floats(-1e6, 1e6, width=32)), min_size=1, max_size=80
).map(lambda values: torch.tensor(values, dtype=torch.float32))


def layout_of(values: Tensor) -> StateLayout:
    return StateLayout((TensorSpec("w", (len(values),), "float32", "parameter"),))


def update_of(values: Tensor) -> Update:
    return Update(values, torch.zeros(0), torch.zeros(0, dtype=torch.int64))


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(values=bit_patterns)
def test_any_bits_encode_and_decode_to_one_value_or_one_error(name: str, values: Tensor) -> None:
    codec, layout = get_codec(name), layout_of(values)
    payload, pending = codec.encode(update_of(values))
    assert len(payload) <= max_payload_bytes(layout, codec)
    if not bool(torch.isfinite(pending.sent_D).all()):
        with pytest.raises(DecodeError, match="non-finite"):
            codec.decode(payload, layout)
        return
    decoded = codec.decode(payload, layout)
    assert torch.equal(decoded.parameters_D, pending.sent_D)
    again, rest = codec.encode(decoded)
    assert again == payload
    assert not bool(rest.settled(True).values_D.any())


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(values=moderate)
def test_codecs_never_enlarge_a_value_much_or_turn_its_sign(name: str, values: Tensor) -> None:
    codec = get_codec(name)
    decoded = codec.decode(codec.encode(update_of(values))[0], layout_of(values)).parameters_D
    assert bool((decoded * values >= 0).all())
    half_of_the_smallest_step = 2.0**-127  # int8's smallest scale is 2^-126: rounding below it
    most = float(values.abs().max()) * (1 + 1 / 126) + half_of_the_smallest_step
    assert float(decoded.abs().max()) <= most


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(values=moderate, accepted=st.booleans())
def test_the_residual_is_what_was_not_said(name: str, values: Tensor, accepted: bool) -> None:
    codec = get_codec(name)
    before = Residual(values.flip(0) * 0.5)
    _, pending = codec.encode(update_of(values), before)
    after = pending.settled(accepted).values_D
    if accepted:
        assert torch.equal(after, before.values_D + values - pending.sent_D)
        return
    limit = max(float(values.double().norm()), float(before.values_D.double().norm()))
    assert float(after.double().norm()) <= limit * (1 + 1e-5) + 1e-40  # subnormal steps


@EXAMPLES
@given(values=moderate)
def test_topk_keeps_the_largest_of_each_chunk(values: Tensor) -> None:
    codec = get_codec("topk:16:3:float32")
    decoded = codec.decode(codec.encode(update_of(values))[0], layout_of(values)).parameters_D
    for start in range(0, len(values), 16):
        chunk, said = values[start : start + 16], decoded[start : start + 16]
        kept, left = said != 0, said == 0
        assert int(kept.sum()) == min(3, int((chunk != 0).sum()))
        if bool(kept.any()) and bool(left.any()):
            assert float(chunk[kept].abs().min()) >= float(chunk[left].abs().max())


@pytest.mark.parametrize("name", NAMES)
@EXAMPLES
@given(values=moderate, tail=st.integers(1, 40))
def test_what_one_chunk_says_does_not_depend_on_those_behind_it(
    name: str, values: Tensor, tail: int
) -> None:
    codec, width = get_codec(name), 256
    padded = torch.cat([values, torch.zeros(width - len(values))])
    longer = torch.cat([padded, torch.full((tail,), 1e9)])
    short, long = (codec.encode(update_of(x))[1].sent_D for x in (padded, longer))
    assert torch.equal(short, long[:width])
