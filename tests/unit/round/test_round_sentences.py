"""Each numbered sentence of ROUND.md that the ledger's reader decides, as a test of its number."""

import pytest
from msgspec.structs import replace
from round_world import World

from torchbft.primitives.digests import sha256
from torchbft.primitives.evidence import Evidence, Fault, Outcome
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import encode
from torchbft.protocols.round import events as ev
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.admissible import admissible
from torchbft.protocols.round.application import proposal_complete
from torchbft.protocols.round.assignment import positions
from torchbft.protocols.round.messages import Status, parse, sign
from torchbft.protocols.round.reader import CODE_NO_EFFECT, CODE_REFUSED
from torchbft.protocols.round.state import Phase, decode_state
from torchbft.protocols.round.waiting import LONGEST_STREAK


def started(n: int = 4, **genesis: object) -> World:
    return World(n, **genesis).start()


def committed(n: int = 4, **genesis: object) -> World:
    """A world whose first commitment window has just closed."""
    world = started(n, **genesis)
    world.block(*(world.commit(name, 0) for name in world.names))
    return world


def opened(n: int = 4, **genesis: object) -> World:
    world = committed(n, **genesis)
    world.block(*(world.open(name, 0) for name in world.names))
    return world


def accepted(world: World) -> list[str]:
    return [item.author for item in world.told(ev.RoundFixed)[-1].accepted]


def outcome(world: World, name: str) -> ev.MemberOutcome:
    ended = [e for e in world.events if isinstance(e, ev.RoundFixed | ev.RoundVoid)][-1]
    return next(o for o in ended.outcomes if o.peer == name)


# --- 1, 2: statements ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"run_id": b"x" * 32},
        {"epoch": 1},
        {"round": 3},
        {"author": "stranger"},
        {"author": "peer-2"},
        {"version": 2},
    ],
)
def test_round_01_a_statement_binds_its_place(change: dict) -> None:
    world = started()
    statement = replace(parse(world.commit("peer-1", 0)).statement, **change)
    assert admissible(sign(statement, world.keys["peer-1"]), world.state) is not None


def test_round_01_a_signature_cannot_be_shown_for_another_place() -> None:
    world = started()
    parsed = parse(world.commit("peer-1", 0))
    moved = encode(replace(parsed.statement, round=1))
    tx = encode(m.Signed(moved, parsed.signature))
    assert admissible(tx, world.state) == "not signed by peer-1"


def test_round_01_another_signature_over_the_same_content_is_the_same_statement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = started()
    tx = world.commit("peer-1", 0)
    world.block(tx)
    other = encode(m.Signed(parse(tx).body, bytes(64)))
    monkeypatch.setattr(m.Parsed, "signed_by", lambda self, public: True)
    assert admissible(other, world.state) == "already on the ledger"
    world.block(other)
    assert not world.told(ev.Convicted)


def test_round_02_the_first_of_each_counts_and_a_second_convicts() -> None:
    world = started()
    world.block(world.commit("peer-1", 0))
    applied = world.block(world.commit("peer-1", 0, b"other"))
    assert applied.results[0].code == CODE_NO_EFFECT
    convicted = world.told(ev.Convicted)
    assert [c.peer for c in convicted] == ["peer-1"]
    assert convicted[0].evidence.fault == Fault.EQUIVOCATION


@pytest.mark.parametrize("kind", ["commit", "open", "attest"])
def test_round_02_a_second_one_by_the_fixing_block_removes_the_contribution(kind: str) -> None:
    world = opened(7)
    second = {
        "commit": world.commit("peer-1", 0, b"other"),
        "open": world.open("peer-1", 0, b"other"),
        "attest": world.attest("peer-1", 0, {"peer-2": Status.MISSING}),
    }[kind]
    world.block(*(world.attest(name, 0) for name in world.names), second)
    assert accepted(world) == [name for name in world.names if name != "peer-1"]
    told = outcome(world, "peer-1")
    assert (told.outcome, told.proof) == (Outcome.EQUIVOCATED, "transferable")


def test_round_02_later_it_changes_no_set_but_still_convicts() -> None:
    world = opened(7)
    world.block(*(world.attest(name, 0) for name in world.names))
    before = world.state.previous
    world.block(world.commit("peer-1", 0, b"other"))
    assert world.state.previous.accepted == before.accepted
    assert [c.peer for c in world.told(ev.Convicted)] == ["peer-1"]


def test_round_02_closings_never_convict() -> None:
    world = started()
    world.block(
        world.closing("peer-1", 0, "commit", ()),
        world.closing("peer-1", 0, "commit", ("peer-1",)),
    )
    assert not world.told(ev.Convicted)


def test_round_02_a_convict_is_ignored_at_once_and_has_no_seat_from_the_next_opening_on() -> None:
    world = started(7)
    world.block(world.commit("peer-1", 0), world.commit("peer-1", 0, b"other"))
    assert world.state.current.seat("peer-1").contributor
    assert admissible(world.open("peer-1", 0), world.state) == "peer-1 is convicted"
    rest = tuple(name for name in world.names if name != "peer-1")
    world.play_round(0, rest)
    assert world.state.current.seat("peer-1") is None
    assert world.state.current.f == 1, "f − e: evidence excluded one"
    world.get_ready()
    refused = admissible(world.commit("peer-1", 1), world.state)
    assert refused == "peer-1 is no member in round 1"


# --- 3, 4: opening -------------------------------------------------------------------------------


def test_round_03_round_0_opens_with_a_quorum_of_ready() -> None:
    world = World(4)
    world.block(world.ready("peer-0"), world.ready("peer-1"))
    assert world.state.phase == Phase.READY
    world.block(world.ready("peer-3"))
    assert world.state.phase == Phase.COMMIT
    assert world.told(ev.RoundOpened) == [ev.RoundOpened(0)]


def test_round_03_quorums_are_of_power_and_not_of_heads() -> None:
    world = World(4)
    members = tuple(
        replace(member, power=10 if member.name == "peer-3" else 1)
        for member in world.genesis.members
    )
    heavy = World(4, members=members)
    heavy.block(*(heavy.ready(name) for name in ("peer-0", "peer-1", "peer-2")))
    assert heavy.state.phase == Phase.READY, "3 of 13"
    heavy.block(heavy.ready("peer-3"))
    assert heavy.state.phase == Phase.COMMIT


def test_round_03_the_next_round_opens_in_the_block_that_settles_the_last() -> None:
    world = started()
    applied = world.play_round(0)
    kinds = [type(event) for event in applied.events]
    assert kinds == [ev.RoundFixed, ev.RoundOpened]
    assert world.state.current.number == 1
    void = started(m_min=3)
    void.block(*(void.closing(name, 0, "commit", ()) for name in void.names))
    assert [type(e) for e in void.events[1:]] == [ev.RoundVoid, ev.RoundOpened]
    assert void.state.current.number == 1, "round numbers are never used again"


def test_round_03_what_a_round_goes_by_is_frozen_at_its_opening() -> None:
    world = started(7)
    frozen = world.state.current
    world.block(world.commit("peer-1", 0), world.commit("peer-1", 0, b"other"))
    now = world.state.current
    assert (now.seats, now.f, now.m_min, now.waited) == (
        frozen.seats,
        frozen.f,
        frozen.m_min,
        frozen.waited,
    )


def test_round_03_the_ledgers_fields_of_the_agreed_state_are_frozen_when_the_round_is_fixed() -> (
    None
):
    world = started()
    world.play_round(0)
    first = world.state.previous.agreed
    assert (first.pass_index, first.cursor) == (0, 4 * 40)
    credit = first.credit_digest
    world.play_round(1)
    assert world.state.previous.agreed.credit_digest != credit
    assert world.state.previous.agreed.membership_digest == first.membership_digest


def test_round_04_closings_attestations_and_roots_follow_the_set_of_the_rounds_opening() -> None:
    world = opened(4)
    stranger = SigningKey.derive(b"z" * 32, "stranger")
    vote = replace(parse(world.attest("peer-0", 0)).statement, author="stranger")
    assert admissible(sign(vote, stranger), world.state) is not None


# --- 5 to 9: windows -----------------------------------------------------------------------------


def test_round_05_a_window_closes_when_all_waited_for_have_an_item() -> None:
    world = started()
    world.block(*(world.commit(name, 0) for name in world.names[:3]))
    assert world.state.phase == Phase.COMMIT
    world.block(world.commit(world.names[3], 0))
    assert world.state.phase == Phase.OPEN
    assert world.told(ev.CommitmentsClosed)[0].authors == world.names


def test_round_05_it_is_judged_at_the_end_of_the_block() -> None:
    world = started()
    closings = [world.closing(name, 0, "commit", world.names[:3]) for name in world.names[:3]]
    commits = [world.commit(name, 0) for name in world.names]
    world.block(*closings, *commits)
    assert world.told(ev.CommitmentsClosed)[0].authors == world.names, "the last one is in time"


def test_round_05_it_needs_m_min_items_even_if_all_waited_for_are_there() -> None:
    world = started(4, m_min=3)
    parked = tuple(
        replace(member, parked=member.name in ("peer-2", "peer-3"))
        for member in world.state.members
    )
    current = replace(world.state.current, waited=("peer-0", "peer-1"))
    world.state = replace(world.state, members=parked, current=current)
    world.block(world.commit("peer-0", 0), world.commit("peer-1", 0))
    assert world.state.phase == Phase.COMMIT
    world.block(world.commit("peer-3", 0))
    assert world.state.phase == Phase.OPEN


def test_round_05_openings_are_waited_for_from_those_who_committed() -> None:
    world = started(4)
    there = world.names[:3]
    world.block(
        *(world.commit(name, 0) for name in there),
        *(world.closing(name, 0, "commit", there) for name in there),
    )
    world.block(*(world.open(name, 0) for name in there))
    assert world.state.phase == Phase.ATTEST


def test_round_06_a_quorum_of_closings_closes_a_window() -> None:
    world = started()
    there = world.names[:3]
    world.block(*(world.commit(name, 0) for name in there))
    world.block(*(world.closing(name, 0, "commit", there) for name in there[:2]))
    assert world.state.phase == Phase.COMMIT
    world.block(world.closing(there[2], 0, "commit", there))
    assert world.state.phase == Phase.OPEN


def test_round_06_a_closing_counts_only_once_all_that_it_lists_is_on_the_ledger() -> None:
    world = started(4, m_min=2)
    there = world.names[:3]
    world.block(*(world.closing(name, 0, "commit", there) for name in there))
    world.block(world.commit("peer-0", 0), world.commit("peer-1", 0))
    assert world.state.phase == Phase.COMMIT, "a leader left out the third, to no avail"
    world.block(world.commit("peer-2", 0))
    assert world.state.phase == Phase.OPEN


def test_round_06_the_first_closing_of_a_validator_counts() -> None:
    world = started(4, m_min=2)
    here = world.names[:2]
    world.block(*(world.commit(name, 0) for name in here))
    world.block(
        world.closing("peer-0", 0, "commit", (*here, "peer-3")),
        world.closing("peer-0", 0, "commit", here),
        world.closing("peer-1", 0, "commit", here),
        world.closing("peer-2", 0, "commit", here),
    )
    assert world.state.phase == Phase.COMMIT, "peer-0 still insists on peer-3"


def test_round_07_early_items_wait_for_their_window_and_late_ones_do_nothing() -> None:
    world = started()
    early = [world.commit("peer-0", 1), world.open("peer-0", 1), world.open("peer-0", 0)]
    world.block(*early)
    world.play_round(0, world.names[1:])
    assert world.state.current.number == 1
    assert world.state.current.slot("commit", "peer-0") is not None
    late = world.commit("peer-0", 0)
    applied = world.block(late, *(world.commit(name, 1) for name in world.names[1:]))
    assert applied.results[0].code == CODE_NO_EFFECT
    assert "peer-0" not in [a.author for a in world.state.previous.accepted]
    world.block(world.rooted("peer-1", 0))
    world.block(*(world.open(name, 1) for name in world.names[1:]))
    assert world.state.phase == Phase.ATTEST, "the early opening of peer-0 counts"
    assert [a.author for a in world.state.current.opened] == list(world.names)


def test_round_08_an_opening_must_fit_its_commitment() -> None:
    world = committed(4)
    world.block(
        *(world.open(name, 0) for name in world.names[:3]), world.open("peer-3", 0, b"other")
    )
    world.block(*(world.attest(name, 0) for name in world.names))
    assert accepted(world) == list(world.names[:3])
    told = outcome(world, "peer-3")
    assert (told.outcome, told.reason) == (Outcome.MALFORMED, "bad-opening")
    assert told.evidence.fault == Fault.BAD_OPENING


def absent_rounds(world: World, name: str, rounds: range) -> None:
    others = tuple(n for n in world.names if n != name)
    for number in rounds:
        world.play_round(number, others)


def test_round_09_two_absences_in_rounds_that_count_and_a_member_is_no_longer_waited_for() -> None:
    world = started(4, rounds=30)
    absent_rounds(world, "peer-2", range(0, 1))
    assert "peer-2" in world.state.current.waited
    absent_rounds(world, "peer-2", range(1, 2))
    assert world.state.current.waited == ("peer-0", "peer-1", "peer-3")
    others = tuple(n for n in world.names if n != "peer-2")
    world.block(world.rooted("peer-0", 1), *(world.commit(name, 2) for name in others))
    assert world.state.phase == Phase.OPEN, "without a time-out"


def test_round_09_void_rounds_do_not_count_as_absence() -> None:
    world = started(4, rounds=30, m_min=3)
    for number in range(3):
        world.block(*(world.closing(name, number, "commit", ()) for name in world.names))
    assert len(world.told(ev.RoundVoid)) == 3
    assert world.state.current.waited == world.names


def test_round_09_at_most_f_longest_absent_first_ties_by_id() -> None:
    world = started(7, rounds=30, m_min=3)
    four = world.names[:4]
    seats = (*four, "peer-4")
    for number, who in enumerate((seats, seats, four, four)):
        closers = world.names
        previous = world.state.unsigned
        world.block(
            *([world.rooted("peer-0", previous.number)] if previous else []),
            *(world.commit(name, number) for name in who),
            *(world.closing(name, number, "commit", who) for name in closers),
        )
        world.block(*(world.open(name, number) for name in who))
        world.block(*(world.attest(name, number) for name in world.names))
    parked = [member.name for member in world.state.members if member.parked]
    assert parked == ["peer-5", "peer-6"], "f = 2; peer-4 was absent for a shorter time"


def test_round_09_after_its_jth_spell_it_must_show_up_in_2_to_the_j_rounds() -> None:
    world = started(4, rounds=60)
    number = 0
    for spell, needed in ((1, 2), (2, 4)):
        absent_rounds(world, "peer-2", range(number, number + 2))
        number += 2
        assert world.state.member("peer-2").parked
        assert world.state.member("peer-2").spells == spell
        shown = 0
        while world.state.member("peer-2").parked:
            world.play_round(number)
            number, shown = number + 1, shown + 1
        assert shown == needed + 1, "the round in which the last one was late enough to count"
    assert "peer-2" in world.state.current.waited
    assert LONGEST_STREAK == 64


def test_round_09_late_items_count_towards_showing_up() -> None:
    world = started(4, rounds=60)
    others = tuple(n for n in world.names if n != "peer-2")
    absent_rounds(world, "peer-2", range(2))
    for number in range(2, 5):
        world.play_round(number, others)
        world.block(world.commit("peer-2", number), world.open("peer-2", number))
    world.play_round(5, others)
    assert not world.state.member("peer-2").parked


def test_round_09_convicts_are_not_waited_for() -> None:
    world = started(7)
    world.block(world.commit("peer-6", 0), world.commit("peer-6", 0, b"other"))
    world.block(*(world.commit(name, 0) for name in world.names[:6]))
    world.block(*(world.open(name, 0) for name in world.names[:6]))
    assert world.state.phase == Phase.ATTEST


# --- 10 to 12: the set ---------------------------------------------------------------------------


def test_round_10_an_attestation_has_a_status_for_every_seat() -> None:
    world = opened()
    short = replace(parse(world.attest("peer-0", 0)).statement, statuses=b"\1\1\1")
    unknown = replace(parse(world.attest("peer-0", 0)).statement, statuses=b"\1\1\1\7")
    for statement in (short, unknown):
        assert admissible(world.sign(statement), world.state) == "not a status for each of 4 seats"


def test_round_11_the_quorums_attestation_fixes_the_set() -> None:
    world = opened()
    world.block(world.attest("peer-0", 0), world.attest("peer-1", 0))
    assert world.state.phase == Phase.ATTEST
    world.block(world.attest("peer-2", 0))
    assert accepted(world) == list(world.names)


def test_round_11_held_by_more_than_f_counts_whatever_the_rest_say() -> None:
    world = opened(4)
    missing = {"peer-3": Status.MISSING}
    world.block(
        world.attest("peer-0", 0),
        world.attest("peer-1", 0),
        world.attest("peer-2", 0, missing),
        world.attest("peer-3", 0, missing),
    )
    assert "peer-3" in accepted(world)
    other = opened(4)
    other.block(
        other.attest("peer-0", 0),
        other.attest("peer-1", 0, missing),
        other.attest("peer-2", 0, missing),
    )
    assert "peer-3" not in accepted(other), "one holder may be the liar"
    assert outcome(other, "peer-3").outcome == Outcome.MISSING


def test_round_11_malformed_needs_more_than_f_signed_observations() -> None:
    world = opened(4)
    bad = {"peer-3": Status.MALFORMED}
    world.block(*(world.attest(name, 0, bad) for name in world.names[:3]))
    told = outcome(world, "peer-3")
    assert (told.outcome, told.proof) == (Outcome.MALFORMED, "f+1 signed observations")
    assert len(told.evidence.statements) == 3
    other = opened(4)
    slander = [other.attest("peer-3", 0, {"peer-0": Status.MALFORMED})]
    other.block(*slander, *(other.attest(name, 0) for name in other.names[:3]))
    assert outcome(other, "peer-0").outcome == Outcome.ACCEPTED


def test_round_12_void_at_the_first_step_that_leaves_too_few() -> None:
    commit = started(4, m_min=3)
    commit.block(
        commit.commit("peer-0", 0),
        *(commit.closing(name, 0, "commit", ("peer-0",)) for name in commit.names),
    )
    assert commit.told(ev.RoundVoid)[0].reason == "1 commitments where 3 are needed"
    assert not commit.told(ev.CommitmentsClosed), "nobody opens further"
    opening = committed(4, m_min=3)
    opening.block(
        opening.open("peer-0", 0),
        *(opening.closing(name, 0, "open", ("peer-0",)) for name in opening.names),
    )
    assert opening.told(ev.RoundVoid)[0].reason == "1 openings where 3 are needed"
    held = opened(4, m_min=3)
    nothing = [held.attest(name, 0, default=Status.MISSING) for name in held.names]
    held.block(*nothing)
    assert held.told(ev.RoundVoid)[0].reason == "0 payloads held where 3 are needed"
    for world in (commit, opening, held):
        assert world.state.previous.reason == world.told(ev.RoundVoid)[0].reason


def test_round_12_a_void_round_names_only_those_who_failed_in_it() -> None:
    world = committed(4, m_min=3)
    world.block(
        world.open("peer-0", 0),
        *(world.closing(name, 0, "open", ("peer-0",)) for name in world.names),
    )
    told = {o.peer: o.outcome for o in world.told(ev.RoundVoid)[0].outcomes}
    assert told == {name: Outcome.UNOPENED for name in world.names[1:]}


# --- 13, 14: the root ----------------------------------------------------------------------------


def test_round_13_the_next_window_stays_open_until_the_root_is_on_the_ledger() -> None:
    world = started()
    world.play_round(0)
    world.block(*(world.commit(name, 1) for name in world.names))
    assert world.state.phase == Phase.COMMIT
    world.block(world.rooted("peer-2", 0))
    assert world.told(ev.RootSigned) == [ev.RootSigned(0, b"R" * 32)]
    assert world.state.phase == Phase.OPEN


def test_round_13_a_certificate_needs_a_quorum_of_true_signatures_of_that_round() -> None:
    world = started()
    world.play_round(0)
    few = world.rooted("peer-0", 0, world.names[:2])
    assert admissible(few, world.state) == "root signatures of less than a quorum"
    whole = parse(world.rooted("peer-0", 0)).statement
    other_root = world.sign(replace(whole, root=b"S" * 32))
    assert admissible(other_root, world.state) == "a root signature that is not peer-0's"
    swapped = whole.signatures[64:128] + whole.signatures[:64] + whole.signatures[128:]
    assert admissible(world.sign(replace(whole, signatures=swapped)), world.state) is not None
    early = world.sign(replace(whole, round=1))
    assert admissible(early, world.state) == "round 1 is not waiting for its root"
    assert admissible(world.rooted("peer-0", 0), world.state) is None


def test_round_13_the_second_certificate_of_a_block_does_nothing() -> None:
    world = started()
    world.play_round(0)
    applied = world.block(world.rooted("peer-0", 0), world.rooted("peer-1", 0))
    assert [result.code for result in applied.results] == [0, CODE_REFUSED]


def test_round_13_the_last_round_ends_with_its_root() -> None:
    world = started(4, rounds=2)
    world.play_round(0)
    world.play_round(1)
    assert world.state.phase == Phase.ROOT
    world.block(world.rooted("peer-0", 1))
    assert world.state.phase == Phase.FINISHED
    assert world.told(ev.RunFinished) == [ev.RunFinished()]


def test_round_14_certificate_or_void_the_first_on_the_ledger_decides() -> None:
    world = started(4, rounds=9)
    world.play_round(0)
    votes = [world.void(name, 0) for name in world.names[:3]]
    signed = World.block(world, world.rooted("peer-0", 0), *votes)
    assert [r.code for r in signed.results] == [0, CODE_REFUSED, CODE_REFUSED, CODE_REFUSED]
    world.play_round(1)
    votes = [world.void(name, 1) for name in world.names[:3]]
    voided = world.block(*votes, world.rooted("peer-0", 1))
    assert [r.code for r in voided.results] == [0, 0, 0, CODE_REFUSED]


def test_round_14_a_voted_void_takes_the_round_that_started_from_it_along() -> None:
    world = started(4, rounds=9)
    world.play_round(0)
    credit = [member.credit for member in world.state.members]
    world.play_round(1)
    world.block(*(world.void(name, 1) for name in world.names[:3]))
    assert [e.round for e in world.told(ev.RoundVoid)] == [1, 2]
    assert world.state.current.number == 3
    assert [member.credit for member in world.state.members] == credit
    assert world.state.signed.round == 0
    assert len(world.state.requeue) == 4, "8 shares came back, 4 are dealt again"
    world.play_round(3)
    assert world.told(ev.RoundFixed)[-1].round == 3


def test_round_14_the_last_round_can_be_voted_void_too() -> None:
    world = started(4, rounds=1)
    world.play_round(0)
    world.block(*(world.void(name, 0) for name in world.names[:3]))
    assert world.state.phase == Phase.FINISHED
    assert world.told(ev.RoundVoid)[-1].reason == "voted-void"


# --- 15: secrets ---------------------------------------------------------------------------------


def test_round_15_beacon_secrets_of_the_last_round_serve_the_one_after_the_next() -> None:
    worlds = [started(4), started(4)]
    for world in worlds:
        world.play_round(0)
    one, two = worlds
    assert one.state.beacons == two.state.beacons
    two.secret = lambda author, purpose, number: b"another secret".ljust(32, bytes([number]))
    fallback = one.state.beacons[1]
    one.play_round(1)
    assert one.state.beacons[1] != fallback
    used = one.state.beacons
    one.play_round(2)
    assert one.state.beacons[0] == used[1], "what opened in round 1 assigns round 3"


def with_false_secrets(world: World, number: int, liars: tuple[str, ...]) -> None:
    """Play a round in which ``liars`` open another beacon secret than they bound."""
    real = world.secret

    def secret(author: str, purpose: str, at: int) -> bytes:
        lies = author in liars and purpose == "beacon" and at == number - 1
        return b"L" * 32 if lies else real(author, purpose, at)

    world.secret = secret
    world.play_round(number)
    world.secret = real


def test_round_15_with_fewer_than_f_plus_1_secrets_the_beacon_is_the_last_ones_hash() -> None:
    honest, short, enough = started(4), started(4), started(4)
    for world in (honest, short, enough):
        world.play_round(0)
    honest.play_round(1)
    with_false_secrets(short, 1, short.names[:3])
    with_false_secrets(enough, 1, enough.names[:2])
    assert short.state.beacons[1] == sha256("round/beacon/fallback", short.state.beacons[0])
    assert len({w.state.beacons[1] for w in (honest, short, enough)}) == 3


def test_round_15_a_false_secret_costs_its_author_nothing_but_its_say() -> None:
    world = started(4)
    world.play_round(0)
    with_false_secrets(world, 1, ("peer-0",))
    assert accepted(world) == list(world.names)


# --- samples -------------------------------------------------------------------------------------


def test_samples_of_contributions_that_did_not_count_are_assigned_again() -> None:
    world = started(4)
    lost = dict(world.state.current.shares)["peer-2"]
    world.play_round(0, ("peer-0", "peer-1", "peer-3"))
    shares = dict(world.state.current.shares).values()
    assert lost in shares
    seen = [p for share in shares for part in share for p in positions(part)]
    assert len(seen) == len(set(seen)) == 160


# --- 17, 19: under either engine -----------------------------------------------------------------


def test_round_17_rounds_previous_current_and_next_are_admissible_and_no_window_matters() -> None:
    world = started(4, rounds=9)
    for number in range(3):
        world.play_round(number)
    late_world = world.state.current.number
    assert late_world == 3
    for number, fits in ((1, False), (2, True), (3, True), (4, True), (5, False)):
        for tx in (world.commit("peer-0", number, b"new"), world.open("peer-0", number, b"new")):
            assert (admissible(tx, world.state) is None) == fits, number


def test_round_17_two_different_statements_per_slot_and_no_third() -> None:
    world = started()
    first, second, third = (
        world.closing("peer-0", 0, "commit", world.names[:count]) for count in range(3)
    )
    world.block(first, second)
    assert admissible(third, world.state) == "two different statements are on the ledger"


def test_round_17_cheap_checks_come_before_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    world = started()
    world.block(world.commit("peer-0", 0))
    asked = []
    monkeypatch.setattr(m.Parsed, "signed_by", lambda self, public: asked.append(self) or True)
    for tx in (
        world.commit("peer-0", 0),
        world.commit("peer-0", 5),
        world.ready("peer-0"),
        b"junk",
        bytes(5000),
        world.rooted("peer-0", 0),
    ):
        assert admissible(tx, world.state) is not None
    assert asked == []


def test_round_17_evidence_from_elsewhere_needs_a_check_that_knows_it() -> None:
    world = started()
    double = Evidence(Fault.DOUBLE_VOTE, "peer-1", 0, (b"a", b"b"))
    tx = world.sign(m.EvidenceTx(*world.head("peer-0", 0), double))
    assert (
        admissible(tx, world.state) == "evidence of a kind, or against a member, that is not known"
    )
    checks = {Fault.DOUBLE_VOTE: lambda evidence, public: True}
    assert admissible(tx, world.state, checks) is None
    framed = Evidence(Fault.EQUIVOCATION, "peer-1", 0, (world.commit("peer-1", 0),) * 2)
    tx = world.sign(m.EvidenceTx(*world.head("peer-0", 0), framed))
    assert admissible(tx, world.state) == "evidence that does not convince"
    true = (world.commit("peer-1", 0), world.commit("peer-1", 0, b"2"))
    found = Evidence(Fault.EQUIVOCATION, "peer-1", 0, true)
    world.block(world.sign(m.EvidenceTx(*world.head("peer-0", 0), found)))
    assert [c.peer for c in world.told(ev.Convicted)] == ["peer-1"]


def test_round_19_the_gate_waits_only_for_members_waited_for() -> None:
    world = started(4, rounds=30)
    absent_rounds(world, "peer-2", range(2))
    there = ("peer-0", "peer-1", "peer-3")
    commits = [world.commit(name, 2) for name in there]
    assert not proposal_complete(world.state, commits), "the last root is missing"
    commits.append(world.rooted("peer-0", 1))
    assert proposal_complete(world.state, commits)
    assert not proposal_complete(world.state, commits[1:])


def test_round_19_the_gate_opens_for_a_quorum_of_closings() -> None:
    world = started(4)
    some = [world.commit("peer-0", 0)]
    closings = [world.closing(name, 0, "commit", ("peer-0",)) for name in world.names[:3]]
    assert not proposal_complete(world.state, some + closings[:2])
    assert proposal_complete(world.state, some + closings)


def test_a_state_survives_its_encoding() -> None:
    world = started(4)
    world.play_round(0)
    assert decode_state(encode(world.state)) == world.state
