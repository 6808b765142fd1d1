"""A data-parallel job of two processes is one peer."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

import torchbft
from torchbft.pytorch.session import Swarm
from torchbft.pytorch.solo import SoloNode, local_run
from torchbft.tensors.layout import StateLayout

TRAINING = {"rounds": 2, "inner_steps": 3, "batch_size": 8}
PATIENCE_S = 60


def build(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def trained(swarm: Swarm, model: nn.Module, points: TensorDataset) -> list[int]:
    """A user's loop; returns the sizes of its batches."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sizes = []
    for x, y in swarm.batches(points, batch_size=8):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        sizes.append(len(y))
    return sizes


def rank_main(
    rank: int, store: str, points: TensorDataset, answer: Callable[[object], None]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    run = local_run(1, training=TRAINING, data={"samples": 96})
    model = DistributedDataParallel(build(seed=5))
    with torch.no_grad():
        for parameter in model.parameters():  # ranks that lost step: the agreed state mends them
            parameter.add_(float(rank))
    node = SoloNode(run) if rank == 0 else None
    swarm = torchbft.join(
        run,
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        process_group=dist.group.WORLD,
        link=node,
    )
    sizes = trained(swarm, model, points)
    status = swarm.over.status if swarm.over else ""
    flat = StateLayout.from_module(model.module).flatten(model.module).parameters_D
    answer((rank, sizes, status, flat.tolist(), node.swarm.payloads if node else None))
    dist.destroy_process_group()


def test_two_ranks_train_as_one_peer_would(points: TensorDataset, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=rank_main, args=(r, str(tmp_path / "store"), points, answers.put))
        for r in range(2)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in ranks] == [0, 0]
    first, second = sorted(answers.get() for _ in range(2))
    assert first[1] == second[1] == [4] * 6
    assert first[2] == second[2] == "finished"
    assert first[3] == second[3]
    assert len(first[4]) == 2

    run = local_run(1, training=TRAINING, data={"samples": 96})
    alone = build(seed=5)
    swarm = torchbft.join(
        run, alone, torch.optim.SGD(alone.parameters(), lr=0.1), link=SoloNode(run)
    )
    trained(swarm, alone, points)
    whole = StateLayout.from_module(alone).flatten(alone).parameters_D
    torch.testing.assert_close(torch.tensor(first[3]), whole, atol=1e-5, rtol=1e-4)
