"""Tasks that torchbft ships, by name."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from torchbft.primitives.errors import ConfigError

if TYPE_CHECKING:
    from torchbft.pytorch.task import Task

_TASKS = {"digits": "Digits", "fashion_mnist": "FashionMNIST", "kjv": "KingJamesBible"}


def names() -> tuple[str, ...]:
    """The names that ``get_task`` knows."""
    return tuple(_TASKS)


def get_task(name: str) -> Task:
    """The task of this name (``fashion-mnist`` means ``fashion_mnist``). Raises ConfigError."""
    module = name.replace("-", "_")
    if module not in _TASKS:
        raise ConfigError(
            f"no task is named {name[:40]!r}",
            where="task",
            hint=f"one of {', '.join(_TASKS)}, or file.py:Class for your own",
        )
    home = importlib.import_module(f"torchbft.pytorch.tasks.{module}")
    task: Task = getattr(home, _TASKS[module])()
    return task
