"""Mutual TLS 1.3 with the members' Ed25519 identity keys, from nothing but the roster.

A member's certificate is a pure function of its name and public key: everything in it is fixed,
and it is signed by an *issuer key that is public*. So every peer can write down the exact
certificate of every other, loads exactly these (CA:FALSE) as trust anchors, and a new member needs
no certificate to be handed around. What makes this safe:

- An anchor is trusted for itself only (``X509_V_FLAG_PARTIAL_CHAIN`` and a byte-exact match). The
  issuer is no anchor, so anything else that it, or any member, signs is refused.
- The TLS handshake proves possession of the identity key in the certificate.
- After the handshake the peer's raw public key is compared to the roster; names in certificates
  decide nothing.

Tickets are off: a resumed session would skip the proof of possession.
"""

from __future__ import annotations

import secrets
import ssl
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import lru_cache

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    BestAvailableEncryption,
    Encoding,
    PrivateFormat,
    PublicFormat,
)
from cryptography.x509.oid import NameOID

from torchbft.primitives.digests import sha256
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey

ISSUER_NAME = "torchbft roster"
_ISSUER = Ed25519PrivateKey.from_private_bytes(sha256("tls/public-issuer"))
_NOT_BEFORE = datetime(2000, 1, 1, tzinfo=UTC)
_NOT_AFTER = datetime(9999, 12, 31, tzinfo=UTC)
"""Membership ends by the roster, not by a date, so a wrong clock locks nobody out."""

ROSTER_MEMORY = 256
"""Certificates remembered: four rosters of 64 members."""


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


@lru_cache(maxsize=ROSTER_MEMORY)
def certificate(name: PeerId, public: bytes) -> bytes:
    """The one certificate (DER) of a member with this name and 32-byte public key."""
    unsigned = (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .issuer_name(_name(ISSUER_NAME))
        .serial_number(int.from_bytes(sha256("tls/serial", public)[:8], "big") | 1)
        .public_key(Ed25519PublicKey.from_public_bytes(public))
        .not_valid_before(_NOT_BEFORE)
        .not_valid_after(_NOT_AFTER)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    )
    return unsigned.sign(_ISSUER, None).public_bytes(Encoding.DER)


def raw_public(der: bytes | None) -> bytes | None:
    """The raw Ed25519 key of a peer's certificate; None for no certificate or another key type."""
    if der is None:
        return None
    key = x509.load_der_x509_certificate(der).public_key()
    if not isinstance(key, Ed25519PublicKey):
        return None
    return key.public_bytes(Encoding.Raw, PublicFormat.Raw)


def _context(
    purpose: int, services: Sequence[str], roster: Mapping[PeerId, bytes]
) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    context.set_alpn_protocols(list(services))
    for name, public in roster.items():
        context.load_verify_locations(cadata=certificate(name, public))
    return context


def _load_own(context: ssl.SSLContext, me: PeerId, key: SigningKey) -> None:
    """``ssl`` reads keys from files only: it gets one encrypted under a password made for it."""
    password = secrets.token_bytes(32).hex().encode()
    private = Ed25519PrivateKey.from_private_bytes(key.seed()).private_bytes(
        Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(password)
    )
    public = ssl.DER_cert_to_PEM_cert(certificate(me, key.public)).encode()
    with tempfile.NamedTemporaryFile(prefix="torchbft-", suffix=".pem") as file:
        file.write(public + private)
        file.flush()
        context.load_cert_chain(file.name, password=password)


def server_context(
    me: PeerId, key: SigningKey, roster: Mapping[PeerId, bytes], services: Sequence[str]
) -> ssl.SSLContext:
    """Context that accepts exactly the roster's members, for the services named by ALPN."""
    context = _context(ssl.PROTOCOL_TLS_SERVER, services, roster)
    context.num_tickets = 0
    _load_own(context, me, key)
    return context


def client_context(
    me: PeerId, key: SigningKey, roster: Mapping[PeerId, bytes], service: str
) -> ssl.SSLContext:
    """Context to dial a member for one service."""
    context = _context(ssl.PROTOCOL_TLS_CLIENT, [service], roster)
    _load_own(context, me, key)
    return context
