"""CometBFT's genesis, derived from the signed run file: every member writes the same bytes.

The engine does not compare genesis files among members, and ignores later edits: one with another
age of evidence or another ``app_state`` ran along unnoticed. So the bytes are canonical, the home
folder refuses others, and the application refuses an ``init_chain`` that says anything else.
"""

from __future__ import annotations

import base64
import json
from typing import Any

from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import Member, RunSpec
from torchbft.primitives.wire import encode
from torchbft.protocols.chain.messages import address_of, chain_id_of
from torchbft.protocols.peer import genesis_config

GENESIS_TIME = "2024-01-01T00:00:00Z"
"""Fixed, and past: an empty time means "now" and differs at each member, one that lies ahead makes
the engine wait for it in silence."""
POWER_OF_A_SEAT = 10
"""With 1 the engine's integer rounding lets one validator with a stale clock stall heights."""
MAX_BLOCK_BYTES = 1 << 20
"""As the embedded ledger's: only small statements go into blocks."""
MAX_GAS = -1
"""No limit: nothing here is paid for in gas."""
MAX_TX_BYTES = 64 * 1024
"""An item has at most 4 KiB; evidence with two of them and a conviction fit many times over."""
EVIDENCE_BLOCKS = 100_000
EVIDENCE_NANOSECONDS = 14 * 86_400 * 10**9
"""Evidence is accepted until it is older than both: two weeks, in which a round may take hours."""
EVIDENCE_BYTES = 64 * 1024
"""In one block: two votes have 1 KB, so that every member can be convicted at once."""
APP_VERSION = 1
"""Of the application: changes with what a block does to its state."""


def chain_id(run: RunSpec) -> str:
    """The name under which CometBFT signs everything of this run."""
    return chain_id_of(run.run_id)


def validator_address(public: bytes) -> str:
    """How CometBFT names a voting key: 40 upper-case hexadecimal digits."""
    return address_of(public).hex().upper()


def genesis_document(run: RunSpec) -> dict[str, Any]:
    """The genesis as a value; its numbers are strings where CometBFT's JSON wants them so."""
    return {
        "genesis_time": GENESIS_TIME,
        "chain_id": chain_id(run),
        "initial_height": "1",
        "consensus_params": {
            "block": {"max_bytes": str(MAX_BLOCK_BYTES), "max_gas": str(MAX_GAS)},
            "evidence": {
                "max_age_num_blocks": str(EVIDENCE_BLOCKS),
                "max_age_duration": str(EVIDENCE_NANOSECONDS),
                "max_bytes": str(EVIDENCE_BYTES),
            },
            "validator": {"pub_key_types": ["ed25519"]},
            "version": {"app": str(APP_VERSION)},
            "abci": {"vote_extensions_enable_height": "0"},
            "authority": {"authority": ""},
        },
        "validators": [_validator(member) for member in run.validators],
        "app_hash": "",
        "app_state": {"genesis": encode(genesis_config(run)).hex()},
    }


def _validator(member: Member) -> dict[str, Any]:
    public = bytes.fromhex(member.voting)
    return {
        "address": validator_address(public),
        "pub_key": {
            "type": "tendermint/PubKeyEd25519",
            "value": base64.b64encode(public).decode(),
        },
        "power": str(POWER_OF_A_SEAT * member.power),
        "name": member.name,
    }


def genesis_bytes(run: RunSpec) -> bytes:
    """The one content of ``genesis.json``."""
    return json.dumps(genesis_document(run), sort_keys=True, separators=(",", ":")).encode()


def app_state_bytes(run: RunSpec) -> bytes:
    """What ``init_chain`` hands to the application as ``app_state_bytes``, to the byte."""
    document = genesis_document(run)["app_state"]
    return json.dumps(document, sort_keys=True, separators=(",", ":")).encode()


def peer_address(member: Member) -> str:
    """``id@host:port``, as CometBFT dials a member."""
    host, port = member.ledger_address
    return f"{member.ledger_id}@{f'[{host}]' if ':' in host else host}:{port}"


def check_genesis(found: bytes, run: RunSpec, where: str) -> None:
    """Raise ConfigError unless a genesis file is that of the run, to the byte."""
    if found != genesis_bytes(run):
        raise ConfigError(
            "this genesis is not the one of the run file",
            where=where,
            hint="use the folder of this run, or move it away and join again",
        )
