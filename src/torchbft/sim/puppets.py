"""One real validator among puppets: a test holds all keys and says what the others send, and when.

For tests of single steps, where a cluster would decide too much by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Broadcast, Effect, Persist, Received, Send, Tick
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import Wire, encode
from torchbft.protocols.ledger.certificates import (
    Validator,
    ValidatorSet,
    make_certificate,
    make_timeout_certificate,
)
from torchbft.protocols.ledger.machine import LedgerMachine
from torchbft.protocols.ledger.messages import (
    NO_DIGEST,
    Block,
    Certificate,
    FinalizedBlock,
    Kind,
    Message,
    Proposal,
    Timeout,
    TimeoutCertificate,
    Transaction,
    Vote,
    block_digest,
    decode_message,
    sign_vote,
)
from torchbft.protocols.ledger.state import LedgerConfig
from torchbft.sim.cluster import Records
from torchbft.sim.toy import ToyApplication

_T = TypeVar("_T")


class Puppets:
    """Validators ``p0`` to ``p{n-1}``; ``p{me}`` is real. At height h, view v, ``p{(h+v) % n}``
    leads. ``effects`` holds what the last input caused; ``records`` what was persisted."""

    def __init__(
        self,
        n: int = 4,
        *,
        me: int = 0,
        gate: Callable[[Sequence[bytes]], bool] = lambda pending: True,
        proposal_wait: float = 0.5,
    ) -> None:
        self.run_id = sha256("sim/puppets")
        self.names = tuple(PeerId(f"p{i}") for i in range(n))
        self.keys = {name: SigningKey.derive(bytes(32), name) for name in self.names}
        self.validators = ValidatorSet(Validator(n, k.public) for n, k in self.keys.items())
        self.me = self.names[me]
        self.others = tuple(name for name in self.names if name != self.me)
        self.quorum = self.validators.faults.quorum
        self.config = LedgerConfig(self.run_id, self.me, proposal_wait=proposal_wait)
        self._gate = gate
        self.records: dict[str, list[bytes]] = {}
        self.now = 0.0
        self.effects: list[Effect] = []
        self.restart()

    def restart(self, records: Records | None = None) -> list[Effect]:
        """Forget the machine and start one from these records, or from all that was persisted."""
        self.records = {log: list(kept) for log, kept in (records or self.records).items()}
        self.application = ToyApplication()
        key = self.keys[self.me]
        arguments = (self.config, key, self.validators, self.application, self._gate)
        self.machine = LedgerMachine(*arguments, self.records)
        return self._keep(self.machine.start(self.now))

    def _keep(self, effects: list[Effect]) -> list[Effect]:
        self.effects = effects
        for effect in effects:
            if isinstance(effect, Persist):
                self.records.setdefault(effect.log, []).append(effect.record)
        return effects

    # -- inputs

    def give(self, sender: PeerId, message: Wire) -> list[Effect]:
        """Let the real validator receive a message."""
        return self.give_bytes(sender, encode(message))

    def give_bytes(self, sender: PeerId, data: bytes) -> list[Effect]:
        """Let it receive any bytes."""
        return self._keep(self.machine.handle(Received(sender, data), self.now))

    def give_tx(self, tx: bytes, sender: PeerId | None = None) -> list[Effect]:
        """Let it receive a transaction."""
        return self._keep(self.machine.handle(Transaction(tx, sender), self.now))

    def wait(self, seconds: float) -> list[Effect]:
        """Let time pass, with a tick at each deadline; all effects of that."""
        end, effects = self.now + seconds, list[Effect]()
        while (deadline := self.machine.deadline()) is not None and deadline <= end:
            self.now = max(self.now, deadline)
            effects += self._keep(self.machine.handle(Tick(), self.now))
        self.now, self.effects = end, effects
        return effects

    # -- what puppets sign

    def leader(self, view: int = 0) -> PeerId:
        """The leader of a view at the current height, while no leader has failed."""
        return self.names[(self.machine.height + view) % len(self.names)]

    def block(self, *txs: bytes, view: int = 0) -> Block:
        """A block on the real validator's tip by the leader of a view."""
        return self.machine.tip.block(self.run_id, self.leader(view), txs or (b"tx",))

    def vote(
        self,
        author: PeerId,
        kind: Kind,
        digest: bytes = NO_DIGEST,
        *,
        view: int = 0,
        height: int | None = None,
        high: int = 0,
    ) -> Vote:
        """A vote by any validator."""
        at = Height(self.machine.height if height is None else height)
        slot = (kind, at, View(view))
        return sign_vote(self.keys[author], self.run_id, author, *slot, digest, View(high))

    def proposal(
        self, block: Block, *, view: int = 0, justification: TimeoutCertificate | None = None
    ) -> Proposal:
        """A proposal by the leader of a view."""
        vote = self.vote(self.leader(view), Kind.PROPOSE, block_digest(block), view=view)
        return Proposal(vote, block, justification)

    def certificate(
        self, kind: Kind, digest: bytes, *, view: int = 0, signers: Sequence[PeerId] | None = None
    ) -> Certificate:
        """Votes of the first n−f puppets, or of these signers."""
        chosen = self.others[: self.quorum] if signers is None else signers
        votes = {name: self.vote(name, kind, digest, view=view) for name in chosen}
        return make_certificate(votes, self.validators)

    def timeout(
        self, author: PeerId, view: int = 0, prepared: Certificate | None = None
    ) -> Timeout:
        """A time-out by a puppet."""
        high = 0 if prepared is None else prepared.view + 1
        return Timeout(self.vote(author, Kind.TIME_OUT, view=view, high=high), prepared)

    def timeouts(self, view: int = 0, prepared: Certificate | None = None) -> TimeoutCertificate:
        """Time-outs of the first n−f puppets in a view."""
        chosen = self.others[: self.quorum]
        votes = {name: self.timeout(name, view, prepared).vote for name in chosen}
        return make_timeout_certificate(votes, self.validators, prepared)

    def finalized(self, block: Block, *, view: int = 0) -> FinalizedBlock:
        """A block with a finalize certificate of puppets."""
        return FinalizedBlock(
            block, self.certificate(Kind.FINALIZE, block_digest(block), view=view)
        )

    # -- what the real validator did

    def sent(self, type_: type[_T]) -> list[_T]:
        """Messages of a type that the last input caused."""
        return [m for _, m in self.posts() if isinstance(m, type_)]

    def posts(self) -> Iterable[tuple[PeerId | None, Message]]:
        """All messages that the last input caused, each with its receiver (None: all)."""
        for effect in self.effects:
            if isinstance(effect, Send | Broadcast):
                to = effect.to if isinstance(effect, Send) else None
                yield to, decode_message(effect.message)

    def voted(self, kind: Kind) -> list[Vote]:
        """Votes of a kind, the real validator's own, that the last input made it send."""
        votes = self.sent(Vote)
        votes += [m.vote for m in self.sent(Proposal)] + [m.vote for m in self.sent(Timeout)]
        return [vote for vote in votes if vote.kind is kind and vote.author == self.me]

    def applied(self, type_: type[_T]) -> list[_T]:
        """Apply effects of a type that the last input caused."""
        return [effect for effect in self.effects if isinstance(effect, type_)]
