"""A run's keys and every statement its members could sign, honest or not. For the tests only."""

from __future__ import annotations

from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import WIRE_VERSION
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.admissible import root_vote_body
from torchbft.protocols.round.messages import SIGN_DOMAIN, Status, sign
from torchbft.protocols.round.reader import Applied, apply_block
from torchbft.protocols.round.state import (
    GenesisConfig,
    LedgerState,
    MemberConfig,
    genesis_state,
)

RUN = b"r" * 32


class World:
    """``n`` members, each contributor and validator of power 1, and one state to play on."""

    def __init__(self, n: int = 4, *, rounds: int = 8, f: int | None = None, **genesis: object):
        self.names = tuple(f"peer-{i}" for i in range(n))
        self.keys = {name: SigningKey.derive(b"k" * 32, name) for name in self.names}
        self.identities = {name: SigningKey.derive(b"i" * 32, name) for name in self.names}
        f = (n - 1) // 3 if f is None else f
        members = tuple(
            MemberConfig(name, self.identities[name].public, self.keys[name].public, 1, True, True)
            for name in self.names
        )
        fields: dict[str, object] = {
            "run_id": RUN,
            "genesis_seed": b"g" * 32,
            "members": members,
            "f": f,
            "m_min": n - f,
            "samples": 1000,
            "samples_per_slice": 40,
            "rounds": rounds,
            "assigned": True,
        }
        self.genesis = GenesisConfig(**{**fields, **genesis})
        self.state: LedgerState = genesis_state(self.genesis)
        self.events: list[object] = []

    # statements -----------------------------------------------------------------------------

    def head(self, author: str, number: int, epoch: int = 0) -> tuple[object, ...]:
        return (WIRE_VERSION, RUN, epoch, number, author)

    def sign(self, statement: m.Statement, by: str | None = None) -> bytes:
        return sign(statement, self.keys[by or statement.author])

    def ready(self, author: str) -> bytes:
        return self.sign(m.Ready(*self.head(author, 0)))

    def secret(self, author: str, purpose: str, number: int) -> bytes:
        return m.secret_for(author.encode().ljust(32, b"."), purpose, RUN, number)

    def opening_of(self, author: str, number: int, tag: bytes = b"") -> m.Opening:
        secret = self.secret
        share = m.share_commit(
            m.beacon_hash(secret(author, "beacon", number)),
            m.audit_hash(secret(author, "audit", number)),
        )
        beacon = secret(author, "beacon", number - 1) if number else b""
        audit = m.audit_hash(secret(author, "audit", number - 1)) if number else b""
        root = (author.encode() + tag).ljust(32, b"p")
        return m.Opening(
            *self.head(author, number), b"s" * 32, 100, root, b"t" * 32, share, beacon, audit
        )

    def commit(self, author: str, number: int, tag: bytes = b"") -> bytes:
        digest = m.commitment_digest(self.opening_of(author, number, tag))
        return self.sign(m.Commitment(*self.head(author, number), digest, b""))

    def open(self, author: str, number: int, tag: bytes = b"") -> bytes:
        return self.sign(self.opening_of(author, number, tag))

    def seats(self, number: int) -> tuple[str, ...]:
        known = self.state.round_of(number)
        return tuple(s.name for s in known.seats) if known else self.names

    def closing(self, author: str, number: int, window: str, listed: tuple[str, ...]) -> bytes:
        seats = self.seats(number)
        bits = m.seat_map({seats.index(name) for name in listed}, len(seats))
        return self.sign(m.Closing(*self.head(author, number), window, bits))

    def attest(
        self,
        author: str,
        number: int,
        but: dict[str, int] | None = None,
        default: int = Status.HELD,
    ) -> bytes:
        statuses = bytes((but or {}).get(name, default) for name in self.seats(number))
        return self.sign(m.Attestation(*self.head(author, number), statuses))

    def root_vote(self, author: str, number: int, root: bytes = b"R" * 32) -> bytes:
        return self.sign(m.RootVote(*self.head(author, number), root))

    def rooted(
        self,
        author: str,
        number: int,
        signers: tuple[str, ...] | None = None,
        root: bytes = b"R" * 32,
    ) -> bytes:
        seats = self.seats(number)
        signers = self.names[: self.quorum] if signers is None else signers
        places = {seats.index(name) for name in signers}
        bare = m.RootCertificate(
            *self.head(author, number), root, m.seat_map(places, len(seats)), b""
        )
        signatures = b"".join(
            self.keys[seats[i]].sign(SIGN_DOMAIN, root_vote_body(bare, seats[i]))
            for i in sorted(places)
        )
        return self.sign(
            m.RootCertificate(*self.head(author, number), root, bare.signers, signatures)
        )

    def void(self, author: str, number: int) -> bytes:
        return self.sign(m.VoidVote(*self.head(author, number), "no equal roots"))

    @property
    def quorum(self) -> int:
        return len(self.names) - (len(self.names) - 1) // 3

    # play -----------------------------------------------------------------------------------

    def block(self, *txs: bytes) -> Applied:
        applied = apply_block(self.state, txs)
        self.state = applied.state
        self.events += applied.events
        return applied

    def start(self) -> World:
        self.block(*(self.ready(name) for name in self.names))
        return self

    def play_round(self, number: int, who: tuple[str, ...] | None = None) -> Applied:
        """A whole round of three blocks in which ``who`` (all) do their part in time."""
        who = who or self.names
        previous = self.state.unsigned
        certificate = [self.rooted(who[0], previous.number)] if previous else []
        closers = who if len(who) < len(self.names) else ()
        self.block(
            *certificate,
            *(self.commit(name, number) for name in who),
            *(self.closing(name, number, "commit", who) for name in closers),
        )
        self.block(
            *(self.open(name, number) for name in who),
            *(self.closing(name, number, "open", who) for name in closers),
        )
        return self.block(*(self.attest(name, number) for name in who))

    def told(self, kind: type) -> list:
        return [event for event in self.events if isinstance(event, kind)]
