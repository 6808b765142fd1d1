"""Changes of the membership that members vote for: what is proposed, as values on the wire."""

from __future__ import annotations

from typing import Annotated

import msgspec

from torchbft.primitives.keys import verify
from torchbft.primitives.runspec import VOTING_DOMAIN, voting_body
from torchbft.primitives.wire import Bytes32, Bytes64, Name, Wire

MAX_HOST_CHARACTERS = 253
"""Of a host name (RFC 1035)."""

Host = Annotated[str, msgspec.Meta(max_length=MAX_HOST_CHARACTERS, pattern=r"^[A-Za-z0-9._:%-]*\Z")]
"""A name, or an address of IPv4 or IPv6: it is shown to people, so nothing else gets through."""
Port = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Power = Annotated[int, msgspec.Meta(ge=1, le=2**40)]
"""As in the run file: 64 members' sum fits what any engine counts."""


class Admit(Wire, frozen=True, tag="admit"):
    """A new member, or one that left and comes back. ``certificate``: the identity key's signature
    under the voting key (``voting_body``)."""

    name: Name
    identity: Bytes32
    voting: Bytes32
    certificate: Bytes64
    host: Host
    port: Port
    power: Power
    contributor: bool
    validator: bool


class Remove(Wire, frozen=True, tag="remove"):
    """A member leaves for good; its name and keys stay reserved."""

    name: Name


class Rotate(Wire, frozen=True, tag="rotate"):
    """A member gets a new voting key, certified by its identity key like the first one."""

    name: Name
    voting: Bytes32
    certificate: Bytes64


Change = Admit | Remove | Rotate


def is_certified(identity: bytes, change: Admit | Rotate) -> bool:
    """Whether the identity key signed for the voting key of a change."""
    body = voting_body(change.name, change.voting, epoch=0)
    return verify(identity, VOTING_DOMAIN, body, change.certificate)


def described(change: Change) -> str:
    """The change in a few words, for people."""
    if isinstance(change, Admit):
        roles = [role for role in ("contributor", "validator") if getattr(change, role)]
        where = f" at {change.host}:{change.port}" if change.host else ""
        key = change.identity.hex()[:16]
        return f"admit {change.name} ({' and '.join(roles)}, identity {key}…){where}"
    if isinstance(change, Rotate):
        return f"rotate {change.name} to voting key {change.voting.hex()[:16]}…"
    return f"remove {change.name}"
