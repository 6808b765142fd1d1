"""Kinds of models that go through rounds: each ends agreed, and whole."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import torchbft
from torchbft.pytorch.session import Swarm
from torchbft.pytorch.solo import LocalSwarm, SoloNode, local_run
from torchbft.tensors.layout import StateLayout

Loop = Callable[..., int]
TRAINING = {"rounds": 3, "inner_steps": 4, "batch_size": 8}


def solo_session(model: nn.Module, **options: object) -> tuple[Swarm, torch.optim.SGD]:
    run = local_run(1, training=TRAINING, data={"samples": 96}, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return torchbft.join(run, model, optimizer, link=SoloNode(run)), optimizer


def together(
    models: list[nn.Module], train: Callable[[int, Swarm, nn.Module], None], **run_fields: object
) -> LocalSwarm:
    """Run one session per model in threads until the run is over."""
    fields: dict[str, object] = {"training": TRAINING, "data": {"samples": 96}, **run_fields}
    run = local_run(len(models), **fields)
    swarm = LocalSwarm(run)
    failed: list[BaseException] = []

    def peer(index: int, model: nn.Module) -> None:
        try:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            link = swarm.link(f"peer-{index:02d}")
            private = run.data.mode == "private"
            session = torchbft.join(run, model, optimizer, private=private, link=link)
            session.optimizer = optimizer  # type: ignore[attr-defined]
            train(index, session, model)
        except BaseException as error:
            failed.append(error)
            raise

    threads = [threading.Thread(target=peer, args=pair) for pair in enumerate(models)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    return swarm


def plain(points: TensorDataset) -> Callable[[int, Swarm, nn.Module], None]:
    def train(index: int, session: Swarm, model: nn.Module) -> None:
        optimizer = session.optimizer  # type: ignore[attr-defined]
        for x, y in session.batches(points):
            optimizer.zero_grad()
            functional.cross_entropy(model(x.to(next(model.parameters()).dtype)), y).backward()
            optimizer.step()

    return train


def seeded(build: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def values(model: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    flat = StateLayout.from_module(model).flatten(model)
    return flat.parameters_D, flat.float_buffers_B, flat.int_buffers_I


def same(models: list[nn.Module]) -> bool:
    return all(
        torch.equal(mine, theirs)
        for model in models[1:]
        for mine, theirs in zip(values(model), values(models[0]), strict=True)
    )


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


def with_norm(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), norm, nn.ReLU(), nn.Linear(8, 3))


def test_four_peers_with_models_of_their_own_end_with_one(points: TensorDataset) -> None:
    models = [seeded(mlp, seed) for seed in range(4)]
    assert not same(models)
    swarm = together(models, plain(points))
    assert same(models)
    offered = {bytes(payload) for payload in swarm.payloads.values()}
    assert len(offered) == 4 * TRAINING["rounds"]


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm1d(8), nn.SyncBatchNorm(8), nn.GroupNorm(2, 8)], ids=type
)
def test_norm_layers_are_agreed_with_their_buffers(points: TensorDataset, norm: nn.Module) -> None:
    models = [seeded(lambda: with_norm(norm.__class__(*_args(norm))), seed) for seed in range(2)]
    together(models, plain(points))
    assert same(models)
    buffers = dict(models[0].named_buffers())
    if buffers:
        assert buffers["1.num_batches_tracked"].shape == ()
        assert int(buffers["1.num_batches_tracked"]) == 12
        assert bool((buffers["1.running_var"] > 0).all())


def _args(norm: nn.Module) -> tuple[int, ...]:
    return (2, 8) if isinstance(norm, nn.GroupNorm) else (8,)


def test_c05_running_means_of_different_data_meet_in_the_middle() -> None:
    labels = torch.arange(96) % 3
    shards = [TensorDataset(torch.randn(96, 6) + mean, labels) for mean in (0.0, 10.0)]
    models = [seeded(lambda: nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 3))) for _ in range(2)]

    def train(index: int, session: Swarm, model: nn.Module) -> None:
        plain(shards[index])(index, session, model)

    together(
        models,
        train,
        data={"mode": "private"},
        training={"rounds": 6, "inner_steps": 16, "batch_size": 8},
    )
    mean = models[0][0].running_mean  # type: ignore[union-attr]
    assert bool(((mean - 5).abs() < 1).all())
    x, y = shards[0].tensors
    losses = [functional.cross_entropy(model.eval()(x), y).item() for model in models]
    assert losses[0] == losses[1]


def test_c22_bf16_peers_share_a_float32_master_and_do_not_drift(points: TensorDataset) -> None:
    models = [seeded(mlp, seed).to(torch.bfloat16) for seed in range(2)]
    states: dict[int, Tensor] = {}

    def train(index: int, session: Swarm, model: nn.Module) -> None:
        plain(points)(index, session, model)
        states[index] = session.state.parameters_D

    together(models, train)
    assert same(models)
    assert next(models[0].parameters()).dtype == torch.bfloat16
    master = states[0]
    assert torch.equal(master, states[1])
    assert not torch.equal(master, master.to(torch.bfloat16).float())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.embedding(tokens))
        return logits


def test_c31_tied_weights_travel_once_and_stay_tied() -> None:
    model = seeded(Tied)
    swarm, optimizer = solo_session(model)
    tokens = TensorDataset(torch.arange(96) % 5, (torch.arange(96) + 1) % 5)
    for x, y in swarm.batches(tokens):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert model.head.weight.data_ptr() == model.embedding.weight.data_ptr()  # type: ignore[union-attr,operator]
    assert swarm.state.layout.parameter_count == 20
    assert len(swarm._link.swarm.payloads[0, "peer-00"]) < 2 * 20 * 4  # type: ignore[attr-defined]


def test_frozen_parameters_stay_and_may_be_unfrozen_later(
    points: TensorDataset, model: nn.Module
) -> None:
    model[0].requires_grad_(False)  # type: ignore[index,operator]
    swarm, optimizer = solo_session(model)
    first = swarm.state.parameters_D
    frozen = [place for spec, place in swarm.state.layout.group("parameter") if spec.name[0] == "0"]
    moved: list[bool] = []
    swarm.on_round(
        lambda round: moved.append(
            any(not torch.equal(swarm.state.parameters_D[p], first[p]) for p in frozen)
        )
    )
    for x, y in swarm.batches(points):
        if swarm.round == 1:
            model[0].requires_grad_(True)  # type: ignore[index,operator]
        optimizer.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    assert moved == [False, True, True]


def test_parameters_that_join_the_optimizer_later_are_reset_too(
    points: TensorDataset, model: nn.Module, loop: Loop
) -> None:
    run = local_run(1, training=TRAINING, data={"samples": 96})
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1, momentum=0.9)  # type: ignore[index,operator]
    swarm = torchbft.join(run, model, optimizer, link=SoloNode(run))

    def unfreeze(count: int) -> None:
        if count == 1:
            optimizer.add_param_group({"params": list(model[0].parameters())})  # type: ignore[index,operator]

    loop(swarm, model, optimizer, points, each=unfreeze)
    assert swarm.state.round == TRAINING["rounds"]


def test_a_compiled_module_has_the_same_names_and_runs(points: TensorDataset, loop: Loop) -> None:
    bare = seeded(mlp)
    compiled = torch.compile(bare, backend="eager")
    run = local_run(1, training=TRAINING, data={"samples": 96})
    optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
    swarm = torchbft.join(run, compiled, optimizer, link=SoloNode(run))
    assert swarm.state.layout == StateLayout.from_module(bare)
    loop(swarm, compiled, optimizer, points)
    assert torch.equal(values(bare)[0], swarm.state.parameters_D)

    other = seeded(mlp)
    plain_swarm, plain_optimizer = solo_session(other)
    loop(plain_swarm, other, plain_optimizer, points)
    torch.testing.assert_close(values(other)[0], values(bare)[0])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_model_on_a_gpu_trains_there_and_is_agreed_on_the_cpu(points: TensorDataset) -> None:
    model = seeded(mlp).cuda()
    swarm, optimizer = solo_session(model)
    for x, y in swarm.batches(points):
        optimizer.zero_grad()
        functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        optimizer.step()
    assert next(model.parameters()).is_cuda
    assert swarm.state.parameters_D.device.type == "cpu"
    assert torch.equal(values(model)[0], swarm.state.parameters_D)
