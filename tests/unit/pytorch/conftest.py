"""A small classification that any test can train on, and one loop over it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchbft.pytorch.session import Swarm


@pytest.fixture(scope="session")
def points() -> TensorDataset:
    """96 points of 6 numbers in three classes."""
    generator = torch.Generator().manual_seed(7)
    labels = torch.arange(96) % 3
    inputs = torch.randn(96, 6, generator=generator) + functional.one_hot(labels, 6) * 3.0
    return TensorDataset(inputs, labels)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def run_loop(
    swarm: Swarm,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train_set: TensorDataset,
    *,
    each: Callable[[int], None] = lambda count: None,
) -> int:
    """A user's loop. ``each`` is called with the number of batches so far; returns that number."""
    count = 0
    for x, y in swarm.batches(train_set):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        count += 1
        each(count)
    return count


@pytest.fixture
def loop() -> Callable[..., int]:
    return run_loop
