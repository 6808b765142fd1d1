"""The program as a function: arguments in, exit code, stdout and stderr out."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from torchbft.cli.main import main


@dataclass(frozen=True)
class Ran:
    """What a command left."""

    code: int
    out: str
    err: str

    @property
    def data(self) -> Any:
        return json.loads(self.out)


Torchbft = Callable[..., Ran]


@pytest.fixture
def torchbft(capsys: pytest.CaptureFixture[str]) -> Torchbft:
    """``torchbft("init", "--name", "a")`` runs the program in this process."""

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(int(code), captured.out, captured.err)

    return run


@pytest.fixture
def members(torchbft: Torchbft, tmp_path: Path) -> Callable[[int], list[Path]]:
    """``members(4)`` makes run files of n members, each in its own folder, all signed."""

    def make(count: int) -> list[Path]:
        names = [f"lab-{index}" for index in range(count)]
        folders = [tmp_path / name for name in names]
        first = folders[0] / "run.toml"
        for index, (name, folder) in enumerate(zip(names, folders, strict=True)):
            folder.mkdir()
            if index:
                (folder / "run.toml").write_bytes(first.read_bytes())
            port = 40_000 + index
            assert torchbft("init", folder / "run.toml", "--name", name, "--port", port).code == 0
            if index:
                asked = torchbft("request", folder / "run.toml", "--json").data["request"]
                assert torchbft("admit", first, asked).code == 0
        for folder in folders[1:]:
            (folder / "run.toml").write_bytes(first.read_bytes())
            assert torchbft("admit", folder / "run.toml").code == 0
        copies = [folder / "run.toml" for folder in folders[1:]]
        assert torchbft("admit", first, *copies).code == 0
        return [folder / "run.toml" for folder in folders]

    return make
