"""Buffer pooling and the round's step as a function of a set."""

from __future__ import annotations

import statistics

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from torchbft.primitives.ids import PeerId
from torchbft.tensors import aggregation
from torchbft.tensors.advance import LedgerFields, advance, integer_median, pool_float_buffers
from torchbft.tensors.outer import DILOCO
from torchbft.tensors.state import AgreedState, StateLayout
from torchbft.tensors.update import Update

EXAMPLES = settings(max_examples=50, deadline=None)
LAYOUT = StateLayout.from_module(nn.BatchNorm1d(1))
LEDGER = LedgerFields(1, 1, 0, 0, bytes(32), bytes(32))

mean = st.floats(-1e4, 1e4, width=32)
variance = st.floats(0.0, 1e4, width=32)
honest_rows = st.lists(st.tuples(mean, variance), min_size=3, max_size=9)
lie = st.tuples(st.floats(-(2.0**127), 2.0**127, width=32), st.floats(0, 2.0**127, width=32))


@EXAMPLES
@given(honest=honest_rows, lies=st.lists(lie, max_size=4), data=st.data())
def test_liars_move_pooled_moments_only_within_what_honest_peers_say(
    honest: list[tuple[float, float]], lies: list[tuple[float, float]], data: st.DataObject
) -> None:
    f = min(len(lies), (len(honest) - 1) // 2)
    shuffled = data.draw(st.permutations([*honest, *lies[:f]]))
    pooled = pool_float_buffers([torch.tensor(row) for row in shuffled], LAYOUT, f)
    means, variances = zip(*honest, strict=True)
    spread = (max(means) - min(means)) ** 2
    slack = 1e-5 * (1 + max(variances) + spread)
    assert min(means) <= float(pooled[0]) <= max(means)
    assert min(variances) <= float(pooled[1]) <= max(variances) + spread + slack


@EXAMPLES
@given(column=st.lists(st.integers(-(2**63), 2**63 - 1), min_size=1, max_size=9))
def test_the_integer_median_is_the_floored_true_median(column: list[int]) -> None:
    ordered = sorted(column)
    low, high = statistics.median_low(ordered), statistics.median_high(ordered)
    assert integer_median(torch.tensor(column)[:, None]).tolist() == [(low + high) // 2]


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(7)), rule=st.sampled_from(["arc+nnm+trimmed_mean", "krum"]))
def test_the_next_state_is_a_function_of_the_set(order: list[int], rule: str) -> None:
    state = AgreedState.initial(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    generator = torch.Generator().manual_seed(4)
    updates = [
        (
            PeerId(f"p{i}"),
            Update(
                torch.randn(state.layout.parameter_count, generator=generator),
                torch.rand(state.layout.float_buffer_count, generator=generator),
                torch.tensor([i]),
            ),
        )
        for i in range(7)
    ]
    chosen = aggregation.get(rule)
    f = 1
    plain, _ = advance(state, updates, rule=chosen, f=f, outer=DILOCO, ledger=LEDGER)
    shuffled = [updates[i] for i in order]
    again, _ = advance(state, shuffled, rule=chosen, f=f, outer=DILOCO, ledger=LEDGER)
    assert again.root() == plain.root()
