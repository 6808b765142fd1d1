"""The plain loop: what a user writes around ``swarm.batches`` and what must come out."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import IterableDataset, TensorDataset

import torchbft
from torchbft.primitives.errors import ConfigError, MisuseError
from torchbft.pytorch.link import RunOver
from torchbft.pytorch.session import Swarm
from torchbft.pytorch.solo import SoloNode, local_run
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.state import AgreedState

Loop = Callable[..., int]
ROUNDS, STEPS, BATCH = 3, 4, 8


def solo(samples: int = 96, **training: object) -> SoloNode:
    fields = {"rounds": ROUNDS, "inner_steps": STEPS, "batch_size": BATCH, **training}
    return SoloNode(local_run(1, training=fields, data={"samples": samples}))


def sgd(model: nn.Module, lr: float = 0.1) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr)


def joined(node: SoloNode, model: nn.Module, optimizer: object, **options: object) -> Swarm:
    return torchbft.join(node.swarm.run, model, optimizer, link=node, **options)  # type: ignore[arg-type]


def flat(model: nn.Module) -> torch.Tensor:
    return StateLayout.from_module(model).flatten(model).parameters_D


def test_a_loop_runs_all_rounds_and_ends_with_the_agreed_model(
    points: TensorDataset, model: nn.Module, loop: Loop
) -> None:
    node, optimizer = solo(), sgd(model)
    swarm = joined(node, model, optimizer)
    assert loop(swarm, model, optimizer, points) == ROUNDS * STEPS
    assert isinstance(swarm.over, RunOver)
    assert swarm.over.status == "finished"
    assert swarm.state.round == ROUNDS
    assert torch.equal(flat(model), swarm.state.parameters_D)
    assert not node.swarm.active


def test_training_makes_the_agreed_model_better(
    points: TensorDataset, model: nn.Module, loop: Loop
) -> None:
    x, y = points.tensors
    before = functional.cross_entropy(model(x), y).item()
    node, optimizer = solo(rounds=10), sgd(model)
    loop(joined(node, model, optimizer), model, optimizer, points)
    assert functional.cross_entropy(model(x), y).item() < before / 2


def test_the_exchange_happens_inside_the_iterator_alone(
    points: TensorDataset, model: nn.Module, loop: Loop
) -> None:
    node, optimizer = solo(), sgd(model)
    submitted: list[int] = []
    swarm = joined(node, model, optimizer)
    loop(
        swarm,
        model,
        optimizer,
        points,
        each=lambda count: submitted.append(len(node.swarm.payloads)),
    )
    assert submitted == [round for round in range(ROUNDS) for _ in range(STEPS)]


def test_each_round_uses_the_assigned_positions_in_order(model: nn.Module) -> None:
    node = solo(40)
    numbered = TensorDataset(torch.zeros(40, 6), torch.arange(40))
    swarm = joined(node, model, sgd(model))
    seen = torch.cat([y for _, y in swarm.batches(numbered)]).tolist()
    assert len(seen) == ROUNDS * STEPS * BATCH
    assert sorted(seen[:40]) == list(range(40))
    assert sorted(seen[40:80]) == list(range(40))


def test_accumulation_makes_a_round_longer(points: TensorDataset, model: nn.Module) -> None:
    node, optimizer = solo(accumulate=2), sgd(model)
    swarm, count = joined(node, model, optimizer), 0
    for x, y in swarm.batches(points):
        (functional.cross_entropy(model(x), y) / 2).backward()
        count += 1
        if count % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()
    assert count == ROUNDS * STEPS * 2
    assert swarm.state.inner_step == ROUNDS * STEPS


def test_a_skipped_step_of_a_grad_scaler_counts(points: TensorDataset, model: nn.Module) -> None:
    node, optimizer = solo(), sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)
    swarm, stepped = joined(node, model, optimizer), []
    for x, y in swarm.batches(points):
        before = flat(model)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = functional.cross_entropy(model(x), y) * 8
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        stepped.append(not torch.equal(before, flat(model)))
    assert len(stepped) == ROUNDS * STEPS
    assert not stepped[0]
    assert stepped[-1]
    assert swarm.state.round == ROUNDS


def test_several_optimizers_step_in_one_loop(points: TensorDataset, model: nn.Module) -> None:
    first = torch.optim.SGD(model[0].parameters(), lr=0.1, momentum=0.9)
    second = torch.optim.AdamW(model[2].parameters(), lr=0.01)
    node = solo()
    swarm = joined(node, model, [first, second])
    start = swarm.state.parameters_D
    for x, y in swarm.batches(points):
        model.zero_grad()
        functional.cross_entropy(model(x), y).backward()
        first.step()
        second.step()
    changed = swarm.state.parameters_D != start
    assert all(changed[place].any() for _, place in swarm.state.layout.group("parameter"))


@pytest.mark.parametrize("inner_state", ["reset", "keep"])
def test_inner_state_is_reset_or_kept_between_rounds(
    points: TensorDataset, model: nn.Module, loop: Loop, inner_state: str
) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    steps: list[int] = []

    def note(count: int) -> None:
        steps.append(int(optimizer.state[model[0].weight]["step"]))

    node = solo(inner_state=inner_state)
    loop(joined(node, model, optimizer), model, optimizer, points, each=note)
    once = list(range(1, STEPS + 1))
    assert steps == (once * ROUNDS if inner_state == "reset" else [*range(1, ROUNDS * STEPS + 1)])


def test_optimizers_that_are_born_with_memory_survive_a_reset(
    points: TensorDataset, model: nn.Module, loop: Loop
) -> None:
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    node = solo()
    loop(joined(node, model, optimizer), model, optimizer, points)
    assert int(optimizer.state[model[0].weight]["step"]) == STEPS


def test_evaluation_and_saving_see_the_agreed_model(
    points: TensorDataset, model: nn.Module, loop: Loop, tmp_path: Path
) -> None:
    node, optimizer = solo(), sgd(model)
    swarm = joined(node, model, optimizer)
    seen: list[tuple[int, bool]] = []

    @swarm.on_round
    def look(round: int) -> tuple[float, float]:
        seen.append((round, torch.equal(flat(model), swarm.state.parameters_D)))
        model.eval()
        swarm.state.save(tmp_path / f"{round}.safetensors")
        return 0.5, 0.25

    def training(count: int) -> None:
        assert model.training

    loop(swarm, model, optimizer, points, each=training)
    assert seen == [(round, True) for round in range(ROUNDS)]
    assert node.swarm.reports[-1] == (ROUNDS - 1, "peer-00", 0.5, 0.25, None)
    last = AgreedState.load(tmp_path / f"{ROUNDS - 1}.safetensors")
    assert last.root() == swarm.state.root()


def test_a_measured_loss_alone_is_reported_with_the_mean_training_loss(
    points: TensorDataset, model: nn.Module, loop: Loop
) -> None:
    node, optimizer = solo(), sgd(model)
    swarm = joined(node, model, optimizer)
    swarm.on_round(lambda round: 1.5)
    loop(swarm, model, optimizer, points, each=lambda count: swarm.record(float(count)))
    first = node.swarm.reports[0]
    assert first[2:] == (1.5, None, sum(range(1, STEPS + 1)) / STEPS)


def test_break_leaves_the_run(points: TensorDataset, model: nn.Module) -> None:
    node = solo()
    swarm = joined(node, model, sgd(model))
    for _ in swarm.batches(points):
        break
    assert not node.swarm.active
    assert node.swarm.payloads == {}


def test_an_interrupt_in_the_loop_body_leaves_the_run_at_the_end_of_with(
    points: TensorDataset, model: nn.Module
) -> None:
    node = solo()

    def interrupted() -> None:
        with joined(node, model, sgd(model)) as swarm:
            for _ in swarm.batches(points):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert not node.swarm.active


def test_an_interrupt_while_waiting_for_the_others_leaves_the_run(
    points: TensorDataset, model: nn.Module, loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, optimizer = solo(), sgd(model)

    def interrupted(round: int) -> RunOver:
        raise KeyboardInterrupt

    monkeypatch.setattr(node, "outcome", interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop(joined(node, model, optimizer), model, optimizer, points)
    assert not node.swarm.active


def test_a_void_round_changes_nothing_and_its_work_is_not_lost(
    points: TensorDataset, model: nn.Module, loop: Loop
) -> None:
    run = local_run(
        1,
        training={"rounds": 2, "inner_steps": STEPS, "batch_size": BATCH},
        data={"samples": 96},
    )
    node, optimizer = SoloNode(run, void={0}), sgd(model)
    swarm = joined(node, model, optimizer)
    start, rounds = swarm.state.parameters_D.clone(), []
    swarm.on_round(rounds.append)  # type: ignore[arg-type]
    at_start: list[torch.Tensor] = []

    def note(count: int) -> None:
        if count == STEPS:
            at_start.append(swarm.state.parameters_D)

    loop(swarm, model, optimizer, points, each=note)
    assert torch.equal(at_start[0], start)
    assert rounds == [1]
    assert swarm.state.round == 1
    codec, layout = swarm._work.codec, swarm.state.layout
    first, second = (codec.decode(node.swarm.payloads[r, node.peer], layout) for r in (0, 1))
    alone = copy.deepcopy(second.parameters_D)
    assert float(alone.norm()) > float(first.parameters_D.norm())  # the residual came along


def test_another_batch_size_than_the_runs_is_refused(
    points: TensorDataset, model: nn.Module
) -> None:
    node = solo()
    with pytest.raises(ConfigError, match="batch_size 16, but the run's is 8"):
        joined(node, model, sgd(model)).batches(points, batch_size=16)
    assert not node.swarm.active


def test_another_data_set_than_the_runs_is_refused(points: TensorDataset, model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="96 samples, but the run's data set has 50"):
        joined(solo(50), model, sgd(model)).batches(points)
    run = local_run(1, training={"batch_size": 8}, data={"samples": 96, "digest": "ab" * 32})
    with pytest.raises(ConfigError, match="digest is not abababababababab"):
        joined(SoloNode(run), model, sgd(model)).batches(points)


def test_a_stream_without_positions_is_refused(model: nn.Module) -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(MisuseError, match="no length or no samples by index"):
        joined(solo(), model, sgd(model)).batches(Stream())  # type: ignore[arg-type]


def test_private_and_assigned_runs_are_not_mixed_up(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="data mode is 'assigned'"):
        joined(solo(), model, sgd(model), private=True)
    run = local_run(1, data={"mode": "private"})
    with pytest.raises(ConfigError, match="data mode is 'private'"):
        joined(SoloNode(run), model, sgd(model))


def test_a_private_shard_is_used_up_before_it_starts_again(model: nn.Module) -> None:
    training = {"rounds": ROUNDS, "inner_steps": STEPS, "batch_size": BATCH}
    run = local_run(1, training=training, data={"mode": "private"})
    own = TensorDataset(torch.zeros(24, 6), torch.arange(24))
    swarm = joined(SoloNode(run), model, sgd(model), private=True, name="peer-00")
    seen = torch.cat([y for _, y in swarm.batches(own)]).tolist()
    passes = [seen[start : start + 24] for start in range(0, len(seen), 24)]
    assert all(sorted(one) == list(range(24)) for one in passes)
    assert passes[0] != passes[1]


def test_c01_peers_without_data_refuse_to_start_and_change_nothing(model: nn.Module) -> None:
    start = flat(model).clone()
    for mode in ("private", "assigned"):
        node = SoloNode(local_run(1, data={"mode": mode}))
        empty = TensorDataset(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
        swarm = joined(node, model, sgd(model), private=mode == "private")
        with pytest.raises(ConfigError, match="no data: the train set has 0 samples"):
            swarm.batches(empty)
        assert node.swarm.payloads == {}
        assert not node.swarm.active
        assert torch.equal(flat(model), start)


def test_leaving_twice_is_leaving_once(model: nn.Module) -> None:
    swarm = joined(solo(), model, sgd(model))
    swarm.leave()
    swarm.leave()


def test_the_collate_function_is_the_users(points: TensorDataset, model: nn.Module) -> None:
    swarm = joined(solo(), model, sgd(model))
    sizes = [size for size in swarm.batches(points, collate_fn=len)]
    assert sizes == [BATCH] * ROUNDS * STEPS


def test_a_run_without_a_node_or_file_says_what_is_missing(model: nn.Module) -> None:
    with pytest.raises(ConfigError, match="needs folder= or link="):
        torchbft.join(local_run(1), model, sgd(model))
