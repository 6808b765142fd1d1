"""The application's ABCI calls: what is visible when, hashes, proposals, snapshots."""

import random

import pytest
from round_world import World

from torchbft.primitives.abci import Snapshot
from torchbft.primitives.errors import DecodeError, MisuseError, PreconditionError
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.wire import encode
from torchbft.protocols.round import events as ev
from torchbft.protocols.round import messages as m
from torchbft.protocols.round import state as states
from torchbft.protocols.round.admissible import UNCONVINCING, admissible
from torchbft.protocols.round.application import (
    MAX_UNCONVINCING,
    SNAPSHOTS_KEPT,
    TX_FRAME_BYTES,
    Application,
)
from torchbft.protocols.round.reader import CODE_REFUSED, record
from torchbft.protocols.round.state import decode_state


class Driven(World):
    """A world whose blocks go through an application."""

    def __init__(self, n: int = 4, **genesis: object) -> None:
        super().__init__(n, **genesis)
        self.application = Application(self.genesis)
        self.hashes = [self.application.info().last_app_hash]

    def block(self, *txs: bytes):
        height = self.application.info().last_height + 1
        result = self.application.finalize_block(height, txs)
        self.hashes.append(result.app_hash)
        self.application.commit()
        self.events += result.events
        self.state = self.application.state
        return result


def test_finalize_computes_and_commit_makes_visible() -> None:
    world = World(4)
    application = Application(world.genesis)
    before = application.state
    result = application.finalize_block(1, [world.ready(name) for name in world.names])
    assert application.state is before
    assert [r.code for r in result.tx_results] == [0] * 4
    assert result.events == (ev.RoundOpened(0),)
    assert application.commit() == 1
    assert application.state.phase == "commit"
    assert application.info().last_height == 1


def test_only_the_next_height_is_finalized_and_only_what_was_finalized_commits() -> None:
    application = Application(World(4).genesis)
    for height in (0, 2):
        with pytest.raises(MisuseError):
            application.finalize_block(height, [])
    with pytest.raises(MisuseError):
        application.commit()
    application.finalize_block(1, [])
    application.finalize_block(1, [])
    application.commit()
    with pytest.raises(MisuseError):
        application.finalize_block(1, [])


def test_the_hash_moves_only_when_a_round_is_fixed_or_void() -> None:
    world = Driven(4)
    world.start()
    world.play_round(0)
    world.block()
    world.block(*(world.closing(name, 1, "commit", ()) for name in world.names))
    assert world.state.current.number == 1, "the root is missing, so the window stays open"
    world.block(world.rooted("peer-0", 0))
    moved = [a != b for a, b in zip(world.hashes, world.hashes[1:], strict=False)]
    assert moved == [False, False, False, True, False, False, True]


def test_a_genesis_that_cannot_work_is_refused() -> None:
    for wrong in ({"m_min": 4}, {"m_min": 0}, {"f": 2}, {"rounds": 0}, {"samples": 0}):
        with pytest.raises(PreconditionError):
            Application(World(4, **wrong).genesis)
    application = Application(World(4).genesis)
    assert application.init_chain(encode(World(4).genesis)) == application.info().last_app_hash
    with pytest.raises(MisuseError):
        application.init_chain(encode(World(7).genesis))
    with pytest.raises(DecodeError):
        application.init_chain(b"junk")


def test_round_17_a_block_with_anything_inadmissible_is_rejected_whatever_its_order() -> None:
    world = Driven(4)
    world.start()
    good = [world.commit(name, 0) for name in world.names]
    bad = [
        world.commit("peer-0", 4),
        world.ready("peer-0"),
        b"junk",
        good[0],
        good[0][:-1] + bytes([good[0][-1] ^ 1]),
    ]
    for process in (Application(world.genesis), world.application):
        process.state = world.state
        assert process.process_proposal(2, good)
        for tx in bad:
            for at in range(len(good) + 1):
                assert not process.process_proposal(2, [*good[:at], tx, *good[at:]])


def test_round_17_a_third_statement_for_a_slot_spoils_a_block_in_any_order() -> None:
    world = Driven(4)
    world.start()
    three = [world.commit("peer-0", 0, tag) for tag in (b"1", b"2", b"3")]
    for i in range(3):
        rotated = three[i:] + three[:i]
        assert world.application.process_proposal(2, rotated[:2])
        assert not world.application.process_proposal(2, rotated)
    result = world.block(*three)
    assert [r.code == 0 for r in result.tx_results] == [True, False, False]
    assert result.tx_results[2].code == CODE_REFUSED


@pytest.mark.parametrize("seed", range(6))
def test_round_17_judging_by_what_is_known_of_each_alone_is_judging_in_full(seed: int) -> None:
    """Proposals are judged by verdicts against the state before the block and by what stands
    beside; ``admissible`` against the state after each transaction says the same."""
    drawn, world = random.Random(seed), Driven(4)
    world.start()
    world.play_round(0)
    number = world.state.current.number
    pool = [world.rooted(name, 0) for name in world.names[:2]] + [world.void("peer-2", 0)]
    for name in world.names:
        pool += [world.commit(name, number, tag) for tag in (b"", b"1", b"2")]
        pool += [world.closing(name, number, "commit", ()), world.open(name, number - 1)]
        pool += [world.commit(name, number + 2), world.attest(name, 0)]
    for _ in range(40):
        txs = drawn.choices(pool, k=drawn.randrange(1, 8))
        state, good = world.state, True
        for tx in txs:
            good = good and admissible(tx, state) is None
            state = record(state, tx) if good else state
        assert world.application.process_proposal(5, txs) == good
        chosen = world.application.prepare_proposal(5, txs, 1 << 20)
        assert world.application.process_proposal(5, chosen)
        assert (chosen == txs) >= good


def test_round_18_known_is_no_error_for_who_hands_it_in_again() -> None:
    world = Driven(4)
    world.start()
    tx = world.commit("peer-0", 0)
    world.block(tx)
    again = world.application.check_tx(tx)
    assert (again.code, again.log) == (CODE_REFUSED, "already on the ledger")


def test_round_17_a_flood_of_valid_statements_takes_nobody_elses_place() -> None:
    """An engine outside tells no sender; the signature does."""
    world = Driven(4)
    world.start()
    flood = [world.commit("peer-3", 0, b"%d" % i) for i in range(200)]
    flood += [world.open("peer-3", 1, b"%d" % i) for i in range(200)]
    codes = [world.application.check_tx(tx).code for tx in flood]
    assert [code == 0 for code in codes] == ([True] * 2 + [False] * 198) * 2
    assert [world.application.check_tx(tx).code for tx in flood] == codes, "known is no news"
    honest = [world.commit(name, 0) for name in world.names[:3]]
    assert {world.application.check_tx(tx).code for tx in honest} == {0}
    chosen = world.application.prepare_proposal(2, flood, 1 << 20)
    assert set(honest) < set(chosen)
    assert len(chosen) == 2 + 2 + 3
    world.block(*chosen)
    assert world.application.pending() == []
    assert world.application.check_tx(world.attest("peer-3", 0)).code == 0, "the count begins anew"


def test_round_17_false_evidence_of_one_author_is_looked_at_a_few_times_between_blocks() -> None:
    """A look takes thirty times as long as at any other statement, and liars can sign for ever."""
    looks: list[Evidence] = []

    def check(evidence: Evidence, public: bytes) -> bool:
        looks.append(evidence)
        return evidence.statements == (b"true",)

    world = Driven(4)
    world.application = application = Application(world.genesis, {Fault.DOUBLE_VOTE: check})
    world.start()

    def shown(author: str, statement: bytes, signer: str = "") -> str | None:
        evidence = Evidence(Fault.DOUBLE_VOTE, "peer-1", 0, (statement,))
        tx = m.EvidenceTx(*world.head(author, 0), evidence)
        return application.unwelcome(world.sign(tx, signer or author))

    assert {shown("peer-0", b"%d" % i, "peer-3") for i in range(9)} == {"not signed by peer-0"}
    said = [shown("peer-3", b"%d" % i) for i in range(50)]
    assert said[:MAX_UNCONVINCING] == [UNCONVINCING] * MAX_UNCONVINCING
    assert set(said[MAX_UNCONVINCING:]) == {"peer-3 has shown too much false evidence"}
    assert len(looks) == MAX_UNCONVINCING
    assert shown("peer-0", b"true") is None, "nobody else is concerned"
    assert application.unwelcome(world.commit("peer-3", 0)) is None
    true = m.EvidenceTx(
        *world.head("peer-3", 0), Evidence(Fault.DOUBLE_VOTE, "peer-1", 0, (b"true",))
    )
    assert application.check_tx(world.sign(true)).code == CODE_REFUSED
    assert application.process_proposal(2, [world.sign(true)]), "others did not see the flood"
    world.block(world.commit("peer-0", 0))
    assert shown("peer-3", b"true") is None, "the count begins anew"


def test_round_17_an_author_may_fill_no_more_than_its_share_of_what_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchbft.protocols.round.application.MAX_SEEN_OF_AUTHOR", 3)
    world = Driven(4)
    world.start()
    many = [world.commit("peer-0", 0), world.open("peer-0", 0), world.attest("peer-0", 0)]
    assert [world.application.check_tx(tx).code for tx in many] == [0] * 3
    late = world.application.check_tx(world.closing("peer-0", 0, "commit", ()))
    assert (late.code, late.log) == (CODE_REFUSED, "3 statements of this author wait already")
    assert world.application.check_tx(world.commit("peer-1", 0)).code == 0


def test_round_19_proposals_take_what_was_seen_and_leave_out_what_is_not_admissible() -> None:
    world = Driven(4)
    world.start()
    mine, seen = world.commit("peer-0", 0), world.commit("peer-1", 0)
    assert world.application.check_tx(seen).code == 0
    chosen = world.application.prepare_proposal(2, [mine, b"junk", mine], 10_000)
    assert chosen == [seen, mine]
    assert world.application.process_proposal(2, chosen)
    room = len(seen) + TX_FRAME_BYTES
    assert world.application.prepare_proposal(2, [mine], room) == [seen]
    assert world.application.prepare_proposal(2, [mine], room - 1) == []
    assert world.application.pending() == [seen]
    world.block(seen)
    assert world.application.prepare_proposal(3, [], 10_000) == []
    assert world.application.pending() == []


def test_the_last_result_of_a_block_holds_the_digest_of_the_state_after_it() -> None:
    world = Driven(4)
    digests = []
    for txs in ([world.ready(name) for name in world.names], [world.commit("peer-0", 0), b"junk"]):
        result = world.block(*txs)
        assert [r.data for r in result.tx_results[:-1]] == [b""] * (len(txs) - 1)
        assert result.tx_results[-1].data == world.state.digest()
        digests.append(world.state.digest())
    refused = world.block(b"junk").tx_results[-1]
    assert (refused.code, refused.data) == (CODE_REFUSED, digests[-1])
    assert world.block().tx_results == ()
    assert digests[0] != digests[1] != world.hashes[0], "the application hash waits for the round"
    assert world.hashes == [world.hashes[0]] * 5


def test_a_saved_state_is_taken_up_at_any_height_and_goes_on_alike() -> None:
    world = Driven(4)
    blocks = [[world.ready(name) for name in world.names], [world.commit("peer-0", 0)], []]
    for txs in blocks:
        world.block(*txs)
        again = Application(world.genesis)
        again.resume(world.application.saved())
        assert again.info() == world.application.info()
        assert again.state == world.state
        assert again.saved() == world.application.saved()
    more = [world.commit(name, 0) for name in world.names[1:]]
    height = world.application.info().last_height + 1
    assert again.finalize_block(height, more) == world.application.finalize_block(height, more)


def test_what_was_finalized_and_not_committed_is_finalized_again_alike() -> None:
    world = Driven(4)
    world.block(*(world.ready(name) for name in world.names))
    saved = world.application.saved()
    txs = [world.commit(name, 0) for name in world.names]
    first = world.application.finalize_block(2, txs)
    assert world.application.saved() == saved, "only a commit changes what is saved"
    restarted = Application(world.genesis)
    restarted.resume(saved)
    with pytest.raises(MisuseError):
        restarted.commit()
    assert restarted.finalize_block(2, txs) == first
    restarted.commit()
    world.application.commit()
    assert restarted.saved() == world.application.saved()


def test_a_saved_state_that_is_damaged_or_of_another_run_is_refused() -> None:
    world = Driven(4)
    world.block(*(world.ready(name) for name in world.names))
    saved = world.application.saved()
    fresh = Application(world.genesis)
    other = Application(World(7).genesis)
    for bad in (b"", b"junk", saved[:-1], saved + b"x", other.saved()):
        with pytest.raises(DecodeError):
            fresh.resume(bad)
    assert fresh.info().last_height == 0
    fresh.resume(saved)
    assert fresh.info().last_height == 1


def test_round_19_snapshots_exist_for_heights_where_the_hash_moved_and_restore_there() -> None:
    world = Driven(4, rounds=9)
    world.start()
    for number in range(4):
        world.play_round(number)
    snapshots = world.application.list_snapshots()
    assert [s.height for s in snapshots] == [10, 13][-SNAPSHOTS_KEPT:]
    newest = snapshots[-1]
    chunks = [world.application.load_snapshot_chunk(newest.height, i) for i in range(newest.chunks)]
    joiner = Application(world.genesis)
    assert joiner.offer_snapshot(newest, world.hashes[-1])
    for index, chunk in enumerate(chunks):
        assert joiner.apply_snapshot_chunk(index, chunk)
    assert joiner.info() == world.application.info()
    assert joiner.state == world.application.state
    last = [world.rooted("peer-0", 3), *(world.commit(n, 4) for n in world.names)]
    one = joiner.finalize_block(14, last)
    two = world.application.finalize_block(14, last)
    assert one == two


def test_a_snapshot_that_is_not_the_ledgers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    world = Driven(4)
    world.start()
    world.play_round(0)
    newest = world.application.list_snapshots()[-1]
    whole = world.application.load_snapshot_chunk(newest.height, 0)
    joiner = Application(world.genesis)
    assert not joiner.apply_snapshot_chunk(0, whole), "none was offered"
    for data, app_hash in (
        (whole, b"h" * 32),
        (whole[:-1] + b"\0", world.hashes[-1]),
        (b"junk", world.hashes[-1]),
    ):
        assert joiner.offer_snapshot(newest, app_hash)
        assert not joiner.apply_snapshot_chunk(0, data)
    assert not joiner.offer_snapshot(Snapshot(9, 0, b""), b"h" * 32)
    assert not joiner.offer_snapshot(Snapshot(9, 10**9, b""), b"h" * 32)
    assert joiner.offer_snapshot(newest, world.hashes[-1])
    assert not joiner.apply_snapshot_chunk(1, whole)
    monkeypatch.setattr(states, "MAX_STATE_BYTES", 10)
    with pytest.raises(DecodeError):
        decode_state(whole)


def test_queries() -> None:
    world = Driven(4)
    world.start()
    assert world.application.query("state", b"") == encode(world.state)
    assert world.application.query("height", b"") == b"1"
    with pytest.raises(MisuseError):
        world.application.query("weather", b"")
