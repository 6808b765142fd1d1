"""A CNN on Fashion-MNIST as a replayable task, alone or as a peer of a run.

    python examples/train_cnn.py --rounds 5               # alone, in this process
    python examples/train_cnn.py run.toml --name clinic-c # a peer of the run in run.toml

The task is the one that torchbft ships (src/torchbft/pytorch/tasks/fashion_mnist.py); your own is
a class like it in a file of yours, whose sha256 the run file names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torchbft
from torchbft.primitives.errors import TorchbftError
from torchbft.pytorch.solo import SoloNode, local_run
from torchbft.pytorch.task import start_state
from torchbft.pytorch.tasks import get_task
from torchbft.pytorch.train import train_with


def main(arguments: Sequence[str] | None = None, task_name: str = "fashion_mnist") -> int:
    """Train; returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a task that torchbft ships.")
    parser.add_argument("run", nargs="?", help="run file; without one this process trains alone")
    parser.add_argument("--name", help="which member this is")
    parser.add_argument("--rounds", type=int, default=10, help="when training alone")
    parser.add_argument("--inner-steps", type=int, default=20, help="when training alone")
    chosen = parser.parse_args(arguments)
    try:
        task = get_task(task_name)
        if chosen.run:
            over = torchbft.train(task, chosen.run, name=chosen.name)
        else:
            over = alone(task, chosen.rounds, chosen.inner_steps)
    except TorchbftError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    print(f"{over.status} after round {over.state.round}: root {over.state.root().hex()[:16]}")
    return 0


def alone(task: torchbft.Task, rounds: int, inner_steps: int) -> torchbft.RunOver:
    """A swarm of one: the rounds of a real run without a network."""
    training = {"rounds": rounds, "inner_steps": inner_steps}
    run = local_run(training=training, data={"samples": len(task.train_set)})
    print(f"{start_state(task, run).layout.parameter_count} parameters")
    node = SoloNode(run)
    over = train_with(task, node, run, peer=node.peer)
    for round, _, loss, accuracy, train_loss in node.swarm.reports:
        print(f"round {round}: loss {loss:.3f}, accuracy {accuracy:.3f}, train {train_loss:.3f}")
    return over


if __name__ == "__main__":
    sys.exit(main())
