"""What real engines leave is what we verify: followers beside four of them, genesis to head."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from comet_swarm import Swarm, needs_cometbft, two_votes, until

from torchbft.node.ordering.follower import CHAIN_LOG, Follower
from torchbft.node.ordering.genesis import chain_id
from torchbft.node.storage.log import read_log
from torchbft.primitives.ids import Height, PeerId
from torchbft.protocols.chain.checks import first_fault, link_fault, record_fault
from torchbft.protocols.chain.evidence import check_double_vote, evidence_fault, evidence_in
from torchbft.protocols.chain.hashes import header_hash
from torchbft.protocols.chain.messages import (
    ChainRecord,
    Flag,
    address_of,
    decode_record,
)
from torchbft.report.cometbft import genesis_of

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms"), needs_cometbft]

KVSTORE_HASH = bytes(8)
"""Of the engine's own application before its first transaction."""


def records(folder: Path) -> list[ChainRecord]:
    return [decode_record(data) for data in read_log(folder / CHAIN_LOG)]


def proven(swarm: Swarm, found: list[ChainRecord]) -> None:
    """From the run file's genesis to the head."""
    assert first_fault(found[0], genesis_of(swarm.run, KVSTORE_HASH)) is None
    assert found[0].header.app_hash == KVSTORE_HASH
    for record in found:
        assert record_fault(record, chain_id(swarm.run)) is None
    for before, record in pairwise(found):
        assert link_fault(before, record) is None


def test_followers_of_real_engines_and_a_validator_that_signs_twice(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    first, second, _, liar = swarm.names
    seen: list[ChainRecord] = []

    def follower(name: PeerId, hears: list[ChainRecord]) -> Follower:
        path = tmp_path / name / CHAIN_LOG
        return Follower(path, swarm.engines[name].rpc, chain_id(swarm.run), hears.append)

    async def work() -> None:
        await swarm.start()
        steady, restarted = follower(first, seen), follower(second, [])
        height = await swarm.order(b"a=1", first)
        await swarm.reached(height)
        await restarted.close(30.0)
        await swarm.engines[liar].stop()
        for key in range(4):
            height = await swarm.order(b"b%d=1" % key, first)
        await steady.catch_up()
        block = await swarm.engines[first].rpc.block(Height(2))
        await swarm.engines[first].rpc.broadcast_evidence(
            two_votes(swarm.voting[liar], block["block"])
        )

        async def is_told() -> bool:
            await swarm.order(b"c%d=1" % await swarm.height(first), first)
            await steady.catch_up()
            return any(record.evidence for record in seen)

        await until(is_told, "no block holds the evidence")
        await swarm.reached(await swarm.height(first), second)
        await steady.close(30.0)
        await follower(second, []).close(30.0)

    async def main() -> None:
        try:
            await work()
        finally:
            await swarm.stop()

    asyncio.run(main())
    one, two = records(tmp_path / first), records(tmp_path / second)
    assert one == seen
    proven(swarm, one)
    proven(swarm, two)
    for left, right in zip(one, two, strict=False):
        assert header_hash(left.header) == header_hash(right.header)
    assert abs(len(one) - len(two)) <= 2, "both were closed at about the same height"
    assert any(sig.flag == Flag.ABSENT for record in one for sig in record.commit.signatures)
    (record,) = [record for record in one if record.evidence]
    (duplicate,) = record.evidence
    assert evidence_fault(duplicate, one[1]) is None
    public = swarm.voting[liar].public
    (evidence,) = evidence_in(record, {address_of(public): liar})
    assert check_double_vote(evidence, public, chain_id(swarm.run))
