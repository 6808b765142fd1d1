"""``torchbft vote``: be for a change of the members while the run goes on."""

from __future__ import annotations

import os
import tomllib
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
import typer

from torchbft.cli.init import own_keys, write_whole
from torchbft.cli.output import Json, emit, say
from torchbft.cli.request import MAX_REQUEST_BYTES, parse_request
from torchbft.node import entries, wish
from torchbft.node.storage.lock import holder_of
from torchbft.primitives import wire
from torchbft.primitives.errors import ConfigError, DecodeError
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import (
    VOTING_DOMAIN,
    Hex32,
    Hex64,
    RunSpec,
    load_run,
    voting_body,
)
from torchbft.protocols.round.changes import Admit, Change, Remove, Rotate, described


class Action(StrEnum):
    ADMIT = "admit"
    REMOVE = "remove"
    ROTATE = "rotate"


class NewKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member's next voting key, certified by its identity; holds no secret."""

    run: str
    name: wire.Name
    voting: Hex32
    certificate: Hex64


def vote(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")],
    action: Annotated[Action, typer.Argument(metavar="admit|remove|rotate")],
    what: Annotated[
        str,
        typer.Argument(
            metavar="WHAT",
            help="admit: a request file. remove: a name. rotate: a key file, or the own name.",
        ),
    ],
    withdraw: Annotated[
        bool, typer.Option("--withdraw", help="Be for it no longer, unless it has passed.")
    ] = False,
    name: Annotated[str, typer.Option(help="Which member votes, if there are several.")] = "",
    as_json: Json = False,
) -> None:
    """Vote for a member to come, to go, or to get a new voting key, while the run goes on.

    A change passes once members with a quorum of the votes are for it, and is made when the round
    ends; nobody changes a file for it. This member's node votes in each round until then, now or
    when it starts. Rotating the own key makes one, and writes the file for the others to vote for.

    Example: torchbft vote run.toml admit clinic-e.request.toml
    """
    run, (me, keys) = load_run(run_file), own_keys(run_file, name)
    folder = run_file.parent / "peers" / me
    if run.ledger.kind == "cometbft" and action is not Action.REMOVE and not withdraw:
        raise ConfigError(
            "under CometBFT members can only be removed: its engines go on with the run file's keys"
            " and addresses, so a newcomer would have votes that it cannot give",
            where=str(run_file),
            hint="begin a new run with the other members or keys, from this one's model",
        )
    change = _change(run, run_file, action, what, me, keys.identity)
    if withdraw:
        done = entries.forget(folder, change)
        text = "withdrawn" if done else "this member was not for it"
    else:
        entries.wish_for(folder, change)
        done, text = True, f"for: {described(change)}"
    pid = holder_of(folder)
    if pid is not None:
        with suppress(ProcessLookupError):
            os.kill(pid, wish.LOOK)
    else:
        say(f"no node of {me} runs here; it votes when it starts")
    say("its log and torchbft status tell when it is in force; the others must vote for it as well")
    told = {
        "name": me,
        "change": described(change),
        "withdrawn": withdraw and done,
        "node": pid is not None,
    }
    emit(told, as_json=as_json, text=text)


def _change(
    run: RunSpec, run_file: Path, action: Action, what: str, me: str, identity: SigningKey
) -> Change:
    if action is Action.REMOVE:
        return Remove(_name(what))
    if action is Action.ADMIT:
        return _admission(run, Path(what))
    if what != me:
        return _rotation(run, Path(what))
    folder, path = run_file.parent / "peers" / me, run_file.parent / f"{me}.key.toml"
    waiting = [one for one in entries.wanted(folder) if isinstance(one, Rotate) and one.name == me]
    if waiting:
        return waiting[0]
    key = entries.make_rotated_key(folder)
    certificate = identity.sign(VOTING_DOMAIN, voting_body(me, key.public, epoch=0))
    new = NewKey(run=run.name, name=me, voting=key.public.hex(), certificate=certificate.hex())
    write_whole(path, tomli_w.dumps(msgspec.to_builtins(new)))
    say(f"wrote {path}; the others run: torchbft vote run.toml rotate {path.name}")
    return Rotate(me, key.public, certificate)


def _name(text: str) -> str:
    try:
        return msgspec.convert(text, wire.Name)
    except msgspec.ValidationError:
        raise ConfigError(f"{text!r} is no member's name") from None


def _admission(run: RunSpec, path: Path) -> Admit:
    request = parse_request(_text(path), str(path))
    request.check(run, str(path))
    member = request.member
    change = Admit(
        member.name,
        bytes.fromhex(member.identity),
        bytes.fromhex(member.voting),
        bytes.fromhex(member.voting_certificate),
        member.host,
        member.port,
        member.power,
        member.contributor,
        member.validator,
    )
    try:
        return wire.decode(wire.encode(change), Admit)
    except DecodeError as error:
        raise ConfigError(
            f"is no request that can be voted for: {error}", where=str(path)
        ) from None


def _rotation(run: RunSpec, path: Path) -> Rotate:
    try:
        new = msgspec.convert(tomllib.loads(_text(path)), NewKey)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(
            f"is no new key: {error}",
            where=str(path),
            hint="the member makes one: torchbft vote run.toml rotate NAME",
        ) from None
    if new.run != run.name:
        raise ConfigError(f"is a key for another run ({new.run!r})", where=str(path))
    return Rotate(new.name, bytes.fromhex(new.voting), bytes.fromhex(new.certificate))


def _text(path: Path) -> str:
    """The text of a file that somebody sent."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_REQUEST_BYTES + 1)
        if len(data) > MAX_REQUEST_BYTES:
            raise ConfigError("is too large", where=str(path))
        return data.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"cannot be read ({reason})", where=str(path)) from None
