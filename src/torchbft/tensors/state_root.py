"""The root of one tensor: a domain-separated blake3 Merkle tree whose pieces are small.

A dispute about one value opens one piece and its path. Matrices are cut into tiles of 64 x 64
values (row-major inside, edge tiles smaller), tiles in row-major order; every other tensor into
pieces of 64 KiB. The tensor's digest covers name, dtype and shape, hence the number of pieces and
the place of each. Integers are little-endian.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache

import numpy as np
import torch
from torch import Tensor

from torchbft.primitives.digests import CHUNK_BYTES, blake3_digest, merkle_root

TILE = 64
"""Side of a matrix tile: 16 KiB of float32, small enough to ship in one message of a dispute."""

if sys.byteorder != "little":
    raise ImportError("torchbft hashes and sends little-endian tensors; this machine is big-endian")


def tensor_view(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor in order, little-endian; shares memory where it is contiguous."""
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return memoryview(raw.numpy()).cast("B")  # type: ignore[arg-type]


def tensor_root(name: str, tensor: Tensor) -> bytes:
    """Digest of one named CPU tensor of any dtype and shape, 32 bytes."""
    return root_of_bytes(name, tensor_view(tensor), tensor.dtype, tuple(tensor.shape))


def root_of_bytes(name: str, flat: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    """``tensor_root`` of a tensor whose bytes (``tensor_view``) are at hand."""
    sizes = b"".join(n.to_bytes(8, "little") for n in shape)
    pieces = [blake3_digest("state/piece", piece) for piece in _pieces(flat, dtype, shape)]
    tree = merkle_root("state/pieces", pieces)
    return blake3_digest("state/tensor", name.encode(), _dtype_name(dtype), sizes, tree)


@cache
def _dtype_name(dtype: torch.dtype) -> bytes:
    return str(dtype).removeprefix("torch.").encode()


def _pieces(
    flat: memoryview, dtype: torch.dtype, shape: tuple[int, ...]
) -> Iterator[bytes | memoryview]:
    if len(shape) != 2:
        yield from (flat[start : start + CHUNK_BYTES] for start in range(0, len(flat), CHUNK_BYTES))
        return
    width, tile = shape[1] * dtype.itemsize, TILE * dtype.itemsize
    matrix = np.frombuffer(flat, np.uint8).reshape(shape[0], width)
    for row in range(0, shape[0], TILE):
        for start in range(0, width, tile):
            yield matrix[row : row + TILE, start : start + tile].tobytes()
