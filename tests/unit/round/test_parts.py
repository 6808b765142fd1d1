"""The round's small parts: evidence checks, root votes, sightings, waiting lists, bit maps."""

import pytest
from msgspec.structs import replace
from round_world import RUN, World

from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import RunSpec, Training, new_member
from torchbft.protocols.round import events as ev
from torchbft.protocols.round import interface as io
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.accusations import accusations, conviction, who_signed
from torchbft.protocols.round.admissible import admissible, check_equivocation
from torchbft.protocols.round.messages import Status
from torchbft.protocols.round.outcomes import check_bad_opening, check_malformed, holders
from torchbft.protocols.round.roots import RootVotes
from torchbft.protocols.round.sightings import MAX_HEARD, Sightings
from torchbft.protocols.round.state import Accepted, GenesisConfig, Member
from torchbft.protocols.round.waiting import LONGEST_STREAK, after_round, reconsidered, waited_for

# --- evidence ------------------------------------------------------------------------------------


def settled(**worse: object) -> World:
    """A round in which peer-3 did something wrong, seven members."""
    world = World(7).start()
    world.block(*(world.commit(name, 0) for name in world.names))
    openings = [world.open(name, 0) for name in world.names]
    if worse.get("opening"):
        openings[3] = world.open("peer-3", 0, b"other")
    world.block(*openings)
    but = {"peer-3": Status.MALFORMED} if worse.get("payload") else {}
    world.block(*(world.attest(name, 0, but) for name in world.names[:5]))
    return world


def evidence_of(world: World, name: str) -> Evidence:
    outcomes = world.told(ev.RoundFixed)[-1].outcomes
    found = next(o.evidence for o in outcomes if o.peer == name)
    assert found is not None
    return found


def test_a_bad_opening_convinces_whoever_has_the_key_and_nobody_else() -> None:
    world = settled(opening=True)
    evidence = evidence_of(world, "peer-3")
    public = world.keys["peer-3"].public
    assert check_bad_opening(evidence, public)
    assert not check_bad_opening(evidence, world.keys["peer-2"].public)
    assert not check_bad_opening(replace(evidence, accused="peer-2"), public)
    assert not check_bad_opening(replace(evidence, round=1), public)
    honest = (world.commit("peer-3", 0), world.open("peer-3", 0))
    assert not check_bad_opening(replace(evidence, statements=honest), public)
    assert not check_bad_opening(replace(evidence, statements=evidence.statements[::-1]), public)
    other_round = (world.commit("peer-3", 1), evidence.statements[1])
    assert not check_bad_opening(replace(evidence, statements=other_round), public)


def test_a_malformed_payload_needs_f_plus_1_observers_that_sign() -> None:
    world = settled(payload=True)
    evidence = evidence_of(world, "peer-3")
    seats = world.state.previous.seats
    assert len(evidence.statements) == 5
    assert check_malformed(evidence, seats, 2)
    few = replace(evidence, statements=evidence.statements[:2])
    assert not check_malformed(few, seats, 2)
    repeated = replace(evidence, statements=evidence.statements[:1] * 5)
    assert not check_malformed(repeated, seats, 2), "one observer five times"
    assert not check_malformed(replace(evidence, accused="peer-2"), seats, 2)
    assert not check_malformed(replace(evidence, accused="nobody"), seats, 2)
    assert not check_malformed(replace(evidence, round=1), seats, 2)
    forged = tuple(world.sign(m.parse(tx).statement, by="peer-6") for tx in evidence.statements)
    assert not check_malformed(replace(evidence, statements=forged), seats, 2)


@pytest.mark.parametrize("kind", ["commit", "open", "attest"])
def test_equivocation_convinces_only_with_two_of_one_slot(kind: str) -> None:
    world = World(4).start()
    pair = {
        "commit": (world.commit("peer-1", 0), world.commit("peer-1", 0, b"2")),
        "open": (world.open("peer-1", 0), world.open("peer-1", 0, b"2")),
        "attest": (world.attest("peer-1", 0), world.attest("peer-1", 0, {"peer-2": 2})),
    }[kind]
    public = world.keys["peer-1"].public
    evidence = Evidence(Fault.EQUIVOCATION, "peer-1", 0, pair)
    assert check_equivocation(evidence, public)
    assert not check_equivocation(replace(evidence, statements=pair[:1] * 2), public)
    mixed = (pair[0], world.commit("peer-1", 1))
    assert not check_equivocation(replace(evidence, statements=mixed), public)
    assert not check_equivocation(evidence, world.keys["peer-2"].public)


def test_two_closings_are_no_evidence() -> None:
    world = World(4).start()
    pair = (world.closing("peer-1", 0, "open", ()), world.closing("peer-1", 0, "open", ("peer-1",)))
    evidence = Evidence(Fault.EQUIVOCATION, "peer-1", 0, pair)
    assert not check_equivocation(evidence, world.keys["peer-1"].public)


def test_holders_are_those_who_attest_and_the_author() -> None:
    world = settled(payload=True)
    fixed = world.state.previous
    assert holders(fixed, "peer-1") == world.names[:5]
    assert holders(fixed, "peer-6") == (*world.names[:5], "peer-6")
    assert holders(fixed, "peer-3") == ("peer-3",)


def test_accusations_name_with_evidence_and_suspect_without() -> None:
    world = World(4).start()
    world.play_round(0, world.names[:3])
    absent = accusations(world.told(ev.RoundFixed)[0])
    assert [(a.peer, a.fault, a.named) for a in absent] == [("peer-3", Fault.ABSENT, False)]
    bad = accusations(settled(opening=True).told(ev.RoundFixed)[0])
    assert [(a.peer, a.fault, a.named) for a in bad] == [("peer-3", Fault.BAD_OPENING, True)]
    malformed = accusations(settled(payload=True).told(ev.RoundFixed)[0])
    assert [(a.fault, a.named) for a in malformed] == [(Fault.MALFORMED_PAYLOAD, True)]
    pair = (world.commit("peer-1", 0), world.commit("peer-1", 0, b"2"))
    told = conviction(ev.Convicted("peer-1", Evidence(Fault.EQUIVOCATION, "peer-1", 0, pair)))
    assert (told.peer, told.named, told.fault) == ("peer-1", True, Fault.EQUIVOCATION)


def test_a_fixed_rounds_f_is_what_liars_may_still_be_among_the_accepted() -> None:
    world = settled(opening=True)
    assert world.state.previous.f == 1
    assert settled().state.previous.f == 2
    assert settled(payload=True).state.previous.f == 2, "observations are not transferable"


# --- root votes ----------------------------------------------------------------------------------


def votes_for(world: World, said: dict[str, bytes]) -> RootVotes:
    votes = RootVotes(world.state.unsigned)
    for name, root in said.items():
        assert votes.add(m.parse(world.root_vote(name, 0, root))) is None
    return votes


def fixed_round(n: int = 4) -> World:
    world = World(n).start()
    world.play_round(0)
    return world


def test_a_quorum_of_equal_votes_makes_a_certificate_that_the_ledger_takes() -> None:
    world = fixed_round(7)
    said = dict.fromkeys(world.names[:4], b"A" * 32) | {"peer-6": b"B" * 32}
    votes = votes_for(world, said)
    assert votes.agreed() is None
    assert votes.possible()
    votes.add(m.parse(world.root_vote("peer-5", 0, b"A" * 32)))
    assert votes.agreed() == b"A" * 32
    certificate = votes.certificate(PeerId("peer-0"), RUN, b"A" * 32)
    assert admissible(world.sign(certificate), world.state) is None
    assert len(certificate.signatures) == 5 * 64, "a quorum and no more"
    assert votes.missing() == ("peer-4",)


def test_the_first_vote_of_a_validator_counts_and_repeats_do_not_add_up() -> None:
    world = fixed_round()
    votes = votes_for(world, {"peer-0": b"A" * 32})
    for root in (b"A" * 32, b"B" * 32):
        for _ in range(3):
            votes.add(m.parse(world.root_vote("peer-0", 0, root)))
    assert votes.by_root() == {b"A" * 32: ("peer-0",)}


def test_votes_of_other_rounds_and_strangers_do_not_count() -> None:
    world = fixed_round()
    votes = votes_for(world, {})
    votes.add(m.parse(world.root_vote("peer-0", 1)))
    assert votes.add(m.parse(world.commit("peer-0", 0))) == "not a validator's root vote"
    stranger = m.RootVote(*world.head("stranger", 0), b"A" * 32)
    assert votes.add(m.parse(world.sign(stranger, by="peer-0"))) == "not a validator's root vote"
    false = m.RootVote(*world.head("peer-1", 0), b"A" * 32)
    reason = votes.add(m.parse(world.sign(false, by="peer-0")))
    assert reason == "a root vote with a false signature"
    assert votes.by_root() == {}


def test_it_is_known_when_no_root_can_reach_a_quorum_any_more() -> None:
    world = fixed_round()
    votes = votes_for(world, {"peer-0": b"A" * 32, "peer-1": b"B" * 32})
    assert votes.possible(), "one of the four lies, perhaps"
    votes = votes_for(world, {"peer-0": b"A" * 32, "peer-1": b"B" * 32, "peer-2": b"C" * 32})
    assert not votes.possible()
    assert who_signed(votes) == (
        "no quorum of equal roots in round 0: 414141414141 by peer-0; 424242424242 by peer-1; "
        "434343434343 by peer-2; nothing by peer-3"
    )


# --- sightings -----------------------------------------------------------------------------------


def test_sightings_keep_the_first_time_and_forget_old_rounds() -> None:
    seen = Sightings()
    seen.note(3, "commit", "a", 5.0)
    seen.note(3, "commit", "a", 9.0)
    seen.note(3, "commit", "b", 7.0)
    seen.note(3, "open", "a", 8.0)
    assert sorted(seen.arrivals(3, "commit", 6.0)) == [0.0, 1.0]
    assert seen.silent(3, "commit", {"a", "b", "c"}) == ["c"]
    assert seen.when(3, "commit", "a") == 5.0
    seen.forget(4)
    assert seen.arrivals(3, "commit", 0.0) == []


def test_sightings_hold_two_items_of_a_slot() -> None:
    world, seen = World(4).start(), Sightings()
    for tag in (b"1", b"1", b"2", b"3"):
        tx = world.commit("peer-0", 0, tag)
        seen.note_item(m.parse(tx), tx, 0.0)
    assert len(seen.items(0, "commit", "peer-0")) == 2
    assert MAX_HEARD >= 64 * 2 * 7 * 2


def test_a_payload_is_held_malformed_or_missing() -> None:
    seen = Sightings()
    good, bad, gone = (Accepted(n, n.encode() * 32, 1, b"t" * 32) for n in "gbx")
    seen.note_payload(io.PayloadStored(0, PeerId("g"), b"g" * 32), 0.0)
    seen.note_payload(io.PayloadRefused(0, PeerId("b"), b"b" * 32, "nan"), 0.0)
    seen.note_payload(io.PayloadStored(0, PeerId("x"), b"another root".ljust(32)), 0.0)
    assert [seen.status(0, item) for item in (good, bad, gone, None)] == [
        Status.HELD,
        Status.MALFORMED,
        Status.MISSING,
        Status.NONE,
    ]
    assert seen.status(1, good) == Status.MISSING


# --- whom to wait for ----------------------------------------------------------------------------


def members(**absent: int) -> tuple[Member, ...]:
    return tuple(
        Member(name, b"i" * 32, b"v" * 32, 1, True, True, absent=count)
        for name, count in sorted(absent.items())
    )


def test_round_09_the_longest_absent_are_parked_first_and_ties_go_by_id() -> None:
    found = reconsidered(members(a=2, b=5, c=2, d=1, e=0), None, 2)
    assert [m_.name for m_ in found if m_.parked] == ["a", "b"]
    assert waited_for(found) == ("c", "d", "e")
    assert [m_.name for m_ in reconsidered(members(a=2, b=2), None, 0) if m_.parked] == []


def test_round_09_a_place_is_free_again_only_when_somebody_is_waited_for_again() -> None:
    first = reconsidered(members(a=2, b=2, c=2), None, 1)
    again = reconsidered(first, None, 1)
    assert [m_.name for m_ in again if m_.parked] == ["a"]
    assert again[0].spells == 1


def test_round_09_streaks_are_bounded() -> None:
    tired = replace(members(a=9)[0], parked=True, spells=30, streak=LONGEST_STREAK - 1)
    world = World(4, rounds=3).start()
    world.play_round(0)
    ended = world.state.previous
    member = replace(tired, name="peer-0")
    assert not reconsidered((member,), ended, 1)[0].parked


def test_credit_and_absence_after_a_round() -> None:
    found = after_round(members(a=1, b=1), frozenset({"a"}))
    assert [(m_.absent, m_.credit) for m_ in found] == [(0, 1), (2, 0)]


# --- bit maps, genesis ---------------------------------------------------------------------------


@pytest.mark.parametrize("seats", [1, 7, 8, 9, 64])
def test_seat_maps_have_one_form(seats: int) -> None:
    for chosen in (set(), {0}, {seats - 1}, set(range(seats))):
        bits = m.seat_map(chosen, seats)
        assert m.seats_in(bits, seats) == tuple(sorted(chosen))
        assert m.seats_in(bits + b"\0", seats) is None
    assert m.seats_in(b"", seats) is None
    if seats % 8:
        assert m.seats_in(b"\xff" * ((seats + 7) // 8), seats) is None


def test_the_genesis_of_a_run_file() -> None:
    world = World(4)
    run = RunSpec(
        name="digits",
        seed="0a" * 32,
        members=tuple(
            new_member(name, world.identities[name], world.keys[name]) for name in world.names
        ),
        training=Training(inner_steps=5, accumulate=2, batch_size=16, rounds=9),
    )
    run = replace(run, data=replace(run.data, samples=1000))
    genesis = GenesisConfig.from_run(run)
    assert genesis.fault() is None
    assert (genesis.f, genesis.m_min, genesis.samples_per_slice, genesis.rounds) == (1, 3, 160, 9)
    assert genesis.run_id == run.run_id
    private = replace(run, data=replace(run.data, mode="private", samples=0))
    assert not GenesisConfig.from_run(private).assigned
    assert GenesisConfig.from_run(private).fault() is None


def test_a_private_run_assigns_nothing() -> None:
    world = World(4, assigned=False, samples=0, samples_per_slice=0).start()
    assert world.state.current.shares == ()
    world.play_round(0)
    assert world.state.current.shares == () == world.state.requeue


def test_secrets_differ_by_purpose_round_run_and_seed() -> None:
    made = {
        m.secret_for(seed, purpose, run, number)
        for seed in (b"1" * 32, b"2" * 32)
        for purpose in ("salt", "beacon", "audit")
        for run in (RUN, b"q" * 32)
        for number in (0, 1)
    }
    assert len(made) == 24
