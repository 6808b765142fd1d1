"""Mempool, leaders, catching up, configuration and the other small parts."""

import pytest

from torchbft.primitives.abci import TxResult
from torchbft.primitives.effects import Broadcast, Persist, Send
from torchbft.primitives.errors import MisuseError, PreconditionError
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.ledger import mempool as mempool_module
from torchbft.protocols.ledger.catchup import (
    ASK_SECONDS,
    EARLY_MESSAGES,
    HISTORY_BYTES,
    SERVES_PER_SECOND,
    EarlyMessages,
    History,
    Limits,
)
from torchbft.protocols.ledger.certificates import Validator, ValidatorSet
from torchbft.protocols.ledger.leaders import MAX_DOUBLINGS, SKIPPED_HEIGHTS, LeaderSchedule
from torchbft.protocols.ledger.mempool import MAX_PENDING_OF_SENDER, Mempool
from torchbft.protocols.ledger.messages import (
    BATCH_BLOCKS,
    BATCH_BYTES,
    MAX_BLOCK_BYTES,
    MAX_TX_BYTES,
    Certificate,
    Kind,
    Status,
)
from torchbft.protocols.ledger.outbox import Outbox
from torchbft.protocols.ledger.state import MAX_BODIES, HeightState, LedgerConfig, Tip
from torchbft.sim.puppets import Puppets
from torchbft.sim.toy import ToyApplication

# -- mempool


def test_transactions_wait_in_order_each_once() -> None:
    mempool = Mempool(ToyApplication())
    assert [mempool.add(tx, None) for tx in (b"b", b"a", b"b")] == [True, True, False]
    assert mempool.pending() == (b"b", b"a")
    assert mempool.version == 2
    mempool.remove([b"b", b"unknown"])
    assert mempool.pending() == (b"a",)


def test_what_the_application_refuses_does_not_wait() -> None:
    application = ToyApplication()
    mempool = Mempool(application)
    mempool.add(b"1", None)
    mempool.add(b"2", None)
    application.finalize_block(Height(1), [b"1", b"3"])
    assert not mempool.add(b"3", None)
    mempool.recheck()
    assert mempool.pending() == (b"2",)


@pytest.mark.parametrize("tx", [b"", bytes(MAX_TX_BYTES + 1)])
def test_a_transaction_has_a_size(tx: bytes) -> None:
    assert not Mempool(ToyApplication()).add(tx, None)


def test_one_sender_has_a_share_of_the_room_only() -> None:
    mempool = Mempool(ToyApplication())
    liar, honest = PeerId("liar"), PeerId("honest")
    taken = sum(mempool.add(b"%d" % i, liar) for i in range(2 * MAX_PENDING_OF_SENDER))
    assert taken == MAX_PENDING_OF_SENDER
    assert mempool.add(b"x", honest)
    mempool.remove([b"0"])
    assert mempool.add(b"again", liar), "room comes back"


def test_the_whole_has_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mempool_module, "MAX_PENDING_TXS", 3)
    mempool = Mempool(ToyApplication())
    assert [mempool.add(b"%d" % i, None) for i in range(4)] == [True, True, True, False]
    monkeypatch.setattr(mempool_module, "MAX_PENDING_BYTES", 10)
    mempool = Mempool(ToyApplication())
    assert [mempool.add(bytes([i]) * 4, None) for i in range(3)] == [True, True, False]
    mempool.remove([bytes([0]) * 4])
    assert mempool.add(bytes([2]) * 4, None)


def test_check_tx_is_not_asked_about_what_has_no_room() -> None:
    class Counting(ToyApplication):
        asked = 0

        def check_tx(self, tx: bytes) -> TxResult:
            self.asked += 1
            return super().check_tx(tx)

    application = Counting()
    mempool = Mempool(application)
    mempool.add(b"1", None)
    mempool.add(b"1", None)
    mempool.add(bytes(MAX_TX_BYTES + 1), None)
    assert application.asked == 1


# -- leaders


def members(n: int) -> ValidatorSet:
    return ValidatorSet(
        Validator(PeerId(f"p{i}"), SigningKey.derive(bytes(32), f"p{i}").public) for i in range(n)
    )


def test_leaders_rotate_over_heights_and_views() -> None:
    schedule = LeaderSchedule(members(4))
    assert [schedule.leader(Height(h), View(0)) for h in range(5)] == ["p0", "p1", "p2", "p3", "p0"]
    assert {schedule.leader(Height(1), View(v)) for v in range(4)} == set(members(4).names)


def test_a_leader_whose_turn_passed_is_skipped_for_a_while() -> None:
    schedule, validators = LeaderSchedule(members(4)), members(4)
    schedule.record(Height(1), PeerId("p2"), validators)  # p1 led view 0 and failed
    last = 1 + SKIPPED_HEIGHTS
    for height in range(2, last + 1):
        assert all(schedule.leader(Height(height), View(v)) != "p1" for v in range(8))
        schedule.record(Height(height), schedule.leader(Height(height), View(0)), validators)
    heights = range(last + 1, last + 5)
    leaders = []
    for height in heights:
        leaders.append(schedule.leader(Height(height), View(0)))
        schedule.record(Height(height), leaders[-1], validators)
    assert "p1" in leaders


def spell(failures: int) -> int:
    """Heights for which p1 is skipped after so many failures in a row."""
    schedule, validators, height = LeaderSchedule(members(4)), members(4), 0
    begun = 0
    while failures:
        height += 1
        first = schedule.leader(Height(height), View(0))
        proposer = first
        if first == "p1":
            failures, begun = failures - 1, height
            proposer = schedule.leader(Height(height), View(1))
        schedule.record(Height(height), proposer, validators)
    while all(schedule.leader(Height(height + 1), View(v)) != "p1" for v in range(4)):
        height += 1
        schedule.record(Height(height), schedule.leader(Height(height), View(0)), validators)
    return height - begun


def test_spells_double_up_to_a_bound() -> None:
    assert [spell(n) for n in (1, 2, 3)] == [16, 32, 64]
    assert spell(MAX_DOUBLINGS + 3) == SKIPPED_HEIGHTS * 2**MAX_DOUBLINGS


def test_at_most_f_are_skipped_the_latest_ones() -> None:
    schedule, validators = LeaderSchedule(members(4)), members(4)
    schedule.record(Height(1), PeerId("p3"), validators)  # p1 and p2 failed, but f = 1
    led = {schedule.leader(Height(2), View(v)) for v in range(4)}
    assert len(led) == 3
    schedule.record(Height(2), schedule.leader(Height(2), View(1)), validators)
    assert len({schedule.leader(Height(3), View(v)) for v in range(4)}) == 3


def test_skipping_follows_power() -> None:
    heavy = ValidatorSet(
        Validator(v.name, v.public, 5 if v.name == "p1" else 1) for v in members(7).validators
    )
    schedule = LeaderSchedule(heavy)  # power 11, f = 3: p1 alone is more
    schedule.record(Height(1), PeerId("p2"), heavy)
    assert "p1" in {schedule.leader(Height(2), View(v)) for v in range(7)}


def test_a_schedule_is_a_function_of_the_chain() -> None:
    one, two = LeaderSchedule(members(7)), LeaderSchedule(members(7))
    for height, proposer in enumerate(["p2", "p2", "p5", "stranger", "p0", "p6"], 1):
        one.record(Height(height), PeerId(proposer), members(7))
        two.record(Height(height), PeerId(proposer), members(7))
    views = [View(v) for v in range(7)]
    assert [one.leader(Height(7), v) for v in views] == [two.leader(Height(7), v) for v in views]


# -- catching up


def test_history_serves_bounded_batches() -> None:
    history = History(())
    for height in range(1, 101):
        history.append(Height(height), b"%d" % height)
    assert history.batch(Height(99), Height(101)) == (b"99", b"100")
    assert len(history.batch(Height(1), Height(101))) == BATCH_BLOCKS
    assert history.batch(Height(50), Height(50)) == ()


def test_a_batch_stays_below_its_bytes_but_holds_one_block() -> None:
    history = History(())
    for height, size in ((1, BATCH_BYTES // 2), (2, BATCH_BYTES // 2), (3, 1), (4, BATCH_BYTES)):
        history.append(Height(height), bytes(size))
    assert list(map(len, history.batch(Height(1), Height(5)))) == [BATCH_BYTES // 2] * 2
    assert list(map(len, history.batch(Height(4), Height(5)))) == [BATCH_BYTES]


def test_old_blocks_leave_memory_and_come_from_the_host() -> None:
    log: list[bytes] = []
    history = History(log)
    for height in range(1, 41):
        log.append(height.to_bytes(HISTORY_BYTES // 20, "big"))
        history.append(Height(height), log[-1])
    assert sum(map(len, history._recent.values())) <= HISTORY_BYTES
    assert [history.get(Height(height)) for height in (1, 2, 40)] == [log[0], log[1], log[39]]
    assert history.get(Height(0)) is history.get(Height(41)) is None
    assert History(()).get(Height(1)) is None


def test_early_messages_are_bounded_per_sender() -> None:
    early = EarlyMessages()
    liar, honest = PeerId("liar"), PeerId("honest")
    for i in range(2 * EARLY_MESSAGES):
        early.hold(liar, b"%d" % i)
    early.hold(honest, b"mine")
    early.hold(honest, b"mine")
    early.hold(honest, bytes(5 * 1024 * 1024))
    assert early.senders() == [liar, honest]
    released = early.release()
    assert len(released) == EARLY_MESSAGES + 1
    assert released[-1] == (honest, b"mine")
    assert early.release() == []


def test_one_peer_is_served_at_a_bounded_rate() -> None:
    limits = Limits()
    peer, other = PeerId("a"), PeerId("b")
    served = sum(limits.may_serve(peer, i / 1000) for i in range(900))
    assert served == SERVES_PER_SECOND
    assert limits.may_serve(other, 0.9)
    assert limits.may_serve(peer, 1.0)


def test_questions_have_a_rate_too() -> None:
    limits = Limits()
    assert limits.may_ask(0.0)
    assert not limits.may_ask(ASK_SECONDS * 0.9)
    assert limits.may_ask(ASK_SECONDS)


# -- configuration and state


@pytest.mark.parametrize(
    "settings",
    [
        {"proposal_wait": 2.0},
        {"proposal_wait": -1.0},
        {"resend": 0.0},
        {"max_block_bytes": 0},
        {"max_block_bytes": MAX_BLOCK_BYTES + 1},
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, float]) -> None:
    with pytest.raises(PreconditionError):
        LedgerConfig(bytes(32), PeerId("a"), **settings)


def test_an_application_hash_has_32_bytes() -> None:
    with pytest.raises(MisuseError):
        Tip(Height(0), bytes(32), b"short")


def state() -> HeightState:
    return HeightState(Height(1), members(4))


def test_votes_of_a_window_of_views_are_kept() -> None:
    height = state()
    height.enter(View(10), None)
    assert [v for v in range(30) if height.in_window(View(v))] == list(range(8, 19))


def test_entering_a_view_forgets_old_votes() -> None:
    table, height = Puppets(), state()
    for view in range(6):
        vote = table.vote(PeerId("p1"), Kind.PREPARE, b"d" * 32, view=view)
        height.slot(Kind.PREPARE, View(view))[PeerId("p1")] = vote
    height.enter(View(5), None)
    assert sorted(view for _, view in height.votes) == [3, 4, 5]


def test_blocks_of_one_height_are_bounded_and_the_lock_stays() -> None:
    table, height = Puppets(), state()
    blocks = [(bytes([i]) * 32, table.block(b"%d" % i)) for i in range(2 * MAX_BODIES)]
    locked = blocks[0][0]
    height.signed.learn(Certificate(Kind.PREPARE, Height(1), View(0), locked, (), ()))
    for digest, block in blocks:
        height.keep_body(digest, block)
    assert len(height.bodies) == MAX_BODIES
    assert locked in height.bodies
    assert blocks[-1][0] in height.bodies


def test_only_what_others_may_need_is_repeated() -> None:
    height = state()
    for kind, view in (
        (Kind.PREPARE, 0),
        (Kind.FINALIZE, 0),
        (Kind.TIME_OUT, 0),
        (Kind.PREPARE, 1),
        (Kind.FINALIZE, 1),
        (Kind.TIME_OUT, 1),
        (Kind.PREPARE, 2),
    ):
        height.mine[kind, View(view)] = f"{kind.name} {view}".encode()
    height.enter(View(2), None)
    assert height.repeatable() == [b"PREPARE 2", b"FINALIZE 1"]


def test_effects_come_out_in_the_order_of_the_contract() -> None:
    out = Outbox()
    out.apply("applied")
    out.send(PeerId("a"), Status(Height(1)))
    out.broadcast(b"all")
    out.persist("votes", b"record")
    kinds = [type(effect) for effect in out.drain()]
    assert kinds == [Persist, Send, Broadcast, str]
    assert out.drain() == []
