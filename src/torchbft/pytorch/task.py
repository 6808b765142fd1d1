"""A replayable task: everything that decides an inner step, as one class in one source file.

The run file holds the sha256 of that file and the root of the start state, so that peers (and
later auditors) run the same code from the same place. The swarm never ships code.
"""

from __future__ import annotations

import hashlib
import importlib.util
import inspect
import sys
from abc import ABC, abstractmethod
from importlib.abc import SourceLoader
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import RunSpec
from torchbft.pytorch.data import Batch, MapStyle
from torchbft.pytorch.work import initial_state
from torchbft.tensors.state import AgreedState


class Task(ABC):
    """What to train and how. Subclass it in a file of its own.

    ``train_set`` is a map-style data set, the same on every peer unless data is private. A task
    draws its randomness from ``rng`` or from torch's own generator, which is seeded before each
    batch; it holds no state that an inner step changes.
    """

    train_set: MapStyle
    classes: int | None = None
    """Number of labels, where the task is a classification."""

    @abstractmethod
    def build_model(self) -> nn.Module:
        """A fresh model; called once with torch's generator seeded from the run file."""

    @abstractmethod
    def build_optimizer(self, model: nn.Module) -> Optimizer:
        """The inner optimizer of ``model``."""

    def learning_rate(self, step: int) -> float | None:
        """The inner learning rate of a step, counted from the start of the run; None leaves the
        optimizer's own."""
        return None

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch, rng: torch.Generator) -> Tensor:
        """The mean loss of a batch, a scalar with a gradient."""

    @abstractmethod
    def evaluate(self, model: nn.Module) -> tuple[float, float | None]:
        """(loss, accuracy in 0 … 1 or None) on held-out data; the model is in eval mode."""


def source_digest(task: Task) -> str:
    """Hex sha256 of the task's source file, as ``sha256sum`` prints it."""
    found = inspect.getsourcefile(type(task))
    if found is None or not Path(found).is_file():
        raise ConfigError(
            f"the source of {type(task).__name__} is not a file",
            where="task",
            hint="a replayable task lives in a file of its own, not in a console",
        )
    return hashlib.sha256(Path(found).read_bytes()).hexdigest()


def seeded(run: RunSpec, purpose: str, *numbers: int, peer: str = "") -> int:
    """A 63-bit seed that every peer computes alike, from the run's seed and what it is for."""
    place = b"".join(number.to_bytes(8, "big") for number in numbers)
    digest = sha256("task/seed", bytes.fromhex(run.seed), purpose.encode(), peer.encode(), place)
    return int.from_bytes(digest[:8], "big") >> 1


def build_model(task: Task, run: RunSpec) -> nn.Module:
    """The task's model with start values from the run's seed; torch's generator is left alone."""
    with torch.random.fork_rng():
        torch.manual_seed(seeded(run, "model"))
        return task.build_model()


def start_state(task: Task, run: RunSpec) -> AgreedState:
    """The state before round 0. Its root stands in the run file (``task.start_root``)."""
    return initial_state(build_model(task, run), run)


class TaskStep:
    """Runs a task's inner steps for one peer. The same arguments give the same step."""

    def __init__(
        self, task: Task, model: nn.Module, optimizer: Optimizer, run: RunSpec, peer: str
    ) -> None:
        self._task, self._model, self._optimizer = task, model, optimizer
        self._run, self._peer = run, peer
        self._rng = torch.Generator()

    def __call__(self, batch: Batch, *, round: int, index: int, base: int) -> Tensor:
        """Train on batch ``index`` of a round that began at inner step ``base``; its loss."""
        accumulate = self._run.training.accumulate
        step, part = divmod(index, accumulate)
        if part == 0:
            self._optimizer.zero_grad(set_to_none=True)
        seed = seeded(self._run, "batch", round, index, peer=self._peer)
        _seed_torch(seed)
        loss = self._task.loss(self._model, batch, self._rng.manual_seed(seed))
        (loss / accumulate if accumulate > 1 else loss).backward()  # type: ignore[no-untyped-call]
        if part == accumulate - 1:
            self._set_rate(base + step)
            self._optimizer.step()
        return loss.detach()

    def _set_rate(self, step: int) -> None:
        rate = self._task.learning_rate(step)
        if rate is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = rate


def _seed_torch(seed: int) -> None:
    """As ``torch.manual_seed``, which costs a millisecond where CUDA was never used."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.manual_seed_all(seed)


def evaluate(task: Task, model: nn.Module) -> tuple[float, float | None]:
    """The task's own evaluation, without gradients, in eval mode; modes are put back after."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    with torch.no_grad():
        measured = task.evaluate(model)
    for module, training in modes:
        module.training = training
    return measured


class _Checked(SourceLoader):
    """Imports exactly the bytes that were hashed."""

    def __init__(self, path: Path, source: bytes) -> None:
        self._path, self._source = path, source

    def get_filename(self, fullname: str) -> str:
        return str(self._path)

    def get_data(self, path: str | bytes) -> bytes:
        return self._source


def load_task(spec: str, digest: str = "") -> Task:
    """The task of ``file.py:Class`` or of a name that torchbft ships.

    ``digest``: sha256 that the source file must have (the run file's), or empty. Raises
    ConfigError before any of the file's code runs when it differs.
    """
    from torchbft.pytorch.tasks import get_task

    if ".py:" not in spec:
        task = get_task(spec)
        _check_digest(source_digest(task), digest, spec)
        return task
    file, _, name = spec.rpartition(":")
    path = Path(file).resolve()
    try:
        source = path.read_bytes()
    except OSError as error:
        raise ConfigError(f"cannot be read ({error.strerror})", where=str(path)) from None
    _check_digest(hashlib.sha256(source).hexdigest(), digest, str(path))
    module = _import(path, source)
    tasks = {
        key: kind
        for key, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, Task) and not inspect.isabstract(kind)
    }
    if name not in tasks:
        raise ConfigError(
            f"has no Task named {name!r}",
            where=str(path),
            hint=f"it has {', '.join(tasks) or 'none that is complete'}; --task file.py:Class",
        )
    return tasks[name]()


def _import(path: Path, source: bytes) -> ModuleType:
    name = f"torchbft_task_{hashlib.sha256(source).hexdigest()[:16]}"
    spec = importlib.util.spec_from_loader(name, _Checked(path, source), origin=str(path))
    if spec is None or spec.loader is None:
        raise ConfigError("cannot be imported", where=str(path))
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    sys.modules[name] = module  # where inspect and dataclasses look for the class's source
    spec.loader.exec_module(module)
    return module


def _check_digest(found: str, wanted: str, where: str) -> None:
    if wanted and found != wanted:
        raise ConfigError(
            f"its sha256 is {found[:16]}…, but the run file names {wanted[:16]}…",
            where=where,
            hint="run the task file that the members signed; the swarm never ships code",
        )
