"""The engine's own light client, asked about chains that we made: ``cometbft light``.

``Provider`` answers the RPC calls that it makes, from records; ``verdict`` starts it with a trusted
first header and asks it for a later one, which it verifies header by header.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from comet_swarm import SECONDS, free_ports

from torchbft.node.ordering.binary import find_binary
from torchbft.protocols.chain.hashes import header_hash
from torchbft.protocols.chain.messages import BlockId, ChainRecord, Commit, Header, Timestamp

WEBSOCKET_MAGIC = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
CENTURY = "876000h"


def as_time(time_: Timestamp) -> str:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(seconds=time_.seconds)
    return f"{moment.strftime('%Y-%m-%dT%H:%M:%S').zfill(19)}.{time_.nanos:09d}Z"


def as_id(id_: BlockId | None) -> dict[str, Any]:
    if id_ is None:
        return {"hash": "", "parts": {"total": 0, "hash": ""}}
    parts = {"total": id_.parts, "hash": id_.parts_hash.hex().upper()}
    return {"hash": id_.hash.hex().upper(), "parts": parts}


def as_header(header: Header) -> dict[str, Any]:
    told: dict[str, Any] = {
        name: value.hex().upper()
        for name in Header.__struct_fields__
        if isinstance(value := getattr(header, name), bytes)
    }
    told["proposer_address"] = told.pop("proposer")
    return told | {
        "version": {"block": str(header.block_version), "app": str(header.app_version)},
        "chain_id": header.chain_id,
        "height": str(header.height),
        "time": as_time(header.time),
        "last_block_id": as_id(header.last_block_id),
    }


def as_commit(commit: Commit) -> dict[str, Any]:
    signatures = [
        {
            "block_id_flag": one.flag,
            "validator_address": one.address.hex().upper(),
            "timestamp": as_time(one.time),
            "signature": base64.b64encode(one.signature).decode() or None,
        }
        for one in commit.signatures
    ]
    id_ = as_id(commit.block_id)
    place = {"height": str(commit.height), "round": commit.round}
    return {**place, "block_id": id_, "signatures": signatures}


def as_validators(record: ChainRecord) -> dict[str, Any]:
    validators = [
        {
            "address": one.address.hex().upper(),
            "pub_key": {
                "type": "tendermint/PubKeyEd25519",
                "value": base64.b64encode(one.public).decode(),
            },
            "voting_power": str(one.power),
            "proposer_priority": "0",
        }
        for one in record.validators
    ]
    count = str(len(validators))
    height = str(record.header.height)
    return {"block_height": height, "validators": validators, "count": count, "total": count}


class Provider(ThreadingHTTPServer):
    """Answers ``commit`` and ``validators`` of these records, as a full node's RPC would."""

    daemon_threads = True

    def __init__(self, records: Sequence[ChainRecord]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.records = {record.header.height: record for record in records}
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def address(self) -> str:
        return f"tcp://127.0.0.1:{self.server_port}"

    def result(self, method: str, parameters: dict[str, Any]) -> Any:
        record = self.records[int(parameters.get("height") or max(self.records))]
        if method == "validators":
            return as_validators(record)
        header, commit = as_header(record.header), as_commit(record.commit)
        return {"signed_header": {"header": header, "commit": commit}, "canonical": True}

    def __exit__(self, *args: object) -> None:
        self.shutdown()
        super().__exit__(*args)  # type: ignore[arg-type]


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        result = self.server.result(asked["method"], asked["params"])
        body = json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        """The client opens a websocket for events, of which there are none here."""
        key = self.headers["Sec-WebSocket-Key"].encode() + WEBSOCKET_MAGIC
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1(key).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accept)
        self.end_headers()
        while self.rfile.read(1):
            pass

    def log_message(self, *args: object) -> None:
        pass


def _answer(process: subprocess.Popen[bytes], url: str) -> dict[str, Any]:
    """What the light client says, once it is up. It gives refusals as errors of the call."""
    end = time.monotonic() + SECONDS
    while True:
        try:
            return dict(json.loads(urllib.request.urlopen(url, timeout=SECONDS).read()))
        except urllib.error.HTTPError as error:
            return dict(json.loads(error.read()))
        except OSError:
            assert process.poll() is None, "the light client ended"
            assert time.monotonic() < end, "the light client does not answer"
            time.sleep(0.05)


def verdict(records: Sequence[ChainRecord], folder: Path, height: int) -> str:
    """Why the engine's light client, trusting the first of these records, refuses the header of a
    height; empty if it takes it. ``folder`` must be a new one."""
    (port,) = free_ports(1)
    with ExitStack() as stack:
        primary, witness = (stack.enter_context(Provider(records)) for _ in range(2))
        command = [
            str(find_binary()), "light", records[0].header.chain_id, "--sequential",
            "--primary", primary.address, "--witnesses", witness.address,
            "--height", "1", "--hash", header_hash(records[0].header).hex(),
            "--trusting-period", CENTURY, "--home-dir", str(folder),
            "--laddr", f"tcp://127.0.0.1:{port}",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            told = _answer(process, f"http://127.0.0.1:{port}/commit?height={height}")
        finally:
            process.kill()
            process.wait()
    error = told.get("error")
    return f"{error['message']}: {error['data']}" if error else ""
