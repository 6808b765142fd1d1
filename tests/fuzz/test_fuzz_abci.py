"""Bytes from the engine's side: whatever they are, an answer or one error, and no state changes but
by ``commit``. The engine is our own child, but so was every confused deputy."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from google.protobuf.message import Message
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "round"))
sys.path.insert(0, str(Path(__file__).parents[1] / "unit" / "node"))

from fake_engine import genesis_call
from round_world import World

from torchbft.node.ordering.abci_server import parse_request
from torchbft.node.ordering.calls import Calls
from torchbft.node.ordering.delimited import Frames, framed
from torchbft.node.ordering.proto import abci_pb2 as pb
from torchbft.primitives.errors import DecodeError, TorchbftError
from torchbft.protocols.round.application import Application

WORLD = World(4)
READIES = [WORLD.ready(name) for name in WORLD.names]
KINDS = sorted(field.name for field in pb.Request.DESCRIPTOR.fields)

blobs = st.one_of(st.binary(max_size=80), st.sampled_from(READIES), st.just(bytes(5000)))
numbers = st.one_of(st.integers(-3, 3), st.integers(-(2**63), 2**63 - 1))
texts = st.one_of(
    st.text("/abc\x00é☃", max_size=20), st.sampled_from(["state", "height", "/p2p/filter/id/x"])
)


def _fill(draw: st.DrawFn, message: Message, depth: int = 0) -> Message:
    """Random values in random fields, of the right types."""
    for field in message.DESCRIPTOR.fields:
        if not draw(st.booleans()):
            continue
        count = draw(st.integers(0, 3)) if field.is_repeated else 1
        for _ in range(count):
            if field.type == field.TYPE_MESSAGE:
                inner = getattr(message, field.name)
                part = inner.add() if field.is_repeated else inner
                part.SetInParent()
                if depth < 3:
                    _fill(draw, part, depth + 1)
                continue
            value = _value(draw, field)
            if field.is_repeated:
                getattr(message, field.name).append(value)
            else:
                setattr(message, field.name, value)
    return message


def _value(draw: st.DrawFn, field: object) -> object:
    kind = field.type  # type: ignore[attr-defined]
    if kind == field.TYPE_BYTES:  # type: ignore[attr-defined]
        return draw(blobs)
    if kind == field.TYPE_STRING:  # type: ignore[attr-defined]
        return draw(texts)
    number = draw(numbers)
    if kind in (field.TYPE_UINT32, field.TYPE_UINT64):  # type: ignore[attr-defined]
        number = abs(number)
    bits = {field.TYPE_INT32: 31, field.TYPE_UINT32: 32}.get(kind, 63)  # type: ignore[attr-defined]
    return number % 2**bits if number >= 0 else max(number, -(2**bits))


@st.composite
def requests(draw: st.DrawFn) -> pb.Request:
    request = pb.Request()
    part = getattr(request, draw(st.sampled_from(KINDS)))
    part.SetInParent()
    _fill(draw, part)
    return request


class Answering:
    """Calls over a fresh application, in the middle of a block or not."""

    def __init__(self) -> None:
        self.application = Application(WORLD.genesis)
        self.told: list[object] = []
        self.calls = Calls(
            self.application,
            genesis_call(WORLD.genesis),
            frozenset,
            wait=0.0,
            tell=self._tell,
            seat_power=10,
        )

    def _tell(self, event: object) -> None:
        self.told.append(event)
        self.application.commit()

    async def take(self, request: pb.Request) -> None:
        before = self.application.info()
        kind = request.WhichOneof("value")
        try:
            answer = await self.calls.answer(request)
        except TorchbftError:
            assert self.application.info() == before, "what is refused changes nothing"
            return
        assert answer.WhichOneof("value") == kind
        assert pb.Response.FromString(answer.SerializeToString()) == answer
        moved = self.application.info().last_height - before.last_height
        assert moved == (1 if kind == "commit" else 0)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(requests(), min_size=1, max_size=6))
def test_any_requests_in_any_order_get_an_answer_or_an_error(asked: list[pb.Request]) -> None:
    async def story() -> None:
        here = Answering()
        for request in asked:
            await here.take(request)

    asyncio.run(story())


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=120))
def test_any_bytes_are_a_request_or_one_error(data: bytes) -> None:
    try:
        request = parse_request(data)
    except DecodeError:
        return
    asyncio.run(Answering().take(request))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(requests(), st.data())
def test_a_request_that_was_damaged_on_its_way_is_a_request_or_one_error(
    request: pb.Request, data: st.DataObject
) -> None:
    stream = bytearray(framed(request))
    at = data.draw(st.integers(0, len(stream) - 1))
    stream[at] ^= data.draw(st.integers(1, 255))
    try:
        found = [parse_request(body) for body in Frames().feed(bytes(stream))]
    except DecodeError:
        return
    for each in found:
        asyncio.run(Answering().take(each))
