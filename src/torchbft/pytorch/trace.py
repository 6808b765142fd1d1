"""Step-by-step commitments to the work of one round: what an audit by replay is checked against.

A leaf every ``LEAF_STEPS`` inner steps commits model and inner optimizer. A last leaf commits the
end state, the residual before and after, and ``payload_root``: encoding is the last operator that
an audit replays, so nobody can train honestly and submit something else (DESIGN §3). The root over
all leaves of a round is the ``trace_root`` of its commitment.

Shape suffix: D parameter values.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from torchbft.primitives import wire
from torchbft.primitives.digests import blake3_digest, merkle_root
from torchbft.tensors.layout import FlatModel
from torchbft.tensors.state_root import tensor_root

LEAF_STEPS = 16
"""Inner steps between leaves: hashing a state then costs about 0.1 % of the steps it covers, and
honest replays of so few steps stay close enough to be told from cheated ones."""


class RoundTrace:
    """The leaves of one round, in order."""

    def __init__(self, round: int, start_root: bytes) -> None:
        self.leaves = [blake3_digest("trace/start", round.to_bytes(8, "big"), start_root)]

    def step(self, step: int, model: bytes, inner: bytes) -> None:
        """Commit the roots (32 bytes each) of model and inner state after ``step`` inner steps."""
        self.leaves.append(blake3_digest("trace/step", step.to_bytes(8, "big"), model, inner))

    def finish(
        self, step: int, end: bytes, before: bytes, after: bytes, payload_root: bytes
    ) -> bytes:
        """Commit the end and the payload; returns ``trace_root``. All roots are 32 bytes."""
        parts = (end, before, after, payload_root)
        self.leaves.append(blake3_digest("trace/end", step.to_bytes(8, "big"), *parts))
        return merkle_root("trace", self.leaves)


def model_root(flat: FlatModel) -> bytes:
    """Root of a model's values in the layout's order."""
    groups = (
        ("parameters", flat.parameters_D),
        ("float_buffers", flat.float_buffers_B),
        ("int_buffers", flat.int_buffers_I),
    )
    return merkle_root("trace/model", [tensor_root(name, values) for name, values in groups])


def residual_root(values_D: Tensor) -> bytes:
    """Root of a residual (float32 D)."""
    return tensor_root("residual", values_D)


def inner_root(optimizers: Iterable[Optimizer]) -> bytes:
    """Root of what inner optimizers remember, parameters counted in the order of their groups."""
    leaves = [
        leaf
        for index, optimizer in enumerate(optimizers)
        for leaf in _optimizer_leaves(f"{index}", optimizer)
    ]
    return merkle_root("trace/inner", leaves)


def _optimizer_leaves(name: str, optimizer: Optimizer) -> Iterable[bytes]:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    for place, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        for key in sorted(state, key=str):
            yield _value_root(f"{name}/{place}/{key}", state[key])


def _value_root(name: str, value: object) -> bytes:
    """Digest of one remembered value: a tensor, a plain value, or a nest of them."""
    if isinstance(value, Tensor):
        return tensor_root(name, value.detach().cpu())
    if isinstance(value, dict):
        items = sorted(value.items(), key=lambda item: str(item[0]))
        return _nest_root(name, [_value_root(f"{name}/{key}", item) for key, item in items])
    if isinstance(value, list | tuple):
        return _nest_root(name, [_value_root(f"{name}/{i}", item) for i, item in enumerate(value)])
    plain = value if isinstance(value, bool | int | float | str | None) else type(value).__name__
    return blake3_digest("trace/value", name.encode(), wire.encode(plain))


def _nest_root(name: str, roots: Sequence[bytes]) -> bytes:
    return blake3_digest("trace/nest", name.encode(), *roots)
