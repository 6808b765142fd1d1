"""``torchbft join``: take part in a run with a task, as one peer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from torchbft.cli.init import own_keys, own_name
from torchbft.cli.output import ExitCode, Json, emit, say, stop
from torchbft.primitives.errors import ConfigError

FOLLOW_SECONDS, FOLLOW_BYTES = 0.25, 1 << 20
"""How often the node's log is looked at, and how much of it is told at a time."""


def join(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")] = Path("run.toml"),
    task: Annotated[str, typer.Option(help="file.py:Class; default: the run file's.")] = "",
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

    The task runs local code, whose sha256 must be the run file's; the swarm ships none. A peer
    that was away resumes from its folder. Control-C leaves cleanly.

    Example: torchbft join run.toml --task task.py:Digits --listen [::]:7700
    """
    from torchbft.primitives.runspec import load_run
    from torchbft.pytorch import connection
    from torchbft.pytorch.task import load_task
    from torchbft.pytorch.train import check_task, train_with

    run = load_run(run_file)
    run.check_signed()
    me = own_name(run_file, name)
    own_keys(run_file, me)[1].check(run, me)  # a node would end at once, in a log of its own
    made = load_task(task or run.task.name, run.task.digest)
    check_task(made, run)
    if (data is not None) != (run.data.mode == "private"):
        raise ConfigError(
            f"the run's data mode is {run.data.mode!r}",
            where="--data",
            hint="give --data in a run with private data, and only there",
        )
    folder = run_file.parent / "peers" / me
    shard = _shard(data) if data is not None else None
    log = folder / "node.log"
    say(f"{me} joins {run.name}; the node writes to {log}")
    with _followed(log):
        link = connection.connect(run_file, folder, listen)
        over = train_with(made, link, run, peer=me, train_set=shard, threads=threads)
    root = over.state.root().hex()
    result = {"name": me, "status": over.status, "reason": over.reason, "root": root}
    text = f"{over.status}{': ' + over.reason if over.reason else ''}; model {root[:16]}…"
    emit(result, as_json=as_json, text=text)
    if over.status == "halted":
        raise stop(ExitCode.HALTED)


@contextmanager
def _followed(log: Path) -> Iterator[None]:
    """Says what the node writes meanwhile: whom it waits for, who is behind. Its errors are left
    out, for they come over the link as well."""
    done = threading.Event()
    start = log.stat().st_size if log.exists() else 0

    def follow() -> None:
        offset, ended = start, False
        while not ended:
            ended = done.wait(FOLLOW_SECONDS)
            offset = _tell(log, offset)

    thread = threading.Thread(target=follow, daemon=True, name="node-log")
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _tell(log: Path, offset: int) -> int:
    """Say the whole lines after ``offset``; returns where they end."""
    try:
        with log.open("rb") as file:
            file.seek(offset)
            whole, newline, _ = file.read(FOLLOW_BYTES).rpartition(b"\n")
    except OSError:
        return offset
    for line in whole.decode(errors="replace").split("\n") if newline else ():
        if not line.startswith(("error:", "halted:", "hint:")):
            say(f"node: {line}")
    return offset + len(whole) + len(newline)


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
