"""A small GPT on the King James Bible, each peer with books of its own (private data).

    python examples/train_gpt.py --rounds 5               # alone, with the first books
    python examples/train_gpt.py run.toml --name peer-c   # a peer of the run in run.toml

Books are dealt in turn: member i of n takes books i, i + n, …; nobody sees another's text, and
since nobody can, no auditor can replay the work either. The run file says mode = "private".
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch.utils.data import Subset

import torchbft
from torchbft.primitives.errors import TorchbftError
from torchbft.primitives.runspec import load_run
from torchbft.pytorch.solo import SoloNode, local_run
from torchbft.pytorch.tasks.kjv import KingJamesBible
from torchbft.pytorch.train import train_with


def own_books(task: KingJamesBible, index: int, members: int) -> Subset[object]:
    """The windows of every ``members``-th book, from ``index`` on."""
    books = [*task.books.values()][index::members]
    return Subset(task.train_set, [window for book in books for window in book])


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns the exit code."""
    parser = argparse.ArgumentParser(description="Train a small GPT on books of one's own.")
    parser.add_argument("run", nargs="?", help="run file; without one this process trains alone")
    parser.add_argument("--name", help="which member this is")
    parser.add_argument("--rounds", type=int, default=10, help="when training alone")
    parser.add_argument("--inner-steps", type=int, default=20, help="when training alone")
    chosen = parser.parse_args(arguments)
    try:
        task = KingJamesBible()
        over = member(task, chosen) if chosen.run else alone(task, chosen)
    except TorchbftError as error:
        print(f"error: {error}\nhint: {error.hint}", file=sys.stderr)
        return 1
    print(f"{over.status} after round {over.state.round}: root {over.state.root().hex()[:16]}")
    return 0


def member(task: KingJamesBible, chosen: argparse.Namespace) -> torchbft.RunOver:
    """Take this member's books and train with the others."""
    names = [one.name for one in load_run(chosen.run).contributors]
    books = own_books(task, names.index(chosen.name), len(names))
    return torchbft.train(task, chosen.run, name=chosen.name, train_set=books)


def alone(task: KingJamesBible, chosen: argparse.Namespace) -> torchbft.RunOver:
    """A swarm of one with a seventh of the books."""
    training = {"rounds": chosen.rounds, "inner_steps": chosen.inner_steps}
    run = local_run(training=training, data={"mode": "private"})
    node = SoloNode(run)
    over = train_with(task, node, run, peer=node.peer, train_set=own_books(task, 0, 7))
    for round, _, loss, accuracy, train_loss in node.swarm.reports:
        print(f"round {round}: loss {loss:.3f}, accuracy {accuracy:.3f}, train {train_loss:.3f}")
    return over


if __name__ == "__main__":
    sys.exit(main())
