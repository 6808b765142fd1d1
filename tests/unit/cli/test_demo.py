"""The demo: who lies and how they are armed, and what is made of the honest peers' records."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer

from torchbft import attacks
from torchbft.attacks.adversary import Adversary, HonestWitness
from torchbft.attacks.agents.agent import Agent
from torchbft.attacks.declaration import Knowledge
from torchbft.attacks.vectors.view import VectorAttack
from torchbft.cli import demo as module
from torchbft.cli.demo import (
    References,
    accused,
    arm,
    draw_liars,
    final_accuracy,
    finalized_wrong,
    halted_because,
    judge,
    known_rule,
    raise_for,
    run_demo,
    summary,
    undefended,
)
from torchbft.cli.local import Local, Plan
from torchbft.primitives import trace
from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Aggregation, Data, RunSpec, dump_run, new_member
from torchbft.primitives.wire import encode
from torchbft.report.findings import Findings, Problem, Verdict, VerifiedRound
from torchbft.report.gather import PeerView, RunView
from torchbft.report.logs import LogRecord
from torchbft.report.replay import Chain
from torchbft.sim.puppets import Puppets
from torchbft.tensors import aggregation

NAMES = tuple(PeerId(f"peer-{number}") for number in range(1, 8))
LIARS = (NAMES[1], NAMES[4])
HONEST = tuple(name for name in NAMES if name not in LIARS)
ROOT, OTHER_ROOT = "aa" * 32, "bb" * 32
VECTORS = [name for name, kind in attacks.known().items() if issubclass(kind, VectorAttack)]
AGENTS = [name for name, kind in attacks.known().items() if issubclass(kind, Agent)]


def key_of(name: str) -> SigningKey:
    return SigningKey.derive(bytes(32), name)


RUN = RunSpec(
    name="demo",
    seed="07" * 32,
    members=tuple(
        new_member(name, SigningKey.derive(b"\1" * 32, name), key_of(name)) for name in NAMES
    ),
    data=Data(samples=1000),
    aggregation=Aggregation(rule="nnm+trimmed_mean"),
)


@pytest.fixture
def swarm(tmp_path: Path) -> Local:
    """Seven peers whose task is not needed."""
    return Local(Plan(out=tmp_path / "run", peers=7, seed=3), RUN, None, {})  # type: ignore[arg-type]


# --- who lies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("byzantine", [0, 1, 2, 7])
def test_the_seed_draws_the_liars(byzantine: int) -> None:
    drawn = draw_liars(NAMES, byzantine, 5)
    assert drawn == draw_liars(NAMES, byzantine, 5)
    assert list(drawn) == sorted(set(drawn))
    assert len(drawn) == byzantine
    assert set(drawn) <= set(NAMES)


def test_other_seeds_draw_others_and_anyone_may_be_drawn() -> None:
    drawn = [draw_liars(NAMES, 2, seed) for seed in range(60)]
    assert len(set(drawn)) > 10
    assert {name for pair in drawn for name in pair} == set(NAMES)


def test_more_liars_than_peers_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 of 7 peers cannot lie") as refused:
        draw_liars(NAMES, 8, 0)
    assert refused.value.where == "--byzantine"


# --- arming ---------------------------------------------------------------------------------------


@pytest.fixture
def armed(swarm: Local) -> Iterator[Callable[..., tuple[Local, Any]]]:
    """``armed("sign_flip")``: the swarm with its liars' attack, and the oracle if there is one."""
    oracles: list[Any] = []

    def make(attack: str, strength: float | None = None) -> tuple[Local, Any]:
        oracles.append(arm(swarm, attack, LIARS, strength))
        return swarm, oracles[-1]

    yield make
    for oracle in oracles:
        if oracle is not None:
            oracle.close()


Armed = Callable[..., tuple[Local, Any]]


@pytest.mark.parametrize("attack", VECTORS)
def test_a_vector_attack_sits_in_the_liars_trainers(armed: Armed, attack: str) -> None:
    swarm, oracle = armed(attack)
    assert swarm.builds == {}
    liars = {name: hook for name, hook in swarm.hooks.items() if isinstance(hook, Adversary)}
    assert tuple(sorted(liars)) == LIARS
    kind = attacks.get(attack)
    assert all(type(hook.attack) is kind for hook in liars.values())
    omniscient = any(hook.attack.knowledge is Knowledge.OMNISCIENT for hook in liars.values())
    witnesses = {name for name, hook in swarm.hooks.items() if isinstance(hook, HonestWitness)}
    assert witnesses == (set(HONEST) if omniscient else set())
    assert (oracle is not None) == omniscient


def test_some_attacks_are_omniscient_and_some_are_not(armed: Armed) -> None:
    """So that both sides of the test above are met."""
    knowing = {armed(attack)[1] is not None for attack in VECTORS}
    assert knowing == {True, False}


def test_liars_differ_in_their_randomness_and_runs_in_theirs(armed: Armed) -> None:
    def seeds(swarm: Local) -> set[bytes]:
        return {swarm.hooks[name]._seed for name in LIARS}  # type: ignore[attr-defined]

    swarm, _ = armed("gaussian")
    first = seeds(swarm)
    swarm.plan = replace(swarm.plan, seed=4)
    armed("gaussian")
    assert len(first | seeds(swarm)) == 4


def test_the_strength_is_the_one_asked_for(armed: Armed) -> None:
    swarm, _ = armed("sign_flip", 2.5)
    assert {swarm.hooks[name].attack.strength for name in LIARS} == {2.5}  # type: ignore[attr-defined]


def test_an_omniscient_liar_is_given_the_honest_updates_and_that_is_said(
    armed: Armed, capsys: pytest.CaptureFixture[str]
) -> None:
    _, oracle = armed("alie")
    assert "outside the protocol" in capsys.readouterr().err.replace("\n", " ")
    assert oracle.folder.is_dir()
    assert oracle.honest == HONEST
    oracle.publish(0, HONEST[0], torch.ones(3))
    assert oracle._read(0, HONEST[0], 3) is not None


@pytest.mark.parametrize("attack", AGENTS)
def test_an_agent_sits_in_the_liars_nodes(armed: Armed, attack: str) -> None:
    swarm, oracle = armed(attack)
    assert oracle is None
    assert swarm.hooks == {}
    assert tuple(sorted(swarm.builds)) == LIARS
    secret = sha256("secret", b"x")
    made: Any = swarm.builds[LIARS[0]](RUN, LIARS[0], key_of(LIARS[0]), secret, {})
    assert (made.me, made.victims) == (LIARS[0], HONEST)
    assert type(made) is attacks.get(attack)


def test_an_attack_that_nobody_knows_is_refused_and_arms_nobody(armed: Armed, swarm: Local) -> None:
    with pytest.raises(ConfigError, match="no attack is named 'telepathy'") as refused:
        armed("telepathy")
    assert "sign_flip" in refused.value.hint
    assert not swarm.hooks
    assert not swarm.builds


def test_an_attack_of_neither_kind_is_refused(
    swarm: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attacks, "get", lambda name: attacks.Attack)
    with pytest.raises(ConfigError, match="neither a vector nor an agent"):
        arm(swarm, "sign_flip", LIARS, None)


def test_a_liar_knows_the_rule_of_the_swarm_and_its_f(swarm: Local) -> None:
    updates_ND = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    rule = aggregation.get("nnm+trimmed_mean")
    guessed_D = known_rule(swarm)(updates_ND)
    torch.testing.assert_close(guessed_D, rule(updates_ND, 2))
    assert not torch.allclose(guessed_D, rule(updates_ND, 0)), "f would not matter"


# --- hand-made records ----------------------------------------------------------------------------


Records = dict[PeerId, list[trace.TraceRecord]]


def peer(name: PeerId, *records: trace.TraceRecord) -> PeerView:
    made = PeerView(name)
    for record in records:
        made.add(record)
    return made


def started(f: int = 2) -> trace.RunStarted:
    return trace.RunStarted(
        at=0.0, peer="", run_id="", name="demo", members=NAMES, validators=7, contributors=7, f=f,
        quorum=5, rule="", codec="", engine="", inner_steps=1, batch_size=1, encrypted=True,
        parameters=1, machine="", versions={},
    )  # fmt: skip


def told(accused_: PeerId, *, named: bool = False, fault: str = "late") -> trace.Accused:
    return trace.Accused(at=0.0, peer=accused_, fault=fault, round=0, named=named, reason="x")


def rooted(number: int, root: str, **fields: Any) -> trace.RoundEnded:
    return trace.RoundEnded(at=0.0, round=number, void=not root, root=root, **fields)


def measured(number: int, accuracy: float | None) -> trace.Evaluated:
    return trace.Evaluated(at=0.0, round=number, loss=1.0, accuracy=accuracy)


def view_of(records: Records) -> RunView:
    peers = {str(name): peer(name, started(), *records.get(name, [])) for name in NAMES}
    return RunView(Path("nowhere"), peers, spec=RUN)


def verdict(*problems: str, convicted: tuple[str, ...] = (), blocks: int = 9) -> Verdict:
    found = tuple(Problem("blocks.log", what) for what in problems)
    return Verdict({"blocks": blocks}, found, convicted=convicted)


# --- who is accused -------------------------------------------------------------------------------


def test_nobody_is_accused_where_nobody_tells() -> None:
    assert accused(view_of({}), verdict(), HONEST) == {
        "named": [],
        "suspected": [],
        "down_weighted": [],
    }


@pytest.mark.parametrize(("accusers", "listed"), [(1, False), (2, False), (3, True), (5, True)])
@pytest.mark.parametrize("named", [True, False])
def test_it_takes_f_plus_1_honest_accusers(accusers: int, listed: bool, named: bool) -> None:
    records: Records = {name: [told(LIARS[0], named=named)] for name in HONEST[:accusers]}
    found = accused(view_of(records), verdict(), HONEST)
    assert found["named"] == ([LIARS[0]] if listed and named else [])
    assert found["suspected"] == ([LIARS[0]] if listed and not named else [])


def test_liars_cannot_get_an_honest_peer_listed() -> None:
    """f liars and f honest peers who are mistaken: not f+1 honest ones."""
    victim = HONEST[0]
    accusers = (*LIARS, *HONEST[1:3])
    records: Records = {name: [told(victim, named=True)] for name in accusers}
    found = accused(view_of(records), verdict(), HONEST)
    assert found["named"] == found["suspected"] == []


def test_the_accused_own_trace_and_repetitions_do_not_count() -> None:
    victim = HONEST[0]
    records: Records = {name: [told(victim)] * 3 for name in HONEST[:3]}
    assert accused(view_of(records), verdict(), HONEST)["suspected"] == []


def test_different_faults_do_not_add_up() -> None:
    faults = zip(HONEST[:4], ("late", "late", "absent", "absent"), strict=True)
    records: Records = {name: [told(LIARS[0], fault=fault)] for name, fault in faults}
    assert accused(view_of(records), verdict(), HONEST)["suspected"] == []


def test_who_is_named_is_not_suspected_as_well() -> None:
    records: Records = {
        name: [told(LIARS[0]), told(LIARS[0], named=True, fault="equivocation")] for name in HONEST
    }
    found = accused(view_of(records), verdict(), HONEST)
    assert (found["named"], found["suspected"]) == ([LIARS[0]], [])


def test_who_is_convicted_on_the_ledger_is_named_without_any_trace() -> None:
    found = accused(view_of({}), verdict(convicted=(LIARS[1],)), HONEST)
    assert found["named"] == [LIARS[1]]


def test_a_demo_with_fewer_honest_peers_than_f_plus_1_hears_all_of_them() -> None:
    records: Records = {name: [told(LIARS[0])] for name in HONEST[:2]}
    assert accused(view_of(records), verdict(), HONEST[:2])["suspected"] == [LIARS[0]]


def test_down_weighted_is_who_gets_less_than_half_a_share_on_average() -> None:
    weights = {name: 1 / 7 for name in NAMES} | {LIARS[0]: 0.05, LIARS[1]: 0.06}
    heavier = {**weights, LIARS[1]: 0.14}
    rounds: list[trace.TraceRecord] = [
        rooted(number, ROOT, accepted=NAMES, weights=shares)
        for number, shares in enumerate((weights, heavier))
    ]
    found = accused(view_of(dict.fromkeys(NAMES, rounds)), verdict(), HONEST)
    assert found["down_weighted"] == [LIARS[0]]
    assert found["named"] == found["suspected"] == []


# --- what they agreed on --------------------------------------------------------------------------


def test_honest_peers_with_one_root_a_round_agreed() -> None:
    same: list[trace.TraceRecord] = [rooted(0, ROOT), rooted(1, ""), rooted(2, OTHER_ROOT)]
    view = view_of(dict.fromkeys(HONEST, same))
    assert not finalized_wrong(verdict(), view, HONEST)


def test_a_forked_pair_of_roots_is_reported() -> None:
    records: Records = {name: [rooted(0, ROOT), rooted(1, ROOT)] for name in HONEST}
    records[HONEST[3]] = [rooted(0, ROOT), rooted(1, OTHER_ROOT)]
    assert finalized_wrong(verdict(), view_of(records), HONEST)


def test_what_a_liar_writes_and_what_is_not_signed_is_no_fork() -> None:
    records: Records = {name: [rooted(0, ROOT)] for name in HONEST}
    records[HONEST[0]] = [rooted(0, "")]
    records[LIARS[0]] = [rooted(0, OTHER_ROOT)]
    assert not finalized_wrong(verdict(), view_of(records), HONEST)
    assert finalized_wrong(verdict(), view_of(records), (*HONEST, LIARS[0]))


def test_an_honest_peer_without_a_folder_is_no_fork() -> None:
    view = RunView(Path("nowhere"), {}, spec=RUN)
    assert not finalized_wrong(verdict(), view, HONEST)


@pytest.mark.parametrize("forked", [True, False])
def test_two_certified_blocks_that_the_verifier_finds_are_reported(forked: bool) -> None:
    puppets, findings = Puppets(4), Findings()
    sets = SimpleNamespace(at=lambda height: puppets.validators, follow=lambda block: None)
    chain = Chain(puppets.run_id, sets, findings)
    blocks = [puppets.block(b"a"), puppets.block(b"b" if forked else b"a")]
    for number, block in enumerate(blocks):
        chain.add([LogRecord(f"peer-{number}", encode(puppets.finalized(block)))])
    chain.convict([])
    found = Verdict({"blocks": 1}, tuple(findings.problems))
    assert found.ok == (not forked)
    assert finalized_wrong(found, view_of({}), HONEST) == forked


def test_other_problems_of_a_log_are_no_fork() -> None:
    assert not finalized_wrong(verdict("a torn record", "is no record"), view_of({}), HONEST)


def test_the_accuracy_is_the_last_round_s_in_percent() -> None:
    records: Records = {name: [measured(3, 0.9), measured(2, 0.5)] for name in HONEST}
    assert final_accuracy(view_of(records), HONEST) == pytest.approx(90.0)


def test_the_accuracy_is_the_median_of_those_who_finished() -> None:
    values = (0.1, 0.9, 0.8, None, 0.7)
    pairs = zip(HONEST, values, strict=True)
    view = view_of({name: [measured(0, value)] for name, value in pairs})
    assert final_accuracy(view, HONEST[1:]) == pytest.approx(80.0)
    assert final_accuracy(view, HONEST[3:4]) is None
    assert final_accuracy(view, ()) is None
    assert final_accuracy(view_of({}), HONEST) is None


def test_the_reason_of_a_halt_is_an_honest_peer_s() -> None:
    def end(status: str, reason: str) -> list[trace.TraceRecord]:
        return [trace.RunEnded(at=1.0, status=status, reason=reason)]

    records = {LIARS[0]: end("halted", "a lie"), HONEST[1]: end("finished", "")}
    assert halted_because(view_of(records), HONEST) == ""
    records[HONEST[3]] = end("halted", "no quorum")
    assert halted_because(view_of(records), HONEST) == "no quorum"
    assert halted_because(RunView(Path("nowhere"), {}), HONEST) == ""


# --- the judgement --------------------------------------------------------------------------------


@pytest.fixture
def left(swarm: Local) -> Callable[..., dict[str, Any]]:
    """``left({peer: root})``: the judgement of a folder whose honest peers ended so."""
    swarm.plan.out.mkdir()
    (swarm.plan.out / "run.toml").write_text(dump_run(RUN))
    for name in NAMES:
        swarm.folder(name).mkdir(parents=True)
    proof = Verdict({"blocks": 4}, rounds=(_counted(0, True), _counted(1, False)))

    def make(
        roots: dict[PeerId, str | None], references: References | None = None
    ) -> dict[str, Any]:
        for name, root in roots.items():
            writer = trace.TraceWriter(swarm.folder(name) / "trace.jsonl")
            writer.write(started())
            writer.write(measured(1, 0.5))
            if root is not None:
                writer.write(trace.RunEnded(at=2.0, status="finished", rounds=2, root=root))
            writer.close()
            (swarm.folder(name) / "status.json").write_text('{"phase": "finished"}')
        return judge(swarm, {"attack": "alie"}, LIARS, "finished", references, proof)

    return make


def _counted(number: int, counts: bool) -> VerifiedRound:
    return VerifiedRound(number, not counts, "", (), ())


Left = Callable[..., dict[str, Any]]


def test_a_run_whose_honest_peers_end_alike_is_judged_so(left: Left) -> None:
    result = left(dict.fromkeys(HONEST, ROOT))
    assert result["attack"] == "alie"
    assert (result["honest_finished"], result["honest_roots_equal"]) == (5, True)
    assert (result["root"], result["ledger_verified"]) == (ROOT, True)
    assert (result["rounds_counted"], result["rounds_void"]) == (1, 1)
    assert (result["accuracy"], result["gap"]) == (50.0, None)
    assert not result["finalized_wrong"]


@pytest.mark.parametrize(
    "changed",
    [{HONEST[0]: OTHER_ROOT}, {HONEST[0]: ""}, {HONEST[0]: None}, dict.fromkeys(HONEST, "")],
    ids=["another root", "no root", "no end", "no roots at all"],
)
def test_ends_that_differ_or_are_missing_are_not_equal(
    left: Left, changed: dict[PeerId, str | None]
) -> None:
    result = left({**dict.fromkeys(HONEST, ROOT), **changed})
    assert result["honest_finished"] == 5
    assert not result["honest_roots_equal"]


def test_an_honest_peer_that_did_not_finish_is_not_equal(left: Left) -> None:
    result = left(dict.fromkeys(HONEST[1:], ROOT))
    assert (result["honest_finished"], result["honest_roots_equal"]) == (4, False)


def test_what_liars_end_with_does_not_matter(left: Left) -> None:
    roots = {**dict.fromkeys(HONEST, ROOT), **dict.fromkeys(LIARS, OTHER_ROOT)}
    assert left(roots)["honest_roots_equal"]


def test_the_gap_is_to_the_trusted_mean_in_points(left: Left) -> None:
    result = left(dict.fromkeys(HONEST, ROOT), References(58.0, 57.0, None))
    assert result["gap"] == pytest.approx(8.0)
    assert (result["honest_only_accuracy"], result["undefended_accuracy"]) == (57.0, None)


RESULT = {
    "peers": 7,
    "liars": list(LIARS),
    "attack": "alie",
    "status": "finished",
    "halted_because": "",
    "honest_roots_equal": True,
    "root": ROOT,
    "ledger_verified": True,
    "finalized_wrong": False,
    "accuracy": 95.25,
    "reference_accuracy": 96.0,
    "honest_only_accuracy": 95.5,
    "undefended_accuracy": None,
    "named": [],
    "suspected": [LIARS[0]],
    "down_weighted": [],
    "rounds_counted": 40,
    "rounds_void": 0,
    "swarm_seconds": 12.5,
    "seconds": 20.0,
    "report": "run/report.html",
}


@pytest.mark.parametrize(
    ("changed", "code"),
    [
        ({}, None),
        ({"status": "halted"}, 3),
        ({"status": "timed out"}, 3),
        ({"status": "stopped"}, 3),
        ({"rounds_counted": 0}, 3),
        ({"honest_roots_equal": False}, 1),
        ({"ledger_verified": False}, 1),
        ({"status": "halted", "ledger_verified": False}, 3),
        ({"finalized_wrong": True}, 1),
        ({"finalized_wrong": True, "status": "halted"}, 1),
        ({"rounds_void": 3, "suspected": list(HONEST)}, None),
    ],
)
def test_the_exit_code_is_the_outcome_s(changed: dict[str, Any], code: int | None) -> None:
    if code is None:
        raise_for({**RESULT, **changed})
        return
    with pytest.raises(typer.Exit) as ended:
        raise_for({**RESULT, **changed})
    assert ended.value.exit_code == code


def test_the_summary_tells_the_outcome() -> None:
    text = summary(RESULT)
    assert "7 peers; liars: peer-2, peer-5 (alie); finished\n" in text
    assert f"the same model: yes (root {ROOT[:16]}…)" in text
    assert "log verified offline: yes" in text
    assert "accuracy 95.2 %; trusted mean 96.0 %" in text
    assert "without defence –" in text
    assert "named: nobody; suspected: peer-2; down-weighted: nobody" in text
    assert "40 counted, 0 void; 12.5 s for the swarm, 20.0 s in all" in text
    assert "DIFFERENT" not in text


def test_the_summary_does_not_hide_what_went_wrong() -> None:
    bad = {
        **RESULT,
        "liars": [],
        "status": "halted",
        "halted_because": "no quorum",
        "honest_roots_equal": False,
        "root": "",
        "ledger_verified": False,
        "finalized_wrong": True,
    }
    text = summary(bad)
    assert "liars: nobody (alie); halted: no quorum" in text
    assert "the same model: NO\n" in text
    assert "log verified offline: NO" in text
    assert "honest peers agreed on DIFFERENT things" in text
    without = {k: v for k, v in RESULT.items() if not k.endswith("_accuracy")}
    assert "trusted mean –; honest peers alone –" in summary(without)


# --- the whole, without processes -----------------------------------------------------------------


@pytest.fixture
def staged(swarm: Local, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """``run_demo`` without processes, verifier and page; what it did in order."""
    done: list[Any] = []
    (swarm.plan.out / "peers").mkdir(parents=True)

    def create(plan: Plan) -> Local:
        done.append("create")
        return swarm

    def run(local: Local, judged: list[PeerId], *, seconds: float, quiet: bool) -> Any:
        assert seconds == module.DEMO_SECONDS
        liars = tuple(name for name in local.names if name not in judged)
        done.append(("swarm", liars, json.loads((local.plan.out / "demo.json").read_bytes())))
        return "finished", 1.0

    def judged(
        local: Local, facts: Any, liars: Any, status: str, known: Any, proof: Verdict
    ) -> dict[str, Any]:
        done.append(("judge", status, known, proof))
        return {**facts, "status": status}

    def verified(folder: Path) -> Verdict:
        done.append("verify")
        return verdict()

    def render(view: RunView, proof: Verdict) -> str:
        done.append(("page", proof, view.demo["swarm_seconds"]))
        return "the page"

    monkeypatch.setattr(module, "create", create)
    monkeypatch.setattr(module, "run_swarm", run)
    monkeypatch.setattr(module, "judge", judged)
    monkeypatch.setattr("torchbft.report.verify.verify", verified)
    monkeypatch.setattr("torchbft.report.html.render", render)
    return done


def test_a_demo_writes_what_it_is_before_and_what_came_of_it_after(
    swarm: Local, staged: list[Any]
) -> None:
    known = References(1.0, 2.0, None)
    result = run_demo(swarm.plan, "label-flip", 2, known=known, quiet=True)
    liars = draw_liars(NAMES, 2, swarm.plan.seed)
    created, (_, lying, before), proven, judged, page = staged
    assert (created, proven) == ("create", "verify"), "and verified once, for both that use it"
    assert (judged, page) == (("judge", "finished", known, verdict()), ("page", verdict(), 1.0))
    assert (swarm.plan.out / "report.html").read_text() == "the page"
    assert lying == liars
    assert (before["attack"], before["liars"]) == ("label-flip", list(liars))
    assert before["oracle"] is False
    assert "status" not in before
    assert json.loads((swarm.plan.out / "demo.json").read_bytes()) == result
    assert result["swarm_seconds"] == 1.0


@pytest.mark.parametrize(("attack", "byzantine"), [("none", 2), ("", 2), ("alie", 0)])
def test_a_demo_without_liars_arms_nobody(
    swarm: Local, staged: list[Any], attack: str, byzantine: int
) -> None:
    result = run_demo(swarm.plan, attack, byzantine, references=False)
    assert (result["attack"], result["byzantine"], result["liars"]) == ("none", 0, [])
    assert not swarm.hooks
    assert not swarm.builds


@pytest.mark.parametrize(("attack", "byzantine"), [("telepathy", 2), ("sign_flip", 8)])
def test_a_demo_that_cannot_be_makes_nothing(
    swarm: Local, staged: list[Any], attack: str, byzantine: int
) -> None:
    with pytest.raises(ConfigError):
        run_demo(swarm.plan, attack, byzantine, references=False)
    assert staged == []


def test_control_c_ends_the_demo_and_removes_the_oracle(
    swarm: Local, staged: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folders: list[Path] = []

    def stopped(local: Local, judged: Any, **options: Any) -> tuple[str, float]:
        folders.extend(
            hook._oracle.folder for hook in local.hooks.values() if isinstance(hook, HonestWitness)
        )
        assert all(folder.is_dir() for folder in folders)
        return "stopped", 1.0

    monkeypatch.setattr(module, "run_swarm", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_demo(swarm.plan, "alie", 2)
    assert staged == ["create"], "nothing is compared, verified or reported"
    assert folders
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize(
    ("attack", "trains"),
    [("alie", True), ("label_flip", True), ("withholder", False), ("none", False)],
)
def test_only_a_vector_attack_has_an_undefended_reference(
    swarm: Local, attack: str, trains: bool
) -> None:
    asked: list[dict[str, Any]] = []

    def percent(**options: Any) -> float:
        asked.append(options)
        return 12.5

    liars = () if attack == "none" else LIARS
    found = undefended(swarm, attack, liars, None, percent)
    assert found == (12.5 if trains else None)
    assert [sorted(options["liars"]) for options in asked] == ([sorted(LIARS)] if trains else [])
    assert all(options["checks"] is False for options in asked)
    assert all((options["publish"] is not None) == (attack == "alie") for options in asked)


# --- the command ----------------------------------------------------------------------------------

Torchbft = Callable[..., Any]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the command asks of ``run_demo``."""
    calls: list[Any] = []

    def run(*given: Any, **options: Any) -> dict[str, Any]:
        calls.append((given, options))
        return {**RESULT, "at": time.monotonic()}

    monkeypatch.setattr(module, "run_demo", run)
    return calls


def test_options_become_a_plan(torchbft: Torchbft, asked: list[Any], tmp_path: Path) -> None:
    ran = torchbft(
        "demo", "--data", "kjv", "--attack", "alie", "--byzantine", 1, "--peers", 5, "--rounds", 3,
        "--inner-steps", 4, "--seed", 9, "--strength", 1.5, "--rule", "median", "--codec", "int8",
        "--alpha", 0.5, "--no-encrypt", "--no-references", "--out", tmp_path / "x", "--json",
    )  # fmt: skip
    assert ran.code == 0
    ((plan, attack, byzantine), options) = asked[0]
    assert plan == Plan(
        out=tmp_path / "x", task="kjv", peers=5, seed=9, rounds=3, inner_steps=4, rule="median",
        codec="int8", encrypt=False, alpha=0.5,
    )  # fmt: skip
    assert (attack, byzantine) == ("alie", 1)
    assert options == {"strength": 1.5, "references": False}
    assert ran.data["root"] == ROOT


def test_without_json_people_read_the_summary(torchbft: Torchbft, asked: list[Any]) -> None:
    assert torchbft("demo").out == summary(RESULT) + "\n"


def test_an_attack_that_is_not_known_costs_no_folder(
    torchbft: Torchbft, asked: list[Any], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").touch()
    ran = torchbft("demo", "--out", tmp_path, "--force", "--attack", "sign-flop")
    assert ran.code == 2
    assert "sign_flip, ipm" in ran.err, "the values are listed"
    assert (tmp_path / "run.toml").exists()
    assert asked == []


@pytest.mark.parametrize("arguments", [("--ledger", "raft"), ("--peers", 0), ("--rounds", 0),
                                       ("--byzantine", -1), ("--seed", -1)])  # fmt: skip
def test_what_cannot_be_asked_is_one_line(
    torchbft: Torchbft, asked: list[Any], arguments: tuple[object, ...]
) -> None:
    ran = torchbft("demo", *arguments)
    assert ran.code == 2
    assert [line.split(":")[0] for line in ran.err.splitlines()] == ["error", "hint"]
    assert asked == []


def test_an_engine_that_is_not_installed_costs_no_folder(
    torchbft: Torchbft, asked: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run.toml").touch()
    monkeypatch.setenv("TORCHBFT_COMETBFT", str(tmp_path / "nowhere"))
    ran = torchbft("demo", "--out", tmp_path, "--force", "--ledger", "cometbft")
    assert ran.code == 2
    assert "make cometbft" in ran.err
    assert (tmp_path / "run.toml").exists()
    assert asked == []


def test_force_replaces_a_run_and_nothing_else(
    torchbft: Torchbft, asked: list[Any], tmp_path: Path
) -> None:
    other, old = tmp_path / "other", tmp_path / "old"
    for folder in (other, old):
        folder.mkdir()
        (folder / "kept").touch()
    (old / "run.toml").touch()
    torchbft("demo", "--out", old)
    assert (old / "kept").exists()
    torchbft("demo", "--out", old, "--force")
    assert not old.exists()
    torchbft("demo", "--out", other, "--force")
    assert (other / "kept").exists(), "a folder that holds no run is not ours to remove"
