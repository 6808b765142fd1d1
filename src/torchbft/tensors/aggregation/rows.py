"""Rows that are not one matrix: vectors, dictionaries of parameters, or files that outgrow memory.

``Rows`` reads them by blocks of columns, so that a rule runs on 64 updates of 10^8 parameters in
the memory of its result and some blocks.

Shapes: N rows, D columns, B columns of one block.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchbft.primitives.errors import MisuseError
from torchbft.tensors.aggregation.inputs import SUPPORTED_DTYPES, refuse_non_finite
from torchbft.tensors.exact import workspace

Parameters = Mapping[str, Tensor]
"""One contribution by parameter name, as ``state_dict()`` or gradients give it."""


class Piece(Protocol):
    """Consecutive values of one row."""

    size: int

    def read(self, start: int, stop: int, into_B: Tensor) -> None:
        """Write the values from start to stop."""


class _InMemory:
    def __init__(self, values: Tensor) -> None:
        self._values, self.size = values.detach().reshape(-1), values.numel()

    def read(self, start: int, stop: int, into_B: Tensor) -> None:
        into_B.copy_(self._values[start:stop])


class _InFile:
    """Raw values of a float dtype, in the byte order of this machine."""

    def __init__(self, path: Path, dtype: torch.dtype) -> None:
        self._path, self._dtype = path, dtype
        self._bytes, length = dtype.itemsize, path.stat().st_size
        if length % self._bytes:
            raise MisuseError(f"{length} bytes are no whole number of {dtype}", where=str(path))
        self.size = length // self._bytes
        self._file = os.open(path, os.O_RDONLY)

    def read(self, start: int, stop: int, into_B: Tensor) -> None:
        buffer = into_B.view(torch.uint8).numpy().data
        done, at = 0, start * self._bytes
        while done < len(buffer):
            count = os.preadv(self._file, [buffer[done:]], at + done)
            if count == 0:
                raise MisuseError("the file has become shorter", where=str(self._path))
            done += count

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)


class Rows:
    """N rows of D values of one float dtype, read by blocks; each is checked for NaN and infinity.

    Use ``of`` or ``from_files``. A block is valid until the next one is read.
    """

    def __init__(self, pieces: Sequence[Sequence[Piece]], dtype: torch.dtype) -> None:
        sizes = [[piece.size for piece in row] for row in pieces]
        if not sizes or any(row != sizes[0] for row in sizes):
            raise MisuseError("rows must be of equal length", where="aggregation")
        if dtype not in SUPPORTED_DTYPES:
            raise MisuseError(f"rows of dtype {dtype} cannot be aggregated", where="aggregation")
        self._pieces, self._ends = pieces, np.cumsum(sizes[0]).tolist()
        self.shape = torch.Size((len(pieces), self._ends[-1] if self._ends else 0))
        self.dtype, self.device = dtype, torch.device("cpu")

    @staticmethod
    def of(updates: Sequence[Tensor] | Sequence[Parameters]) -> Rows:
        """Rows of equally shaped tensors on the CPU, or of dictionaries with the same entries.

        Nothing is copied. Of several dtypes the widest is read. Entries keep the first row's order.
        """
        rows = [[one] if isinstance(one, Tensor) else _entries(one, updates[0]) for one in updates]
        shapes = [[values.shape for values in row] for row in rows]
        for row, found in enumerate(shapes):
            if found != shapes[0]:
                raise MisuseError(f"row {row}: other shapes than row 0", where="aggregation")
        dtypes = {values.dtype for row in rows for values in row} or {torch.float32}
        wrong = dtypes - set(SUPPORTED_DTYPES)
        if wrong:
            raise MisuseError(
                f"values of dtype {min(map(str, wrong))} cannot be aggregated",
                where="aggregation",
                hint="hand over floats only; counters are no update",
            )
        widest = dtypes.pop()
        for dtype in dtypes:
            widest = torch.promote_types(widest, dtype)
        return Rows([[_InMemory(values) for values in row] for row in rows], widest)

    @staticmethod
    def from_files(paths: Sequence[str | Path], dtype: torch.dtype = torch.float32) -> Rows:
        """Rows of files that hold raw values, one file a row; read as they are needed."""
        return Rows([[_InFile(Path(path), dtype)] for path in paths], dtype)

    def __getitem__(self, at: tuple[slice, slice]) -> Tensor:
        """Return rows and columns of unit step."""
        chosen, columns = self._pieces[at[0]], range(*at[1].indices(self.shape[1]))
        start, stop = columns.start, max(columns.start, columns.stop)
        size = len(chosen) * (stop - start) * self.dtype.itemsize
        bytes_ = torch.from_numpy(workspace("rows", size, dtype=np.uint8))
        block_NB = bytes_.view(self.dtype).view(len(chosen), stop - start)
        for pieces, into_B in zip(chosen, block_NB, strict=True):
            self._fill(pieces, start, stop, into_B)
        refuse_non_finite(block_NB, start)
        return block_NB

    def _fill(self, pieces: Sequence[Piece], start: int, stop: int, into_B: Tensor) -> None:
        first = 0
        for piece, end in zip(pieces, self._ends, strict=True):
            low, high = max(start, first), min(stop, end)
            if low < high:
                piece.read(low - first, high - first, into_B[low - start : high - start])
            first = end


def _entries(one: Parameters | Tensor, first: Parameters | Tensor) -> list[Tensor]:
    if isinstance(one, Tensor) or isinstance(first, Tensor) or one.keys() != first.keys():
        raise MisuseError("rows must hold the same names", where="aggregation")
    return [one[name] for name in first]
