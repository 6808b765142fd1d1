"""Changes of the membership, read from the ledger: votes, epochs, the next set, old keys."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from round_world import World

from torchbft.primitives.abci import ValidatorUpdate
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import Height
from torchbft.primitives.keys import verify
from torchbft.primitives.wire import encode
from torchbft.protocols.round import events as ev
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.admissible import MAX_CHANGES, admissible
from torchbft.protocols.round.application import Application, Saved, proposal_complete
from torchbft.protocols.round.changes import Admit, Remove, described
from torchbft.protocols.round.membership import bounds, bounds_met, in_force, validator_updates
from torchbft.protocols.round.messages import MEMBER_SLOT, parse
from torchbft.protocols.round.reader import CODE_NO_EFFECT, apply_block
from torchbft.protocols.round.state import Phase, Seat, decode_state, ledger_fields, seats_of


def refused(world: World, change: object, author: str = "peer-0") -> str | None:
    return admissible(world.vote(author, change), world.state)


def names(world: World) -> list[str]:
    return [seat.name for seat in world.state.current.seats]


def convicted(world: World, *liars: str) -> World:
    """Liars of the round in progress, with two commitments each."""
    number = world.state.current.number
    world.block(*(world.commit(liar, number, tag) for liar in liars for tag in (b"", b"other")))
    return world


# --- votes ----------------------------------------------------------------------------------------


def test_a_change_passes_with_a_quorum_of_the_rounds_power_and_not_before() -> None:
    world = World(4).start()
    change = Remove("peer-3")
    world.block(*(world.vote(name, change) for name in world.names[:2]))
    assert world.state.passed == ()
    world.block(world.vote("peer-2", change))
    assert world.state.passed == (change,)
    assert [(e.round, e.change) for e in world.told(ev.ChangePassed)] == [(0, change)]
    assert refused(world, change, "peer-3") == "it has passed already"


def test_votes_are_counted_by_power() -> None:
    members = World(4).genesis.members
    heavy = replace(members[0], power=5)
    world = World(4, members=(heavy, *members[1:])).start()
    assert world.state.current.voting.quorum == 6
    change = Remove("peer-3")
    world.block(*(world.vote(name, change) for name in world.names[1:]))
    assert world.state.passed == (), "three of four heads, but 3 of 8 power"
    world.block(world.vote("peer-0", change))
    assert world.state.passed == (change,)


def test_votes_count_in_their_round_alone() -> None:
    world = World(4).start()
    change = Remove("peer-3")
    world.block(*(world.vote(name, change) for name in world.names[:2]))
    world.play_round(0)
    late = world.block(world.vote("peer-2", change, 0))
    assert [r.code for r in late.results] == [CODE_NO_EFFECT]
    assert world.state.passed == ()
    world.block(*(world.vote(name, change) for name in world.names[:3]))
    assert world.state.passed == (change,)


def test_only_validators_of_the_round_vote() -> None:
    world = World(4)
    world.start().pass_change(world.admit("peer-8", validator=False))
    world.play_round(0)
    assert refused(world, Remove("peer-0"), "peer-8") == "peer-8 is no validator"
    assert refused(convicted(world, "peer-1"), Remove("peer-0"), "peer-1") == "peer-1 is convicted"


def test_a_validator_votes_for_a_bounded_number_of_changes_in_a_round() -> None:
    world = World(4).start()
    changes = [world.rotate("peer-1", f"/{i}") for i in range(MAX_CHANGES + 1)]
    results = world.block(*(world.vote("peer-0", change) for change in changes)).results
    assert [r.code for r in results] == [0] * MAX_CHANGES + [1]
    assert results[-1].log == f"more than {MAX_CHANGES} changes voted for"


@pytest.mark.parametrize("host", ["a\x1b[2J", "a\nall is well", "a b", "ä"])
def test_a_host_that_could_paint_a_screen_is_no_statement(host: str) -> None:
    world = World(4).start()
    for good in ("lab.example", "192.0.2.1", "fe80::1%eth0", ""):
        assert refused(world, world.admit("peer-8", host=good)) is None
    assert "matching regex" in str(refused(world, world.admit("peer-8", host=host)))


def test_a_vote_is_one_statement_whatever_its_signature() -> None:
    world = World(4).start()
    world.block(world.vote("peer-0", Remove("peer-3")))
    assert refused(world, Remove("peer-3")) == "already on the ledger"
    slots = {parse(world.vote("peer-0", c)).slot for c in (Remove("peer-3"), Remove("peer-2"))}
    assert len(slots) == 2
    assert all(slot.startswith(MEMBER_SLOT) for slot in slots)


# --- when it is made ------------------------------------------------------------------------------


def test_round_04_contributors_change_at_the_next_opening_within_the_epoch() -> None:
    world = World(4).start()
    world.pass_change(world.admit("peer-8", validator=False))
    assert names(world) == list(world.names)
    applied = world.play_round(0)
    assert (world.state.phase, world.state.epoch) == (Phase.COMMIT, 0)
    assert names(world) == [*world.names, "peer-8"]
    assert any(isinstance(event, ev.RoundOpened) for event in applied.events)
    assert "peer-8" in world.state.current.waited
    assert dict(world.state.current.shares).keys() >= {"peer-8"}
    world.play_round(1)
    assert [a.author for a in world.state.previous.accepted][-1] == "peer-8"


def test_round_04_an_epochs_updates_come_with_its_last_round_and_the_next_opens_when_ready() -> (
    None
):
    """Sentence 4 as a whole: the set of a round is frozen; the next epoch's validators open it."""
    world = World(4)
    application = Application(world.genesis)
    heights = iter(range(1, 99))

    def block(*txs: bytes) -> tuple[ValidatorUpdate, ...]:
        result = application.finalize_block(Height(next(heights)), txs)
        application.commit()
        world.state = application.state
        return result.validator_updates

    block(*(world.ready(name) for name in world.names))
    change = world.admit("peer-8")
    updates = block(*(world.vote(name, change) for name in world.names))
    assert updates == (), "it passed, but the epoch is not over"
    block(*(world.commit(name, 0) for name in world.names))
    block(*(world.open(name, 0) for name in world.names))
    updates = block(*(world.attest(name, 0) for name in world.names))
    assert updates == (ValidatorUpdate(change.voting, 1),)
    state = world.state
    assert (state.phase, state.epoch, state.current.number) == (Phase.READY, 1, 1)
    assert application.names[change.voting] == "peer-8"
    # The last round's root is signed by its own set, with its epoch; the newcomer has no say.
    assert admissible(world.rooted("peer-0", 0), world.state) is None
    assert admissible(world.commit("peer-0", 1), world.state) is None
    with_stranger = world.sign(m.VoidVote(*world.head("peer-8", 0), "no"))
    assert admissible(with_stranger, world.state) == "peer-8 is no member in round 0"
    # Nothing happens before a quorum of the new set is ready: 4 of 5.
    assert block(*(world.ready(name) for name in world.names[:3])) == ()
    assert world.state.phase == Phase.READY
    stale = m.Ready(*world.head("peer-3", 1, epoch=0))
    assert admissible(world.sign(stale), world.state) == "of epoch 0, not 1"
    assert block(world.ready("peer-8")) == ()
    assert world.state.phase == Phase.COMMIT
    assert world.state.current.voting.n == 5
    block(world.rooted("peer-0", 0), *(world.commit(name, 1) for name in names(world)))
    assert world.state.phase == Phase.OPEN


def test_the_next_epochs_gate_waits_for_all_its_validators() -> None:
    world = World(4).start()
    world.pass_change(world.admit("peer-8"))
    world.play_round(0)
    up = [world.ready(name) for name in names(world)]
    assert not proposal_complete(world.state, up[:-1])
    assert proposal_complete(world.state, up)


def test_what_passes_in_a_void_round_is_made_too() -> None:
    world = World(4).start()
    world.pass_change(Remove("peer-3"))
    world.block(
        world.commit("peer-0", 0), *(world.closing(n, 0, "commit", ()) for n in world.names)
    )
    assert world.told(ev.RoundVoid)
    assert names(world) == list(world.names[:3])
    assert world.state.epoch == 1


def test_the_last_round_ends_without_a_change_that_nobody_would_see() -> None:
    world = World(4, rounds=1).start()
    world.pass_change(Remove("peer-3"))
    world.play_round(0)
    world.block(world.rooted("peer-0", 0))
    assert (world.state.phase, world.state.epoch) == (Phase.FINISHED, 0)


def test_a_vote_in_the_wait_for_an_epoch_counts_for_its_round() -> None:
    world = World(4).start()
    world.pass_change(world.admit("peer-8"))
    world.play_round(0)
    world.pass_change(Remove("peer-3"))
    assert world.state.passed == (Remove("peer-3"),)
    world.get_ready()
    world.play_round(1)
    assert names(world) == ["peer-0", "peer-1", "peer-2", "peer-8"]
    assert world.state.epoch == 2


def test_a_void_vote_during_the_wait_takes_effect_once_the_round_is_open() -> None:
    world = World(4).start()
    world.pass_change(world.admit("peer-8"))
    world.play_round(0)
    world.block(*(world.void(name, 0) for name in world.names))
    assert world.state.phase == Phase.READY
    world.get_ready()
    assert [e.round for e in world.told(ev.RoundVoid)] == [0, 1]
    assert (world.state.phase, world.state.current.number) == (Phase.COMMIT, 2)
    assert names(world)[-1] == "peer-8", "the change stays"


def test_the_agreed_states_membership_is_the_one_that_the_next_round_has() -> None:
    plain, changed = World(4).start(), World(4).start()
    changed.pass_change(changed.admit("peer-8", validator=False))
    for world in (plain, changed):
        world.play_round(0)
    assert (
        changed.state.previous.agreed.membership_digest
        == ledger_fields(changed.state).membership_digest
    )
    digests = {w.state.previous.agreed.membership_digest for w in (plain, changed)}
    assert len(digests) == 2
    assert decode_state(encode(changed.state)) == changed.state


# --- against the next set -------------------------------------------------------------------------


def test_unknown_and_duplicate_members_are_refused() -> None:
    world = World(4).start()
    assert refused(world, Remove("nobody")) == "nobody is no member"
    assert refused(world, world.rotate("nobody")) == "nobody is no member"
    assert refused(world, world.admit("peer-1", "/2")) == "peer-1 is a member already"
    key = world.state.member("peer-1").voting
    taken = world.admit("peer-8", voting=key)
    assert refused(world, taken) == "its voting key is or was in use"
    twin = world.admit("peer-8", identity=world.state.member("peer-1").identity)
    assert refused(world, twin) == "its identity key is in use already"
    both = world.admit("peer-8", voting=world.identities["peer-8"].public)
    assert refused(world, both) == "identity and voting key are one"
    idle = world.admit("peer-8", contributor=False, validator=False)
    assert refused(world, idle) == "peer-8 would neither contribute nor validate"


def test_a_voting_key_is_certified_by_its_members_identity() -> None:
    world = World(4).start()
    foreign = world.certificate("peer-0", world.has_key("peer-8"))
    admit = world.admit("peer-8", certificate=foreign)
    what = "the voting key is not certified by peer-8's identity"
    assert refused(world, admit) == what
    rotate = world.rotate("peer-1")
    stolen = replace(rotate, name="peer-2")
    assert refused(world, stolen) == what.replace("8", "2")


def test_the_next_set_is_the_one_after_what_has_passed() -> None:
    """Two that are each possible, but not both: the second is refused, and if it passed in the same
    block, not made."""
    world = World(2).start()
    world.pass_change(Remove("peer-0"))
    assert refused(world, Remove("peer-1")) == "no validator would be left"
    world = World(2).start()
    world.pass_change(Remove("peer-0"), Remove("peer-1"))
    assert len(world.state.passed) == 2
    world.play_round(0)
    (changed,) = world.told(ev.MembershipChanged)
    assert len(names(world)) == 1
    assert [reason for _, reason in changed.refused] == ["no validator would be left"]
    assert len(changed.made) == 1


def test_which_of_two_is_made_does_not_depend_on_the_order_in_the_block() -> None:
    made = set()
    for order in (1, -1):
        world = World(2).start()
        votes = [world.vote(n, Remove(who)) for who in world.names for n in world.names]
        world.block(*votes[::order])
        world.play_round(0)
        made.add(tuple(names(world)))
    assert len(made) == 1


def test_the_last_contributor_stays() -> None:
    members = World(2).genesis.members
    watcher = replace(members[1], contributor=False)
    world = World(2, members=(members[0], watcher), f=0, m_min=1).start()
    assert refused(world, Remove("peer-0")) == "no contributor would be left"
    assert refused(world, Remove("peer-1")) is None


def test_a_convict_neither_rotates_nor_comes_back() -> None:
    world = convicted(World(4).start(), "peer-1")
    assert refused(world, world.rotate("peer-1")) == "peer-1 is convicted"
    world.pass_change(Remove("peer-1"))
    world.play_round(0, ("peer-0", "peer-2", "peer-3"))
    world.get_ready()
    assert refused(world, world.admit("peer-1", "/3")) == "peer-1 is convicted"


def test_a_name_stays_its_identitys_and_who_left_comes_back_with_a_new_key() -> None:
    world = World(4).start()
    world.pass_change(Remove("peer-3"))
    world.play_round(0)
    world.get_ready()
    usurper = world.admit("peer-3", "/2", identity=world.identities["peer-2"].public)
    assert refused(world, usurper) == "the name peer-3 belongs to another identity"
    assert refused(world, world.admit("peer-3")) == "its voting key is or was in use"
    world.pass_change(world.admit("peer-3", "/2"))
    world.play_round(1)
    world.get_ready()
    assert names(world) == list(world.names)
    world.play_round(2)


@pytest.mark.parametrize(
    ("n", "f", "m_min", "seats", "expected"),
    [
        (4, 1, 3, 5, (1, 4)),
        (4, 1, 3, 7, (2, 5)),
        (4, 1, 3, 3, (0, 3)),
        (7, 2, 5, 2, (0, 2)),
        (7, 1, 6, 10, (1, 9)),
        (7, 1, 3, 10, (1, 3)),
        (7, 2, 3, 4, (1, 3)),
        (1, 0, 1, 4, (1, 3)),
    ],
)
def test_f_and_m_min_follow_the_rounds_own_seats(
    n: int, f: int, m_min: int, seats: int, expected: tuple[int, int]
) -> None:
    """What the run file set at its most grows and falls with n; what it set lower stays."""
    found = bounds(World(n, f=f, m_min=m_min).genesis, seats)
    assert (found.f, found.m_min, found.unmet) == (*expected, "")


KRUM = "krum"
"""A rule that needs n ≥ 2f + 3."""


def test_a_change_that_leaves_the_rule_without_its_need_is_refused_with_the_reason() -> None:
    world = World(9, f=2, m_min=7, rule=KRUM).start()
    assert refused(world, world.admit("peer-9")) == "the rule needs 9 contributions for f=3, not 7"
    assert refused(world, Remove("peer-8")) == "the rule needs 7 contributions for f=2, not 6"
    assert refused(world, world.rotate("peer-8")) is None


def test_a_conviction_is_not_refused_and_lowers_f_until_the_rule_can_do_it() -> None:
    genesis = World(9, f=2, m_min=7, rule=KRUM).genesis
    found = bounds_met(genesis, 8)
    assert (found.f, found.m_min) == (1, 7)
    assert (bounds_met(genesis, 2).f, bounds_met(genesis, 2).m_min) == (0, 2)


# --- convictions ----------------------------------------------------------------------------------


def test_whose_a_key_was_is_known_after_a_restart_as_well() -> None:
    """Evidence of a key that was given up since still has to find its member."""
    world = World(4).start()
    for number, change in enumerate((world.rotate("peer-1", "/2"), world.rotate("peer-1", "/3"))):
        world.pass_change(change)
        world.play_round(number)
        world.get_ready()
    application = Application(world.genesis)
    application.resume(encode(Saved(9, bytes(32), encode(world.state))))
    for tag in ("", "/2", "/3"):
        assert application.names[world.has_key("peer-1", tag).public] == "peer-1"


@pytest.mark.parametrize("opened", [True, False], ids=["in-round-0", "before-it-opens"])
def test_a_convicts_power_is_0_from_the_next_epoch(opened: bool) -> None:
    """Its engine has the genesis' validators until it hears of others, whenever round 0 opens."""
    world = World(4)
    application = Application(world.genesis)
    first = [world.ready(name) for name in world.names]
    twice = [world.commit("peer-3", 0, tag) for tag in (b"", b"other")]
    for height, txs in enumerate((first, twice) if opened else (twice, first), start=1):
        application.finalize_block(Height(height), txs)
        application.commit()
    world.state = application.state
    assert world.state.phase == Phase.COMMIT
    assert world.state.current.voting.n == 4, "the round's set is frozen"
    assert world.state.current.banned == ("peer-3",)
    rest = world.names[:3]
    for height, txs in enumerate(
        (
            [world.commit(n, 0) for n in rest],
            [world.open(n, 0) for n in rest],
            [world.attest(n, 0) for n in rest],
        ),
        start=3,
    ):
        updates = application.finalize_block(Height(height), txs).validator_updates
        application.commit()
    assert updates == (ValidatorUpdate(world.keys["peer-3"].public, 0),)
    assert [s.name for s in application.state.current.seats] == list(rest)


def test_a_convict_of_before_round_0_keeps_its_vote_until_the_epoch_ends() -> None:
    """Or the engine would go on with a validator that no update ever removed."""
    world = World(7)
    application = Application(world.genesis)
    blocks = [
        [world.commit("peer-6", 0, tag) for tag in (b"", b"other")],
        [world.ready(name) for name in world.names[:6]],
        [world.commit(name, 0) for name in world.names[:6]],
        [world.open(name, 0) for name in world.names[:6]],
        [world.attest(name, 0) for name in world.names[:6]],
    ]
    for height, txs in enumerate(blocks, start=1):
        updates = application.finalize_block(Height(height), txs).validator_updates
        application.commit()
        if height == 2:
            seat = application.state.current.seat("peer-6")
            assert seat.validator
    assert updates == (ValidatorUpdate(world.keys["peer-6"].public, 0),)


def test_a_convicts_closings_and_attestations_still_move_its_last_round_on() -> None:
    world = convicted(World(4).start(), "peer-3")
    others = world.names[:3]
    for tx in (
        world.open("peer-3", 0),
        world.vote("peer-3", Remove("peer-0")),
    ):
        assert admissible(tx, world.state) == "peer-3 is convicted"
    assert admissible(world.closing("peer-3", 0, "commit", others), world.state) is None
    assert admissible(world.attest("peer-3", 0), world.state) is None


def test_nobody_waits_for_a_convict_and_closings_that_list_it_count() -> None:
    world = World(4).start()
    double = Evidence(Fault.DOUBLE_VOTE, "peer-3", 0, (b"a", b"b"))
    tx = world.sign(m.EvidenceTx(*world.head("peer-0", 0), double))
    checks = {Fault.DOUBLE_VOTE: lambda evidence, public: True}
    world.state = apply_block(world.state, [tx], checks).state
    rest = world.names[:3]
    some = [world.closing(name, 0, "commit", world.names) for name in rest]
    world.block(*some, *(world.commit(name, 0) for name in rest[:2]))
    assert world.state.phase == Phase.COMMIT, "peer-2's item is not there"
    world.block(world.commit("peer-2", 0))
    assert world.state.phase == Phase.OPEN
    world.block(*(world.open(name, 0) for name in rest))
    assert world.state.phase == Phase.ATTEST


def test_a_closing_that_lists_a_convict_counts_without_its_item() -> None:
    """Its item may not get to the ledger any more; an honest validator that held it is no liar."""
    world = World(7).start()
    double = Evidence(Fault.DOUBLE_VOTE, "peer-6", 0, (b"a", b"b"))
    tx = world.sign(m.EvidenceTx(*world.head("peer-0", 0), double))
    checks = {Fault.DOUBLE_VOTE: lambda evidence, public: True}
    world.state = apply_block(world.state, [tx], checks).state
    here = world.names[:5]  # peer-5 is absent
    world.block(
        *(world.commit(name, 0) for name in here),
        *(world.closing(name, 0, "commit", (*here, "peer-6")) for name in here),
    )
    assert world.state.phase == Phase.OPEN


def test_if_all_validators_are_convicted_the_engine_keeps_them() -> None:
    world = convicted(World(4).start(), *World(4).names)
    seats = seats_of(world.state.members)
    assert [seat.validator for seat in seats] == [True] * 4
    assert not any(seat.contributor for seat in seats)


def test_a_convicted_majority_leaves_the_rest_as_validators() -> None:
    world = convicted(World(4).start(), "peer-1", "peer-2", "peer-3")
    world.block(*(world.closing(name, 0, "commit", ()) for name in world.names))
    assert world.told(ev.RoundVoid)
    assert names(world) == ["peer-0"]
    world.get_ready()
    assert world.state.phase == Phase.COMMIT


# --- old keys -------------------------------------------------------------------------------------


def rotated() -> tuple[World, bytes, bytes, bytes]:
    """peer-1 has a new key from round 1 on; two commitments of round 0 by the old one."""
    world = World(7).start()
    first, second = (world.commit("peer-1", 0, tag) for tag in (b"", b"other"))
    new = world.rotate("peer-1")
    world.pass_change(new)
    world.play_round(0)
    world.get_ready()
    return world, first, second, new.voting


def accuse(world: World, *statements: bytes, number: int = 0) -> str | None:
    evidence = Evidence(Fault.EQUIVOCATION, "peer-1", number, statements)
    tx = world.sign(m.EvidenceTx(*world.head("peer-0", world.state.current.number), evidence))
    return admissible(tx, world.state)


def test_two_signatures_of_the_old_key_convict_the_member_that_held_it() -> None:
    world, first, second, _ = rotated()
    assert accuse(world, first, second) is None


def test_signatures_by_the_old_key_for_later_rounds_convict_nobody() -> None:
    world, _, _, new = rotated()
    old = world.keys["peer-1"]
    one, two = (
        m.sign(parse(world.commit("peer-1", 1, tag)).statement, old) for tag in (b"", b"other")
    )
    assert accuse(world, one, two, number=1) == "evidence that does not convince"
    assert admissible(one, world.state) == "not signed by peer-1"
    assert verify(
        new,
        m.SIGN_DOMAIN,
        parse(world.commit("peer-1", 1)).body,
        parse(world.commit("peer-1", 1)).signature,
    )


def test_evidence_against_one_who_left_is_still_good() -> None:
    world = World(7).start()
    first, second = (world.commit("peer-1", 0, tag) for tag in (b"", b"other"))
    world.pass_change(Remove("peer-1"))
    world.play_round(0)
    world.get_ready()
    assert accuse(world, first, second) is None
    number = world.state.current.number
    evidence = Evidence(Fault.EQUIVOCATION, "peer-1", 0, (first, second))
    world.block(world.sign(m.EvidenceTx(*world.head("peer-0", number), evidence)))
    assert world.state.member("peer-1").convicted
    assert refused(world, world.admit("peer-1", "/4")) == "peer-1 is convicted"


def test_early_items_signed_for_an_epoch_that_is_over_are_dropped() -> None:
    world = World(4).start()
    world.pass_change(world.admit("peer-8"))
    world.block(world.commit("peer-0", 1))
    assert world.state.early
    world.play_round(0)
    assert world.state.early == ()
    assert world.state.current.slots == ()


def test_early_maps_of_seats_are_dropped_if_the_seats_change() -> None:
    world = World(4).start()
    world.pass_change(world.admit("peer-00", validator=False))
    world.block(world.closing("peer-0", 1, "commit", ("peer-0",)), world.commit("peer-0", 1))
    world.play_round(0)
    assert [slot.kind for slot in world.state.current.slots] == ["commit"]


# --- small things ---------------------------------------------------------------------------------


def test_updates_name_each_key_once_removals_first() -> None:
    def seat(name: str, key: bytes, power: int = 1, validator: bool = True) -> Seat:
        return Seat(name, key * 32, power, True, validator)

    before = [seat("a", b"a"), seat("b", b"b"), seat("c", b"c"), seat("w", b"w", validator=False)]
    now = [seat("a", b"z"), seat("b", b"b", 3), seat("c", b"c")]
    assert validator_updates(before, now) == (
        ValidatorUpdate(b"a" * 32, 0),
        ValidatorUpdate(b"b" * 32, 3),
        ValidatorUpdate(b"z" * 32, 1),
    )
    assert validator_updates(now, now) == ()


def test_a_change_is_told_in_words_and_known_to_be_in_force() -> None:
    world = World(4).start()
    admit, rotate = world.admit("peer-8"), world.rotate("peer-1")
    assert described(admit).startswith("admit peer-8 (contributor and validator, identity ")
    assert described(admit).endswith(" at 127.0.0.1:7700")
    assert described(rotate).startswith("rotate peer-1 to voting key ")
    assert described(Remove("peer-3")) == "remove peer-3"
    for change in (admit, rotate, Remove("peer-3")):
        assert not in_force(world.state, change)
    world.pass_change(admit, rotate, Remove("peer-3"))
    world.play_round(0)
    for change in (admit, rotate, Remove("peer-3")):
        assert in_force(world.state, change)
    assert isinstance(admit, Admit)
