"""A small signed run, its states and updates, for the parts of a node."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest
import torch
from torch import nn

from torchbft.node.model import ModelKeeper
from torchbft.node.storage.checkpoints import Checkpoints
from torchbft.node.storage.payloads import PayloadStore
from torchbft.primitives.ids import PeerId, Round
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec, Task, Training, new_member
from torchbft.tensors.advance import LedgerFields
from torchbft.tensors.recipe import Recipe
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update

sys.path.insert(0, str(Path(__file__).parent))  # for ``node_swarm``
NAMES = tuple(PeerId(f"peer-{letter}") for letter in "abcd")


def model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Linear(3, 2)


def run_of(names: tuple[PeerId, ...] = NAMES, *, start_root: str = "") -> RunSpec:
    """A run of these members, unsigned."""
    members = tuple(
        new_member(n, SigningKey.derive(bytes(32), n), SigningKey.derive(bytes(32), n + "/voting"))
        for n in names
    )
    return RunSpec(
        name="small",
        seed="22" * 32,
        members=members,
        training=Training(rounds=5, inner_steps=2),
        task=Task(start_root=start_root),
    )


@dataclass
class Kept:
    """A keeper with what it stands on; ``again()`` is the same peer after a restart."""

    run: RunSpec
    recipe: Recipe
    folder: Path
    initial: AgreedState
    store: PayloadStore
    checkpoints: Checkpoints
    keeper: ModelKeeper

    def again(self) -> Kept:
        return kept(self.run, self.folder, self.initial)

    def payload(self, value: float, round: int = 0) -> bytes:
        """Store an update whose parameters all have one value; returns its root."""
        return self.store.put(self.encoded(value), Round(round))

    def encoded(self, value: float) -> bytes:
        values_D = torch.full((self.initial.layout.parameter_count,), value)
        update = Update(values_D, torch.zeros(0), torch.zeros(0, dtype=torch.int64))
        return self.recipe.codec.encode(update)[0]

    def fields(self, round: int) -> LedgerFields:
        return LedgerFields(round + 1, 2 * (round + 1), 0, 0, bytes(32), bytes(32))

    def apply(self, round: int, value: float = 0.5) -> bytes:
        """Apply a round in which all four sent the same; returns the new root."""
        root = self.payload(value, round)
        applied = self.keeper.apply(
            round,
            self.keeper.current().root(),
            [(name, root) for name in NAMES],
            1,
            self.fields(round),
        )
        assert applied is not None
        assert applied.round == round
        return applied.root


def kept(run: RunSpec, folder: Path, initial: AgreedState) -> Kept:
    folder.mkdir(exist_ok=True)
    recipe = Recipe.of(run)
    store = PayloadStore(folder / "payloads")
    checkpoints = Checkpoints(folder / "checkpoints")
    keeper = ModelKeeper(run, recipe, folder, checkpoints, store)
    return Kept(run, recipe, folder, initial, store, checkpoints, keeper)


@pytest.fixture
def initial() -> AgreedState:
    return AgreedState.initial(model(), rule=Recipe.of(run_of()).rule)


@pytest.fixture
def peer(tmp_path: Path, initial: AgreedState) -> Callable[[str], Kept]:
    """``peer("a")``: a fresh keeper in a folder of its own, in a run that names the start root."""
    run = msgspec.structs.replace(run_of(), task=Task(start_root=initial.root().hex()))
    return lambda name: kept(run, tmp_path / name, initial)


@pytest.fixture
def started(peer: Callable[[str], Kept], initial: AgreedState) -> Kept:
    """A keeper that began from the run's start state."""
    made = peer("me")
    made.keeper.begin(initial)
    return made
