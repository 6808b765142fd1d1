"""``join``: a plain training loop becomes a peer of a run, with three lines changed.

    swarm = torchbft.join("run.toml", model, optimizer, scheduler=scheduler)
    for x, y in swarm.batches(train_set, batch_size=32):
        ...                                    # the loop's body stays as it is

A round is H × ``accumulate`` batches. The exchange runs inside the iterator when they are used
up, never in an optimizer hook: mixed precision (a skipped step counts), accumulation, several
optimizers and ``torch.compile`` work unchanged. Such a loop is arbitrary code, so an audit cannot
replay it; a ``Task`` can be.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from torchbft.primitives.errors import ConfigError, MisuseError
from torchbft.primitives.runspec import RunSpec, load_run
from torchbft.pytorch.data import (
    Batch,
    Feed,
    MapStyle,
    dataset_digest,
    own_positions,
    part_of,
    private_seed,
    round_samples,
)
from torchbft.pytorch.link import NodeLink, RoundStart, RunOver, TrainerHook
from torchbft.pytorch.work import RoundWork, initial_state

Measured = float | tuple[float, float | None] | None
"""What a function of ``on_round`` may return: nothing, a loss, or (loss, accuracy)."""


class Swarm:
    """A peer's session in a run. Made by ``join``; also a context manager that leaves at its end.

    ``state`` is the agreed state, ``round`` the round in progress, ``over`` how the run ended.
    """

    def __init__(
        self,
        run: RunSpec,
        link: NodeLink,
        model: nn.Module,
        optimizers: Sequence[Optimizer],
        schedulers: Sequence[LRScheduler] = (),
        *,
        private: bool = False,
        peer: str = "",
        hook: TrainerHook | None = None,
        share: tuple[int, int] = (0, 1),
    ) -> None:
        _check_mode(run, private)
        self.run, self.model, self.peer, self.private = run, model, peer, private
        self._link, self._hook, self._share, self._left = link, hook, share, False
        initial = initial_state(model, run)
        self._work = RoundWork(model, optimizers, schedulers, run, start=initial, hook=hook)
        self._callbacks: list[Callable[[int], Measured]] = []
        self._losses: list[Tensor | float] = []
        self.over: RunOver | None = None
        atexit.register(self.leave)
        self.state = link.start(initial)
        self._work.resume(self.state)
        self.round = self.state.round

    def batches(
        self,
        train_set: MapStyle,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[list[Any]], Batch] | None = None,
    ) -> Iterator[Batch]:
        """Batches of all rounds to come, exchanging between rounds, until the run is over.

        ``batch_size`` is the run file's; another one is refused. ``collate_fn``: as of a
        DataLoader. Raises ConfigError for an empty data set or one that is not the run's.
        Leaving the loop (``break``, an error, KeyboardInterrupt) leaves the run.
        """
        try:
            feed = self._feed(train_set, batch_size, collate_fn)
        except ConfigError:
            self.leave()
            raise
        return self._rounds(feed)

    def on_round(self, function: Callable[[int], Measured]) -> Callable[[int], Measured]:
        """Call ``function(round)`` after each round with the agreed model loaded.

        Evaluate and save there; a loss, or (loss, accuracy), that it returns goes to the report.
        Not called for void rounds, which change nothing. Usable as a decorator.
        """
        self._callbacks.append(function)
        return function

    def record(self, loss: Tensor | float) -> None:
        """Note one batch's training loss; the mean over the round goes to the report."""
        self._losses.append(loss.detach() if isinstance(loss, Tensor) else loss)

    @property
    def batch_index(self) -> int:
        """Batches of this round that the loop is through with."""
        return self._work.batches

    def leave(self) -> None:
        """Take no further part in the run. May be called more than once."""
        if not self._left:
            self._left = True
            atexit.unregister(self.leave)
            self._link.leave()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()

    def _feed(self, train_set: MapStyle, batch_size: int | None, collate: Any) -> Feed:
        agreed, data = self.run.training.batch_size, self.run.data
        if batch_size not in (None, agreed):
            raise ConfigError(
                f"batch_size {batch_size}, but the run's is {agreed}",
                where="swarm.batches",
                hint="slices are assigned by the ledger: leave it out or use the run file's",
            )
        feed = Feed(train_set, agreed // self._share[1], collate, peer=self.peer)
        if not self.private:
            check_dataset(train_set, samples=data.samples, digest=data.digest)
        return feed

    def _rounds(self, feed: Feed) -> Iterator[Batch]:
        try:
            while (start := self._begin()) is not None:
                began = time.perf_counter()
                for batch in feed.batches(self._positions(start, feed)):
                    yield self._seen(batch)
                    self._work.batch_done()
                self._exchange(start.round, time.perf_counter() - began)
        finally:
            self.leave()

    def _begin(self) -> RoundStart | None:
        step = self.over or self._link.next_round()
        self.state = step.state
        if isinstance(step, RunOver):
            self._end(step)
            return None
        self.round = step.round
        self._losses.clear()
        self._work.begin(step)
        return step

    def _positions(self, start: RoundStart, feed: Feed) -> Sequence[int]:
        positions = start.positions
        if positions is None or self.private:
            seed = private_seed(self.run, self.peer)
            positions = own_positions(feed.samples, start.round, round_samples(self.run), seed)
        rank, ranks = self._share
        return part_of(positions, self.run.training.batch_size, rank, ranks)

    def _seen(self, batch: Batch) -> Batch:
        if self._hook is not None and isinstance(batch, tuple | list) and len(batch) == 2:
            return self._hook.batch(*batch)
        return batch

    def _exchange(self, round: int, seconds: float) -> None:
        if self._work.batches:
            made = self._work.finish()
            self._link.submit(round, made.payload, made.trace_root, made.local_root, seconds)
        outcome = self._link.outcome(round)
        if isinstance(outcome, RunOver):
            self._end(outcome)
            return
        self.state = outcome.state
        self._work.settle(outcome)
        if not outcome.void:
            self._measure(round)

    def _end(self, over: RunOver) -> None:
        self.over, self.state = over, over.state
        over.state.load_into(self.model)

    def _measure(self, round: int) -> None:
        modes = [(module, module.training) for module in self.model.modules()]
        train_loss = sum(map(float, self._losses)) / len(self._losses) if self._losses else None
        for function in self._callbacks:
            began = time.perf_counter()
            measured = function(round)
            seconds = time.perf_counter() - began
            if measured is not None:
                loss, accuracy = measured if isinstance(measured, tuple) else (measured, None)
                self._link.report(round, loss, accuracy, train_loss, seconds)
        for module, training in modes:
            module.training = training


def join(
    run: str | Path | RunSpec,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer],
    scheduler: LRScheduler | Sequence[LRScheduler] | None = None,
    *,
    private: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
    link: NodeLink | None = None,
    folder: str | Path | None = None,
    name: str | None = None,
) -> Swarm:
    """Join a run with a model and its inner optimizer(s); loads the agreed model into it.

    ``run``: path of the run file (with ``link``, also a RunSpec). The peer's node is started from
    its folder, by default the one in ``peers`` beside the run file, and resumes what it finds
    there; schedulers are set from the agreed step. ``private``: train on this peer's own shard,
    where the run allows it. ``process_group``: a DDP job is one peer; every rank calls ``join``.
    ``link``: a node that is already there. Raises ConfigError when anything does not fit.
    """
    from torchbft.pytorch import connection, group

    spec = run if isinstance(run, RunSpec) else load_run(Path(run))
    inside = model.module if isinstance(model, DistributedDataParallel) else model
    peer = name or ""
    if link is None and group.is_first(process_group):
        folder = connection.peer_folder(run, folder, name)
        peer, link = folder.name, connection.connect(run, folder)
    share = (0, 1)
    if process_group is not None:
        joint = group.GroupLink(link, process_group, initial_state(inside, spec).layout)
        link, share = joint, (joint.rank, joint.ranks)
    if link is None:
        raise MisuseError("no node to join through", where="join")
    return Swarm(
        spec,
        link,
        inside,
        _several(optimizer),
        _several(scheduler),
        private=private,
        peer=peer,
        share=share,
    )


def _several(one: Any) -> tuple[Any, ...]:
    if one is None:
        return ()
    return tuple(one) if isinstance(one, list | tuple) else (one,)


def _check_mode(run: RunSpec, private: bool) -> None:
    if private != (run.data.mode == "private"):
        raise ConfigError(
            f"the run's data mode is {run.data.mode!r}, but private={private}",
            where="join",
            hint="private=True is for runs in which each peer trains on its own shard",
        )


def check_dataset(train_set: MapStyle, *, samples: int, digest: str) -> None:
    """Raise ConfigError unless ``train_set`` is the one that the run file names."""
    if samples not in (0, len(train_set)):
        raise ConfigError(
            f"{len(train_set)} samples, but the run's data set has {samples}",
            where="train_set",
            hint="every peer of a run with assigned data holds the same data set",
        )
    if digest and dataset_digest(train_set) != digest:
        raise ConfigError(
            f"its digest is not {digest[:16]}…, which the run file names",
            where="train_set",
            hint="another version, order or preprocessing of the data; compare with the others",
        )
