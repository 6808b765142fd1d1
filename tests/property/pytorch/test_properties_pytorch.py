"""Properties of shards, orders, schedulers and whole local runs, over drawn inputs."""

from __future__ import annotations

import threading
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional
from torch.optim import lr_scheduler
from torch.utils.data import TensorDataset

import torchbft
from torchbft.pytorch.data import own_positions, part_of
from torchbft.pytorch.inner import InnerState
from torchbft.pytorch.partition import dirichlet_shards, fraction_shards
from torchbft.pytorch.solo import LocalSwarm, Slices, local_run
from torchbft.pytorch.work import initial_state

QUICK = settings(max_examples=40, deadline=None)
FEW = settings(max_examples=8, deadline=None)
WEIGHTS = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)


@QUICK
@given(weights=WEIGHTS, samples=st.integers(0, 200))
def test_c02_shards_hold_each_sample_once_and_are_off_by_less_than_one(
    weights: list[int], samples: int
) -> None:
    fractions = [weight / sum(weights) for weight in weights]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shards = fraction_shards(samples, fractions)
    assert sorted(index for shard in shards for index in shard) == list(range(samples))
    assert all(abs(len(s) - f * samples) < 1 for s, f in zip(shards, fractions, strict=True))


@QUICK
@given(
    peers=st.integers(1, 9),
    alpha=st.floats(0.05, 100),
    seed=st.integers(0, 1000),
    classes=st.integers(1, 10),
)
def test_dirichlet_shards_hold_each_sample_once(
    peers: int, alpha: float, seed: int, classes: int
) -> None:
    labels = torch.arange(100) % classes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shards = dirichlet_shards(labels, peers, alpha, seed=seed, least=0)
    assert len(shards) == peers
    assert sorted(index for shard in shards for index in shard) == list(range(100))


@QUICK
@given(samples=st.integers(1, 40), count=st.integers(1, 60), seed=st.binary(max_size=4))
def test_private_orders_use_every_sample_once_a_pass(samples: int, count: int, seed: bytes) -> None:
    used = [index for round in range(5) for index in own_positions(samples, round, count, seed)]
    assert len(used) == 5 * count
    whole = len(used) // samples * samples
    for start in range(0, whole, samples):
        assert sorted(used[start : start + samples]) == list(range(samples))


@QUICK
@given(batch=st.integers(1, 16), ranks=st.integers(1, 4), batches=st.integers(0, 5))
def test_ranks_share_every_batch_without_loss(batch: int, ranks: int, batches: int) -> None:
    whole = batch * ranks
    positions = list(range(whole * batches))
    parts = [part_of(positions, whole, rank, ranks) for rank in range(ranks)]
    for start in range(batches):
        together = [i for part in parts for i in part[start * batch : (start + 1) * batch]]
        assert sorted(together) == positions[start * whole : (start + 1) * whole]


@QUICK
@given(samples=st.integers(1, 50), peers=st.integers(1, 4), rounds=st.integers(1, 6))
def test_slices_use_every_sample_once_a_pass(samples: int, peers: int, rounds: int) -> None:
    run = local_run(peers, training={"inner_steps": 2, "batch_size": 3})
    slices = Slices(run, samples)
    used = [i for _ in range(rounds) for part in slices.take(peers) for i in part]
    for start in range(0, len(used) - samples + 1, samples):
        assert sorted(used[start : start + samples]) == list(range(samples))
    assert slices.passes * samples - (samples - slices.cursor) == len(used)


@QUICK
@given(jumps=st.lists(st.integers(0, 3), min_size=1, max_size=5), gamma=st.floats(0.5, 0.99))
def test_catching_up_in_any_jumps_is_stepping_one_by_one(jumps: list[int], gamma: float) -> None:
    def rate(scheduler: lr_scheduler.LRScheduler) -> float:
        return float(scheduler.optimizer.param_groups[0]["lr"])

    def fresh() -> lr_scheduler.ExponentialLR:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        return lr_scheduler.ExponentialLR(optimizer, gamma)

    model = nn.Linear(1, 1)
    state = initial_state(model, local_run(1))
    jumping, single = fresh(), fresh()
    inner = InnerState([jumping.optimizer], [jumping], steps=3, reset=True)
    for jump in jumps:
        state = replace(state, inner_step=state.inner_step + 3 * jump)
        inner.catch_up(state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(3 * sum(jumps)):
            single.step()
    assert rate(jumping) == pytest.approx(rate(single))


def _play(
    void: set[int], refused: set[tuple[int, str]], leaves: int
) -> tuple[list[torchbft.Swarm], LocalSwarm]:
    """Four peers in threads; the last one leaves after some batches."""
    training = {"rounds": 4, "inner_steps": 2, "batch_size": 4}
    run = local_run(4, training=training, data={"samples": 48})
    swarm = LocalSwarm(run, void=void, refused=refused)
    points = TensorDataset(torch.randn(48, 4), torch.arange(48) % 2)
    sessions: dict[int, torchbft.Swarm] = {}

    def peer(index: int) -> None:
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        session = torchbft.join(run, model, optimizer, link=swarm.link(f"peer-{index:02d}"))
        sessions[index] = session
        for count, (x, y) in enumerate(session.batches(points)):
            if index == 3 and count == leaves:
                break
            optimizer.zero_grad()
            functional.cross_entropy(model(x), y).backward()
            optimizer.step()

    threads = [threading.Thread(target=peer, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [sessions[index] for index in range(4)], swarm


@FEW
@given(
    void=st.sets(st.integers(0, 3)),
    refused=st.sets(st.tuples(st.integers(0, 3), st.sampled_from(["peer-00", "peer-02"]))),
    leaves=st.integers(0, 8),
)
def test_peers_agree_whatever_rounds_are_void_refused_or_left(
    void: set[int], refused: set[tuple[int, str]], leaves: int
) -> None:
    sessions, swarm = _play(void, refused, leaves)
    staying = sessions[:3]
    assert {session.over.status for session in staying if session.over} == {"finished"}
    assert len({session.state.root() for session in staying}) == 1
    counted = 0
    for round in range(4):
        offered = {peer for number, peer in swarm.payloads if number == round}
        refusals = {peer for number, peer in refused if number == round}
        counted += round not in void and len(offered - refusals) >= swarm.run.m_min
    assert staying[0].state.round == counted
