"""The canonical order of a model's tensors: what "the same model" means on every peer.

Shape suffixes: D parameter values, B float buffer values, I integer buffer values,
V BatchNorm variances.

Three groups are flattened apart, each in the order of its names:

* parameters, trainable or frozen (so that later unfreezing changes no layout). What is agreed is a
  float32 master, whatever the model's own precision;
* float buffers, as float32;
* integer and boolean buffers, as int64, zero-dimensional ones (``num_batches_tracked``) included.

A tensor that several names share (tied weights) is stored once, under the smallest of its names.
``torch.compile`` wrappers leave no trace in a name. Buffers that a module does not save
(``persistent=False``) are not state.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from torchbft.primitives.digests import blake3_digest
from torchbft.primitives.errors import DecodeError, MisuseError

Kind = Literal["parameter", "float_buffer", "int_buffer"]

FLOAT_DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
INT_DTYPES = {
    "int64": torch.int64,
    "int32": torch.int32,
    "int16": torch.int16,
    "int8": torch.int8,
    "uint8": torch.uint8,
    "bool": torch.bool,
}

MAX_TENSORS = 1 << 16
"""Names in one layout: ten times the largest published models; bounds what a foreign file costs."""
MAX_NAME_BYTES = 1024
"""One tensor name: module paths are far shorter; bounds what a foreign file costs."""
MAX_DIMENSIONS = 16
"""Dimensions of one tensor: torch itself prints and indexes fewer than this in practice."""
MAX_VALUES = 1 << 40
"""Values in one layout: 4 TiB of float32, beyond any model that fits one machine."""


@dataclass(frozen=True)
class TensorSpec:
    """One named tensor: its shape, the dtype it has inside the model, and its group."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Kind

    @cached_property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def torch_dtype(self) -> torch.dtype:
        return (INT_DTYPES if self.kind == "int_buffer" else FLOAT_DTYPES)[self.dtype]


@dataclass(frozen=True)
class FlatModel:
    """A model's values, one flat CPU tensor a group, in the layout's order and owned by itself."""

    parameters_D: Tensor
    float_buffers_B: Tensor
    int_buffers_I: Tensor


@dataclass(frozen=True)
class StateLayout:
    """Names, shapes, dtypes and ties of a model, in canonical order. Equal by value."""

    tensors: tuple[TensorSpec, ...]
    aliases: tuple[tuple[str, str], ...] = ()
    """Pairs (further name, name that is stored), sorted."""

    @staticmethod
    def from_module(model: nn.Module) -> StateLayout:
        """Read the layout of ``model``. Raises MisuseError for tensors that cannot be agreed on."""
        first: dict[tuple[object, ...], str] = {}
        specs: list[TensorSpec] = []
        aliases: list[tuple[str, str]] = []
        for name, (tensor, is_parameter) in sorted(_named_tensors(model).items()):
            place = _place(name, tensor)
            if place in first:
                aliases.append((name, first[place]))
                continue
            first[place] = name
            specs.append(_spec(name, tensor, is_parameter))
        return StateLayout(tuple(specs), tuple(aliases))

    def group(self, kind: Kind) -> Iterator[tuple[TensorSpec, slice]]:
        """The tensors of one group in order, with their places in the flat tensor."""
        start = 0
        for spec in self.tensors:
            if spec.kind == kind:
                yield spec, slice(start, start + spec.size)
                start += spec.size

    @cached_property
    def parameter_count(self) -> int:
        return sum(spec.size for spec, _ in self.group("parameter"))

    @cached_property
    def float_buffer_count(self) -> int:
        return sum(spec.size for spec, _ in self.group("float_buffer"))

    @cached_property
    def int_buffer_count(self) -> int:
        return sum(spec.size for spec, _ in self.group("int_buffer"))

    @cached_property
    def moments(self) -> tuple[Tensor, Tensor]:
        """Places (int64 V, int64 V) of running means and of their running variances in B."""
        places = {spec.name: (spec.shape, place) for spec, place in self.group("float_buffer")}
        pairs = [
            (places[mean_name][1], place)
            for name, (shape, place) in places.items()
            if name.rpartition(".")[2] == "running_var"
            and places.get(mean_name := name[: -len("var")] + "mean", ((-1,),))[0] == shape
        ]
        mean_V = [i for mean, _ in pairs for i in range(mean.start, mean.stop)]
        variance_V = [i for _, variance in pairs for i in range(variance.start, variance.stop)]
        return torch.tensor(mean_V, dtype=torch.int64), torch.tensor(variance_V, dtype=torch.int64)

    @cached_property
    def integer_limits(self) -> tuple[Tensor, Tensor]:
        """Smallest and largest value (int64 I, int64 I) that each integer buffer can hold."""
        low_I = torch.zeros(self.int_buffer_count, dtype=torch.int64)
        high_I = torch.ones(self.int_buffer_count, dtype=torch.int64)
        for spec, place in self.group("int_buffer"):
            if spec.dtype != "bool":
                limits = torch.iinfo(spec.torch_dtype)
                low_I[place], high_I[place] = limits.min, limits.max
        return low_I, high_I

    def digest(self) -> bytes:
        """32 bytes that name this layout."""
        return self._digest

    @cached_property
    def _digest(self) -> bytes:
        parts = [
            "\0".join((spec.kind, spec.dtype, ",".join(map(str, spec.shape)), spec.name)).encode()
            for spec in self.tensors
        ]
        ties = ["\0".join(pair).encode() for pair in self.aliases]
        count = len(parts).to_bytes(8, "little")
        return blake3_digest("state/layout", count, *parts, *ties)

    def validate(self) -> None:
        """Check a layout that came from outside. Raises DecodeError at the first broken bound."""
        if len(self.tensors) + len(self.aliases) > MAX_TENSORS:
            raise DecodeError(f"more than {MAX_TENSORS} tensors in a layout")
        names = [spec.name for spec in self.tensors]
        if any(a >= b for a, b in pairwise(names)):
            raise DecodeError("tensor names are not in strictly ascending order")
        for spec in self.tensors:
            _validate_spec(spec)
        if sum(spec.size for spec in self.tensors) > MAX_VALUES:
            raise DecodeError(f"more than {MAX_VALUES} values in a layout")
        self._validate_aliases(set(names))

    def _validate_aliases(self, names: set[str]) -> None:
        further = [alias for alias, _ in self.aliases]
        if any(a >= b for a, b in pairwise(further)):
            raise DecodeError("aliases are not in strictly ascending order")
        for alias, name in self.aliases:
            if name not in names or alias in names or alias <= name:
                raise DecodeError(f"alias {alias[:80]!r} of {name[:80]!r} is not canonical")
            if len(alias.encode(errors="replace")) > MAX_NAME_BYTES:
                raise DecodeError(f"a tensor name is longer than {MAX_NAME_BYTES} bytes")

    def tensors_of(self, model: nn.Module) -> dict[str, Tensor]:
        """The live tensors of ``model`` by stored name. Raises MisuseError on another layout."""
        found = StateLayout.from_module(model)
        if found != self:
            raise MisuseError(
                f"the model differs from the agreed layout: {_first_difference(self, found)}",
                hint="build the model exactly as when the run was joined",
            )
        return {name: tensor for name, (tensor, _) in _named_tensors(model).items()}

    def flatten(self, model: nn.Module) -> FlatModel:
        """Copy the values of ``model`` to the CPU: float32 D, float32 B, int64 I."""
        live = self.tensors_of(model)

        def gather(kind: Kind, dtype: torch.dtype) -> Tensor:
            pieces = [live[spec.name].detach().reshape(-1) for spec, _ in self.group(kind)]
            return _joined([piece.to("cpu", dtype) for piece in pieces], dtype)

        return FlatModel(
            gather("parameter", torch.float32),
            gather("float_buffer", torch.float32),
            gather("int_buffer", torch.int64),
        )

    def gradients(self, model: nn.Module) -> Tensor:
        """The gradients of ``model`` (float32 D); zero where a parameter has none."""
        live = self.tensors_of(model)
        pieces = []
        for spec, _ in self.group("parameter"):
            gradient = live[spec.name].grad
            flat = torch.zeros(spec.size) if gradient is None else gradient.detach().reshape(-1)
            pieces.append(flat.to("cpu", torch.float32))
        return _joined(pieces, torch.float32)

    def rounded(self, parameters_D: Tensor) -> Tensor:
        """The master as the model sees it: each value rounded to its tensor's own dtype."""
        seen_D = parameters_D.clone()
        for spec, place in self.group("parameter"):
            seen_D[place] = seen_D[place].to(spec.torch_dtype).to(torch.float32)
        return seen_D


def _joined(pieces: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat(pieces) if pieces else torch.zeros(0, dtype=dtype)


def _named_tensors(model: nn.Module) -> dict[str, tuple[Tensor, bool]]:
    """Every saved tensor under every name it has; True for parameters."""
    found: dict[str, tuple[Tensor, bool]] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        unsaved = module._non_persistent_buffers_set
        owned: list[tuple[str, Tensor | None, bool]] = [
            *((name, tensor, True) for name, tensor in module._parameters.items()),
            *((n, tensor, False) for n, tensor in module._buffers.items() if n not in unsaved),
        ]
        for name, tensor, is_parameter in owned:
            if tensor is not None:
                full = _without_wrappers(f"{prefix}.{name}" if prefix else name)
                if full in found and found[full][0] is not tensor:
                    raise MisuseError(f"two tensors of the model are named {full!r}")
                found[full] = (tensor, is_parameter)
    return found


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def _place(name: str, tensor: Tensor) -> tuple[object, ...]:
    """What two names share when they are tied: storage, offset and shape."""
    if is_lazy(tensor) or tensor.is_meta:
        raise MisuseError(
            f"tensor {name!r} has no values yet", hint="run one batch through lazy modules first"
        )
    if tensor.numel() == 0:
        return (name,)
    where = (tensor.device, tensor.untyped_storage().data_ptr(), tensor.storage_offset())
    return (*where, tensor.shape, tensor.stride(), tensor.dtype)


def _spec(name: str, tensor: Tensor, is_parameter: bool) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    kind: Kind
    if dtype in FLOAT_DTYPES:
        kind = "parameter" if is_parameter else "float_buffer"
    elif dtype in INT_DTYPES:
        kind = "int_buffer"
    else:
        raise MisuseError(f"tensor {name!r} has dtype {dtype}, which peers cannot agree on")
    return TensorSpec(name, tuple(tensor.shape), dtype, kind)


def _validate_spec(spec: TensorSpec) -> None:
    shown = repr(spec.name[:80])
    if len(spec.name.encode(errors="replace")) > MAX_NAME_BYTES:
        raise DecodeError(f"a tensor name is longer than {MAX_NAME_BYTES} bytes")
    if spec.dtype not in (INT_DTYPES if spec.kind == "int_buffer" else FLOAT_DTYPES):
        raise DecodeError(f"tensor {shown} is a {spec.kind} of dtype {spec.dtype[:20]!r}")
    if len(spec.shape) > MAX_DIMENSIONS or any(n < 0 or n > MAX_VALUES for n in spec.shape):
        raise DecodeError(f"tensor {shown} has an impossible shape")


def _first_difference(agreed: StateLayout, found: StateLayout) -> str:
    for ours, theirs in zip(agreed.tensors, found.tensors, strict=False):
        if ours != theirs:
            return f"{ours.name} {ours.dtype}{list(ours.shape)} is now {theirs.name} " + (
                f"{theirs.dtype}{list(theirs.shape)}"
            )
    if len(agreed.tensors) != len(found.tensors):
        return f"{len(agreed.tensors)} tensors are now {len(found.tensors)}"
    return "other weights are tied"
