"""Fashion-MNIST (60,000 + 10,000 images of 28 x 28) from the Debian package, and a small CNN.

The network has 37,969 parameters: the size at which rounds are benchmarked.
"""

from __future__ import annotations

import gzip
import struct
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from torchbft.primitives.errors import ConfigError
from torchbft.pytorch.data import Batch
from torchbft.pytorch.task import Task

FOLDER = Path("/usr/share/datasets/fashion-mnist")
SIDE, CLASSES = 28, 10
BRIGHTEST = 255.0
IMAGES, LABELS = 2051, 2049
"""First numbers of IDX files of bytes with three dimensions and with one."""
EVALUATED = 2000
"""Held-out images that an evaluation uses: ± 0.7 points at 90 %, in a fifth of the time."""
LEARNING_RATE, MOMENTUM = 0.05, 0.9


class FashionMNIST(Task):
    """Classify clothes. Images stay uint8 until a batch is used."""

    classes = CLASSES

    def __init__(self, folder: Path = FOLDER) -> None:
        self.train_set = TensorDataset(*_pair(folder, "train"))
        images, labels = _pair(folder, "t10k")
        self.test_set = TensorDataset(images[:EVALUATED], labels[:EVALUATED])

    def build_model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(16, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 7 * 7, 21),
            nn.ReLU(),
            nn.Linear(21, CLASSES),
        )

    def build_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)

    def loss(self, model: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor:
        images, labels = batch
        return functional.cross_entropy(model(_scaled(images)), labels)

    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        images, labels = self.test_set.tensors
        logits = model(_scaled(images))
        correct = (logits.argmax(dim=1) == labels).sum().item()
        return float(functional.cross_entropy(logits, labels)), correct / len(labels)


def _scaled(images: Tensor) -> Tensor:
    """uint8 (B, 1, 28, 28) to float32 in −0.5 … 0.5."""
    return images.to(torch.float32) / BRIGHTEST - 0.5


def _pair(folder: Path, name: str) -> tuple[Tensor, Tensor]:
    """Images uint8 (N, 1, 28, 28) and labels int64 (N)."""
    images = _idx(folder / f"{name}-images-idx3-ubyte.gz", IMAGES)
    labels = _idx(folder / f"{name}-labels-idx1-ubyte.gz", LABELS)
    return images[:, None], labels.to(torch.int64)


def _idx(path: Path, magic: int) -> Tensor:
    """A gzip IDX file of bytes, by its own shape."""
    try:
        raw = gzip.decompress(path.read_bytes())
    except (OSError, EOFError) as error:
        raise ConfigError(
            f"cannot be read ({error})",
            where=str(path),
            hint="install it: apt-get install dataset-fashion-mnist; or use the task digits",
        ) from None
    dimensions = 3 if magic == IMAGES else 1
    found, *shape = struct.unpack_from(f">{1 + dimensions}I", raw)
    if found != magic:
        raise ConfigError(f"is no IDX file of kind {magic}", where=str(path))
    values = torch.frombuffer(bytearray(raw), dtype=torch.uint8, offset=4 + 4 * dimensions)
    return values.view(*shape)
