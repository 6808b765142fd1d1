"""One peer of a run as a single sans-I/O machine: ordering engine, application and round composed.

The protocols never import each other; what one wants of the other passes through here. A message on
the control channel starts with one byte that says for whom it is. Transactions are sent to every
member by their author and handed to each peer's own ordering engine (ROUND.md 18). That engine is
the embedded ledger (``PeerMachine``) or stands outside (``OrderedPeer``); ``peer_of`` builds what a
run file names, and all that does not order blocks is the same code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torchbft.primitives.abci import CODE_OK
from torchbft.primitives.effects import Broadcast, Effect, Received, Send, Tick
from torchbft.primitives.errors import DecodeError, StorageError
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import KeyRing, SigningKey
from torchbft.primitives.runspec import RunSpec
from torchbft.primitives.wire import encode
from torchbft.protocols.chain import evidence as chain
from torchbft.protocols.chain.messages import chain_id_of
from torchbft.protocols.ledger import machine as ledger
from torchbft.protocols.ledger import state as ledger_effects
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
    """Apply effect: a block was finalized, with its size in bytes; for traces. ``view`` is 0 where
    an engine outside does not tell it."""

    height: Height
    view: int
    txs: int
    size: int
    seconds: float
    events: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class CommitBlock:
    """Input: an engine outside commits the block that the application has just finalized: how many
    transactions of how many bytes, seconds since the first of them was seen, and the application's
    events."""

    txs: int
    size: int
    seconds: float
    events: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class SnapshotTaken:
    """Input: the engine outside has brought the application to the state of a snapshot."""


@dataclass(frozen=True, slots=True)
class EngineStarted:
    """Input: an engine outside is up, and may have forgotten every transaction."""


@dataclass(frozen=True, slots=True)
class Order:
    """Apply effect: hand this transaction to the engine outside. Already known is no error; while
    the engine is down it is lost, until ``EngineStarted``."""

    tx: bytes


@dataclass(frozen=True, slots=True)
class SaveApplication:
    """Apply effect: replace the saved state of the application by this one, durably, before any
    later effect is carried out."""

    record: bytes


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
    """All evidence that convicts, that of whatever orders the blocks included."""
    run_id, outside = run.run_id, run.ledger.kind == "cometbft"

    def double_vote(evidence: Evidence, public: bytes) -> bool:
        if outside:
            return chain.check_double_vote(evidence, public, chain_id_of(run_id))
        return check_double_vote(evidence, public, run_id)

    return {**OWN_CHECKS, Fault.DOUBLE_VOTE: double_vote}


def genesis_config(run: RunSpec) -> GenesisConfig:
    """What the application of a run starts from, under either engine."""
    return GenesisConfig.from_run(run)


def application_of(run: RunSpec) -> Application:
    """The application at genesis."""
    genesis = genesis_config(run)
    application = Application(genesis, checks_of(run))
    application.init_chain(encode(genesis))
    return application


class ComposedPeer:
    """``start``, ``handle`` and ``deadline`` of a whole peer, whatever orders its blocks.

    ``key`` is the voting key, or a ring of an old and a new one; ``secret`` 32 bytes from which
    salts and shares are derived; ``records`` what was persisted before a restart, by log:
    ``statements`` and the engine's. Takes ``Received``, ``Tick`` and all inputs of
    ``protocols.round.interface`` but ``LedgerAdvanced`` and ``Heard``.
    Gives the effects of ``primitives.effects``, the round's apply effects, ``BlockDone`` and
    ``Suspected``.
    """

    def __init__(
        self,
        run: RunSpec,
        me: PeerId,
        key: SigningKey | KeyRing,
        secret: bytes,
        records: Mapping[str, Sequence[bytes]],
    ) -> None:
        self._me, self.application = me, application_of(run)
        keys = KeyRing.of(key)
        self._catch_up(run, keys, records)
        self._round = RoundMachine(
            RoundConfig(me, run.timing),
            keys,
            secret,
            self.application,
            records.get("statements", ()),
        )

    def _catch_up(
        self, run: RunSpec, keys: KeyRing, records: Mapping[str, Sequence[bytes]]
    ) -> None:
        """Bring the application to where the engine's records leave it."""
        raise NotImplementedError

    @property
    def height(self) -> Height:
        """Of the last finalized block."""
        return self.application.info().last_height

    def last_commitment(self, number: int) -> float | None:
        """When this peer had heard the last commitment of a round, so far."""
        return self._round.last_arrival(number, "commit")

    def start(self, now: float) -> list[Effect]:
        """First call: what is to be sent after a start or restart."""
        return self._routed(_tagged(ROUND, self._round.start(now)), now)

    def handle(self, event: object, now: float) -> list[Effect]:
        """Take in one input; see the class for what it may be."""
        return self._routed(self._taken(event, now), now)

    def deadline(self) -> float | None:
        """When to call ``handle(Tick())`` at the latest."""
        return self._round.deadline()

    def _taken(self, event: object, now: float) -> list[Effect]:
        if isinstance(event, Received):
            return self._received(event, now)
        if isinstance(event, Tick):
            return self._ticked(event, now)
        return self._to_round(event, now)

    def _ticked(self, event: Tick, now: float) -> list[Effect]:
        """Time passed: of use to a machine whose own deadline it is."""
        at = self._round.deadline()
        return self._to_round(event, now) if at is not None and at <= now else []

    def _to_round(self, event: object, now: float) -> list[Effect]:
        return _tagged(ROUND, self._round.handle(event, now))  # type: ignore[arg-type]

    def _received(self, event: Received, now: float) -> list[Effect]:
        kind, body = event.message[:1], event.message[1:]
        if kind == ROUND:
            return self._to_round(Received(event.sender, body), now)
        if kind == TRANSACTION:
            heard = self._to_round(rounds.Heard(body), now)
            return heard + self._order(body, event.sender, now)
        return [Suspected(event.sender, "malformed-message", "a control message for nobody")]

    def _routed(self, effects: list[Effect], now: float) -> list[Effect]:
        """Carry what one machine wants to the other until only the host's effects are left."""
        done: list[Effect] = []
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, rounds.Submit):
                done.append(Broadcast(TRANSACTION + effect.tx))
                queue.extend(self._order(effect.tx, self._me, now))
                continue
            for_host, more = self._passed_on(effect, now)
            done += for_host
            queue.extend(more)
        return done

    def _passed_on(self, effect: Effect, now: float) -> tuple[list[Effect], list[Effect]]:
        """What the host gets of an effect, and what else follows from it."""
        return [effect], []

    def _order(self, tx: bytes, sender: PeerId, now: float) -> list[Effect]:
        """Hand a transaction to this peer's own ordering engine."""
        raise NotImplementedError


class PeerMachine(ComposedPeer):
    """A peer under the embedded ledger, whose logs are ``votes`` and ``blocks``."""

    def _catch_up(
        self, run: RunSpec, keys: KeyRing, records: Mapping[str, Sequence[bytes]]
    ) -> None:
        self._ledger = ledger.LedgerMachine(
            ledger_effects.LedgerConfig(
                run_id=run.run_id,
                me=self._me,
                proposal_wait=run.ledger.proposal_wait,
                view_timeout=run.ledger.view_timeout,
                names=self.application.names,
            ),
            keys,
            validators_of(run),
            self.application,
            lambda pending: proposal_complete(self.application.state, pending),
            records,
        )

    @property
    def leader(self) -> PeerId:
        """Who may propose the next block, as this peer sees it."""
        return self._ledger.leader

    def start(self, now: float) -> list[Effect]:
        begun = _tagged(LEDGER, self._ledger.start(now))
        return self._routed(begun + _tagged(ROUND, self._round.start(now)), now)

    def deadline(self) -> float | None:
        times = (self._ledger.deadline(), self._round.deadline())
        return min((t for t in times if t is not None), default=None)

    def _taken(self, event: object, now: float) -> list[Effect]:
        known: list[Effect] = []
        if isinstance(event, rounds.KeyAdded):
            known = _tagged(LEDGER, self._ledger.add_key(event.key))
        return known + super()._taken(event, now)

    def _ticked(self, event: Tick, now: float) -> list[Effect]:
        at = self._ledger.deadline()
        effects = self._to_ledger(event, now) if at is not None and at <= now else []
        return effects + super()._ticked(event, now)

    def _received(self, event: Received, now: float) -> list[Effect]:
        if event.message[:1] == LEDGER:
            return self._to_ledger(Received(event.sender, event.message[1:]), now)
        return super()._received(event, now)

    def _to_ledger(self, event: Received | Transaction | Tick, now: float) -> list[Effect]:
        return _tagged(LEDGER, self._ledger.handle(event, now))

    def _order(self, tx: bytes, sender: PeerId, now: float) -> list[Effect]:
        return self._to_ledger(Transaction(tx, sender), now)

    def _passed_on(self, effect: Effect, now: float) -> tuple[list[Effect], list[Effect]]:
        if isinstance(effect, ledger_effects.Finalized):
            advanced = rounds.LedgerAdvanced(effect.height, effect.result.events)  # type: ignore[arg-type]
            return [_block_done(effect)], self._to_round(advanced, now)
        if isinstance(effect, ledger_effects.Accuse):
            return [], self._to_round(rounds.Found(effect.evidence), now)
        if isinstance(effect, ledger_effects.Suspect):
            return [Suspected(effect.peer, effect.fault, effect.reason)], []
        return [effect], []


class OrderedPeer(ComposedPeer):
    """A peer whose blocks are ordered by an engine outside, which calls ``application`` by ABCI.

    Its log ``application`` has at most one record, that of the newest ``SaveApplication``. Takes
    ``CommitBlock``, ``SnapshotTaken`` and ``EngineStarted`` as well, gives ``Order`` and
    ``SaveApplication`` as well.
    Raises StorageError if the saved state is of no use.
    """

    def _catch_up(
        self, run: RunSpec, keys: KeyRing, records: Mapping[str, Sequence[bytes]]
    ) -> None:
        for saved in records.get("application", ()):
            try:
                self.application.resume(saved)
            except DecodeError as error:
                raise StorageError(
                    error.what,
                    where="the saved state of the ledger",
                    hint="remove that file: the ordering engine hands its blocks over again",
                ) from None

    def _taken(self, event: object, now: float) -> list[Effect]:
        if isinstance(event, CommitBlock):
            return self._commit(event, now)
        if isinstance(event, SnapshotTaken):
            return self._advanced((), now)
        if isinstance(event, EngineStarted):
            return [Order(tx) for tx in self.application.pending()]
        return super()._taken(event, now)

    def _commit(self, block: CommitBlock, now: float) -> list[Effect]:
        height = self.application.commit()
        done = BlockDone(height, 0, block.txs, block.size, block.seconds, block.events)
        saved, *rest = self._advanced(block.events, now)
        return [saved, done, *rest]

    def _advanced(self, events: tuple[object, ...], now: float) -> list[Effect]:
        """The state is saved before anything that follows from it leaves this peer."""
        advanced = rounds.LedgerAdvanced(self.height, events)  # type: ignore[arg-type]
        return [SaveApplication(self.application.saved()), *self._to_round(advanced, now)]

    def _order(self, tx: bytes, sender: PeerId, now: float) -> list[Effect]:
        admitted = self.application.check_tx(tx).code == CODE_OK
        return [Order(tx)] if admitted else []


def peer_of(
    run: RunSpec,
    me: PeerId,
    key: SigningKey | KeyRing,
    secret: bytes,
    records: Mapping[str, Sequence[bytes]],
) -> PeerMachine | OrderedPeer:
    """The peer for the ordering engine that the run file names."""
    kind = OrderedPeer if run.ledger.kind == "cometbft" else PeerMachine
    return kind(run, me, key, secret, records)


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
