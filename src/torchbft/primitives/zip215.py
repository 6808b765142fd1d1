"""Ed25519 as CometBFT checks it: ZIP-215, the rule under which single and batched checks agree.

Source: Zcash ZIP 215 and de Valence, "It's 25519 AM" (2020). A signature (R, S) of key A under
message M holds iff A and R decode to points of the curve (any encoding of y, reduced or not, and
either sign of x = 0), S < L, and [8]([S]B − [k]A − R) = 0 with k = SHA-512(R ‖ A ‖ M) mod L.

Libsodium's rule (``keys``) is stricter: no small-order or unreduced keys, and no cofactor. What it
accepts ZIP-215 accepts too, so it goes first; only what it refuses is looked at here, in plain
integers, at a few milliseconds each. Nothing here is secret, so nothing has to take constant time.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from torchbft.primitives.keys import SIGNATURE_BYTES, verify_bare

PUBLIC_BYTES = 32
SLOW_CACHE = 1024
"""A liar may sign every vote in a way that only this rule accepts: each is worked out once."""

_P = 2**255 - 19
_ORDER = 2**252 + 27742317777372353535851937790883648493
_D = -121665 * pow(121666, -1, _P) % _P
_ROOT_OF_MINUS_ONE = pow(2, (_P - 1) // 4, _P)

_Point = tuple[int, int, int, int]
"""(X, Y, Z, T) with x = X/Z, y = Y/Z, xy = T/Z (Hisil, Wong, Carter and Dawson 2008)."""
_ZERO: _Point = (0, 1, 1, 0)


def _decoded(data: bytes) -> _Point | None:
    """The point of 32 bytes, by RFC 8032 §5.1.3 without its demands of canonical form."""
    number = int.from_bytes(data, "little")
    odd, y = number >> 255, (number & (2**255 - 1)) % _P
    u, v = (y * y - 1) % _P, (_D * y * y + 1) % _P
    x = u * pow(v, 3, _P) * pow(u * pow(v, 7, _P), (_P - 5) // 8, _P) % _P
    square = v * x * x % _P
    if square == -u % _P:
        x = x * _ROOT_OF_MINUS_ONE % _P
    elif square != u:
        return None
    if x & 1 != odd:
        x = -x % _P
    return x, y, 1, x * y % _P


def _plus(one: _Point, two: _Point) -> _Point:
    """The sum of any two points: the formula is complete on this curve."""
    x1, y1, z1, t1 = one
    x2, y2, z2, t2 = two
    a, b = (y1 - x1) * (y2 - x2) % _P, (y1 + x1) * (y2 + x2) % _P
    c, d = 2 * _D * t1 * t2 % _P, 2 * z1 * z2 % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _negative(point: _Point) -> _Point:
    x, y, z, t = point
    return -x % _P, y, z, -t % _P


def _combined(s: int, one: _Point, k: int, two: _Point) -> _Point:
    """[s]one + [k]two, both at once from the highest bit (Straus 1964)."""
    both, result = _plus(one, two), _ZERO
    table = (_ZERO, one, two, both)
    for bit in range(max(s.bit_length(), k.bit_length()) - 1, -1, -1):
        result = _plus(result, result)
        chosen = (s >> bit & 1) | (k >> bit & 1) << 1
        if chosen:
            result = _plus(result, table[chosen])
    return result


_BASE = _decoded((4 * pow(5, -1, _P) % _P).to_bytes(32, "little"))
assert _BASE is not None


@lru_cache(maxsize=SLOW_CACHE)
def verify_cofactored(public: bytes, message: bytes, signature: bytes) -> bool:
    """The whole rule in plain integers. Total: never raises."""
    if len(public) != PUBLIC_BYTES or len(signature) != SIGNATURE_BYTES:
        return False
    key, commitment = _decoded(public), _decoded(signature[:32])
    s = int.from_bytes(signature[32:], "little")
    if key is None or commitment is None or s >= _ORDER:
        return False
    digest = hashlib.sha512(signature[:32] + public + message).digest()
    k = int.from_bytes(digest, "little") % _ORDER
    assert _BASE is not None
    rest = _plus(_combined(s, _BASE, k, _negative(key)), _negative(commitment))
    for _ in range(3):
        rest = _plus(rest, rest)
    x, y, z, _ = rest
    return x == 0 and y == z


def verify_zip215(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether ZIP-215 accepts the signature: by libsodium, or else by the rule. Total."""
    return verify_bare(public, message, signature) or verify_cofactored(public, message, signature)
