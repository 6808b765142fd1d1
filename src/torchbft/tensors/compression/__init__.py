"""Codecs: how an update becomes bytes, and how foreign bytes become an update or one error.

A codec = transform + selector + quantiser + wire format; the residual (error feedback) stays with
the peer. The byte format is specified in ``wire``.
"""

from torchbft.tensors.compression.codec import (
    CODEC_NAMES,
    Codec,
    get_codec,
    max_payload_bytes,
)
from torchbft.tensors.compression.residual import PendingResidual, Residual

__all__ = [
    "CODEC_NAMES",
    "Codec",
    "PendingResidual",
    "Residual",
    "get_codec",
    "max_payload_bytes",
]
