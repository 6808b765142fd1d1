"""Rows of any float dtype, read block by block in the dtype in which rules compute.

Shapes: N rows, D columns, B columns of one block.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from torchbft.tensors.exact.scaling import Array


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a rule's blocks: float64 for float64, float32 for everything else."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class RowSource(Protocol):
    """N float rows of D values that are read by blocks: a tensor (N, D), or pieces, or files."""

    @property
    def shape(self) -> torch.Size:
        """(N, D)."""

    @property
    def dtype(self) -> torch.dtype:
        """Of the rows that are read."""

    @property
    def device(self) -> torch.device:
        """Where the blocks are."""

    def __getitem__(self, at: tuple[slice, slice], /) -> Tensor:
        """The rows and columns asked for, perhaps valid until the next call only."""


class Blocks:
    """``Blocks(rows_ND)[span]`` is an array (N, B), float64 for float64 rows and float32 otherwise.

    It shares memory with the rows where it can: do not write to it.
    """

    def __init__(self, rows_ND: RowSource) -> None:
        self._rows_ND = rows_ND
        working = working_dtype(rows_ND.dtype)
        self.dtype = np.float64 if working == torch.float64 else np.float32
        plain = isinstance(rows_ND, Tensor) and rows_ND.dtype == working
        self._array_ND: Array | None = None
        if plain and rows_ND.device.type == "cpu":
            self._array_ND = rows_ND[:, :].numpy()
        self._working = working

    def __getitem__(self, span: slice) -> Array:
        if self._array_ND is not None:
            return self._array_ND[:, span]
        block: Array = self._rows_ND[:, span].to("cpu", self._working).numpy()
        return block
