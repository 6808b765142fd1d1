"""Distinct types for the things that are counted, so that they are not mixed by accident."""

from __future__ import annotations

import re
from typing import NewType

from torchbft.primitives.errors import DecodeError

PeerId = NewType("PeerId", str)
"""A member's name in the signed run file. Order across contributions is order of this string."""

Epoch = NewType("Epoch", int)
"""The span in which the membership is fixed."""

Round = NewType("Round", int)
"""One aggregation of one tensor set."""

Height = NewType("Height", int)
"""The number of a block; the first is 1."""

View = NewType("View", int)
"""An attempt, with a leader of its own, to finalize the block of one height; the first is 0."""

Step = NewType("Step", int)
"""One inner optimizer step, counted from the start of the run."""

_PEER_ID = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,30}[a-z0-9])?", re.ASCII)


def parse_peer_id(text: str) -> PeerId:
    """Check a name: 1 to 32 of ``a-z 0-9 -``, no hyphen at either end. Raises DecodeError."""
    if _PEER_ID.fullmatch(text) is None:
        raise DecodeError(
            f"{text[:40]!r} is not a peer name",
            hint="use 1 to 32 characters of a-z, 0-9 and '-', not beginning or ending in '-'",
        )
    return PeerId(text)
