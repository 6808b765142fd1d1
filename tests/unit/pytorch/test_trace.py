"""Commitments to the work: every field changes the root."""

from __future__ import annotations

import torch
from torch import nn

from torchbft.pytorch.trace import RoundTrace, inner_root, model_root, residual_root
from torchbft.tensors.layout import FlatModel

A, B, C, D, E = (bytes([byte]) * 32 for byte in range(5))


def root(**changed: object) -> bytes:
    fields = {"round": 3, "start": A, "step": 16, "model": B, "inner": C, "last": 20, **changed}
    trace = RoundTrace(fields["round"], fields["start"])  # type: ignore[arg-type]
    trace.step(fields["step"], fields["model"], fields["inner"])  # type: ignore[arg-type]
    end = [fields.get(name, value) for name, value in zip("wxyz", (B, C, D, E), strict=True)]
    return trace.finish(fields["last"], *end)  # type: ignore[arg-type]


def test_every_committed_field_changes_the_root() -> None:
    changes: list[dict[str, object]] = [
        {"round": 4},
        {"start": E},
        {"step": 17},
        {"model": E},
        {"inner": E},
        {"last": 21},
        *({name: A} for name in "wxyz"),
    ]
    roots = [root(), *(root(**change) for change in changes)]
    assert len(set(roots)) == len(changes) + 1
    assert root() == root()


def test_a_step_may_not_be_left_out() -> None:
    whole, short = RoundTrace(0, A), RoundTrace(0, A)
    whole.step(16, B, C)
    assert whole.finish(20, B, C, D, E) != short.finish(20, B, C, D, E)


def flat(*values: float) -> FlatModel:
    nothing = torch.zeros(0)
    return FlatModel(torch.tensor(values), nothing, torch.zeros(0, dtype=torch.int64))


def test_model_roots_follow_values_and_groups() -> None:
    parameters, buffers = flat(1.0, 2.0), flat(1.0, 3.0)
    assert model_root(parameters) == model_root(flat(1.0, 2.0))
    moved = FlatModel(parameters.float_buffers_B, parameters.parameters_D, parameters.int_buffers_I)
    assert len({model_root(parameters), model_root(buffers), model_root(moved)}) == 3
    assert residual_root(torch.ones(2)) != residual_root(torch.zeros(2))


def stepped(optimizer: torch.optim.Optimizer, steps: int) -> bytes:
    for _ in range(steps):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
    return inner_root([optimizer])


def test_inner_roots_follow_what_optimizers_remember() -> None:
    def adam() -> torch.optim.Optimizer:
        return torch.optim.AdamW([nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(2))])

    roots = [stepped(adam(), steps) for steps in (0, 1, 2)]
    assert len(set(roots)) == 3
    assert stepped(adam(), 2) == roots[2]


def test_inner_roots_tell_optimizers_and_parameters_apart() -> None:
    one, other = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    first = torch.optim.SGD([one, other], lr=0.1, momentum=0.9)
    first.state[one]["momentum_buffer"] = torch.ones(3)
    second = torch.optim.SGD([one, other], lr=0.1, momentum=0.9)
    second.state[other]["momentum_buffer"] = torch.ones(3)
    roots = {inner_root(order) for order in ([first], [second], [first, second], [second, first])}
    assert len(roots) == 4


def test_nested_and_plain_memories_are_committed() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    roots = set()
    for memory in (1, 1.0, True, None, "one", [torch.ones(1)], (torch.zeros(1),), {"a": 1}, {}):
        optimizer.state[parameter]["memory"] = memory
        roots.add(inner_root([optimizer]))
    assert len(roots) == 9


def test_lbfgs_has_a_root() -> None:
    parameter = nn.Parameter(torch.tensor([2.0, 1.0]))
    optimizer = torch.optim.LBFGS([parameter], max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (parameter**2).sum()
        loss.backward()
        return loss

    before = inner_root([optimizer])
    optimizer.step(closure)  # type: ignore[arg-type]
    assert inner_root([optimizer]) != before
