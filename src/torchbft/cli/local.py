"""A swarm on this machine: its folder, its signed run file, its forked peers.

``up`` runs it; ``demo`` puts liars into it and compares the outcome with trusted references.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from torchbft.cli.init import with_task
from torchbft.cli.options import DEFAULT_CODEC, DEFAULT_RULE
from torchbft.cli.output import say
from torchbft.node.launch import Keys
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import (
    Aggregation,
    EngineName,
    Ledger,
    RunSpec,
    Training,
    Transport,
    dump_run,
    new_member,
)

if TYPE_CHECKING:
    from torchbft.node.driver import BuildPeer
    from torchbft.node.supervisor import Supervisor
    from torchbft.pytorch.data import MapStyle
    from torchbft.pytorch.link import TrainerHook
    from torchbft.pytorch.task import Task

FINISH_SECONDS = 15.0
"""After the first honest peers finished, the slower ones get so long to follow: less than a node
that has finished serves them (``driver.LINGER_SECONDS``)."""
POLL_SECONDS = 0.1


@dataclass(frozen=True)
class Plan:
    """What swarm to make. ``seed`` fixes data order, start model and who lies."""

    out: Path
    task: str = "digits"
    peers: int = 7
    seed: int = 0
    rounds: int = 40
    inner_steps: int = 20
    batch_size: int = 32
    contribution: Literal["pseudo_gradient", "momentum", "gradient"] = "pseudo_gradient"
    rule: str = DEFAULT_RULE
    codec: str = DEFAULT_CODEC
    encrypt: bool = True
    kind: EngineName = "embedded"
    alpha: float = 0.0
    """Dirichlet parameter of private shards; 0 means assigned public data."""

    @property
    def names(self) -> tuple[PeerId, ...]:
        width = len(str(self.peers))
        return tuple(PeerId(f"peer-{number:0{width}d}") for number in range(1, self.peers + 1))


@dataclass
class Local:
    """A swarm's folder with everything that its peers need."""

    plan: Plan
    run: RunSpec
    task: Task
    keys: Mapping[PeerId, Keys]
    shards: Mapping[str, MapStyle] | None = None
    builds: dict[PeerId, BuildPeer] = field(default_factory=dict)
    hooks: dict[PeerId, TrainerHook] = field(default_factory=dict)

    @property
    def names(self) -> tuple[PeerId, ...]:
        return tuple(PeerId(member.name) for member in self.run.members)

    def folder(self, name: str) -> Path:
        return self.plan.out / "peers" / name


def create(plan: Plan) -> Local:
    """Make the folder, keys and a run file that all members signed. Raises ConfigError, and has
    made nothing then."""
    import torch

    from torchbft.pytorch.task import load_task

    torch.set_num_threads(1)  # nothing parallel may run before the peers are forked
    if (plan.out / "run.toml").exists():
        raise ConfigError(
            "holds a run already", where=str(plan.out), hint="choose another --out, or remove it"
        )
    task = load_task(plan.task)
    keys = {name: Keys.generate() for name in plan.names}
    members = tuple(
        new_member(name, mine.identity, mine.voting, **ports)
        for (name, mine), ports in zip(keys.items(), _ports(plan), strict=True)
    )
    run = _run_of(plan, members)
    shards = _shards(plan, task)
    run = _with_task(run, plan, task)
    for name, mine in keys.items():
        run = run.signed(name, mine.identity)
    run.check()
    for name, mine in keys.items():
        mine.save(plan.out / "peers" / name)
    (plan.out / "run.toml").write_text(dump_run(run))
    return Local(plan, run, task, keys, shards)


def _ports(plan: Plan) -> list[dict[str, int]]:
    """Ports of each member: the node's, and its CometBFT's if there is one."""
    if plan.kind == "embedded":
        return [{"port": port} for port in free_ports(plan.peers)]
    free = iter(free_ports(2 * plan.peers))
    return [{"port": port, "ledger_port": next(free)} for port in free]


def _run_of(plan: Plan, members: tuple[Any, ...]) -> RunSpec:
    # n ≤ 3 means f = 0, and the rule is the mean (ROUND.md, head).
    rule = plan.rule if plan.peers > 3 else "mean"
    return RunSpec(
        name=f"local-{plan.task.rpartition(':')[2].lower().replace('_', '-')}",
        seed=plan.seed.to_bytes(32, "big").hex(),
        members=members,
        training=Training(
            inner_steps=plan.inner_steps,
            batch_size=plan.batch_size,
            rounds=plan.rounds,
            contribution=plan.contribution,
        ),
        aggregation=Aggregation(rule=rule, codec=plan.codec),
        ledger=Ledger(kind=plan.kind),
        transport=Transport(encrypt_payloads=plan.encrypt),
    )


def _with_task(run: RunSpec, plan: Plan, task: Task) -> RunSpec:
    if plan.alpha:
        run = msgspec.structs.replace(run, data=msgspec.structs.replace(run.data, mode="private"))
    return with_task(run, plan.task, task)


def _shards(plan: Plan, task: Task) -> Mapping[str, MapStyle] | None:
    if not plan.alpha:
        return None
    import torch
    from torch.utils.data import Subset

    from torchbft.pytorch.partition import dirichlet_shards

    samples: Any = task.train_set
    labels = torch.tensor([int(samples[index][1]) for index in range(len(samples))])
    drawn = dirichlet_shards(labels, plan.peers, plan.alpha, seed=plan.seed)
    return {name: Subset(samples, part) for name, part in zip(plan.names, drawn, strict=True)}


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """TCP ports that are free now, all different."""
    held = [socket.socket() for _ in range(count)]
    try:
        for sock in held:
            sock.bind((host, 0))
        return [int(sock.getsockname()[1]) for sock in held]
    finally:
        for sock in held:
            sock.close()


def preload(local: Local) -> None:
    """Import all that peers need before they are forked: once instead of twice a peer.

    The first step of a torch optimizer imports seconds' worth of modules, so one is taken here.
    """
    import torch

    from torchbft.pytorch.task import build_model

    model = build_model(local.task, local.run)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    local.task.build_optimizer(model).step()


def supervisor(local: Local) -> Supervisor:
    """Fork all peers' processes, two each, and watch over them."""
    from torchbft.node.supervisor import Supervisor

    preload(local)

    def node(name: PeerId, sock: socket.socket) -> int:
        from torchbft.node.launch import run_node

        return run_node(
            local.run,
            name,
            local.folder(name),
            sock,
            keys=local.keys[name],
            build=local.builds.get(name),
        )

    def trainer(name: PeerId, sock: socket.socket) -> int:
        from torchbft.node.link import Endpoint
        from torchbft.pytorch.process import ProcessLink
        from torchbft.pytorch.train import train_with

        over = train_with(
            local.task,
            ProcessLink(Endpoint(sock)),
            local.run,
            peer=name,
            adversary=local.hooks.get(name),
            train_set=local.shards[name] if local.shards else None,
        )
        return 0 if over.status == "finished" else 1

    return Supervisor({name: local.folder(name) for name in local.names}, node, trainer)


def run_swarm(
    local: Local,
    judged: Sequence[PeerId],
    *,
    seconds: float,
    quiet: bool = False,
    tick: Callable[[Supervisor], None] = lambda running: None,
) -> tuple[str, float]:
    """Start a swarm's peers, show and ``watch`` them, stop them; ``tick`` is called all along.
    Returns how it ended, ``stopped`` at Control-C, and after how many seconds."""
    from torchbft.report.terminal import LiveView

    running = supervisor(local)
    began, status = time.monotonic(), "stopped"
    running.start()
    view = nullcontext() if quiet else LiveView(local.plan.out, local.plan.rounds)
    with view as shown:
        show = shown.refresh if shown is not None else _nothing
        try:
            status = watch(
                running, local, judged, show, seconds=seconds, tick=lambda: tick(running)
            )
        except KeyboardInterrupt:
            say("stopping the peers…")
        finally:
            running.stop()  # before the last look, which then sees all that they wrote
    return status, time.monotonic() - began


def _nothing() -> None:
    """Shown in a quiet run."""


def watch(
    running: Supervisor,
    local: Local,
    judged: Sequence[PeerId],
    show: Callable[[], object],
    *,
    seconds: float,
    tick: Callable[[], None] = lambda: None,
) -> str:
    """Follow a swarm until every judged peer has ended and measured its model, or the first
    finished, or more than f are down for good, and the rest do not follow, or ``seconds`` passed.
    Returns ``finished``, ``halted`` or ``timed out``."""
    until = time.monotonic() + seconds
    some_ended: float | None = None
    while time.monotonic() < until:
        running.poll()
        tick()
        show()
        finished = {name for name in judged if phase_of(local, name) == "finished"}
        down = {name for name in judged if not running.seats[name].running}
        training = {name for name in finished if running.seats[name].training}
        if len(finished | down) == len(judged) and not training:
            break
        if not finished and len(down) <= local.run.validator_faults.f:
            some_ended = None  # one that is down for good does not stop the others
        elif some_ended is None:
            some_ended = time.monotonic()
        if some_ended is not None and time.monotonic() > some_ended + FINISH_SECONDS:
            break
        time.sleep(POLL_SECONDS)
    else:
        return "timed out"
    phases = [phase_of(local, name) for name in judged]
    return "finished" if phases.count("finished") > len(phases) // 2 else "halted"


def phase_of(local: Local, name: str) -> str:
    """What a peer's status file says it is doing; empty before it says anything."""
    try:
        status = msgspec.json.decode((local.folder(name) / "status.json").read_bytes())
    except (OSError, msgspec.DecodeError):
        return ""
    return str(status.get("phase", "")) if isinstance(status, dict) else ""


def fresh_folder(out: Path | None, what: str) -> Path:
    """The folder to use: the one asked for, or a new one below ``runs``."""
    if out is not None:
        return out
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return Path("runs") / f"{what}-{stamp}-{secrets.token_hex(2)}"
