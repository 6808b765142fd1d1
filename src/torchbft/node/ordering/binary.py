"""Finds CometBFT's binary and reads, from the file itself, which module version it was built of.

What the binary prints is not that: v0.40.0 says 0.39.0. The truth is the build information that the
Go linker leaves in every binary (format: Go's ``debug/buildinfo``).
"""

from __future__ import annotations

import mmap
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from torchbft.primitives.errors import ConfigError

COMETBFT_VERSION = "v0.40.0"
"""Pinned: every fact that the rest of this folder builds on was checked in this version. The same
version stands in the Makefile."""
MODULE = "github.com/cometbft/cometbft"
VARIABLE = "TORCHBFT_COMETBFT"
TOOLS = Path(__file__).resolve().parents[4] / ".tools"
"""Where ``make cometbft`` puts it, in a checkout."""
INSTALL = (
    f"make cometbft, or without a checkout: go install {MODULE}/cmd/cometbft@{COMETBFT_VERSION}"
)

_MAGIC = b"\xff Go buildinf:"
_ALIGNMENT = 16
_HEADER_BYTES = 32
_INLINE = 2
"""Flag: the strings follow the header (Go 1.18 and later)."""
_SENTINEL_BYTES = 16
"""Random-looking bytes before and after the module text, by which older tools found it."""
MAX_TEXT_BYTES = 1 << 20
"""CometBFT's module list has 20 KB."""


def find_binary() -> Path:
    """The binary to run: ``$TORCHBFT_COMETBFT``, the project's tool folder, or the PATH.

    Raises ConfigError, with what to run, if there is none or it is not the pinned version.
    """
    for path in _candidates():
        check_version(path)
        return path
    raise ConfigError(
        "CometBFT is not installed, and this run's ledger needs it",
        where="ledger",
        hint=f"{INSTALL}; or set {VARIABLE} to where it is",
    )


def _candidates() -> Iterator[Path]:
    named = os.environ.get(VARIABLE)
    if named:
        yield Path(named)
        return
    if (TOOLS / "cometbft").is_file():
        yield TOOLS / "cometbft"
    if on_path := shutil.which("cometbft"):
        yield Path(on_path)


def check_version(path: Path) -> None:
    """Raise ConfigError unless the file is a CometBFT of the pinned version."""
    try:
        module, version = module_of(path)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"this is no Go program that can be read ({why})", where=str(path), hint=INSTALL
        ) from None
    if (module, version) != (MODULE, COMETBFT_VERSION):
        raise ConfigError(
            f"it was built of {module} {version}, this torchbft needs {MODULE} {COMETBFT_VERSION}",
            where=str(path),
            hint=INSTALL,
        )
    if not os.access(path, os.X_OK):
        raise ConfigError("it may not be executed", where=str(path), hint=f"chmod u+x {path}")


def module_of(path: Path) -> tuple[str, str]:
    """Main module and version that a Go binary was built of. Raises OSError or ValueError."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        text = _module_text(data)
    for line in text.decode("utf-8", "replace").splitlines():
        fields = line.split("\t")
        if fields[0] == "mod" and len(fields) >= 3:
            return fields[1], fields[2]
    raise ValueError("its build information names no module")


def _module_text(data: mmap.mmap) -> bytes:
    at = data.find(_MAGIC)
    while at >= 0 and at % _ALIGNMENT:
        at = data.find(_MAGIC, at + 1)
    if at < 0 or at + _HEADER_BYTES > len(data) or not data[at + 15] & _INLINE:
        raise ValueError("no build information")
    _, after = _string(data, at + _HEADER_BYTES)  # the version of Go
    text, _ = _string(data, after)
    return text[_SENTINEL_BYTES:-_SENTINEL_BYTES]


def _string(data: mmap.mmap, at: int) -> tuple[bytes, int]:
    """A string behind its length (unsigned varint), and where it ends."""
    length = shift = 0
    while True:
        if at >= len(data) or shift > 28:
            raise ValueError("damaged build information")
        byte = data[at]
        length |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            break
    if length > MAX_TEXT_BYTES or at + length > len(data):
        raise ValueError("damaged build information")
    return data[at : at + length], at + length
