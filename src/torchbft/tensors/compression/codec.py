"""A codec: one way of writing an update, named in the run file.

Shape suffixes: D parameter values, R rows, W values of a row.

Only the parameter section is compressed. ``encode`` is the last operator that an audit replays, so
it is elementwise arithmetic and integer selection only: equal inputs give equal bytes on every CPU.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchbft.primitives.errors import DecodeError, MisuseError, PreconditionError
from torchbft.tensors.compression import wire
from torchbft.tensors.compression.quantiser import QUANTISERS, Codes, Quantiser
from torchbft.tensors.compression.residual import PendingResidual, Residual
from torchbft.tensors.compression.selector import MAX_CHUNK, ChunkTopK, padded
from torchbft.tensors.compression.transform import Identity, Transform
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.update import Update, check

CODEC_NAMES = ("float32", "bfloat16", "int8", "topk:CHUNK:K[:float32|bfloat16|int8]")
SPARSE_SAFE_RULES = frozenset({"norm_clipping+mean"})
"""Rules whose bound holds on raw sparse messages: called bounded, not robust (DESIGN §4)."""


@dataclass(frozen=True)
class Codec:
    """Transform, selector (None: dense), quantiser. Build it with ``get_codec``."""

    name: str
    selector: ChunkTopK | None
    quantiser: Quantiser
    transform: Transform

    @property
    def robust_compatible(self) -> bool:
        """Whether decoded updates are dense estimates, which robust rules need."""
        return self.selector is None

    def check(self, rule_name: str, f: int) -> None:
        """Raise PreconditionError when this codec's messages defeat the rule."""
        if f > 0 and not self.robust_compatible and rule_name not in SPARSE_SAFE_RULES:
            raise PreconditionError(
                f"{self.name} with rule {rule_name} and f={f}: most coordinates of raw top-k "
                "messages have no sender or one, and honest ones are nearly orthogonal, so neither "
                "medians nor distances tell a liar",
                where="codec",
                hint="use a dense codec (int8), the rule norm_clipping+mean (bounded, not robust), "
                "or f=0",
            )

    def max_bytes(self, layout: StateLayout) -> int:
        """Length of the longest payload for this layout; nothing longer is read from a peer."""
        size, code = layout.parameter_count, self.quantiser.code_dtype.itemsize
        if self.selector is not None:
            scale = 1 if self.quantiser.row_width else 0
            per_row = 2 + scale + self.selector.k * (2 + code)
            parameters = self.selector.rows(size) * per_row
        else:
            width = self.quantiser.row_width
            parameters = size * code + (-(-size // width) if width else 0)
        buffers = 4 * layout.float_buffer_count + 8 * layout.int_buffer_count
        return wire.HEADER.size + parameters + buffers

    def encode(
        self, update: Update, residual: Residual | None = None
    ) -> tuple[bytes, PendingResidual]:
        """Write ``update`` plus ``residual`` (default zero). Total: values that are not finite are
        written too, so that receivers refuse them by name.

        Returns the payload and the residual that is pending until the block is final.
        """
        before_D = torch.zeros_like(update.parameters_D) if residual is None else residual.values_D
        if before_D.shape != update.parameters_D.shape:
            raise MisuseError("residual and update are of different models", where="codec")
        section, sent_D = self._write(self.transform.forward(update.parameters_D + before_D))
        payload = wire.join(wire.preamble(self.selector, self.quantiser), section, update)
        pending = PendingResidual(before_D, update.parameters_D, self.transform.inverse(sent_D))
        return payload, pending

    def decode(self, payload: bytes | bytearray | memoryview, layout: StateLayout) -> Update:
        """Read foreign bytes: an update that passes ``check``, or DecodeError with the reason.

        Canonical: no two byte strings give the same update. Memory is bounded by the layout.
        """
        view = memoryview(payload).cast("B")
        if view.nbytes > self.max_bytes(layout):
            raise DecodeError(f"oversized: {view.nbytes} bytes, at most {self.max_bytes(layout)}")
        sections = wire.split(view, wire.preamble(self.selector, self.quantiser), layout)
        update = Update(
            self.transform.inverse(self._read(sections.parameters, layout.parameter_count)),
            wire.read(sections.float_buffers, torch.float32),
            wire.read(sections.int_buffers, torch.int64),
        )
        reason = check(update, layout)
        if reason is not None:
            raise DecodeError(reason)
        return update

    def _write(self, values_D: Tensor) -> tuple[bytes, Tensor]:
        """The parameter section, and the values that it says (float32 D)."""
        size = len(values_D)
        if self.selector is None:
            codes = self.quantiser.codes(padded(values_D, self._width(size)))
            return wire.write_dense(codes, size), self._dense(codes, size)
        values_RW, indices_RW = self.selector.select(values_D)
        codes = self.quantiser.codes(values_RW)
        # A row that is not finite is NaN throughout, also where it is filled up with zeros.
        said_RW = torch.where(values_RW == 0, 0.0, self.quantiser.values(codes))
        section = wire.write_sparse(codes, indices_RW, said_RW != 0)
        return section, self.selector.scatter(said_RW, indices_RW, size)

    def _read(self, section: memoryview, size: int) -> Tensor:
        if self.selector is None:
            codes = wire.read_dense(section, self.quantiser, size)
            self._refuse_fault(codes)
            return self._dense(codes, size)
        codes, indices_RW = wire.read_sparse(section, self.selector, self.quantiser, size)
        self._refuse_fault(codes)
        return self.selector.scatter(self.quantiser.values(codes), indices_RW, size)

    def _refuse_fault(self, codes: Codes) -> None:
        fault = self.quantiser.fault(codes)
        if fault is not None:
            raise DecodeError(f"not canonical: {fault}")

    def _dense(self, codes: Codes, size: int) -> Tensor:
        """The values of codes that nobody else holds; a copy only where a row was filled up."""
        flat = self.quantiser.values(codes).reshape(-1)
        return flat if len(flat) == size else flat[:size].clone()

    def _width(self, size: int) -> int:
        return self.quantiser.row_width or max(size, 1)


def get_codec(name: str) -> Codec:
    """The codec of a run file: ``float32``, ``bfloat16``, ``int8``, ``topk:4096:64`` (values in
    bfloat16) or ``topk:4096:64:int8``. Raises PreconditionError for any other name."""
    parts = name.split(":")
    if len(parts) == 1 and name in QUANTISERS:
        return Codec(name, None, QUANTISERS[name], Identity())
    sparse = len(parts) in (3, 4) and parts[0] == "topk" and all(map(_is_count, parts[1:3]))
    quantiser = QUANTISERS.get(parts[3] if len(parts) == 4 else "bfloat16")
    if not sparse or quantiser is None:
        raise PreconditionError(
            f"no codec is named {name[:80]!r}",
            where="codec",
            hint=f"one of {', '.join(CODEC_NAMES)}",
        )
    chunk, k = int(parts[1]), int(parts[2])
    if not 1 <= k <= chunk <= MAX_CHUNK or k == MAX_CHUNK:
        raise PreconditionError(
            f"{name}: needs 1 <= k <= chunk <= {MAX_CHUNK} and k < {MAX_CHUNK}", where="codec"
        )
    return Codec(name, ChunkTopK(chunk, k), quantiser, Identity())


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 6 and not text.startswith("0")


def max_payload_bytes(layout: StateLayout, codec: Codec) -> int:
    """Length of the longest payload of a round; the bound for network and storage."""
    return codec.max_bytes(layout)
