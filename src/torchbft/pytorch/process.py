"""The trainer's end of a node that runs in another process (``node/link.py``)."""

from __future__ import annotations

import contextlib
from typing import Literal, cast

import numpy as np

from torchbft.node.link import (
    Begin,
    Close,
    Delivery,
    Endpoint,
    Evaluation,
    Hello,
    Leave,
    Open,
    Over,
    Submit,
)
from torchbft.primitives.errors import (
    ConfigError,
    DecodeError,
    HaltError,
    MisuseError,
    StorageError,
    TorchbftError,
)
from torchbft.primitives.ids import PeerId
from torchbft.pytorch.link import RoundOutcome, RoundStart, RunOver
from torchbft.tensors.state import AgreedState

_GONE = "the node of this peer has ended"
_REFUSALS: dict[str, type[TorchbftError]] = {"refused": ConfigError, "storage": StorageError}


class ProcessLink:
    """``NodeLink`` over an ``Endpoint``. All calls block."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._state: AgreedState | None = None
        self._left = False

    def start(self, initial: AgreedState) -> AgreedState:
        with contextlib.suppress(HaltError):  # the node went first, and may have said why
            self._endpoint.send(Hello(initial.root()), initial.encode())
        delivery = self._receive()
        if delivery is None:
            raise HaltError(_GONE, where="join", hint="its last lines are in node.log")
        if isinstance(delivery.message, Over):
            refused = delivery.message
            raise _REFUSALS.get(refused.status, HaltError)(refused.reason, hint=refused.hint)
        if not isinstance(delivery.message, Begin):
            raise _unexpected(delivery)
        self._state = _state(delivery, initial)
        return self._state

    def next_round(self) -> RoundStart | RunOver:
        delivery = self._receive()
        if delivery is None or isinstance(delivery.message, Over):
            return self._over(delivery)
        if not isinstance(delivery.message, Open):
            raise _unexpected(delivery)
        opened = delivery.message
        self._state = _state(delivery, self._known())
        positions = (
            np.frombuffer(delivery.take(1), dtype="<i8").tolist() if opened.assigned else None
        )
        peers = tuple(PeerId(name) for name in opened.peers)
        return RoundStart(opened.round, positions, self._state, peers)

    def submit(
        self,
        round: int,
        payload: bytes | memoryview,
        trace_root: bytes,
        local_root: bytes,
        seconds: float = 0.0,
    ) -> None:
        with contextlib.suppress(HaltError):  # the node went first, and ``outcome`` says why
            self._endpoint.send(Submit(round, trace_root, local_root, seconds), payload)

    def outcome(self, round: int) -> RoundOutcome | RunOver:
        delivery = self._receive()
        if delivery is None or isinstance(delivery.message, Over):
            return self._over(delivery)
        closed = delivery.message
        if not isinstance(closed, Close) or closed.round != round:
            raise _unexpected(delivery)
        self._state = _state(delivery, self._known())
        return RoundOutcome(round, closed.accepted, closed.void, closed.reason, self._state)

    def report(
        self,
        round: int,
        loss: float,
        accuracy: float | None,
        train_loss: float | None,
        seconds: float = 0.0,
    ) -> None:
        with contextlib.suppress(HaltError):
            self._endpoint.send(Evaluation(round, loss, accuracy, train_loss, seconds))

    def leave(self) -> None:
        if not self._left:
            self._left = True
            with contextlib.suppress(HaltError):  # the node went first
                self._endpoint.send(Leave())
            self._endpoint.close()

    def _receive(self) -> Delivery | None:
        return None if self._left else self._endpoint.receive()

    def _known(self) -> AgreedState:
        if self._state is None:
            raise MisuseError("call start() first", where="trainer link")
        return self._state

    def _over(self, delivery: Delivery | None) -> RunOver:
        if delivery is None:
            return RunOver("stopped", _GONE, self._known())
        message = cast(Over, delivery.message)
        if delivery.blobs:
            self._state = _state(delivery, self._known())
        status = cast(Literal["finished", "halted", "stopped"], message.status)
        return RunOver(status, message.reason, self._known())


def _state(delivery: Delivery, like: AgreedState) -> AgreedState:
    """Read a message's state from shared memory; its layout must be the one this trainer has.
    Empty memory stands for the state that the message before brought."""
    if not delivery.blobs:
        raise DecodeError("the message lacks its shared memory", where="trainer link")
    try:
        held = delivery.blobs[0].view
        same = not held.nbytes and isinstance(delivery.message, Open | Over)
        return like if same else AgreedState.decode(held, like.layout)
    finally:
        delivery.blobs[0].close()


def _unexpected(delivery: Delivery) -> MisuseError:
    name = type(delivery.message).__name__
    return MisuseError(f"{name} came out of turn from the node", where="trainer link")
