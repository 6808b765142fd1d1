"""Every attack against the demo, seed by seed, with the references trained once a seed.

``python benchmarks/attacks.py [--attacks A,B] [--seeds 0-4] [--json]`` prints one JSON object:
per attack the gaps to the trusted reference, who was named, and whether the promises held.
Exit code 1 if one did not.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from torchbft import attacks
from torchbft.cli.demo import References, draw_liars, run_demo, undefended
from torchbft.cli.local import Local, Plan, create

MEAN_GAP, MAX_GAP, LEAST_REFERENCE, BITE = 1.0, 2.0, 97.5, 10.0
"""Points: what the design promises for assigned data (issue "the main job")."""
BYZANTINE = 2


def parse_seeds(text: str) -> list[int]:
    """``0-4`` or ``0,3``."""
    if "-" in text:
        low, high = text.split("-")
        return list(range(int(low), int(high) + 1))
    return [int(part) for part in text.split(",")]


def one(attack: str, seed: int, known: References | None, options: dict[str, Any]) -> Any:
    """Run one demo in a folder that is removed after; returns (result, references)."""
    folder = Path(tempfile.mkdtemp(prefix="torchbft-attacks-"))
    try:
        plan = Plan(out=folder / "run", seed=seed, **options)
        if known is not None:
            known = with_undefended(known, plan, attack, folder / "probe")
        result = run_demo(plan, attack, BYZANTINE, known=known, quiet=True)
        return result, known or references_in(result)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def references_in(result: dict[str, Any]) -> References:
    return References(
        result["reference_accuracy"], result["honest_only_accuracy"], result["undefended_accuracy"]
    )


def with_undefended(known: References, plan: Plan, attack: str, folder: Path) -> References:
    """The references of this seed with the undefended accuracy under this attack."""
    local: Local = create(Plan(**{**plan.__dict__, "out": folder}))
    liars = draw_liars(local.names, BYZANTINE, plan.seed)

    def percent(**more: Any) -> float:
        from torchbft.pytorch.cohort import simulate

        return 100.0 * (simulate(local.task, local.run, evaluate_every=0, **more).accuracy or 0.0)

    found = undefended(local, attack, liars, None, percent)
    return References(known.reference_accuracy, known.honest_only_accuracy, found)


def broken(attack: str, results: list[dict[str, Any]]) -> list[str]:
    """Which promises an attack's results break; empty when all hold."""
    kind = attacks.get(attack)
    found = []
    gaps = [r["gap"] if r["gap"] is not None else float("inf") for r in results]
    if statistics.fmean(gaps) > MEAN_GAP or max(gaps) > MAX_GAP:
        found.append(f"gaps {[round(g, 2) for g in gaps]}")
    for r in results:
        where = f"seed {r['seed']}: "
        if r["status"] != "finished" or not r["honest_roots_equal"]:
            found.append(where + f"{r['status']}, honest roots equal: {r['honest_roots_equal']}")
        if not r["ledger_verified"]:
            found.append(where + f"log not verified: {r['problems'][:1]}")
        if r["reference_accuracy"] < LEAST_REFERENCE:
            found.append(where + f"reference {r['reference_accuracy']:.1f}")
        if kind.bites and r["reference_accuracy"] - r["undefended_accuracy"] < BITE:
            found.append(where + f"undefended {r['undefended_accuracy']:.1f}: does not bite")
        if set(r["named"]) - set(r["liars"]):
            found.append(where + f"honest peers named: {r['named']}")
        if kind.expected.named and set(r["named"]) != set(r["liars"]):
            found.append(where + f"named {r['named']}, liars {r['liars']}")
    return found


def summary(attack: str, results: list[dict[str, Any]]) -> dict[str, Any]:
    gaps = [r["gap"] for r in results if r["gap"] is not None]
    return {
        "attack": attack,
        "leaves": str(attacks.get(attack).leaves),
        "seeds": [r["seed"] for r in results],
        "mean_gap": round(statistics.fmean(gaps), 3) if gaps else None,
        "max_gap": round(max(gaps), 3) if gaps else None,
        "accuracy": [round(r["accuracy"] or 0.0, 2) for r in results],
        "reference_accuracy": [round(r["reference_accuracy"], 2) for r in results],
        "honest_only_accuracy": [round(r["honest_only_accuracy"], 2) for r in results],
        "undefended_accuracy": [
            None if r["undefended_accuracy"] is None else round(r["undefended_accuracy"], 2)
            for r in results
        ],
        "honest_roots_equal": all(r["honest_roots_equal"] for r in results),
        "ledger_verified": all(r["ledger_verified"] for r in results),
        "named": [r["named"] for r in results],
        "suspected": [r["suspected"] for r in results],
        "down_weighted": [r["down_weighted"] for r in results],
        "liars": [r["liars"] for r in results],
        "rounds_void": [r["rounds_void"] for r in results],
        "swarm_seconds": [r["swarm_seconds"] for r in results],
        "broken": broken(attack, results),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attacks", default="")
    parser.add_argument("--seeds", default="0-4")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    names = given.attacks.split(",") if given.attacks else list(attacks.known())
    options = {"rounds": given.rounds}
    references: dict[int, References] = {}
    summaries = []
    for name in names:
        results = []
        for seed in parse_seeds(given.seeds):
            result, references[seed] = one(name, seed, references.get(seed), options)
            results.append(result)
            print(
                f"{name} seed {seed}: {result['status']}, accuracy {result['accuracy']}, "
                f"reference {result['reference_accuracy']:.2f}, {result['swarm_seconds']} s",
                file=sys.stderr,
            )
        summaries.append(summary(name, results))
    machine = {
        "machine": f"{platform.system()} {platform.machine()}, {torch.get_num_threads()} thread",
        "torch": torch.__version__,
    }
    print(json.dumps({**machine, "attacks": summaries}, indent=2))
    return 1 if any(s["broken"] for s in summaries) else 0


if __name__ == "__main__":
    sys.exit(main())
