"""Round machines among honest and lying peers, on virtual time: what must hold whoever lies."""

import itertools

import pytest
from round_liars import (
    ALL,
    Absent,
    BadOpener,
    Equivocator,
    Flickerer,
    Liar,
    Malformed,
    PayloadWithholder,
    Replayer,
    Silent,
    Straggler,
    Withholder,
    WrongRoot,
)
from round_swarm import TIMING, Peer, Swarm
from round_world import World

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Broadcast, Persist, Received, Tick
from torchbft.primitives.evidence import Evidence, Fault, Outcome
from torchbft.primitives.ids import PeerId
from torchbft.protocols.round import events as ev
from torchbft.protocols.round import interface as io
from torchbft.protocols.round import machine as machines
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.machine import RoundConfig, RoundMachine

LEAVE_EVIDENCE = {Equivocator, BadOpener, Malformed, Replayer}
"""Replayers sign others' commitments under their own name, beside their own."""


def last(swarm: Swarm, liar: type[Peer], n: int, f: int) -> Swarm:
    liars = {n - 1 - i: liar for i in range(f)}
    return Swarm(n, rounds=swarm if isinstance(swarm, int) else 4, seed=n, liars=liars)


def among(liar: type[Peer], n: int, f: int, rounds: int = 4, **genesis: object) -> Swarm:
    return Swarm(n, rounds=rounds, seed=n, liars={n - 1 - i: liar for i in range(f)}, **genesis)


def names(swarm: Swarm) -> set[str]:
    return {peer.name for peer in swarm.peers if not peer.honest}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 7])
def test_all_honest_three_blocks_a_round(n: int) -> None:
    swarm = Swarm(n, rounds=4, seed=n).start().play().check().honest_never_lost()
    assert sorted(swarm.fixed) == [0, 1, 2, 3]
    assert not swarm.accused(named=False)
    ready_rounds_and_last_root = 1 + 3 * 4 + 1
    assert len(swarm.chain) <= ready_rounds_and_last_root + 1


@pytest.mark.parametrize("liar", ALL)
def test_one_of_four_lies(liar: type[Liar]) -> None:
    swarm = among(liar, 4, 1).start().play().check().honest_never_lost()
    assert not swarm.void
    assert swarm.accused(named=True) == (names(swarm) if liar in LEAVE_EVIDENCE else set())
    assert swarm.accused(named=False) <= names(swarm)


@pytest.mark.parametrize(
    "liars",
    [
        (Withholder, Equivocator),
        (PayloadWithholder, Silent),
        (BadOpener, WrongRoot),
        (Straggler, Flickerer),
    ],
)
def test_two_of_seven_lie(liars: tuple[type[Liar], ...]) -> None:
    swarm = Swarm(7, rounds=3, seed=1, liars={2: liars[0], 5: liars[1]})
    swarm.start().play().check().honest_never_lost()
    assert not swarm.void
    assert swarm.accused(named=True) | swarm.accused(named=False) <= names(swarm)


@pytest.mark.parametrize(
    ("liar", "outcome", "reason"),
    [
        (Absent, Outcome.ABSENT, "no-commitment"),
        (Withholder, Outcome.UNOPENED, "no-opening"),
        (Straggler, Outcome.ABSENT, "no-commitment"),
        (PayloadWithholder, Outcome.MISSING, "payload-not-held"),
        (BadOpener, Outcome.MALFORMED, "bad-opening"),
        (Malformed, Outcome.MALFORMED, "payload"),
        (Equivocator, Outcome.EQUIVOCATED, "two-commitments"),
    ],
)
def test_each_contribution_ends_with_an_outcome_and_a_reason(liar, outcome, reason) -> None:
    swarm = among(liar, 4, 1, rounds=2).start().play()
    told = swarm.outcomes[0]["peer-3"]
    assert (told.outcome, told.reason) == (outcome, reason)
    assert all(swarm.outcomes[0][p.name].outcome == Outcome.ACCEPTED for p in swarm.honest)


def test_a_late_commitment_is_told_from_an_absent_one() -> None:
    class Late(Liar):
        train_seconds = 0.62

    swarm = among(Late, 4, 1, rounds=3, samples=0, assigned=False).start().play().check()
    told = {swarm.outcomes[number]["peer-3"].outcome for number in range(1, 3)}
    assert told <= {Outcome.LATE, Outcome.ABSENT, Outcome.ACCEPTED}
    assert Outcome.ACCEPTED not in {swarm.outcomes[0]["peer-3"].outcome} | told


def test_c18_a_dead_member_costs_time_outs_for_two_rounds_and_then_none() -> None:
    swarm = among(Absent, 4, 1, rounds=7).start().play().check()
    fixed_at = round_times(swarm)
    lasted = [b - a for a, b in itertools.pairwise(fixed_at)]
    assert lasted[0] > TIMING.commit_floor
    assert max(lasted[2:]) < TIMING.commit_floor


def round_times(swarm: Swarm) -> list[float]:
    """When the first honest peer knew each agreed root."""
    return [swarm.honest[0].agreed_at[number] for number in sorted(swarm.honest[0].agreed_at)]


# --- waiting --------------------------------------------------------------------------------------


def test_c11_who_is_waited_for_is_said_within_five_seconds() -> None:
    swarm = Swarm(4, rounds=2).start(but=(0, 1, 2))
    swarm.run(lambda: any(isinstance(e, io.Waiting) for e in swarm.peers[3].effects), limit=5.0)
    said = next(e for e in swarm.peers[3].effects if isinstance(e, io.Waiting))
    assert (said.phase, said.for_whom) == ("ready", ("peer-0", "peer-1", "peer-2"))


@pytest.mark.parametrize(
    ("missing", "phase"), [("commit", "commit"), ("open", "open"), ("attest", "attest")]
)
def test_c13_every_phase_names_whom_it_waits_for(missing: str, phase: str) -> None:
    class Mute(Liar):
        def submit(self, tx: bytes) -> None:
            if m.kind_of(m.parse(tx).statement) not in (missing, "close"):
                super().submit(tx)

    swarm = Swarm(4, rounds=2, liars={2: Mute, 3: Mute}).start()

    def waits() -> list[io.Waiting]:
        return [e for e in swarm.peers[0].effects if isinstance(e, io.Waiting)]

    swarm.run(lambda: bool(waits()), limit=20.0)
    assert (waits()[0].phase, waits()[0].for_whom) == (phase, ("peer-2", "peer-3"))


def test_c13_after_its_own_closing_a_peer_names_those_whose_closings_are_missing() -> None:
    class Mute(Liar):
        def submit(self, tx: bytes) -> None:
            if m.kind_of(m.parse(tx).statement) != "close":
                super().submit(tx)

    class Absentee(Mute):
        def train(self, effect: io.StartTraining) -> None:
            pass

    swarm = Swarm(4, rounds=2, liars={2: Mute, 3: Absentee}).start()

    def waits() -> list[tuple[str, tuple[str, ...]]]:
        found = [e for e in swarm.peers[0].effects if isinstance(e, io.Waiting)]
        return [(e.phase, e.for_whom) for e in found]

    swarm.run(lambda: bool(waits()), limit=60.0)
    assert waits()[0] == ("commit", ("peer-2", "peer-3"))


def lone_machine(n: int = 4, guard: bool = True) -> tuple[World, Application, RoundMachine]:
    """The machine of peer-0 on a ledger that the test drives. Without ``guard`` the test may sign
    for peer-0."""
    world = World(n)
    application = Application(world.genesis)
    machine = RoundMachine(
        RoundConfig(PeerId("peer-0"), TIMING, guard_log=guard),
        world.keys["peer-0"],
        b"s" * 32,
        application,
    )
    return world, application, machine


def feed(world: World, application: Application, machine: RoundMachine, now: float, *txs: bytes):
    height = application.info().last_height + 1
    result = application.finalize_block(height, txs)
    application.commit()
    world.state = application.state
    return machine.handle(io.LedgerAdvanced(height, result.events), now)


def of(effects: list, kind: type) -> list:
    return [effect for effect in effects if isinstance(effect, kind)]


def statements(effects: list, kind: type) -> list:
    said = [m.parse(effect.tx).statement for effect in of(effects, io.Submit)]
    return [statement for statement in said if isinstance(statement, kind)]


def test_c16_a_deadline_fires_without_any_message() -> None:
    world, application, machine = lone_machine()
    machine.start(0.0)
    machine.handle(io.StateAdvanced(io.GENESIS_ROUND, b"0" * 32), 0.0)
    effects = feed(world, application, machine, 1.0, *(world.ready(n) for n in world.names[1:]))
    assert [e.from_root for e in of(effects, io.StartTraining)] == [b"0" * 32]
    closings = []
    for _ in range(50):
        at = machine.deadline()
        assert at is not None
        closings += statements(machine.handle(Tick(), at), m.Closing)
        if closings:
            break
    assert closings[0].window == "commit"
    assert at == 1.0 + TIMING.first_round


def test_round_06_a_closing_lists_what_is_held_and_its_sender_passes_it_on() -> None:
    world, application, machine = lone_machine()
    machine.start(0.0)
    feed(world, application, machine, 0.0, *(world.ready(n) for n in world.names))
    feed(world, application, machine, 0.1, world.commit("peer-1", 0))
    machine.handle(io.Heard(world.commit("peer-2", 0)), 0.2)
    effects = machine.handle(Tick(), 0.0 + TIMING.first_round)
    closing = statements(effects, m.Closing)[0]
    assert m.seats_in(closing.authors, 4) == (1, 2)
    submitted = [effect.tx for effect in of(effects, io.Submit)]
    assert world.commit("peer-2", 0) in submitted
    assert world.commit("peer-1", 0) not in submitted, "it is final already"
    records = [effect.record for effect in of(effects, Persist)]
    assert world.commit("peer-2", 0) in records, "a crash must not make the closing a lie"
    assert effects.index(of(effects, Persist)[-1]) < effects.index(of(effects, io.Submit)[0])


def test_round_10_attests_at_the_time_out_counted_from_the_final_close() -> None:
    world, application, machine = lone_machine(guard=False)
    machine.start(0.0)
    feed(world, application, machine, 0.0, *(world.ready(n) for n in world.names))
    feed(world, application, machine, 1.0, *(world.commit(n, 0) for n in world.names))
    effects = feed(world, application, machine, 2.0, *(world.open(n, 0) for n in world.names))
    assert {e.author for e in of(effects, io.FetchPayload)} == set(world.names)
    opened = {item.author: item.payload_root for item in application.state.current.opened}
    machine.handle(io.PayloadStored(0, PeerId("peer-1"), opened["peer-1"]), 2.1)
    machine.handle(io.PayloadRefused(0, PeerId("peer-2"), opened["peer-2"], "nan"), 2.1)
    assert statements(machine.handle(Tick(), 2.9), m.Attestation) == []
    said = statements(machine.handle(Tick(), 2.0 + 4 * TIMING.attest_floor + 0.1), m.Attestation)
    S = m.Status
    assert said[0].statuses == bytes([S.MISSING, S.HELD, S.MALFORMED, S.MISSING])


def test_round_08_nothing_is_opened_before_the_close_of_commitments_is_final() -> None:
    world, application, machine = lone_machine()
    machine.start(0.0)
    machine.handle(io.StateAdvanced(io.GENESIS_ROUND, b"0" * 32), 0.0)
    feed(world, application, machine, 0.0, *(world.ready(n) for n in world.names))
    effects = machine.handle(io.Trained(0, 10, b"p" * 32, b"t" * 32), 0.5)
    commit = statements(effects, m.Commitment)
    assert len(commit) == 1
    assert statements(effects, m.Opening) == []
    assert len(of(effects, Persist)) == 2, "the opening is durable with the commitment"
    mine = of(effects, io.Submit)[0].tx
    effects = feed(
        world, application, machine, 1.0, mine, *(world.commit(n, 0) for n in world.names[1:])
    )
    opening = statements(effects, m.Opening)[0]
    assert m.commitment_digest(opening) == commit[0].digest
    assert of(effects, io.OfferPayload) == [io.OfferPayload(0, b"p" * 32, 10)]


def test_what_is_not_final_is_sent_again_as_the_same_bytes_and_then_no_more() -> None:
    world, application, machine = lone_machine()
    first = of(machine.start(0.0), io.Submit)
    again = of(machine.handle(Tick(), machines.RESEND_SECONDS), io.Submit)
    assert first == again
    feed(world, application, machine, 2.0, *(world.ready(n) for n in world.names))
    for at in (3.0, 4.0, 5.0):
        assert of(machine.handle(Tick(), at), io.Submit) == []


# --- roots ----------------------------------------------------------------------------------------


class Miscomputes(Peer):
    """Honest, on a machine that gets one sum wrong in round 1."""

    wrong = (1,)

    def advance(self, effect: io.Advance) -> None:
        if effect.round in self.wrong:
            root = sha256("test/cosmic ray", self.name.encode())
            self.disk.states[effect.round], self.disk.at = root, effect.round
            self.tell_state()
        else:
            super().advance(effect)


def test_round_14_a_diverged_peer_knows_it_and_resynchronises() -> None:
    swarm = Swarm(4, rounds=4, liars={1: Miscomputes}).start().play().check().honest_never_lost()
    diverged = [e for e in swarm.peers[1].effects if isinstance(e, io.Diverged)]
    assert [e.round for e in diverged] == [1]
    assert diverged[0].signed_root == swarm.peers[0].roots[1]
    assert not any(isinstance(e, io.Diverged) for p in (0, 2, 3) for e in swarm.peers[p].effects)


def test_round_14_without_equal_roots_the_run_halts_and_says_who_signed_what() -> None:
    swarm = Swarm(4, rounds=4, liars={1: Miscomputes, 2: Miscomputes}).start()
    swarm.run(lambda: all(peer.halted for peer in swarm.peers), limit=60.0)
    said = swarm.peers[0].halted
    assert said.startswith("no quorum of equal roots in round 1: ")
    assert "peer-0, peer-3" in said
    assert said.count(" by ") == 3
    assert 1 not in {number for peer in swarm.peers for number in peer.agreed_at}


def test_round_14_a_quorum_may_void_the_round_instead() -> None:
    class Undecided(Miscomputes):
        def broadcast(self, message: bytes) -> None:
            if m.parse(message).statement.round != 1:
                super().broadcast(message)

    swarm = Swarm(4, rounds=4, liars=dict.fromkeys(range(4), Undecided)).start()
    swarm.run(lambda: 1 in swarm.fixed)
    for peer in swarm.peers:
        swarm.at(0.5, lambda peer=peer: peer.tell(io.PreferVoid(1, "no equal roots")))
    swarm.play()
    assert sorted(swarm.void) == [1, 2]
    assert {p.disk.states[3] for p in swarm.peers} == {swarm.peers[0].roots[3]}


def test_round_13_two_roots_of_one_round_are_never_signed() -> None:
    world, application, machine = lone_machine()
    machine.start(0.0)
    machine.handle(io.StateAdvanced(io.GENESIS_ROUND, b"0" * 32), 0.0)
    for at, txs in enumerate(
        (
            [world.ready(n) for n in world.names],
            [world.commit(n, 0) for n in world.names[1:]]
            + [world.closing(n, 0, "commit", world.names[1:]) for n in world.names[1:]],
            [world.open(n, 0) for n in world.names[1:]],
            [world.attest(n, 0) for n in world.names[1:]],
        )
    ):
        feed(world, application, machine, float(at), *txs)
    assert application.state.unsigned is not None
    first = machine.handle(io.StateAdvanced(0, b"A" * 32), 4.0)
    votes = [m.parse(e.message).statement for e in of(first, Broadcast)]
    assert [vote.root for vote in votes] == [b"A" * 32]
    second = machine.handle(io.StateAdvanced(0, b"B" * 32), 8.0)
    votes = [m.parse(e.message).statement for e in of(second, Broadcast)]
    assert [vote.root for vote in votes] == [b"A" * 32], "repeated, not replaced"


def test_a_root_vote_with_a_false_signature_does_not_count_and_is_told() -> None:
    swarm = Swarm(4, rounds=3)
    swarm.start().run(lambda: swarm.reference.state.unsigned is not None)
    target = swarm.peers[0]
    swarm.run(lambda: target.application.state.unsigned is not None)
    number = target.application.state.unsigned.number
    forged = m.sign(
        m.RootVote(*swarm.world.head("peer-1", number), b"F" * 32), swarm.world.keys["peer-2"]
    )
    effects = target.machine.handle(Received(PeerId("peer-1"), forged), swarm.now)
    accused = of(effects, io.Accuse)
    assert [(a.peer, a.fault, a.named) for a in accused] in (
        [("peer-1", Fault.BAD_SIGNATURE, False)],
        [],
    )
    swarm.play().check()


def test_a_certificate_still_comes_when_the_validator_in_turn_is_gone() -> None:
    class NoCertificates(Liar):
        def submit(self, tx: bytes) -> None:
            if m.kind_of(m.parse(tx).statement) != "rooted":
                super().submit(tx)

    swarm = among(NoCertificates, 4, 1, rounds=5).start().play().check().honest_never_lost()
    assert {e.round for e in swarm.told(ev.RootSigned)} == set(range(5))


# --- beyond f -------------------------------------------------------------------------------------


class HonestlyClosing(Withholder):
    """Commits, never opens, but tells truly that it holds no opening of its own."""

    def submit(self, tx: bytes) -> None:
        if self.kind(tx) == "close" and m.parse(tx).statement.window == "open":
            index = self.swarm.world.names.index(self.name)
            held = int.from_bytes(m.parse(tx).statement.authors, "little") & ~(0b1110000)
            assert index >= 4
            tx = self.again(tx, authors=bytes([held]))
        super().submit(tx)


def test_beyond_f_withholders_whose_closings_claim_what_they_withhold_stop_the_run() -> None:
    swarm = among(Withholder, 7, 3, rounds=20).start()
    swarm.run(lambda: all(p.halted for p in swarm.honest), limit=60.0)
    assert not swarm.fixed
    assert swarm.honest[0].halted == (
        "no quorum of closings of the open window in round 0: "
        "what peer-4, peer-5, peer-6 list is not on the ledger"
    )


def test_beyond_f_silent_validators_stop_the_run() -> None:
    class NoAttestations(Liar):
        def submit(self, tx: bytes) -> None:
            if self.kind(tx) != "attest":
                super().submit(tx)

    swarm = among(NoAttestations, 4, 2).start()
    swarm.run(lambda: all(p.halted for p in swarm.honest), limit=2 * machines.SILENCE)
    assert swarm.now > machines.SILENCE, "a network partition might have healed until then"
    expected = "no quorum of attestations in round 0: nothing by peer-2, peer-3"
    assert swarm.honest[0].halted == expected


def test_beyond_f_withholders_void_every_round_and_the_run_halts_with_a_reason() -> None:
    swarm = among(HonestlyClosing, 7, 3, rounds=20).start()
    swarm.run(lambda: all(p.halted for p in swarm.honest), limit=3600.0)
    assert not swarm.fixed
    assert len(swarm.void) == machines.MAX_VOID_STREAK
    assert "rounds in a row are void" in swarm.honest[0].halted
    assert "4 openings where 5 are needed" in swarm.honest[0].halted


def test_beyond_f_convicts_the_run_halts_and_names_them() -> None:
    swarm = among(Equivocator, 7, 3, rounds=5).start()
    swarm.run(lambda: all(p.halted for p in swarm.honest), limit=600.0)
    assert swarm.accused(named=True) == names(swarm)
    for peer in swarm.honest:
        assert "peer-4, peer-5, peer-6 of 7 members in round 0 are convicted" in peer.halted
        assert "more than f = 2" in peer.halted


def test_as_many_convicts_as_f_leave_and_the_rest_go_on_in_the_next_epoch() -> None:
    swarm = among(Equivocator, 7, 2, rounds=5).start()
    swarm.run(lambda: all(p.finished for p in swarm.honest), limit=600.0)
    assert swarm.accused(named=True) == names(swarm)
    state = swarm.honest[0].application.state
    assert len(state.current.seats) == 5
    assert (state.epoch, state.current.f, state.current.m_min) == (1, 1, 4)
    assert swarm.fixed


# --- recovery -------------------------------------------------------------------------------------


class SlowSpell(Peer):
    """Honest, but slower than any time-out in rounds 2 and 3."""

    def train(self, effect: io.StartTraining) -> None:
        self.train_seconds = 4.0 if effect.round in (2, 3) else 0.1
        super().train(effect)


@pytest.mark.parametrize("m_min", [1, 3])
def test_the_run_recovers_by_itself_after_all_honest_peers_missed_two_rounds(m_min: int) -> None:
    liars: dict[int, type[Peer]] = {0: SlowSpell, 1: SlowSpell, 2: SlowSpell, 3: Liar}
    swarm = Swarm(4, rounds=8, seed=3, liars=liars, m_min=m_min).start().play().check()
    missed = set(swarm.void) if m_min == 3 else {r for r in swarm.fixed if len(swarm.fixed[r]) == 1}
    assert missed == {2, 3}
    for number in range(4, 8):
        assert swarm.fixed[number] == swarm.world.names
    assert swarm.reference.state.current.waited == swarm.world.names


def test_a_peer_that_starts_late_takes_the_signed_state_and_contributes_from_the_next_round() -> (
    None
):
    swarm = Swarm(4, rounds=14).start(but=(2,))
    swarm.run(lambda: 3 in swarm.fixed)
    swarm.at(0.0, swarm.peers[2].start)
    swarm.play().check()
    caught = [e for e in swarm.peers[2].effects if isinstance(e, io.CatchUp)]
    assert caught
    assert "peer-2" in swarm.fixed[max(swarm.fixed)]
    assert swarm.peers[2].roots[13] == swarm.peers[0].roots[13]


class SlowPayload(Peer):
    """Its payload is out only when most of the time-out has passed."""

    def __init__(self, swarm: Swarm, name: str) -> None:
        super().__init__(swarm, name)
        self.out: set[bytes] = set()

    def offer(self, effect: io.OfferPayload) -> None:
        def late() -> None:
            self.out.add(effect.payload_root)
            Peer.offer(self, effect)

        self.after(0.6 * TIMING.attest_floor, late)

    def serves(self, peer: Peer, root: bytes) -> bool:
        return root in self.out


def test_a_parked_member_without_whom_a_round_would_be_void_is_waited_for() -> None:
    """Three of four are needed; the one that comes back takes the place of one that goes."""
    swarm = Swarm(4, rounds=12, liars={2: SlowPayload}).start(but=(2,))
    swarm.run(lambda: 3 in swarm.fixed)
    assert "peer-2" not in swarm.reference.state.current.waited
    swarm.at(0.0, swarm.peers[2].start)
    swarm.at(0.0, swarm.peers[3].crash)
    swarm.run(lambda: all(peer.finished for peer in swarm.peers[:3])).check()
    together = [r for r, authors in swarm.fixed.items() if "peer-2" in authors]
    assert len(together) >= 6
    assert len(swarm.void) <= 1, swarm.void


def test_secrets_open_in_their_time_and_derive_the_same_for_everybody() -> None:
    swarm = Swarm(4, rounds=4).start().play().check()
    openings, commits = {}, {}
    for txs in swarm.chain:
        for tx in txs:
            said = m.parse(tx).statement
            if isinstance(said, m.Opening):
                openings[said.author, said.round] = said
            if isinstance(said, m.Commitment):
                commits[said.author, said.round] = said
    for (author, number), said in openings.items():
        if number == 0:
            assert said.beacon_secret == said.audit_hash == b""
            continue
        share = m.share_commit(m.beacon_hash(said.beacon_secret), said.audit_hash)
        assert share == openings[author, number - 1].share_commit
    for (author, number), said in commits.items():
        if number < 2:
            assert said.audit_secret == b""
        else:
            assert m.audit_hash(said.audit_secret) == openings[author, number - 1].audit_hash
    assert swarm.peers[0].machine._secret.hex() not in repr(swarm.peers[0].machine)


# --- evidence from the ledger's own votes ---------------------------------------------------------


def test_every_double_voter_found_is_reported_until_it_is_convicted() -> None:
    """One author reports several liars in one round; after a restart it reports them still."""
    world = World(7)
    checks = {Fault.DOUBLE_VOTE: lambda evidence, public: evidence.statements == (b"a", b"b")}
    application = Application(world.genesis, checks)
    key, secret = world.keys["peer-0"], b"s" * 32
    config = RoundConfig(PeerId("peer-0"), TIMING)
    machine = RoundMachine(config, key, secret, application)
    machine.start(0.0)
    feed(world, application, machine, 0.0, *(world.ready(n) for n in world.names[1:]))

    def found(liar: str, *said: bytes) -> list:
        return machine.handle(io.Found(Evidence(Fault.DOUBLE_VOTE, liar, 0, said)), 1.0)

    effects = [*found("peer-5", b"a", b"b"), *found("peer-6", b"a", b"b")]
    assert found("peer-4", b"a", b"a") == [], "it would convince nobody"
    txs = [effect.tx for effect in of(effects, io.Submit)]
    accused = [m.parse(tx).statement.evidence.accused for tx in txs]
    assert accused == ["peer-5", "peer-6"]
    records = tuple(effect.record for effect in of(effects, Persist))
    restarted = RoundMachine(config, key, secret, application, (world.ready("peer-0"), *records))
    assert set(txs) <= {effect.tx for effect in of(restarted.start(2.0), io.Submit)}
    told = feed(world, application, machine, 3.0, *txs)
    assert {a.peer for a in of(told, io.Accuse) if a.named} == {"peer-5", "peer-6"}
    assert statements(machine.handle(Tick(), 9.0), m.EvidenceTx) == []
