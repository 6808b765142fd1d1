"""A chain of 28 heights that CometBFT v0.40.0 made: four validators of power 10 around its kvstore.

One of them was down for a while (absent votes, later rounds), signed two prevotes at height 5 (the
evidence stands in block 14), was slashed to 9 for it and removed at the end (in force at 25);
another's power was set to 13 (at 20).
"""

import hashlib
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from nacl import bindings

from torchbft.node.ordering.answers import record_of, validators_of
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.chain.messages import ChainRecord

DATA = Path(__file__).resolve().parents[2] / "data"


@pytest.fixture(scope="session")
def recorded() -> dict[str, Any]:
    """RPC answers by height and method, and the genesis file."""
    return dict(json.loads(lzma.decompress((DATA / "kvstore_chain.json.xz").read_bytes())))


@pytest.fixture(scope="session")
def chain(recorded: dict[str, Any]) -> tuple[ChainRecord, ...]:
    """The same as records; the first is of height 1."""
    return tuple(
        record_of(told["block"], told["commit"], validators_of(told["validators"]))[0]
        for told in recorded["heights"].values()
    )


ORDER = 2**252 + 27742317777372353535851937790883648493
ORDER_8 = bytes.fromhex("26e8958fc2b227b045c3f489f2ef98f0d5dfac05d3c63339b13802886d53fc05")
"""A point whose eighth multiple is the first to be zero."""


@pytest.fixture(scope="session")
def crafted() -> Callable[[SigningKey, bytes], bytes]:
    """Signs as only the holder of the key can, but with a point of order 8 added to R: the engine
    and ZIP-215 accept it, and no check without the cofactor does."""

    def sign(key: SigningKey, message: bytes) -> bytes:
        spread = hashlib.sha512(key.seed()).digest()
        secret = int.from_bytes(spread[:32], "little") & (2**254 - 8) | 2**254
        nonce = int.from_bytes(hashlib.sha512(spread[32:] + message).digest(), "little") % ORDER
        point = bindings.crypto_scalarmult_ed25519_base_noclamp(nonce.to_bytes(32, "little"))
        shifted = bindings.crypto_core_ed25519_add(point, ORDER_8)
        digest = hashlib.sha512(shifted + key.public + message).digest()
        s = (nonce + int.from_bytes(digest, "little") * secret) % ORDER
        return bytes(shifted) + s.to_bytes(32, "little")

    return sign
