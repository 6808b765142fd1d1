"""What holds for every vector attack and every view."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torchbft import attacks

VECTORS = [name for name, attack in attacks.known().items() if attack.kind == "vector"]
NON_FINITE = {"nan", "inf"}


@st.composite
def views(draw: st.DrawFn) -> attacks.VectorView:
    n_honest, size = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    scale = draw(st.sampled_from([0.0, 1e-20, 1e-3, 1.0, 1e6]))
    rows = [torch.randn(size, generator=generator) * scale for _ in range(n_honest + 4)]
    return attacks.VectorView(
        own_D=rows[0],
        honest_ND=draw(st.sampled_from([None, torch.stack(rows[4:])])),
        aggregate_history=tuple(rows[1 : 1 + draw(st.integers(0, 3))]),
        n=n_honest + 2,
        f=2,
        round=draw(st.integers(0, 2**40)),
        seed=draw(st.binary(max_size=32)),
        rule=draw(st.sampled_from([None, lambda rows_ND: rows_ND.median(dim=0).values])),
    )


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.view(torch.int32), right.view(torch.int32))


@pytest.mark.parametrize("name", VECTORS)
@settings(max_examples=40, deadline=None)
@given(view=views())
def test_shape_dtype_determinism_and_no_side_effects(name: str, view: attacks.VectorView) -> None:
    inputs = [view.own_D, *view.aggregate_history]
    inputs += [] if view.honest_ND is None else [view.honest_ND]
    before = [tensor.clone() for tensor in inputs]
    first_D, second_D = (attacks.get(name)().forge(view) for _ in range(2))  # type: ignore[attr-defined]
    assert first_D.shape == view.own_D.shape
    assert first_D.dtype == torch.float32
    assert same(first_D, second_D)
    assert bool(torch.isfinite(first_D).all()) == (name not in NON_FINITE)
    first_D.fill_(1.0)
    assert all(map(torch.equal, inputs, before))


@pytest.mark.parametrize("name", ["gaussian", "nan", "inf"])
@given(seeds=st.lists(st.binary(min_size=32, max_size=32), min_size=2, max_size=2, unique=True))
@settings(max_examples=20, deadline=None)
def test_other_seeds_and_rounds_give_other_lies(name: str, seeds: list[bytes]) -> None:
    own_D = torch.ones(1000)
    attack = attacks.get(name)()
    lies = [
        attack.forge(attacks.VectorView(own_D=own_D, seed=seed, round=round))  # type: ignore[attr-defined]
        for seed in seeds
        for round in (0, 1)
    ]
    assert len({lie_D.numpy().tobytes() for lie_D in lies}) == 4


@given(view=views(), factor=st.sampled_from([0.25, 2.0, 1024.0]))
@settings(max_examples=30, deadline=None)
def test_directional_attacks_scale_with_what_they_see(
    view: attacks.VectorView, factor: float
) -> None:
    """A power of two commutes with every rounding, so equality is exact (no subnormals here)."""
    if float(view.own_D.abs().max()) < 1e-10:
        return
    bigger = attacks.VectorView(
        own_D=view.own_D * factor,
        honest_ND=None if view.honest_ND is None else view.honest_ND * factor,
        aggregate_history=tuple(row_D * factor for row_D in view.aggregate_history),
    )
    for name in ("sign_flip", "ipm", "scaled", "copycat"):
        attack = attacks.get(name)()
        assert torch.equal(attack.forge(bigger), attack.forge(view) * factor)  # type: ignore[attr-defined]


@given(
    labels=st.lists(st.integers(0, 9), min_size=1, max_size=20),
)
@settings(max_examples=30, deadline=None)
def test_flipping_labels_twice_gives_them_back(labels: list[int]) -> None:
    flip = attacks.get("label_flip")(classes=10)  # type: ignore[call-arg]
    x, y = torch.zeros(len(labels)), torch.tensor(labels)
    flipped = flip.batch(x, y)[1]  # type: ignore[attr-defined]
    assert flip.batch(x, flipped)[1].tolist() == labels  # type: ignore[attr-defined]
    assert all(0 <= label <= 9 for label in flipped.tolist())
