"""``torchbft join``: take part in a run with a task, as one peer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from torchbft.cli.init import own_name
from torchbft.cli.output import ExitCode, Json, emit, say, stop
from torchbft.node.entries import entry
from torchbft.node.launch import Keys
from torchbft.node.storage.lock import FolderLock
from torchbft.node.transports.ports import check_port, parse_address
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import RunSpec, load_run
from torchbft.pytorch.tasks import names


def join(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")] = Path("run.toml"),
    task: Annotated[
        str, typer.Option(help="file.py:Class; default: the run's, if torchbft ships it.")
    ] = "",
    data: Annotated[
        Path | None, typer.Option(help="Own shard (private data): a file of safetensors, x and y.")
    ] = None,
    listen: Annotated[
        str, typer.Option(help="HOST:PORT to listen on; default: the roster's.")
    ] = "",
    name: Annotated[str, typer.Option(help="Which member, if there are keys of several.")] = "",
    threads: Annotated[int, typer.Option(help="Torch threads of the trainer.", min=1)] = 1,
    as_json: Json = False,
) -> None:
    """Take part in a run until it is over: starts this member's node and trains its task.

    The task runs local code, whose sha256 must be the run file's; the swarm ships none, so a task
    that torchbft does not ship must be named with --task. A peer
    that was away resumes from its folder. Control-C leaves cleanly.

    Example: torchbft join run.toml --task task.py:Digits --listen [::]:7700
    """
    run = load_run(run_file)
    me = own_name(run_file, name)
    folder = run_file.parent / "peers" / me
    _check_start(run, me, folder, listen)
    named = task or _own_task(run)
    if (data is not None) != (run.data.mode == "private"):
        raise ConfigError(
            f"the run's data mode is {run.data.mode!r}",
            where="--data",
            hint="give --data in a run with private data, and only there",
        )
    from torchbft.pytorch import connection
    from torchbft.pytorch.task import load_task
    from torchbft.pytorch.train import check_task, train_with

    made = load_task(named, run.task.digest)
    check_task(made, run)
    shard = _shard(data) if data is not None else None
    say(f"{me} joins {run.name}; the node writes to {folder / 'node.log'}")
    with _shown(run_file.parent, run.training.rounds):
        link = connection.connect(run_file, folder, listen)
        over = train_with(made, link, run, peer=me, train_set=shard, threads=threads)
    root = over.state.root().hex()
    result = {"name": me, "status": over.status, "reason": over.reason, "root": root}
    text = f"{over.status}{': ' + over.reason if over.reason else ''}; model {root[:16]}…"
    emit(result, as_json=as_json, text=text)
    if over.status == "finished":
        say(f"the model is in {folder / 'checkpoints'}; next: torchbft report {run_file.parent}")
    if over.status == "stopped":
        say(f"the node's own words are in {folder / 'node.log'}; join again to go on")
    if over.status == "halted":
        raise stop(ExitCode.HALTED)


def _check_start(run: RunSpec, me: PeerId, folder: Path, listen: str) -> None:
    """Raise what would keep the node from starting, before anything slow is imported: it would
    end at once, in a log of its own."""
    run.check_signed()
    member = entry(run, folder, me)
    Keys.load(folder).check(run, me, folder)
    FolderLock(folder).release()
    host, port = parse_address(listen) if listen else (member.host, member.port)
    check_port(host, port)


def _own_task(run: RunSpec) -> str:
    """The run's task if torchbft ships it. Any other must be named by whoever runs its code: a run
    file that somebody sent does not choose a file of this machine."""
    name = run.task.name
    if name.replace("-", "_") in names():
        return name
    if not name:
        raise ConfigError(
            "the run file names no task",
            where="--task",
            hint="start the program that calls torchbft.join, or give --task file.py:Class",
        )
    digest = f" of sha256 {run.task.digest[:16]}…" if run.task.digest else ""
    raise ConfigError(
        f"the run's task {name!r} is none that torchbft ships, so its file{digest} must be named",
        where="--task",
        hint=f"--task file.py:{name.rpartition(':')[2]} with your copy of the file; read it first",
    )


@contextmanager
def _shown(run_dir: Path, rounds: int) -> Iterator[None]:
    """Shows what happens meanwhile, as ``up`` does: rounds, and whom the node waits for."""
    from torchbft.report.terminal import REFRESH_SECONDS, LiveView

    done = threading.Event()
    live = LiveView(run_dir, rounds, history=False)

    def follow() -> None:
        with live:
            while not done.wait(REFRESH_SECONDS):
                live.refresh()

    thread = threading.Thread(target=follow, daemon=True, name="live-view")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _shard(path: Path) -> Any:
    """The peer's own samples: tensors ``x`` and ``y`` of a safetensors file."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file
    from torch.utils.data import TensorDataset

    try:
        tensors = load_file(path)
        return TensorDataset(tensors["x"], tensors["y"])
    except (OSError, KeyError, SafetensorError, AssertionError) as error:
        raise ConfigError(
            f"is no shard ({error})", where=str(path), hint="save tensors x and y as safetensors"
        ) from None
