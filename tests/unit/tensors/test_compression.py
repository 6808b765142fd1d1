"""Codecs: names, sizes, precision against independent oracles, each refusal, error feedback."""

from __future__ import annotations

import struct
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from torchbft.primitives.errors import DecodeError, MisuseError, PreconditionError
from torchbft.tensors.compression import Residual, get_codec, max_payload_bytes
from torchbft.tensors.compression.quantiser import Int8Blocks
from torchbft.tensors.compression.wire import HEADER
from torchbft.tensors.state import StateLayout, TensorSpec
from torchbft.tensors.update import Update

NAMES = ["float32", "bfloat16", "int8", "topk:64:5", "topk:64:5:float32", "topk:64:5:int8"]


def layout_of(size: int) -> StateLayout:
    return StateLayout((TensorSpec("w", (size,), "float32", "parameter"),))


def update_of(values: Tensor) -> Update:
    return Update(values, torch.zeros(0), torch.zeros(0, dtype=torch.int64))


def noise(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed)) * 0.01


def through(name: str, values: Tensor) -> Tensor:
    codec, layout = get_codec(name), layout_of(len(values))
    return codec.decode(codec.encode(update_of(values))[0], layout).parameters_D


def section(name: str, values: Tensor) -> bytearray:
    return bytearray(get_codec(name).encode(update_of(values))[0])


def refusal(name: str, payload: bytes | bytearray, size: int) -> str:
    with pytest.raises(DecodeError) as caught:
        get_codec(name).decode(payload, layout_of(size))
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 256, 300, 1000])
def test_payloads_decode_canonically_within_their_bound(name: str, size: int) -> None:
    codec, layout = get_codec(name), layout_of(size)
    payload, pending = codec.encode(update_of(noise(size)))
    assert len(payload) <= max_payload_bytes(layout, codec)
    decoded = codec.decode(memoryview(payload), layout)
    assert torch.equal(decoded.parameters_D, pending.sent_D)
    assert codec.encode(decoded)[0] == payload


@pytest.mark.parametrize("name", NAMES)
def test_the_bound_is_met_by_a_full_payload(name: str) -> None:
    codec = get_codec(name)
    payload, _ = codec.encode(update_of(torch.ones(128)))
    assert len(payload) == max_payload_bytes(layout_of(128), codec)


@pytest.mark.parametrize("name", NAMES)
def test_buffers_travel_unchanged(name: str) -> None:
    layout = StateLayout.from_module(nn.BatchNorm1d(3))
    update = Update(
        noise(6), torch.tensor([1e-30, -3.7, 1e9, 0.1, 2.0, 3e38]), torch.tensor([2**40])
    )
    codec = get_codec(name)
    decoded = codec.decode(codec.encode(update)[0], layout)
    assert torch.equal(decoded.float_buffers_B, update.float_buffers_B)
    assert torch.equal(decoded.int_buffers_I, update.int_buffers_I)


def test_float32_is_exact_to_the_bit() -> None:
    values = torch.tensor([0.0, 1e-45, -1e-38, 3.4e38, 1 / 3])
    assert through("float32", values).numpy().tobytes() == values.numpy().tobytes()


def test_bfloat16_rounds_to_nearest_even_like_torch() -> None:
    patterns = np.random.default_rng(1).integers(0, 2**32, 20_000, dtype=np.uint32)
    values = torch.from_numpy(patterns.view(np.float32))
    values = values[values.abs() < 3e38]
    expected = values.to(torch.bfloat16).to(torch.float32)
    assert torch.equal(through("bfloat16", values), expected)


def test_int8_error_is_at_most_half_a_step() -> None:
    values = noise(1000) * torch.logspace(-30, 30, 1000)
    decoded = through("int8", values)
    for start in range(0, 1000, 256):
        block, said = values[start : start + 256].double(), decoded[start : start + 256].double()
        step = 2.0 ** np.ceil(np.log2(float(block.abs().max()) / 127))
        assert float((block - said).abs().max()) <= step / 2


@pytest.mark.parametrize(
    ("value", "code", "scale"),
    [
        (127.0, 127, 126),
        (127.1, 64, 127),
        (128.0, 64, 127),
        (-127.0, -127, 126),
        (1.0, 64, 120),
        (127.75, 64, 127),
        (2.0**-126, 1, 0),
        (2.0**-128, 0, 0),
        (127 * 2.0**121, 127, 247),
        (0.0, 0, 0),
    ],
)
def test_int8_takes_the_smallest_scale_that_fits(value: float, code: int, scale: int) -> None:
    codes = Int8Blocks().codes(torch.tensor([[value, 0.0]]))
    assert codes.codes_RW.tolist() == [[code, 0]]
    assert codes.scales_R.tolist() == [scale]


def test_topk_takes_the_largest_and_of_equal_ones_the_first() -> None:
    values = torch.tensor([1.0, -2.0, 2.0, 2.0, 0.5, 0.0, 3.0, 3.0])
    expected = [0.0, -2.0, 2.0, 0.0, 0.0, 0.0, 3.0, 3.0]
    assert through("topk:4:2:float32", values).tolist() == expected


def test_topk_agrees_with_a_sort() -> None:
    values = noise(4096 * 3 + 100)
    decoded = through("topk:4096:64:float32", values)
    for start in range(0, len(values), 4096):
        chunk, said = values[start : start + 4096], decoded[start : start + 4096]
        kept = sorted(range(len(chunk)), key=lambda i: (-abs(float(chunk[i])), i))[:64]
        assert said.nonzero().flatten().tolist() == sorted(kept)
        assert torch.equal(said[kept], chunk[kept])


def test_topk_sends_no_zeros() -> None:
    values = torch.zeros(128)
    values[70] = 1.0
    payload = section("topk:64:5:int8", values)
    assert payload[HEADER.size :] == struct.pack("<HHBBHb", 0, 1, 0, 120, 6, 64)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 100, 257])
def test_values_that_are_not_finite_are_refused_by_name(name: str, bad: float, place: int) -> None:
    values = noise(258)  # the last chunk of 64 has two values, fewer than k
    values[place] = bad
    assert "non-finite" in refusal(name, section(name, values), 258)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_values_that_round_to_infinity_are_refused(name: str) -> None:
    largest = float(np.finfo(np.float32).max)
    assert "non-finite" in refusal(name, section(name, torch.tensor([largest])), 1)


@pytest.mark.parametrize("name", NAMES)
def test_broken_headers_and_lengths_are_refused(name: str) -> None:
    payload = bytes(section(name, noise(300)))
    for place in (0, 4, 5, 6, 7, 8, 12, 16, 24, 32, 40):
        broken = bytearray(payload)
        broken[place] ^= 1
        refusal(name, broken, 300)
    for length in (0, 1, 47, 48, len(payload) - 1):
        refusal(name, payload[:length], 300)
    assert refusal(name, payload + bytes(10_000), 300).startswith("oversized")
    refusal(name, payload, 301)
    refusal(name, payload, 299)


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 1200 + 2**32])
def test_lengths_that_overflow_are_refused(length: int) -> None:
    payload = section("float32", noise(300))
    payload[24:32] = struct.pack("<Q", length)
    refusal("float32", payload, 300)


def test_lengths_that_cancel_are_refused() -> None:
    payload = section("float32", noise(300))
    payload[24:48] = struct.pack("<QQQ", 1200 - 8, 0, 8)
    assert "wrong shape" in refusal("float32", payload, 300)


def sparse(counts: list[int], indices: list[int], codes: list[float]) -> bytes:
    """A payload of codec topk:64:5:float32 for 100 values (chunks of 64 and 36), by hand."""
    body = struct.pack(f"<{len(counts)}H", *counts) + struct.pack(f"<{len(indices)}H", *indices)
    body += struct.pack(f"<{len(codes)}f", *codes)
    return HEADER.pack(b"TBUP", 1, 1, 1, 0, 64, 5, 100, len(body), 0, 0) + body


def test_a_sparse_payload_written_by_hand_is_read() -> None:
    decoded = get_codec("topk:64:5:float32").decode(
        sparse([2, 1], [3, 63, 35], [1.0, 2.0, 3.0]), layout_of(100)
    )
    assert {i: v for i, v in enumerate(decoded.parameters_D.tolist()) if v} == {3: 1, 63: 2, 99: 3}


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (sparse([6, 0], [*range(6)], [1.0] * 6), "more than k"),
        (sparse([2, 0], [3, 3], [1.0, 2.0]), "ascend"),
        (sparse([2, 0], [4, 3], [1.0, 2.0]), "ascend"),
        (sparse([1, 0], [64], [1.0]), "beyond its chunk"),
        (sparse([1, 0], [65535], [1.0]), "beyond its chunk"),
        (sparse([0, 1], [36], [1.0]), "beyond its chunk"),
        (sparse([1, 0], [3], [0.0]), "a zero"),
        (sparse([1, 0], [3], [-0.0]), "a zero"),
        (sparse([1, 0], [3], [1.0, 1.0]), "too long"),
        (sparse([2, 0], [3, 4], [1.0]), "too short"),
        (sparse([65535, 65535], [3], [1.0]), "more than k"),
        (sparse([1], [], []), "too short"),
        (sparse([1, 0], [3], [float("nan")]), "non-finite"),
    ],
)
def test_sparse_faults_have_their_reasons(payload: bytes, reason: str) -> None:
    assert reason in refusal("topk:64:5:float32", payload, 100)


@pytest.mark.parametrize(
    ("scale", "codes", "reason"),
    [
        (121, [32, 0], "larger than its block needs"),
        (120, [-128, 0], "-128"),
        (1, [0, 0], "larger than its block needs"),
        (248, [64, 0], "non-finite"),
        (255, [64, 0], "non-finite"),
    ],
)
def test_int8_faults_have_their_reasons(scale: int, codes: list[int], reason: str) -> None:
    payload = section("int8", torch.tensor([1.0, 0.0]))
    payload[HEADER.size :] = struct.pack("<Bbb", scale, *codes)
    assert reason in refusal("int8", payload, 2)


def test_impossible_buffers_are_refused() -> None:
    layout, codec = StateLayout.from_module(nn.BatchNorm1d(1)), get_codec("float32")
    sound = Update(torch.zeros(2), torch.tensor([0.0, 1.0]), torch.tensor([1]))
    codec.decode(codec.encode(sound)[0], layout)
    for change, reason in (
        ({"float_buffers_B": torch.tensor([torch.nan, 1.0])}, "non-finite buffers"),
        ({"float_buffers_B": torch.tensor([0.0, -1.0])}, "negative running variance"),
    ):
        with pytest.raises(DecodeError, match=reason):
            codec.decode(codec.encode(replace(sound, **change))[0], layout)


@pytest.mark.parametrize("rule", ["krum", "median", "arc+nnm+trimmed_mean", "mean"])
def test_raw_sparse_messages_are_refused_under_robust_rules(rule: str) -> None:
    codec = get_codec("topk:4096:64")
    with pytest.raises(PreconditionError, match="top-k messages"):
        codec.check(rule, 1)
    codec.check(rule, 0)
    codec.check("norm_clipping+mean", 2)
    for dense in ("float32", "bfloat16", "int8"):
        get_codec(dense).check(rule, 2)


@pytest.mark.parametrize(
    "name",
    ["", "gzip", "topk", "topk:64", "topk:0:0", "topk:64:65", "topk:65537:5", "topk:64:-1",
     "topk:64:5:int4", "topk:64:5:int8:x", "int8:64:5", "topk:06:5", "topk:64:٥",
     "topk:65536:65536"],
)  # fmt: skip
def test_unknown_codecs_are_named(name: str) -> None:
    with pytest.raises(PreconditionError):
        get_codec(name)


@pytest.mark.parametrize("name", NAMES)
def test_error_feedback_loses_nothing(name: str) -> None:
    codec, residual = get_codec(name), Residual.zero(layout_of(300))
    said, meant = torch.zeros(300, dtype=torch.float64), torch.zeros(300, dtype=torch.float64)
    for seed in range(30):
        payload, pending = codec.encode(update_of(noise(300, seed)), residual)
        said += codec.decode(payload, layout_of(300)).parameters_D
        meant += noise(300, seed)
        residual = pending.settled(accepted=True)
        assert torch.allclose(said + residual.values_D, meant, atol=1e-6)


def test_a_refused_payload_goes_back_into_the_residual() -> None:
    codec = get_codec("int8")
    update = update_of(noise(300))
    _, pending = codec.encode(update)
    assert torch.equal(pending.settled(accepted=False).values_D, update.parameters_D)
    assert not torch.equal(pending.settled(accepted=True).values_D, update.parameters_D)


def test_refusals_in_a_row_never_let_the_message_grow() -> None:
    codec, residual = get_codec("topk:64:5"), Residual.zero(layout_of(300))
    update = update_of(torch.ones(300))
    for _ in range(20):
        _, pending = codec.encode(update, residual)
        residual = pending.settled(accepted=False)
        norm = float(residual.values_D.norm())
        assert norm == pytest.approx(float(update.parameters_D.norm()), rel=1e-5)


def test_a_diverged_update_does_not_spoil_later_messages() -> None:
    values = noise(300)
    values[7] = torch.nan
    for name in NAMES:
        for accepted in (True, False):
            _, pending = get_codec(name).encode(update_of(values))
            assert not bool(pending.settled(accepted).values_D.any())


def test_a_residual_of_another_model_is_misuse() -> None:
    with pytest.raises(MisuseError):
        get_codec("int8").encode(update_of(noise(300)), Residual.zero(layout_of(299)))
