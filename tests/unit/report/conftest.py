"""A run folder made of invented traces: five honest peers, a withholder and a poisoner."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec, Training, dump_run, new_member
from torchbft.primitives.trace import (
    Accused,
    BlockFinalized,
    Evaluated,
    Phase,
    Record,
    Refusal,
    RoundEnded,
    RunEnded,
    RunStarted,
    TraceWriter,
)

NAMES = tuple(f"peer-{letter}" for letter in "abcdefg")
WITHHOLDER, POISONER = "peer-c", "peer-f"
START = 1_800_000_000.0
PHASES = {"train": 0.3, "commit": 0.02, "reveal": 0.015, "decide": 0.02, "aggregate": 0.01}
NAN = "holds values that are not finite"


def make_spec(names: tuple[str, ...] = NAMES, *, rounds: int = 20, signers: int = 5) -> RunSpec:
    keys = {name: SigningKey.derive(bytes(32), name) for name in names}
    voting = {name: SigningKey.derive(bytes(32), name + "/voting") for name in names}
    spec = RunSpec(
        name="digits",
        seed="11" * 32,
        members=tuple(new_member(name, keys[name], voting[name]) for name in sorted(names)),
        training=Training(rounds=rounds, inner_steps=20),
    )
    for name in sorted(names)[:signers]:
        spec = spec.signed(name, keys[name])
    return spec


def started(peer: str) -> RunStarted:
    return RunStarted(
        at=START, peer=peer, run_id="ab" * 32, name="digits", members=NAMES, validators=7,
        contributors=7, f=2, quorum=5, rule="arc+nnm+trimmed_mean", codec="float32",
        engine="embedded", inner_steps=20, batch_size=32, encrypted=True, parameters=38_282,
        machine="two cores", versions={"torchbft": "0.1.0"},
    )  # fmt: skip


def outcome(number: int) -> tuple[tuple[str, ...], tuple[Refusal, ...], dict[str, float]]:
    """The withholder never opens; every fourth round the poisoner sends NaN, else it is weighed."""
    refusals = [Refusal(WITHHOLDER, "unopened", "committed, did not open")]
    if number % 4 == 3:
        refusals.append(Refusal(POISONER, "malformed", NAN, "f+1 signed observations"))
    gone = {refusal.peer for refusal in refusals}
    accepted = tuple(name for name in NAMES if name not in gone)
    honest = [name for name in accepted if name != POISONER]
    weights = {name: 0.98 / len(honest) for name in honest}
    weights |= {POISONER: 0.02} if POISONER in accepted else {}
    return accepted, tuple(refusals), weights


def round_records(peer: str, number: int, *, void: bool = False) -> list[Record]:
    at, skew = START + 0.4 * (number + 1), 1 + 0.05 * NAMES.index(peer)
    accepted, refusals, weights = outcome(number)
    records: list[Record] = [
        Phase(at=at, round=number, name=name, seconds=length * skew)
        for name, length in PHASES.items()
    ]
    records += [
        BlockFinalized(at=at, height=3 * number + k + 1, view=0, txs=7, bytes=2000, seconds=0.01)
        for k in range(3)
    ]
    ended = RoundEnded(
        at=at, round=number, void=void, reason="4 of 5 contributions" if void else "",
        accepted=() if void else accepted, refusals=refusals, weights={} if void else weights,
        root=f"{number:064x}", blocks=3, sent_control=40_000, received_control=41_000,
        sent_payload=918_000, received_payload=900_000, payload_bytes=153_000,
        train_seconds=0.3 * skew, consensus_seconds=0.065 * skew,
    )  # fmt: skip
    loss = 2.3 * math.exp(-number / 6) + 0.08
    return [*records, ended, Evaluated(at=at, round=number, loss=loss, accuracy=1 - loss / 2.6)]


def write_peer(run_dir: Path, peer: str, records: list[Record]) -> Path:
    folder = run_dir / "peers" / peer
    folder.mkdir(parents=True, exist_ok=True)
    writer = TraceWriter(folder / "trace.jsonl")
    for record in records:
        writer.write(record)
    writer.close()
    return folder / "trace.jsonl"


def peer_records(peer: str, rounds: int, *, void: frozenset[int] = frozenset()) -> list[Record]:
    records: list[Record] = [started(peer)]
    for number in range(rounds):
        records += round_records(peer, number, void=number in void)
    if peer != POISONER:
        records.append(Accused(at=START, peer=POISONER, fault="malformed-payload", round=3,
                               named=True, reason=NAN))  # fmt: skip
        records.append(Accused(at=START, peer=WITHHOLDER, fault="unopened", round=0,
                               named=False, reason="committed, did not open"))  # fmt: skip
    return [*records, RunEnded(at=START + 9, status="finished", rounds=rounds, root="0" * 64)]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Path]:
    """``make_run(rounds=20, void={7})`` writes a run folder and gives its path."""

    def make(rounds: int = 20, *, void: frozenset[int] = frozenset()) -> Path:
        (tmp_path / "run.toml").write_text(dump_run(make_spec(rounds=rounds)))
        for peer in NAMES:
            write_peer(tmp_path, peer, peer_records(peer, rounds, void=void))
        return tmp_path

    return make
