"""Peers that lie in a round, each in one way. For the tests only."""

from __future__ import annotations

from msgspec.structs import replace
from round_swarm import HOP, Peer, Swarm

from torchbft.primitives.digests import sha256
from torchbft.primitives.wire import encode
from torchbft.protocols.round import interface as io
from torchbft.protocols.round import messages as m


class Liar(Peer):
    honest = False

    def kind(self, tx: bytes) -> str:
        return m.kind_of(m.parse(tx).statement)

    def again(self, tx: bytes, **fields: object) -> bytes:
        """The statement of a transaction with other content, signed."""
        statement = replace(m.parse(tx).statement, **fields)
        return m.sign(statement, self.swarm.world.keys[self.name])


class Absent(Liar):
    """Never there."""

    def start(self) -> None:
        pass


class Crasher(Liar):
    """Gone for good after a while."""

    gone_at = 0.35

    def start(self) -> None:
        super().start()
        self.swarm.at(self.gone_at, self.crash)


class Withholder(Liar):
    """Commits, never opens."""

    def submit(self, tx: bytes) -> None:
        if self.kind(tx) != "open":
            super().submit(tx)


class PayloadWithholder(Liar):
    """Opens, and keeps its payload to itself."""

    def serves(self, peer: Peer, root: bytes) -> bool:
        return peer is self or root != self.own_root(root)

    def own_root(self, root: bytes) -> bytes:
        rounds = range(self.swarm.world.genesis.rounds)
        return root if root in {self.payload_root(number) for number in rounds} else b""


class SelectiveSender(PayloadWithholder):
    """Gives its payload to one peer only."""

    def serves(self, peer: Peer, root: bytes) -> bool:
        return peer is self.swarm.honest[0] or super().serves(peer, root)


class Equivocator(Liar):
    """Shows half of the peers another commitment."""

    def submit(self, tx: bytes) -> None:
        if self.kind(tx) != "commit":
            return super().submit(tx)
        other = self.again(tx, digest=sha256("test/other"))
        for index, peer in enumerate(self.swarm.peers):
            shown = other if index % 2 else tx
            self.swarm.deliver(self, peer, lambda peer=peer, shown=shown: peer.hear(shown))
        return None


class BadOpener(Liar):
    """Opens to something else than it committed to."""

    def submit(self, tx: bytes) -> None:
        if self.kind(tx) == "open":
            tx = self.again(tx, payload_root=sha256("test/not-committed"))
        super().submit(tx)


class Malformed(Liar):
    """Sends a payload that does not decode."""

    payload_quality = "not-finite"


class Straggler(Liar):
    """Trains so slowly that it misses every window."""

    train_seconds = 30.0


class Flickerer(Liar):
    """Says nothing in every third round."""

    def submit(self, tx: bytes) -> None:
        if m.parse(tx).statement.round % 3 != 1:
            super().submit(tx)


class Silent(Liar):
    """Contributes, but neither closes nor attests nor votes on roots."""

    def submit(self, tx: bytes) -> None:
        if self.kind(tx) not in ("close", "attest", "rooted"):
            super().submit(tx)

    def broadcast(self, message: bytes) -> None:
        pass


class WrongRoot(Liar):
    """Votes for a root of its own."""

    def broadcast(self, message: bytes) -> None:
        super().broadcast(self.again(message, root=sha256("test/wrong-root")))


class EmptyCloser(Liar):
    """Closes both windows of every round at once, listing nothing, and holds nothing."""

    def tell(self, event: io.Input) -> None:
        super().tell(event)
        number = self.application.state.current.number if self.up else 0
        if self.up and (number, "early") not in self.said:
            self.said[(number, "early")] = set()
            for window in ("commit", "open"):
                super().submit(self.swarm.world.closing(self.name, number, window, ()))


class EmptyAttester(Liar):
    """Attests that everybody's payload is missing."""

    def submit(self, tx: bytes) -> None:
        if self.kind(tx) == "attest":
            statuses = m.parse(tx).statement.statuses
            tx = self.again(tx, statuses=bytes([m.Status.MISSING]) * len(statuses))
        super().submit(tx)


class Slanderer(Liar):
    """Attests that everybody's payload is malformed."""

    def submit(self, tx: bytes) -> None:
        if self.kind(tx) == "attest":
            statuses = m.parse(tx).statement.statuses
            tx = self.again(tx, statuses=bytes([m.Status.MALFORMED]) * len(statuses))
        super().submit(tx)


class Replayer(Liar):
    """Sends everybody's transactions again, under its own name, in other rounds and garbled."""

    def hear(self, tx: bytes) -> None:
        super().hear(tx)
        if self.swarm.random.random() < 0.3:
            statement = m.parse(tx).statement
            for forged in (
                tx,
                tx[:-1] + bytes([tx[-1] ^ 1]),
                self.again(tx, author=self.name),
                self.again(tx, round=statement.round + 1),
                encode(m.Signed(m.parse(tx).body, bytes(64))),
            ):
                for peer in self.swarm.peers:
                    self.swarm.deliver(self, peer, lambda p=peer, t=forged: p.hear_once(t))


class Censor(Liar):
    """As a leader leaves out the first honest peer's commitments, openings and closings."""

    def leave_out(self, tx: bytes) -> bool:
        return m.parse(tx).statement.author == self.swarm.honest[0].name


ALL = (
    Absent,
    Crasher,
    Withholder,
    PayloadWithholder,
    SelectiveSender,
    Equivocator,
    BadOpener,
    Malformed,
    Straggler,
    Flickerer,
    Silent,
    WrongRoot,
    EmptyCloser,
    EmptyAttester,
    Slanderer,
    Replayer,
    Censor,
)

__all__ = ["ALL", "HOP", "Swarm"]
