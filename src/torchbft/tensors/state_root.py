"""The root of one tensor: a domain-separated blake3 Merkle tree whose pieces are small.

A dispute about one value opens one piece and its path. Matrices are cut into tiles of 64 x 64
values (row-major inside, edge tiles smaller), tiles in row-major order; every other tensor into
pieces of 64 KiB. The tensor's digest covers name, dtype and shape, hence the number of pieces and
the place of each. Integers are little-endian.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

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
    dtype = str(tensor.dtype).removeprefix("torch.").encode()
    shape = b"".join(n.to_bytes(8, "little") for n in tensor.shape)
    pieces = [blake3_digest("state/piece", tensor_view(piece)) for piece in _pieces(tensor)]
    tree = merkle_root("state/pieces", pieces)
    return blake3_digest("state/tensor", name.encode(), dtype, shape, tree)


def _pieces(tensor: Tensor) -> Iterator[Tensor]:
    if tensor.dim() == 2:
        for row in range(0, tensor.shape[0], TILE):
            for column in range(0, tensor.shape[1], TILE):
                yield tensor[row : row + TILE, column : column + TILE]
        return
    flat = tensor.contiguous().reshape(-1)
    step = CHUNK_BYTES // flat.element_size()
    for start in range(0, len(flat), step):
        yield flat[start : start + step]
