"""Which values travel: all of them, or the k largest of each chunk.

Shape suffixes: D parameter values, R rows (chunks), W values of a row that may travel.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_CHUNK = 1 << 16
"""An index within a chunk travels as 16 bits."""


@dataclass(frozen=True)
class ChunkTopK:
    """The k largest magnitudes of each chunk of ``chunk`` values (DeMo; SparseLoCo 2025).

    Of equal magnitudes the one with the lower index travels, so that an audit that encodes again
    gets the same bytes.
    """

    chunk: int
    k: int

    def rows(self, size: int) -> int:
        return -(-size // self.chunk)

    def select(self, values_D: Tensor) -> tuple[Tensor, Tensor]:
        """Values (float32 R, k) and their ascending indices within the chunk (int64 R, k)."""
        chunks_RC = padded(values_D, self.chunk)
        magnitude_RC = chunks_RC.view(torch.int32) & 0x7FFFFFFF
        order_C = torch.arange(self.chunk - 1, -1, -1)
        keys_RC = (magnitude_RC.to(torch.int64) << 16) | order_C  # unique, so ties cannot arise
        indices_RW = keys_RC.topk(self.k, dim=1, sorted=False).indices.sort(dim=1).values
        return chunks_RC.gather(1, indices_RW), indices_RW

    def scatter(self, values_RW: Tensor, indices_RW: Tensor, size: int) -> Tensor:
        """The dense float32 D with the non-zero ``values_RW`` at their places, zero elsewhere."""
        dense_D = torch.zeros(self.rows(size) * self.chunk)
        places_RW = indices_RW + self.chunk * torch.arange(len(indices_RW))[:, None]
        travelling_RW = values_RW != 0
        dense_D[places_RW[travelling_RW]] = values_RW[travelling_RW]
        return dense_D[:size].clone()


def padded(values_D: Tensor, width: int) -> Tensor:
    """Rows of ``width`` values, the last one filled up with zeros."""
    rows = -(-len(values_D) // width)
    if rows * width == len(values_D):
        return values_D.contiguous().view(rows, width)
    return torch.nn.functional.pad(values_D, (0, rows * width - len(values_D))).view(rows, width)
