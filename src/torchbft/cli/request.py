"""``torchbft request``: a member's signed wish to be in a run."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec
import tomli_w
import typer

from torchbft.cli.init import own_keys, write_whole
from torchbft.cli.output import Json, emit, say
from torchbft.primitives import wire
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.keys import verify
from torchbft.primitives.runspec import Hex32, Hex64, Member, RunSpec, load_run

REQUEST_DOMAIN = "run/request"
MAX_REQUEST_BYTES = 64 * 1024
"""One roster entry and a signature."""


class Request(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A roster entry, signed by its identity key for the run with this seed and no other."""

    run: str
    seed: Hex32
    member: Member
    signature: Hex64

    @property
    def body(self) -> bytes:
        entry = msgspec.to_builtins(self.member, order="sorted")
        return wire.encode((self.run, self.seed, entry))

    def check(self, run: RunSpec, where: str) -> None:
        """Raise ConfigError unless it is for this run and signed by the key that it names."""
        if self.seed != run.seed:
            raise ConfigError(
                f"is a request for another run ({self.run!r}), not for {run.name!r}",
                where=where,
                hint="let the member make one from this run file: torchbft request run.toml",
            )
        identity = bytes.fromhex(self.member.identity)
        if not verify(identity, REQUEST_DOMAIN, self.body, bytes.fromhex(self.signature)):
            raise ConfigError(
                f"the signature of {self.member.name!r} does not fit",
                where=where,
                hint="it was edited on the way; ask the member for it again",
            )


def request(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.TOML")] = Path("run.toml"),
    name: Annotated[str, typer.Option(help="Which member, if the folder has several.")] = "",
    out: Annotated[
        Path | None, typer.Option(help="File to write; default NAME.request.toml.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Write this member's signed request to be admitted to a run.

    Send the file to a member, who adds it with: torchbft admit. It holds no secret. With
    --out - it goes to stdout.

    Example: torchbft request run.toml --name clinic-c
    """
    run = load_run(run_file)
    made = signed_request(run, run_file, name)
    text = tomli_w.dumps(msgspec.to_builtins(made))
    if str(out) == "-":
        sys.stdout.write(text)
        return
    path = out or run_file.parent / f"{made.member.name}.request.toml"
    write_whole(path, text)
    say(f"wrote {path}; send it to a member of {run.name!r}, who runs: torchbft admit {run_file}")
    emit({"request": str(path), "member": made.member}, as_json=as_json, text=str(path))


def signed_request(run: RunSpec, run_file: Path, name: str = "") -> Request:
    """The request of the member whose keys are beside the run file."""
    me, keys = own_keys(run_file, name)
    path = run_file.parent / "peers" / me / "member.toml"
    try:
        member = msgspec.convert(tomllib.loads(path.read_text()), Member)
    except (OSError, tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ConfigError(
            f"cannot be read ({error})",
            where=str(path),
            hint=f"write it again: torchbft init --name {me} --host HOST --port PORT",
        ) from None
    bare = Request(run=run.name, seed=run.seed, member=member, signature="0" * 128)
    signature = keys.identity.sign(REQUEST_DOMAIN, bare.body).hex()
    return msgspec.structs.replace(bare, signature=signature)


def parse_request(text: str, where: str) -> Request:
    """A request from TOML text. Raises ConfigError naming what is wrong."""
    try:
        return msgspec.convert(tomllib.loads(text), Request)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ConfigError(
            f"is no request: {error}", where=where, hint="make one: torchbft request run.toml"
        ) from None
