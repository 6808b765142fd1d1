"""The follower writes what the engine answers, resumes where it stopped, and believes nothing."""

import asyncio
import copy
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from torchbft.node.ordering.answers import heights_of, record_of, time_of, validators_of
from torchbft.node.ordering.follower import Follower
from torchbft.node.storage.log import AppendLog, read_log
from torchbft.primitives.errors import CorruptLogError, DecodeError, TorchbftError
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.wire import encode
from torchbft.protocols.chain.checks import Genesis
from torchbft.protocols.chain.messages import ChainRecord, Timestamp, Validator, decode_record
from torchbft.sim.chain import ChainMaker

CHAIN_ID = "chain-qgplkr"


class Replies:
    """Answers as recorded, up to ``head``; ``edit`` changes them, ``fail_at`` is a dead engine."""

    def __init__(self, recorded: dict[str, Any], head: int, first: int = 1) -> None:
        self.recorded, self.head, self.first = recorded["heights"], head, first
        self.edit: Callable[[str, int, Any], None] = lambda method, height, answer: None
        self.fail_at = 0
        self.asked: list[int] = []

    async def status(self) -> Any:
        return {
            "sync_info": {
                "latest_block_height": str(self.head),
                "earliest_block_height": str(self.first),
            }
        }

    async def _told(self, method: str, height: int) -> Any:
        turn = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(turn.set_result, None)
        await turn  # others have theirs, as over a socket
        if height == self.fail_at:
            raise TorchbftError("the engine does not answer")
        answer = copy.deepcopy(self.recorded[str(height)][method])
        self.edit(method, height, answer)
        return answer

    async def block(self, height: int) -> Any:
        self.asked.append(height)
        return await self._told("block", height)

    async def commit(self, height: int) -> Any:
        return await self._told("commit", height)

    async def validators(self, height: int) -> Any:
        return await self._told("validators", height)


def heights(path: Path) -> list[int]:
    return [decode_record(data).header.height for data in read_log(path)]


async def followed(path: Path, replies: Replies, seen: list[ChainRecord] | None = None) -> int:
    """Open, catch up, close; gives how many heights were appended."""
    follower = Follower(path, replies, CHAIN_ID, (seen if seen is not None else []).append)
    try:
        return await follower.catch_up()
    finally:
        await follower.close(5.0) if not replies.fail_at else None


def test_the_whole_chain_is_written_and_read_back(
    recorded: dict[str, Any], chain: tuple[ChainRecord, ...], tmp_path: Path
) -> None:
    seen: list[ChainRecord] = []
    replies = Replies(recorded, 28)
    assert asyncio.run(followed(tmp_path / "chain.log", replies, seen)) == 28
    assert tuple(map(decode_record, read_log(tmp_path / "chain.log"))) == chain == tuple(seen)


def test_a_restart_goes_on_where_the_log_ends(recorded: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "chain.log"
    replies = Replies(recorded, 9)
    assert asyncio.run(followed(path, replies)) == 9
    assert asyncio.run(followed(path, replies)) == 0
    replies.head = 20
    assert asyncio.run(followed(path, replies)) == 11
    assert heights(path) == list(range(1, 21)) == replies.asked


def test_a_gap_from_a_crash_is_refilled_at_start(recorded: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "chain.log"
    replies = Replies(recorded, 12)
    asyncio.run(followed(path, replies))
    path.write_bytes(path.read_bytes()[:-40])
    replies.head = 14
    assert asyncio.run(followed(path, replies)) == 3
    assert heights(path) == list(range(1, 15))


def test_an_engine_that_dies_in_between_costs_nothing(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    async def story() -> None:
        replies = Replies(recorded, 10)
        follower = Follower(tmp_path / "chain.log", replies, CHAIN_ID)
        replies.fail_at = 6
        with pytest.raises(TorchbftError, match="does not answer"):
            await follower.catch_up()
        assert follower.height == 5
        replies.fail_at = 0
        assert await follower.catch_up() == 5
        await follower.close(5.0)

    asyncio.run(story())
    assert heights(tmp_path / "chain.log") == list(range(1, 11))


def test_closing_fetches_the_last_commit_first(recorded: dict[str, Any], tmp_path: Path) -> None:
    async def story() -> None:
        replies = Replies(recorded, 3)
        follower = Follower(tmp_path / "chain.log", replies, CHAIN_ID)
        await follower.catch_up()
        replies.head = 5
        await follower.close(5.0)

    asyncio.run(story())
    assert heights(tmp_path / "chain.log") == [1, 2, 3, 4, 5]


def test_two_calls_at_once_write_each_height_once(recorded: dict[str, Any], tmp_path: Path) -> None:
    async def story() -> None:
        follower = Follower(tmp_path / "chain.log", Replies(recorded, 8), CHAIN_ID)
        done = await asyncio.gather(follower.catch_up(), follower.catch_up())
        assert sorted(done) == [0, 8]
        await follower.close(5.0)

    asyncio.run(story())
    assert heights(tmp_path / "chain.log") == list(range(1, 9))


def test_an_engine_that_started_from_a_snapshot(recorded: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "chain.log"
    assert asyncio.run(followed(path, Replies(recorded, 4))) == 4
    assert asyncio.run(followed(path, Replies(recorded, 12, first=9))) == 4
    assert heights(path) == [1, 2, 3, 4, 9, 10, 11, 12]


@pytest.mark.parametrize(
    ("method", "path", "value", "says"),
    [
        ("block", "block.header.app_hash", "00", "another block"),
        ("block", "block.header.height", "9", "is of height 9"),
        ("block", "block.data.txs", [], "transactions"),
        ("commit", "signed_header.commit.round", 4, "is false"),
        ("validators", "validators.0.voting_power", "11", "validators"),
        ("validators", "total", "5", "4 of 5 validators"),
        ("validators", "validators.0.pub_key.type", "tendermint/PubKeySecp256k1", "Ed25519"),
        ("block", "block.header.chain_id", "chain-other", "is of chain"),
    ],
)
def test_a_false_answer_is_not_written(
    recorded: dict[str, Any], tmp_path: Path, method: str, path: str, value: Any, says: str
) -> None:
    def edit(asked: str, height: int, answer: Any) -> None:
        if (asked, height) == (method, 5):
            *steps, last = [int(s) if s.isdigit() else s for s in path.split(".")]
            for step in steps:
                answer = answer[step]
            answer[last] = value

    async def story() -> None:
        replies = Replies(recorded, 8)
        replies.edit = edit
        follower = Follower(tmp_path / "chain.log", replies, CHAIN_ID)
        with pytest.raises(DecodeError, match=says):
            await follower.catch_up()
        assert follower.height == 4
        replies.edit = lambda method, height, answer: None
        await follower.close(5.0)

    asyncio.run(story())
    assert heights(tmp_path / "chain.log") == list(range(1, 9))


def test_evidence_of_before_a_restart_is_told_again(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    """The peer may have died between the log and what it says of a liar."""
    replies = Replies(recorded, 15)
    asyncio.run(followed(tmp_path / "chain.log", replies))
    replies.head = 17
    seen: list[ChainRecord] = []
    asyncio.run(followed(tmp_path / "chain.log", replies, seen))
    assert [record.header.height for record in seen] == [14, 16, 17]


def test_evidence_of_a_kind_that_takes_more_than_f_liars(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    def edit(method: str, height: int, answer: Any) -> None:
        if (method, height) == ("block", 14):
            kind = "tendermint/LightClientAttackEvidence"
            answer["block"]["evidence"]["evidence"][0]["type"] = kind

    replies = Replies(recorded, 15)
    replies.edit = edit
    with pytest.raises(DecodeError, match="LightClientAttack") as caught:
        asyncio.run(followed(tmp_path / "chain.log", replies))
    assert "more than f liars" in caught.value.hint
    assert heights(tmp_path / "chain.log") == list(range(1, 14))


def test_an_engine_that_goes_on_from_other_blocks(recorded: dict[str, Any], tmp_path: Path) -> None:
    """As one whose home folder was emptied: each block holds by itself, and none follows ours."""
    key = SigningKey.derive(bytes(32), "another")
    start = Timestamp(1_700_000_000, 0)
    genesis = Genesis(CHAIN_ID, start, (Validator(key.public, 10),), bytes(32), b"")
    maker = ChainMaker(genesis, [key])
    log = AppendLog(tmp_path / "chain.log")
    for _ in range(4):
        log.append(encode(maker.block()))
    log.close()
    replies = Replies(recorded, 8)
    with pytest.raises(DecodeError, match="block 5"):
        asyncio.run(followed(tmp_path / "chain.log", replies))
    assert heights(tmp_path / "chain.log") == [1, 2, 3, 4]


def test_another_chains_engine_at_the_port(recorded: dict[str, Any], tmp_path: Path) -> None:
    async def story() -> None:
        follower = Follower(tmp_path / "chain.log", Replies(recorded, 8), "another")
        with pytest.raises(DecodeError, match="is of chain"):
            await follower.close(5.0)

    asyncio.run(story())
    assert heights(tmp_path / "chain.log") == []


def test_a_log_of_something_else_is_not_appended_to(
    recorded: dict[str, Any], tmp_path: Path
) -> None:
    log = AppendLog(tmp_path / "chain.log")
    log.append(b"something else")
    log.close()
    with pytest.raises(CorruptLogError, match="record 0 is none of a chain"):
        Follower(tmp_path / "chain.log", Replies(recorded, 8), CHAIN_ID)


def damaged(answer: Any, random: Random) -> None:
    """Put something that nobody expects somewhere into a JSON value."""
    junk = [None, "", "zz", -1, 2**70, 1.5, [], {}, "\ud800", True, "9" * 19, "9" * 40, b"x"]
    here = answer
    while True:
        keys = list(here) if isinstance(here, dict) else list(range(len(here)))
        key = random.choice(keys)
        inner = here[key]
        if not isinstance(inner, dict | list) or not inner or random.random() < 0.15:
            here[key] = random.choice(junk)
            return
        here = inner


@pytest.mark.parametrize("seed", range(5))
def test_reading_answers_is_total(recorded: dict[str, Any], seed: int) -> None:
    random = Random(seed)
    refused = 0
    for _ in range(150):
        told = copy.deepcopy(recorded["heights"][str(random.choice([5, 14, 20]))])
        damaged(told[random.choice(["block", "commit", "validators"])], random)
        try:
            record, data = record_of(
                told["block"], told["commit"], validators_of(told["validators"])
            )
        except DecodeError:
            refused += 1
            continue
        assert decode_record(data) == record
    assert refused > 30


@pytest.mark.parametrize(
    ("text", "seconds", "nanos"),
    [
        ("1970-01-01T00:00:00Z", 0, 0),
        ("0001-01-01T00:00:00Z", -62_135_596_800, 0),
        ("2026-12-01T13:37:44.81425Z", 1_796_132_264, 814_250_000),
        ("2026-12-01T13:37:44.000000001Z", 1_796_132_264, 1),
        ("9999-12-31T23:59:59.999999999Z", 253_402_300_799, 999_999_999),
    ],
)
def test_times(text: str, seconds: int, nanos: int) -> None:
    assert time_of(text) == Timestamp(seconds, nanos)


@pytest.mark.parametrize(
    "text",
    ["", "now", "2026-12-01", "2026-13-01T00:00:00Z", "2026-12-01T00:00:00+01:00",
     "2026-12-01T00:00:00.0000000001Z", "0000-01-01T00:00:00Z", "٢026-12-01T00:00:00Z"],
)  # fmt: skip
def test_what_is_no_time(text: str) -> None:
    with pytest.raises(DecodeError):
        time_of(text)


@pytest.mark.parametrize("status", [None, {}, {"sync_info": {"latest_block_height": 5}}, [1]])
def test_a_status_that_says_nothing(status: object) -> None:
    with pytest.raises(DecodeError):
        heights_of(status)
