"""ZIP-215 on the edge cases that the engine's own Ed25519 library is tested with.

``ed25519_edges.json.gz`` holds [key, message, signature, valid, source]: the 196 pairs of points of
small order of ZIP 215 (de Valence), the 12 cases of "Taming the many EdDSAs" (Chalkias, Garillot
and Nikolaenko 2020), and 768 of C2SP's CCTV; all as the test data of curve25519-voi has them.
"""

import gzip
import json
from pathlib import Path
from random import Random

import pytest
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from torchbft.primitives.keys import SigningKey, verify_bare
from torchbft.primitives.zip215 import verify_cofactored, verify_zip215
from torchbft.sim.chain import crafted_signature

DATA = Path(__file__).resolve().parents[2] / "data" / "ed25519_edges.json.gz"
EDGES = [
    (bytes.fromhex(key), bytes.fromhex(message), bytes.fromhex(signature), valid, source)
    for key, message, signature, valid, source in json.loads(gzip.decompress(DATA.read_bytes()))
]
ORDER = 2**252 + 27742317777372353535851937790883648493
EVERY = {"zip215": 3, "speccheck": 1, "cctv": 9}
"""Of the sets that are built the same way over and over, a spread is enough for each run."""


def some(source: str) -> list[tuple[bytes, bytes, bytes, bool]]:
    return [edge[:4] for edge in EDGES if edge[4] == source][:: EVERY[source]]


@pytest.mark.parametrize("source", EVERY)
def test_the_known_edge_cases(source: str) -> None:
    edges = some(source)
    assert len(edges) >= 12
    for key, message, signature, valid in edges:
        assert verify_cofactored(key, message, signature) is valid
        assert verify_zip215(key, message, signature) is valid


def test_the_edge_cases_do_tell_rules_apart() -> None:
    """The control: libsodium refuses most of them, and accepts none that ZIP-215 refuses."""
    said = [(verify_bare(*edge[:3]), edge[3]) for edge in EDGES]
    assert sum(valid and not strict for strict, valid in said) > 900
    assert not any(strict and not valid for strict, valid in said)
    assert [edge[3] for edge in EDGES if edge[4] == "speccheck"].count(False) == 3


@pytest.mark.parametrize("source", EVERY)
def test_an_edge_case_under_another_message_does_not_hold(source: str) -> None:
    """Unless the key has small order: then it holds under every message that hashes well."""
    found = 0
    for key, message, signature, _ in some(source)[:24]:
        if verify_cofactored(key, b"another" + message, signature):
            assert verify_cofactored(key, b"a third" + message, signature)
        else:
            found += 1
    assert found or source == "zip215"


def test_signatures_of_ours_and_every_kind_of_damage_to_one() -> None:
    random = Random(1)
    key = SigningKey.derive(bytes(32), "zip215")
    message = b"\x21\x08\x02"
    signature = key.sign_foreign(message)
    assert verify_cofactored(key.public, message, signature)
    for _ in range(40):
        whole = bytearray(key.public + signature + message)
        at = random.randrange(len(whole))
        whole[at] ^= 1 << random.randrange(8)
        parts = bytes(whole[:32]), bytes(whole[96:]), bytes(whole[32:96])
        assert not verify_zip215(*parts), f"byte {at}"


def test_s_is_below_the_order() -> None:
    key = SigningKey.derive(bytes(32), "zip215")
    signature = key.sign_foreign(b"m")
    larger = int.from_bytes(signature[32:], "little") + ORDER
    assert not verify_zip215(key.public, b"m", signature[:32] + larger.to_bytes(32, "little"))


@pytest.mark.parametrize("length", [0, 63, 65])
def test_other_lengths_never_raise(length: int) -> None:
    assert not verify_zip215(bytes(32), b"", bytes(length))
    assert not verify_cofactored(bytes(length), b"", bytes(64))


def test_what_zip215_accepts_and_openssl_refuses() -> None:
    key, message = SigningKey.derive(bytes(32), "crafty"), b"a vote"
    signature = crafted_signature(key, message)
    with pytest.raises(InvalidSignature):
        Ed25519PublicKey.from_public_bytes(key.public).verify(signature, message)
    assert not verify_bare(key.public, message, signature)
    assert verify_zip215(key.public, message, signature)
    assert not verify_zip215(key.public, b"another", signature)
