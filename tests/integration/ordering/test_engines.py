"""Real CometBFT engines on loopback: blocks, crashes, strangers, and a signer that knows better."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import msgspec
import pytest
from comet_swarm import Swarm, held_port, needs_cometbft, until
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from tiny_application import TinyApplication

from torchbft.node.ordering import process as processes
from torchbft.node.ordering.abci_server import AbciServer
from torchbft.node.ordering.delimited import framed
from torchbft.node.ordering.genesis import genesis_document
from torchbft.node.ordering.proto import privval_pb2 as pb
from torchbft.node.ordering.signing import PRECOMMIT, canonical_vote
from torchbft.primitives.errors import ConfigError, StorageError
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import SigningKey

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms"), needs_cometbft]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except OSError:
        return False
    return True


def story(swarm: Swarm, work: Callable[[], Awaitable[None]]) -> None:
    """Run ``work`` and end every engine, whatever happens; none may be left."""
    pids: list[int] = []

    async def main() -> None:
        try:
            await work()
        finally:
            pids.extend(e.process.pid for e in swarm.engines.values() if e.process.pid)
            await swarm.stop()

    asyncio.run(main())
    assert pids
    assert not any(map(alive, pids))


def test_four_engines_order_transactions_and_one_dies_and_comes_back(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    first, *others = swarm.names
    last = others[-1]

    async def work() -> None:
        await swarm.start()
        rpc = swarm.engines[first].rpc

        document = (await rpc.call("genesis"))["genesis"]
        ours = genesis_document(swarm.run)
        assert document == {**ours, "app_state": document["app_state"]}
        assert json.loads(json.dumps(document["app_state"])) == ours["app_state"]

        height = await swarm.order(b"a=1", first)
        assert (await rpc.submit(b"a=1")).known
        await swarm.reached(height)
        block = await rpc.block(Height(height))
        assert block["block"]["data"]["txs"] == [base64.b64encode(b"a=1").decode()]
        await check_commit(swarm, height)

        victim = swarm.engines[last]
        pid = victim.process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        for key in range(4):  # among them the dead one's turn to propose
            height = await swarm.order(b"b%d=1" % key, others[key % 2])
        await swarm.reached(height)
        assert victim.process.pid != pid
        assert victim.process.restarts == 1
        assert any("exit code -9" in line for line in swarm.told[last])
        await until(lambda: swarm.in_step(last), "the dead one is not back")
        await signs_again(swarm, last)

    story(swarm, work)


async def check_commit(swarm: Swarm, height: int) -> None:
    """The signatures in the chain are of the voting keys, over the bytes that we compute."""
    answer = await swarm.engines[swarm.names[0]].rpc.commit(Height(height))
    commit = answer["signed_header"]["commit"]
    found = await swarm.engines[swarm.names[0]].rpc.validators(Height(height))
    assert {v["voting_power"] for v in found["validators"]} == {"10"}
    keys = {v["address"]: base64.b64decode(v["pub_key"]["value"]) for v in found["validators"]}
    assert set(keys.values()) == {key.public for key in swarm.voting.values()}
    signed = [each for each in commit["signatures"] if each["block_id_flag"] == 2]
    assert len(signed) >= 3
    for each in signed:
        vote = pb.Vote(type=PRECOMMIT, height=height, round=commit["round"])
        vote.block_id.hash = bytes.fromhex(commit["block_id"]["hash"])
        vote.block_id.part_set_header.total = commit["block_id"]["parts"]["total"]
        vote.block_id.part_set_header.hash = bytes.fromhex(commit["block_id"]["parts"]["hash"])
        vote.timestamp.FromJsonString(each["timestamp"])
        message = framed(canonical_vote(vote, answer["signed_header"]["header"]["chain_id"]))
        public = Ed25519PublicKey.from_public_bytes(keys[each["validator_address"]])
        public.verify(base64.b64decode(each["signature"]), message)


async def signs_again(swarm: Swarm, name: PeerId) -> None:
    """A member's signature is in a commit from now on."""
    address = hashlib.sha256(swarm.voting[name].public).hexdigest()[:40].upper()
    rpc = swarm.engines[swarm.names[0]].rpc

    async def seen() -> bool:
        height = await swarm.order(os.urandom(8).hex().encode() + b"=1", swarm.names[0])
        commit = (await rpc.commit(Height(height)))["signed_header"]["commit"]
        return address in {each["validator_address"] for each in commit["signatures"]}

    await until(seen, f"{name} does not sign", swarm.told[name])


def test_a_restored_backup_of_the_signing_state_signs_nothing(tmp_path: Path) -> None:
    """And a lost one keeps the engine from starting; the others go on."""
    swarm = Swarm(tmp_path)
    first, last = swarm.names[0], swarm.names[-1]

    async def work() -> None:
        await swarm.start()
        await swarm.order(b"a=1", first)
        await signs_again(swarm, last)
        [state] = (tmp_path / last / "cometbft").glob("signed-*.state")
        backup = tmp_path / "backup"
        shutil.copy(state, backup)
        await signs_again(swarm, last)
        await swarm.engines[last].stop()

        state.unlink()
        with pytest.raises(StorageError, match="lost"):
            await swarm.engine(last).start()

        shutil.copy(backup, state)
        await swarm.start(last)
        before = await swarm.height(first)
        for key in range(3):
            await swarm.order(b"c%d=1" % key, first)
        await until(lambda: stale(), "nothing is said", swarm.told[last])
        address = hashlib.sha256(swarm.voting[last].public).hexdigest()[:40].upper()
        for height in range(before + 1, await swarm.height(first) + 1):
            commit = await swarm.engines[first].rpc.commit(Height(height))
            signatures = commit["signed_header"]["commit"]["signatures"]
            assert address not in {each["validator_address"] for each in signatures}

    async def stale() -> bool:
        return any("members rotate it" in line for line in swarm.told[last])

    story(swarm, work)


def test_a_stranger_is_not_let_in(tmp_path: Path) -> None:
    """It knows the run file, the chain and the ports, and has no member's connection key."""
    swarm = Swarm(tmp_path)
    first, *others, last = swarm.names

    async def work() -> None:
        await swarm.start(first, *others)
        swarm.voting[last] = SigningKey.generate()
        stranger = swarm.engine(last)
        stranger._connection = SigningKey.generate()
        await stranger.start()
        await until(lambda: refused(), "it does not dial")
        for name in (first, *others):
            ids = {m.ledger_id for m in swarm.run.members if m.name not in (name, last)}
            await until(lambda ids=ids, name=name: connected(name, ids), f"{name} lost a member")  # type: ignore[misc]

    async def connected(name: PeerId, ids: set[str]) -> bool:
        return await swarm.engines[name].rpc.connected() == ids

    async def refused() -> bool:
        """It was dropped by each; no member ever had it among its peers."""
        known = {member.ledger_id for member in swarm.run.members}
        for name in (first, *others):
            assert await swarm.engines[name].rpc.connected() <= known
        return sum("Stopping peer for error" in line for line in swarm.told[last]) >= 3

    story(swarm, work)


def test_a_port_in_use_is_said_before_anything_starts(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    first = swarm.names[0]

    async def work() -> None:
        with held_port() as held:
            port = held.getsockname()[1]
            engine = swarm.engine(first, listen=("127.0.0.1", port))
            with pytest.raises(ConfigError, match="port is in use"):
                await engine.start()
            assert engine.process.pid is None

    asyncio.run(work())


def test_a_run_file_with_another_connection_id_is_refused(tmp_path: Path) -> None:
    swarm = Swarm(tmp_path)
    first = swarm.names[0]
    member = msgspec.structs.replace(swarm.run.members[0], ledger_id="0" * 40)
    swarm.run = msgspec.structs.replace(swarm.run, members=(member, *swarm.run.members[1:]))

    async def work() -> None:
        with pytest.raises(ConfigError, match="not that of its identity key"):
            swarm.engine(first)

    asyncio.run(work())


CALLS = (
    *("info", "init_chain", "check_tx", "prepare_proposal", "process_proposal"),
    *("finalize_block", "commit"),
)


def test_an_application_that_fails_at_each_call_costs_a_restart_and_no_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the engine does then is its own: it ends (with exit code 0), hangs in consensus, or only
    drops the connection. In each case it is started again and goes on where it was."""
    swarm = Swarm(tmp_path, 1)
    [only] = swarm.names
    monkeypatch.setattr(processes, "MAX_BACKOFF", 0.1)
    application = TinyApplication(CALLS)
    server = AbciServer(application.answer, lambda error: swarm.told[only].append(str(error)))

    async def ordered() -> bool:
        rpc = swarm.engines[only].rpc
        if not application.txs:
            await rpc.submit(b"the one")
        return bool(application.txs)

    async def work() -> None:
        engine = swarm.engine(only, application="")
        await server.open(engine.application)
        await engine.start()
        await until(ordered, "not ordered", (application.failed, swarm.told[only]))
        assert application.failed == list(CALLS)
        assert application.txs == [b"the one"]
        await engine.stop()
        again = swarm.engine(only, application="")  # the same chain
        await again.start()
        await again.ready()
        await swarm.order(b"another", only)
        assert application.txs == [b"the one", b"another"]

    async def story_of_one() -> None:
        try:
            await work()
        finally:
            pid = swarm.engines[only].process.pid
            assert pid is not None
            await swarm.stop()
            await server.close()
            assert not alive(pid)

    asyncio.run(story_of_one())
    assert swarm.engines[only].process.restarts == 0
