"""``torchbft admit``: adds members to a run file, countersigns it, collects signatures."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from torchbft.cli.init import own_keys, write_whole
from torchbft.cli.output import Json, emit, say
from torchbft.cli.request import MAX_REQUEST_BYTES, Request, parse_request
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.runspec import (
    MAX_RUN_FILE_BYTES,
    Member,
    RunSpec,
    dump_run,
    load_run,
    parse_run,
)


def admit(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")] = Path("run.toml"),
    files: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[FILE]...", help="Requests, or copies that others have signed."),
    ] = None,
    name: Annotated[str, typer.Option(help="Who signs, if the folder has several.")] = "",
    as_json: Json = False,
) -> None:
    """Add the members of signed requests to a run file and countersign it.

    Any change of the roster makes a new run file, which must be signed anew: it can be run once
    n - f of its members have signed the same content. Without a FILE this only signs. A FILE may
    also be a copy of the run file that others have signed; its signatures are merged in, so copies
    may be signed by all members at once.

    Example: torchbft admit run.toml clinic-c.request.toml
    """
    run, (me, keys) = load_run(run_file), own_keys(run_file, name)
    keys.check(run, me)
    requests, copies = _sorted_by_kind(files or [])
    for where, request in requests:
        request.check(run, where)
        run = with_member(run, request.member, where)
    run.check()
    for where, copy in copies:
        run = _with_signatures(run, copy, where)
    run = run.signed(me, keys.identity)
    write_whole(run_file, dump_run(run))
    _tell(run, as_json=as_json)


def _sorted_by_kind(
    files: list[Path],
) -> tuple[list[tuple[str, Request]], list[tuple[str, RunSpec]]]:
    requests: list[tuple[str, Request]] = []
    copies: list[tuple[str, RunSpec]] = []
    for path in files:
        text = _bounded(path)
        if _is_run(text):
            copies.append((str(path), parse_run(text, where=str(path))))
        else:
            requests.append((str(path), parse_request(text, str(path))))
    return requests, copies


def _bounded(path: Path) -> str:
    """The text of a file that somebody sent."""
    try:
        with path.open("rb") as file:
            data = file.read(max(MAX_REQUEST_BYTES, MAX_RUN_FILE_BYTES) + 1)
        if len(data) > max(MAX_REQUEST_BYTES, MAX_RUN_FILE_BYTES):
            raise ConfigError("is too large for a request or a run file", where=str(path))
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        what = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot be read ({what})", where=str(path)) from None


def _is_run(text: str) -> bool:
    try:
        return "members" in tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError):
        return False


def with_member(run: RunSpec, member: Member, where: str) -> RunSpec:
    """The run with one more member, or with that member's new address; unsigned.

    Raises ConfigError if the name belongs to another key.
    """
    others = tuple(old for old in run.members if old.name != member.name)
    for old in run.members:
        if old.name == member.name and old.identity != member.identity:
            raise ConfigError(
                f"the name {member.name!r} is taken by another key",
                where=where,
                hint="let the new member choose another name: torchbft init --name NAME",
            )
    roster = tuple(sorted((*others, member), key=lambda each: each.name))
    if roster == run.members:
        return run
    return msgspec.structs.replace(run, members=roster, signatures=())


def _with_signatures(run: RunSpec, copy: RunSpec, where: str) -> RunSpec:
    if copy.run_id != run.run_id:
        raise ConfigError(
            f"is another run: its id is {copy.run_id.hex()[:16]}…, not {run.run_id.hex()[:16]}…",
            where=where,
            hint="signatures of one content are merged, contents are not: if members were admitted"
            " into different copies, admit all their requests into one, then sign it",
        )
    valid = set(copy.countersigned_by())
    mine = {item.member: item for item in run.signatures}
    taken = {item.member: item for item in copy.signatures if item.member in valid}
    merged = tuple(item for _, item in sorted((mine | taken).items()))
    return msgspec.structs.replace(run, signatures=merged)


def _tell(run: RunSpec, *, as_json: bool) -> None:
    need, signed = FaultModel(len(run.members)).quorum, run.countersigned_by()
    missing = [member.name for member in run.members if member.name not in signed]
    ready = len(signed) >= need
    if ready:
        say(
            f"signed by {len(signed)} of {len(run.members)}, {need} needed: it can be run;"
            " send it to everybody"
        )
    else:
        say(f"signed by {len(signed)}, {need} needed; not yet by {', '.join(missing)}")
        say(
            "hint: each member runs torchbft admit run.toml on its copy, one after the other or all"
            " at once; whoever collects the copies merges their signatures: torchbft admit run.toml"
            " COPY..."
        )
    if run.ledger.kind == "embedded" and len({member.host for member in run.members}) > 1:
        say("note: members stand on different hosts, and the ledger is the embedded one; between")
        say('owners set kind = "cometbft" under [ledger], and let all sign: docs/engines.md')
    data = {
        "run_id": run.run_id.hex(),
        "members": [member.name for member in run.members],
        "signed_by": signed,
        "needed": need,
        "ready": ready,
    }
    emit(data, as_json=as_json, text=run.run_id.hex())
