"""``torchbft demo``: seven processes, two liars, one model, and what came of it."""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from torchbft import attacks
from torchbft.cli.local import (
    Local,
    Plan,
    create,
    fresh_folder,
    phase_of,
    run_swarm,
)
from torchbft.cli.options import (
    A_TASK,
    DEFAULT_CODEC,
    DEFAULT_RULE,
    CodecName,
    InnerSteps,
    Peers,
    Rounds,
    RuleName,
    Seed,
    engine_named,
)
from torchbft.cli.output import ExitCode, Json, emit, say, stop
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import PeerId

if TYPE_CHECKING:
    from torchbft.attacks.oracle import Oracle
    from torchbft.report.findings import Verdict
    from torchbft.report.gather import RunView

DEMO_SECONDS = 600.0
"""A demo that takes longer is stopped and says so."""
NO_ATTACK = ("none", "")
POINTS = 100.0
"""Accuracies are reported in percent; gaps in points."""
FORK = "both certified"
"""How the verifier says that two blocks of one height have certificates (``report.replay``)."""


@dataclass(frozen=True)
class References:
    """Accuracies (percent) without a protocol: trusted mean, honest peers alone, no defence."""

    reference_accuracy: float
    honest_only_accuracy: float
    undefended_accuracy: float | None


def demo(
    data: Annotated[str, typer.Option(help=A_TASK)] = "digits",
    attack: Annotated[
        str, typer.Option(help=f"Of the liars: none, {', '.join(attacks.names())}.")
    ] = "sign_flip",
    byzantine: Annotated[int, typer.Option(help="How many peers lie.", min=0)] = 2,
    peers: Peers = 7,
    rounds: Rounds = 40,
    inner_steps: InnerSteps = 20,
    seed: Seed = 0,
    strength: Annotated[float | None, typer.Option(help="Of the attack; its own default.")] = None,
    rule: RuleName = DEFAULT_RULE,
    codec: CodecName = DEFAULT_CODEC,
    alpha: Annotated[
        float, typer.Option(help="Private Dirichlet shards of this parameter; 0: public data.")
    ] = 0.0,
    ledger: Annotated[
        str, typer.Option(help="Ordering engine: embedded or cometbft.")
    ] = "embedded",
    encrypt: Annotated[bool, typer.Option(help="Encrypt payloads (the ledger always is).")] = True,
    references: Annotated[
        bool, typer.Option(help="Also train the trusted references, to compare.")
    ] = True,
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; default runs/demo-….")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace a folder of an old run.")] = False,
    as_json: Json = False,
) -> None:
    """Train one model with peers of which some lie, in processes of their own on this machine.

    The liars are drawn by the seed; the protocol learns neither their number nor their names. The
    outcome stands beside references without a protocol: a trusted mean of honest peers, the honest
    peers alone, and a plain mean with the liars in it. The log is verified offline and one HTML
    page tells the run. Exit code 3 if the run halted or came to nothing, 1 if a check failed.

    Example: torchbft demo --attack alie --byzantine 2 --json
    """
    engine = engine_named(ledger)
    if engine == "cometbft":
        from torchbft.node.ordering.binary import find_binary

        find_binary()  # what is missing is told before a folder is touched
    if attack not in NO_ATTACK:
        attacks.get(attack)  # a name that is not known is told before a folder is touched
    folder = fresh_folder(out, "demo")
    if force and (folder / "run.toml").exists():
        shutil.rmtree(folder)
    plan = Plan(
        out=folder,
        task=data,
        peers=peers,
        seed=seed,
        rounds=rounds,
        inner_steps=inner_steps,
        rule=rule,
        codec=codec,
        encrypt=encrypt,
        kind=engine,
        alpha=alpha,
    )
    result = run_demo(plan, attack, byzantine, strength=strength, references=references)
    emit(result, as_json=as_json, text=summary(result))
    raise_for(result)


def raise_for(result: Mapping[str, Any]) -> None:
    """End with the exit code that a demo's outcome stands for; a fork is worse than a halt."""
    if result["finalized_wrong"]:
        raise stop(ExitCode.CHECK_FAILED)
    if result["status"] != "finished" or result["rounds_counted"] == 0:
        raise stop(ExitCode.HALTED)
    if not (result["honest_roots_equal"] and result["ledger_verified"]):
        raise stop(ExitCode.CHECK_FAILED)


def draw_liars(names: Sequence[PeerId], byzantine: int, seed: int) -> tuple[PeerId, ...]:
    """Which peers lie. Raises ConfigError if there are not so many."""
    if byzantine > len(names):
        raise ConfigError(f"{byzantine} of {len(names)} peers cannot lie", where="--byzantine")
    return tuple(sorted(random.Random(f"liars/{seed}").sample(list(names), byzantine)))


def run_demo(
    plan: Plan,
    attack: str,
    byzantine: int,
    *,
    strength: float | None = None,
    references: bool = True,
    known: References | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Run a swarm with liars, judge it, and write ``demo.json`` and ``report.html``.

    ``known``: references of the same plan, if they have been trained already.
    """
    from torchbft.report.gather import gather
    from torchbft.report.html import render
    from torchbft.report.verify import verify

    began = time.monotonic()
    lying = attack not in NO_ATTACK and byzantine > 0
    liars = draw_liars(plan.names, byzantine, plan.seed) if lying else ()
    if lying:
        attacks.get(attack)
    local = create(plan)
    oracle = arm(local, attack, liars, strength) if lying else None
    facts = _facts(plan, local, attack if liars else "none", liars, oracle is not None)
    (plan.out / "demo.json").write_bytes(msgspec.json.encode(facts))
    try:
        honest = [name for name in local.names if name not in liars]
        status, seconds = run_swarm(local, honest, seconds=DEMO_SECONDS, quiet=quiet)
    finally:
        if oracle is not None:
            oracle.close()
    if status == "stopped":
        raise KeyboardInterrupt  # there is nothing to compare
    if references and known is None:
        say("training the references without a protocol, to compare…")
        known = train_references(local, attack if liars else "none", liars, strength)
    verdict = verify(plan.out)
    result = judge(local, facts, liars, status, known, verdict)
    result |= {"swarm_seconds": round(seconds, 1), "seconds": round(time.monotonic() - began, 1)}
    (plan.out / "demo.json").write_bytes(msgspec.json.encode(result))
    page = render(gather(plan.out), verdict)
    (plan.out / "report.html").write_text(page, encoding="utf-8")
    return result


def _facts(
    plan: Plan, local: Local, attack: str, liars: Sequence[PeerId], oracle: bool
) -> dict[str, Any]:
    return {
        "attack": attack,
        "byzantine": len(liars),
        "peers": plan.peers,
        "seed": plan.seed,
        "engine": local.run.ledger.kind,
        "rule": local.run.aggregation.rule,
        "codec": local.run.aggregation.codec,
        "rounds": plan.rounds,
        "inner_steps": plan.inner_steps,
        "liars": list(liars),
        "oracle": oracle,
        "folder": str(plan.out),
    }


def arm(
    local: Local, attack: str, liars: Sequence[PeerId], strength: float | None
) -> Oracle | None:
    """Put the attack into the liars. Returns the oracle that an omniscient attack reads."""
    from torchbft.attacks.adversary import Adversary, HonestWitness
    from torchbft.attacks.agents.agent import Agent
    from torchbft.attacks.agents.liar import builder
    from torchbft.attacks.declaration import Knowledge
    from torchbft.attacks.oracle import Oracle, create_folder
    from torchbft.attacks.vectors.view import VectorAttack

    kind = attacks.get(attack)
    seed = local.plan.seed.to_bytes(8, "big")
    if issubclass(kind, Agent):
        build: Any = builder(kind, seed=seed, liars=liars, strength=strength)
        local.builds.update(dict.fromkeys(liars, build))
        return None
    if not issubclass(kind, VectorAttack):
        raise ConfigError(f"{attack} is neither a vector nor an agent", where="--attack")
    honest = [name for name in local.names if name not in liars]
    oracle = None
    if kind(strength).knowledge is Knowledge.OMNISCIENT:
        oracle = Oracle(create_folder(), honest)
        say(
            f"oracle: the liars' {attack} is given the honest updates of each round outside the "
            "protocol; commit-reveal would keep them from a real liar"
        )
        local.hooks.update({name: HonestWitness(name, oracle) for name in honest})
    for name in liars:
        local.hooks[name] = Adversary(
            kind(strength),
            n=len(local.names),
            f=len(liars),
            seed=seed + name.encode(),
            oracle=oracle,
            rule=known_rule(local),
        )
    return oracle


def known_rule(local: Local) -> Any:
    """The swarm's rule as a liar may run it on a guess of all updates."""
    from torchbft.tensors import aggregation

    rule = aggregation.get(local.run.aggregation.rule)
    f = local.run.contributor_faults.f
    return lambda updates_ND: rule(updates_ND, f, mode="fast")


def train_references(
    local: Local, attack: str, liars: Sequence[PeerId], strength: float | None
) -> References:
    """The three accuracies to compare with, each trained in this process with the same data."""
    from torchbft.pytorch.cohort import simulate

    def percent(**options: Any) -> float:
        options = {"shards": local.shards, "evaluate_every": 0, **options}
        return POINTS * (simulate(local.task, local.run, **options).accuracy or 0.0)

    honest = [name for name in local.names if name not in liars]
    reference = percent()
    alone = percent(peers=honest) if liars else reference
    return References(reference, alone, undefended(local, attack, liars, strength, percent))


def undefended(
    local: Local, attack: str, liars: Sequence[PeerId], strength: float | None, percent: Any
) -> float | None:
    """Accuracy of a plain mean without checks under a vector attack; None for agents, which
    attack a protocol that the plain mean does not have."""
    from torchbft.attacks.adversary import Adversary
    from torchbft.attacks.declaration import Knowledge
    from torchbft.attacks.oracle import Oracle, create_folder
    from torchbft.attacks.vectors.view import VectorAttack

    if not liars or not issubclass(kind := attacks.get(attack), VectorAttack):
        return None
    honest = [name for name in local.names if name not in liars]
    oracle = Oracle(create_folder(), honest)
    omniscient = kind(strength).knowledge is Knowledge.OMNISCIENT
    hooks = {
        name: Adversary(
            kind(strength),
            n=len(local.names),
            f=len(liars),
            seed=local.plan.seed.to_bytes(8, "big") + name.encode(),
            oracle=oracle if omniscient else None,
        )
        for name in liars
    }
    try:
        publish = oracle.publish if omniscient else None
        found: float = percent(liars=hooks, publish=publish, checks=False)
        return found
    finally:
        oracle.close()


def judge(
    local: Local,
    facts: dict[str, Any],
    liars: Sequence[PeerId],
    status: str,
    references: References | None,
    verdict: Verdict,
) -> dict[str, Any]:
    """What came of it, from the honest peers' folders alone. ``verdict``: of the whole folder."""
    from torchbft.report.gather import gather

    view = gather(local.plan.out)
    honest = [name for name in local.names if name not in liars]
    finished = [name for name in honest if phase_of(local, name) == "finished"]
    ends = [view.peers[name].ended for name in finished]
    roots = {end.root if end is not None else "" for end in ends}
    accuracy = final_accuracy(view, finished)
    compared = asdict(references) if references else {}
    gap = compared["reference_accuracy"] - accuracy if compared and accuracy is not None else None
    return {
        **facts,
        "status": status,
        "honest_finished": len(finished),
        "honest_roots_equal": len(finished) == len(honest) and len(roots) == 1 and roots != {""},
        "root": next(iter(roots)) if len(roots) == 1 else "",
        "ledger_verified": verdict.ok,
        "problems": [asdict(problem) for problem in verdict.problems[:5]],
        "finalized_wrong": finalized_wrong(verdict, view, honest),
        "rounds_counted": sum(not r.void for r in verdict.rounds),
        "rounds_void": sum(r.void for r in verdict.rounds),
        "accuracy": accuracy,
        **compared,
        "gap": gap,
        **accused(view, verdict, honest),
        "convicted": list(verdict.convicted),
        "report": str(local.plan.out / "report.html"),
        "halted_because": halted_because(view, honest),
    }


def final_accuracy(view: RunView, finished: Sequence[PeerId]) -> float | None:
    """Percent on the final agreed model, as the honest peers measured it: all the same."""
    found = [
        evaluations[max(evaluations)].accuracy
        for name in finished
        if (evaluations := view.peers[name].evaluations)
    ]
    known = [accuracy for accuracy in found if accuracy is not None]
    return POINTS * sorted(known)[len(known) // 2] if known else None


def finalized_wrong(verdict: Verdict, view: RunView, honest: Sequence[PeerId]) -> bool:
    """Whether honest peers agreed on different things: two blocks at a height, or two roots of a
    round that each believes signed."""
    forked = any(FORK in problem.what for problem in verdict.problems)
    roots: dict[int, set[str]] = {}
    for name in honest:
        for number, ended in view.peers[name].rounds.items() if name in view.peers else ():
            if ended.root:
                roots.setdefault(number, set()).add(ended.root)
    return forked or any(len(found) > 1 for found in roots.values())


def accused(view: RunView, verdict: Verdict, honest: Sequence[PeerId]) -> dict[str, list[str]]:
    """Who is named, suspected and down-weighted, as at least f+1 honest peers tell it."""
    enough = min(FaultModel(len(view.members)).one_honest, len(honest))
    told = [
        accusation
        for accusation in view.accusations()
        if len(set(accusation.accusers) & set(honest)) >= enough
    ]
    named = {a.peer for a in told if a.named} | set(verdict.convicted)
    suspected = {a.peer for a in told} - named
    shares: dict[str, list[float]] = {}
    for name, cells in view.matrix().items():
        relative = [cell.relative for cell in cells.values() if cell.relative is not None]
        shares[name] = [share for share in relative]
    light = {name for name, found in shares.items() if found and sum(found) / len(found) < 0.5}
    return {
        "named": sorted(named),
        "suspected": sorted(suspected),
        "down_weighted": sorted(light),
    }


def halted_because(view: RunView, honest: Sequence[PeerId]) -> str:
    """Why the run halted, as the first honest peer says it; empty if it did not."""
    for name in honest:
        peer = view.peers.get(name)
        if peer is not None and peer.ended is not None and peer.ended.status == "halted":
            return peer.ended.reason
    return ""


def summary(result: Mapping[str, Any]) -> str:
    """The outcome in a few lines, for people."""

    def shown(value: float | None) -> str:
        return "–" if value is None else f"{value:.1f} %"

    liars = ", ".join(result["liars"]) or "nobody"
    lines = [
        f"{result['peers']} peers; liars: {liars} ({result['attack']}); {result['status']}"
        + (f": {result['halted_because']}" if result["halted_because"] else ""),
        f"honest peers hold the same model: {'yes' if result['honest_roots_equal'] else 'NO'}"
        + (f" (root {result['root'][:16]}…)" if result["root"] else ""),
        *(["honest peers agreed on DIFFERENT things"] if result["finalized_wrong"] else []),
        f"log verified offline: {'yes' if result['ledger_verified'] else 'NO'}",
        f"accuracy {shown(result['accuracy'])}"
        f"; trusted mean {shown(result.get('reference_accuracy'))}"
        f"; honest peers alone {shown(result.get('honest_only_accuracy'))}"
        f"; without defence {shown(result.get('undefended_accuracy'))}",
        f"named: {', '.join(result['named']) or 'nobody'}"
        f"; suspected: {', '.join(result['suspected']) or 'nobody'}"
        f"; down-weighted: {', '.join(result['down_weighted']) or 'nobody'}",
        f"rounds: {result['rounds_counted']} counted, {result['rounds_void']} void;"
        f" {result['swarm_seconds']} s for the swarm, {result['seconds']} s in all",
        f"report: {result['report']}",
    ]
    return "\n".join(lines)
