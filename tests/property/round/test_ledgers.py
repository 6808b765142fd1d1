"""Random adversarial ledgers: duplicates, equivocations, early, late and foreign rounds, any order.

The project's reader is compared with ``round_oracle``, a second reading of ROUND.md, block by
block. Mutants of the reader are the negative controls: the comparison must notice each.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from round_oracle import Item, Oracle
from round_world import World

from torchbft.primitives.wire import encode
from torchbft.protocols.round import events as ev
from torchbft.protocols.round import reader
from torchbft.protocols.round.changes import Change, Remove, Rotate
from torchbft.protocols.round.messages import Status
from torchbft.protocols.round.reader import apply_block
from torchbft.protocols.round.state import Phase, decode_state

ROUNDS = 6
_CACHE: dict[tuple, bytes] = {}


def to_tx(world: World, item: Item) -> bytes:
    """The transaction of an abstract item. Signing is deterministic, so it is done once."""
    seats = world.seats(item[2])
    keys = tuple(world.key_of(name, item[2]).public for name in (item[1], *seats))
    key = (seats, keys, world.head(item[1], item[2]), repr(item))
    if key not in _CACHE:
        _CACHE[key] = _signed(world, item)
    return _CACHE[key]


def _signed(world: World, item: Item) -> bytes:
    kind, author, number, content = item
    if kind == "commit":
        return world.commit(author, number, content)
    if kind == "open":
        return world.open(author, number, content)
    if kind == "attest":
        return world.attest(author, number, dict(content), default=Status.NONE)
    if kind.startswith("close"):
        return world.closing(author, number, kind.removeprefix("close-"), content)
    if kind == "void":
        return world.void(author, number)
    if kind == "ready":
        return world.ready(author, number)
    if kind.startswith("member:"):
        return world.vote(author, change_of(world, content), number)
    return world.rooted(author, number)


def change_of(world: World, change: tuple) -> Change:
    """The statement's change of an abstract one."""
    kind, name = change[:2]
    if kind == "remove":
        return Remove(name)
    if kind == "rotate":
        return world.rotate(name, change[2])
    roles, power, tag = change[2:]
    fields = {"contributor": "c" in roles, "validator": "v" in roles, "power": power}
    return world.admit(name, tag, **fields)


def abstract(world: World, change: Change) -> tuple:
    """The abstract change of a statement's; tags are found by the keys that the world knows."""
    if isinstance(change, Remove):
        return ("remove", change.name)
    tag = tag_of(world, change.name, change.voting)
    if isinstance(change, Rotate):
        return ("rotate", change.name, tag)
    roles = "c" * change.contributor + "v" * change.validator
    return ("admit", change.name, roles, change.power, tag)


def tag_of(world: World, name: str, voting: bytes) -> str:
    return next(tag for tag in TAGS if world.has_key(name, tag).public == voting)


TAGS = ("", "/1", "/2")
CHANGES = (
    ("admit", "peer-8", "cv", 1, ""),
    ("admit", "peer-8", "v", 2, "/1"),
    ("admit", "peer-9", "c", 1, ""),
    ("admit", "peer-1", "cv", 1, "/1"),
    ("remove", "peer-1"),
    ("remove", "peer-9"),
    ("rotate", "peer-0", "/1"),
    ("rotate", "peer-2", "/2"),
)
"""Some contradict each other, or are possible only after others."""


class Attest(dict):
    """Statuses that compare and print by value."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(sorted(self.items())))


def adversary(chance: random.Random, world: World) -> Iterator[list[Item]]:
    """Blocks that tend to get on, full of what should not be there."""
    names = world.names
    seen: list[Item] = []
    liars = chance.sample(names, chance.randint(0, len(names) // 3 + 1))
    away = chance.sample(names, chance.randint(0, len(names) // 3))
    voting = chance.random() < 0.3
    wanted = chance.sample(CHANGES, chance.choice((0, 0, 2, 5)))
    while True:
        state = world.state
        number = state.current.number
        names = tuple(sorted({*world.names, *(m.name for m in state.members)}))
        lean = chance.choice((0.15, 0.5, 0.9))
        block: list[Item] = []
        if state.unsigned is not None and chance.random() < 0.7:
            block.append(("rooted", chance.choice(names), state.unsigned.number, None))
        if state.unsigned is not None and voting and chance.random() < 0.2:
            some = chance.sample(names, chance.randint(1, len(names)))
            block += [("void", name, state.unsigned.number, None) for name in some]
        for name in names:
            if chance.random() < lean and (name not in away or number > 3):
                block.append(plausible(chance, world, name, number))
        for _ in range(chance.randint(0, 4)):
            other = max(number + chance.choice((-2, -1, -1, 0, 0, 0, 1, 1, 2)), 0)
            name = chance.choice(names)
            block.append(anything(chance, world, name, other, name in liars))
        if seen and chance.random() < 0.5:
            block.append(chance.choice(seen))
        for change in wanted:
            some = chance.sample(names, chance.randint(0, len(names)))
            block += [(f"member:{change}", name, number, change) for name in some]
        chance.shuffle(block)
        seen += block
        yield [of_seats(world, item) for item in block]


def of_seats(world: World, item: Item) -> Item:
    """The item with what it says of seats that its round does not have left out, as when signed."""
    kind, author, number, content = item
    seats = world.seats(number)
    if kind == "attest":
        return (kind, author, number, Attest({s: v for s, v in content.items() if s in seats}))
    if kind.startswith("close-"):
        return (kind, author, number, tuple(name for name in content if name in seats))
    return item


def plausible(chance: random.Random, world: World, name: str, number: int) -> Item:
    phase = world.state.phase
    if phase == Phase.READY:
        return ("ready", name, number, None)
    if phase == Phase.COMMIT:
        if chance.random() < 0.3:
            return closing(chance, world, name, number, "commit")
        return ("commit", name, number, b"")
    if phase == Phase.OPEN:
        if chance.random() < 0.3:
            return closing(chance, world, name, number, "open")
        return ("open", name, number, b"")
    held = {author: Status.HELD for author in world.seats(number)}
    return ("attest", name, number, Attest(held))


def closing(chance: random.Random, world: World, name: str, number: int, window: str) -> Item:
    known = world.state.round_of(number)
    here = [slot.author for slot in known.of_kind(window)] if known else []
    if chance.random() < 0.3:
        here = [author for author in world.seats(number) if chance.random() < 0.5]
    return (f"close-{window}", name, number, tuple(sorted(here)))


def anything(chance: random.Random, world: World, name: str, number: int, lies: bool) -> Item:
    kind = chance.choice(("commit", "commit", "open", "open", "attest", "close"))
    if kind == "close":
        return closing(chance, world, name, number, chance.choice(("commit", "open")))
    if kind == "attest":
        seats = world.seats(number)
        statuses = {author: chance.choice((1, 1, 2, 3) if lies else (1,)) for author in seats}
        return ("attest", name, number, Attest(statuses))
    return (kind, name, number, chance.choice((b"", b"", b"2", b"3") if lies else (b"",)))


def summary(world: World, ended: list[tuple[int, str, tuple[str, ...]]]) -> object:
    state = world.state
    phase = {"root": "root", "finished": "finished"}.get(state.phase, state.phase)
    return (
        state.current.number,
        phase,
        state.epoch,
        sorted(m.name for m in state.members if m.convicted),
        state.current.waited,
        [
            (s.name, (s.name, tag_of(world, s.name, s.voting)), s.power if s.validator else 0)
            for s in state.current.seats
        ],
        (state.current.f, state.current.m_min),
        [abstract(world, change) for change in state.passed],
        ended,
    )


def note(ended: list[tuple[int, str, tuple[str, ...]]], events: tuple[ev.Event, ...]) -> None:
    for event in events:
        if isinstance(event, ev.RoundFixed):
            ended.append((event.round, "fixed", tuple(a.author for a in event.accepted)))
        if isinstance(event, ev.RoundVoid):
            ended[:] = [entry for entry in ended if entry[0] != event.round]
            ended.append((event.round, "void", ()))
            ended.sort()


def begin(n: int, m_min: int) -> tuple[World, Oracle]:
    f = (n - 1) // 3
    world = World(n, rounds=ROUNDS, m_min=m_min)
    for change in CHANGES:
        if change[0] != "remove":
            world.has_key(change[1], change[-1])
    world.block(*(world.ready(name) for name in world.names))
    return world, Oracle(
        world.names, f, m_min, ROUNDS, lambda change: encode(change_of(world, change))
    )


def play(n: int, m_min: int, seed: int, blocks: int = 40) -> tuple[World, Oracle, list]:
    """Read a ledger with both readers; raises AssertionError where they differ."""
    world, oracle = begin(n, m_min)
    ended: list[tuple[int, str, tuple[str, ...]]] = []
    made = []
    source = adversary(random.Random(seed), world)
    for _ in range(blocks):
        items = next(source)
        txs = [to_tx(world, item) for item in items]
        applied = world.block(*txs)
        taken = oracle.block(items)
        assert [r.code != reader.CODE_REFUSED for r in applied.results] == taken, items
        note(ended, applied.events)
        mine = [e for e in ended if e[0] != world.state.current.number]
        theirs = oracle.summary()
        assert summary(world, mine) == theirs
        made.append(txs)
    return world, oracle, made


SETTING = st.sampled_from([(4, 3), (4, 1), (7, 5), (7, 2)])


@settings(max_examples=60, deadline=None)
@given(setting=SETTING, seed=st.integers(0, 2**32))
def test_every_honest_reader_reads_the_same_set(setting: tuple[int, int], seed: int) -> None:
    play(*setting, seed)


def test_the_ledgers_of_this_test_reach_what_they_should() -> None:
    """The generator is worth its name: rounds fixed and void, convicts, roots, members parked."""
    found: set[str] = set()
    for seed in range(25):
        world, _, _ = play(4, 1 + 2 * (seed % 2), seed)
        kinds = {type(event).__name__ for event in world.events}
        parked = {"parked" for m in world.state.members if m.spells}
        voted = {"voted" for e in world.told(ev.RoundVoid) if e.reason == "voted-void"}
        found |= kinds | parked | voted
    assert found >= {
        "CommitmentsClosed",
        "Convicted",
        "OpeningsClosed",
        "RootSigned",
        "RoundFixed",
        "RoundOpened",
        "RoundVoid",
        "RunFinished",
        "ChangePassed",
        "MembershipChanged",
        "parked",
        "voted",
    }


@settings(max_examples=15, deadline=None)
@given(setting=SETTING, seed=st.integers(0, 2**32))
def test_snapshots_empty_blocks_and_refused_items_change_nothing(
    setting: tuple[int, int], seed: int
) -> None:
    world, _, made = play(*setting, seed, blocks=15)
    other, _ = begin(*setting)
    state = other.state
    junk = [b"", b"junk", other.ready("peer-0"), other.commit("peer-1", 60)]
    for txs in made:
        state = decode_state(encode(state))
        state = apply_block(state, [junk[0], *txs, *junk[1:]]).state
        state = apply_block(apply_block(state, []).state, [junk[2]]).state
    assert state == world.state
    assert state.digest() == world.state.digest()


@settings(max_examples=15, deadline=None)
@given(setting=SETTING, seed=st.integers(0, 2**32), shuffle=st.randoms(use_true_random=False))
def test_the_order_of_items_that_do_not_contradict_each_other_changes_nothing(
    setting: tuple[int, int], seed: int, shuffle: random.Random
) -> None:
    world, _ = begin(*setting)
    source = adversary(random.Random(seed), world)
    state = world.state
    for _ in range(15):
        items = {item[:2]: item for item in next(source) if item[0] not in ("rooted", "void")}
        extra = [i for i in next(source) if i[0] == "rooted"][:1]
        txs = [to_tx(world, item) for item in [*items.values(), *extra]]
        shuffled = shuffle.sample(txs, len(txs))
        world.block(*txs)
        state = apply_block(state, shuffled).state
        assert state == world.state


def _differs(setting: tuple[int, int], seeds: range) -> bool:
    for seed in seeds:
        try:
            play(*setting, seed)
        except (AssertionError, StopIteration):
            return True
    return False


def _all_closings(current: object, window: str) -> frozenset[str]:
    return frozenset(slot.author for slot in current.of_kind(f"close-{window}"))


MUTANTS = {
    "closings count without what they list": ("closings_that_count", _all_closings),
    "equivocators stay in the set": ("equivocators", lambda current: frozenset()),
    "any opening fits": ("fits", lambda current, author: True),
    "one holder suffices": (
        "attested",
        lambda current, author, status: bool(reader_tally(current, author, status)),
    ),
    "late items are in time": ("_late", lambda state, target, parsed: False),
    "nobody is convicted": ("_convict", lambda state: (state, [])),
    "no change passes": ("_pass_changes", lambda state: (state, [])),
    "no epoch ends": ("_with_changes", lambda state: (state, [])),
    "votes do not void": ("_take_void_vote", lambda state, target: state),
}


def reader_tally(current: object, author: str, status: int) -> tuple[bytes, ...]:
    from torchbft.protocols.round.outcomes import tally

    return tally(current, author, status)


@pytest.mark.parametrize("mutant", MUTANTS)
def test_the_comparison_notices_a_wrong_reader(
    mutant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, wrong = MUTANTS[mutant]
    monkeypatch.setattr(reader, name, wrong)
    assert _differs((4, 1), range(60))


def test_the_comparison_notices_a_reader_that_judges_within_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def one_by_one(world: World, *txs: bytes) -> reader.Applied:
        results, events = [], []
        for tx in txs:
            applied = apply_block(world.state, [tx])
            world.state = applied.state
            results += applied.results
            events += applied.events
        world.events += events
        return reader.Applied(world.state, tuple(results), tuple(events))

    monkeypatch.setattr(World, "block", one_by_one)
    assert _differs((4, 1), range(60))


# --- a censoring leader --------------------------------------------------------------------------


def censored(chance: random.Random, listing: bool) -> bool:
    """Whether a leader got an honest item left out that all honest validators held in time.

    peer-3 lies: it closes at once, listing nothing, and orders everything as it likes. The others
    closed at their time-out, and listed what they held if ``listing``.
    """
    world = World(4, rounds=2, m_min=1).start()
    honest = world.names[:3]
    held = honest if listing else ()
    items = [world.closing(name, 0, "commit", held) for name in honest]
    items += [world.closing("peer-3", 0, "commit", ()), world.commit("peer-3", 0)]
    items += [world.commit(name, 0) for name in honest]
    chance.shuffle(items)
    while items and not world.told(ev.CommitmentsClosed):
        size = chance.randint(1, 4)
        world.block(*items[:size])
        del items[:size]
    closed = world.told(ev.CommitmentsClosed)
    return not closed or not set(honest) <= set(closed[0].authors)


@settings(max_examples=60, deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_round_06_no_leader_can_leave_out_what_f_plus_1_honest_validators_held(
    chance: random.Random,
) -> None:
    assert not censored(chance, listing=True)


def test_closings_that_list_nothing_lose_an_honest_item() -> None:
    assert any(censored(random.Random(seed), listing=False) for seed in range(20))


def test_a_reader_that_counts_closings_at_once_loses_an_honest_item(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reader, "closings_that_count", _all_closings)
    assert any(censored(random.Random(seed), listing=True) for seed in range(20))
