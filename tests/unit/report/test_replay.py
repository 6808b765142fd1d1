"""The parts of the verifier, each against a log that is wrong in one way."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from torchbft.node.storage.log import HEAD_BYTES, MAGIC, AppendLog, read_log
from torchbft.node.storage.payloads import INCOMING
from torchbft.primitives.digests import DIGEST_BYTES, payload_root
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec, Task, load_run
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.certificates import (
    Validator,
    ValidatorSet,
    make_certificate,
    make_timeout_certificate,
)
from torchbft.protocols.ledger.messages import (
    NO_DIGEST,
    Certificate,
    FinalizedBlock,
    Kind,
    Prepared,
    Proposal,
    SignerState,
    block_digest,
    decode_finalized,
    sign_vote,
)
from torchbft.protocols.peer import application_of, validators_of
from torchbft.protocols.round.messages import Ready, sign
from torchbft.protocols.round.state import Accepted, LedgerFields, RoundState
from torchbft.report.findings import MAX_PROBLEMS_PER_FILE, Findings, Verdict
from torchbft.report.logs import (
    LogRecord,
    check_payloads,
    check_statements,
    check_votes,
    log_records,
    wrong_transaction,
)
from torchbft.report.replay import Chain, Models, Replay, fields_after
from torchbft.report.sets import Sets
from torchbft.tensors.recipe import Recipe
from torchbft.tensors.state import AgreedState

NAMES = tuple(PeerId(f"peer-{letter}") for letter in "abcd")
VOTING = {name: SigningKey.derive(bytes(32), name + "/voting") for name in NAMES}


@pytest.fixture
def run(proven: Path) -> RunSpec:
    return load_run(proven / "run.toml")


@pytest.fixture
def blocks(proven: Path) -> list[FinalizedBlock]:
    records = read_log(proven / "peers" / "peer-a" / "blocks.log")
    return [decode_finalized(record) for record in records]


def write(path: Path, *records: bytes) -> Path:
    log = AppendLog(path)
    for record in records:
        log.append(record)
    log.close()
    return path


def records_of(finals: list[FinalizedBlock], place: str = "log") -> list[LogRecord]:
    return [LogRecord(f"{place} {index}", encode(final)) for index, final in enumerate(finals)]


def chain_of(run: RunSpec, finals: list[FinalizedBlock]) -> Chain:
    chain = Chain(run.run_id, Sets(run), Findings())
    chain.add(records_of(finals))
    return chain


def publics_of(run: RunSpec) -> Callable[[str], list[bytes]]:
    return lambda name: [bytes.fromhex(m.voting) for m in run.members if m.name == name]


def certified(
    run: RunSpec, final: FinalizedBlock, names: tuple[PeerId, ...] = NAMES[:3], **fields: object
) -> FinalizedBlock:
    """The block with other fields, under true signatures of these validators."""
    block = msgspec.structs.replace(final.block, **fields)
    votes = {
        name: sign_vote(
            VOTING[name], run.run_id, name, Kind.FINALIZE, block.height, View(0),
            block_digest(block),
        )
        for name in names
    }  # fmt: skip
    return FinalizedBlock(block, make_certificate(votes, validators_of(run)))


def told(findings: Findings) -> str:
    return "\n".join(f"{p.where}: {p.what}" for p in findings.problems)


# Findings


def test_problems_are_bounded_per_file_not_in_all() -> None:
    findings = Findings()
    for index in range(20):
        findings.problem(f"a.log, record {index} (byte {index})", "false")
        findings.problem("b.log", "false")
    assert len(findings.problems) == 2 * MAX_PROBLEMS_PER_FILE


@pytest.mark.parametrize(
    ("checked", "ok"), [({}, False), ({"blocks": 0}, False), ({"blocks": 1}, True)]
)
def test_a_verdict_needs_blocks(checked: dict[str, int], ok: bool) -> None:
    assert Verdict(checked).ok is ok


# Logs


def test_records_know_their_byte(tmp_path: Path) -> None:
    path = write(tmp_path / "x.log", b"one", b"three")
    findings = Findings()
    places = [record.place for record in log_records(path, findings)]
    second = len(MAGIC) + HEAD_BYTES + 3 + DIGEST_BYTES
    assert places == [f"{path}, record 0 (byte 16)", f"{path}, record 1 (byte {second})"]
    assert findings.checked["log records"] == 2


def test_records_before_the_damage_are_given(tmp_path: Path) -> None:
    path = write(tmp_path / "x.log", b"one", b"two", b"three")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    findings = Findings()
    assert [record.data for record in log_records(path, findings)] == [b"one", b"two"]
    assert "a record is damaged at byte" in told(findings)


def test_a_log_that_is_not_there_holds_nothing(tmp_path: Path) -> None:
    findings = Findings()
    assert list(log_records(tmp_path / "no.log", findings)) == []
    assert findings.problems == []


def test_an_empty_file_is_no_log(tmp_path: Path) -> None:
    (tmp_path / "x.log").touch()
    findings = Findings()
    assert list(log_records(tmp_path / "x.log", findings)) == []
    assert findings.problems


Vote = Callable[[RunSpec], bytes]


def a_vote(run: RunSpec, signer: PeerId = NAMES[0], author: PeerId = NAMES[0]) -> bytes:
    return encode(
        sign_vote(VOTING[signer], run.run_id, author, Kind.PREPARE, Height(1), View(0), bytes(32))
    )


def test_true_votes_are_counted(run: RunSpec, tmp_path: Path) -> None:
    first = encode(SignerState(run.run_id, VOTING[NAMES[0]].public))
    path = write(tmp_path / "votes.log", first, a_vote(run), a_vote(run, NAMES[1], NAMES[1]))
    findings = Findings()
    assert check_votes(path, run, Sets(run), findings) == []
    assert (findings.problems, findings.checked["votes"]) == ([], 3)


@pytest.mark.parametrize(
    ("record", "what"),
    [
        (lambda run: b"garbage", "is no record of votes"),
        (lambda run: a_vote(run, signer=NAMES[1]), "holds a vote that peer-a did not sign"),
        (lambda run: encode(SignerState(bytes(32), bytes(32))), "belongs to another run"),
        (
            lambda run: encode(
                Prepared(Certificate(Kind.PREPARE, Height(1), View(0), bytes(32), (), ()))
            ),
            "fewer votes than a quorum",
        ),
        (
            lambda run: encode(
                sign_vote(
                    SigningKey.derive(bytes(32), "x"), run.run_id, PeerId("nobody"),
                    Kind.PREPARE, Height(1), View(0), bytes(32),
                )
            ),
            "nobody did not sign",
        ),
    ],
)  # fmt: skip
def test_false_votes_are_found(run: RunSpec, tmp_path: Path, record: Vote, what: str) -> None:
    path = write(tmp_path / "votes.log", record(run))
    findings = Findings()
    check_votes(path, run, Sets(run), findings)
    assert what in told(findings)
    assert f"{path}, record 0 (byte 16)" in told(findings)


def test_time_outs_in_proposals_are_kept_for_convictions(
    run: RunSpec, blocks: list[FinalizedBlock], tmp_path: Path
) -> None:
    block = blocks[0].block
    outs = {
        name: sign_vote(
            VOTING[name], run.run_id, name, Kind.TIME_OUT, block.height, View(0), NO_DIGEST
        )
        for name in NAMES[:3]
    }
    timeouts = make_timeout_certificate(outs, validators_of(run), None)
    vote = sign_vote(
        VOTING[NAMES[1]], run.run_id, NAMES[1], Kind.PROPOSE, block.height, View(1),
        block_digest(block),
    )  # fmt: skip
    path = write(tmp_path / "votes.log", encode(Proposal(vote, block, timeouts)))
    findings = Findings()
    assert check_votes(path, run, Sets(run), findings) == [timeouts]
    assert findings.problems == []


def test_statements_must_be_signed_for_this_run(run: RunSpec, tmp_path: Path) -> None:
    mine = Ready(1, run.run_id, 0, 0, "peer-a")
    good = sign(mine, VOTING[NAMES[0]])
    cases = {
        good: None,
        sign(mine, VOTING[NAMES[1]]): "is a statement that peer-a did not sign",
        sign(msgspec.structs.replace(mine, run_id=bytes(32)), VOTING[NAMES[0]]): "of another run",
        sign(msgspec.structs.replace(mine, author="nobody"), VOTING[NAMES[0]]): "nobody did not",
        b"": "is no statement",
        good + b"\0": "is no statement",
    }
    for tx, expected in cases.items():
        found = wrong_transaction(tx, run, publics_of(run))
        assert (found is None) if expected is None else (expected in (found or ""))
    findings = Findings()
    check_statements(write(tmp_path / "statements.log", *cases), run, publics_of(run), findings)
    assert findings.checked["statements"] == 1
    assert len(findings.problems) == len(cases) - 1


def test_payloads_in_work_are_left_out(tmp_path: Path) -> None:
    (tmp_path / INCOMING).mkdir()
    (tmp_path / INCOMING / "half").write_bytes(b"half")
    (tmp_path / "3").mkdir()
    root = payload_root(b"whole")
    (tmp_path / "3" / root.hex()).write_bytes(b"whole")
    findings = Findings()
    assert check_payloads(tmp_path, findings) == {root: tmp_path / "3" / root.hex()}
    assert findings.problems == []


# The chain


def test_a_true_chain_is_taken_in(run: RunSpec, blocks: list[FinalizedBlock]) -> None:
    chain = chain_of(run, blocks)
    assert chain.findings.problems == []
    assert sorted(chain.blocks) == list(range(1, len(blocks) + 1))


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"proposer": "peer-b"}, "the certificate is for another block"),
        ({"previous": bytes(32)}, "the certificate is for another block"),
    ],
)
def test_a_block_that_was_changed_is_found(
    run: RunSpec, blocks: list[FinalizedBlock], change: dict[str, object], what: str
) -> None:
    final = blocks[2]
    if msgspec.structs.replace(final.block, **change) == final.block:
        change = {"proposer": "peer-a"}
    changed = FinalizedBlock(msgspec.structs.replace(final.block, **change), final.certificate)
    chain = chain_of(run, [*blocks[:2], changed, *blocks[3:]])
    assert what in told(chain.findings)
    assert sorted(chain.blocks) == [1, 2], "nothing after it is believed from this log"


def test_a_certified_block_that_does_not_follow_is_found(
    run: RunSpec, blocks: list[FinalizedBlock]
) -> None:
    stray = certified(run, blocks[1], previous=b"\1" * 32)
    chain = chain_of(run, [blocks[0], stray])
    assert "does not follow the one before" in told(chain.findings)


def test_another_quorums_certificate_is_as_good(run: RunSpec, blocks: list[FinalizedBlock]) -> None:
    chain = chain_of(run, blocks)
    chain.add(records_of([certified(run, final, NAMES[1:]) for final in blocks], "other"))
    assert chain.findings.problems == []
    assert chain.findings.checked["certificates"] == 2 * len(blocks)


def test_a_fork_convicts_the_quorums_intersection(
    run: RunSpec, blocks: list[FinalizedBlock]
) -> None:
    first = certified(run, blocks[0], NAMES[:3], proposer="peer-a")
    second = certified(run, blocks[0], NAMES[1:], proposer="peer-b")
    chain = chain_of(run, [first])
    chain.add(records_of([second], "other"))
    chain.convict([])
    assert chain.convicted == {"peer-b", "peer-c"}
    assert "both certified; this convicts peer-b, peer-c" in told(chain.findings)


# The rounds


def replay_of(run: RunSpec, proven: Path, chain: Chain) -> Replay:
    findings = chain.findings
    payloads = check_payloads(proven / "peers" / "peer-a" / "payloads", Findings())
    models = Models(run, Recipe.of(run), payloads, [], findings)
    models.begin([proven / "peers" / "peer-a" / "start.safetensors"])
    replay = Replay(run, models, findings)
    replay.through(chain)
    return replay


def test_a_gap_in_all_logs_is_found(
    run: RunSpec, proven: Path, blocks: list[FinalizedBlock]
) -> None:
    chain = chain_of(run, blocks[:2])
    chain.add(records_of(blocks[3:]))
    replay_of(run, proven, chain)
    assert "block 3: no log holds it, but later ones are here" in told(chain.findings)


def test_a_shorter_log_is_a_shorter_run(
    run: RunSpec, proven: Path, blocks: list[FinalizedBlock]
) -> None:
    """A log that ends cleanly cannot be told from one whose end was cut off (see verify.py)."""
    replay = replay_of(run, proven, chain_of(run, blocks[:6]))
    assert replay.findings.problems == []
    assert 0 < len(replay.rounds) < 3


@pytest.mark.parametrize("cut", [0, 3])
def test_a_certified_block_that_follows_none_of_another_log_is_found(
    run: RunSpec, proven: Path, blocks: list[FinalizedBlock], cut: int
) -> None:
    chain = chain_of(run, blocks[:cut])
    chain.add(records_of([certified(run, blocks[cut], previous=b"\1" * 32)], "other"))
    replay_of(run, proven, chain)
    assert told(chain.findings) == f"other 0: block {cut + 1} does not follow the one before"


def test_keys_of_an_epoch_that_is_over_certify_nothing_whichever_log_comes_first(
    run: RunSpec, proven: Path, blocks: list[FinalizedBlock]
) -> None:
    """A log without its beginning is checked by the sets that are known, then by the true ones."""
    chain = Chain(run.run_id, Sets(run), Findings())
    chain.add(records_of(blocks[3:], "other"))
    chain.add(records_of(blocks[:3]))
    fresh = {name: SigningKey.derive(bytes(32), name) for name in NAMES}
    rotated = ValidatorSet(Validator(name, key.public) for name, key in fresh.items())
    chain.sets = SimpleNamespace(  # type: ignore[assignment]
        at=lambda height: rotated if height > 3 else validators_of(run), follow=lambda block: None
    )
    replay_of(run, proven, chain)
    assert "other 0: block 4 the signature of peer-a is false" in told(chain.findings)


def test_a_false_application_hash_is_found(
    run: RunSpec, proven: Path, blocks: list[FinalizedBlock]
) -> None:
    forged = certified(run, blocks[0], app_hash=b"\1" * 32)
    chain = chain_of(run, [forged])
    replay_of(run, proven, chain)
    assert "block 1 carries a false application hash" in told(chain.findings)


def test_a_certified_block_with_a_false_transaction_is_found(
    run: RunSpec, proven: Path, blocks: list[FinalizedBlock]
) -> None:
    ready = sign(Ready(1, run.run_id, 0, 0, "peer-a"), VOTING[NAMES[1]])
    forged = certified(run, blocks[0], txs=(ready,))
    chain = chain_of(run, [forged])
    replay_of(run, proven, chain)
    assert "transaction 0 is a statement that peer-a did not sign" in told(chain.findings)


def a_round(run: RunSpec, state: AgreedState, **fields: object) -> RoundState:
    seats = application_of(run).state.current.seats
    agreed = LedgerFields(0, 1, 7, b"\1" * 32, b"\2" * 32)
    base = RoundState(0, 0, seats, 1, 3, (), (), agreed=agreed)
    return msgspec.structs.replace(base, **fields)


@pytest.fixture
def models(run: RunSpec, proven: Path) -> Models:
    payloads = check_payloads(proven / "peers" / "peer-a" / "payloads", Findings())
    made = Models(run, Recipe.of(run), payloads, [], Findings())
    made.begin([proven / "peers" / "peer-a" / "start.safetensors"])
    return made


def payload_of(models: Models, number: int, index: int = 0) -> tuple[bytes, int]:
    """Root and length of a stored payload of a round."""
    found = sorted(r for r, path in models.payloads.items() if path.parent.name == str(number))
    return found[index], models.payloads[found[index]].stat().st_size


def test_fields_after_a_round_come_from_ledger_and_run(models: Models, run: RunSpec) -> None:
    state = models.state
    assert state is not None
    fields = fields_after(run, state, a_round(run, state, number=4))
    assert (fields.round, fields.inner_step) == (5, state.inner_step + run.training.inner_steps)
    assert (fields.pass_index, fields.cursor) == (1, 7)
    assert fields.membership_digest == b"\1" * 32
    assert fields.credit_digest == b"\2" * 32


def test_a_payload_of_another_length_than_opened_is_found(models: Models, run: RunSpec) -> None:
    root, length = payload_of(models, 0)
    state = models.state
    assert state is not None
    item = Accepted("peer-a", root, length + 1, bytes(32))
    for _ in range(2):
        models.redo(a_round(run, state), (item,), bytes(32))
    assert told(models.findings).count("the payload of peer-a has another length") == 1
    assert models.state is None, "nothing after it can be redone, so nothing more is said"


def test_a_root_that_aggregation_does_not_give_is_found(models: Models, run: RunSpec) -> None:
    items = []
    for index, name in enumerate(NAMES):
        root, length = payload_of(models, 0, index)
        items.append(Accepted(name, root, length, bytes(32)))
    assert models.state is not None
    models.redo(a_round(run, models.state), tuple(items), b"\7" * 32)
    assert "but a quorum signed 0707070707070707" in told(models.findings)


def test_a_payload_called_malformed_that_decodes_is_found(models: Models) -> None:
    root, length = payload_of(models, 0)
    assert models.why_malformed(Accepted("peer-a", root, length, bytes(32))) is None


def test_why_a_payload_is_malformed(models: Models) -> None:
    oversized = Accepted("peer-a", bytes(32), 1 << 40, bytes(32))
    assert "bytes where an update has at most" in (models.why_malformed(oversized) or "")
    gone = Accepted("peer-a", bytes(32), 10, bytes(32))
    assert models.why_malformed(gone) == ""
    reasons = [models.why_malformed(Accepted("x", root, path.stat().st_size, bytes(32)))
               for root, path in models.payloads.items() if path.parent.name == "1"]  # fmt: skip
    assert [reason for reason in reasons if reason] == ["non-finite parameters"]


def test_an_unreadable_start_is_found(run: RunSpec, proven: Path, tmp_path: Path) -> None:
    path = tmp_path / "start.safetensors"
    path.write_bytes(b"not a state")
    made = Models(run, Recipe.of(run), {}, [], Findings())
    made.begin([path])
    assert str(path) in told(made.findings)
    assert made.state is None
    made = Models(run, Recipe.of(run), {}, [], Findings())
    made.begin([])
    assert "no peer kept the start state" in told(made.findings)


def test_starts_of_all_peers_must_agree(run: RunSpec, proven: Path, tmp_path: Path) -> None:
    source = proven / "peers" / "peer-a" / "start.safetensors"
    other = tmp_path / "other.safetensors"
    shutil.copy(source, other)
    made = Models(run, Recipe.of(run), {}, [], Findings())
    made.begin([source, other])
    assert made.findings.problems == []
    state = AgreedState.load(source)
    momentum = state.outer_momentum_D.clone()
    momentum[0] = 1.0
    dataclasses.replace(state, outer_momentum_D=momentum).save(other)
    made.begin([source, other])
    assert told(made.findings) == f"{other}: is not the start that the run file names"
    assert made.state is not None
    assert made.state.root().hex() == run.task.start_root
    third = tmp_path / "third.safetensors"
    shutil.copy(source, third)
    unnamed = msgspec.structs.replace(run, task=Task())
    made = Models(unnamed, Recipe.of(run), {}, [], Findings())
    made.begin([other, source, third])
    assert told(made.findings) == f"{other}: differs from most starts"
    assert made.state is not None
    assert made.state.root().hex() == run.task.start_root, "the rounds are read from the right one"
