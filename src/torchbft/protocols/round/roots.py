"""Root votes heard on the control channel, and the certificate that a quorum of them makes."""

from __future__ import annotations

from torchbft.primitives.errors import DecodeError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.wire import WIRE_VERSION
from torchbft.protocols.round.messages import Parsed, RootCertificate, RootVote, parse, seat_map
from torchbft.protocols.round.state import RoundState


class RootVotes:
    """The first vote of each validator of one fixed round; at most one per seat is kept."""

    def __init__(self, fixed: RoundState) -> None:
        self.round = fixed
        self._votes: dict[str, tuple[bytes, bytes]] = {}

    def add(self, parsed: Parsed) -> str | None:
        """Count a vote; returns why it does not count, for one that its author never signed."""
        vote = parsed.statement
        seat = self.round.seat(vote.author)
        if not isinstance(vote, RootVote) or seat is None or not seat.validator:
            return "not a validator's root vote"
        if (vote.round, vote.epoch) != (self.round.number, self.round.epoch):
            return None
        if vote.author not in self._votes:
            if not parsed.signed_by(seat.voting):
                return "a root vote with a false signature"
            self._votes[vote.author] = (vote.root, parsed.signature)
        return None

    def by_root(self) -> dict[bytes, tuple[PeerId, ...]]:
        """Who signed what, in order of root."""
        found: dict[bytes, list[PeerId]] = {}
        for name, (root, _) in sorted(self._votes.items()):
            found.setdefault(root, []).append(PeerId(name))
        return {root: tuple(names) for root, names in sorted(found.items())}

    def agreed(self) -> bytes | None:
        """The root that a quorum signed."""
        for root, names in self.by_root().items():
            if self.round.power(set(names)) >= self.round.voting.quorum:
                return root
        return None

    def possible(self) -> bool:
        """Whether some root can still reach a quorum with the votes not heard."""
        silent = self.round.voting.n - self.round.power(set(self._votes))
        most = max((self.round.power(set(n)) for n in self.by_root().values()), default=0)
        return most + silent >= self.round.voting.quorum

    def missing(self) -> tuple[PeerId, ...]:
        return tuple(
            PeerId(seat.name) for seat in self.round.validators if seat.name not in self._votes
        )

    def certificate(self, author: PeerId, run_id: bytes, root: bytes) -> RootCertificate:
        """A quorum of equal votes, no more than it needs: the greatest powers first."""
        signers = sorted(
            (
                seat
                for seat in self.round.validators
                if self._votes.get(seat.name, (b"",))[0] == root
            ),
            key=lambda seat: (-seat.power, seat.name),
        )
        power, chosen = 0, set()
        for seat in signers:
            if power >= self.round.voting.quorum:
                break
            power += seat.power
            chosen.add(seat.name)
        names = [seat.name for seat in self.round.seats]
        indices = {names.index(name) for name in chosen}
        return RootCertificate(
            WIRE_VERSION,
            run_id,
            self.round.epoch,
            self.round.number,
            author,
            root,
            seat_map(indices, len(names)),
            b"".join(self._votes[name][1] for name in names if name in chosen),
        )


def read_vote(message: bytes) -> Parsed | None:
    """A message as a statement, or None if it is none."""
    try:
        return parse(message)
    except DecodeError:
        return None
