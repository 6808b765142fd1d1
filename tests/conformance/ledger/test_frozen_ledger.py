"""Wire formats of the ledger and a whole simulated history, frozen by hash.

A change of a message is a new version of the wire; a change of the history means that machines of
two versions decide differently. ``python tests/conformance/ledger/test_frozen_ledger.py`` writes
the hashes anew; running it is approving the change.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from torchbft.primitives.ids import Height
from torchbft.primitives.wire import Wire, encode
from torchbft.protocols.ledger.certificates import double_vote
from torchbft.protocols.ledger.messages import (
    Blocks,
    Body,
    Kind,
    Prepared,
    SignedVote,
    SignerState,
    Status,
    Want,
    block_digest,
)
from torchbft.sim.ledgers import Ledgers
from torchbft.sim.puppets import Puppets

FROZEN = Path(__file__).parent / "frozen.json"
TABLE = Puppets()
BLOCK = TABLE.block(b"first", b"second")
DIGEST = block_digest(BLOCK)
PREPARED = TABLE.certificate(Kind.PREPARE, DIGEST)


def wire() -> dict[str, Wire]:
    """One value of each format; generated, so that a new field cannot be forgotten."""
    vote = TABLE.vote("p1", Kind.PREPARE, DIGEST)
    return {
        "block": BLOCK,
        "certificate": PREPARED,
        "finalized-block": TABLE.finalized(BLOCK),
        "vote": vote,
        "signed-vote": SignedVote(TABLE.run_id, vote),
        "proposal": TABLE.proposal(BLOCK),
        "later-proposal": TABLE.proposal(BLOCK, view=1, justification=TABLE.timeouts(0, PREPARED)),
        "time-out": TABLE.timeout("p2"),
        "time-out-with-lock": TABLE.timeout("p2", 3, PREPARED),
        "time-out-certificate": TABLE.timeouts(3),
        "status": Status(Height(7)),
        "want": Want(Height(7), DIGEST),
        "body": Body(BLOCK),
        "blocks": Blocks(Height(2), (encode(TABLE.finalized(BLOCK)),)),
        "signer-state": SignerState(TABLE.run_id, TABLE.keys["p0"].public),
        "prepared": Prepared(PREPARED),
        "evidence": double_vote(TABLE.run_id, vote, TABLE.vote("p1", Kind.PREPARE, b"x" * 32)),
    }


def history() -> bytes:
    """All blocks of a run in which a leader dies and comes back."""
    ledgers = Ledgers(7, seed=1)
    ledgers.cluster.start()
    for i in range(8):
        if i == 3:
            ledgers.cluster.crash(ledgers.machine(ledgers.names[0]).leader)
        ledgers.submit(b"tx-%d" % i)
        up = [name for name in ledgers.names if ledgers.cluster.is_up(name)]
        assert ledgers.cluster.run(10.0, lambda i=i, up=up: ledgers.applied([b"tx-%d" % i], up))
    log = ledgers.cluster.nodes[ledgers.names[0]].disk.read()
    return b"".join(log["blocks"])


CASES: dict[str, Callable[[], bytes]] = {
    **{name: lambda value=value: encode(value) for name, value in wire().items()},
    "block-digest": lambda: DIGEST,
    "validators-digest": lambda: TABLE.validators.digest,
    "history": history,
}


def found(name: str) -> str:
    return hashlib.sha256(CASES[name]()).hexdigest()


def test_every_case_is_frozen() -> None:
    assert json.loads(FROZEN.read_text()).keys() == CASES.keys()


@pytest.mark.parametrize("name", CASES)
def test_the_bytes_are_those_that_were_approved(name: str) -> None:
    assert found(name) == json.loads(FROZEN.read_text())[name]


def test_different_values_have_different_hashes() -> None:
    assert len({found(name) for name in CASES}) == len(CASES)


if __name__ == "__main__":
    FROZEN.write_text(json.dumps({name: found(name) for name in CASES}, indent=1) + "\n")
