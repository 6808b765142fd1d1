"""``train``: run a replayable task as a peer."""

from __future__ import annotations

from pathlib import Path

import torch

from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import RunSpec, load_run
from torchbft.pytorch import connection
from torchbft.pytorch.data import MapStyle
from torchbft.pytorch.link import NodeLink, RunOver, TrainerHook
from torchbft.pytorch.session import Swarm
from torchbft.pytorch.task import Task, TaskStep, build_model, evaluate, source_digest

PEER_THREADS = 1
"""Torch threads of a peer: several peers of one machine share its cores, and replays of an inner
step give the same bits only with the same number of threads."""


def train(
    task: Task,
    run: str | Path,
    *,
    folder: str | Path | None = None,
    name: str | None = None,
    train_set: MapStyle | None = None,
    threads: int = PEER_THREADS,
    evaluate_every: int = 1,
) -> RunOver:
    """Take part in a run with a task, until it is over; returns how it ended.

    ``run``: path of the run file; the node is started from ``folder`` as by ``join``.
    ``train_set``: this peer's own shard, in a run with private data. Raises ConfigError when the
    task's source or the data set is not the one that the run file names.
    """
    spec = load_run(Path(run))
    check_task(task, spec)
    place = connection.peer_folder(run, folder, name)
    return train_with(
        task,
        connection.connect(run, place),
        spec,
        peer=place.name,
        train_set=train_set,
        threads=threads,
        evaluate_every=evaluate_every,
    )


def train_with(
    task: Task,
    link: NodeLink,
    run: RunSpec,
    *,
    peer: str,
    adversary: TrainerHook | None = None,
    train_set: MapStyle | None = None,
    threads: int = PEER_THREADS,
    evaluate_every: int = 1,
) -> RunOver:
    """``train`` over a link that is already there. ``adversary``: a demonstration's test hook.

    ``evaluate_every``: rounds between evaluations of the agreed model; 0 never evaluates, and the
    last round is always evaluated otherwise.
    """
    torch.set_num_threads(threads)
    model = build_model(task, run)
    optimizer = task.build_optimizer(model)
    private = run.data.mode == "private"
    with Swarm(run, link, model, [optimizer], private=private, peer=peer, hook=adversary) as swarm:

        def measure(round: int) -> tuple[float, float | None] | None:
            last = round == run.training.rounds - 1
            if evaluate_every == 0 or not (last or (round + 1) % evaluate_every == 0):
                return None
            return evaluate(task, model)

        swarm.on_round(measure)
        step = TaskStep(task, model, optimizer, run, peer)
        for batch in swarm.batches(task.train_set if train_set is None else train_set):
            base, index = swarm.state.inner_step, swarm.batch_index
            swarm.record(step(batch, round=swarm.round, index=index, base=base))
    if swarm.over is None:
        raise ConfigError("the run did not end", where="train")
    return swarm.over


def check_task(task: Task, run: RunSpec) -> None:
    """Raise ConfigError unless the run file names this task's source, or none."""
    found = source_digest(task)
    if run.task.digest not in ("", found):
        raise ConfigError(
            f"its source has sha256 {found[:16]}…, but the run file names {run.task.digest[:16]}…",
            where=f"task {type(task).__name__}",
            hint="run the task file that the members signed; the swarm never ships code",
        )
