"""Options that several commands share, with the values that they take. None of it needs torch."""

from __future__ import annotations

from typing import Annotated, cast, get_args

import typer

from torchbft.primitives.errors import ConfigError
from torchbft.primitives.runspec import MAX_MEMBERS, EngineName
from torchbft.pytorch.tasks import names

RULES = (
    *("mean", "median", "trimmed_mean", "krum", "multi_krum", "geometric_median"),
    *("centred_clipping", "meamed", "bulyan", "mda", "smea", "cge", "caf", "faba", "dnc"),
    *("sign_majority", "weighted_mean"),
)
"""Those that need no input but the contributions."""
STAGES = ("nnm", "arc", "norm_clipping", "static_clipping", "bucketing")
CODECS = ("float32", "bfloat16", "int8", "topk:CHUNK:K[:float32|bfloat16|int8]")
"""What ``tensors`` knows, for help that does not load torch; a test compares them."""
ENGINES: tuple[str, ...] = get_args(EngineName)
A_TASK = f"{', '.join(names())}, or your own: file.py:Class."
DEFAULT_RULE, DEFAULT_CODEC = "arc+nnm+trimmed_mean", "float32"

Peers = Annotated[int, typer.Option(help="How many peers.", min=1, max=MAX_MEMBERS)]
Rounds = Annotated[int, typer.Option(help="Rounds of the run.", min=1)]
InnerSteps = Annotated[int, typer.Option(help="H: inner steps a round.", min=1)]
Seed = Annotated[int, typer.Option(help="Seed of everything random but keys.", min=0)]
RuleName = Annotated[
    str,
    typer.Option(
        "--rule",
        help=f"Aggregation rule: one of {', '.join(RULES)}; before it, joined with '+', any of "
        f"{', '.join(STAGES)}.",
    ),
]
CodecName = Annotated[
    str, typer.Option("--codec", help=f"Codec of the payloads: {', '.join(CODECS)}.")
]


def engine_named(asked: str) -> EngineName:
    """The ordering engine of this name. Raises ConfigError if there is none."""
    if asked not in ENGINES:
        raise ConfigError(
            f"no ordering engine is called {asked!r}", hint=f"--ledger {' or '.join(ENGINES)}"
        )
    return cast(EngineName, asked)
