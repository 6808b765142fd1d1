"""``torchbft doctor``: what would keep this member from taking part, before it matters."""

from __future__ import annotations

import asyncio
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from torchbft.cli.init import own_name
from torchbft.cli.output import ExitCode, Json, emit, stop
from torchbft.node.launch import Keys
from torchbft.node.storage.lock import holder_of
from torchbft.node.transports.ports import check_port
from torchbft.primitives.errors import ConfigError, CorruptLogError, TorchbftError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.runspec import EngineName, Member, RunSpec, load_run

OK, WARN, FAIL = "ok", "warn", "fail"
CONNECT_SECONDS = 2.0
"""A handshake round the globe takes a third of a second."""
CLOCK_TOLERANCE = 60.0
"""Seconds; agreement never reads a clock, but times in traces should compare."""
MIN_FREE_BYTES = 1 << 30
"""Payloads, checkpoints and logs of a small run; a larger one needs its payload × n × rounds."""
PACKAGES = ("torchbft", "torch", "numpy", "msgspec", "pynacl", "cryptography", "safetensors")
LOGS = ("blocks.log", "votes.log", "statements.log", "chain.log")


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: ``state`` is ok, warn or fail."""

    check: str
    state: str
    detail: str
    hint: str = ""


def doctor(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")] = Path("run.toml"),
    name: Annotated[str, typer.Option(help="Which member, if the folder has several.")] = "",
    task: Annotated[str, typer.Option(help="Compare this task with the run file's.")] = "",
    as_json: Json = False,
) -> None:
    """Look for whatever would keep this member from taking part in a run.

    Run file and its signatures, keys, own port, reachability of the others, clock, versions,
    disk, logs of an earlier start. Ends with 1 if something fails; a warning does not.

    Example: torchbft doctor run.toml --name clinic-c
    """
    findings = list(examine(run_file, name, task))
    lines = [f"{f.state:4}  {f.check}: {f.detail}" + (f"\n      hint: {f.hint}" if f.hint else "")
             for f in findings]  # fmt: skip
    failed = any(finding.state == FAIL for finding in findings)
    emit({"ok": not failed, "findings": findings}, as_json=as_json, text="\n".join(lines))
    if failed:
        raise stop(ExitCode.CHECK_FAILED)


def examine(run_file: Path, name: str = "", task: str = "") -> Iterator[Finding]:
    """All findings, in the order in which a start would meet them."""
    try:
        run = load_run(run_file)
    except ConfigError as error:
        yield _failed("run file", error)
        yield from _machine(run_file.parent)
        return
    yield Finding("run file", OK, f"{run.name!r}, id {run.run_id.hex()[:16]}…")
    yield _tried("signatures", lambda: _signatures(run))
    yield _tried("rule", lambda: _rule(run))
    others = run.members
    try:
        me = run.member(own_name(run_file, name))
    except ConfigError as error:
        yield _failed("roster", error)
    else:
        others = tuple(member for member in run.members if member.name != me.name)
        yield from _own(run, me, run_file.parent / "peers" / me.name)
        yield _clock_of_others(run, me, run_file.parent / "peers" / me.name)
    if task:
        yield _tried("task", lambda: _task(run, task))
    yield from reachability(others, run.ledger.kind)
    yield from _machine(run_file.parent)


def _own(run: RunSpec, me: Member, folder: Path) -> Iterator[Finding]:
    """What concerns this member alone."""
    yield _tried("keys", lambda: _keys(folder, run, me))
    yield _own_port(me.host, me.port, folder)
    if run.ledger.kind == "cometbft":
        yield from _engine(run, me, folder)
    yield from _logs(folder)


def _engine(run: RunSpec, me: Member, folder: Path) -> Iterator[Finding]:
    """What CometBFT needs here: its binary, its port, and the state of what its key signed."""
    from torchbft.node.ordering.binary import COMETBFT_VERSION, find_binary
    from torchbft.node.ordering.home import FOLDER, Home
    from torchbft.node.ordering.settings import bind_host

    yield _tried("CometBFT", lambda: f"{COMETBFT_VERSION} at {find_binary()}")
    yield _own_port(bind_host(me.host), me.ledger_address[1], folder)
    home = Home(folder / FOLDER)
    if not home.fresh:
        yield _tried("genesis", lambda: home.check(run))
        if holder_of(folder) is None:
            yield _tried("signing state", lambda: _signing_state(run, me, home.folder))


def _signing_state(run: RunSpec, me: Member, home: Path) -> str:
    from torchbft.node.ordering.genesis import chain_id
    from torchbft.node.ordering.signstate import SignState, state_path

    public = bytes.fromhex(me.voting)
    state = SignState(state_path(home, public), public, chain_id(run))
    state.close()
    return f"up to height {state.last.height}"


def _clock_of_others(run: RunSpec, me: Member, folder: Path) -> Finding:
    """Whether this clock is that of the members who answer now. CometBFT needs it."""
    from torchbft.node.transports import clock as clocks

    check = "clock of others"
    try:
        identity = Keys.load(folder).identity
    except ConfigError as error:
        return Finding(check, WARN, "cannot be asked without this member's keys", error.hint)
    found = asyncio.run(clocks.readings(run, PeerId(me.name), identity))
    off = clocks.off_by(run, found)
    if off is None:
        return Finding(check, OK, f"agrees with that of the {len(found)} members who answer")
    state = FAIL if run.ledger.kind == "cometbft" else WARN
    hint = "set it (timedatectl set-ntp true)"
    return Finding(check, state, f"this machine's is {clocks.words(off)}", hint)


def _failed(check: str, error: TorchbftError) -> Finding:
    return Finding(check, FAIL, str(error), error.hint)


def _tried(check: str, look: Callable[[], str]) -> Finding:
    try:
        return Finding(check, OK, look())
    except TorchbftError as error:
        return _failed(check, error)


def _signatures(run: RunSpec) -> str:
    run.check_signed()
    return f"{len(run.countersigned_by())} of {len(run.members)} members signed this content"


def _rule(run: RunSpec) -> str:
    from torchbft.tensors.recipe import Recipe

    Recipe.of(run)
    faults = run.contributor_faults
    return f"{run.aggregation.rule} holds for {run.m_min} contributions with f={faults.f}"


def _keys(folder: Path, run: RunSpec, me: Member) -> str:
    Keys.load(folder).check(run, me.name)
    return f"those of {me.name!r}, readable by their owner alone"


def _task(run: RunSpec, task: str) -> str:
    from torchbft.pytorch.task import load_task, start_state

    start = start_state(load_task(task, run.task.digest), run).root().hex()
    if run.task.start_root and start != run.task.start_root:
        raise ConfigError(
            f"it starts at root {start[:16]}…, the run file names {run.task.start_root[:16]}…",
            where=task,
            hint="another torch version may draw other start values; compare versions",
        )
    return "source and start state are those of the run file"


def _own_port(host: str, port: int, folder: Path) -> Finding:
    """Whether this member can listen where the roster says it does."""
    check = f"port {port}"
    if holder_of(folder) is not None:
        return Finding(check, OK, "is for this member's own node, which is running")
    try:
        check_port(host, port)
    except ConfigError as error:
        return _failed(check, error)
    return Finding(check, OK, "is free")


def _logs(folder: Path) -> Iterator[Finding]:
    """Logs of an earlier start: a damaged one would stop the node."""
    from torchbft.node.storage.log import read_log

    for path in (folder / name for name in LOGS):
        if not path.exists():
            continue
        try:
            count = sum(1 for _ in read_log(path, strict=False))
            yield Finding(path.name, OK, f"{count} records")
        except CorruptLogError as error:
            yield _failed(path.name, error)


def reachability(others: tuple[Member, ...], kind: EngineName = "embedded") -> list[Finding]:
    """One connection to each other member, and to its CometBFT if there is one, all at once."""
    places = [(f"reach {member.name}", member.host, member.port) for member in others]
    if kind == "cometbft":
        places += [(f"reach {m.name}'s CometBFT", *m.ledger_address) for m in others]
    if not places:
        return []
    with ThreadPoolExecutor(max_workers=len(places)) as pool:
        return list(pool.map(lambda place: _reach(*place), places))


def _reach(check: str, host: str, port: int) -> Finding:
    place = f"{host}:{port}"
    try:
        with socket.create_connection((host, port), timeout=CONNECT_SECONDS):
            return Finding(check, OK, f"{place} answers")
    except ConnectionRefusedError:
        return Finding(check, WARN, f"{place} is there but nothing listens: not started, or done")
    except socket.gaierror:
        return Finding(check, FAIL, f"the name {host!r} is unknown", "correct the host")
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror
        hint = "open the port in the firewall, or correct host and port in the run file"
        return Finding(check, FAIL, f"{place}: {why} within {CONNECT_SECONDS:g} s", hint)


def _machine(folder: Path) -> Iterator[Finding]:
    yield clock(folder, time.time())
    yield _versions()
    free = shutil.disk_usage(folder).free
    detail = f"{free / 2**30:.1f} GiB free"
    short = "free some space: a full disk stops this member, not the others"
    state = OK if free >= MIN_FREE_BYTES else FAIL
    yield Finding("disk", state, detail, "" if state == OK else short)


def clock(folder: Path, now: float) -> Finding:
    """Whether the clock lags behind what was written already, here or by other members.

    Traces carry the writers' UNIX time, and files theirs; none can lie in the future.
    """
    from torchbft.report.gather import gather

    times = [path.stat().st_mtime for path in folder.glob("*.toml")]
    times += [path.stat().st_mtime for path in folder.glob("peers/*/*.key")]
    if (folder / "peers").is_dir() or times:
        view = gather(folder)
        times += [peer.last_at for peer in view.peers.values()]
    ahead = max(times, default=now) - now
    if ahead > CLOCK_TOLERANCE:
        return Finding(
            "clock",
            FAIL,
            f"is {ahead:.0f} s behind the newest file of this run",
            "set it (timedatectl set-ntp true); agreement does not need it, reports do",
        )
    return Finding("clock", OK, time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)))


def _versions() -> Finding:
    found = {name: _version(name) for name in PACKAGES}
    missing = [name for name, version in found.items() if not version]
    text = f"python {sys.version.split()[0]}, " + ", ".join(
        f"{name} {version}" for name, version in found.items() if version
    )
    if missing:
        hint = "install the package again: pip install torchbft"
        return Finding("versions", FAIL, f"missing: {', '.join(missing)}", hint)
    return Finding("versions", OK, text)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
