"""The task of the round benchmark: a CNN of 38 k parameters on images that are made up.

What the images show does not matter for what agreement costs; so nothing needs to be installed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchbft.pytorch.data import Batch
from torchbft.pytorch.task import Task

SAMPLES, SIDE, CLASSES = 4096, 28, 10


class Cnn(Task):
    """Two convolutions and one hidden layer on 28 × 28 images; 38 376 parameters."""

    classes = CLASSES

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        images = torch.rand(SAMPLES, 1, SIDE, SIDE, generator=generator)
        labels = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
        self.train_set = TensorDataset(images, labels)

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 5, stride=2),
            nn.ReLU(),
            nn.Conv2d(8, 16, 3, stride=2),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(16 * 5 * 5, 90),
            nn.ReLU(),
            nn.Linear(90, CLASSES),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.01)

    def loss(self, model: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels)

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        return 0.0, None
