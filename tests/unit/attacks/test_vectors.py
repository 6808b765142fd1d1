"""Each vector attack against an independent computation in plain Python floats."""

from __future__ import annotations

import math
import random
import statistics

import pytest
import torch
from torch import Tensor

from torchbft import attacks
from torchbft.attacks.vectors.alie import ALittleIsEnough, optimal_z, published_z
from torchbft.attacks.vectors.poisoning import LabelFlip
from torchbft.primitives.errors import PreconditionError

N_HONEST, D = 5, 7


def rows(seed: int = 0, count: int = N_HONEST, size: int = D) -> list[list[float]]:
    """Honest rows as Python floats that float32 holds exactly (sixteenths)."""
    dice = random.Random(seed)
    return [[dice.randrange(-64, 65) / 16 for _ in range(size)] for _ in range(count)]


def view(honest: list[list[float]], **fields: object) -> attacks.VectorView:
    values = {"n": 7, "f": 2, "round": 3, "seed": b"s" * 32, "honest_ND": torch.tensor(honest)}
    own_D = torch.tensor(rows(99, 1, len(honest[0]))[0])
    return attacks.VectorView(own_D=own_D, **(values | fields))  # type: ignore[arg-type]


def column_means(honest: list[list[float]]) -> list[float]:
    return [statistics.fmean(column) for column in zip(*honest, strict=True)]


def forge(name: str, seen: attacks.VectorView, **options: object) -> Tensor:
    attack = attacks.get(name)(**options)  # type: ignore[call-arg]
    assert isinstance(attack, attacks.VectorAttack)
    return attack.forge(seen)


@pytest.mark.parametrize(("name", "factor"), [("sign_flip", -4.0), ("ipm", -3.0)])
def test_negated_means_use_the_honest_mean_at_their_default_strength(
    name: str, factor: float
) -> None:
    honest = rows()
    expected = [factor * mean for mean in column_means(honest)]
    assert forge(name, view(honest)).tolist() == pytest.approx(expected, rel=1e-6)


def test_sign_flip_and_ipm_turn_a_plain_mean_at_seven_peers_with_two_liars() -> None:
    honest_ND = torch.tensor(rows())
    for name in ("sign_flip", "ipm"):
        forged_D = forge(name, view(rows()))
        mean_D = torch.cat([honest_ND, forged_D.expand(2, -1)]).mean(dim=0)
        assert float(mean_D @ honest_ND.mean(dim=0)) < 0.0
    weak_D = forge("ipm", view(rows()), strength=2.4)  # below (n−f)/f = 2.5
    mean_D = torch.cat([honest_ND, weak_D.expand(2, -1)]).mean(dim=0)
    assert float(mean_D @ honest_ND.mean(dim=0)) > 0.0


def test_scaled_multiplies_the_liars_own_update() -> None:
    seen = view(rows())
    assert forge("scaled", seen).tolist() == [100.0 * value for value in seen.own_D.tolist()]


def test_copycat_sends_the_first_honest_row_as_it_is() -> None:
    assert forge("copycat", view(rows())).tolist() == rows()[0]


def test_knowledge_falls_back_from_mean_to_history_to_own() -> None:
    honest, last_D = rows(), torch.full((D,), 2.0)
    seen = view(honest, aggregate_history=(torch.zeros(D), last_D))
    assert forge("ipm", seen, knowledge="history").tolist() == [-6.0] * D
    assert torch.equal(forge("ipm", seen, knowledge="own"), -3.0 * seen.own_D)
    blind = view(honest, honest_ND=None)
    assert torch.equal(forge("ipm", blind), -3.0 * blind.own_D)
    assert torch.equal(forge("copycat", seen, knowledge="history"), last_D)


def test_an_attack_refuses_knowledge_that_it_cannot_use() -> None:
    with pytest.raises(PreconditionError, match="scaled makes no use"):
        attacks.get("scaled")(knowledge="omniscient")  # type: ignore[call-arg]


def test_gaussian_has_the_stated_deviation_in_units_of_the_own_update() -> None:
    own_D = torch.full((20_000,), 0.25)
    own_D[::2] = -0.75
    rms = math.sqrt((0.25**2 + 0.75**2) / 2)
    seen = attacks.VectorView(own_D=own_D, seed=b"x" * 32)
    noise = forge("gaussian", seen, strength=10.0).tolist()
    assert statistics.pstdev(noise) == pytest.approx(10.0 * rms, rel=0.03)
    assert statistics.fmean(noise) == pytest.approx(0.0, abs=0.3 * rms)
    zero = attacks.VectorView(own_D=torch.zeros(20_000), seed=b"x" * 32)
    assert statistics.pstdev(forge("gaussian", zero).tolist()) == pytest.approx(30.0, rel=0.03)


@pytest.mark.parametrize(("name", "is_poison"), [("nan", math.isnan), ("inf", math.isinf)])
def test_non_finite_attacks_poison_the_stated_share_and_leave_the_rest(
    name: str, is_poison: object
) -> None:
    own_D = torch.arange(500, dtype=torch.float32)
    forged = forge(name, attacks.VectorView(own_D=own_D, seed=b"y")).tolist()
    poisoned = [i for i, value in enumerate(forged) if is_poison(value)]  # type: ignore[operator]
    assert len(poisoned) == 5
    assert all(forged[i] == i for i in range(500) if i not in poisoned)
    assert sum(map(is_poison, forge(name, view(rows())).tolist())) == 1  # type: ignore[arg-type]


def test_label_flip_mirrors_labels_and_learns_the_number_of_classes() -> None:
    x, y = torch.zeros(4, 2), torch.tensor([0, 9, 3, -100])
    known = LabelFlip(classes=10)
    assert known.batch(x, y)[1].tolist() == [9, 0, 6, -100]
    learning = LabelFlip()
    assert learning.batch(x, torch.tensor([0, 3]))[1].tolist() == [3, 0]
    assert learning.batch(x, torch.tensor([[0, 9]]))[1].tolist() == [[9, 0]]
    assert learning.batch(x, torch.tensor([1, 2]))[1].tolist() == [8, 7]
    assert learning.batch(x, torch.tensor([0.5, -1.0]))[1].tolist() == [-0.5, 1.0]
    assert y.tolist() == [0, 9, 3, -100]


# --- ALIE ------------------------------------------------------------------------------------


def test_alie_is_mean_minus_z_deviations_per_coordinate() -> None:
    honest = rows(1)
    expected = [
        statistics.fmean(column) - 1.25 * statistics.stdev(column)
        for column in zip(*honest, strict=True)
    ]
    assert forge("alie", view(honest), z=1.25).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    ("n", "f", "share"),
    [(7, 2, 0.6000), (50, 12, 24 / 38), (50, 24, 24 / 26), (4, 1, 1 / 3)],
)
def test_the_published_z_leaves_just_the_needed_supporters(n: int, f: int, share: float) -> None:
    """Share of honest rows below z, worked out by hand from s = ⌊n/2 + 1⌋ − f."""
    phi = 0.5 * (1.0 + math.erf(published_z(n, f) / math.sqrt(2.0)))
    assert phi == pytest.approx(share, abs=1e-9)


def test_the_published_z_is_harmless_at_seven_peers_with_two_liars() -> None:
    assert published_z(7, 2) == pytest.approx(0.25, abs=0.005)


def test_alie_uses_history_when_that_is_all_it_knows_and_else_stays_honest() -> None:
    history = rows(5, 4)
    seen = view(rows(), aggregate_history=tuple(map(torch.tensor, history)))
    expected = [
        statistics.fmean(column) - 2.0 * statistics.stdev(column)
        for column in zip(*history, strict=True)
    ]
    forged_D = forge("alie", seen, z=2.0, knowledge="history")
    assert forged_D.tolist() == pytest.approx(expected, abs=1e-5)
    blind = view(rows(), honest_ND=None)
    assert torch.equal(forge("alie", blind), blind.own_D)


def median_rule(updates_ND: Tensor) -> Tensor:
    return updates_ND.median(dim=0).values


def trimmed_mean_rule(updates_ND: Tensor) -> Tensor:
    return updates_ND.sort(dim=0).values[2:-2].mean(dim=0)


def refusing_mean(updates_ND: Tensor) -> Tensor:
    """A mean of the rows within 3 deviations of row 0: too great a lie is without effect."""
    reach = float((updates_ND[:N_HONEST] - updates_ND[0]).norm(dim=1).max()) * 1.2
    return updates_ND[(updates_ND - updates_ND[0]).norm(dim=1) <= reach].mean(dim=0)


@pytest.mark.parametrize("rule", [median_rule, trimmed_mean_rule, refusing_mean])
def test_the_optimal_z_harms_as_much_as_an_exhaustive_search_finds(rule: object) -> None:
    honest_ND = torch.randn(N_HONEST, 200, generator=torch.Generator().manual_seed(4))
    mean_D, deviation_D = honest_ND.mean(dim=0), honest_ND.std(dim=0)

    def harm(z: float) -> float:
        liars = (mean_D - z * deviation_D).expand(2, -1)
        return float((rule(torch.cat([honest_ND, liars])) - mean_D).norm())  # type: ignore[operator]

    best = max(harm(step / 40) for step in range(-640, 641))
    found = optimal_z(honest_ND, 2, rule)  # type: ignore[arg-type]
    assert harm(found) >= (1 - 1 / 12) * best  # the search's resolution, at a cliff
    assert harm(found) > 1.1 * harm(published_z(7, 2))


def test_the_search_goes_to_its_bound_under_a_plain_mean_and_survives_a_rule_of_nan() -> None:
    honest_ND = torch.randn(N_HONEST, 50, generator=torch.Generator().manual_seed(4))
    assert abs(optimal_z(honest_ND, 2, lambda rows_ND: rows_ND.mean(dim=0))) == 16.0
    assert math.isfinite(optimal_z(honest_ND, 2, lambda rows_ND: rows_ND[0] * math.nan))


def test_alie_does_not_run_the_rule_on_fewer_rows_than_it_is_made_for() -> None:
    def raises(updates_ND: Tensor) -> Tensor:
        raise PreconditionError("too few rows")

    few = view(rows(2, 4), rule=raises)
    assert torch.equal(forge("alie", few), forge("alie", view(rows(2, 4))))


@pytest.mark.parametrize(
    "name", [name for name, attack in attacks.known().items() if attack.kind == "vector"]
)
def test_no_strength_means_the_default_for_every_vector(name: str) -> None:
    kind = attacks.get(name)
    assert issubclass(kind, attacks.VectorAttack)
    assert kind(None).strength == kind().strength == kind.default_strength
    assert kind(0.5).strength == 0.5
    seen = view(rows(), rule=median_rule)
    bits = [kind(*given).forge(seen).view(torch.int32) for given in ((), (None,))]
    assert torch.equal(*bits)


def test_alie_searches_only_when_the_rule_is_known_and_no_z_is_given() -> None:
    honest = rows(2)
    calls: list[int] = []

    def counting(updates_ND: Tensor) -> Tensor:
        calls.append(len(updates_ND))
        return median_rule(updates_ND)

    ALittleIsEnough(z=1.0).forge(view(honest, rule=counting))
    assert calls == []
    forged_D = ALittleIsEnough().forge(view(honest, rule=counting))
    assert set(calls) == {7}
    assert len(calls) <= 34
    assert not torch.equal(forged_D, ALittleIsEnough().forge(view(honest)))
