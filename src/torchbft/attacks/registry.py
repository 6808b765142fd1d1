"""All attacks by name, in the order in which reports list them."""

from __future__ import annotations

from torchbft.attacks.agents.contribution import (
    BadOpener,
    Equivocator,
    Flickerer,
    Oversized,
    SilentValidator,
    Withholder,
)
from torchbft.attacks.agents.delivery import (
    Crasher,
    Forger,
    Replayer,
    SelectiveSender,
    Straggler,
)
from torchbft.attacks.agents.ordering import CensoringLeader, DoubleVoter
from torchbft.attacks.declaration import Attack, Expectation
from torchbft.attacks.vectors.alie import ALittleIsEnough
from torchbft.attacks.vectors.noise import Gaussian, Infinite, NotANumber
from torchbft.attacks.vectors.poisoning import LabelFlip
from torchbft.attacks.vectors.scaling import Copycat, InnerProductManipulation, Scaled, SignFlip
from torchbft.primitives.errors import ConfigError

_ATTACKS: tuple[type[Attack], ...] = (
    SignFlip,
    InnerProductManipulation,
    ALittleIsEnough,
    Gaussian,
    NotANumber,
    Infinite,
    Scaled,
    LabelFlip,
    Copycat,
    Equivocator,
    Withholder,
    BadOpener,
    Replayer,
    Straggler,
    Crasher,
    DoubleVoter,
    Forger,
    Oversized,
    CensoringLeader,
    SelectiveSender,
    Flickerer,
    SilentValidator,
)


def known() -> dict[str, type[Attack]]:
    """Every attack by name."""
    return {attack.name: attack for attack in _ATTACKS}


def get(name: str) -> type[Attack]:
    """The attack of this name (``sign-flip`` means ``sign_flip``). Raises ConfigError."""
    try:
        return known()[name.replace("-", "_")]
    except KeyError:
        raise ConfigError(
            f"no attack is named {name[:40]!r}", hint=f"known: {', '.join(known())}"
        ) from None


def expectation(attack: str | type[Attack]) -> Expectation:
    """Where a demo at default strength shows the liars: named, suspected, down-weighted."""
    return (get(attack) if isinstance(attack, str) else attack).expected
