"""The generated Python of the engine's messages is what its .proto files say."""

from __future__ import annotations

from pathlib import Path

import pytest

protoc = pytest.importorskip("grpc_tools.protoc", reason="the compiler is a developer's package")

SOURCE = Path(__file__).resolve().parents[3] / "src"
FOLDER = SOURCE / "torchbft" / "node" / "ordering" / "proto"


@pytest.mark.parametrize("proto", sorted(path.name for path in FOLDER.glob("*.proto")))
def test_generated_files_are_current(proto: str, tmp_path: Path) -> None:
    include = Path(protoc.__file__).parent / "_proto"
    options = (f"-I{SOURCE}", f"-I{include}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}")
    assert protoc.main(("protoc", *options, str(FOLDER / proto))) == 0
    for suffix in ("_pb2.py", "_pb2.pyi"):
        name = proto.removesuffix(".proto") + suffix
        compiled = tmp_path / FOLDER.relative_to(SOURCE) / name
        assert (FOLDER / name).read_text() == compiled.read_text(), "run: make proto"


def test_every_generated_file_has_its_source() -> None:
    generated = {path.name.removesuffix("_pb2.py") for path in FOLDER.glob("*_pb2.py")}
    assert generated == {path.stem for path in FOLDER.glob("*.proto")}
    assert generated
