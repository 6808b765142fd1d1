"""The calls of ABCI 2.0 as the engine makes them, and what the application answers.

Nothing here decides: a question is taken apart, bounded and handed to ``abci.Application``. Two
calls do more. ``prepare_proposal`` waits a little for the items that a phase expects (ROUND.md 19),
while the other connections go on. ``commit`` goes to the peer's machine, which saves the state
before it answers: only then may the engine forget the block.
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import Message

from torchbft.node.ordering.proto import abci_pb2 as pb
from torchbft.primitives.abci import CODE_OK, Misbehaviour, Snapshot, ValidatorUpdate
from torchbft.primitives.errors import HaltError, MisuseError
from torchbft.primitives.ids import Height
from torchbft.protocols.chain.messages import address_of
from torchbft.protocols.peer import CommitBlock, SnapshotTaken
from torchbft.protocols.round.application import Application, proposal_complete

CODE_REFUSED = 1
"""A stranger that dials, or a question about nothing."""

ACCEPT, REJECT, REJECT_FORMAT = 1, 3, 4
ACCEPT_PROPOSAL, REJECT_PROPOSAL = 1, 2
REJECT_SNAPSHOT = 5
DUPLICATE_VOTE = 1
"""The one misbehaviour that is two signatures for one slot; others name nobody for certain."""

SNAPSHOT_FORMAT = 1
BLOCKS_AFTER_SNAPSHOT = 2
"""A joiner needs the two blocks after a snapshot's, or the engine rejects it for good."""

FILTER = "/p2p/filter/"
"""The engine asks whether an address, then whether a node id may connect."""

MAX_KNOWN = 4096
"""Transactions of which is remembered that the engine has them: a mempool's worth."""


class ProposalWait:
    """The bounded wait for what a phase expects: once per window, only while something is pending,
    so that an empty block is never late."""

    def __init__(self, application: Application, seconds: float) -> None:
        self._application, self._seconds = application, seconds
        self._arrived = asyncio.Event()
        self._spent: tuple[int, str] | None = None

    def arrived(self) -> None:
        """A transaction was seen."""
        self._arrived.set()

    async def wait(self, txs: Sequence[bytes]) -> None:
        """Until the pending ones are all that the phase waits for, or the time is up."""
        state, loop = self._application.state, asyncio.get_running_loop()
        window = (state.current.number, state.phase)
        until = loop.time() + self._seconds
        while pending := [*txs, *self._application.pending()]:
            if self._spent == window or proposal_complete(state, pending):
                return
            self._arrived.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._arrived.wait()
            except TimeoutError:
                self._spent = window


class Calls:
    """Answers requests; ``answer`` is what ``AbciServer`` serves.

    genesis: the only ``init_chain`` that is accepted. members: node ids that may connect. wait:
    seconds of ``prepare_proposal`` at most, less than half the engine's ``timeout_propose``.
    tell: gives the peer's machine ``CommitBlock`` and ``SnapshotTaken``, and returns when their
    effects are carried out. seat_power: the engine's power of one unit of ours.
    """

    def __init__(
        self,
        application: Application,
        genesis: pb.RequestInitChain,
        members: Callable[[], frozenset[str]],
        *,
        wait: float,
        tell: Callable[[object], None],
        seat_power: int,
    ) -> None:
        self._application, self._genesis, self._members = application, genesis, members
        self._tell, self._seat_power = tell, seat_power
        self._wait = ProposalWait(application, wait)
        self._block: CommitBlock | None = None
        self._since: float | None = None
        self.greeted = asyncio.Event()
        """Set by each engine that shakes hands."""
        self.committed = asyncio.Event()
        """Set by each block."""
        self.known: set[bytes] = set()
        """Transactions that the engine has asked about since the last block."""

    def lacks(self, tx: bytes) -> bool:
        """Whether a block could hold a transaction that the engine did not ask about."""
        return tx not in self.known and self._application.refusal(tx) is None

    def arrived(self) -> None:
        """A transaction was admitted, whoever brought it."""
        if self._since is None:
            self._since = asyncio.get_running_loop().time()
        self._wait.arrived()

    async def answer(self, request: pb.Request) -> pb.Response:
        """The answer to one request. Raises TorchbftError where the engine must not go on."""
        kind = str(request.WhichOneof("value"))
        question = getattr(request, kind)
        if kind == "prepare_proposal":
            await self._wait.wait(question.txs)
        answered: Message = _ANSWERS[kind](self, question)
        return pb.Response(**{kind: answered})  # type: ignore[arg-type]

    # --- the chain --------------------------------------------------------------------------------

    def _info(self, _: pb.Empty) -> pb.ResponseInfo:
        info = self._application.info()
        self.known.clear()
        self.greeted.set()
        return pb.ResponseInfo(
            data="torchbft",
            app_version=self._genesis.consensus_params.version.app,
            last_block_height=info.last_height,
            last_block_app_hash=info.last_app_hash,
        )

    def _init_chain(self, asked: pb.RequestInitChain) -> pb.ResponseInitChain:
        if not same_genesis(asked, self._genesis):
            raise MisuseError(
                "the engine was started with another genesis than the run file's",
                hint="put back this run's engine folder: it knows what this peer's key signed",
                where="init_chain",
            )
        app_hash = self._application.init_chain(genesis_of(asked.app_state_bytes))
        return pb.ResponseInitChain(app_hash=app_hash)

    def _check_tx(self, asked: pb.RequestCheckTx) -> pb.ResponseCheckTx:
        result = self._application.check_tx(asked.tx)
        if result.code == CODE_OK:
            if len(self.known) >= MAX_KNOWN:
                self.known.clear()
            self.known.add(asked.tx)
            self.arrived()
        return pb.ResponseCheckTx(code=result.code, log=result.log)

    def _prepare_proposal(self, asked: pb.RequestPrepareProposal) -> pb.ResponsePrepareProposal:
        height, limit = Height(asked.height), asked.max_tx_bytes
        return pb.ResponsePrepareProposal(
            txs=self._application.prepare_proposal(height, asked.txs, limit)
        )

    def _process_proposal(self, asked: pb.RequestProcessProposal) -> pb.ResponseVerdict:
        accepted = self._application.process_proposal(Height(asked.height), asked.txs)
        return pb.ResponseVerdict(result=ACCEPT_PROPOSAL if accepted else REJECT_PROPOSAL)

    def _finalize_block(self, asked: pb.RequestFinalizeBlock) -> pb.ResponseFinalizeBlock:
        reported = self._misbehaviour(asked.misbehavior)
        result = self._application.finalize_block(Height(asked.height), asked.txs, reported)
        now = asyncio.get_running_loop().time()
        seconds = now - self._since if self._since is not None else 0.0
        size = sum(map(len, asked.txs))
        self._block = CommitBlock(len(asked.txs), size, seconds, result.events)
        return pb.ResponseFinalizeBlock(
            tx_results=[
                pb.ExecTxResult(code=each.code, data=each.data, log=each.log)
                for each in result.tx_results
            ],
            validator_updates=[self._update(each) for each in result.validator_updates],
            app_hash=result.app_hash,
        )

    def _misbehaviour(self, reported: Sequence[pb.Misbehavior]) -> tuple[Misbehaviour, ...]:
        """Double votes of keys that are known; signatures are in the block's own evidence."""
        keys = {
            address_of(member.voting): member.voting for member in self._application.state.members
        }
        return tuple(
            Misbehaviour(keys[each.validator.address], Height(each.height))
            for each in reported
            if each.type == DUPLICATE_VOTE and each.validator.address in keys
        )

    def _update(self, update: ValidatorUpdate) -> pb.ValidatorUpdate:
        key = pb.PublicKey(ed25519=update.public)
        return pb.ValidatorUpdate(pub_key=key, power=update.power * self._seat_power)

    def _commit(self, _: pb.Empty) -> pb.ResponseCommit:
        block, self._block = self._block, None
        if block is None:
            raise MisuseError("no block was finalized", where="commit")
        before = self._application.info().last_height
        self._tell(block)
        if self._application.info().last_height != before + 1:
            raise HaltError("this peer is stopping: the block was not committed", where="commit")
        self.known.clear()
        self.committed.set()
        waits = bool(self._application.pending())
        self._since = asyncio.get_running_loop().time() if waits else None
        return pb.ResponseCommit()

    # --- questions and snapshots ------------------------------------------------------------------

    def _query(self, asked: pb.RequestQuery) -> pb.ResponseQuery:
        if asked.path.startswith(FILTER):
            return self._filter(asked.path.removeprefix(FILTER))
        try:
            value = self._application.query(asked.path, asked.data)
        except MisuseError as error:
            return pb.ResponseQuery(code=CODE_REFUSED, log=f"{error}; {error.hint}")
        return pb.ResponseQuery(value=value, height=self._application.info().last_height)

    def _filter(self, what: str) -> pb.ResponseQuery:
        """Members only. An address proves nothing (members move, and stand behind routers); the
        node id is proven by the handshake that follows, and then asked about."""
        kind, _, name = what.partition("/")
        if kind == "addr" or (kind == "id" and name in self._members()):
            return pb.ResponseQuery()
        return pb.ResponseQuery(code=CODE_REFUSED, log="only members of the run may connect")

    def _list_snapshots(self, _: pb.Empty) -> pb.ResponseListSnapshots:
        newest = self._application.info().last_height - BLOCKS_AFTER_SNAPSHOT
        return pb.ResponseListSnapshots(
            snapshots=[
                pb.Snapshot(
                    height=each.height,
                    format=SNAPSHOT_FORMAT,
                    chunks=each.chunks,
                    hash=each.digest,
                )
                for each in self._application.list_snapshots()
                if each.height <= newest
            ]
        )

    def _load_chunk(self, asked: pb.RequestLoadSnapshotChunk) -> pb.ResponseLoadSnapshotChunk:
        known = asked.format == SNAPSHOT_FORMAT
        height = Height(asked.height)
        chunk = self._application.load_snapshot_chunk(height, asked.chunk) if known else b""
        return pb.ResponseLoadSnapshotChunk(chunk=chunk)

    def _offer_snapshot(self, asked: pb.RequestOfferSnapshot) -> pb.ResponseVerdict:
        told = asked.snapshot
        if told.format != SNAPSHOT_FORMAT:
            return pb.ResponseVerdict(result=REJECT_FORMAT)
        snapshot = Snapshot(Height(told.height), told.chunks, told.hash)
        taken = self._application.offer_snapshot(snapshot, asked.app_hash)
        return pb.ResponseVerdict(result=ACCEPT if taken else REJECT)

    def _apply_chunk(self, asked: pb.RequestApplySnapshotChunk) -> pb.ResponseVerdict:
        before = self._application.info().last_height
        taken = self._application.apply_snapshot_chunk(asked.index, asked.chunk)
        if self._application.info().last_height != before:
            self._tell(SnapshotTaken())
        return pb.ResponseVerdict(result=ACCEPT if taken else REJECT_SNAPSHOT)


def init_chain_of(document: Mapping[str, Any]) -> pb.RequestInitChain:
    """The ``init_chain`` that follows from a genesis file, as a value."""
    params = document["consensus_params"]
    block, evidence = params["block"], params["evidence"]
    seconds, nanos = divmod(int(evidence["max_age_duration"]), 10**9)
    extensions = int(params["abci"]["vote_extensions_enable_height"])
    return pb.RequestInitChain(
        chain_id=document["chain_id"],
        initial_height=int(document["initial_height"]),
        consensus_params=pb.ConsensusParams(
            block=pb.BlockParams(max_bytes=int(block["max_bytes"]), max_gas=int(block["max_gas"])),
            evidence=pb.EvidenceParams(
                max_age_num_blocks=int(evidence["max_age_num_blocks"]),
                max_age_duration=pb.Duration(seconds=seconds, nanos=nanos),
                max_bytes=int(evidence["max_bytes"]),
            ),
            validator=pb.ValidatorParams(pub_key_types=params["validator"]["pub_key_types"]),
            version=pb.VersionParams(app=int(params["version"]["app"])),
            abci=pb.ABCIParams(vote_extensions_enable_height=extensions),
        ),
        validators=[
            pb.ValidatorUpdate(
                pub_key=pb.PublicKey(ed25519=base64.b64decode(each["pub_key"]["value"])),
                power=int(each["power"]),
            )
            for each in document["validators"]
        ],
        app_state_bytes=json.dumps(document["app_state"]).encode(),
    )


def same_genesis(one: pb.RequestInitChain, other: pb.RequestInitChain) -> bool:
    """Whether two genesis say the same; validators have no order, and JSON no spaces."""
    return _genesis_parts(one) == _genesis_parts(other)


def _genesis_parts(genesis: pb.RequestInitChain) -> tuple[object, ...]:
    params = pb.ConsensusParams()
    params.CopyFrom(genesis.consensus_params)
    params.DiscardUnknownFields()
    return (
        genesis.chain_id,
        genesis.initial_height,
        params.SerializeToString(deterministic=True),
        sorted((each.pub_key.ed25519, each.power) for each in genesis.validators),
        genesis_of(genesis.app_state_bytes),
    )


def genesis_of(app_state: bytes) -> bytes:
    """The encoded ``GenesisConfig`` in a genesis' ``app_state``; empty if there is none."""
    try:
        return bytes.fromhex(json.loads(app_state)["genesis"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return b""


_ANSWERS: dict[str, Callable[[Calls, Any], Message]] = {
    "echo": lambda _, asked: asked,
    "flush": lambda _, asked: asked,
    "info": Calls._info,
    "init_chain": Calls._init_chain,
    "query": Calls._query,
    "check_tx": Calls._check_tx,
    "commit": Calls._commit,
    "list_snapshots": Calls._list_snapshots,
    "offer_snapshot": Calls._offer_snapshot,
    "load_snapshot_chunk": Calls._load_chunk,
    "apply_snapshot_chunk": Calls._apply_chunk,
    "prepare_proposal": Calls._prepare_proposal,
    "process_proposal": Calls._process_proposal,
    "finalize_block": Calls._finalize_block,
}
