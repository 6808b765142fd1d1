"""The checks say yes to a chain of the engine's, and no to one in which anything was changed."""

import itertools
from collections.abc import Callable
from random import Random
from typing import Any

import msgspec
import pytest

from torchbft.node.ordering.answers import time_of
from torchbft.primitives.abci import ValidatorUpdate
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.wire import encode
from torchbft.protocols.chain.checks import (
    Expected,
    Genesis,
    application_fault,
    expected_at_start,
    first_fault,
    link_fault,
    record_fault,
    updated,
)
from torchbft.protocols.chain.evidence import evidence_fault
from torchbft.protocols.chain.hashes import consensus_hash
from torchbft.protocols.chain.messages import (
    ChainRecord,
    Commit,
    CommitSig,
    Flag,
    Validator,
    decode_record,
)

Chain = tuple[ChainRecord, ...]
replace = msgspec.structs.replace
CHAIN_ID = "chain-qgplkr"


def chain_fault(records: Chain, first: Genesis | None = None) -> str | None:
    """The first thing that is wrong with these records, read in order."""
    before: ChainRecord | None = None
    for record in records:
        wrong = record_fault(record, CHAIN_ID)
        if wrong is None and before is not None:
            wrong = link_fault(before, record)
        elif wrong is None and first is not None:
            wrong = first_fault(record, first)
        if wrong:
            return f"block {record.header.height}: {wrong}"
        before = record
    return None


def genesis_of(recorded: dict[str, Any], chain: Chain) -> Genesis:
    """From the genesis file alone, but for the kvstore's own version and first hash."""
    file = recorded["genesis"]
    block = file["consensus_params"]["block"]
    return Genesis(
        file["chain_id"],
        time_of(file["genesis_time"]),
        tuple(
            Validator(msgspec.convert(v["pub_key"]["value"], bytes), int(v["power"]))
            for v in file["validators"]
        ),
        consensus_hash(int(block["max_bytes"]), int(block["max_gas"])),
        bytes(8),
        1,
    )


def edited(chain: Chain, height: int, **fields: Any) -> Chain:
    record = replace(chain[height - 1], **fields)
    return (*chain[: height - 1], record, *chain[height:])


def edited_commit(chain: Chain, height: int, edit: Callable[[list[CommitSig]], None]) -> Chain:
    commit = chain[height - 1].commit
    places = list(commit.signatures)
    edit(places)
    return edited(chain, height, commit=replace(commit, signatures=tuple(places)))


def test_the_chain_holds_from_genesis_to_its_head(recorded: dict[str, Any], chain: Chain) -> None:
    genesis = genesis_of(recorded, chain)
    assert chain_fault(chain, genesis) is None
    assert application_fault(chain[0], expected_at_start(genesis)) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chain_id": "another"}, None),
        ({"time": time_of("2026-12-01T13:39:27.582747807Z")}, "genesis time"),
        ({"consensus_hash": bytes(32)}, "consensus parameters"),
        ({"app_version": 0}, "application version"),
    ],
)
def test_another_genesis_is_another_chain(
    recorded: dict[str, Any], chain: Chain, change: dict[str, Any], says: str | None
) -> None:
    genesis = genesis_of(recorded, chain)
    told = {name: getattr(genesis, name) for name in Genesis.__slots__} | change
    other = Genesis(**told)
    wrong = first_fault(chain[0], other) if says else record_fault(chain[0], other.chain_id)
    assert wrong is not None
    assert says is None or says in wrong


def test_a_genesis_with_a_member_less_is_another_chain(
    recorded: dict[str, Any], chain: Chain
) -> None:
    genesis = genesis_of(recorded, chain)
    told = {name: getattr(genesis, name) for name in Genesis.__slots__}
    other = Genesis(**told | {"validators": genesis.validators[1:]})
    assert "validators" in str(first_fault(chain[0], other))
    wrong = application_fault(chain[0], expected_at_start(other))
    assert wrong == "announces other validators than the application named"


@pytest.mark.parametrize("seed", range(12))
def test_any_flipped_bit_of_any_record_is_noticed(chain: Chain, seed: int) -> None:
    """Without the framing of the log: no byte of a record is outside all hashes and signatures."""
    random = Random(seed)
    for _ in range(24):
        index = random.randrange(1, len(chain))
        record = chain[index]
        data = bytearray(encode(record))
        at, bit = random.randrange(len(data)), random.randrange(8)
        data[at] ^= 1 << bit
        try:
            damaged = decode_record(bytes(data))
        except DecodeError:
            continue
        wrong = chain_fault((chain[index - 1], damaged))
        assert wrong is not None, f"block {record.header.height}, byte {at}, bit {bit}"


def test_the_record_before_damage_would_pass(chain: Chain) -> None:
    """The control of the test above: the same path says yes to the same bytes unchanged."""
    for record in chain:
        assert record_fault(decode_record(encode(record)), CHAIN_ID) is None


def test_a_signature_of_another_height(chain: Chain) -> None:
    older = chain[1].commit.signatures[0]

    def swap(places: list[CommitSig]) -> None:
        places[0] = replace(places[0], signature=older.signature)

    wrong = chain_fault(edited_commit(chain, 3, swap))
    assert wrong is not None
    assert wrong.startswith("block 3: the signature of")


def test_a_whole_commit_of_another_height(chain: Chain) -> None:
    wrong = chain_fault(edited(chain, 3, commit=chain[1].commit))
    assert wrong == "block 3: the commit is of height 2"
    lifted = replace(chain[1].commit, height=3)
    assert chain_fault(edited(chain, 3, commit=lifted)) == (
        "block 3: the commit is for another block"
    )


def test_two_votes_in_each_others_places(chain: Chain) -> None:
    def swap(places: list[CommitSig]) -> None:
        places[0], places[1] = places[1], places[0]

    assert "stands in the place of" in str(chain_fault(edited_commit(chain, 4, swap)))


def test_a_vote_more_than_there_are_validators(chain: Chain) -> None:
    wrong = chain_fault(edited_commit(chain, 4, lambda places: places.append(places[0])))
    assert wrong == "block 4: 5 places in the commit of 4 validators"


def test_a_swapped_member(chain: Chain) -> None:
    """Another key in the set, or the same keys in another order, is not what was announced."""
    first, second, *rest = chain[4].validators
    stranger = replace(first, public=bytes(32))
    for validators in ((stranger, second, *rest), (second, first, *rest)):
        wrong = chain_fault(edited(chain, 5, validators=validators))
        assert wrong is not None
        assert wrong.startswith("block 5")


@pytest.mark.parametrize("height", [1, 2, 14, 28])
def test_a_removed_block(chain: Chain, height: int) -> None:
    rest = chain[: height - 1] + chain[height:]
    if height == len(chain):
        assert chain_fault(rest) is None, "an end that was cut off cleanly cannot be seen here"
    elif height == 1:
        assert "no first block" in str(first_fault(rest[0], Genesis("", rest[0].header.time, (),
                                                                    bytes(32), b"")))  # fmt: skip
    else:
        says = f"block {height + 1}: block {height + 1} comes after block {height - 1}"
        assert chain_fault(rest) == says


def test_reordered_transactions(chain: Chain) -> None:
    txs = chain[4].txs
    assert len(set(txs)) == 5
    wrong = chain_fault(edited(chain, 5, txs=(txs[1], txs[0], *txs[2:])))
    assert wrong == "block 5: its transactions do not fit their hash in the header"


def test_evidence_taken_out_or_changed(chain: Chain) -> None:
    (evidence,) = chain[13].evidence
    turned = replace(evidence, first=evidence.second, second=evidence.first)
    unsigned = replace(evidence, first=replace(evidence.first, extension=b"x"))
    for other in ((), (turned,), (unsigned,), (evidence, evidence)):
        wrong = chain_fault(edited(chain, 14, evidence=other))
        assert wrong == "block 14: its evidence do not fit their hash in the header"


def test_the_evidence_is_exact(chain: Chain) -> None:
    (evidence,) = chain[13].evidence
    at = chain[evidence.first.height - 1]
    assert evidence_fault(evidence, at) is None
    assert "contradicting" in str(evidence_fault(evidence, chain[5]))
    for field, value in (("power", 11), ("total_power", 41), ("time", chain[5].header.time)):
        assert "false" in str(evidence_fault(replace(evidence, **{field: value}), at))
    forged = replace(evidence, first=replace(evidence.first, time=at.header.time))
    assert evidence_fault(forged, at) == "holds a vote with a false signature"
    same = replace(evidence, second=evidence.first)
    assert "contradicting" in str(evidence_fault(same, at))


def test_a_last_commit_of_which_a_vote_was_dropped(chain: Chain) -> None:
    last = chain[9].last_commit
    assert last is not None
    present = next(i for i, one in enumerate(last.signatures) if one.flag == Flag.COMMIT)
    places = list(last.signatures)
    places[present] = places[2]
    shorter = replace(last, signatures=tuple(places))
    wrong = chain_fault(edited(chain, 10, last_commit=shorter))
    assert wrong == "block 10: its last commit do not fit their hash in the header"


def test_the_validators_follow_what_was_announced(chain: Chain) -> None:
    """Blocks 19, 20 and 25 are the first under a changed set; the change is two blocks older."""
    changes = [
        record.header.height
        for before, record in itertools.pairwise(chain)
        if before.header.validators_hash != record.header.validators_hash
    ]
    assert changes == [16, 20, 25]
    for height in changes:
        stale = chain[height - 2].validators
        wrong = chain_fault(edited(chain, height, validators=stale))
        assert wrong == f"block {height}: its validators do not fit their hash in the header"


def test_a_powers_change_is_what_the_application_named(chain: Chain) -> None:
    raised = next(v for v in chain[19].validators if v.power == 13)
    before = chain[18].validators
    after = updated(before, [ValidatorUpdate(raised.public, 13)])
    assert after == chain[19].validators
    gone = next(v for v in chain[23].validators if v.power == 9)
    assert updated(chain[23].validators, [ValidatorUpdate(gone.public, 0)]) == chain[24].validators
    announced = chain[18].header
    told = Expected(announced.app_hash, announced.last_results_hash, after)
    assert application_fault(chain[18], told) is None
    held = Expected(announced.app_hash, announced.last_results_hash, before)
    assert "other validators" in str(application_fault(chain[18], held))


@pytest.mark.parametrize("field", ["app_hash", "last_results_hash"])
def test_what_the_application_computes_is_compared(chain: Chain, field: str) -> None:
    header = chain[9].header
    told = Expected(header.app_hash, header.last_results_hash, chain[10].validators)
    assert application_fault(chain[9], told) is None
    other = replace(chain[9], header=replace(header, **{field: bytes(32)}))
    assert application_fault(other, told) is not None


def test_an_absent_vote_that_is_not_blank(chain: Chain) -> None:
    at = next(i for i, one in enumerate(chain[7].commit.signatures) if one.flag == Flag.ABSENT)

    def mark(places: list[CommitSig]) -> None:
        places[at] = replace(places[at], signature=bytes(64))

    wrong = chain_fault(edited_commit(chain, 8, mark))
    assert wrong == "block 8: an absent vote in the commit is not blank"


def test_a_record_is_a_commit_with_a_place_for_each(chain: Chain) -> None:
    assert isinstance(chain[0].commit, Commit)
    empty = replace(chain[2].commit, signatures=())
    assert chain_fault(edited(chain, 3, commit=empty)) == (
        "block 3: 0 places in the commit of 4 validators"
    )
