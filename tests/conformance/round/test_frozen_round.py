"""Frozen bytes of the round: encodings, digests, assignment and the state after a scripted run.

A change here changes what is signed, or what peers of one run compute: it needs a new wire version.
To approve one: ``python tests/conformance/round/test_frozen_round.py`` rewrites ``frozen.json``.
"""

import hashlib
import json
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "unit" / "round"))

from round_world import RUN, World

from torchbft.primitives.wire import encode
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.assignment import Slice, genesis_beacon, pass_key, positions

FROZEN = Path(__file__).with_name("frozen.json")


def short(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]


@cache
def generated() -> dict[str, str]:
    """Name to hash of everything that must not move."""
    world = World(4, rounds=3).start()
    found = {
        "ready": short(world.ready("peer-0")),
        "commitment": short(world.commit("peer-1", 0)),
        "opening": short(world.open("peer-1", 0)),
        "closing": short(world.closing("peer-2", 0, "commit", world.names[:2])),
        "attestation": short(world.attest("peer-2", 0)),
        "root vote": short(world.root_vote("peer-3", 0)),
        "void vote": short(world.void("peer-3", 0)),
        "genesis": short(encode(world.genesis)),
        "commitment digest": m.commitment_digest(world.opening_of("peer-1", 0)).hex(),
        "secret": m.secret_for(b"s" * 32, "salt", RUN, 7).hex(),
        "share": m.share_commit(m.beacon_hash(b"b" * 32), m.audit_hash(b"a" * 32)).hex(),
    }
    world.play_round(0)
    found["certificate"] = short(world.rooted("peer-0", 0))
    world.play_round(1, world.names[:3])
    world.block(world.commit("peer-3", 2), world.commit("peer-3", 2, b"other"))
    world.play_round(2, world.names[:3])
    found["state"] = world.state.digest().hex()
    beacon = genesis_beacon(b"g" * 32, RUN)
    part = Slice(pass_key(beacon, RUN, 0), 0, 1797, 100, 50)
    found["positions"] = short(repr(positions(part)).encode())
    return found


@pytest.mark.parametrize("name", sorted(generated()))
def test_frozen(name: str) -> None:
    assert generated()[name] == json.loads(FROZEN.read_text())[name]


def test_every_frozen_value_is_still_generated() -> None:
    assert set(json.loads(FROZEN.read_text())) == set(generated())


def test_item_sizes_are_within_their_bounds() -> None:
    """An item ≤ 4 KiB, a closing or attestation ≤ 8 bytes per member and a constant."""
    for n in (4, 64):
        world = World(n, rounds=3).start()
        world.block(*(world.commit(name, 0) for name in world.names))
        constant = len(world.ready("peer-0"))
        for tx in (
            world.closing("peer-1", 0, "open", world.names),
            world.attest("peer-1", 0),
        ):
            assert len(tx) - constant <= 8 * n
        world.block(*(world.open(name, 0) for name in world.names))
        world.block(*(world.attest(name, 0) for name in world.names))
        assert len(world.rooted("peer-0", 0)) <= 4096
        assert not [r for r in world.block(world.rooted("peer-0", 0)).results if r.code]


if __name__ == "__main__":
    FROZEN.write_text(json.dumps(generated(), indent=1, sort_keys=True) + "\n")
