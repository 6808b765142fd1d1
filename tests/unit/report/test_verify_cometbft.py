"""The verifier on a run that CometBFT ordered: yes to a true one, no, with the place, to others."""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from torchbft.cli.main import main
from torchbft.node.ordering.follower import CHAIN_LOG
from torchbft.node.ordering.genesis import genesis_document
from torchbft.node.storage.log import AppendLog, read_log
from torchbft.primitives.abci import FinalizeResult, ValidatorUpdate
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Member, RunSpec
from torchbft.primitives.wire import encode
from torchbft.protocols.chain.checks import updated
from torchbft.protocols.chain.evidence import double_vote
from torchbft.protocols.chain.messages import (
    ChainRecord,
    DuplicateVote,
    Validator,
    address_of,
    decode_record,
)
from torchbft.protocols.ledger.messages import decode_finalized
from torchbft.protocols.peer import application_of, checks_of
from torchbft.protocols.round import messages as m
from torchbft.report.cometbft import CometChain, genesis_of, seats_times_power
from torchbft.report.findings import Findings, Verdict
from torchbft.report.logs import LogRecord
from torchbft.report.replay import Chain, Models, Replay
from torchbft.report.sets import Sets
from torchbft.report.verify import verify
from torchbft.sim.chain import ChainMaker, crafted_signature
from torchbft.tensors.recipe import Recipe

Ordered = tuple[Any, Path]
replace = msgspec.structs.replace


@pytest.fixture
def copy(ordered_run: Ordered, tmp_path: Path) -> Path:
    """A copy of the run's folder with two of its four peers, which a test may damage."""
    folder = Path(shutil.copytree(ordered_run[1], tmp_path / "run"))
    for name in ("peer-c", "peer-d"):
        shutil.rmtree(folder / "peers" / name)
    return folder


def log_of(folder: Path, name: str = "peer-b") -> Path:
    return folder / "peers" / name / CHAIN_LOG


def rewrite(path: Path, records: list[bytes]) -> None:
    """A log of these records, chained anew as somebody with the file can."""
    path.unlink()
    log = AppendLog(path)
    for record in records:
        log.append(record)
    log.close()


def edit(folder: Path, change: Callable[[list[ChainRecord]], object], *names: str) -> None:
    """Change the records of these peers' logs (of both)."""
    for name in names or ("peer-a", "peer-b"):
        records = [decode_record(data) for data in read_log(log_of(folder, name))]
        change(records)
        rewrite(log_of(folder, name), [encode(record) for record in records])


def says(verdict: Verdict, what: str, where: str = "") -> bool:
    return not verdict.ok and any(what in p.what and where in p.where for p in verdict.problems)


def test_a_true_run_is_verified_and_everything_was_counted(ordered_run: Ordered) -> None:
    verdict = verify(ordered_run[1])
    assert verdict.problems == ()
    assert verdict.ok
    assert verdict.checked["rounds"] == verdict.checked["signed roots"] == 3
    assert verdict.checked["rounds aggregated again"] == 3
    assert verdict.checked["certificates"] == 4 * verdict.checked["blocks"]
    assert verdict.checked["certificate signatures"] == 4 * verdict.checked["certificates"]
    assert verdict.checked["evidence"] == 1
    assert "votes" not in verdict.checked, "those of the embedded ledger"


def test_both_engines_give_the_same_rounds(ordered_run: Ordered) -> None:
    """Differential: the very same blocks through the embedded ledger's certificates."""
    run, folder = ordered_run
    verdict = verify(folder)
    findings = Findings()
    chain = Chain(run.spec.run_id, Sets(run.spec), findings)
    records = run.cluster.nodes[PeerId("peer-a")].disk.read()["blocks"]
    chain.add([LogRecord(str(i), record) for i, record in enumerate(records)])
    assert chain.blocks[1].block.txs == decode_finalized(records[0]).block.txs
    payloads = {p.name: p for p in folder.glob("peers/peer-a/payloads/*/*")}
    models = Models(
        run.spec, Recipe.of(run.spec), {bytes.fromhex(n): p for n, p in payloads.items()}, [],
        findings, run.start,
    )  # fmt: skip
    replay = Replay(run.spec, models, findings)
    replay.through(chain)
    assert findings.problems == []
    assert tuple(replay.rounds.values()) == verdict.rounds
    assert {r.root for r in verdict.rounds[-1:]} == {
        state.root().hex() for state in run.states.values()
    }


def test_the_command_gives_the_same_keys_without_the_engine(
    ordered_run: Ordered, proven: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("PATH", "")
    told = []
    for folder in (ordered_run[1], proven):
        assert main(["verify", str(folder), "--json"]) == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0].keys() == told[1].keys()
    assert told[0]["ledger_verified"] is True
    assert set(told[1]["checked"]) - set(told[0]["checked"]) == {"votes"}


def test_one_peers_folder_is_enough(copy: Path) -> None:
    shutil.rmtree(copy / "peers" / "peer-a")
    assert verify(copy).ok


@pytest.mark.parametrize("seed", range(6))
def test_any_flipped_byte_of_a_log_is_found_and_placed(copy: Path, seed: int) -> None:
    random = Random(seed)
    path = log_of(copy)
    data = bytearray(path.read_bytes())
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    path.write_bytes(bytes(data))
    assert any(str(path) in p.where and "byte" in p.what for p in verify(copy).problems)


@pytest.mark.parametrize("seed", range(8))
def test_a_flipped_byte_under_a_framing_made_anew_is_found(copy: Path, seed: int) -> None:
    random = Random(seed)
    records = list(read_log(log_of(copy)))
    at = random.randrange(len(records))
    data = bytearray(records[at])
    data[random.randrange(len(data))] ^= 1 << random.randrange(8)
    rewrite(log_of(copy), [*records[:at], bytes(data), *records[at + 1 :]])
    verdict = verify(copy)
    assert any(f"{CHAIN_LOG}, record {at}" in p.where for p in verdict.problems), verdict.problems


def test_a_block_taken_out_of_all_logs_is_found(copy: Path) -> None:
    edit(copy, lambda records: records.pop(3))
    assert says(verify(copy), "no log holds it, but later ones are here", "block 4")


def test_the_first_block_taken_out_is_found(copy: Path) -> None:
    edit(copy, lambda records: records.pop(0))
    assert says(verify(copy), "no log holds it", "block 1")


def test_a_gap_in_one_log_is_filled_by_another(copy: Path) -> None:
    """As of a peer whose engine was given a snapshot."""
    edit(copy, lambda records: records.__delitem__(slice(2, 5)), "peer-a")
    verdict = verify(copy)
    assert verdict.ok
    assert verdict.checked["certificates"] == 2 * verdict.checked["blocks"] - 3


def test_blocks_in_another_order_are_found(copy: Path) -> None:
    edit(copy, lambda records: records.reverse(), "peer-b")
    assert says(verify(copy), "comes after block", CHAIN_LOG)


def test_reordered_transactions_are_found(copy: Path) -> None:
    def turn(records: list[ChainRecord]) -> None:
        at = next(i for i, record in enumerate(records) if len(record.txs) > 1)
        records[at] = replace(records[at], txs=records[at].txs[::-1])

    edit(copy, turn)
    assert says(verify(copy), "transactions do not fit their hash")


def test_a_signature_of_another_height_is_found(copy: Path) -> None:
    def turn(records: list[ChainRecord]) -> None:
        places = list(records[4].commit.signatures)
        old = records[3].commit.signatures[1].signature
        places[1] = replace(places[1], signature=old)
        commit = replace(records[4].commit, signatures=tuple(places))
        records[4] = replace(records[4], commit=commit)

    edit(copy, turn)
    assert says(verify(copy), "block 5: the signature of", "record 4")


def test_a_log_of_another_run_is_found(copy: Path) -> None:
    def turn(records: list[ChainRecord]) -> None:
        header = replace(records[0].header, chain_id="another")
        records[0] = replace(records[0], header=header)

    edit(copy, turn, "peer-b")
    assert says(verify(copy), "is of chain 'another'", "record 0")


def test_no_log_at_all(copy: Path) -> None:
    for name in ("peer-a", "peer-b"):
        log_of(copy, name).unlink()
    verdict = verify(copy)
    assert says(verdict, "no log holds a finalized block")


# What a quorum of liars may sign, each time with perfect signatures.


def verified(run: Any, maker: ChainMaker, *others: ChainMaker) -> tuple[Findings, Replay]:
    """The verdict on these chains' records alone, without payloads and models."""
    findings = Findings()
    chain = CometChain(run.spec, findings)
    for number, each in enumerate((maker, *others)):
        chain.add([
            LogRecord(f"log {number}, record {i}", encode(record))
            for i, record in enumerate(each.records)
        ])  # fmt: skip
    models = Models(run.spec, Recipe.of(run.spec), {}, [], findings)
    replay = Replay(run.spec, models, findings)
    replay.through(chain)
    replay.convicted |= chain.convicted
    return findings, replay


def blocks_of(run: Any) -> list[tuple[bytes, ...]]:
    return [record.txs for record in run.chain().records]


def begun(run: Any, until: int) -> tuple[ChainMaker, Any]:
    """The true chain up to a height, and the application after it."""
    application = application_of(run.spec)
    genesis = genesis_of(run.spec, application.info().last_app_hash)
    maker = ChainMaker(genesis, run.voting.values())
    maker.drive(application, blocks_of(run)[:until])
    return maker, application


def test_the_true_chain_passes_this_way_too(ordered_run: Ordered) -> None:
    findings, replay = verified(ordered_run[0], ordered_run[0].chain())
    assert findings.problems == []
    assert len(replay.rounds) == 3


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"app_hash": bytes(32)}, "carries a false application hash"),
        ({"last_results_hash": bytes(32)}, "carries a false hash of the results"),
        ({"next_validators_hash": bytes(32)}, "announces other validators"),
        ({"consensus_hash": bytes(32)}, "consensus parameters"),
    ],
)
@pytest.mark.parametrize("height", [1, 6])
def test_a_false_header_that_a_quorum_signed_is_found(
    ordered_run: Ordered, fields: dict[str, bytes], says: str, height: int
) -> None:
    maker, _ = begun(ordered_run[0], height - 1)
    maker.block(blocks_of(ordered_run[0])[height - 1], **fields)
    findings, _ = verified(ordered_run[0], maker)
    assert any(says in problem.what for problem in findings.problems)


@pytest.mark.parametrize("change", ["fewer", "power", "key", "time"])
def test_the_genesis_is_the_run_files(ordered_run: Ordered, change: str) -> None:
    run = ordered_run[0]
    application = application_of(run.spec)
    genesis = genesis_of(run.spec, application.info().last_app_hash)
    first, *rest = genesis.validators
    stranger = SigningKey.derive(bytes(32), "stranger")
    fields: dict[str, Any] = {
        "fewer": {"validators": tuple(rest)},
        "power": {"validators": (replace(first, power=11), *rest)},
        "key": {"validators": (replace(first, public=stranger.public), *rest)},
        "time": {"time": replace(genesis.time, nanos=1)},
    }[change]
    other = dataclasses.replace(genesis, **fields)
    maker = ChainMaker(other, [*run.voting.values(), stranger])
    maker.drive(application, blocks_of(run)[:2])
    findings, _ = verified(run, maker)
    assert any("block 1" in p.what and "genesis" in p.what for p in findings.problems)


def test_a_chain_of_a_strangers_own_validators_takes_no_height_from_the_true_one(
    ordered_run: Ordered,
) -> None:
    """Anybody can make one, under the run's own name, and its log may come first."""
    run = ordered_run[0]
    application = application_of(run.spec)
    genesis = genesis_of(run.spec, application.info().last_app_hash)
    strangers = [SigningKey.derive(bytes(32), f"stranger {i}") for i in range(4)]
    own = tuple(Validator(key.public, 10) for key in strangers)
    forger = ChainMaker(dataclasses.replace(genesis, validators=own), strangers)
    forger.drive(application, [(), *blocks_of(run)[:3]])
    findings, replay = verified(run, forger, run.chain())
    assert len(replay.rounds) == 3
    first = next(p for p in findings.problems if p.where == "log 0, record 0")
    assert first.what == "block 1 its validators are not the genesis file's"
    assert replay.convicted == verified(run, run.chain())[1].convicted


def test_the_genesis_is_the_one_that_the_engine_is_given(ordered_run: Ordered) -> None:
    spec: RunSpec = ordered_run[0].spec
    file, mine = genesis_document(spec), genesis_of(spec, b"")
    assert file["chain_id"] == mine.chain_id == spec.run_id.hex()[:40]
    assert {v["address"]: int(v["power"]) for v in file["validators"]} == {
        v.address.hex().upper(): v.power for v in mine.validators
    }
    assert file["consensus_params"]["version"]["app"] == str(mine.app_version)


def test_changes_of_validators_have_the_engines_power(ordered_run: Ordered) -> None:
    """The application counts seats; the engine hears of ten for each."""
    key = SigningKey.derive(bytes(32), "joins").public
    updates = (ValidatorUpdate(key, 2), ValidatorUpdate(bytes(32), 0))
    told = seats_times_power(FinalizeResult((), b"hash", updates))
    assert told.validator_updates == (ValidatorUpdate(key, 20), ValidatorUpdate(bytes(32), 0))
    maker, application = begun(ordered_run[0], 0)
    chain = CometChain(ordered_run[0].spec, Findings())
    chain.begin(application)
    first = maker.block([], app_hash=b"hash")
    maker.expect(next_validators=updated(maker.validators, told.validator_updates))
    second = maker.block([], app_hash=b"hash")
    chain.add([LogRecord("log", encode(record)) for record in (first, second)])
    assert chain.fault(1) == "carries a false application hash"
    chain.applied(1, FinalizeResult((), b"hash", updates))
    assert chain.fault(2) is None


def test_a_crafted_signature_does_not_make_a_valid_chain_fail(ordered_run: Ordered) -> None:
    """One liar's votes pass the engine and fail OpenSSL and libsodium: everyone's log has them."""
    run = ordered_run[0]
    application = application_of(run.spec)
    maker = ChainMaker(genesis_of(run.spec, application.info().last_app_hash), run.voting.values())
    maker.sign[run.voting["peer-d"].public] = crafted_signature
    maker.drive(application, blocks_of(run))
    findings, replay = verified(run, maker)
    assert findings.problems == []
    assert len(replay.rounds) == 3


def test_evidence_in_a_block_convicts(ordered_run: Ordered) -> None:
    run = ordered_run[0]
    maker, _ = begun(run, 5)
    liar = next(v for v in maker.validators if v.public == run.voting["peer-d"].public)
    maker.block(blocks_of(run)[5], evidence=[maker.double_vote(liar, 3)])
    findings, replay = verified(run, maker)
    assert findings.problems == []
    assert findings.checked["double votes"] == 1
    assert replay.convicted == {"peer-d"}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"power": 9}, "false powers"),
        ({"total_power": 30}, "false powers"),
        ({"signature": bytes(64)}, "false signature"),
        ({"height": 9}, "a height to come"),
        ({"round": 1}, "not two contradicting votes"),
    ],
)
def test_false_evidence_that_a_quorum_signed_is_found(
    ordered_run: Ordered, change: dict[str, Any], says: str
) -> None:
    run = ordered_run[0]
    maker, _ = begun(run, 5)
    told: DuplicateVote = maker.double_vote(maker.validators[1], 3)
    if change.keys() & {"power", "total_power"}:
        told = replace(told, **change)
    else:
        told = replace(told, first=replace(told.first, **change))
    maker.block(blocks_of(run)[5], evidence=[told])
    findings, replay = verified(run, maker)
    assert any("evidence in block 6" in p.what and says in p.what for p in findings.problems)
    assert replay.convicted == set()


def test_a_log_that_goes_on_from_another_block_is_found(ordered_run: Ordered) -> None:
    """It has a gap where the other log ends, and neither is wrong by itself."""
    run = ordered_run[0]
    one, _ = begun(run, 2)
    two, _ = begun(run, 1)
    two.block([])
    two.block(blocks_of(run)[2])
    two.records = two.records[2:]
    findings, _ = verified(run, one, two)
    (problem,) = findings.problems
    assert problem.what == "block 3 in its last commit, the commit is for another block"


def test_a_fork_names_those_who_signed_both(ordered_run: Ordered) -> None:
    run = ordered_run[0]
    one, _ = begun(run, 4)
    two, _ = begun(run, 4)
    one.block(blocks_of(run)[4], absent=[0])
    two.block([], absent=[3])
    findings, replay = verified(run, one, two)
    (problem,) = [p for p in findings.problems if "differs from" in p.what]
    both = {one.validators[1].public, one.validators[2].public}
    names = sorted(name for name, key in run.voting.items() if key.public in both)
    assert replay.convicted == set(names)
    assert problem.what.endswith(f"this convicts {', '.join(names)}")


def test_whose_a_later_key_is_the_application_knows(ordered_run: Ordered) -> None:
    maker, application = begun(ordered_run[0], 2)
    key = SigningKey.derive(bytes(32), "rotated").public
    at = replace(maker.records[0], validators=(*maker.validators, Validator(key, 10)))
    chain = CometChain(ordered_run[0].spec, Findings())
    assert chain.names(at)[address_of(key)] == f"key-{key.hex()[:28]}"
    application.names[key] = PeerId("peer-a")
    chain.begin(application)
    assert chain.names(at)[address_of(key)] == "peer-a"
    assert sorted(chain.names(at).values()) == ["peer-a", "peer-a", "peer-b", "peer-c", "peer-d"]


def test_a_double_vote_that_a_member_put_on_the_ledger_convicts(ordered_run: Ordered) -> None:
    """What the follower finds in a block's evidence goes to the application as a transaction."""
    run = ordered_run[0]
    maker, application = begun(run, 1)
    liar = next(v for v in maker.validators if v.public == run.voting["peer-d"].public)
    found = maker.double_vote(liar, 1)
    evidence = double_vote(maker.genesis.chain_id, PeerId("peer-d"), found.first, found.second)
    current = application.state.current
    head = (1, run.spec.run_id, current.epoch, current.number, "peer-a")
    tx = m.sign(m.EvidenceTx(*head, evidence), run.voting["peer-a"])
    assert application.refusal(tx) is None
    framed = replace(evidence, accused="peer-b")
    false = m.sign(m.EvidenceTx(*head, framed), run.voting["peer-a"])
    assert "does not convince" in str(application.refusal(false))
    maker.drive(application, [(tx,)])
    findings, replay = verified(run, maker)
    assert findings.problems == []
    assert findings.checked["convictions"] == 1
    assert replay.convicted == {"peer-d"}


def test_a_double_vote_of_the_embedded_ledger_is_none_here(ordered_run: Ordered) -> None:
    spec: RunSpec = ordered_run[0].spec
    member: Member = spec.members[0]
    embedded = replace(spec, ledger=replace(spec.ledger, kind="embedded"))
    maker, _ = begun(ordered_run[0], 1)
    validator = next(v for v in maker.validators if v.public == bytes.fromhex(member.voting))
    told = maker.double_vote(validator, 1)
    evidence = double_vote(maker.genesis.chain_id, PeerId(member.name), told.first, told.second)
    public = bytes.fromhex(member.voting)
    assert checks_of(spec)["double-vote"](evidence, public)
    assert not checks_of(embedded)["double-vote"](evidence, public)
