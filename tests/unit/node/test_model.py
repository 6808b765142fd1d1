"""The keeper of the agreed state: where it starts, what it refuses, what a restart finds."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from torchbft.node.model import MAX_CACHED_UPDATES, START
from torchbft.primitives.errors import HaltError, MisuseError, StorageError
from torchbft.primitives.ids import Round
from torchbft.tensors.state import AgreedState

NAMES = ("peer-a", "peer-b", "peer-c", "peer-d")


def other(initial: AgreedState, value: float = 9.0) -> AgreedState:
    """A state of the same model that nobody agreed on."""
    return AgreedState(
        initial.layout,
        torch.full_like(initial.parameters_D, value),
        initial.float_buffers_B,
        initial.int_buffers_I,
        initial.outer_momentum_D,
        initial.rule_state,
    )


def test_a_fresh_peer_has_no_state_and_says_so(peer: Any) -> None:
    keeper = peer("me").keeper
    assert not keeper.resume()
    assert not keeper.ready
    with pytest.raises(MisuseError, match="not there yet"):
        keeper.current()


def test_it_starts_from_the_root_that_the_run_file_names_and_no_other(
    peer: Any, initial: AgreedState
) -> None:
    keeper = peer("me").keeper
    with pytest.raises(HaltError, match="the run file names") as refused:
        keeper.begin(other(initial))
    assert refused.value.hint.startswith("use the task and the torch version")
    assert not keeper.ready
    keeper.begin(initial)
    assert keeper.current().root() == initial.root()


def test_a_restart_takes_up_the_newest_round_or_the_start(started: Any) -> None:
    again = started.again()
    assert again.keeper.resume()
    assert again.keeper.current().round == 0
    root = started.apply(0)
    started.apply(1)
    newest = started.again()
    assert newest.keeper.resume()
    assert newest.keeper.current().round == 2
    assert newest.keeper.current().root() == started.keeper.current().root() != root


@pytest.mark.parametrize("damage", [b"", b"not a state", b"\xff" * 300])
def test_a_checkpoint_that_cannot_be_read_is_passed_over_and_named(
    started: Any, damage: bytes
) -> None:
    started.apply(0)
    started.apply(1)
    newest = started.checkpoints.path(Round(2))
    newest.write_bytes(damage)
    again = started.again()
    assert again.keeper.resume()
    assert again.keeper.current().round == 1
    assert [str(newest) in line for line in again.keeper.unusable] == [True]


def test_a_folder_of_nothing_but_damage_is_a_fresh_peer(started: Any) -> None:
    (started.folder / START).write_bytes(b"rubbish")
    again = started.again()
    assert not again.keeper.resume()
    assert len(again.keeper.unusable) == 1


def test_c26_rounds_without_a_result_never_push_out_the_last_agreed_model(started: Any) -> None:
    root = started.apply(0)
    for void in range(1, 40):
        assert not started.keeper.take_back(void)  # void: nothing was applied, nothing is saved
    again = started.again()
    assert again.keeper.resume()
    assert again.keeper.current().root() == root


def test_retention_keeps_the_newest_rounds(started: Any) -> None:
    for number in range(6):
        started.apply(number)
    assert started.checkpoints.rounds() == [4, 5, 6]
    assert (started.folder / START).exists()


def test_a_round_is_applied_once_from_the_state_it_names(started: Any) -> None:
    start = started.keeper.current().root()
    first = started.apply(0)
    payload = started.payload(0.5)
    accepted = [(name, payload) for name in NAMES]
    stale = started.keeper.apply(0, start, accepted, 1, started.fields(0))
    assert stale is None  # something took the place of that state
    assert started.keeper.current().root() == first


def test_applying_gives_what_every_peer_gets(peer: Any, initial: AgreedState) -> None:
    roots = set()
    for name in ("x", "y"):
        made = peer(name)
        made.keeper.begin(initial)
        made.apply(0, 0.25)
        roots.add(made.apply(1, -1.5))
    assert len(roots) == 1


def test_a_round_is_taken_back_to_the_state_before_also_after_a_restart(started: Any) -> None:
    first = started.apply(0)
    started.apply(1)
    again = started.again()
    again.keeper.resume()
    for kept in (started, again):
        assert not kept.keeper.take_back(0)
    for kept in (started, again):
        assert kept.keeper.take_back(1)
        assert kept.keeper.current().root() == first
        assert not kept.keeper.take_back(1)
    later = started.again()
    assert later.keeper.resume()
    assert later.keeper.current().root() == first, "a restart takes up a round that was voided"


def test_the_first_round_is_taken_back_to_the_start(started: Any, initial: AgreedState) -> None:
    started.apply(0)
    again = started.again()
    again.keeper.resume()
    assert again.keeper.take_back(0)
    assert again.keeper.current().root() == initial.root()
    assert again.checkpoints.rounds() == []


def test_a_copy_becomes_the_state_that_a_restart_finds(
    peer: Any, started: Any, initial: AgreedState
) -> None:
    started.apply(0)
    behind = peer("behind")
    behind.keeper.begin(initial)
    behind.keeper.adopt(started.keeper.current())
    again = behind.again()
    assert again.keeper.resume()
    assert again.keeper.current().root() == started.keeper.current().root()


def test_states_are_found_by_root_while_others_may_ask_for_them(started: Any) -> None:
    start = started.keeper.current().root()
    roots = [started.apply(number, 0.1 * (number + 1)) for number in range(3)]
    assert started.keeper.by_root(roots[2]).root() == roots[2]
    assert started.keeper.by_root(roots[1]).root() == roots[1]
    assert started.keeper.by_root(start).root() == start
    assert started.keeper.by_root(roots[0]) is None
    assert started.keeper.by_root(bytes(32)) is None


def test_after_a_restart_the_state_before_the_newest_can_still_be_given_out(started: Any) -> None:
    """The newest may be unsigned, and who is behind needs the one before to sign it."""
    start = started.keeper.current().root()
    roots = [started.apply(number, 0.1 * (number + 1)) for number in range(2)]
    again = started.again()
    assert again.keeper.resume()
    for root in (*roots, start):
        found = again.keeper.by_root(root)
        assert found is not None
        assert found.root() == root


# --- payloads: the reasons that go on the ledger --------------------------------------------------


def test_a_well_formed_payload_is_held(started: Any) -> None:
    root = started.payload(1.0)
    assert started.keeper.inspect(root) is None
    assert started.keeper.inspect(root) is None


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda data: data[:-1], "bytes"),
        (lambda data: data + b"\0", ""),
        (lambda data: b"", ""),
        (lambda data: data[: len(data) // 2], ""),
        (lambda data: data * 3, "oversized"),
        (lambda data: b"\xff" * len(data), ""),
        (lambda data: data[:-8] + data[-4:], ""),
    ],
    ids=["truncated", "longer", "empty", "half", "oversized", "rubbish", "one value less"],
)
def test_payloads_of_another_size_or_form_are_malformed_with_a_reason(
    started: Any, spoil: Any, reason: str
) -> None:
    root = started.store.put(spoil(started.encoded(1.0)), Round(0))
    found = started.keeper.inspect(root)
    assert found
    assert reason in found


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a01_values_that_are_not_finite_are_malformed(started: Any, value: float) -> None:
    assert started.keeper.inspect(started.payload(value)) == "non-finite parameters"


def test_a_payload_of_another_codec_is_malformed(started: Any) -> None:
    from torchbft.tensors.compression import get_codec
    from torchbft.tensors.update import Update

    size = started.initial.layout.parameter_count
    update = Update(torch.zeros(size), torch.zeros(0), torch.zeros(0, dtype=torch.int64))
    root = started.store.put(get_codec("bfloat16").encode(update)[0], Round(0))
    assert started.keeper.inspect(root)


def test_what_the_disk_damaged_is_an_error_of_this_peer_and_not_the_authors(started: Any) -> None:
    root = started.payload(1.0)
    started.store.path(root).write_bytes(b"other bytes")
    with pytest.raises(StorageError, match="do not match"):
        started.keeper.inspect(root)


def test_a_malformed_payload_that_was_accepted_halts(started: Any) -> None:
    bad = started.payload(math.nan)
    good = started.payload(0.5)
    accepted = [("peer-a", bad), *((name, good) for name in NAMES[1:])]
    with pytest.raises(HaltError, match="accepted payload of peer-a is malformed"):
        started.keeper.apply(0, started.keeper.current().root(), accepted, 1, started.fields(0))


def test_a01_one_poisoned_update_changes_nothing_that_the_others_agree_on(
    started: Any, initial: AgreedState
) -> None:
    start = started.keeper.current().root()
    good, wild = started.payload(0.5), started.payload(1e20)
    accepted = [("peer-a", wild), *((name, good) for name in NAMES[1:])]
    applied = started.keeper.apply(0, start, accepted, 1, started.fields(0))
    assert applied is not None
    assert applied.advanced.refused_by_norm == ("peer-a",)
    moved_D = started.keeper.current().parameters_D - initial.parameters_D
    assert bool(moved_D.isfinite().all())
    assert float(moved_D.abs().max()) < 2.0


def test_decoded_updates_are_bounded_in_number(started: Any) -> None:
    for index in range(MAX_CACHED_UPDATES + 5):
        assert started.keeper.inspect(started.payload(float(index))) is None
    assert len(started.keeper._updates) == MAX_CACHED_UPDATES
