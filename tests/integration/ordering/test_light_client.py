"""Our checks and the engine's light client on the same chains: one verdict, or ours stricter."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest
from comet_swarm import needs_cometbft
from light_client import verdict

from torchbft.primitives.keys import SigningKey
from torchbft.protocols.chain.checks import Genesis, link_fault, record_fault
from torchbft.protocols.chain.hashes import consensus_hash
from torchbft.protocols.chain.messages import ChainRecord, CommitSig, Timestamp, Validator
from torchbft.sim.chain import ChainMaker, crafted_signature

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("swarms"), needs_cometbft]

CHAIN_ID = "light-chain"
AT = 3
"""The height at which a chain is special; the first is trusted, and one more follows."""
Make = Callable[[], list[ChainRecord]]
replace = msgspec.structs.replace


def maker_of(members: int) -> ChainMaker:
    keys = [SigningKey.derive(bytes(32), f"light/{i}") for i in range(members)]
    validators = tuple(Validator(key.public, 10) for key in keys)
    start = Timestamp(1_700_000_000, 0)
    genesis = Genesis(CHAIN_ID, start, validators, consensus_hash(1 << 20, -1), b"start")
    return ChainMaker(genesis, keys)


def made(members: int = 4, **at: object) -> list[ChainRecord]:
    """Four blocks, of which the third is made as ``at`` says."""
    maker = maker_of(members)
    for height in range(1, AT + 2):
        maker.block([b"tx%d" % height], **(at if height == AT else {}))  # type: ignore[arg-type]
    return maker.records


def crafty() -> list[ChainRecord]:
    maker = maker_of(4)
    maker.sign[maker.validators[0].public] = crafted_signature
    for height in range(1, AT + 2):
        maker.block([b"tx%d" % height])
    return maker.records


def strangers() -> list[ChainRecord]:
    """A third block by validators that the second did not announce."""
    records, other = made(), maker_of(7)
    other.records = records[: AT - 1]
    other.block()
    other.block()
    return other.records


def places(edit: Callable[[list[CommitSig], list[ChainRecord]], None], **at: object) -> Make:
    """The chain with its third commit edited."""

    def make() -> list[ChainRecord]:
        records = made(**at)  # type: ignore[arg-type]
        record = records[AT - 1]
        held = list(record.commit.signatures)
        edit(held, records)
        commit = replace(record.commit, signatures=tuple(held))
        records[AT - 1] = replace(record, commit=commit)
        return records

    return make


def falsify(place: int) -> Callable[[list[CommitSig], list[ChainRecord]], None]:
    def edit(held: list[CommitSig], records: list[ChainRecord]) -> None:
        data = bytearray(held[place].signature)
        data[3] ^= 4
        held[place] = replace(held[place], signature=bytes(data))

    return edit


def of_another_height(held: list[CommitSig], records: list[ChainRecord]) -> None:
    held[0] = records[AT - 2].commit.signatures[0]


def at_another_time(held: list[CommitSig], records: list[ChainRecord]) -> None:
    held[0] = replace(held[0], time=replace(held[0].time, nanos=7))


def swapped(held: list[CommitSig], records: list[ChainRecord]) -> None:
    held[0], held[1] = held[1], held[0]


def another_header() -> list[ChainRecord]:
    records = made()
    record = records[AT - 1]
    records[AT - 1] = replace(record, header=replace(record.header, app_hash=b"other"))
    return records


def ours(records: list[ChainRecord]) -> str:
    """The first thing that our checks find up to the special height; empty if there is none."""
    found = [record_fault(record, CHAIN_ID) for record in records[:AT]]
    found += [link_fault(before, record) for before, record in pairwise(records[:AT])]
    return next((wrong for wrong in found if wrong), "")


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(made, id="a true chain"),
        pytest.param(lambda: made(absent=[2]), id="an absent vote"),
        pytest.param(lambda: made(nil=[3]), id="a nil vote beside a quorum"),
        pytest.param(crafty, id="signatures that OpenSSL refuses"),
    ],
)
def test_both_say_yes(make: Make, tmp_path: Path) -> None:
    records = make()
    assert verdict(records, tmp_path, AT) == ""
    assert ours(records) == ""


@pytest.mark.parametrize(
    ("make", "engine", "mine"),
    [
        (lambda: made(6, absent=[1, 2]), "got 40, needed more than 40", "where 41 is needed"),
        (places(falsify(0)), "wrong signature (#0)", "is false"),
        (places(of_another_height), "wrong signature (#0)", "is false"),
        (places(at_another_time), "wrong signature (#0)", "is false"),
        (places(swapped), "address mismatch at index 0", "stands in the place of"),
        (another_header, "commit signs block", "the commit is for another block"),
        (strangers, "next validators", "not those that the block before it announced"),
    ],
    ids=[
        "exactly two thirds",
        "a false signature",
        "a signature of another height",
        "a vote at another time",
        "votes in each other's places",
        "another header",
        "validators that nobody announced",
    ],
)
def test_both_say_no_and_why(make: Make, engine: str, mine: str, tmp_path: Path) -> None:
    records = make()
    assert engine in verdict(records, tmp_path, AT)
    assert mine in ours(records)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(places(falsify(3)), id="a false signature beyond two thirds"),
        pytest.param(places(falsify(0), nil=[0]), id="a false nil vote"),
    ],
)
def test_ours_is_stricter(make: Make, tmp_path: Path) -> None:
    """The engine's full nodes are as strict: they take no block with such a commit in it."""
    records = make()
    assert verdict(records, tmp_path, AT) == ""
    assert ours(records).endswith("is false")
