"""What a peer contributes, and each reason for which it is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from torchbft.tensors import update as updates
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update, check, difference


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def test_the_difference_is_start_minus_end_in_canonical_order() -> None:
    net = model()
    nn.init.ones_(net[0].bias)
    state = AgreedState.initial(net)
    with torch.no_grad():
        net[0].bias += torch.tensor([1.0, -2.0])
        net[1].running_mean += 5
        net[1].num_batches_tracked += 3
    update = difference(state, net)
    assert update.parameters_D.tolist() == [-1.0, 2.0, *[0.0] * 8]
    assert update.float_buffers_B.tolist() == [5.0, 5.0, 1.0, 1.0]
    assert update.int_buffers_I.tolist() == [3]
    assert check(update, state.layout) is None


def test_frozen_parameters_contribute_zeros() -> None:
    net = model()
    state = AgreedState.initial(net)
    net[0].weight.requires_grad_(False)
    assert difference(state, net).parameters_D.shape == state.parameters_D.shape


STATE = AgreedState.initial(model())
SOUND = difference(STATE, model())


def holding(values: torch.Tensor, value: float) -> torch.Tensor:
    changed = values.clone()
    changed[-1] = value
    return changed


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (replace(SOUND, parameters_D=torch.zeros(7)), updates.WRONG_SHAPE),
        (replace(SOUND, parameters_D=torch.zeros(1, 10)), updates.WRONG_SHAPE),
        (replace(SOUND, int_buffers_I=torch.zeros((), dtype=torch.int64)), updates.WRONG_SHAPE),
        (replace(SOUND, parameters_D=SOUND.parameters_D.double()), updates.WRONG_DTYPE),
        (replace(SOUND, int_buffers_I=torch.zeros(1)), updates.WRONG_DTYPE),
        (replace(SOUND, parameters_D=holding(SOUND.parameters_D, torch.nan)), "non-finite p"),
        (replace(SOUND, parameters_D=holding(SOUND.parameters_D, -torch.inf)), "non-finite p"),
        (replace(SOUND, float_buffers_B=holding(STATE.float_buffers_B, torch.inf)), "non-finite b"),
        (replace(SOUND, float_buffers_B=holding(STATE.float_buffers_B, -1e-9)), "negative running"),
    ],
)
def test_each_fault_has_its_reason(broken: Update, reason: str) -> None:
    found = check(broken, STATE.layout)
    assert found is not None
    assert found.startswith(reason)


def test_integers_must_fit_the_buffer_they_go_to() -> None:
    net = nn.Module()
    net.register_buffer("flags", torch.tensor([True, False]))
    net.register_buffer("small", torch.tensor(3, dtype=torch.uint8))
    state = AgreedState.initial(net)
    sound = difference(state, net)
    assert check(sound, state.layout) is None
    for numbers in ([2, 0, 3], [-1, 0, 3], [1, 0, 256], [1, 0, -(2**63)]):
        broken = replace(sound, int_buffers_I=torch.tensor(numbers))
        assert check(broken, state.layout) == updates.INTEGER_RANGE
