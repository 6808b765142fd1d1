"""What ``import torchbft`` gives, and what it costs."""

from __future__ import annotations

import subprocess
import sys

import pytest

import torchbft


def test_importing_torchbft_loads_neither_torch_nor_numpy() -> None:
    check = "import sys, torchbft; print(sorted({'torch', 'numpy', 'sklearn'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_public_names_are_found_and_listed() -> None:
    for name in torchbft.__all__:
        assert getattr(torchbft, name) is not None
        assert name in dir(torchbft)
    assert torchbft.robust.get("arc+nnm+trimmed_mean").name == "arc+nnm+trimmed_mean"


def test_other_names_are_not_there() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'joyn'"):
        torchbft.joyn  # type: ignore[attr-defined]  # noqa: B018
