"""Negative controls: each checker of rounds reports the one thing it is for, and is silent else."""

from msgspec.structs import replace

from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import Height, PeerId, Round
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import WIRE_VERSION, encode
from torchbft.protocols.ledger.messages import FinalizedBlock
from torchbft.protocols.peer import LEDGER, ROUND, TRANSACTION, BlockDone
from torchbft.protocols.round import events, interface
from torchbft.protocols.round.messages import (
    Closing,
    Commitment,
    Opening,
    RootCertificate,
    RootVote,
    Statement,
    parse,
    seat_map,
    sign,
)
from torchbft.protocols.round.state import Accepted, Seat
from torchbft.sim.checkers import Checker
from torchbft.sim.puppets import Puppets
from torchbft.sim.round_checkers import (
    AcceptedPayloadsAreHeld,
    HaltsAfterVoidRounds,
    HonestAreNotNamed,
    NothingInTimeIsLost,
    OneRootPerRound,
    OneSetPerRound,
    OneStatementPerSlot,
    OpensAfterTheWindow,
    RootsAreComputed,
    TrainsFromSignedRoots,
    peer_message,
)

TABLE = Puppets(7)
NAMES = TABLE.names
A, B, C, D, E, X, Y = NAMES
HONEST = (A, B, C, D, E)
NEED = 3
SEATS = tuple(Seat(name, bytes(32), 1, True, True) for name in NAMES)
"""f+1 of seven: so many honest ones cannot all be missing from a quorum of closings."""
KEYS: dict[str, SigningKey] = dict(TABLE.keys)


def head(author: str, number: int = 0) -> tuple[int, bytes, int, int, str]:
    return (WIRE_VERSION, TABLE.run_id, 0, number, author)


def commitment(author: str, digest: bytes = b"1", number: int = 0) -> Commitment:
    return Commitment(*head(author, number), digest * 32, b"")


def opening(author: str) -> Opening:
    thirty_two = [bytes([i]) * 32 for i in range(4)]
    salt, payload, trace, share = thirty_two
    return Opening(*head(author), salt, 9, payload, trace, share, b"", b"")


def closing(author: str, listed: tuple[PeerId, ...], window: str = "commit") -> Closing:
    bits = seat_map({NAMES.index(name) for name in listed}, len(NAMES))
    return Closing(*head(author), window, bits)  # type: ignore[arg-type]


def tx(statement: Statement) -> bytes:
    return sign(statement, KEYS[statement.author])


def accepted(author: str, root: bytes = b"p") -> Accepted:
    return Accepted(author, root * 32, 9, b"t" * 32)


def done(*told: object, height: int = 1) -> BlockDone:
    return BlockDone(Height(height), 0, 1, 100, 0.1, told)


def fixed(*authors: str, number: int = 0) -> events.RoundFixed:
    return events.RoundFixed(Round(number), tuple(accepted(name) for name in authors), ())


def block(height: int, *statements: Statement) -> FinalizedBlock:
    made = replace(TABLE.block(*(tx(said) for said in statements)), height=Height(height))
    return TABLE.finalized(made)


def say(checker: Checker, peer: PeerId, statement: Statement) -> None:
    checker.on_message(peer, parse(tx(statement)))


def test_messages_of_whole_peers_are_read() -> None:
    vote = TABLE.vote(A, 1, b"d" * 32)  # type: ignore[arg-type]
    said = commitment(A)
    assert peer_message(LEDGER + encode(vote)) == vote
    assert peer_message(TRANSACTION + tx(said)) == peer_message(ROUND + tx(said)) == parse(tx(said))
    assert [peer_message(data) for data in (b"", b"\x09x", TRANSACTION + b"\xc1")] == [None] * 3


def test_two_statements_in_one_slot() -> None:
    checker = OneStatementPerSlot()
    for said in (commitment(A), commitment(A), commitment(A, b"2", number=1), opening(A)):
        say(checker, A, said)
    say(checker, A, commitment(B, b"2"))
    say(checker, A, closing(A, (A,)))
    say(checker, A, closing(A, (A,), window="open"))
    assert checker.violations == []
    say(checker, A, commitment(A, b"2"))
    say(checker, A, RootVote(*head(A), b"r" * 32))
    say(checker, A, RootVote(*head(A), b"s" * 32))
    assert checker.violations == [
        "p0 signed twice: commit of round 0",
        "p0 signed twice: root of round 0",
    ]


def test_an_opening_before_its_time() -> None:
    checker = OpensAfterTheWindow(lambda peer, number: peer == A)
    say(checker, A, opening(A))
    say(checker, B, opening(A))
    assert checker.violations == []
    say(checker, B, opening(B))
    assert checker.violations == ["p1 opens round 0 too early"]


def test_two_accepted_sets() -> None:
    checker = OneSetPerRound()
    for peer in (A, B):
        checker.on_effect(peer, done(fixed(A, B)))
    checker.on_effect(B, done(fixed(A, number=1)))
    checker.on_effect(A, done(events.RoundVoid(Round(2), "why", ())))
    assert checker.violations == []
    assert (checker.fixed, checker.void) == ({0: (A, B), 1: (A,)}, {2: "why"})
    checker.on_effect(C, done(fixed(A)))
    checker.on_effect(C, done(events.RoundVoid(Round(2), "else", ())))
    assert checker.violations == [
        "p2 reads another outcome of round 0: accepted",
        "p2 reads another outcome of round 2: void",
    ]


def test_two_signed_roots() -> None:
    checker = OneRootPerRound()
    checker.on_effect(A, interface.RootAgreed(Round(0), b"r" * 32, on_ledger=False))
    checker.on_effect(B, done(events.RootSigned(Round(0), b"r" * 32)))
    checker.on_effect(A, interface.RootAgreed(Round(1), b"s" * 32, on_ledger=True))
    assert checker.violations == []
    checker.on_effect(B, done(events.RootSigned(Round(1), b"r" * 32)))
    assert checker.violations == ["p1 knows another signed root of round 1"]


def test_a_root_that_too_few_computed() -> None:
    checker = RootsAreComputed(lambda number: SEATS, (X, Y))
    root = b"r" * 32
    for name in (A, B, X):
        checker.on_statement(name, parse(tx(RootVote(*head(name), root))))
    checker.on_statement(A, parse(tx(RootVote(*head(C), root))))
    checker.on_effect(A, interface.RootAgreed(Round(0), root, on_ledger=False))
    assert checker.violations == []
    checker.on_effect(A, interface.RootAgreed(Round(0), b"s" * 32, on_ledger=False))
    assert checker.violations == [
        "p0 counts a root of round 0 as signed that 0 honest peers signed, not 3"
    ]


def test_training_from_a_root_that_nobody_signed() -> None:
    start, told, written = (bytes([i]) * 32 for i in range(3))
    checker = TrainsFromSignedRoots(start)
    checker.on_effect(A, interface.RootAgreed(Round(0), told, on_ledger=False))
    certificate = RootCertificate(*head(A), written, b"\x1f", bytes(5 * 64))
    checker.on_block(B, block(1, certificate))
    for root in (start, told, written):
        checker.on_effect(B, interface.StartTraining(Round(1), (), root))
    assert checker.violations == []
    checker.on_effect(B, interface.StartTraining(Round(1), (), b"x" * 32))
    assert checker.violations == ["p1 trains round 1 from an unsigned root"]


def test_an_accepted_payload_that_no_honest_peer_holds() -> None:
    held = {b"p" * 32: (X, A), b"q" * 32: (X, Y)}
    checker = AcceptedPayloadsAreHeld(HONEST, lambda root: held[root])
    checker.on_effect(A, done(fixed(X)))
    assert checker.violations == []
    lost = events.RoundFixed(Round(1), (accepted(Y, b"q"),), ())
    checker.on_effect(A, done(lost))
    assert checker.violations == ["no honest peer holds p6's payload of round 1"]


def test_an_honest_peer_named() -> None:
    checker = HonestAreNotNamed(HONEST)
    evidence = Evidence(Fault.EQUIVOCATION, X, 0, ())
    for peer, named in ((X, True), (A, False)):
        fault = Fault.EQUIVOCATION if named else Fault.LATE
        checker.on_effect(B, interface.Accuse(peer, Round(0), fault, named, "why"))
    checker.on_effect(B, done(events.Convicted(X, evidence)))
    assert checker.violations == []
    assert (checker.named, checker.suspected) == ({X: {Fault.EQUIVOCATION}}, {A: {Fault.LATE}})
    checker.on_effect(B, interface.Accuse(A, Round(0), Fault.BAD_OPENING, True, "why"))
    checker.on_effect(B, done(events.Convicted(C, evidence)))
    assert checker.violations == [
        "p1 names p0, which is honest: bad-opening",
        "p1 names p2, which is honest: equivocation",
    ]


def test_a_halt_without_void_rounds() -> None:
    checker = HaltsAfterVoidRounds()
    for number in (1, 3, 4, 5, 6, 7):
        checker.on_effect(A, done(events.RoundVoid(Round(number), "why", ())))
    checker.on_effect(A, interface.Halt("five void rounds"))
    assert checker.violations == []
    checker.on_effect(A, done(events.RoundVoid(Round(9), "why", ())))
    checker.on_effect(A, interface.Halt("other things"))
    assert checker.violations == ["p0 halted: other things"]


# -- items that came in time


class Window:
    """One commitment window of seven: A's commitment reached some; then all close, and it is told
    which commitments count."""

    def __init__(self, kind: str = "commit") -> None:
        self.round = 0
        self.checker = NothingInTimeIsLost(lambda number: SEATS, HONEST, lambda peer: self.round)
        self.kind = kind
        self.item = opening(A) if kind == "open" else commitment(A)
        if kind == "open":
            closed = events.CommitmentsClosed(Round(0), NAMES)
            self.checker.on_effect(B, done(closed, height=0))
        say(self.checker, A, self.item)

    def reach(self, *peers: PeerId, item: Statement | None = None) -> None:
        for peer in peers:
            self.checker.on_receive(peer, parse(tx(item or self.item)))

    def close(self, *listing: PeerId, silent: tuple[PeerId, ...] = (B, C, D, X, Y)) -> None:
        """``listing`` list A's item, ``silent`` list nothing; the block holds all closings."""
        said = [closing(name, (A,), self.kind) for name in listing]
        said += [closing(name, (), self.kind) for name in silent if name not in listing]
        for one in said:
            if one.author in HONEST:
                say(self.checker, PeerId(one.author), one)
        self.checker.on_block(B, block(1, *said))

    def told(self, *authors: PeerId) -> list[str]:
        if self.kind == "open":
            opened = tuple(accepted(name) for name in authors)
            event: object = events.OpeningsClosed(Round(0), opened)
        else:
            event = events.CommitmentsClosed(Round(0), authors)
        self.checker.on_effect(B, done(event))
        return self.checker.violations


def test_an_item_in_time_that_is_lost() -> None:
    for kind in ("commit", "open"):
        window = Window(kind)
        window.reach(B, C, D)
        window.close()
        assert window.told(B, X) == [f"p0's {kind} of round 0 came in time, is lost"]


def test_an_item_in_time_that_is_in_the_set() -> None:
    window = Window()
    window.reach(B, C, D)
    window.close()
    assert window.told(A, B) == []
    assert window.checker.decided == 1


def test_an_item_that_reached_too_few_may_be_lost() -> None:
    window = Window()
    window.reach(B)  # and its author: NEED - 1
    window.close()
    assert window.told(B) == []
    assert window.checker.decided == 1


def test_an_item_that_came_after_the_closings_may_be_lost() -> None:
    window = Window()
    window.reach(B)
    window.close()
    window.reach(C, D)
    assert window.told(B) == []


def test_an_item_heard_before_a_crash_may_be_lost() -> None:
    window = Window()
    window.reach(B, C, D)
    for name in (B, C, D):
        window.checker.on_start(name)
    window.close()
    assert window.told(B) == []


def test_an_item_that_a_validator_was_too_far_behind_to_keep_may_be_lost() -> None:
    window = Window()
    window.round = 1
    window.reach(B, C, D)
    window.close()
    assert window.told(B) == []


def test_a_forged_item_is_nobodys() -> None:
    window = Window()
    forged = replace(commitment(A), digest=b"f" * 32)
    window.reach(B, C, D, item=forged)
    window.close()
    assert window.told(B) == []


def test_without_a_quorum_of_closings_nothing_can_be_said() -> None:
    for silent in ((B, C, D, X), ()):
        window = Window()
        window.reach(B, C, D)
        window.close(silent=silent)
        assert window.told(B) == []
        assert window.checker.decided == 0


def test_closings_that_do_not_count_close_nothing() -> None:
    window = Window()
    window.reach(B, C, D)
    window.close(B)  # A's item, which B lists, is not on the ledger
    assert window.told(B) == []
    assert window.checker.decided == 0


def test_an_item_lost_in_a_void_round() -> None:
    window = Window()
    window.reach(B, C, D)
    window.close()
    window.checker.on_effect(B, done(events.RoundVoid(Round(0), "too few", ())))
    assert window.checker.violations == ["p0's commit of round 0 came in time, is lost"]
