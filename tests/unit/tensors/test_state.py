"""The agreed state: its root, its file, and low-precision models. Case C22."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from torchbft.primitives.errors import DecodeError, MisuseError, StorageError
from torchbft.primitives.ids import PeerId
from torchbft.tensors import aggregation
from torchbft.tensors.advance import LedgerFields, advance
from torchbft.tensors.outer import OuterSGD
from torchbft.tensors.state import AgreedState, StateLayout
from torchbft.tensors.state_root import TILE, tensor_root
from torchbft.tensors.update import difference

RULE = aggregation.get("centred_clipping")
DIGEST = bytes(range(32))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))


def small_state() -> AgreedState:
    return AgreedState.initial(small_model(), rule=RULE, membership_digest=DIGEST)


def bumped(values: torch.Tensor, at: int = 0) -> torch.Tensor:
    other = values.clone()
    other[at] += 1
    return other


def history_bumped(state: AgreedState) -> dict[str, torch.Tensor]:
    return {key: bumped(value) for key, value in state.rule_state.items()}


CHANGES: dict[str, Callable[[AgreedState], dict[str, object]]] = {
    "parameters": lambda s: {"parameters_D": bumped(s.parameters_D, 20)},
    "float_buffers": lambda s: {"float_buffers_B": bumped(s.float_buffers_B)},
    "int_buffers": lambda s: {"int_buffers_I": bumped(s.int_buffers_I)},
    "outer_momentum": lambda s: {"outer_momentum_D": bumped(s.outer_momentum_D)},
    "history": lambda s: {"rule_state": history_bumped(s)},
    "history_name": lambda s: {"rule_state": {"x" + k: v for k, v in s.rule_state.items()}},
    "history_dtype": lambda s: {"rule_state": {k: v.double() for k, v in s.rule_state.items()}},
    "no_history": lambda s: {"rule_state": {}},
    "round": lambda s: {"round": 1},
    "inner_step": lambda s: {"inner_step": 1},
    "pass_index": lambda s: {"pass_index": 1},
    "cursor": lambda s: {"cursor": 1},
    "membership": lambda s: {"membership_digest": bytes(32)},
    "credit": lambda s: {"credit_digest": DIGEST},
    "ties": lambda s: {"layout": StateLayout(s.layout.tensors, (("z", "0.bias"),))},
}


def test_the_root_covers_every_field() -> None:
    state = small_state()
    roots = [replace(state, **change(state)).root() for change in CHANGES.values()]
    assert len({state.root(), *roots}) == len(CHANGES) + 1
    assert small_state().root() == state.root(), "equal states have equal roots"


@pytest.mark.parametrize("shape", [(1, 1), (64, 64), (65, 64), (3, 200), (130, 130)])
def test_every_value_of_a_matrix_is_in_its_root(shape: tuple[int, int]) -> None:
    matrix = torch.zeros(shape)
    plain = tensor_root("w", matrix)
    last_row, last_column = shape[0] - 1, shape[1] - 1
    for place in [(0, 0), (last_row, 0), (0, last_column), (last_row, last_column)]:
        changed = matrix.clone()
        changed[place] = 1.0
        assert tensor_root("w", changed) != plain


def test_a_tile_is_not_mistaken_for_its_neighbour() -> None:
    matrix = torch.arange(2.0 * TILE * TILE).view(TILE, 2 * TILE)
    swapped = torch.cat([matrix[:, TILE:], matrix[:, :TILE]], dim=1)
    assert tensor_root("w", matrix) != tensor_root("w", swapped)


def test_roots_tell_names_dtypes_and_shapes_apart() -> None:
    zeros = torch.zeros(6)
    variants = [
        tensor_root("a", zeros),
        tensor_root("b", zeros),
        tensor_root("a", zeros.view(2, 3)),
        tensor_root("a", zeros.view(3, 2)),
        tensor_root("a", zeros.to(torch.int32)),
        tensor_root("a", -zeros),
        tensor_root("a", torch.zeros(())),
        tensor_root("a", torch.zeros(0)),
    ]
    assert len(set(variants)) == len(variants)


def test_long_vectors_span_several_leaves() -> None:
    vector = torch.zeros(40_000)
    assert tensor_root("v", bumped(vector, 39_999)) != tensor_root("v", vector)
    assert tensor_root("v", bumped(vector, 16_384)) != tensor_root("v", bumped(vector, 16_383))


def test_a_file_gives_the_state_back(tmp_path: Path) -> None:
    state = replace(
        small_state(), round=3, inner_step=60, pass_index=1, cursor=17, credit_digest=DIGEST
    )
    path = tmp_path / "state.safetensors"
    state.save(path)
    again = AgreedState.load(path, state.layout)
    assert again.root() == state.root()
    assert again.encode() == state.encode() == path.read_bytes()
    assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_loading_keeps_nothing_of_the_mapped_file(tmp_path: Path) -> None:
    state = small_state()
    path = tmp_path / "state"
    state.save(path)
    again = AgreedState.load(path)
    with path.open("r+b") as file:
        file.seek(-200, 2)
        file.write(b"\xff" * 200)
    assert again.root() == state.root()


def test_storage_faults_are_storage_errors(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="could not be read"):
        AgreedState.load(tmp_path / "absent")
    with pytest.raises(StorageError, match="could not be written"):
        small_state().save(tmp_path / "absent" / "state")


def with_metadata(change: Callable[[list[object]], object], indent: int = 0) -> bytes:
    data = small_state().encode()
    header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
    facts = msgspec.json.decode(header["__metadata__"]["torchbft"])
    change(facts)
    text = msgspec.json.encode(facts)
    return save(
        load(data),
        {"torchbft": (msgspec.json.format(text, indent=indent) if indent else text).decode()},
    )


def with_tensors(**changes: torch.Tensor | None) -> bytes:
    data = small_state().encode()
    header = msgspec.json.decode(data[8 : 8 + int.from_bytes(data[:8], "little")])
    tensors = {k: v for k, v in (load(data) | changes).items() if v is not None}
    return save(tensors, header["__metadata__"])


FOREIGN = {
    "empty": lambda: b"",
    "no header": lambda: bytes(64),
    "header beyond the file": lambda: (1 << 40).to_bytes(8, "little") + bytes(100),
    "no metadata": lambda: save({"parameters": torch.zeros(3)}),
    "later version": lambda: with_metadata(lambda facts: facts.__setitem__(0, 2)),
    "negative counter": lambda: with_metadata(lambda facts: facts.__setitem__(3, [-1, 0, 0, 0])),
    "huge counter": lambda: with_metadata(lambda facts: facts.__setitem__(3, [1 << 63, 0, 0, 0])),
    "short digest": lambda: with_metadata(lambda facts: facts.__setitem__(4, "00")),
    "no digest": lambda: with_metadata(lambda facts: facts.__setitem__(4, "zz")),
    "unknown fact": lambda: with_metadata(lambda facts: facts.append(1)),
    "spaces": lambda: with_metadata(lambda facts: None, indent=2),
    "unsorted names": lambda: with_metadata(lambda facts: facts[1].reverse()),
    "wrong size": lambda: with_tensors(parameters=torch.zeros(3)),
    "wrong dtype": lambda: with_tensors(int_buffers=torch.zeros(1, dtype=torch.int32)),
    "missing": lambda: with_tensors(outer_momentum=None),
    "extra": lambda: with_tensors(other=torch.zeros(1)),
    "history dtype": lambda: with_tensors(**{"rule/x": torch.zeros(1, dtype=torch.float16)}),
    "history name": lambda: with_tensors(**{"rule/" + "x" * 300: torch.zeros(1)}),
    "history count": lambda: with_tensors(**{f"rule/{i}": torch.zeros(1) for i in range(70)}),
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_foreign_files_meet_one_error(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(FOREIGN[kind]())
    with pytest.raises(DecodeError):
        AgreedState.load(path)


def test_size_and_layout_are_bounded_by_the_caller(tmp_path: Path) -> None:
    path = tmp_path / "state"
    small_state().save(path)
    with pytest.raises(DecodeError, match="within 100"):
        AgreedState.load(path, max_bytes=100)
    with pytest.raises(DecodeError, match="another layout"):
        AgreedState.load(path, StateLayout.from_module(nn.Linear(2, 2)))


def test_damaged_files_are_refused_or_have_another_root(tmp_path: Path) -> None:
    state = small_state()
    data, path, refused, told_apart = state.encode(), tmp_path / "state", 0, 0
    for place in range(0, len(data), 7):
        for damaged in (data[:place], data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :]):
            path.write_bytes(damaged)
            try:
                found = AgreedState.load(path, state.layout)
            except DecodeError:
                refused += 1
                continue
            told_apart += found.root() != state.root()
            assert found.root() != state.root() or found.encode() == data, place
    assert refused > 100
    assert told_apart > 10


def test_wrong_fields_are_misuse() -> None:
    state = small_state()
    for change in (
        {"parameters_D": state.parameters_D.double()},
        {"outer_momentum_D": state.outer_momentum_D[1:]},
        {"round": -1},
        {"credit_digest": b"short"},
    ):
        with pytest.raises(MisuseError):
            replace(state, **change)


def test_loading_into_another_model_writes_nothing() -> None:
    state, other = small_state(), nn.Linear(4, 3)
    before = other.weight.detach().clone()
    with pytest.raises(MisuseError, match="layout"):
        state.load_into(other)
    assert torch.equal(other.weight, before)


def bf16_model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2)).to(torch.bfloat16)


def train(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(3):
        x = torch.randn(8, 6, generator=generator).to(torch.bfloat16)
        gradients = torch.autograd.grad(model(x).float().square().mean(), [*model.parameters()])
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.data -= 0.05 * gradient


def test_c22_bf16_models_agree_on_a_float32_master() -> None:
    states = [AgreedState.initial(bf16_model()) for _ in range(3)]
    for number in range(3):
        updates = []
        for peer, state in enumerate(states):
            model = bf16_model()
            state.load_into(model)
            train(model, 10 * number + peer)
            updates.append((PeerId(f"p{peer}"), difference(state, model)))
        ledger = LedgerFields(number + 1, 3, 0, 0, DIGEST, DIGEST)
        arrivals = [updates, updates[::-1], updates[1:] + updates[:1]]
        states = [
            advance(
                state, seen, rule=aggregation.get("mean"), f=0, outer=OuterSGD(0.7), ledger=ledger
            )[0]
            for state, seen in zip(states, arrivals, strict=True)
        ]
        assert len({state.root() for state in states}) == 1
    start = AgreedState.initial(bf16_model())
    master = states[0].parameters_D
    assert not torch.equal(master, start.parameters_D)
    assert not torch.equal(master, states[0].layout.rounded(master)), "finer than bf16"


def test_c22_rounding_at_load_is_no_part_of_an_update() -> None:
    model = bf16_model()
    state = AgreedState.initial(model)
    fine = replace(state, parameters_D=state.parameters_D + 1e-4)
    fine.load_into(model)
    assert difference(fine, model).parameters_D.abs().max() == 0.0


def test_c22_steps_below_bf16_resolution_add_up_in_the_master() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    model.weight.data.fill_(1.0)
    state = AgreedState.initial(model)
    update = difference(state, model)
    step = replace(update, parameters_D=torch.tensor([-(2.0**-10)]))
    for _ in range(16):
        state, _ = advance(
            state,
            [(PeerId("a"), step)],
            rule=aggregation.get("mean"),
            f=0,
            outer=OuterSGD(1.0),
            ledger=LedgerFields(0, 0, 0, 0, DIGEST, DIGEST),
        )
    state.load_into(model)
    assert model.weight.item() == 1.0 + 2.0**-6
