"""Ed25519 identities: one strict rule (libsodium's) and one library for every signature.

Libsodium refuses small-order and non-canonical keys and S ≥ L, and checks without cofactor
(RFC 8032, §5.1.7, strict variant). What it accepts is frozen by conformance vectors.
"""

from __future__ import annotations

import os
import secrets
from functools import lru_cache
from pathlib import Path

from nacl import bindings
from nacl.exceptions import BadSignatureError
from nacl.signing import SigningKey as _NaclKey

from torchbft.primitives.digests import DOMAIN_PREFIX, sha256
from torchbft.primitives.errors import ConfigError, MisuseError

SIGNATURE_BYTES = 64
VERIFY_CACHE = 16_384
"""Signatures remembered as checked: a block's votes are seen again in its certificate."""


def _message(domain: str, body: bytes) -> bytes:
    return (DOMAIN_PREFIX + domain).encode() + b"\0" + body


class SigningKey:
    """A secret Ed25519 key. Its seed never reaches a log: ``repr`` shows the public key only."""

    __slots__ = ("_key", "public")

    def __init__(self, seed: bytes) -> None:
        self._key = _NaclKey(seed)
        self.public: bytes = bytes(self._key.verify_key)

    @classmethod
    def generate(cls) -> SigningKey:
        """A fresh key from the operating system's randomness."""
        return cls(secrets.token_bytes(32))

    @classmethod
    def derive(cls, seed: bytes, purpose: str) -> SigningKey:
        """A key derived from a 32-byte secret seed: another one for each purpose."""
        return cls(sha256("key/derive", seed, purpose.encode()))

    def sign(self, domain: str, body: bytes) -> bytes:
        """64-byte signature over the domain and the body. Deterministic (RFC 8032)."""
        return self._key.sign(_message(domain, body)).signature

    def sign_foreign(self, message: bytes) -> bytes:
        """64-byte signature over a message of another protocol, which must never be able to look
        like one of ours: those start with ``DOMAIN_PREFIX``. Raises MisuseError if it does."""
        if message.startswith(DOMAIN_PREFIX.encode()):
            raise MisuseError("a message of ours is signed under its domain", where="sign_foreign")
        return self._key.sign(message).signature

    def seed(self) -> bytes:
        """The 32 secret bytes; only for key files and TLS certificates of this same host."""
        return bytes(self._key)

    def __repr__(self) -> str:
        return f"SigningKey(public={self.public.hex()[:16]}…)"

    def __reduce__(self) -> str:
        raise TypeError("a secret key is not pickled")


class KeyRing:
    """A member's own voting keys by their public halves: the one in force, and after a rotation was
    asked for the next one. A machine signs with the one that the ledger's members list at the time.
    """

    def __init__(self, *keys: SigningKey) -> None:
        self._keys = {key.public: key for key in keys}

    @classmethod
    def of(cls, key: SigningKey | KeyRing) -> KeyRing:
        """The same ring, or one of a single key."""
        return key if isinstance(key, KeyRing) else cls(key)

    def add(self, key: SigningKey) -> None:
        """Have one more key from now on."""
        self._keys[key.public] = key

    def get(self, public: bytes | None) -> SigningKey | None:
        """The secret key of this public one, if it is ours."""
        return self._keys.get(public) if public is not None else None

    @property
    def publics(self) -> tuple[bytes, ...]:
        return tuple(self._keys)


@lru_cache(maxsize=VERIFY_CACHE)
def _verify(public: bytes, message: bytes, signature: bytes) -> bool:
    try:
        bindings.crypto_sign_open(signature + message, public)
    except (BadSignatureError, ValueError, TypeError):
        return False
    return True


def verify(public: bytes, domain: str, body: bytes, signature: bytes) -> bool:
    """Whether the signature over domain and body is this key's. Total: never raises."""
    return verify_bare(public, _message(domain, body), signature)


def verify_bare(public: bytes, message: bytes, signature: bytes) -> bool:
    """The same for bytes without a domain of ours: another protocol's, which has its own. Total."""
    if len(public) != 32 or len(signature) != SIGNATURE_BYTES:
        return False
    return _verify(public, message, signature)


def save_key(path: Path, key: SigningKey) -> None:
    """Write a key file with mode 0600; refuses to overwrite one."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            "a key is already there", where=str(path), hint="use it, or move it away first"
        ) from None
    with os.fdopen(descriptor, "w") as file:
        file.write(key.seed().hex() + "\n")
        file.flush()
        os.fsync(file.fileno())


def load_key(path: Path) -> SigningKey:
    """Read a key file. Raises ConfigError if it is missing, readable by others, or not a key."""
    try:
        mode = path.stat().st_mode
        text = path.read_text().strip()
    except OSError as error:
        raise ConfigError(
            f"the key cannot be read ({error.strerror})",
            where=str(path),
            hint="make one with: torchbft init --name NAME",
        ) from None
    if mode & 0o077:
        raise ConfigError(
            "the key file is open to other users", where=str(path), hint=f"chmod 600 {path}"
        )
    try:
        seed = bytes.fromhex(text)
        return SigningKey(seed)
    except ValueError:
        raise ConfigError(
            "this is not a key file", where=str(path), hint="expected 64 hexadecimal digits"
        ) from None
