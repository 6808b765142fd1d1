"""What is hashed and signed, against the engine's own vectors and its recorded chain."""

import hashlib
import itertools
import json
from typing import Any

import pytest

from torchbft.primitives.abci import TxResult
from torchbft.protocols.chain.hashes import (
    commit_hash,
    consensus_hash,
    data_hash,
    evidence_hash,
    header_hash,
    integer,
    merkle,
    results_hash,
    sign_bytes,
    validators_hash,
    varint,
)
from torchbft.protocols.chain.messages import (
    NO_TIME,
    BlockId,
    ChainRecord,
    Commit,
    CommitSig,
    Timestamp,
)

NO_TIME_BYTES = bytes.fromhex("2a0b088092b8c398feffffff01")
PLACE = bytes.fromhex("110100000000000000 190100000000000000")


@pytest.mark.parametrize(
    ("chain_id", "kind", "height", "want"),
    [
        ("", 0, 0, b"\x0d" + NO_TIME_BYTES),
        ("", 2, 1, b"\x21\x08\x02" + PLACE + NO_TIME_BYTES),
        ("", 1, 1, b"\x21\x08\x01" + PLACE + NO_TIME_BYTES),
        ("", 0, 1, b"\x1f" + PLACE + NO_TIME_BYTES),
        ("test_chain_id", 0, 1, b"\x2e" + PLACE + NO_TIME_BYTES + b"\x32\x0dtest_chain_id"),
    ],
)
def test_sign_bytes_are_those_of_the_engines_test_vectors(
    chain_id: str, kind: Any, height: int, want: bytes
) -> None:
    """``types/vote_test.go``, TestVoteSignBytesTestVectors: nil votes at the zero time."""
    assert sign_bytes(chain_id, kind, height, height, None, NO_TIME) == want


@pytest.mark.parametrize(
    ("number", "hexadecimal"),
    [
        (0, "00"),
        (127, "7f"),
        (128, "8001"),
        (300, "ac02"),
        (-1, "ffffffffffffffffff01"),
        (2**63 - 1, "ffffffffffffffff7f"),
    ],
)
def test_varints_are_protobufs(number: int, hexadecimal: str) -> None:
    assert varint(number).hex() == hexadecimal


def test_a_zero_field_is_not_written() -> None:
    assert integer(1, 0) == b""
    assert integer(1, -1) == b"\x08" + bytes.fromhex("ffffffffffffffffff01")


@pytest.mark.parametrize(
    ("leaves", "root"),
    [
        (0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
        (1, "6e340b9cffb37a989ca544e6bb780a2c78901d3fb33738768511a30617afa01d"),
        (2, "fac54203e7cc696cf0dfcb42c92a1d9dbaf70ad9e621f4bd8d98662f00e3c125"),
        (3, "aeb6bcfe274b70a14fb067a5e5578264db0fa9b51af5e0ba159158f329e06e77"),
        (4, "d37ee418976dd95753c1c73862b9398fa2a2cf9b4ff0fdfe8b30cd95209614b7"),
        (5, "4e3bbb1f7b478dcfe71fb631631519a3bca12c9aefca1612bfce4c13a86264d4"),
        (6, "76e67dadbcdf1e10e1b74ddc608abd2f98dfb16fbce75277b5232a127f2087ef"),
        (7, "ddb89be403809e325750d3d263cd78929c2942b7942a34b77e122c9594a74c8c"),
        (8, "5dc9da79a70659a9ad559cb701ded9a2ab9d823aad2f4960cfe370eff4604328"),
    ],
)
def test_merkle_roots_are_those_of_certificate_transparency(leaves: int, root: str) -> None:
    """The reference inputs of RFC 6962's implementation."""
    texts = ["", "00", "10", "2021", "3031", "40414243"]
    texts += ["5051525354555657", "606162636465666768696a6b6c6d6e6f"]
    assert merkle([bytes.fromhex(text) for text in texts[:leaves]]).hex() == root


def told(recorded: dict[str, Any], height: int, method: str) -> Any:
    return recorded["heights"][str(height)][method]


def test_every_hash_of_the_recorded_chain(
    recorded: dict[str, Any], chain: tuple[ChainRecord, ...]
) -> None:
    """Computed from the contents, and compared with what the engine answered, not with records."""
    for record in chain:
        block = told(recorded, record.header.height, "block")
        header = block["block"]["header"]
        computed = {
            "data_hash": data_hash(record.txs),
            "last_commit_hash": commit_hash(record.last_commit),
            "validators_hash": validators_hash(record.validators),
            "evidence_hash": evidence_hash(record.evidence),
        }
        assert {name: header[name] for name in computed} == {
            name: digest.hex().upper() for name, digest in computed.items()
        }
        assert block["block_id"]["hash"] == header_hash(record.header).hex().upper()


def test_the_hash_of_results_and_of_parameters(
    recorded: dict[str, Any], chain: tuple[ChainRecord, ...]
) -> None:
    for before, record in itertools.pairwise(chain):
        results = told(recorded, before.header.height, "block_results")["txs_results"] or []
        mine = [TxResult(one["code"], "not hashed", b"") for one in results]
        assert results_hash(mine) == record.header.last_results_hash
    block = recorded["genesis"]["consensus_params"]["block"]
    given = consensus_hash(int(block["max_bytes"]), int(block["max_gas"]))
    assert given == chain[0].header.consensus_hash


def test_a_result_is_code_and_data() -> None:
    leaf = b"\x08\x02\x12\x04four"
    want = hashlib.sha256(b"\x00" + leaf).digest()
    assert results_hash([TxResult(2, "log", b"four")]) == want
    assert results_hash([TxResult(2, "log", b"five")]) != want


def test_a_vote_at_the_epoch_has_an_empty_time_and_not_none() -> None:
    """Not nullable (gogoproto): the field is written although it is empty."""
    one = CommitSig(2, b"\x07" * 20, Timestamp(0, 0), b"s")
    leaf = b"\x08\x02\x12\x14" + b"\x07" * 20 + b"\x1a\x00\x22\x01s"
    commit = Commit(1, 0, BlockId(bytes(32), 1, bytes(32)), (one,))
    assert commit_hash(commit) == hashlib.sha256(b"\x00" + leaf).digest()


def test_the_record_holds_what_is_in_the_answers(
    recorded: dict[str, Any], chain: tuple[ChainRecord, ...]
) -> None:
    """A spot check by eye: block 7, and that nothing was skipped anywhere."""
    record = chain[6]
    assert record.commit.round == 1
    assert [one.flag for one in record.commit.signatures] == [2, 2, 1, 2]
    assert len(chain) == len(recorded["heights"]) == 28
    assert sum(len(one.txs) for one in chain) == 27
    assert [one.header.height for one in chain if one.evidence] == [14]
    assert json.dumps(told(recorded, 7, "block")).count(record.header.data_hash.hex().upper()) == 1
    assert isinstance(record.header.time, Timestamp)
