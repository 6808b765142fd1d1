"""The README's Python blocks run as they stand.

A block is run when the line before its fence is ``<!-- test: NAME -->``; NAME says what surrounds
it: ``loop`` gives a model, an optimizer, a scheduler and a train set, and a node of its own in the
place of the one that ``run.toml`` names. Blocks without such a line are for reading.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import torchbft
from torchbft.primitives.runspec import dump_run
from torchbft.pytorch import connection
from torchbft.pytorch.solo import SoloNode, local_run
from torchbft.pytorch.tasks.digits import Digits

README = Path(__file__).resolve().parents[2] / "README.md"
MARKED = re.compile(r"<!-- test: (\w+) -->\n```python\n(.*?)```", re.DOTALL)
ROUNDS = 2


def marked(text: str) -> list[tuple[str, str]]:
    """(name, code) of every block that asks to be run."""
    return MARKED.findall(text)


def surroundings() -> dict[str, Any]:
    """What the three-line example expects of the user's own program."""
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 10)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return {
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 100),
        "train_set": Digits().train_set,
        "cross_entropy": torch.nn.functional.cross_entropy,
        "torch": torch,
    }


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SoloNode:
    """A folder with a ``run.toml`` and one peer, whose node runs in this process."""
    run = local_run(1, training={"rounds": ROUNDS, "inner_steps": 3}, data={"samples": 1352})
    (tmp_path / "run.toml").write_text(dump_run(run))
    (tmp_path / "peers" / "peer-00").mkdir(parents=True)
    (tmp_path / "peers" / "peer-00" / "identity.key").touch()
    alone = SoloNode(run)
    monkeypatch.setattr(connection, "connect", lambda path, folder: alone)
    monkeypatch.chdir(tmp_path)
    return alone


def run_loop(code: str, node: SoloNode) -> torchbft.Swarm:
    """Run a loop's block and return its session."""
    space = surroundings()
    exec(compile(code, str(README), "exec"), space)
    swarm = space["swarm"]
    assert isinstance(swarm, torchbft.Swarm)
    assert swarm.over is not None
    assert swarm.over.status == "finished"
    assert len(node.swarm.payloads) == ROUNDS
    return swarm


def test_the_three_line_example_runs(node: SoloNode) -> None:
    blocks = [code for name, code in marked(README.read_text()) if name == "loop"]
    assert blocks, "the README shows the three-line change in a block marked <!-- test: loop -->"
    swarm = run_loop(blocks[0], node)
    assert swarm.state.round == ROUNDS


def test_every_marked_block_is_known_and_every_block_compiles() -> None:
    text = README.read_text()
    assert {name for name, _ in marked(text)} <= {"loop"}
    for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        compile(code, str(README), "exec")


def test_the_reader_of_blocks_finds_only_marked_ones() -> None:
    text = "```python\na\n```\n<!-- test: loop -->\n```python\nb\n```\n```toml\nc\n```\n"
    assert marked(text) == [("loop", "b\n")]


def test_a_block_that_does_not_join_fails(node: SoloNode) -> None:
    with pytest.raises(KeyError, match="swarm"):
        run_loop("for x, y in [(1, 2)]:\n    pass\n", node)
