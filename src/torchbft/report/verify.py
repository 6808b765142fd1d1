"""The offline verifier: proves a run's log from the run file alone, trusting no peer.

1. The run file's signatures; its digest is the run that everything else must name.
2. Every byte of every log (records are chained), every vote and statement by its signature.
3. Every block by its certificate of n − f votes of its height's validators (the run file's, and
   what the blocks changed), the chain of digests, and that all logs agree: of the embedded ledger
   (``blocks.log``), or as CometBFT ordered them (``chain.log``, from which the engine is not
   needed: ``cometbft.py``).
4. The rounds, read again from the blocks by the same pure reader: accepted sets, outcomes,
   evidence, application hashes.
5. Every payload by its root, and every model: aggregated again from the start state, each root
   must be the one that n − f validators signed.

What it cannot show: that a log that ends cleanly was not cut off at its end, if no other log is
longer; and that somebody's data or computation was honest (docs/guarantees.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torchbft.node.model import START
from torchbft.node.ordering.follower import CHAIN_LOG
from torchbft.primitives.errors import ConfigError, PreconditionError
from torchbft.primitives.runspec import RunSpec, load_run
from torchbft.protocols.ledger.messages import TimeoutCertificate
from torchbft.report.cometbft import CometChain
from torchbft.report.findings import Findings, MemberResult, Problem, Verdict, VerifiedRound
from torchbft.report.logs import check_payloads, check_statements, check_votes, log_records
from torchbft.report.replay import Chain, Models, Ordered, Replay
from torchbft.report.sets import Sets
from torchbft.tensors.recipe import Recipe

__all__ = ["MemberResult", "Problem", "Verdict", "VerifiedRound", "verify"]


def verify(run_dir: Path) -> Verdict:
    """Check everything under a run folder. Never raises for what it finds there."""
    findings = Findings()
    try:
        run = load_run(run_dir / "run.toml")
        run.check_signed()
        recipe = Recipe.of(run)
    except (ConfigError, PreconditionError) as error:
        findings.problem(error.where or str(run_dir / "run.toml"), error.what)
        return _verdict(findings, None, set())
    findings.count("run file signatures", len(run.countersigned_by()))
    replay = _checked(run_dir, run, recipe, findings)
    return _verdict(findings, replay, replay.convicted)


def _checked(run_dir: Path, run: RunSpec, recipe: Recipe, findings: Findings) -> Replay:
    folders = [path for path in sorted((run_dir / "peers").glob("*/")) if path.is_dir()]
    chain: Ordered
    if run.ledger.kind == "cometbft":
        chain = CometChain(run, findings)
        _add_logs(chain, folders, CHAIN_LOG, findings)
    else:
        chain = _embedded(run, folders, findings)
    if not chain.places:
        findings.problem(str(run_dir / "peers"), "no log holds a finalized block")
    payloads: dict[bytes, Path] = {}
    for folder in folders:
        payloads |= check_payloads(folder / "payloads", findings)
    checkpoints = [folder / "checkpoints" for folder in folders]
    models = Models(run, recipe, payloads, checkpoints, findings)
    models.begin([path for folder in folders for path in _starts(folder)])
    replay = Replay(run, models, findings)
    replay.through(chain)
    for folder in folders:
        check_statements(folder / "statements.log", run, replay.publics, findings)
    replay.convicted |= chain.convicted
    return replay


def _embedded(run: RunSpec, folders: Sequence[Path], findings: Findings) -> Chain:
    """The embedded ledger's blocks, and the votes that its validators kept."""
    sets = Sets(run)
    chain = Chain(run.run_id, sets, findings)
    _add_logs(chain, folders, "blocks.log", findings)
    held: list[TimeoutCertificate] = []
    for folder in folders:
        held += check_votes(folder / "votes.log", run, sets, findings)
    chain.convict(held)
    return chain


def _add_logs(chain: Ordered, folders: Sequence[Path], log: str, findings: Findings) -> None:
    for folder in folders:
        chain.add(list(log_records(folder / log, findings)))


def _starts(folder: Path) -> list[Path]:
    return [path for path in (folder / START, folder / "checkpoints" / START) if path.exists()]


def _verdict(findings: Findings, replay: Replay | None, convicted: set[str]) -> Verdict:
    rounds = tuple(replay.rounds[number] for number in sorted(replay.rounds)) if replay else ()
    return Verdict(
        dict(findings.checked), tuple(findings.problems), rounds, tuple(sorted(convicted))
    )
