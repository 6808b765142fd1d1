"""The outer optimizer against PyTorch's formula and against scalar IEEE arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.optim.sgd import sgd

from torchbft.primitives.errors import PreconditionError
from torchbft.tensors.outer import DILOCO, OuterSGD

SETTINGS = [OuterSGD(0.7), OuterSGD(0.3, 0.9), DILOCO]


def gradients(rounds: int, size: int) -> torch.Tensor:
    return torch.randn(rounds, size, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("outer", SETTINGS)
def test_it_follows_torch_sgd(outer: OuterSGD) -> None:
    theirs, buffers = torch.ones(40, dtype=torch.float64), [None]
    ours, momentum = torch.ones(40), torch.zeros(40)
    for gradient in gradients(6, 40):
        sgd(
            [theirs],
            [gradient.double()],
            buffers,
            weight_decay=0.0,
            momentum=outer.momentum,
            lr=outer.lr,
            dampening=0.0,
            nesterov=outer.nesterov,
            maximize=False,
            foreach=False,
        )
        ours, momentum = outer.step(ours, momentum, gradient)
    assert torch.allclose(ours.double(), theirs, atol=2e-6)


@pytest.mark.parametrize("outer", SETTINGS)
def test_every_operation_is_rounded_once(outer: OuterSGD) -> None:
    """The same bits as numpy scalars, one product or sum at a time: nothing is fused."""
    steps = gradients(4, 33).numpy()
    rate, mu = np.float32(outer.lr), np.float32(outer.momentum)
    expected = []
    for column in range(33):
        theta, m = np.float32(1.0), np.float32(0.0)
        for g in steps[:, column]:
            if outer.momentum == 0:
                theta = theta - g * rate
                continue
            m = m * mu + g
            theta = theta - (m * mu + g if outer.nesterov else m) * rate
        expected.append(theta)
    ours, momentum = torch.ones(33), torch.zeros(33)
    for gradient in torch.from_numpy(steps):
        ours, momentum = outer.step(ours, momentum, gradient)
    assert ours.numpy().tobytes() == np.array(expected, dtype=np.float32).tobytes()


@pytest.mark.parametrize("outer", SETTINGS)
def test_arguments_are_left_alone(outer: OuterSGD) -> None:
    arguments = [torch.ones(3), torch.ones(3), torch.ones(3)]
    outer.step(*arguments)
    assert all(torch.equal(argument, torch.ones(3)) for argument in arguments)


@pytest.mark.parametrize(
    "wrong",
    [{"lr": 0.0}, {"lr": float("nan")}, {"lr": 1, "momentum": 1.0}, {"lr": 1, "nesterov": True}],
)
def test_impossible_settings_raise(wrong: dict[str, float]) -> None:
    with pytest.raises(PreconditionError):
        OuterSGD(**wrong)
