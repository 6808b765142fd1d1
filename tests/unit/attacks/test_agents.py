"""Each agent alone: a scripted machine gives effects, and what leaves is compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from torchbft import attacks
from torchbft.attacks.agents.agent import MAX_SCHEDULED, Agent, Screened
from torchbft.attacks.agents.contribution import OVERSIZED_LENGTH
from torchbft.attacks.agents.delivery import REMEMBERED
from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Send, Tick
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import Height, PeerId, Round, View
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import MAX_ITEM_BYTES, WIRE_VERSION, encode
from torchbft.protocols.ledger.certificates import check_double_vote, double_vote
from torchbft.protocols.ledger.messages import (
    Block,
    Kind,
    Proposal,
    Vote,
    block_digest,
    decode_message,
    sign_vote,
    vote_is_signed,
)
from torchbft.protocols.peer import LEDGER, ROUND, TRANSACTION
from torchbft.protocols.round.admissible import check_equivocation
from torchbft.protocols.round.interface import OfferPayload, PayloadStored, Trained
from torchbft.protocols.round.messages import (
    Attestation,
    Closing,
    Commitment,
    Opening,
    Ready,
    Statement,
    commitment_digest,
    parse,
    sign,
)
from torchbft.protocols.round.outcomes import check_bad_opening

RUN, ME = b"\7" * 32, PeerId("liar")
PEERS = tuple(PeerId(name) for name in ("anna", "bert", "liar", "mate", "zoe"))
KEY = SigningKey.derive(bytes(32), "liar")
AGENTS = [name for name, attack in attacks.known().items() if attack.kind == "agent"]


@dataclass
class Script(Screened):
    """A machine that gives the effects that it is told to give, and notes what it hears."""

    effects: list[Effect] = field(default_factory=list)
    heard: list[Any] = field(default_factory=list)
    wakes: float | None = None
    application: Any = field(
        default_factory=lambda: SimpleNamespace(
            state=SimpleNamespace(genesis=SimpleNamespace(run_id=RUN))
        )
    )

    def start(self, now: float) -> list[Effect]:
        return self._pour()

    def handle(self, event: Any, now: float) -> list[Effect]:
        self.heard.append(event)
        return self._pour()

    def deadline(self) -> float | None:
        return self.wakes

    def _pour(self) -> list[Effect]:
        poured, self.effects = self.effects, []
        return poured


def agent(attack: str, script: Script | None = None, **options: Any) -> Agent:
    kind = attacks.get(attack)
    assert issubclass(kind, Agent)
    machine = Script() if script is None else script
    values = {"name": ME, "keys": KEY, "seed": b"s" * 32, "peers": PEERS, "liars": [ME, "mate"]}
    return kind(machine, **(values | options))


def passed(liar: Agent, *effects: Effect, now: float = 0.0) -> list[Effect]:
    """What leaves when the honest machine wants these effects."""
    assert isinstance(liar.machine, Script)
    liar.machine.effects = list(effects)
    return liar.handle(Tick(), now)


def head(round: int, author: str = ME) -> tuple[int, bytes, int, int, str]:
    return (WIRE_VERSION, RUN, 0, round, author)


def opening(round: int) -> Opening:
    roots = (b"\1" * 32, 1000, b"\2" * 32, b"\3" * 32, b"\4" * 32)
    return Opening(*head(round), *roots, b"\5" * 32, b"")


def commitment(round: int) -> Commitment:
    return Commitment(*head(round), commitment_digest(opening(round)), b"")


def attestation(round: int) -> Attestation:
    return Attestation(*head(round), bytes([1, 1, 1, 2, 0]))


def tx(statement: Statement, key: SigningKey = KEY) -> bytes:
    return sign(statement, key)


def said(statement: Statement) -> Broadcast:
    return Broadcast(TRANSACTION + tx(statement))


def vote(kind: Kind = Kind.PREPARE, digest: bytes = b"\6" * 32) -> Vote:
    return sign_vote(KEY, RUN, ME, kind, Height(3), View(1), digest)


def statements(effects: Sequence[Effect]) -> list[Statement]:
    return [
        parse(e.message[1:]).statement
        for e in effects
        if isinstance(e, Send | Broadcast) and e.message[:1] == TRANSACTION
    ]


# --- the base ---------------------------------------------------------------------------------


def test_the_base_changes_nothing_and_shows_its_machine() -> None:
    class Honest(Agent):
        name = "honest"

    script = Script(wakes=4.0)
    honest = Honest(script, name=ME, keys=KEY, seed=b"", peers=PEERS)
    effects = [Persist("votes", b"x"), said(commitment(0)), Send(PEERS[0], b"y")]
    assert passed(honest, *effects) == effects
    assert script.heard == [Tick()]
    assert honest.deadline() == 4.0
    assert honest.application.state.genesis.run_id == RUN
    assert script.screen(tx(opening(0)))
    assert "\0" * 32 not in repr(honest)


@pytest.mark.parametrize("name", AGENTS)
def test_agents_are_deterministic_and_let_persisted_records_be(name: str) -> None:
    effects: list[Effect] = [Persist("statements", tx(opening(2)))]
    for round in range(3):
        effects += [said(commitment(round)), said(opening(round)), said(attestation(round))]
        effects += [Broadcast(LEDGER + encode(vote())), OfferPayload(Round(round), b"r" * 32, 9)]

    def run() -> list[Effect]:
        liar = agent(name)
        started = liar.start(0.0)
        return [*started, *passed(liar, *effects, now=0.1), *passed(liar, now=60.0)]

    first = run()
    assert first == run()
    if name != "crasher":  # its machine is not even asked while it is down
        assert effects[0] in first


# --- those that sign two things ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("round", "statement"),
    [(0, attestation(0)), (1, commitment(1)), (2, opening(2))],
)
def test_equivocator_shows_each_half_another_signed_statement(
    round: int, statement: Statement
) -> None:
    sent = passed(agent("equivocator"), said(statement))
    assert [e.to for e in sent if isinstance(e, Send)] == ["anna", "bert", "mate", "zoe"]
    first, second = ({e.message[1:] for e in half} for half in (sent[:2], sent[2:]))  # type: ignore[union-attr]
    assert first == {tx(statement)}
    evidence = Evidence(Fault.EQUIVOCATION, ME, round, (*first, *second))
    assert check_equivocation(evidence, KEY.public)


def test_equivocator_is_honest_in_the_other_slots() -> None:
    for statement in (commitment(0), opening(1), Ready(*head(0))):
        assert passed(agent("equivocator"), said(statement)) == [said(statement)]


def test_bad_opener_leaves_a_pair_that_convinces_offline() -> None:
    liar = agent("bad_opener")
    sent = passed(liar, said(commitment(1)), said(opening(1)))
    pair = tuple(e.message[1:] for e in sent)  # type: ignore[union-attr]
    assert pair[0] == tx(commitment(1))
    evidence = Evidence(Fault.BAD_OPENING, ME, 1, pair)
    assert check_bad_opening(evidence, KEY.public)
    assert liar.hands_in(tx(commitment(1)))
    assert not liar.hands_in(tx(opening(1)))


@pytest.mark.parametrize("kind", [Kind.PREPARE, Kind.FINALIZE])
def test_double_voter_sends_a_second_valid_vote_in_the_slot(kind: Kind) -> None:
    own = Broadcast(LEDGER + encode(vote(kind)))
    sent = passed(agent("double_voter"), own)
    assert sent[0] == own
    second = decode_message(sent[1].message[1:])  # type: ignore[attr-defined]
    assert isinstance(second, Vote)
    assert check_double_vote(double_vote(RUN, vote(kind), second), KEY.public, RUN)


def test_double_voter_proposes_once() -> None:
    own = Broadcast(LEDGER + encode(vote(Kind.PROPOSE)))
    assert passed(agent("double_voter"), own) == [own]


# --- those that leave out ---------------------------------------------------------------------


def test_withholder_commits_and_never_opens() -> None:
    liar = agent("withholder")
    offer = OfferPayload(Round(1), b"r" * 32, 9)
    sent = passed(liar, said(commitment(1)), said(opening(1)), offer, said(attestation(1)))
    assert sent == [said(commitment(1)), said(attestation(1))]
    assert not liar.machine.screen(tx(opening(1)))  # type: ignore[attr-defined]


def test_flickerer_is_absent_every_third_round() -> None:
    liar = agent("flickerer")
    rounds = [statements(passed(liar, said(commitment(r)), said(opening(r)))) for r in range(7)]
    assert [len(said) for said in rounds] == [2, 2, 0, 2, 2, 0, 2]
    assert passed(liar, said(attestation(2))) == [said(attestation(2))]


def test_silent_validator_contributes_but_neither_closes_nor_attests() -> None:
    liar = agent("silent_validator")
    closing = Closing(*head(0), "open", b"\1")
    offer = OfferPayload(Round(0), b"r" * 32, 9)
    sent = passed(liar, said(commitment(0)), said(closing), said(attestation(0)), offer)
    assert sent == [said(commitment(0)), offer]
    assert not liar.hands_in(tx(closing))


def test_omissions_concern_only_own_statements() -> None:
    foreign = Broadcast(
        TRANSACTION + tx(opening(0).__class__(*head(0, "anna"), *_tail(opening(0))))
    )
    for name in ("withholder", "flickerer", "silent_validator", "bad_opener", "equivocator"):
        assert passed(agent(name), foreign) == [foreign]


def _tail(statement: Opening) -> tuple[Any, ...]:
    return tuple(getattr(statement, name) for name in statement.__struct_fields__[5:])


# --- those that misuse the network --------------------------------------------------------------


def test_straggler_sends_everything_late_and_in_order() -> None:
    liar = agent("straggler", strength=7.0)
    offer = OfferPayload(Round(0), b"r" * 32, 9)
    record = Persist("votes", b"v")
    assert passed(liar, record, said(commitment(0)), offer, now=1.0) == [record]
    assert passed(liar, said(opening(0)), now=2.0) == []
    assert liar.deadline() == 8.0
    assert passed(liar, now=8.0) == [said(commitment(0)), offer]
    assert liar.deadline() == 9.0
    assert passed(liar, now=9.5) == [said(opening(0))]
    assert liar.deadline() is None


def test_held_back_effects_are_bounded() -> None:
    liar = agent("straggler")
    passed(liar, *(Broadcast(bytes([0, i % 256])) for i in range(MAX_SCHEDULED + 50)))
    assert len(passed(liar, now=1e6)) == MAX_SCHEDULED


def test_crasher_hears_and_says_nothing_while_down_but_keeps_what_its_host_told() -> None:
    script = Script()
    liar = agent("crasher", script)
    liar.start(0.0)
    down = liar.deadline()
    assert down is not None
    script.wakes = down + 1e-3
    stored = PayloadStored(Round(0), PEERS[0], b"r" * 32)
    script.effects = [said(commitment(0))]
    assert liar.handle(Received(PEERS[0], b"lost"), down) == []
    assert liar.handle(stored, down) == []
    assert script.heard == []
    up = liar.deadline()
    assert up is not None
    assert up > down
    assert liar.handle(Tick(), up) == [said(commitment(0))]
    assert script.heard == [stored, Tick()]


def test_crasher_goes_up_and_down_at_other_moments_for_another_peer() -> None:
    def moments(name: str) -> list[float]:
        liar = agent("crasher", name=PeerId(name))
        liar.start(0.0)
        found: list[float] = []
        for _ in range(20):
            at = liar.deadline()
            assert at is not None
            found.append(at)
            liar.handle(Tick(), at)
        return found

    first, second = moments("liar"), moments("mate")
    assert first == sorted(first)
    assert set(first).isdisjoint(second)


def test_replayer_repeats_own_and_foreign_bytes_and_its_last_payload() -> None:
    liar = agent("replayer")
    foreign = [TRANSACTION + b"tx", LEDGER + b"vote", ROUND + b"root"]
    for message in foreign:
        assert liar.handle(Received(PEERS[0], message), 0.0) == []
    first, second = (OfferPayload(Round(r), bytes([r]) * 32, 9) for r in (0, 1))
    passed(liar, said(commitment(0)), first)
    sent = passed(liar, second)
    assert sent[-2:] == [first, second]
    assert {e.message for e in sent if isinstance(e, Broadcast)} == {
        *foreign,
        said(commitment(0)).message,
    }
    for i in range(5 * REMEMBERED):
        liar.handle(Received(PEERS[0], TRANSACTION + bytes([i % 256, i // 256])), 0.0)
    assert len(passed(liar, second)) <= REMEMBERED + 6


def test_forger_names_honest_peers_under_signatures_that_are_not_theirs() -> None:
    liar = agent("forger")
    sent = passed(liar, said(commitment(0)), Broadcast(LEDGER + encode(vote())))
    forged = [s for s in statements(sent) if s.author != ME]
    assert {s.author for s in forged} <= {"anna", "bert", "zoe"}
    assert len(forged) == 2
    publics = {name: SigningKey.derive(bytes(32), name).public for name in PEERS}
    for effect in sent:
        assert isinstance(effect, Broadcast)
        if effect.message[:1] == LEDGER:
            message = decode_message(effect.message[1:])
            assert isinstance(message, Vote)
            assert vote_is_signed(publics[message.author], RUN, message) == (message.author == ME)  # type: ignore[index]
        else:
            parsed = parse(effect.message[1:])
            author = parsed.statement.author
            assert parsed.signed_by(publics[author]) == (author == ME)  # type: ignore[index]


def test_selective_sender_offers_to_one_honest_peer() -> None:
    liar = agent("selective_sender")
    for round in range(8):
        (offer,) = passed(liar, OfferPayload(Round(round), b"r" * 32, 9))
        assert isinstance(offer, OfferPayload)
        assert len(offer.to) == 1
        assert set(offer.to) <= {"anna", "bert", "zoe"}


def test_oversized_claims_too_much_and_spams() -> None:
    script = Script()
    liar = agent("oversized", script)
    liar.handle(Trained(Round(0), 1000, b"r" * 32, b"t" * 32), 0.0)
    assert script.heard == [Trained(Round(0), OVERSIZED_LENGTH, b"r" * 32, b"t" * 32)]
    sent = passed(liar, OfferPayload(Round(0), b"r" * 32, OVERSIZED_LENGTH))
    assert all(isinstance(e, Broadcast) and len(e.message) > MAX_ITEM_BYTES for e in sent)
    assert len(sent) == 2


def test_censoring_leader_never_hears_its_victim_nor_proposals_that_do() -> None:
    script = Script()
    liar = agent("censoring_leader", script)

    def proposal(*txs: bytes) -> bytes:
        block = Block(1, RUN, Height(3), bytes(32), bytes(32), "bert", txs)
        leader = sign_vote(
            KEY, RUN, PEERS[1], Kind.PROPOSE, Height(3), View(1), block_digest(block)
        )
        return LEDGER + encode(Proposal(leader, block, None))

    item = {n: tx(Ready(*head(0, n)), SigningKey.derive(bytes(32), n)) for n in ("anna", "bert")}
    kept = [TRANSACTION + item["bert"], proposal(item["bert"]), LEDGER + encode(vote()), b"?"]
    dropped = [TRANSACTION + item["anna"], proposal(item["bert"], item["anna"])]
    for message in (*kept, *dropped):
        liar.handle(Received(PEERS[1], message), 0.0)
    assert [e.message for e in script.heard] == kept
