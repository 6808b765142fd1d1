"""Chains signed by keys that the tests hold."""

from collections.abc import Callable

import pytest

from torchbft.primitives.keys import SigningKey
from torchbft.protocols.chain.checks import Genesis
from torchbft.protocols.chain.hashes import consensus_hash
from torchbft.protocols.chain.messages import Timestamp, Validator
from torchbft.sim.chain import ChainMaker


@pytest.fixture
def make_chain() -> Callable[..., ChainMaker]:
    """``make_chain(6)``: six validators of power 10 and no block yet."""

    def make(members: int, power: int = 10) -> ChainMaker:
        keys = [SigningKey.derive(bytes(32), f"chain/{i}") for i in range(members)]
        genesis = Genesis(
            "a-chain",
            Timestamp(1_700_000_000, 0),
            tuple(Validator(key.public, power) for key in keys),
            consensus_hash(1 << 20, -1),
            b"start",
        )
        return ChainMaker(genesis, keys)

    return make
