"""Handwritten digits (1797 images of 8 x 8, scikit-learn), always there: the default task.

An MLP with one hidden layer of 64, 4810 parameters.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchbft.pytorch.data import Batch
from torchbft.pytorch.task import Task

PIXELS, CLASSES, HIDDEN = 64, 10, 64
BRIGHTEST = 16.0
TEST_EVERY = 4
"""Every fourth image of each class, in the order of the set, is held out."""
LEARNING_RATE, SMOOTHING = 0.6, 0.1
"""Of plain SGD, and of the labels; chosen on a part of the train set. Smoothed labels bound the
weights, so that peers whose shards hold few classes do not drift far apart within a round."""


class Digits(Task):
    """Classify digits. Held out: 450 images that no tuning looked at."""

    classes = CLASSES

    def __init__(self) -> None:
        from sklearn.datasets import load_digits  # a second of import time

        raw = load_digits()
        images = torch.tensor(raw.data, dtype=torch.float32) / BRIGHTEST
        labels = torch.tensor(raw.target, dtype=torch.int64)
        held_out = _held_out(labels)
        self.train_set = TensorDataset(images[~held_out], labels[~held_out])
        self.test_set = TensorDataset(images[held_out], labels[held_out])

    def build_model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(PIXELS, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, CLASSES))

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)

    def loss(self, model: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(images), labels, label_smoothing=SMOOTHING)

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        images, labels = self.test_set.tensors
        logits = model(images)
        correct = (logits.argmax(dim=1) == labels).sum().item()
        return float(functional.cross_entropy(logits, labels)), correct / len(labels)


def _held_out(labels: Tensor) -> Tensor:
    """True for every fourth image of each class (bool, one an image)."""
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in range(CLASSES):
        held_out[(labels == label).nonzero().flatten()[TEST_EVERY - 1 :: TEST_EVERY]] = True
    return held_out
