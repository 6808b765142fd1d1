"""The tasks that torchbft ships: their data, their size, and that they learn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from torchbft.primitives.errors import ConfigError
from torchbft.pytorch.cohort import simulate
from torchbft.pytorch.data import dataset_digest
from torchbft.pytorch.solo import local_run
from torchbft.pytorch.task import build_model, evaluate
from torchbft.pytorch.tasks import fashion_mnist, kjv
from torchbft.pytorch.tasks.digits import Digits
from torchbft.pytorch.tasks.fashion_mnist import FashionMNIST
from torchbft.pytorch.tasks.kjv import GPT, KingJamesBible


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def digits() -> Digits:
    return Digits()


def rows(data: TensorDataset) -> set[bytes]:
    return {image.numpy().tobytes() for image in data.tensors[0]}


def test_digits_are_split_by_class_and_disjoint(digits: Digits) -> None:
    assert len(digits.train_set) + len(digits.test_set) == 1797
    assert rows(digits.train_set).isdisjoint(rows(digits.test_set))
    counts = torch.bincount(digits.test_set.tensors[1])
    assert counts.min() >= 43
    assert counts.max() <= 46


def test_digits_are_the_same_everywhere(digits: Digits) -> None:
    assert dataset_digest(digits.train_set) == dataset_digest(Digits().train_set)
    assert float(digits.train_set.tensors[0].max()) == 1.0


def test_digits_with_the_default_run_reach_the_promised_accuracy(digits: Digits) -> None:
    """Seed 0 of the five that the attack benchmark measures: at least 97.5 %."""
    result = simulate(digits, local_run(7, seed=0), evaluate_every=0)
    assert result.accuracy is not None
    assert result.accuracy >= 0.975


def test_an_untrained_model_guesses(digits: Digits) -> None:
    loss, accuracy = evaluate(digits, build_model(digits, local_run(1)))
    assert accuracy is not None
    assert accuracy < 0.3
    assert loss > 2


def learns(task: FashionMNIST | KingJamesBible, rounds: int) -> bool:
    training = {"rounds": rounds, "inner_steps": 4, "batch_size": 32}
    result = simulate(task, local_run(1, training=training))
    return result.losses[-1] < result.losses[0]


@pytest.mark.skipif(not fashion_mnist.FOLDER.exists(), reason="dataset-fashion-mnist is missing")
def test_fashion_mnist_learns_with_the_benchmarked_size() -> None:
    task = FashionMNIST()
    assert len(task.train_set) == 60_000
    assert task.train_set.tensors[0].dtype == torch.uint8
    assert sum(p.numel() for p in task.build_model().parameters()) == 37_969
    task.test_set = TensorDataset(*(column[:500] for column in task.test_set.tensors))
    assert learns(task, rounds=3)


def test_missing_fashion_mnist_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read") as error:
        FashionMNIST(tmp_path)
    assert "apt-get install dataset-fashion-mnist" in error.value.hint


def test_a_foreign_file_is_no_fashion_mnist(tmp_path: Path) -> None:
    import gzip

    for name in ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"):
        (tmp_path / name).write_bytes(gzip.compress(bytes(64)))
    with pytest.raises(ConfigError, match="is no IDX file of kind 2051"):
        FashionMNIST(tmp_path)


@pytest.mark.skipif(shutil.which("bible") is None, reason="bible-kjv is missing")
def test_the_bible_has_66_books_as_shards_and_teaches_a_gpt() -> None:
    task = KingJamesBible()
    assert len(task.books) == 66
    windows = [window for book in task.books.values() for window in book]
    assert windows == list(range(len(task.train_set)))
    first = "".join(task.alphabet[code] for code in task.train_set.tensors[0][0])
    assert first.startswith("In the beginning God created")
    assert learns(task, rounds=2)


def test_a_missing_bible_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kjv, "COMMAND", ("no-such-bible",))
    with pytest.raises(ConfigError, match="no-such-bible cannot be run") as error:
        KingJamesBible()
    assert "apt-get install bible-kjv bible-kjv-text" in error.value.hint


def test_another_text_is_no_bible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kjv, "COMMAND", ("echo", "Ge1:1 In the beginning"))
    with pytest.raises(ConfigError, match="did not print 66 books"):
        KingJamesBible()


def test_the_gpt_sees_no_later_character_and_ties_its_output() -> None:
    torch.manual_seed(0)
    model = GPT(30).eval()
    text = torch.randint(0, 30, (1, 16))
    changed = text.clone()
    changed[0, 10:] = 0
    with torch.no_grad():
        one, other = model(text), model(changed)
    assert torch.equal(one[0, :10], other[0, :10])
    assert not torch.equal(one[0, 10:], other[0, 10:])
    assert isinstance(model.head, nn.Linear)
    assert model.head.weight is model.characters.weight
