"""The canonical order of a model's tensors. Cases C03 and C31 of the fault collection."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchbft.primitives.errors import DecodeError, MisuseError
from torchbft.tensors.state import AgreedState, StateLayout, TensorSpec


class TiedGPT(nn.Module):
    """The part of a GPT that matters here: the output layer is the embedding."""

    def __init__(self, *, head_first: bool = False) -> None:
        super().__init__()
        if head_first:
            self.lm_head = nn.Linear(8, 20, bias=False)
        self.wte = nn.Embedding(20, 8)
        self.block = nn.Linear(8, 8)
        if not head_first:
            self.lm_head = nn.Linear(8, 20, bias=False)
        self.lm_head.weight = self.wte.weight


class Wrapper(nn.Module):
    """What torch.compile does to names."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self._orig_mod = inner


def batch_norm_model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def test_names_are_sorted_and_grouped() -> None:
    layout = StateLayout.from_module(batch_norm_model())
    assert [(t.name, t.kind) for t in layout.tensors] == [
        ("0.bias", "parameter"),
        ("0.weight", "parameter"),
        ("1.bias", "parameter"),
        ("1.num_batches_tracked", "int_buffer"),
        ("1.running_mean", "float_buffer"),
        ("1.running_var", "float_buffer"),
        ("1.weight", "parameter"),
    ]
    assert (layout.parameter_count, layout.float_buffer_count, layout.int_buffer_count) == (
        21,
        6,
        1,
    )
    assert [t.tolist() for t in layout.moments] == [[0, 1, 2], [3, 4, 5]]


def test_flatten_follows_the_order_of_names() -> None:
    model = batch_norm_model()
    flat = StateLayout.from_module(model).flatten(model)
    bias, weight = model[0].bias, model[0].weight
    expected = [*bias.tolist(), *weight.flatten().tolist(), 0, 0, 0, 1, 1, 1]
    assert flat.parameters_D.tolist() == expected
    assert flat.float_buffers_B.tolist() == [0, 0, 0, 1, 1, 1]
    flat.parameters_D.zero_()
    assert bias.abs().sum() > 0, "the flat tensor must own its values"


def test_c03_zero_dimensional_counter_survives_a_round_trip(tmp_path: object) -> None:
    model = batch_norm_model()
    state = AgreedState.initial(model)
    path = f"{tmp_path}/state.safetensors"
    state.save(path)
    model[1].num_batches_tracked += 7
    before = model[1].num_batches_tracked
    AgreedState.load(path, state.layout).load_into(model)
    counter = model[1].num_batches_tracked
    assert counter is before
    assert counter.shape == ()
    assert counter.dtype == torch.int64
    assert int(counter) == 0


def test_c31_tied_weights_are_stored_once_and_stay_tied(tmp_path: object) -> None:
    model = TiedGPT()
    state = AgreedState.initial(model)
    assert state.layout.aliases == (("wte.weight", "lm_head.weight"),)
    assert state.layout.parameter_count == 20 * 8 + 8 * 8 + 8
    state.save(f"{tmp_path}/state")
    fresh = TiedGPT()
    where = fresh.wte.weight.data_ptr()
    AgreedState.load(f"{tmp_path}/state", state.layout).load_into(fresh)
    assert fresh.wte.weight.data_ptr() == fresh.lm_head.weight.data_ptr() == where
    assert torch.equal(fresh.wte.weight, model.wte.weight)
    assert AgreedState.initial(fresh).root() == state.root()


def test_c31_the_order_of_construction_changes_nothing() -> None:
    assert StateLayout.from_module(TiedGPT()) == StateLayout.from_module(TiedGPT(head_first=True))


def test_c31_a_broken_tie_is_another_layout() -> None:
    model = TiedGPT()
    state = AgreedState.initial(model)
    model.lm_head.weight = nn.Parameter(model.wte.weight.detach().clone())
    with pytest.raises(MisuseError, match="differs from the agreed layout"):
        state.load_into(model)


def test_ties_by_shared_storage_count_as_ties() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight.data = model[0].weight.data
    assert StateLayout.from_module(model).aliases == (("1.weight", "0.weight"),)


def test_a_module_used_twice_is_stored_once() -> None:
    norm = nn.BatchNorm1d(3)
    layout = StateLayout.from_module(nn.Sequential(norm, nn.Linear(3, 3), norm))
    assert [alias for alias, _ in layout.aliases] == [
        "2.bias",
        "2.num_batches_tracked",
        "2.running_mean",
        "2.running_var",
        "2.weight",
    ]


def test_compiled_modules_have_the_plain_layout() -> None:
    plain = batch_norm_model()
    inner = nn.Sequential(Wrapper(plain[0]), plain[1])
    assert StateLayout.from_module(Wrapper(plain)) == StateLayout.from_module(plain)
    assert StateLayout.from_module(Wrapper(inner)) == StateLayout.from_module(plain)


def test_freezing_changes_no_layout_and_no_root() -> None:
    model = batch_norm_model()
    state = AgreedState.initial(model)
    model[0].requires_grad_(False)
    assert AgreedState.initial(model).root() == state.root()


def test_unsaved_buffers_are_not_state() -> None:
    model = nn.Linear(2, 2)
    model.register_buffer("mask", torch.ones(2), persistent=False)
    model.register_buffer("table", torch.ones(2))
    assert [t.name for t in StateLayout.from_module(model).tensors] == ["bias", "table", "weight"]


def test_buffers_of_every_integer_dtype_come_back_as_they_were() -> None:
    model = nn.Module()
    values = {"b": torch.tensor([True, False]), "i": torch.tensor(-3, dtype=torch.int16)}
    for name, value in values.items():
        model.register_buffer(name, value.clone())
    state = AgreedState.initial(model)
    for name in values:
        getattr(model, name).zero_()
    state.load_into(model)
    assert all(torch.equal(getattr(model, name), value) for name, value in values.items())
    assert [limit.tolist() for limit in state.layout.integer_limits] == [
        [0, 0, -(2**15)],
        [1, 1, 2**15 - 1],
    ]


def test_tensors_that_cannot_be_agreed_on_are_refused() -> None:
    complex_model = nn.Module()
    complex_model.register_buffer("z", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(MisuseError, match="complex64"):
        StateLayout.from_module(complex_model)
    with pytest.raises(MisuseError, match="no values yet"):
        StateLayout.from_module(nn.LazyLinear(3))


def test_missing_gradients_are_zero() -> None:
    model = nn.Linear(2, 1)
    model.weight.grad = torch.tensor([[2.0, 3.0]])
    assert StateLayout.from_module(model).gradients(model).tolist() == [0.0, 2.0, 3.0]


def test_non_contiguous_parameters_keep_their_logical_order() -> None:
    model = nn.Conv2d(2, 2, 2).to(memory_format=torch.channels_last)
    layout = StateLayout.from_module(model)
    flat = layout.flatten(model)
    assert torch.equal(flat.parameters_D[2:].view(2, 2, 2, 2), model.weight.detach().contiguous())


WEIGHT = TensorSpec("w", (2,), "float32", "parameter")


@pytest.mark.parametrize(
    "layout",
    [
        StateLayout((WEIGHT, WEIGHT)),
        StateLayout((WEIGHT, TensorSpec("a", (2,), "float32", "parameter"))),
        StateLayout((TensorSpec("w", (2,), "int64", "parameter"),)),
        StateLayout((TensorSpec("w", (2,), "float32", "int_buffer"),)),
        StateLayout((TensorSpec("w", (-1,), "float32", "parameter"),)),
        StateLayout((TensorSpec("w", (1,) * 17, "float32", "parameter"),)),
        StateLayout((TensorSpec("w", (1 << 30, 1 << 30), "float32", "parameter"),)),
        StateLayout((TensorSpec("w" * 1025, (1,), "float32", "parameter"),)),
        StateLayout((WEIGHT,), (("x", "v"),)),
        StateLayout((WEIGHT,), (("a", "w"),)),
        StateLayout((WEIGHT,), (("x", "w"), ("x", "w"))),
        StateLayout((WEIGHT,), (("x" * 1025, "w"),)),
        StateLayout((), tuple((f"{i:06}", "w") for i in range(70_000))),
    ],
)
def test_foreign_layouts_are_bounded(layout: StateLayout) -> None:
    with pytest.raises(DecodeError):
        layout.validate()


def test_a_sound_layout_validates_and_has_its_own_digest() -> None:
    layout = StateLayout.from_module(TiedGPT())
    layout.validate()
    untied = StateLayout(layout.tensors)
    retyped = StateLayout((TensorSpec("w", (2,), "bfloat16", "parameter"),))
    reshaped = StateLayout((TensorSpec("w", (2, 1), "float32", "parameter"),))
    digests = {x.digest() for x in (layout, untied, retyped, reshaped, StateLayout((WEIGHT,)))}
    assert len(digests) == 5
