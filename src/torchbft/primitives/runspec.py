"""The run file: one model trained under one signed ``RunSpec`` (TOML).

``run_id`` is the sha256 of the canonical encoding of everything but the signatures, so comments
and layout may change and no value may. n − f members countersign it.
"""

from __future__ import annotations

import hashlib
import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import tomli_w

from torchbft.primitives import wire
from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey, verify

RUN_FILE_VERSION = 1
MAX_MEMBERS = 64
"""An attestation of 64 members and a certificate of 64 signatures fit their bounds (ROUND.md)."""
MAX_RUN_FILE_BYTES = 256 * 1024
SIGN_DOMAIN = "run/countersign"
VOTING_DOMAIN = "run/voting-key"

MAX_PORT = 65_535
CONNECTION_PURPOSE = "ledger/connection"

EngineName = Literal["embedded", "cometbft"]
"""What orders the blocks (DESIGN §3, "Two ledger engines")."""

Hex20OrNone = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{40})?\Z")]
Hex32 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{64}\Z")]
Hex64 = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{128}\Z")]
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
Seconds = Annotated[float, msgspec.Meta(gt=0.0, le=86_400.0)]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the run file; an unknown key is an error, not a silent default."""


class Training(_Table, frozen=True):
    """Inner steps. ``inner_steps`` is H; a round is H × accumulate batches of ``batch_size``."""

    inner_steps: Positive = 20
    accumulate: Positive = 1
    batch_size: Positive = 32
    rounds: Positive = 40
    contribution: Literal["pseudo_gradient", "momentum", "gradient"] = "pseudo_gradient"
    momentum: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.9
    """Of the contribution type ``momentum``: each peer's own average of gradients."""
    inner_state: Literal["reset", "keep"] = "reset"


class Outer(_Table, frozen=True):
    """Outer optimizer: SGD with (Nesterov) momentum on the aggregated pseudo-gradient (DiLoCo)."""

    learning_rate: Annotated[float, msgspec.Meta(gt=0.0)] = 0.7
    momentum: Annotated[float, msgspec.Meta(ge=0.0, lt=1.0)] = 0.5
    nesterov: bool = True


class Aggregation(_Table, frozen=True):
    rule: str = "arc+nnm+trimmed_mean"
    codec: str = "float32"
    m_min: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Fewest contributions of a round that counts; 0 means n − f."""


class Data(_Table, frozen=True):
    """``assigned``: public data, batches from the ledger's randomness. ``private``: own shards."""

    mode: Literal["assigned", "private"] = "assigned"
    samples: Annotated[int, msgspec.Meta(ge=0)] = 0
    digest: str = ""


class Task(_Table, frozen=True):
    """``digest`` is the sha256 of the task's source; ``start_root`` the agreed start state's."""

    name: str = ""
    digest: str = ""
    start_root: str = ""


class Ledger(_Table, frozen=True):
    kind: EngineName = "embedded"
    proposal_wait: Seconds = 0.2
    """A leader waits at most so long for the items that a phase expects."""
    view_timeout: Seconds = 1.0


class Timing(_Table, frozen=True):
    """Floors of the adaptive time-outs (ROUND.md 16); they grow with bytes and void rounds."""

    commit_floor: Seconds = 2.0
    open_floor: Seconds = 1.0
    attest_floor: Seconds = 1.0
    root_floor: Seconds = 5.0
    first_round: Seconds = 60.0
    """Before anything was measured; covers imports and compilation."""
    factor: Annotated[float, msgspec.Meta(ge=1.0)] = 3.0


class Transport(_Table, frozen=True):
    encrypt_payloads: bool = True
    max_payload_bytes: Positive = 2**32


class Member(_Table, frozen=True):
    """``voting`` is certified by ``identity`` (``voting_certificate``) for the first epoch."""

    name: wire.Name
    identity: Hex32
    voting: Hex32
    voting_certificate: Hex64
    host: str = "127.0.0.1"
    port: Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)] = 0
    ledger_port: Annotated[int, msgspec.Meta(ge=0, le=MAX_PORT)] = 0
    """Where other members' CometBFT reaches this one's; 0 means the port after ``port``."""
    ledger_id: Hex20OrNone = ""
    """How CometBFT names this member's end of a connection: see ``connection_id``."""
    validator: bool = True
    contributor: bool = True
    power: Positive = 1

    @property
    def ledger_address(self) -> tuple[str, int]:
        """Host and port of this member's CometBFT."""
        return self.host, self.ledger_port or self.port + 1


class Countersignature(_Table, frozen=True):
    member: wire.Name
    signature: Hex64


class RunSpec(_Table, frozen=True):
    """All of a run. Validate with ``check``; identify with ``run_id``."""

    name: str
    seed: Hex32
    """Genesis randomness: the beacon until shares of the members replace it."""
    members: Annotated[tuple[Member, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    version: int = RUN_FILE_VERSION
    f: int = -1
    """Byzantine contributors to withstand; −1 means ⌊(n−1)/3⌋."""
    task: Task = Task()
    data: Data = Data()
    training: Training = Training()
    outer: Outer = Outer()
    aggregation: Aggregation = Aggregation()
    ledger: Ledger = Ledger()
    timing: Timing = Timing()
    transport: Transport = Transport()
    signatures: tuple[Countersignature, ...] = ()

    @property
    def run_id(self) -> bytes:
        """sha256 of the canonical encoding without signatures. 32 bytes."""
        bare = msgspec.structs.replace(self, signatures=())
        return sha256("run/id", wire.encode(msgspec.to_builtins(bare, order="sorted")))

    @property
    def contributors(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.contributor)

    @property
    def validators(self) -> tuple[Member, ...]:
        return tuple(member for member in self.members if member.validator)

    @property
    def contributor_faults(self) -> FaultModel:
        return FaultModel(len(self.contributors), self.f)

    @property
    def validator_faults(self) -> FaultModel:
        return FaultModel(sum(member.power for member in self.validators))

    @property
    def m_min(self) -> int:
        return self.aggregation.m_min or self.contributor_faults.quorum

    def member(self, name: str) -> Member:
        """The member of this name. Raises ConfigError if the roster has none."""
        for member in self.members:
            if member.name == name:
                return member
        raise ConfigError(
            f"{name!r} is not in the roster of run {self.name!r}",
            where="run file",
            hint="ask the members to admit it: torchbft request run.toml, then torchbft admit",
        )

    def check(self) -> None:
        """Raise ConfigError unless the run file is consistent in itself (signatures apart)."""
        names = [member.name for member in self.members]
        if names != sorted(set(names)):
            raise _bad("members must have distinct names and stand in order of name")
        identities = {member.identity for member in self.members}
        votings = {member.voting for member in self.members}
        if len(identities | votings) != 2 * len(names):
            raise _bad("two members share a key")
        self._check_addresses()
        if not self.contributors or not self.validators:
            raise _bad("a run needs a contributor and a validator")
        if self.version != RUN_FILE_VERSION:
            raise _bad(f"run file version {self.version}, this torchbft knows {RUN_FILE_VERSION}")
        for member in self.members:
            body = voting_body(member.name, bytes.fromhex(member.voting), epoch=0)
            certificate = bytes.fromhex(member.voting_certificate)
            if not verify(bytes.fromhex(member.identity), VOTING_DOMAIN, body, certificate):
                raise _bad(f"the voting key of {member.name!r} is not certified by its identity")
        _ = self.contributor_faults
        if self.ledger.kind == "cometbft":
            self._check_connections()

    def _check_connections(self) -> None:
        """CometBFT needs of each member an id of its own and a port that nothing else has."""
        for member in self.members:
            if not member.ledger_id:
                raise _bad(f"member {member.name!r} has no ledger_id, which CometBFT needs")
            if not 0 < member.ledger_address[1] <= MAX_PORT:
                raise _bad(f"member {member.name!r} needs a ledger_port for CometBFT")
        if len({member.ledger_id for member in self.members}) < len(self.members):
            raise _bad("two members share a ledger_id")
        places = [(member.host, member.port) for member in self.members]
        places += [member.ledger_address for member in self.members]
        for host, port in places:
            if port and places.count((host, port)) > 1:
                raise _bad(f"port {port} of {host} is listed twice; give a ledger_port of its own")

    def _check_addresses(self) -> None:
        """Port 0 stands for none: peers of one process."""
        taken: dict[tuple[str, int], str] = {}
        for member in self.members:
            other = taken.setdefault((member.host.lower(), member.port), member.name)
            if member.port and other != member.name:
                raise ConfigError(
                    f"{other!r} and {member.name!r} both have the address"
                    f" {member.host}:{member.port}",
                    where="run file",
                    hint="let one of them make a request with a port or host of its own: torchbft"
                    " init --name NAME --host HOST --port PORT, then torchbft request",
                )

    def countersigned_by(self) -> tuple[PeerId, ...]:
        """Members whose signature under this run file is valid, in order of name."""
        keys = {member.name: bytes.fromhex(member.identity) for member in self.members}
        return tuple(
            sorted(
                PeerId(item.member)
                for item in self.signatures
                if verify(
                    keys.get(item.member, b""),
                    SIGN_DOMAIN,
                    self.run_id,
                    bytes.fromhex(item.signature),
                )
            )
        )

    def check_signed(self) -> None:
        """Raise ConfigError unless n − f members countersigned exactly this content."""
        need = FaultModel(len(self.members)).quorum
        signed = self.countersigned_by()
        if len(set(signed)) < need:
            raise ConfigError(
                f"{len(set(signed))} of {need} needed members signed this content"
                f" ({', '.join(signed) or 'nobody'})",
                where=f"run file {self.name!r}",
                hint="it was edited after signing, or not all have signed it (torchbft admit"
                " run.toml), or another copy has their signatures (torchbft admit run.toml COPY)",
            )

    def signed(self, name: str, key: SigningKey) -> RunSpec:
        """This run file with one more countersignature."""
        mine = Countersignature(member=name, signature=key.sign(SIGN_DOMAIN, self.run_id).hex())
        others = tuple(item for item in self.signatures if item.member != name)
        ordered = tuple(sorted((*others, mine), key=lambda item: item.member))
        return msgspec.structs.replace(self, signatures=ordered)


def voting_body(name: str, voting: bytes, *, epoch: int) -> bytes:
    """What an identity key signs to certify a voting key for one epoch."""
    return wire.encode((name, voting, epoch))


def connection_key(identity: SigningKey) -> SigningKey:
    """What a member's CometBFT proves itself with to the others'. Derived, so that nothing has to
    be kept or exchanged, and a process that faces the network never holds the identity key."""
    return SigningKey.derive(identity.seed(), CONNECTION_PURPOSE)


def connection_id(identity: SigningKey) -> str:
    """CometBFT's id of that key: 40 hexadecimal digits of the sha256 of its public half."""
    return hashlib.sha256(connection_key(identity).public).hexdigest()[:40]


def new_member(name: str, identity: SigningKey, voting: SigningKey, **fields: Any) -> Member:
    """A roster entry whose voting key is certified by the identity key for epoch 0."""
    body = voting_body(name, voting.public, epoch=0)
    return Member(
        name=name,
        identity=identity.public.hex(),
        voting=voting.public.hex(),
        voting_certificate=identity.sign(VOTING_DOMAIN, body).hex(),
        ledger_id=connection_id(identity),
        **fields,
    )


def _bad(what: str) -> ConfigError:
    return ConfigError(what, where="run file", hint="correct it and let the members sign it again")


def parse_run(text: str, *, where: str = "run file") -> RunSpec:
    """The run of a TOML text. Raises ConfigError naming the key that is wrong."""
    try:
        run = msgspec.convert(tomllib.loads(text), RunSpec)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(str(error), where=where, hint="compare with: torchbft init") from None
    run.check()
    return run


def load_run(path: Path) -> RunSpec:
    """Read, parse and check a run file (not its signatures)."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_RUN_FILE_BYTES + 1)
        text = data.decode()
    except OSError as error:
        raise ConfigError(
            f"cannot be read ({error.strerror})", where=str(path), hint="make one: torchbft init"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("is not text", where=str(path), hint="make one: torchbft init") from None
    if len(data) > MAX_RUN_FILE_BYTES:
        raise ConfigError(f"is larger than {MAX_RUN_FILE_BYTES} bytes", where=str(path))
    return parse_run(text, where=str(path))


def dump_run(run: RunSpec) -> str:
    """TOML text of a run; ``parse_run`` gives the same run back."""
    return tomli_w.dumps(msgspec.to_builtins(run))
