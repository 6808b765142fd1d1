"""Every example runs, and says what it is meant to show."""

from __future__ import annotations

import re
import runpy
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torchbft.pytorch.tasks import fashion_mnist

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LONGEST_SINGLE_FILE = 300


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, int]]:
    threads = torch.get_num_threads()

    def run_example(name: str, *arguments: str) -> tuple[str, int]:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        code: object = 0
        try:
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        except SystemExit as stop:
            code = stop.code or 0
        torch.set_num_threads(threads)
        printed = capsys.readouterr()
        return printed.out + printed.err, int(str(code))

    return run_example


def test_one_round_shows_two_liars_fail(run: Callable[..., tuple[str, int]]) -> None:
    printed, code = run("one_round.py", "--rounds", "4")
    assert code == 0
    accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", printed)]
    assert len(accuracies) == 4
    assert accuracies[-1] > 0.8
    assert "1 model on 7 peers" in printed
    assert re.findall(r"named: (peer-\d), which opened", printed) == ["peer-6"]
    weights = [float(w) for w in re.findall(r"5:(\d\.\d+)", printed)]
    assert len(weights) == 4
    assert max(weights) < 0.1


def test_one_round_is_one_file_of_a_readable_length() -> None:
    assert len((EXAMPLES / "one_round.py").read_text().splitlines()) <= LONGEST_SINGLE_FILE


def test_the_plain_loop_learns_alone(run: Callable[..., tuple[str, int]]) -> None:
    printed, _ = run("digits_plain_loop.py")
    accuracies = [float(number) for number in re.findall(r"accuracy (\d\.\d+)", printed)]
    assert len(accuracies) == 10
    assert accuracies[-1] > accuracies[0]
    assert "finished; agreed root" in printed


@pytest.mark.skipif(not fashion_mnist.FOLDER.exists(), reason="dataset-fashion-mnist is missing")
def test_the_cnn_trains_alone(run: Callable[..., tuple[str, int]]) -> None:
    printed, code = run("train_cnn.py", "--rounds", "1", "--inner-steps", "3")
    assert code == 0
    assert "37969 parameters" in printed
    assert "finished after round 1" in printed


@pytest.mark.skipif(shutil.which("bible") is None, reason="bible-kjv is missing")
def test_the_gpt_trains_alone_on_books_of_its_own(run: Callable[..., tuple[str, int]]) -> None:
    printed, code = run("train_gpt.py", "--rounds", "1", "--inner-steps", "2")
    assert code == 0
    assert "finished after round 1" in printed


def test_a_missing_data_set_is_one_clear_line(
    run: Callable[..., tuple[str, int]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(fashion_mnist, "FOLDER", tmp_path)
    monkeypatch.setattr(fashion_mnist.FashionMNIST.__init__, "__defaults__", (tmp_path,))
    printed, code = run("train_cnn.py")
    assert code == 1
    assert "apt-get install dataset-fashion-mnist" in printed
    assert "Traceback" not in printed
