"""A chain of 28 heights that CometBFT v0.40.0 made: four validators of power 10 around its kvstore.

One of them was down for a while (absent votes, later rounds), signed two prevotes at height 5 (the
evidence stands in block 14), was slashed to 9 for it and removed at the end (in force at 25);
another's power was set to 13 (at 20).
"""

import json
import lzma
from pathlib import Path
from typing import Any

import pytest

from torchbft.node.ordering.answers import record_of, validators_of
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
