"""``torchbft init``: a member's keys, and a run file if there is none yet."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated, Any

import msgspec
import tomli_w
import typer

from torchbft.cli.options import (
    A_TASK,
    DEFAULT_CODEC,
    DEFAULT_RULE,
    ENGINES,
    CodecName,
    InnerSteps,
    Rounds,
    RuleName,
    engine_named,
)
from torchbft.cli.output import Json, emit, say
from torchbft.node.launch import KEY_FILES, Keys
from torchbft.node.transports.ports import is_loopback
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.ids import PeerId, parse_peer_id
from torchbft.primitives.runspec import (
    Aggregation,
    Data,
    EngineName,
    Ledger,
    RunSpec,
    Task,
    Training,
    dump_run,
    load_run,
    new_member,
)

DEFAULT_PORT = 7700
ON_HOSTS = (
    "the ledger is CometBFT, because {host} is reached from other machines: between owners nobody"
    " should have to trust an engine that we wrote ourselves"
)
OF_A_NEW_RUN = (
    "title",
    "task",
    "private",
    "samples",
    "rounds",
    "inner_steps",
    "rule",
    "codec",
    "ledger",
)
"""Options that describe a run, not a member."""


def init(
    context: typer.Context,
    name: Annotated[str, typer.Option(help="This member's name: a-z, 0-9 and '-'.")],
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")] = Path("run.toml"),
    host: Annotated[str, typer.Option(help="Where others reach this member.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="TCP port.", min=1, max=65_535)] = DEFAULT_PORT,
    title: Annotated[str, typer.Option(help="Name of a new run.")] = "run",
    task: Annotated[
        str, typer.Option(help=f"It fixes code, data and start of a new run: {A_TASK}")
    ] = "",
    private: Annotated[bool, typer.Option("--private", help="Each its own shard.")] = False,
    samples: Annotated[
        int, typer.Option(help="Size of the public data set of a plain loop (no --task).", min=0)
    ] = 0,
    rounds: Rounds = 40,
    inner_steps: InnerSteps = 20,
    rule: RuleName = DEFAULT_RULE,
    codec: CodecName = DEFAULT_CODEC,
    ledger: Annotated[
        str, typer.Option(help=f"Ordering engine: {' or '.join(ENGINES)}; default by --host.")
    ] = "",
    ledger_port: Annotated[
        int,
        typer.Option(help="Port of CometBFT; default: one above --port.", min=0, max=65_535),
    ] = 0,
    as_json: Json = False,
) -> None:
    """Make this member's keys, and a run file if there is none.

    A new run file has this member as its first. Keys go to peers/NAME/ beside the run file,
    readable by their owner alone; those that are there already are used. To get into a run file
    that exists, go on with: torchbft request. Whatever else a run is made of (learning rates,
    time-outs, f) may be edited in a new run file before it is signed: torchbft admit.

    Example: torchbft init --name clinic-c --host clinic-c.example.org --task task.py:Digits
    """
    parse_peer_id(name)
    _check_names(rule, codec)
    kind = engine_for(host, ledger)
    created = not run_file.exists()
    run = load_run(run_file) if not created else None
    if run is not None:
        _check_of_this_run(context, run, run_file)
    folder = run_file.parent / "peers" / name
    keys = Keys.create(folder)
    place: dict[str, Any] = {"host": host, "port": port, "ledger_port": ledger_port}
    member = new_member(name, keys.identity, keys.voting, **place)
    write_whole(folder / "member.toml", tomli_w.dumps(msgspec.to_builtins(member)))
    if run is None:
        bare = RunSpec(
            name=title,
            seed=secrets.token_hex(32),
            members=(member,),
            data=Data(mode="private") if private else Data(samples=samples),
            training=Training(rounds=rounds, inner_steps=inner_steps),
            aggregation=Aggregation(rule=rule, codec=codec),
            ledger=Ledger(kind=kind),
        )
        run = _with_code(bare, task).signed(name, keys.identity)
        write_whole(run_file, dump_run(run))
        say(f"wrote {run_file}; give it to the others: torchbft request {run_file}")
        if not ledger and kind == "cometbft":
            say(f"note: {ON_HOSTS.format(host=host)}; --ledger embedded overrides this")
    else:
        say(f"{run_file} is there; to be admitted to it: torchbft request {run_file}")
    told = {
        "name": name,
        "identity": member.identity,
        "keys": str(folder),
        "run_file": str(run_file),
        "run_id": run.run_id.hex(),
        "created_run": created,
        "ledger": run.ledger.kind,
    }
    emit(told, as_json=as_json, text=f"{name} {member.identity}")


def engine_for(host: str, asked: str) -> EngineName:
    """The ordering engine of a new run: the one asked for, or the one that suits a member at this
    host. Raises ConfigError if there is none of that name."""
    if asked:
        return engine_named(asked)
    return "embedded" if is_loopback(host) else "cometbft"


def _check_names(rule: str, codec: str) -> None:
    """Raise PreconditionError unless rule and codec are known: now, not when the run starts."""
    if (rule, codec) != (DEFAULT_RULE, DEFAULT_CODEC):
        from torchbft.tensors import aggregation
        from torchbft.tensors.compression import get_codec

        aggregation.get(rule)
        get_codec(codec)


def _check_of_this_run(context: typer.Context, run: RunSpec, run_file: Path) -> None:
    """Raise ConfigError if options were given that a run file which is there would not take in."""
    sources = {name: context.get_parameter_source(name) for name in OF_A_NEW_RUN}
    given = [
        f"--{name.replace('_', '-')}"
        for name, source in sources.items()
        if source is not None and source.name != "DEFAULT"
    ]
    if given:
        raise ConfigError(
            f"is there already (run {run.name!r}), and {', '.join(given)} would change nothing",
            where=str(run_file),
            hint=f"leave {'it' if len(given) == 1 else 'them'} out to make this member's keys; "
            "for a run of your own name another file, or move this one away",
        )


def _with_code(run: RunSpec, task: str) -> RunSpec:
    data = run.data
    run.check()
    if not task:
        say("note: without --task the run file fixes neither code nor data, so nobody can replay")
        if data.mode == "assigned" and not data.samples:
            say("note: a run of public data starts only with its --samples, or with --task")
        return run
    return with_task(run, task)


def with_task(run: RunSpec, task: str, loaded: Any = None) -> RunSpec:
    """The run file with a task's source digest, start root and data set filled in."""
    from torchbft.pytorch.data import dataset_digest
    from torchbft.pytorch.task import load_task, source_digest, start_state

    made = loaded or load_task(task)
    fixed = Task(
        name=task.rpartition(":")[2],
        digest=source_digest(made),
        start_root=start_state(made, run).root().hex(),
    )
    data: dict[str, Any] = {"mode": run.data.mode}
    if run.data.mode == "assigned":
        data |= {"samples": len(made.train_set), "digest": dataset_digest(made.train_set)}
    return msgspec.structs.replace(run, task=fixed, data=Data(**data))


def own_name(run_file: Path, name: str = "") -> PeerId:
    """Which member this is: ``name``, or the only one whose keys are in this folder."""
    if name:
        return parse_peer_id(name)
    found = sorted(path.parent.name for path in run_file.parent.glob(f"peers/*/{KEY_FILES[0]}"))
    if len(found) == 1:
        return PeerId(found[0])
    raise ConfigError(
        f"holds the keys of {', '.join(found)}" if found else "holds no member's keys",
        where=str(run_file.parent / "peers"),
        hint="say which with --name" if found else "make them: torchbft init --name NAME",
    )


def own_keys(run_file: Path, name: str = "") -> tuple[PeerId, Keys]:
    """Name and keys of this folder's member. Raises ConfigError if one is missing or open."""
    me = own_name(run_file, name)
    return me, Keys.load(run_file.parent / "peers" / me)


def write_whole(path: Path, text: str) -> None:
    """Write a file whole under its name, or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + ".part")
    with draft.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
