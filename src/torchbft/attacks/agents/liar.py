"""A whole peer in a liar's hands: what a host builds in the place of a ``PeerMachine``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torchbft.attacks.agents.agent import Agent, Screened
from torchbft.primitives.effects import Effect, Received, Tick
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.ledger.catchup import Older
from torchbft.protocols.ledger.messages import Transaction
from torchbft.protocols.peer import PeerMachine

Records = Mapping[str, Sequence[bytes]]
BuildPeer = Callable[[RunSpec, PeerId, SigningKey, bytes, Records, Older | None], Agent]
"""Called like ``PeerMachine``: run, me, key, secret, records, older."""


class LiarPeer(Screened, PeerMachine):
    """An honest peer but for two things: it does not stop when it sees statements of its own key
    that it did not log, and its own engine gets an own transaction only if ``screen`` lets it."""

    def __init__(
        self,
        run: RunSpec,
        me: PeerId,
        key: SigningKey,
        secret: bytes,
        records: Records,
        older: Older | None = None,
    ) -> None:
        self.screen = lambda tx: True
        super().__init__(run, me, key, secret, records, older)
        self._round._guard_log = False

    def _to_ledger(self, event: Received | Transaction | Tick, now: float) -> list[Effect]:
        if (
            isinstance(event, Transaction)
            and event.sender in (None, self._me)
            and not self.screen(event.tx)
        ):
            return []
        return super()._to_ledger(event, now)


def builder(
    agent: type[Agent], *, seed: bytes, liars: Iterable[PeerId], strength: float | None = None
) -> BuildPeer:
    """A function to be called in the place of ``PeerMachine``; it gives the agent around a peer.

    seed: of the whole attack; each liar derives its own from it and its name.
    """
    accomplices = tuple(liars)

    def build(
        run: RunSpec,
        me: PeerId,
        key: SigningKey,
        secret: bytes,
        records: Records,
        older: Older | None = None,
    ) -> Agent:
        return agent(
            LiarPeer(run, me, key, secret, records, older),
            name=me,
            keys=key,
            seed=seed,
            peers=[PeerId(member.name) for member in run.members],
            liars=accomplices,
            strength=strength,
        )

    return build
