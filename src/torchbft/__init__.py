"""Train one PyTorch model across machines that do not trust each other."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = ["RunOver", "Swarm", "Task", "__version__", "join", "robust", "train"]

if TYPE_CHECKING:
    from torchbft import robust
    from torchbft.pytorch.link import RunOver
    from torchbft.pytorch.session import Swarm, join
    from torchbft.pytorch.task import Task
    from torchbft.pytorch.train import train

_HOME = {"join": "session", "RunOver": "link", "Swarm": "session", "Task": "task", "train": "train"}


def __getattr__(name: str) -> Any:
    """Load the trainer's side, and torch with it, once it is asked for."""
    if name == "robust":
        return import_module("torchbft.robust")
    if name not in _HOME:
        raise AttributeError(f"module 'torchbft' has no attribute {name!r}")
    return getattr(import_module(f"torchbft.pytorch.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
