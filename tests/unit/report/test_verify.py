"""The verifier says yes to a true log, and no, with the place, to one with any byte changed."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random

import msgspec
import pytest

from torchbft.node.storage.log import AppendLog, read_log
from torchbft.primitives.digests import payload_root
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import dump_run, load_run
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.certificates import make_certificate
from torchbft.protocols.ledger.messages import (
    FinalizedBlock,
    Kind,
    block_digest,
    decode_finalized,
    sign_vote,
)
from torchbft.protocols.peer import validators_of
from torchbft.report.verify import Verdict, verify
from torchbft.tensors.state import AgreedState

LOGS = ("blocks.log", "votes.log", "statements.log")


def peer(run_dir: Path, name: str = "peer-b") -> Path:
    return run_dir / "peers" / name


def only(run_dir: Path, *names: str) -> None:
    """Leave these peers' folders alone."""
    for folder in (run_dir / "peers").iterdir():
        if folder.name not in names:
            shutil.rmtree(folder)


def flip(path: Path, at: int, bit: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1 << bit
    path.write_bytes(bytes(data))


def rewrite(path: Path, edit: Callable[[list[bytes]], list[bytes]]) -> None:
    """Change a log's records and chain them anew, as somebody with the file can."""
    records = edit(list(read_log(path)))
    path.unlink()
    log = AppendLog(path)
    for record in records:
        log.append(record)
    log.close()


def edited_block(index: int, **fields: object) -> Callable[[list[bytes]], list[bytes]]:
    def edit(records: list[bytes]) -> list[bytes]:
        final = decode_finalized(records[index])
        block = msgspec.structs.replace(final.block, **fields)
        certificate = msgspec.structs.replace(final.certificate, digest=block_digest(block))
        records[index] = encode(FinalizedBlock(block, certificate))
        return records

    return edit


def says(verdict: Verdict, what: str, where: str = "") -> bool:
    return any(what in p.what and where in p.where for p in verdict.problems)


def test_a_true_run_is_verified_and_everything_was_counted(proven: Path) -> None:
    verdict = verify(proven)
    assert verdict.problems == ()
    assert verdict.ok
    assert verdict.checked["run file signatures"] == 3
    assert verdict.checked["rounds"] == verdict.checked["signed roots"] == 3
    assert verdict.checked["rounds aggregated again"] == 3
    assert verdict.checked["certificates"] == 4 * verdict.checked["blocks"]
    assert verdict.checked["certificate signatures"] >= 3 * verdict.checked["certificates"]
    assert verdict.checked["evidence"] == 1
    for counted in ("transactions", "votes", "statements", "payload files", "start states"):
        assert verdict.checked[counted] > 0


def test_c07_who_was_refused_and_why_is_read_off_the_ledger(proven: Path) -> None:
    rounds = verify(proven).rounds
    assert [r.round for r in rounds] == [0, 1, 2]
    assert rounds[0].accepted == ("peer-a", "peer-b", "peer-c", "peer-d")
    assert rounds[1].accepted == ("peer-a", "peer-b", "peer-c")
    (refused,) = [r for r in rounds[1].results if r.outcome != "accepted"]
    assert (refused.peer, refused.outcome) == ("peer-d", "malformed")
    assert refused.proof == "f+1 signed observations"
    assert "non-finite" in refused.detail, "the verifier decodes what was refused"
    assert len({r.root for r in rounds}) == 3


def test_one_peers_folder_is_enough(copied: Path) -> None:
    only(copied, "peer-c")
    assert verify(copied).ok


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("seed", range(5))
def test_any_flipped_byte_of_a_log_is_found_and_placed(copied: Path, log: str, seed: int) -> None:
    random = Random(f"{log}/{seed}")
    path = peer(copied, random.choice(["peer-a", "peer-b", "peer-d"])) / log
    flip(path, random.randrange(path.stat().st_size), random.randrange(8))
    verdict = verify(copied)
    assert not verdict.ok
    assert any(str(path) in p.where and "byte" in p.what for p in verdict.problems)


@pytest.mark.parametrize("log", LOGS)
@pytest.mark.parametrize("at", [0, 15, 16, 19, 20, 23, -1, -32, -33])
def test_flipped_bytes_at_the_edges_of_a_log(copied: Path, log: str, at: int) -> None:
    flip(peer(copied) / log, at)
    assert not verify(copied).ok


@pytest.mark.parametrize("seed", range(4))
def test_any_flipped_byte_of_a_payload_is_found_and_placed(copied: Path, seed: int) -> None:
    random = Random(seed)
    path = random.choice(sorted(peer(copied).glob("payloads/*/*")))
    flip(path, random.randrange(path.stat().st_size), random.randrange(8))
    verdict = verify(copied)
    assert not verdict.ok
    assert any(str(path) == p.where for p in verdict.problems)


def test_a_cut_log_is_found(copied: Path) -> None:
    path = peer(copied) / "blocks.log"
    path.write_bytes(path.read_bytes()[:-5])
    assert says(verify(copied), "incomplete", str(path))


def test_a_block_with_a_transaction_more_and_chained_anew_is_found(copied: Path) -> None:
    path = peer(copied) / "blocks.log"
    last = decode_finalized(list(read_log(path))[-1])
    rewrite(path, edited_block(-1, txs=(*last.block.txs, b"x")))
    assert says(verify(copied), "signature", str(path))


def test_a_block_taken_out_of_the_middle_is_found(copied: Path) -> None:
    path = peer(copied) / "blocks.log"
    rewrite(path, lambda records: records[:3] + records[4:])
    assert says(verify(copied), "comes after block 3", str(path))


def test_a_certificate_of_too_few_is_found(copied: Path) -> None:
    def thin(records: list[bytes]) -> list[bytes]:
        final = decode_finalized(records[2])
        c = final.certificate
        few = msgspec.structs.replace(c, signers=c.signers[:2], signatures=c.signatures[:2])
        records[2] = encode(FinalizedBlock(final.block, few))
        return records

    path = peer(copied) / "blocks.log"
    rewrite(path, thin)
    assert says(verify(copied), "fewer votes than a quorum", str(path))


def test_a_forged_vote_is_found(copied: Path) -> None:
    path = peer(copied) / "votes.log"
    run = load_run(copied / "run.toml")
    forged = sign_vote(
        SigningKey.derive(bytes(32), "stranger"), run.run_id, PeerId("peer-a"), Kind.PREPARE,
        Height(1), View(0), bytes(32),
    )  # fmt: skip
    rewrite(path, lambda records: [*records, encode(forged)])
    assert says(verify(copied), "peer-a did not sign", str(path))


def test_a_statement_of_another_author_is_found(copied: Path) -> None:
    path = peer(copied) / "statements.log"

    def swap(records: list[bytes]) -> list[bytes]:
        return [*records[:-1], records[-1].replace(b"peer-b", b"peer-a", 1)]

    rewrite(path, swap)
    assert says(verify(copied), "peer-a did not sign", str(path))


def test_a_swapped_payload_under_the_right_name_is_found(copied: Path) -> None:
    for folder in (copied / "peers").iterdir():
        one, two = sorted((folder / "payloads" / "0").iterdir())[:2]
        one.write_bytes(two.read_bytes())
    verdict = verify(copied)
    assert says(verdict, "not its name")
    assert says(verdict, "nobody kept the payload of", "round 0")


def test_a_payload_that_nobody_kept_is_found(copied: Path) -> None:
    for folder in (copied / "peers").iterdir():
        shutil.rmtree(folder / "payloads" / "1")
    assert says(verify(copied), "nobody kept the payload", "round 1")


def test_collected_payloads_are_replaced_by_a_signed_checkpoint(copied: Path) -> None:
    for folder in (copied / "peers").iterdir():
        shutil.rmtree(folder / "payloads" / "2")
    verdict = verify(copied)
    assert verdict.ok, "the state after the last round is kept and has the signed root"
    assert verdict.checked["rounds taken from a signed checkpoint"] == 1
    assert verdict.checked["rounds aggregated again"] == 2


def test_a_checkpoint_that_no_quorum_signed_replaces_nothing(copied: Path) -> None:
    for folder in (copied / "peers").iterdir():
        shutil.rmtree(folder / "payloads" / "2")
        path = folder / "checkpoints" / "round-3.safetensors"
        moved(AgreedState.load(path)).save(path)
    assert says(verify(copied), "nobody kept the payload", "round 2")


def moved(state: AgreedState) -> AgreedState:
    """The state with one parameter a little different."""
    parameters = state.parameters_D.clone()
    parameters[0] += 1e-3
    return dataclasses.replace(state, parameters_D=parameters)


def test_another_start_is_found(copied: Path) -> None:
    path = peer(copied) / "start.safetensors"
    moved(AgreedState.load(path)).save(path)
    verdict = verify(copied)
    assert [(p.where, p.what) for p in verdict.problems] == [
        (str(path), "is not the start that the run file names")
    ], "neither the other starts nor the rounds that they lead to are false"
    assert len(verdict.rounds) == 3


def test_a_start_that_all_changed_gives_other_roots(copied: Path) -> None:
    run = load_run(copied / "run.toml")
    for folder in (copied / "peers").iterdir():
        path = folder / "start.safetensors"
        moved(AgreedState.load(path)).save(path)
    assert run.task.start_root
    verdict = verify(copied)
    assert says(verdict, "but a quorum signed", "round 0")


def test_an_edited_run_file_is_found(copied: Path) -> None:
    run = load_run(copied / "run.toml")
    outer = msgspec.structs.replace(run.outer, momentum=0.6)
    edited = msgspec.structs.replace(run, outer=outer)
    (copied / "run.toml").write_text(dump_run(edited))
    verdict = verify(copied)
    assert says(verdict, "0 of 3 needed members signed this content")
    assert verdict.rounds == ()


def test_logs_of_another_run_are_found(copied: Path) -> None:
    run = load_run(copied / "run.toml")
    other = msgspec.structs.replace(run, name="other", signatures=())
    for name in ("peer-a", "peer-b", "peer-c"):
        other = other.signed(name, SigningKey.derive(bytes(32), name))
    (copied / "run.toml").write_text(dump_run(other))
    verdict = verify(copied)
    assert says(verdict, "of another run or version", "blocks.log")
    assert says(verdict, "belongs to another run", "votes.log")
    assert says(verdict, "is a statement of another run", "statements.log")


def test_two_certified_blocks_of_one_height_convict_their_signers(copied: Path) -> None:
    """All four sign a second block: the verifier finds it and names at least f+1."""
    run = load_run(copied / "run.toml")
    path = peer(copied, "peer-d") / "blocks.log"

    def forked(records: list[bytes]) -> list[bytes]:
        final = decode_finalized(records[-1])
        block = msgspec.structs.replace(final.block, proposer="peer-d", app_hash=bytes(32))
        votes = {}
        for name in ("peer-b", "peer-c", "peer-d"):
            key = SigningKey.derive(bytes(32), name + "/voting")
            votes[PeerId(name)] = sign_vote(
                key, run.run_id, PeerId(name), Kind.FINALIZE, block.height,
                View(final.certificate.view), block_digest(block),
            )  # fmt: skip
        certificate = make_certificate(votes, validators_of(run))
        return [*records[:-1], encode(FinalizedBlock(block, certificate))]

    rewrite(path, forked)
    verdict = verify(copied)
    assert says(verdict, "both certified", str(path))
    assert len(verdict.convicted) >= 2
    assert set(verdict.convicted) <= {"peer-b", "peer-c", "peer-d"}


def test_an_empty_folder_is_not_verified(tmp_path: Path) -> None:
    assert not verify(tmp_path).ok
    assert not Verdict({}).ok, "nothing checked is nothing proven"


def test_a_run_without_logs_is_not_verified(copied: Path) -> None:
    for path in copied.glob("peers/*/blocks.log"):
        path.unlink()
    assert says(verify(copied), "no log holds a finalized block")


def test_surplus_payloads_of_refused_contributions_are_hashed_too(copied: Path) -> None:
    odd = peer(copied) / "payloads" / "1" / ("0" * 64)
    odd.write_bytes(b"something")
    assert says(verify(copied), "not its name", str(odd))
    odd.rename(odd.with_name(payload_root(b"something").hex()))
    assert verify(copied).ok


@pytest.mark.parametrize(
    ("attack", "convicted", "outcomes", "proofs"),
    [
        ("equivocator", {"peer-d"}, {"equivocated", "absent", "unopened"}, {"transferable"}),
        ("double_voter", {"peer-d"}, {"absent", "unopened"}, set()),
        ("bad_opener", set(), {"malformed", "late"}, {"transferable"}),
        ("withholder", set(), {"unopened"}, set()),
        ("silent_validator", set(), set(), set()),
    ],
)
def test_a_log_with_a_liar_in_it_is_true_and_tells_what_it_did(
    attacked: Callable[[str], Path],
    attack: str,
    convicted: set[str],
    outcomes: set[str],
    proofs: set[str],
) -> None:
    verdict = verify(attacked(attack))
    assert verdict.problems == ()
    assert set(verdict.convicted) == convicted
    refused = [r for told in verdict.rounds for r in told.results if r.outcome != "accepted"]
    assert {r.peer for r in refused} <= {"peer-d"}
    assert {r.outcome for r in refused} <= outcomes
    found = {r.proof for r in refused} - {""}
    # Whose second statement is late is convicted in the next round, which then goes without it.
    assert found == proofs or (convicted and not found)
    assert verdict.checked["rounds aggregated again"] == verdict.checked["signed roots"] > 0


def test_a_saved_state_that_nobody_signed_is_found_and_placed(copied: Path) -> None:
    path = peer(copied) / "checkpoints" / "round-3.safetensors"
    moved(AgreedState.load(path)).save(path)
    assert says(verify(copied), "does not have the root that a quorum signed", str(path))
