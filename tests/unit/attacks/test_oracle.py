"""The oracle folder and the hook that trainers of a demonstration carry."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from torchbft import attacks
from torchbft.attacks.oracle import PREFIX, ROUNDS_KEPT, Oracle, create_folder
from torchbft.primitives.ids import PeerId
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.update import Update

A, B, LIAR = PeerId("anna"), PeerId("bert"), PeerId("liar")


class Clock:
    """Time that passes only while someone sleeps; ``at`` runs actions when their time has come."""

    def __init__(self) -> None:
        self.now = 0.0
        self.at: dict[float, object] = {}

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        for moment in [m for m in self.at if m <= self.now]:
            self.at.pop(moment)()  # type: ignore[operator]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def oracle(tmp_path: Path, clock: Clock) -> Oracle:
    return Oracle(tmp_path, [B, A], patience=1.0, clock=clock, sleep=clock.sleep)


def test_rows_come_in_order_of_peer_id_whatever_the_order_of_publication(oracle: Oracle) -> None:
    oracle.publish(4, B, torch.tensor([3.0, 4.0]))
    oracle.publish(4, A, torch.tensor([1.0, 2.0]))
    rows_ND = oracle.wait(4, 2)
    assert rows_ND is not None
    assert rows_ND.tolist() == [[1.0, 2.0], [3.0, 4.0]]


def test_a_liar_waits_for_the_last_honest_update(oracle: Oracle, clock: Clock) -> None:
    oracle.publish(0, A, torch.ones(2))
    clock.at[0.5] = lambda: oracle.publish(0, B, torch.zeros(2))
    rows_ND = oracle.wait(0, 2)
    assert rows_ND is not None
    assert len(rows_ND) == 2
    assert 0.5 <= clock.now < 0.6


def test_the_wait_is_bounded_and_goes_on_with_those_that_are_there(
    oracle: Oracle, clock: Clock
) -> None:
    assert oracle.wait(0, 2) is None
    assert clock.now == pytest.approx(1.0, abs=0.01)
    oracle.publish(0, B, torch.ones(2))
    rows_ND = oracle.wait(0, 2)
    assert rows_ND is not None
    assert rows_ND.tolist() == [[1.0, 1.0]]


def test_updates_of_other_rounds_and_lengths_are_not_served(oracle: Oracle) -> None:
    oracle.publish(1, A, torch.ones(2))
    oracle.publish(2, B, torch.ones(3))
    oracle.publish(2, A, torch.full((2,), 7.0))
    rows_ND = oracle.wait(2, 2)
    assert rows_ND is not None
    assert rows_ND.tolist() == [[7.0, 7.0]]


def test_old_rounds_are_removed_and_drafts_never_stay(oracle: Oracle) -> None:
    for round in range(6):
        oracle.publish(round, A, torch.ones(2))
    names = sorted(path.name for path in oracle.folder.iterdir())
    assert names == [f"{round:010d}.anna.f32" for round in range(6 - ROUNDS_KEPT, 6)]


def test_a_lost_folder_never_disturbs_an_honest_trainer(oracle: Oracle) -> None:
    oracle.close()
    assert not oracle.folder.exists()
    oracle.publish(0, A, torch.ones(2))
    assert oracle.wait(0, 2) is None


def test_a_created_folder_is_private_and_fresh() -> None:
    first, second = create_folder(), create_folder()
    try:
        assert first != second
        assert first.stat().st_mode & 0o077 == 0
    finally:
        Oracle(first, []).close()
        Oracle(second, []).close()
    assert not first.exists()


def test_folders_of_dead_processes_are_removed_and_those_of_living_ones_kept() -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    living = create_folder()
    parent = living.parent
    orphan, odd = (parent / f"{PREFIX}{part}-x" for part in (gone.pid, "name"))
    try:
        orphan.mkdir()
        odd.mkdir()
        fresh = create_folder()
        assert not orphan.exists()
        assert living.exists()
        assert odd.exists()
    finally:
        for folder in (living, odd, fresh):
            Oracle(folder, []).close()


# --- the hook --------------------------------------------------------------------------------


LAYOUT = StateLayout.from_module(nn.Linear(2, 1))


def update(values: list[float]) -> Update:
    return Update(torch.tensor(values), torch.zeros(0), torch.zeros(0, dtype=torch.int64))


def test_witness_and_liar_meet_through_the_oracle(oracle: Oracle) -> None:
    for name, values in ((A, [1.0, 2.0, 3.0]), (B, [3.0, 2.0, 1.0])):
        honest = update(values)
        witness = attacks.HonestWitness(name, oracle)
        assert witness.update(5, honest, None, LAYOUT, []) is honest
    liar = attacks.Adversary(
        attacks.get("sign_flip")(),
        n=4,
        f=1,
        seed=b"s" * 32,
        oracle=oracle,  # type: ignore[arg-type]
    )
    own = update([0.0, 0.0, 9.0])
    forged = liar.update(5, own, None, LAYOUT, [])
    assert isinstance(forged, Update)
    assert forged.parameters_D.tolist() == [-8.0, -8.0, -8.0]
    assert own.parameters_D.tolist() == [0.0, 0.0, 9.0]


def test_a_liar_that_is_not_omniscient_never_looks_into_the_folder(
    oracle: Oracle, clock: Clock
) -> None:
    for attack in (attacks.get("scaled")(), attacks.get("ipm")(knowledge="history")):  # type: ignore[call-arg]
        liar = attacks.Adversary(attack, n=4, f=1, seed=b"s", oracle=oracle)  # type: ignore[arg-type]
        liar.update(0, update([1.0, 1.0, 1.0]), None, LAYOUT, [torch.ones(3)])
    assert clock.now == 0.0


def test_the_hook_passes_batches_through_the_attack(oracle: Oracle) -> None:
    x, y = torch.zeros(2, 2), torch.tensor([0, 9])
    flip = attacks.Adversary(attacks.get("label_flip")(), n=4, f=1, seed=b"s")  # type: ignore[arg-type]
    assert flip.batch(x, y)[1].tolist() == [9, 0]
    assert attacks.HonestWitness(A, oracle).batch(x, y) == (x, y)


def test_two_omniscient_liars_agree_and_two_noisy_ones_do_not(oracle: Oracle) -> None:
    for name in (A, B):
        oracle.publish(0, name, torch.tensor([1.0, 2.0, 3.0]))

    def sent(name: str, seed: bytes) -> list[float]:
        liar = attacks.Adversary(attacks.get(name)(), n=4, f=1, seed=seed, oracle=oracle)  # type: ignore[arg-type]
        forged = liar.update(0, update([1.0, 1.0, 1.0]), None, LAYOUT, [])
        assert isinstance(forged, Update)
        return forged.parameters_D.tolist()

    assert sent("ipm", b"1") == sent("ipm", b"2")
    assert sent("gaussian", b"1") == sent("gaussian", b"1")
    assert sent("gaussian", b"1") != sent("gaussian", b"2")
