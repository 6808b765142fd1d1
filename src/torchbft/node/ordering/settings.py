"""CometBFT's configuration: the lines that differ from its defaults, each with its reason.

Everything that is not here keeps the default of the pinned version. Time-outs are each node's own
and are no part of what members must agree on.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torchbft.node.ordering.genesis import MAX_TX_BYTES, peer_address
from torchbft.node.transports.ports import is_loopback
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import RunSpec

PROPOSE_FLOOR, VOTE_FLOOR = 0.3, 0.1
"""Seconds without any network; a dead proposer then costs 0.4 s on loopback (defaults: 2 to 4)."""
PROPOSE_ROUND_TRIPS, VOTE_ROUND_TRIPS = 4, 2
"""A proposal and its parts, then the votes, each gossiped on request."""
WAITS_PER_PROPOSE = 2.5
"""A proposer may wait ``proposal_wait`` for items; it must stay under half of the time-out."""
GOSSIP_SLEEP_PER_LINK = 0.000_7
"""Seconds; three loops per connection wake up so often, so the more there are, the longer each
sleeps. 2 ms for 4 members; the default of 100 ms makes a block on loopback last a quarter of a
second, and 2 ms for 64 members would keep a core busy with waking up."""
SHORTEST_SLEEP = 0.001
"""Milliseconds are what ``duration`` can say."""
FLUSH_SECONDS = 0.001
"""The default of 10 ms would be most of a block on loopback."""
RECEIVE_BYTES_PER_SECOND = 1 << 20
"""From one member: a full block in a second, a fifth of the default."""
MEMPOOL_BYTES = 16 << 20
MEMPOOL_TXS = 5_000
"""Default 1 GB. 64 members with two statements a slot in three rounds have 3,000, of 4 KiB each."""
RPC_CONNECTIONS = 16
"""The node's own, the follower's, and those that it forwards to joiners."""
RPC_BODY_BYTES = 256 * 1024
"""A transaction in base64 has 88 KB."""
EVERYWHERE_V4, EVERYWHERE_V6 = "0.0.0.0", "::"


@dataclass(frozen=True, slots=True)
class Sockets:
    """Unix sockets of one engine: the application's, the signer's and the RPC's paths."""

    application: str
    signer: str
    rpc: str


def settings(
    run: RunSpec,
    me: PeerId,
    sockets: Sockets,
    *,
    round_trip: float = 0.0,
    listen: tuple[str, int] | None = None,
    metrics_port: int = 0,
    application: str = "",
) -> dict[str, Any]:
    """The content of ``config.toml``.

    round_trip: seconds to a quorum of members and back, measured. listen: where to listen instead
    of the roster's place. metrics_port: 0 means none.
    """
    return {
        "moniker": str(me),
        "proxy_app": application or f"unix://{sockets.application}",
        # One place guards the voting key, and may change it between two heights.
        "priv_validator_laddr": f"unix://{sockets.signer}",
        # The application is asked who may connect: members, of whom a convict is not heard.
        "filter_peers": True,
        # Its lines go into ours; what is not an error is told by the application and the RPC.
        "log_level": "error",
        "log_format": "json",
        "rpc": _rpc(sockets),
        "p2p": _p2p(run, me, listen),
        "mempool": _mempool(),
        "consensus": _consensus(run, round_trip),
        # Nobody asks the engine for transactions by hash: the node's own log has them.
        "tx_index": {"indexer": "null"},
        "instrumentation": _instrumentation(metrics_port),
    }


def _rpc(sockets: Sockets) -> dict[str, Any]:
    return {
        # A TCP port would be open to every user of the machine; our folder is not.
        "laddr": f"unix://{sockets.rpc}",
        "max_open_connections": RPC_CONNECTIONS,
        "max_body_bytes": RPC_BODY_BYTES,
    }


def _p2p(run: RunSpec, me: PeerId, listen: tuple[str, int] | None) -> dict[str, Any]:
    member = run.member(me)
    host, port = listen or (bind_host(member.host), member.ledger_address[1])
    others = [other for other in run.members if other.name != me]
    return {
        "laddr": f"tcp://{f'[{host}]' if ':' in host else host}:{port}",
        "persistent_peers": ",".join(peer_address(other) for other in others),
        # Members are never turned away for want of room, and nobody else is let in.
        "unconditional_peer_ids": ",".join(other.ledger_id for other in others),
        "max_num_inbound_peers": 0,
        "max_num_outbound_peers": 0,
        # The roster is the signed run file: nobody is found by hearsay.
        "pex": False,
        # Members may stand in one private network, or on one machine.
        "addr_book_strict": False,
        "allow_duplicate_ip": True,
        "flush_throttle_timeout": duration(FLUSH_SECONDS),
        "recv_rate": RECEIVE_BYTES_PER_SECOND,
        "send_rate": RECEIVE_BYTES_PER_SECOND,
    }


def bind_host(host: str) -> str:
    """Where to listen for a member with this host: all interfaces, unless it is loopback only."""
    if is_loopback(host):
        return "127.0.0.1" if host == "localhost" else host
    return EVERYWHERE_V6 if ":" in host else EVERYWHERE_V4


def _mempool() -> dict[str, Any]:
    # It goes on gossiping (the default): a block starts only at a validator that has a transaction.
    return {
        "size": MEMPOOL_TXS,
        "max_txs_bytes": MEMPOOL_BYTES,
        "max_tx_bytes": MAX_TX_BYTES,
    }


def _consensus(run: RunSpec, round_trip: float) -> dict[str, Any]:
    propose, vote = time_outs(run, round_trip)
    sleep = max(GOSSIP_SLEEP_PER_LINK * (len(run.members) - 1), SHORTEST_SLEEP)
    return {
        "timeout_propose": duration(propose),
        "timeout_propose_delta": duration(propose),
        "timeout_prevote": duration(vote),
        "timeout_prevote_delta": duration(vote),
        "timeout_precommit": duration(vote),
        "timeout_precommit_delta": duration(vote),
        # A block is final with its precommits: nothing is gained by waiting for more of them.
        "timeout_commit": "0s",
        # Between rounds the chain stands still.
        "create_empty_blocks": False,
        "peer_gossip_sleep_duration": duration(sleep),
    }


def time_outs(run: RunSpec, round_trip: float) -> tuple[float, float]:
    """Seconds that the first round of a height waits for its proposal, and for votes.

    Each further round waits once more as long, so that too short ones mend themselves.
    """
    propose = max(PROPOSE_FLOOR, WAITS_PER_PROPOSE * run.ledger.proposal_wait)
    return propose + PROPOSE_ROUND_TRIPS * round_trip, VOTE_FLOOR + VOTE_ROUND_TRIPS * round_trip


def duration(seconds: float) -> str:
    """As Go reads it: ``350ms``."""
    return f"{round(seconds * 1000)}ms"


def _instrumentation(port: int) -> dict[str, Any]:
    # By default its metrics would be served on all interfaces.
    return {"prometheus": bool(port), "prometheus_listen_addr": f"127.0.0.1:{port}"}
