"""Genesis, configuration and folder: the same bytes everywhere, and nothing open to outsiders."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path

import msgspec
import pytest
from comet_run import IDENTITY, NAMES, RUN, VOTING, comet_run

from torchbft.node.ordering import genesis
from torchbft.node.ordering import home as homes
from torchbft.node.ordering.home import Home
from torchbft.node.ordering.settings import Sockets, bind_host, settings, time_outs
from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import Ledger, connection_key, parse_run
from torchbft.primitives.runspec import dump_run as dump
from torchbft.primitives.wire import decode
from torchbft.protocols.peer import application_of
from torchbft.protocols.round.application import MAX_GENESIS_BYTES
from torchbft.protocols.round.state import GenesisConfig

SOCKETS = Sockets("/s/abci", "/s/signer", "/s/rpc")
ME = NAMES[0]


# --- genesis --------------------------------------------------------------------------------------


def test_every_member_writes_the_same_genesis() -> None:
    signed = RUN.signed(ME, IDENTITY[ME])
    again = parse_run("# written by hand\n" + dump(signed))
    assert genesis.genesis_bytes(again) == genesis.genesis_bytes(RUN)


def test_genesis_is_frozen() -> None:
    """A change makes members of one run write different files: it needs a new run file version.

    Without the parts that follow the run file's digest.
    """
    document = genesis.genesis_document(RUN) | {"chain_id": "", "app_state": {}}
    digest = sha256("test/genesis", json.dumps(document, sort_keys=True).encode()).hex()
    assert digest == "26a99ae2be5e7a778f85bd5726844e54c62c6715b4a900258acfb3219c73fb00"


def test_genesis_names_the_run_and_its_validators() -> None:
    run = msgspec.structs.replace(
        RUN,
        members=(
            msgspec.structs.replace(RUN.members[0], power=3),
            msgspec.structs.replace(RUN.members[1], validator=False),
            *RUN.members[2:],
        ),
    )
    document = json.loads(genesis.genesis_bytes(run))
    assert document["chain_id"] == run.run_id.hex()[:40]
    powers = {v["name"]: v["power"] for v in document["validators"]}
    assert powers == {"peer-a": "30", "peer-c": "10", "peer-d": "10"}
    assert document["validators"][0]["address"] == genesis.validator_address(VOTING[ME].public)
    held = decode(
        bytes.fromhex(document["app_state"]["genesis"]), GenesisConfig, limit=MAX_GENESIS_BYTES
    )
    assert held == application_of(run).state.genesis
    assert genesis.app_state_bytes(run) in genesis.genesis_bytes(run)


def test_a_genesis_that_differs_in_one_byte_is_refused() -> None:
    good = genesis.genesis_bytes(RUN)
    genesis.check_genesis(good, RUN, "here")
    for at in range(0, len(good), 37):
        bad = good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]
        with pytest.raises(ConfigError, match="not the one of the run file"):
            genesis.check_genesis(bad, RUN, "here")
    with pytest.raises(ConfigError):
        genesis.check_genesis(good + b"\n", RUN, "here")


def test_another_run_has_another_chain() -> None:
    other = comet_run(seed="23" * 32)
    assert genesis.chain_id(other) != genesis.chain_id(RUN)
    assert genesis.genesis_bytes(other) != genesis.genesis_bytes(RUN)


def test_addresses_of_members() -> None:
    member = RUN.members[1]
    assert genesis.peer_address(member) == f"{member.ledger_id}@host-b:7701"
    v6 = msgspec.structs.replace(member, host="fe80::1", ledger_port=9)
    assert genesis.peer_address(v6) == f"{member.ledger_id}@[fe80::1]:9"


# --- configuration --------------------------------------------------------------------------------


def test_nothing_is_open_to_outsiders() -> None:
    """The engine's defaults are: 40 strangers, peer exchange, RPC and metrics on TCP ports."""
    config = settings(RUN, ME, SOCKETS)
    p2p = config["p2p"]
    others = [member.ledger_id for member in RUN.members[1:]]
    assert p2p["unconditional_peer_ids"].split(",") == others
    assert [peer.partition("@")[0] for peer in p2p["persistent_peers"].split(",")] == others
    assert (p2p["max_num_inbound_peers"], p2p["pex"], config["filter_peers"]) == (0, False, True)
    assert config["rpc"]["laddr"] == "unix:///s/rpc"
    assert config["priv_validator_laddr"] == "unix:///s/signer"
    assert config["proxy_app"] == "unix:///s/abci"
    assert not config["instrumentation"]["prometheus"]
    watched = settings(RUN, ME, SOCKETS, metrics_port=9090)["instrumentation"]
    assert watched == {"prometheus": True, "prometheus_listen_addr": "127.0.0.1:9090"}


def test_the_engines_own_application_can_stand_in() -> None:
    assert settings(RUN, ME, SOCKETS, application="kvstore")["proxy_app"] == "kvstore"


@pytest.mark.parametrize("wait", [0.01, 0.2, 1.0, 30.0])
@pytest.mark.parametrize("round_trip", [0.0, 0.1])
def test_a_proposer_that_waits_is_never_timed_out(wait: float, round_trip: float) -> None:
    run = comet_run(ledger=Ledger(kind="cometbft", proposal_wait=wait))
    propose, vote = time_outs(run, round_trip)
    assert wait < propose / 2
    assert propose >= 0.3 + 4 * round_trip
    assert vote == 0.1 + 2 * round_trip


def test_time_outs_are_as_the_engine_reads_them() -> None:
    consensus = settings(RUN, ME, SOCKETS, round_trip=0.1)["consensus"]
    assert consensus["timeout_propose"] == consensus["timeout_propose_delta"] == "900ms"
    assert consensus["timeout_prevote"] == consensus["timeout_precommit"] == "300ms"
    assert consensus["timeout_commit"] == "0s"
    assert consensus["create_empty_blocks"] is False


@pytest.mark.parametrize(
    ("host", "bound"),
    [
        ("127.0.0.1", "127.0.0.1"),
        ("localhost", "127.0.0.1"),
        ("::1", "::1"),
        ("clinic.example.org", "0.0.0.0"),
        ("192.0.2.1", "0.0.0.0"),
        ("2001:db8::1", "::"),
    ],
)
def test_a_member_on_loopback_listens_there_only(host: str, bound: str) -> None:
    assert bind_host(host) == bound


def test_where_it_listens() -> None:
    assert settings(RUN, ME, SOCKETS)["p2p"]["laddr"] == "tcp://0.0.0.0:7701"
    other = settings(RUN, ME, SOCKETS, listen=("::", 9))["p2p"]
    assert other["laddr"] == "tcp://[::]:9"


# --- the folder -----------------------------------------------------------------------------------


def prepared(folder: Path) -> Home:
    home = Home(folder)
    home.prepare(RUN, connection_key(IDENTITY[ME]), settings(RUN, ME, home.sockets()))
    return home


def test_the_folder_holds_what_the_engine_reads_and_nobody_else_may(tmp_path: Path) -> None:
    assert Home(tmp_path / "home").fresh
    home = prepared(tmp_path / "home")
    assert not home.fresh
    assert tomllib.loads((home.config / "config.toml").read_text())["moniker"] == ME
    assert (home.config / "genesis.json").read_bytes() == genesis.genesis_bytes(RUN)
    open_ones = [path for path in home.folder.rglob("*") if path.stat().st_mode & 0o077]
    assert open_ones == []
    secret = (home.config / "node_key.json").read_bytes()
    assert IDENTITY[ME].seed().hex().encode() not in secret
    assert IDENTITY[ME].seed() not in secret


def test_preparing_again_keeps_the_genesis_and_renews_the_rest(tmp_path: Path) -> None:
    home = prepared(tmp_path / "home")
    (home.config / "config.toml").write_text("pex = true")
    prepared(home.folder)
    assert "pex = false" in (home.config / "config.toml").read_text()


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    home = prepared(tmp_path / "home")
    other = comet_run(seed="23" * 32)
    with pytest.raises(ConfigError, match="not the one of the run file"):
        home.prepare(other, connection_key(IDENTITY[ME]), settings(other, ME, SOCKETS))


def test_sockets_lie_in_a_private_folder_with_a_path_that_fits(tmp_path: Path) -> None:
    near = Home(tmp_path / "h").sockets()
    far_home = Home(tmp_path / ("x" * 120))
    far = far_home.sockets()
    assert near.rpc.startswith(str(tmp_path))
    assert not far.rpc.startswith(str(tmp_path))
    assert far == far_home.sockets()
    for path in (near.application, far.application, far.signer, far.rpc):
        assert len(path) < 104
        assert Path(path).parent.stat().st_mode & 0o777 == 0o700
    Path(far.rpc).parent.rmdir()


def test_an_open_or_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "open").mkdir(mode=0o755)
    with pytest.raises(ConfigError, match="open to other users"):
        homes.private_folder(tmp_path / "open")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="not a folder of this user's own"):
        homes.private_folder(tmp_path / "link")
    (tmp_path / "mine").mkdir(mode=0o700)
    if os.getuid() == 0:
        os.chown(tmp_path / "mine", 12345, -1)
        with pytest.raises(ConfigError, match="not a folder of this user's own"):
            homes.private_folder(tmp_path / "mine")
