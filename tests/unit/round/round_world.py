"""A run's keys and every statement its members could sign, honest or not. For the tests only."""

from __future__ import annotations

from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import VOTING_DOMAIN, voting_body
from torchbft.primitives.wire import WIRE_VERSION
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.admissible import root_vote_body
from torchbft.protocols.round.changes import Admit, Change, Rotate
from torchbft.protocols.round.messages import SIGN_DOMAIN, Status, sign
from torchbft.protocols.round.reader import Applied, apply_block
from torchbft.protocols.round.state import (
    GenesisConfig,
    LedgerState,
    MemberConfig,
    RoundState,
    genesis_state,
    seats_of,
)

RUN = b"r" * 32


class World:
    """``n`` members, each contributor and validator of power 1, and one state to play on."""

    def __init__(self, n: int = 4, *, rounds: int = 8, f: int | None = None, **genesis: object):
        self.names = tuple(f"peer-{i}" for i in range(n))
        self.keys = {name: SigningKey.derive(b"k" * 32, name) for name in self.names}
        self.secrets = {key.public: key for key in self.keys.values()}
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

    def head(self, author: str, number: int, epoch: int | None = None) -> tuple[object, ...]:
        if epoch is None:
            known = self.state.round_of(number)
            epoch = known.epoch if known else self.state.epoch
        return (WIRE_VERSION, RUN, epoch, number, author)

    def sign(self, statement: m.Statement, by: str | None = None) -> bytes:
        """With the key that the statement's round has for its author; ``by``: with another's."""
        if by is not None:
            return sign(statement, self.keys[by])
        return sign(statement, self.key_of(statement.author, statement.round))

    def key_of(self, author: str, number: int) -> SigningKey:
        known = self.state.round_of(number)
        seat = (known.seat(author) if known else None) or self.state.member(author)
        return self.secrets[seat.voting] if seat else self.keys[author]

    def ready(self, author: str, number: int | None = None) -> bytes:
        """For the current round, if no other is given."""
        current = self.state.current.number if number is None else number
        return self.sign(m.Ready(*self.head(author, current)))

    # changes of the membership --------------------------------------------------------------

    def has_key(self, name: str, tag: str = "") -> SigningKey:
        """A fresh voting key of a member, old or new."""
        key = SigningKey.derive(b"k" * 32, name + tag)
        self.secrets[key.public] = key
        self.identities.setdefault(name, SigningKey.derive(b"i" * 32, name))
        self.keys.setdefault(name, key)
        return key

    def certificate(self, name: str, key: SigningKey) -> bytes:
        body = voting_body(name, key.public, epoch=0)
        return self.identities[name].sign(VOTING_DOMAIN, body)

    def admit(self, name: str, tag: str = "", **fields: object) -> Admit:
        key = self.has_key(name, tag)
        values: dict[str, object] = {
            "name": name,
            "identity": self.identities[name].public,
            "voting": key.public,
            "certificate": self.certificate(name, key),
            "host": "127.0.0.1",
            "port": 7700,
            "power": 1,
            "contributor": True,
            "validator": True,
        }
        return Admit(**{**values, **fields})

    def rotate(self, name: str, tag: str = "/2") -> Rotate:
        key = self.has_key(name, tag)
        return Rotate(name, key.public, self.certificate(name, key))

    def vote(self, author: str, change: Change, number: int | None = None) -> bytes:
        number = self.state.current.number if number is None else number
        return self.sign(m.MembershipVote(*self.head(author, number), change))

    def pass_change(self, *changes: Change) -> Applied:
        """All validators of the current round vote for these changes."""
        voters = [seat.name for seat in self.state.current.validators]
        return self.block(*(self.vote(name, change) for change in changes for name in voters))

    def get_ready(self) -> Applied:
        """The next epoch's validators say that they are up."""
        return self.block(*(self.ready(seat.name) for seat in self.state.current.validators))

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
        seats = known.seats if known else seats_of(self.state.members)
        return tuple(seat.name for seat in seats)

    def closing(self, author: str, number: int, window: str, listed: tuple[str, ...]) -> bytes:
        seats = self.seats(number)
        listed_seats = {seats.index(name) for name in listed if name in seats}
        bits = m.seat_map(listed_seats, len(seats))
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
        known = self.state.round_of(number)
        if signers is None:
            voters = tuple(seat.name for seat in known.validators) if known else seats
            signers = voters[: known.voting.quorum if known else self.quorum]
        places = {seats.index(name) for name in signers}
        bare = m.RootCertificate(
            *self.head(author, number), root, m.seat_map(places, len(seats)), b""
        )
        signatures = b"".join(
            self.key_of(seats[i], number).sign(SIGN_DOMAIN, root_vote_body(bare, seats[i]))
            for i in sorted(places)
        )
        return self.sign(
            m.RootCertificate(*self.head(author, number), root, bare.signers, signatures)
        )

    def certifier(self, fixed: RoundState) -> str:
        """Some validator of a round whose transactions count."""
        names = (seat.name for seat in fixed.validators)
        return next(name for name in names if not self.state.member(name).convicted)

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
        seated = tuple(seat.name for seat in self.state.current.seats)
        who = who or seated
        previous = self.state.unsigned
        certificate = [self.rooted(self.certifier(previous), previous.number)] if previous else []
        closers = who if len(who) < len(seated) else ()
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
