"""The state that every honest peer holds bit for bit, its root and its file.

Shape suffixes: D parameter values, B float buffer values, I integer buffer values.

``AgreedState`` lives on the CPU, whatever device trains. Its root (``root()``) covers every field;
who trusts a state compares that root with a signed one: reading a file trusts nothing.

File: safetensors with the tensors ``parameters``, ``float_buffers``, ``int_buffers``,
``outer_momentum`` and ``rule/<name>``, and one metadata entry ``torchbft`` (JSON: version, layout,
counters, digests). Equal states give equal files.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save as encode_tensors
from torch import Tensor, nn

from torchbft.primitives.digests import blake3_digest, merkle_root
from torchbft.primitives.errors import DecodeError, MisuseError, StorageError
from torchbft.tensors.aggregation import Rule
from torchbft.tensors.layout import FlatModel, Kind, StateLayout, TensorSpec
from torchbft.tensors.state_root import root_of_bytes, tensor_root, tensor_view

__all__ = ["AgreedState", "FlatModel", "StateLayout", "TensorSpec"]

STATE_VERSION = 1
NO_DIGEST = bytes(32)
FIXED_TENSORS = ("parameters", "float_buffers", "int_buffers", "outer_momentum")
"""What a state file holds beside rule history, in the order of ``AgreedState``'s fields."""
MAX_STATE_BYTES = 1 << 40
"""Default bound of a state file: 1 TiB, the largest model one machine would hold in memory."""
MAX_RULE_TENSORS = 64
"""Tensors of rule history: every rule at hand keeps at most three."""
MAX_RULE_KEY_BYTES = 256
"""One key of rule history: a rule's name and a field."""
MAX_HEADER_BYTES = 1 << 26
"""Safetensors header: 65,536 names of 1 KiB each; bounds what a foreign file costs."""
RULE_DTYPES = ("F64", "F32", "I64")
"""What rules keep, as safetensors names it."""


@dataclass(frozen=True, eq=False)
class AgreedState:
    """The agreed model and everything else that decides the next round. Never changed in place.

    ``parameters_D``, ``outer_momentum_D`` and ``float_buffers_B`` are float32, ``int_buffers_I``
    int64; all are contiguous CPU tensors. ``rule_state`` is the aggregation rule's history.
    ``round`` counts the rounds applied, ``inner_step`` the inner steps scheduled so far,
    ``pass_index`` the data epoch and ``cursor`` the samples consumed in it. The two digests are the
    ledger's own (membership, credit), 32 bytes each.
    """

    layout: StateLayout
    parameters_D: Tensor
    float_buffers_B: Tensor
    int_buffers_I: Tensor
    outer_momentum_D: Tensor
    rule_state: Mapping[str, Tensor] = field(default_factory=dict)
    round: int = 0
    inner_step: int = 0
    pass_index: int = 0
    cursor: int = 0
    membership_digest: bytes = NO_DIGEST
    credit_digest: bytes = NO_DIGEST

    def __post_init__(self) -> None:
        reason = _shape_fault(self)
        if reason is not None:
            raise MisuseError(reason, where="AgreedState")

    @staticmethod
    def initial(
        model: nn.Module,
        *,
        rule: Rule | None = None,
        membership_digest: bytes = NO_DIGEST,
        credit_digest: bytes = NO_DIGEST,
    ) -> AgreedState:
        """The state before round 0: the values of ``model``, the history that ``rule`` starts
        from, zero momentum, zero counters."""
        layout = StateLayout.from_module(model)
        flat = layout.flatten(model)
        return AgreedState(
            layout,
            flat.parameters_D,
            flat.float_buffers_B,
            flat.int_buffers_I,
            torch.zeros_like(flat.parameters_D),
            {} if rule is None else rule.init(layout.parameter_count),
            membership_digest=membership_digest,
            credit_digest=credit_digest,
        )

    def load_into(self, model: nn.Module) -> None:
        """Write the state into ``model`` in place: same storages, so ties and optimizers hold.

        Each value is rounded to its tensor's dtype and copied to its device. Raises MisuseError
        when the model has another layout; nothing is written then.
        """
        live = self.layout.tensors_of(model)
        groups = (
            ("parameter", self.parameters_D),
            ("float_buffer", self.float_buffers_B),
            ("int_buffer", self.int_buffers_I),
        )
        with torch.no_grad():
            for kind, values in groups:
                for spec, place in self.layout.group(kind):  # type: ignore[arg-type]
                    live[spec.name].copy_(values[place].view(spec.shape))

    def root(self) -> bytes:
        """32 bytes that name this state: the root that validators sign. Computed once."""
        return self._root

    @cached_property
    def _root(self) -> bytes:
        counters = (self.round, self.inner_step, self.pass_index, self.cursor)
        return blake3_digest(
            "state/root",
            STATE_VERSION.to_bytes(8, "little"),
            self.layout.digest(),
            self._tensors_root(),
            b"".join(count.to_bytes(8, "little") for count in counters),
            self.membership_digest,
            self.credit_digest,
        )

    def _tensors_root(self) -> bytes:
        roots = [
            root
            for group, kind, values in (
                ("parameters", "parameter", self.parameters_D),
                ("outer_momentum", "parameter", self.outer_momentum_D),
                ("float_buffers", "float_buffer", self.float_buffers_B),
                ("int_buffers", "int_buffer", self.int_buffers_I),
            )
            for root in self._group_roots(group, kind, values)  # type: ignore[arg-type]
        ]
        history = [tensor_root(f"rule/{key}", self.rule_state[key]) for key in _keys(self)]
        return merkle_root("state/tensors", roots + history)

    def _group_roots(self, group: str, kind: Kind, values: Tensor) -> Iterator[bytes]:
        flat, size, dtype = tensor_view(values), values.element_size(), values.dtype
        for spec, place in self.layout.group(kind):
            piece = flat[place.start * size : place.stop * size]
            yield root_of_bytes(f"{group}/{spec.name}", piece, dtype, spec.shape)

    def encode(self) -> bytes:
        """The state as one safetensors file. Equal states give equal bytes."""
        facts = _Facts(
            STATE_VERSION,
            tuple((t.name, t.shape, t.dtype, t.kind) for t in self.layout.tensors),
            self.layout.aliases,
            (self.round, self.inner_step, self.pass_index, self.cursor),
            self.membership_digest.hex(),
            self.credit_digest.hex(),
        )
        fixed = (
            self.parameters_D,
            self.float_buffers_B,
            self.int_buffers_I,
            self.outer_momentum_D,
        )
        tensors = {
            **dict(zip(FIXED_TENSORS, fixed, strict=True)),
            **{f"rule/{key}": self.rule_state[key].contiguous() for key in _keys(self)},
        }
        return encode_tensors(tensors, {"torchbft": msgspec.json.encode(facts).decode()})

    @staticmethod
    def decode(data: bytes | memoryview, layout: StateLayout | None = None) -> AgreedState:
        """The state of ``encode``'s bytes, checked as ``load`` checks a file."""
        memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
        with tempfile.NamedTemporaryFile(dir=memory) as file:
            file.write(data)
            file.flush()
            return AgreedState.load(file.name, layout)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file durably: whole under its name, or not at all. Raises StorageError."""
        target = Path(path)
        draft = target.with_name(target.name + ".part")
        try:
            with draft.open("wb") as file:
                file.write(self.encode())
                file.flush()
                os.fsync(file.fileno())
            draft.replace(target)
            folder = os.open(target.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise StorageError(
                f"the model state could not be written: {error.strerror}",
                where=str(target),
                hint="free space on this disk or check the folder's permissions",
            ) from error

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        layout: StateLayout | None = None,
        *,
        max_bytes: int = MAX_STATE_BYTES,
    ) -> AgreedState:
        """Read a file that may come from anyone. It proves nothing: compare ``root()``.

        Raises StorageError when the file cannot be read, DecodeError when it is larger than
        ``max_bytes``, not a state, or of another layout than the ``layout`` expected.
        """
        try:
            with open(path, "rb") as file:
                size = os.fstat(file.fileno()).st_size
                header = int.from_bytes(file.read(8), "little")
        except OSError as error:
            raise StorageError(
                f"the model state could not be read: {error.strerror}", where=str(path)
            ) from error
        if size > max_bytes or not 2 <= header <= min(size - 8, MAX_HEADER_BYTES):
            raise DecodeError(f"{size} bytes are no state within {max_bytes}", where=str(path))
        try:
            return _read(path, layout)
        except OSError as error:
            raise StorageError(str(error), where=str(path)) from error
        except (SafetensorError, msgspec.MsgspecError, ValueError, MisuseError) as error:
            raise DecodeError(f"not a model state: {error}", where=str(path)) from error


class _Facts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The metadata entry of a state file."""

    version: int
    tensors: tuple[tuple[str, tuple[int, ...], str, Kind], ...]
    aliases: tuple[tuple[str, str], ...]
    counters: tuple[int, int, int, int]
    membership: str
    credit: str


def _keys(state: AgreedState) -> list[str]:
    return sorted(state.rule_state)


def _shape_fault(state: AgreedState) -> str | None:
    layout = state.layout
    expected = (
        ("parameters_D", state.parameters_D, torch.float32, layout.parameter_count),
        ("outer_momentum_D", state.outer_momentum_D, torch.float32, layout.parameter_count),
        ("float_buffers_B", state.float_buffers_B, torch.float32, layout.float_buffer_count),
        ("int_buffers_I", state.int_buffers_I, torch.int64, layout.int_buffer_count),
    )
    for name, values, dtype, size in expected:
        if values.dtype != dtype or tuple(values.shape) != (size,) or values.device.type != "cpu":
            return f"{name} is not a CPU tensor of {size} {dtype}"
    if any(tensor.device.type != "cpu" for tensor in state.rule_state.values()):
        return "rule_state is not on the CPU"
    counters = (state.round, state.inner_step, state.pass_index, state.cursor)
    if any(not 0 <= count < 1 << 63 for count in counters):
        return "a counter is negative or beyond 63 bits"
    if len(state.membership_digest) != 32 or len(state.credit_digest) != 32:
        return "membership and credit are digests of 32 bytes"
    return None


def _read(path: str | os.PathLike[str], expected: StateLayout | None) -> AgreedState:
    with safe_open(path, framework="pt") as file:
        facts = _facts(file.metadata())
        layout = StateLayout(tuple(TensorSpec(*t) for t in facts.tensors), facts.aliases)
        layout.validate()
        if expected is not None and layout != expected:
            raise DecodeError("the state has another layout than this model", where=str(path))
        names = set(file.keys())
        rule = sorted(name for name in names if name.startswith("rule/"))
        if len(rule) > MAX_RULE_TENSORS or any(len(k.encode()) > MAX_RULE_KEY_BYTES for k in rule):
            raise DecodeError("more rule history than any rule keeps", where=str(path))
        if any(file.get_slice(name).get_dtype() not in RULE_DTYPES for name in rule):
            raise DecodeError("rule history of an unknown dtype", where=str(path))
        # Cloned: what safetensors hands out is the mapped file, which may change under us.
        tensors = {name: file.get_tensor(name).clone() for name in sorted(names)}
    if tensors.keys() != {*FIXED_TENSORS, *rule}:
        raise DecodeError("a tensor is missing, or one that no state has", where=str(path))
    return AgreedState(
        layout,
        parameters_D=tensors["parameters"],
        float_buffers_B=tensors["float_buffers"],
        int_buffers_I=tensors["int_buffers"],
        outer_momentum_D=tensors["outer_momentum"],
        rule_state={name.removeprefix("rule/"): tensors[name] for name in rule},
        round=facts.counters[0],
        inner_step=facts.counters[1],
        pass_index=facts.counters[2],
        cursor=facts.counters[3],
        membership_digest=bytes.fromhex(facts.membership),
        credit_digest=bytes.fromhex(facts.credit),
    )


def _facts(metadata: dict[str, str] | None) -> _Facts:
    if metadata is None or metadata.keys() != {"torchbft"}:
        raise DecodeError("no torchbft metadata")
    facts = msgspec.json.decode(metadata["torchbft"], type=_Facts)
    if msgspec.json.encode(facts).decode() != metadata["torchbft"]:
        raise DecodeError("the metadata is not canonical")
    if facts.version != STATE_VERSION:
        raise DecodeError(f"state version {facts.version}; this program reads {STATE_VERSION}")
    return facts
