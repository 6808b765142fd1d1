"""The run file: strict, signed by content, and clear about what is wrong."""

import hashlib

import msgspec
import pytest

from torchbft.primitives.errors import ConfigError
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import (
    Ledger,
    RunSpec,
    connection_id,
    connection_key,
    dump_run,
    load_run,
    new_member,
    parse_run,
)

KEYS = [
    (SigningKey.derive(b"s" * 32, f"i{i}"), SigningKey.derive(b"s" * 32, f"v{i}")) for i in range(4)
]


def run(signers: int = 3, **fields: object) -> RunSpec:
    members = tuple(new_member(f"peer-{i}", a, b) for i, (a, b) in enumerate(KEYS))
    spec = RunSpec(name="test", seed="ab" * 32, members=members, **fields)  # type: ignore[arg-type]
    for i in range(signers):
        spec = spec.signed(f"peer-{i}", KEYS[i][0])
    return spec


def test_the_file_gives_the_run_back() -> None:
    spec = run()
    again = parse_run(dump_run(spec))
    assert again == spec
    assert again.run_id == spec.run_id
    again.check_signed()


def test_signatures_and_comments_do_not_change_the_run_but_values_do() -> None:
    spec = run()
    assert run(0).run_id == spec.run_id
    assert parse_run("# a comment\n" + dump_run(spec)).run_id == spec.run_id
    edited = parse_run(dump_run(spec).replace("learning_rate = 0.7", "learning_rate = 0.8"))
    assert edited.run_id != spec.run_id
    with pytest.raises(ConfigError, match="0 of 3 needed members signed"):
        edited.check_signed()


def test_too_few_signatures_and_signatures_of_strangers_do_not_count() -> None:
    with pytest.raises(ConfigError, match="2 of 3"):
        run(2).check_signed()
    with pytest.raises(ConfigError, match="2 of 3"):
        run(2).signed("stranger", SigningKey.generate()).check_signed()
    with pytest.raises(ConfigError, match="2 of 3"):
        run(2).signed("peer-3", KEYS[0][0]).check_signed()


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("rounds = 40", "rounds = 0", "training.rounds"),
        ("rounds = 40", "rounds = 'x'", "training.rounds"),
        ("rounds = 40", "surprise = 1", "surprise"),
        ("version = 1", "version = 9", "version 9"),
        ("f = -1", "f = 2", "n > 3f"),
        ('name = "peer-1"', 'name = "Peer 1"', "members"),
        ('name = "peer-1"', 'name = "peer-0"', "distinct names"),
        ('name = "peer-1"', 'name = "peer-9"', "in order of name"),
        ('kind = "embedded"', 'kind = "magic"', "ledger.kind"),
        ("momentum = 0.5", "momentum = nan", "outer.momentum"),
    ],
)
def test_a_wrong_value_is_named(old: str, new: str, names: str) -> None:
    text = dump_run(run())
    assert old in text
    with pytest.raises(Exception, match=names) as caught:
        parse_run(text.replace(old, new, 1))
    assert isinstance(caught.value, ConfigError | ValueError)


def test_a_voting_key_that_its_identity_did_not_certify_is_refused() -> None:
    spec = run()
    stolen = msgspec.structs.replace(spec.members[0], voting="cd" * 32)
    with pytest.raises(ConfigError, match="voting key of 'peer-0' is not certified"):
        parse_run(dump_run(msgspec.structs.replace(spec, members=(stolen, *spec.members[1:]))))


@pytest.mark.parametrize("text", ["", "[[", "a = 1", "\0", "members = 3"])
def test_garbage_is_one_clear_error(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_run(text)


def test_files_that_cannot_be_read(tmp_path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_run(tmp_path / "none.toml")
    path = tmp_path / "run.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="is not text"):
        load_run(path)
    path.write_bytes(b"#" * 300_000)
    with pytest.raises(ConfigError, match="is larger than"):
        load_run(path)


def test_a_peer_that_is_not_in_the_roster_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match="'stranger' is not in the roster") as caught:
        run().member("stranger")
    assert "admit" in caught.value.hint


def groups(**change: object) -> RunSpec:
    """A run on CometBFT with one member a host, and the second one changed."""
    members = [
        new_member(f"peer-{i}", a, b, host=f"host-{i}", port=7700) for i, (a, b) in enumerate(KEYS)
    ]
    members[1] = msgspec.structs.replace(members[1], **change)
    ledger = Ledger(kind="cometbft")
    return RunSpec(name="test", seed="ab" * 32, members=tuple(members), ledger=ledger)


def test_the_engines_port_follows_the_members_unless_it_is_given() -> None:
    assert groups().members[1].ledger_address == ("host-1", 7701)
    assert groups(ledger_port=9).members[1].ledger_address == ("host-1", 9)
    groups().check()


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"ledger_id": ""}, "'peer-1' has no ledger_id"),
        ({"ledger_id": connection_id(KEYS[0][0])}, "share a ledger_id"),
        ({"port": 65_535}, "'peer-1' needs a ledger_port"),
        ({"ledger_port": 7700}, "port 7700 of host-1 is listed twice"),
        ({"host": "host-0", "port": 7701}, "port 7701 of host-0 is listed twice"),
    ],
)
def test_members_that_cometbft_could_not_tell_apart_or_reach(
    change: dict[str, object], names: str
) -> None:
    run = groups(**change)
    with pytest.raises(ConfigError, match=names):
        run.check()
    msgspec.structs.replace(run, ledger=Ledger()).check()


def test_the_key_of_connections_is_derived_and_named_by_its_digest() -> None:
    identity = KEYS[0][0]
    key = connection_key(identity)
    assert key.public != identity.public
    assert connection_id(identity) == hashlib.sha256(key.public).hexdigest()[:40]
    assert new_member("peer-0", *KEYS[0]).ledger_id == connection_id(identity)
