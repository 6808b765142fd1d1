"""Effects of one input, collected in the order that the contract demands: persist, send, apply."""

from __future__ import annotations

from torchbft.primitives.effects import Broadcast, Effect, Persist, Send
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.wire import Wire, encode
from torchbft.protocols.ledger.certificates import double_vote
from torchbft.protocols.ledger.messages import Vote
from torchbft.protocols.ledger.state import Accuse, Suspect


class Outbox:
    """What a machine asks of its host. ``drain`` gives it away."""

    def __init__(self) -> None:
        self._persists: list[Effect] = []
        self._sends: list[Effect] = []
        self._applies: list[Effect] = []

    def persist(self, log: str, record: bytes) -> None:
        self._persists.append(Persist(log, record))

    def send(self, to: PeerId, message: Wire) -> None:
        self._sends.append(Send(to, encode(message)))

    def broadcast(self, message: bytes) -> None:
        self._sends.append(Broadcast(message))

    def apply(self, effect: Effect) -> None:
        self._applies.append(effect)

    def drain(self) -> list[Effect]:
        """All effects, in order; nothing is left."""
        effects = [*self._persists, *self._sends, *self._applies]
        self._persists, self._sends, self._applies = [], [], []
        return effects


class Accusations:
    """What was said about peers, so that each thing is said once."""

    def __init__(self, run_id: bytes, out: Outbox) -> None:
        self._run_id, self._out = run_id, out
        self._accused: set[str] = set()
        self._suspected: set[tuple[PeerId, str]] = set()
        self._shown: set[tuple[PeerId, Height, View]] = set()

    def knows(self, author: str) -> bool:
        """Whether evidence against this author was given already."""
        return author in self._accused

    def accuse(self, first: Vote, second: Vote) -> None:
        """Give evidence of two signed votes that contradict each other; once per author."""
        if first.author not in self._accused:
            self._accused.add(first.author)
            self._out.apply(Accuse(double_vote(self._run_id, first, second)))

    def suspect(self, peer: PeerId, fault: str, reason: str) -> None:
        """Report a fault that only we saw; once per peer and kind."""
        if (peer, fault) not in self._suspected:
            self._suspected.add((peer, fault))
            self._out.apply(Suspect(peer, str(fault), reason))

    def show(self, voter: PeerId, proposed: Vote) -> None:
        """Send a leader's vote to one who prepared another block; once per voter and view."""
        shown = (voter, proposed.height, proposed.view)
        if shown not in self._shown:
            self._shown.add(shown)
            self._out.send(voter, proposed)

    def next_height(self) -> None:
        """Forget what was shown at the height before."""
        self._shown.clear()
