"""The byte format of a payload, version 1. Little-endian; one valid byte string per update.

Shape suffixes: R rows, W values of a row, K values that travel.

    0   4  magic "TBUP"
    4   1  version, 1
    5   1  selector: 0 dense, 1 top-k of each chunk
    6   1  quantiser: 1 float32, 2 bfloat16, 3 int8
    7   1  zero
    8   4  chunk (0 when dense)
    12  4  k (0 when dense)
    16  8  bytes of the parameter section
    24  8  bytes of the float buffer section: 4 each, float32, never compressed
    32  8  bytes of the integer buffer section: 8 each, int64
    40     the three sections, without gaps

Parameter section, dense: one scale byte per block (int8 only; blocks of 256 values, the last may be
shorter), then one code per value. Sparse: for each chunk the count of its values (uint16, at most
k), for each chunk a scale byte (int8 only), then all indices within their chunks (uint16, strictly
ascending in a chunk), then all codes in the same order. No value that travels is zero, so a chunk
of zeros has the count 0 and, with int8, the scale 0. Codes are defined in ``quantiser``.

Every field is checked against what the run agreed on before anything is allocated; the memory a
decoder needs is bounded by the layout, never by what the bytes claim.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from torchbft.primitives.errors import DecodeError
from torchbft.tensors.compression.quantiser import NO_SCALES, Codes, Quantiser
from torchbft.tensors.compression.selector import ChunkTopK, padded
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.state_root import tensor_view
from torchbft.tensors.update import Update

MAGIC = b"TBUP"
VERSION = 1
HEADER = struct.Struct("<4sBBBBIIQQQQ")
DENSE, SPARSE = 0, 1

_NUMPY = {
    torch.float32: "<f4",
    torch.int64: "<i8",
    torch.int32: "<i4",
    torch.int16: "<i2",
    torch.int8: "i1",
    torch.uint8: "u1",
}


@dataclass(frozen=True)
class Sections:
    """The three sections of a payload, not yet read."""

    parameters: memoryview
    float_buffers: memoryview
    int_buffers: memoryview


def preamble(selector: ChunkTopK | None, quantiser: Quantiser) -> tuple[int, ...]:
    """The header fields after the magic that a codec fixes."""
    if selector is None:
        return VERSION, DENSE, quantiser.ident, 0, 0, 0
    return VERSION, SPARSE, quantiser.ident, 0, selector.chunk, selector.k


def join(preamble: tuple[int, ...], parameters: bytes, update: Update) -> bytes:
    """The payload of an update whose parameter section is written already."""
    buffers = (tensor_view(update.float_buffers_B), tensor_view(update.int_buffers_I))
    lengths = (len(parameters), buffers[0].nbytes, buffers[1].nbytes)
    header = HEADER.pack(MAGIC, *preamble, len(update.parameters_D), *lengths)
    return b"".join((header, parameters, *buffers))


def split(payload: memoryview, expected: tuple[int, ...], layout: StateLayout) -> Sections:
    """Cut a payload after checking its header. Raises DecodeError."""
    if payload.nbytes < HEADER.size:
        raise DecodeError(f"a payload of {payload.nbytes} bytes has no header")
    magic, *fields = HEADER.unpack_from(payload)
    if magic != MAGIC:
        raise DecodeError("not a payload: wrong magic")
    if tuple(fields[:6]) != expected:
        raise DecodeError(f"header {fields[:6]} where this run's codec writes {list(expected)}")
    size, parameters, floats, ints = fields[6:]
    if size != layout.parameter_count:
        raise DecodeError(f"wrong shape: {size} parameters, not {layout.parameter_count}")
    if floats != 4 * layout.float_buffer_count or ints != 8 * layout.int_buffer_count:
        raise DecodeError(f"wrong shape: {floats} and {ints} bytes of buffers")
    if HEADER.size + parameters + floats + ints != payload.nbytes:
        raise DecodeError(f"sections do not add up to the payload's {payload.nbytes} bytes")
    end = HEADER.size + parameters
    floats_end = end + floats
    return Sections(payload[HEADER.size : end], payload[end:floats_end], payload[floats_end:])


def read(section: memoryview, dtype: torch.dtype) -> Tensor:
    """A flat tensor that owns a copy of the section's values."""
    if section.nbytes == 0:  # numpy releases differ on empty buffers
        return torch.zeros(0, dtype=dtype)
    return torch.from_numpy(np.frombuffer(section, _NUMPY[dtype]).copy())


class Reader:
    """Takes consecutive pieces off a section; DecodeError when it ends early."""

    def __init__(self, section: memoryview) -> None:
        self._rest = section

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        size = count * dtype.itemsize
        if size > self._rest.nbytes:
            raise DecodeError("wrong shape: the parameter section is too short")
        piece, self._rest = self._rest[:size], self._rest[size:]
        return read(piece, dtype)

    def uint16(self, count: int) -> Tensor:
        """``count`` unsigned 16-bit numbers as int64."""
        return self.take(count, torch.int16).to(torch.int64) & 0xFFFF

    def end(self) -> None:
        if self._rest.nbytes:
            raise DecodeError("wrong shape: the parameter section is too long")


def write_dense(codes: Codes, size: int) -> bytes:
    flat = codes.codes_RW.reshape(-1)[:size]
    return b"".join((tensor_view(codes.scales_R), tensor_view(flat)))


def read_dense(section: memoryview, quantiser: Quantiser, size: int) -> Codes:
    """Codes (R, W) of ``size`` values, the last row filled up with zeros."""
    width = quantiser.row_width or max(size, 1)
    rows = -(-size // width)
    reader = Reader(section)
    scales_R = reader.take(rows, torch.uint8) if quantiser.row_width else NO_SCALES
    codes_D = reader.take(size, quantiser.code_dtype)
    reader.end()
    return Codes(padded(codes_D, width), scales_R)


def write_sparse(codes: Codes, indices_RW: Tensor, travelling_RW: Tensor) -> bytes:
    counts_R = travelling_RW.sum(dim=1).numpy().astype("<u2")
    indices_K = indices_RW[travelling_RW].numpy().astype("<u2")
    parts = (counts_R.tobytes(), tensor_view(codes.scales_R), indices_K.tobytes())
    return b"".join((*parts, tensor_view(codes.codes_RW[travelling_RW])))


def read_sparse(
    section: memoryview, selector: ChunkTopK, quantiser: Quantiser, size: int
) -> tuple[Codes, Tensor]:
    """Codes (R, k) and indices (int64 R, k) of the values that travel, code 0 in the rest."""
    rows, reader = selector.rows(size), Reader(section)
    counts_R = reader.uint16(rows)
    if bool((counts_R > selector.k).any()):
        raise DecodeError(f"a chunk with more than k={selector.k} values")
    scales_R = reader.take(rows if quantiser.row_width else 0, torch.uint8)
    total = int(counts_R.sum())
    indices_K = reader.uint16(total)
    codes_K = reader.take(total, quantiser.code_dtype)
    reader.end()
    present_RW = torch.arange(selector.k) < counts_R[:, None]
    _check_places(indices_K, counts_R, selector.chunk, size)
    codes_RW = torch.zeros(rows, selector.k, dtype=quantiser.code_dtype)
    indices_RW = torch.zeros(rows, selector.k, dtype=torch.int64)
    codes_RW[present_RW], indices_RW[present_RW] = codes_K, indices_K
    codes = Codes(codes_RW, scales_R)
    if bool((quantiser.values(codes)[present_RW] == 0).any()):
        raise DecodeError("a zero among the values that travel")
    return codes, indices_RW


def _check_places(indices_K: Tensor, counts_R: Tensor, chunk: int, size: int) -> None:
    rows_K = torch.arange(len(counts_R)).repeat_interleave(counts_R)
    places_K = rows_K * chunk + indices_K
    if bool((indices_K >= chunk).any()) or bool((places_K >= size).any()):
        raise DecodeError("an index beyond its chunk")
    if bool((places_K[1:] <= places_K[:-1]).any()):
        raise DecodeError("indices that do not ascend")
