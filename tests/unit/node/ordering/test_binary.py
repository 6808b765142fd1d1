"""Which CometBFT is run, and what is said when it is not the right one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from torchbft.node.ordering import binary
from torchbft.node.ordering.binary import COMETBFT_VERSION, MODULE, find_binary, module_of
from torchbft.primitives.errors import ConfigError

ROOT = Path(__file__).resolve().parents[4]


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


def go_program(module: str = MODULE, version: str = COMETBFT_VERSION, flags: int = 2) -> bytes:
    """A file with the build information of a Go program in its middle."""
    lines = f"path\tx/cmd\nmod\t{module}\t{version}\th1:abc=\ndep\tother/mod\tv1.0.0\th1:def=\n"
    text = b"\x30" * 16 + lines.encode() + b"\xf9" * 16
    head = b"\xff Go buildinf:" + bytes([8, flags]) + bytes(16)
    strings = varint(7) + b"go1.26." + varint(len(text)) + text
    return b"\x7fELF".ljust(4096, b"\0") + head + strings + bytes(100)


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cometbft"
    path.write_bytes(go_program())
    path.chmod(0o755)
    monkeypatch.setenv(binary.VARIABLE, str(path))
    return path


def test_the_module_version_is_read_from_the_file_itself(program: Path) -> None:
    assert module_of(program) == (MODULE, "v0.40.0")
    assert find_binary() == program


def test_the_pinned_version_is_that_of_the_makefile() -> None:
    found = re.search(r"^COMETBFT_VERSION := (.*)$", (ROOT / "Makefile").read_text(), re.M)
    assert found is not None
    assert found[1] == COMETBFT_VERSION


@pytest.mark.parametrize(
    ("content", "names"),
    [
        (go_program(version="v0.38.17"), r"built of .*cometbft v0\.38\.17, this torchbft needs"),
        (go_program(module="example.org/fork"), r"built of example\.org/fork v0\.40\.0"),
        (go_program(version="(devel)"), r"\(devel\)"),
        (go_program(flags=0), "no build information"),
        (b"#!/bin/sh\necho v0.40.0\n", "no build information"),
        (b"", "no Go program"),
        (b"\0" + go_program(), "no build information"),
        (go_program()[:4140], "damaged build information"),
        (go_program().replace(b"\nmod\t", b"\nmad\t"), "names no module"),
        (go_program().replace(varint(7) + b"go1", b"\xff\xff\xff\xff\xff\xff"), "damaged"),
        (go_program().replace(varint(7) + b"go1", b"\xff\xff\xff\x7f"), "damaged"),
    ],
)
def test_another_program_is_refused_with_what_to_run(
    program: Path, content: bytes, names: str
) -> None:
    program.write_bytes(content)
    with pytest.raises(ConfigError, match=names) as caught:
        find_binary()
    assert "make cometbft" in caught.value.hint
    assert str(program) in str(caught.value)


def test_a_missing_binary_is_one_line_with_what_to_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(binary.VARIABLE, raising=False)
    monkeypatch.setattr(binary, "TOOLS", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="not installed") as caught:
        find_binary()
    assert "\n" not in f"{caught.value} {caught.value.hint}"
    assert "make cometbft" in caught.value.hint


def test_where_it_is_looked_for(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tools, path = tmp_path / "tools", tmp_path / "bin"
    for folder in (tools, path):
        folder.mkdir()
        (folder / "cometbft").write_bytes(go_program())
        (folder / "cometbft").chmod(0o755)
    monkeypatch.setattr(binary, "TOOLS", tools)
    monkeypatch.setenv("PATH", str(path))
    assert find_binary() == program
    monkeypatch.delenv(binary.VARIABLE)
    assert find_binary() == tools / "cometbft"
    (tools / "cometbft").unlink()
    assert find_binary() == path / "cometbft"


def test_a_named_binary_that_is_not_there_or_may_not_run(program: Path) -> None:
    program.chmod(0o644)
    with pytest.raises(ConfigError, match="may not be executed"):
        binary.check_version(program)
    program.unlink()
    with pytest.raises(ConfigError, match="No such file"):
        find_binary()
