"""A whole peer in a liar's hands: what a host builds in the place of ``peer_of``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from torchbft.attacks.agents.agent import Agent, Screened
from torchbft.primitives.effects import Effect
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.peer import ComposedPeer, OrderedPeer, PeerMachine

Records = Mapping[str, Sequence[bytes]]
BuildPeer = Callable[[RunSpec, PeerId, SigningKey, bytes, Records], Agent]
"""Called like ``peer_of``: run, me, key, secret, records."""


class _Lying(Screened, ComposedPeer):
    """An honest peer but for two things: it does not stop when it sees statements of its own key
    that it did not log, and its own engine gets an own transaction only if ``screen`` lets it."""

    def __init__(
        self, run: RunSpec, me: PeerId, key: SigningKey, secret: bytes, records: Records
    ) -> None:
        self.screen = lambda tx: True
        super().__init__(run, me, key, secret, records)
        self._round._guard_log = False

    def _order(self, tx: bytes, sender: PeerId, now: float) -> list[Effect]:
        if sender == self._me and not self.screen(tx):
            return []
        return super()._order(tx, sender, now)


class LiarPeer(_Lying, PeerMachine):
    """Under the embedded ledger."""


class OrderedLiar(_Lying, OrderedPeer):
    """Under an engine outside."""


def builder(
    agent: type[Agent], *, seed: bytes, liars: Iterable[PeerId], strength: float | None = None
) -> BuildPeer:
    """A function to be called in the place of ``peer_of``; it gives the agent around a peer.

    seed: of the whole attack; each liar derives its own from it and its name.
    """
    accomplices = tuple(liars)

    def build(run: RunSpec, me: PeerId, key: SigningKey, secret: bytes, records: Records) -> Agent:
        liar = LiarPeer if run.ledger.kind == "embedded" else OrderedLiar
        return agent(
            liar(run, me, key, secret, records),
            name=me,
            keys=key,
            seed=seed,
            peers=[PeerId(member.name) for member in run.members],
            liars=accomplices,
            strength=strength,
        )

    return build
