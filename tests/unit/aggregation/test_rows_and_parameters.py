"""Rules on dictionaries, files, slices and streams give what they give on one matrix."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from torchbft import robust
from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.tensors.aggregation.rows import Rows

NAMES = [
    *("trimmed_mean", "multi_krum", "arc+nnm+trimmed_mean", "bulyan", "geometric_median"),
    *("centred_clipping", "sign_majority", "norm_clipping+mean", "caf", "mda"),
]
MODES = ("deterministic", "fast")
LARGEST_BLOCK = 1 << 16


def normal(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def models(n: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    return [
        {
            "conv.weight": normal(seed + 10 * row, 3, 4, 5),
            "conv.bias": normal(seed + 10 * row + 1, 3),
            "head.weight": normal(seed + 10 * row + 2, 7, 50),
            "scale": normal(seed + 10 * row + 3, 1)[0],
        }
        for row in range(n)
    ]


def joined(updates: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat([v.reshape(-1) for v in one.values()]) for one in updates])


# --- out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_out_takes_the_same_bits(name: str, mode: str, dtype: torch.dtype) -> None:
    x_ND = normal(1, 12, 5, 60).to(dtype)
    out = torch.full((5, 60), 7.0, dtype=dtype)
    result = robust.get(name)(x_ND, 2, mode=mode, out=out)
    assert result is out
    assert torch.equal(out, robust.get(name)(x_ND, 2, mode=mode))


def test_out_that_is_not_contiguous_is_filled_and_a_wrong_one_refused() -> None:
    x_ND = normal(2, 7, 40)
    wide = torch.zeros(40, 2)
    robust.Median()(x_ND, 2, out=wide[:, 1])
    assert torch.equal(wide[:, 1], robust.Median()(x_ND, 2))
    assert torch.equal(wide[:, 0], torch.zeros(40))
    for bad in (torch.zeros(41), torch.zeros(40).double(), torch.zeros(40, requires_grad=True)):
        with pytest.raises(MisuseError, match="out is a"):
            robust.Median()(x_ND, 2, out=bad)


def test_the_history_does_not_share_memory_with_out() -> None:
    rule, out = robust.CentredClipping(), torch.zeros(30)
    _, state, _ = rule.aggregate(normal(3, 7, 30), 2, rule.init(30), out=out)
    kept = state["centre"].clone()
    out.fill_(9.0)
    assert torch.equal(state["centre"], kept)


# --- rows ------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", NAMES)
def test_files_and_vectors_give_what_the_matrix_gives(name: str, mode: str, tmp_path: Path) -> None:
    x_ND = normal(4, 12, 9_000)
    paths = [tmp_path / f"{row}.f32" for row in range(12)]
    for path, row_D in zip(paths, x_ND, strict=True):
        path.write_bytes(row_D.numpy().tobytes())
    expected_D = robust.get(name)(x_ND, 2, mode=mode)
    for rows in (Rows.from_files(paths), Rows.of(list(x_ND))):
        assert torch.equal(robust.get(name)(rows, 2, mode=mode), expected_D)


def test_no_block_is_larger_than_the_cache_however_long_the_rows() -> None:
    asked: list[int] = []

    class Counting:
        size = 300_000

        def read(self, start: int, stop: int, into_B: torch.Tensor) -> None:
            asked.append(stop - start)
            into_B.copy_(torch.arange(start, stop) % 7)

    rows = Rows([[Counting()] for _ in range(8)], torch.float32)
    for name in ("median", "arc+nnm+trimmed_mean", "krum"):
        for mode in MODES:
            result_D = robust.get(name)(rows, 2, mode=mode)
            assert torch.allclose(result_D, torch.arange(300_000.0) % 7, atol=1e-5)
    assert max(asked) <= LARGEST_BLOCK


@pytest.mark.parametrize("name", ["trimmed_mean", "krum"])
def test_a_bad_value_in_a_file_is_named_by_row_and_coordinate(name: str, tmp_path: Path) -> None:
    x_ND = normal(5, 7, 20_000)
    x_ND[3, 17_123] = float("nan")
    for row in range(7):
        (tmp_path / str(row)).write_bytes(x_ND[row].numpy().tobytes())
    rows = Rows.from_files([tmp_path / str(row) for row in range(7)])
    with pytest.raises(MisuseError, match="row 3: non-finite value at coordinate 17123"):
        robust.get(name)(rows, 2)


def test_rows_of_unequal_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "odd").write_bytes(b"12345")
    (tmp_path / "two").write_bytes(b"12345678")
    (tmp_path / "one").write_bytes(b"1234")
    with pytest.raises(MisuseError, match="no whole number"):
        Rows.from_files([tmp_path / "odd"])
    with pytest.raises(MisuseError, match="equal length"):
        Rows.from_files([tmp_path / "two", tmp_path / "one"])
    with pytest.raises(MisuseError, match="row 1: other shapes"):
        Rows.of([torch.zeros(3), torch.zeros(4)])
    with pytest.raises(MisuseError, match="same names"):
        Rows.of([{"a": torch.zeros(3)}, {"b": torch.zeros(3)}])
    with pytest.raises(MisuseError, match="int64"):
        Rows.of([{"steps": torch.tensor(3)}])


def test_a_file_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "row"
    path.write_bytes(np.zeros(64, np.float32).tobytes())
    rows = Rows.from_files([path])
    path.write_bytes(b"")
    with pytest.raises(MisuseError, match="shorter"):
        robust.Mean()(rows, 0)


# --- slices and streams ----------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", [*NAMES, "smea", "dnc", "mean"])
def test_slices_joined_are_the_whole(name: str, mode: str) -> None:
    """Each reducer holds a slice; only the T x T matrices are added up."""
    x_ND = normal(6, 12, 3_000) + 0.4
    rule, f = robust.get(name), 0 if name == "mean" else 2
    x_ND[:f] += 3.0
    slices = (slice(0, 1100), slice(1100, 1101), slice(1101, 3000))
    state = rule.init(3_000)
    parts = [
        rule.partial_gram(x_ND[:, at], {key: v[at] for key, v in state.items()}, mode)
        for at in slices
    ]
    whole = None if parts[0] is None else sum(parts)  # type: ignore[arg-type]
    plan = rule.plan_for(whole, n=12, f=f)
    pieces = [
        rule.combine_slice(plan, x_ND[:, at], {key: v[at] for key, v in state.items()}, mode)
        for at in slices
    ]
    assert torch.allclose(torch.cat(pieces), rule(x_ND, f, mode=mode), atol=1e-5)


def test_a_slice_alone_would_choose_other_rows_than_the_whole() -> None:
    """Negative control: the Gram matrices have to be added up."""
    x_ND = normal(7, 9, 2_000)
    x_ND[0, :1000], x_ND[1, 1000:] = 9.0, -9.0
    rule = robust.Krum()
    halves = torch.cat([rule(x_ND[:, :1000], 2), rule(x_ND[:, 1000:], 2)])
    assert not torch.allclose(halves, rule(x_ND, 2))


@pytest.mark.parametrize("name", ["median", "nnm+trimmed_mean", "geometric_median"])
def test_a_stream_of_blocks_gives_what_the_matrix_gives(name: str) -> None:
    x_ND, passes = normal(8, 11, 2_500), []

    def blocks() -> Iterator[torch.Tensor]:
        passes.append(1)
        yield from x_ND.split(600, dim=1)

    found_D = torch.cat(list(robust.stream(robust.get(name), blocks, n=11, f=3)))
    assert torch.allclose(found_D, robust.get(name)(x_ND, 3), atol=1e-5)
    assert len(passes) == (1 if name == "median" else 2)


def test_a_stream_refuses_what_it_cannot_carry() -> None:
    def never() -> Iterator[torch.Tensor]:
        raise AssertionError("no block is read")
        yield

    with pytest.raises(PreconditionError):
        list(robust.stream(robust.Median(), never, n=4, f=2))
    for rule in (robust.CentredClipping(), robust.FLTrust(), robust.Zeno(lambda _: 0.0)):
        with pytest.raises(MisuseError):
            list(robust.stream(rule, never, n=9, f=2))


# --- dictionaries of parameters --------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_dictionary_is_one_vector_unless_told_otherwise(name: str) -> None:
    updates = models(12)
    outcome = robust.aggregate(robust.get(name), updates, 2)
    whole_D = robust.get(name)(joined(updates), 2)
    assert torch.equal(joined([outcome.parameters])[0], whole_D)
    assert {key: v.shape for key, v in outcome.parameters.items()} == {
        key: v.shape for key, v in updates[0].items()
    }


def test_by_layer_the_rule_runs_on_each_entry_and_by_block_on_each_group() -> None:
    updates, rule = models(9), robust.Krum()
    for one in updates[:2]:
        one["head.weight"] += 20.0
    by_layer = robust.aggregate(rule, updates, 2, per="layer")
    for name, values in by_layer.parameters.items():
        assert torch.equal(values, rule(torch.stack([one[name] for one in updates]), 2))
    groups = [["conv.weight", "conv.bias"], ["head.weight", "scale"]]
    by_group = robust.aggregate(rule, updates, 2, per=groups)
    assert set(by_group.info) == {"conv.weight", "head.weight"}
    conv = [{name: one[name] for name in groups[0]} for one in updates]
    alone = robust.aggregate(rule, conv, 2).parameters
    assert all(torch.equal(by_group.parameters[name], values) for name, values in alone.items())
    with pytest.raises(MisuseError, match="each entry once"):
        robust.aggregate(rule, updates, 2, per=[["scale"]])


def test_history_is_kept_by_group() -> None:
    rule = robust.CentredClipping()
    first = robust.aggregate(rule, models(7), 2, per="layer")
    second = robust.aggregate(rule, models(7, seed=5), 2, per="layer", state=first.state)
    alone = torch.stack([one["conv.bias"] for one in models(7, seed=5)])
    expected = rule(alone, 2, state=first.state["conv.bias"])
    assert torch.equal(second.parameters["conv.bias"], expected)


def test_absent_rows_are_left_out_with_a_reason_and_one_liar_less() -> None:
    updates = models(9)
    updates[4]["conv.bias"][1] = float("inf")
    outcome = robust.aggregate(robust.Median(), updates, 2, non_finite="absent")
    assert outcome.absent == {4: "conv.bias: non-finite value at coordinate 1"}
    rest = robust.aggregate(robust.Median(), updates[:4] + updates[5:], 1)
    assert torch.equal(joined([outcome.parameters]), joined([rest.parameters]))
    with pytest.raises(MisuseError, match="row 4"):
        robust.aggregate(robust.Median(), updates, 2)
    for row in (1, 2):
        updates[row]["scale"] = torch.tensor(float("nan"))
    with pytest.raises(PreconditionError, match="3 updates hold values that are no numbers"):
        robust.aggregate(robust.Median(), updates, 2, non_finite="absent")
    with pytest.raises(MisuseError, match="policy"):
        robust.aggregate(robust.Median(), updates, 2, non_finite="ignore")


def test_entries_keep_their_dtype_and_out_is_written_by_name() -> None:
    updates = models(7)
    for one in updates:
        one["conv.bias"] = one["conv.bias"].to(torch.bfloat16)
    out = {name: torch.zeros_like(values) for name, values in updates[0].items()}
    outcome = robust.aggregate(robust.Median(), updates, 2, out=out)
    assert outcome.parameters["conv.bias"] is out["conv.bias"]
    assert out["conv.bias"].dtype == torch.bfloat16
    expected = np.median(torch.stack([one["conv.weight"] for one in updates]).numpy(), axis=0)
    np.testing.assert_array_equal(out["conv.weight"].numpy(), expected)


def test_dictionaries_that_differ_or_hold_nothing_are_refused() -> None:
    updates = models(5)
    del updates[3]["scale"]
    with pytest.raises(MisuseError, match="row 3: other names"):
        robust.aggregate(robust.Median(), updates, 1)
    for nothing in ([], [{}]):
        with pytest.raises(MisuseError, match="nothing"):
            robust.aggregate(robust.Median(), nothing, 0)
