"""A run of four members on CometBFT, and what one of them signs."""

from __future__ import annotations

import msgspec

from torchbft.node.ordering.genesis import chain_id
from torchbft.node.ordering.proto import privval_pb2 as pb
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Data, Ledger, RunSpec, new_member

NAMES = tuple(PeerId(f"peer-{letter}") for letter in "abcd")
IDENTITY = {name: SigningKey.derive(bytes(32), f"{name}/identity") for name in NAMES}
VOTING = {name: SigningKey.derive(bytes(32), f"{name}/voting") for name in NAMES}


def comet_run(**fields: object) -> RunSpec:
    """One member a host."""
    members = tuple(
        new_member(name, IDENTITY[name], VOTING[name], host=f"host-{name[-1]}", port=7700)
        for name in NAMES
    )
    run = RunSpec(
        name="groups",
        seed="22" * 32,
        members=members,
        data=Data(samples=100),
        ledger=Ledger(kind="cometbft"),
    )
    return msgspec.structs.replace(run, **fields)


RUN = comet_run()
CHAIN = chain_id(RUN)


def block(byte: int) -> pb.BlockID:
    return pb.BlockID(
        hash=bytes([byte]) * 32, part_set_header=pb.PartSetHeader(total=1, hash=bytes([byte]) * 32)
    )


def vote(
    type_: int, height: int, round_: int = 0, of: int | None = 1, seconds: int = 9
) -> pb.Message:
    """A request to sign a vote for block ``of``, None for none."""
    asked = pb.Vote(type=type_, height=height, round=round_, validator_index=2)
    asked.timestamp.seconds, asked.timestamp.nanos = seconds, 5
    asked.block_id.CopyFrom(block(of) if of is not None else pb.BlockID())
    return pb.Message(sign_vote_request=pb.SignVoteRequest(vote=asked, chain_id=CHAIN))


def proposal(
    height: int, round_: int = 0, of: int = 1, pol_round: int = -1, seconds: int = 9
) -> pb.Message:
    """A request to sign a proposal of block ``of``."""
    asked = pb.Proposal(type=32, height=height, round=round_, pol_round=pol_round)
    asked.timestamp.seconds = seconds
    asked.block_id.CopyFrom(block(of))
    return pb.Message(sign_proposal_request=pb.SignProposalRequest(proposal=asked, chain_id=CHAIN))
