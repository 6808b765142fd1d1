"""One peer of a run as a single sans-I/O machine: ledger, application and round composed.

The two protocols never import each other; what one wants of the other passes through here. A
message on the control channel starts with one byte that says for whom it is. Transactions are sent
to every member by their author and handed to each peer's own ordering engine, so that nothing here
depends on which engine that is (ROUND.md 18).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchbft.primitives.effects import Broadcast, Effect, Received, Send, Tick
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger import machine as ledger
from torchbft.protocols.ledger import state as ledger_effects
from torchbft.protocols.ledger.catchup import Older
from torchbft.protocols.ledger.certificates import Validator, ValidatorSet, check_double_vote
from torchbft.protocols.ledger.messages import Transaction
from torchbft.protocols.round import interface as rounds
from torchbft.protocols.round.admissible import OWN_CHECKS, EvidenceChecks
from torchbft.protocols.round.application import Application, proposal_complete
from torchbft.protocols.round.machine import RoundConfig, RoundMachine
from torchbft.protocols.round.state import GenesisConfig

LEDGER, ROUND, TRANSACTION = b"\x00", b"\x01", b"\x02"
"""First byte of a control message: the ordering engine's, the round's, or a transaction."""


@dataclass(frozen=True, slots=True)
class BlockDone:
    """Apply effect: a block was finalized, with its size in bytes; for traces."""

    height: Height
    view: int
    txs: int
    size: int
    seconds: float
    events: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Suspected:
    """Apply effect: a peer sent what no honest one sends, but which proves nothing to others."""

    peer: PeerId
    fault: str
    reason: str


def validators_of(run: RunSpec) -> ValidatorSet:
    """The ledger's validators in the first epoch."""
    return ValidatorSet(
        Validator(PeerId(member.name), bytes.fromhex(member.voting), member.power)
        for member in run.validators
    )


def checks_of(run: RunSpec) -> EvidenceChecks:
    """All evidence that convicts, the ledger's own included."""
    run_id = run.run_id

    def double_vote(evidence: Evidence, public: bytes) -> bool:
        return check_double_vote(evidence, public, run_id)

    return {**OWN_CHECKS, Fault.DOUBLE_VOTE: double_vote}


def application_of(run: RunSpec) -> Application:
    """The application at genesis."""
    genesis = GenesisConfig.from_run(run)
    application = Application(genesis, checks_of(run))
    application.init_chain(encode(genesis))
    return application


class PeerMachine:
    """``start``, ``handle`` and ``deadline`` of a whole peer.

    ``key`` is the voting key, ``secret`` 32 bytes from which salts and shares are derived;
    ``records`` the logs ``votes``, ``blocks`` and ``statements`` from before a restart. Takes
    ``Received``, ``Tick`` and all inputs of ``protocols.round.interface`` but
    ``LedgerAdvanced`` and ``Heard``. Gives the effects of ``primitives.effects``, the
    round's apply effects, ``BlockDone`` and ``Suspected``.
    """

    def __init__(
        self,
        run: RunSpec,
        me: PeerId,
        key: SigningKey,
        secret: bytes,
        records: Mapping[str, Sequence[bytes]],
        older: Older | None = None,
    ) -> None:
        self._me = me
        self.application = application_of(run)
        self._ledger = ledger.LedgerMachine(
            ledger_effects.LedgerConfig(
                run_id=run.run_id,
                me=me,
                proposal_wait=run.ledger.proposal_wait,
                view_timeout=run.ledger.view_timeout,
            ),
            key,
            validators_of(run),
            self.application,
            lambda pending: proposal_complete(self.application.state, pending),
            records,
            older,
        )
        self._round = RoundMachine(
            RoundConfig(me, run.timing),
            key,
            secret,
            self.application,
            records.get("statements", ()),
        )

    @property
    def height(self) -> Height:
        """Of the last finalized block."""
        return self._ledger.tip.height

    @property
    def leader(self) -> PeerId:
        """Who may propose the next block, as this peer sees it."""
        return self._ledger.leader

    def last_commitment(self, number: int) -> float | None:
        """When this peer had heard the last commitment of a round, so far."""
        return self._round.last_arrival(number, "commit")

    def start(self, now: float) -> list[Effect]:
        """First call: what is to be sent after a start or restart."""
        begun = _tagged(LEDGER, self._ledger.start(now))
        return self._routed(begun + _tagged(ROUND, self._round.start(now)), now)

    def handle(self, event: object, now: float) -> list[Effect]:
        """Take in one input; see the class for what it may be."""
        if isinstance(event, Tick):
            effects = self._ticked(event, now)
        elif isinstance(event, Received):
            effects = self._received(event, now)
        else:
            effects = self._to_round(event, now)
        return self._routed(effects, now)

    def _ticked(self, event: Tick, now: float) -> list[Effect]:
        """Time passed: of use to a machine whose own deadline it is."""
        ledger_at, round_at = self._ledger.deadline(), self._round.deadline()
        effects: list[Effect] = []
        if ledger_at is not None and ledger_at <= now:
            effects += self._to_ledger(event, now)
        if round_at is not None and round_at <= now:
            effects += self._to_round(event, now)
        return effects

    def deadline(self) -> float | None:
        """When to call ``handle(Tick())`` at the latest."""
        times = (self._ledger.deadline(), self._round.deadline())
        return min((t for t in times if t is not None), default=None)

    def _to_ledger(self, event: Received | Transaction | Tick, now: float) -> list[Effect]:
        return _tagged(LEDGER, self._ledger.handle(event, now))

    def _to_round(self, event: object, now: float) -> list[Effect]:
        return _tagged(ROUND, self._round.handle(event, now))  # type: ignore[arg-type]

    def _received(self, event: Received, now: float) -> list[Effect]:
        kind, body = event.message[:1], event.message[1:]
        if kind == LEDGER:
            return self._to_ledger(Received(event.sender, body), now)
        if kind == ROUND:
            return self._to_round(Received(event.sender, body), now)
        if kind == TRANSACTION:
            heard = self._to_round(rounds.Heard(body), now)
            return heard + self._to_ledger(Transaction(body, event.sender), now)
        return [Suspected(event.sender, "malformed-message", "a control message for nobody")]

    def _routed(self, effects: list[Effect], now: float) -> list[Effect]:
        """Carry what one machine wants to the other until only the host's effects are left."""
        done: list[Effect] = []
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, rounds.Submit):
                done.append(Broadcast(TRANSACTION + effect.tx))
                queue.extend(self._to_ledger(Transaction(effect.tx, self._me), now))
            elif isinstance(effect, ledger_effects.Finalized):
                done.append(_block_done(effect))
                advanced = rounds.LedgerAdvanced(effect.height, effect.result.events)  # type: ignore[arg-type]
                queue.extend(self._to_round(advanced, now))
            elif isinstance(effect, ledger_effects.Accuse):
                queue.extend(self._to_round(rounds.Found(effect.evidence), now))
            elif isinstance(effect, ledger_effects.Suspect):
                done.append(Suspected(effect.peer, effect.fault, effect.reason))
            else:
                done.append(effect)
        return done


def _tagged(kind: bytes, effects: list[Effect]) -> list[Effect]:
    """The effects with the byte that says for whom a message is."""
    return [_tag(kind, effect) for effect in effects]


def _tag(kind: bytes, effect: Effect) -> Effect:
    if isinstance(effect, Broadcast):
        return Broadcast(kind + effect.message)
    if isinstance(effect, Send):
        return Send(effect.to, kind + effect.message)
    return effect


def _block_done(effect: ledger_effects.Finalized) -> BlockDone:
    txs = effect.block.txs
    return BlockDone(
        effect.height,
        effect.view,
        len(txs),
        sum(map(len, txs)),
        effect.seconds_pending,
        effect.result.events,
    )
