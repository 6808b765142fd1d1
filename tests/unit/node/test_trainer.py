"""The node's side of its trainer: late submissions, void rounds, restarts, the end."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
    endpoints,
)
from torchbft.node.model import Saved
from torchbft.node.trainer import Assigned, Ended, TrainerPort
from torchbft.primitives.errors import ConfigError, HaltError, StorageError
from torchbft.pytorch.link import RoundOutcome, RoundStart, RunOver
from torchbft.pytorch.process import ProcessLink
from torchbft.tensors.state import AgreedState

LIMIT = 20.0
"""Seconds that a message may take before the test fails."""
ROOT = bytes(32)


class Loop:
    """Stands for the event loop: callbacks wait until the test takes them."""

    def __init__(self) -> None:
        self.calls: queue.Queue[Any] = queue.Queue()

    def call_soon_threadsafe(self, call: Callable[[Any], None], argument: Any) -> None:
        self.calls.put((call, argument))

    def run_one(self) -> Any:
        call, argument = self.calls.get(timeout=LIMIT)
        call(argument)
        return argument


class Wired:
    """A port, the trainer's end of its link, and the messages that the port passed on."""

    def __init__(self, state: AgreedState, folder: Path) -> None:
        self.state, self.folder = state, folder
        self.saved = self.save(state)
        ours, self.trainer = endpoints()
        self.trainer.socket.settimeout(LIMIT)
        self.loop, self.heard = Loop(), []  # type: ignore[var-annotated]
        self.outcomes: dict[int, Ended] = {}
        before = set(threading.enumerate())
        self.port = TrainerPort(ours, self.loop, self.heard.append, ("peer-a", "peer-b"))  # type: ignore[arg-type]
        (self.reader,) = set(threading.enumerate()) - before

    def save(self, state: AgreedState) -> Saved:
        path = self.folder / "state.safetensors"
        state.save(path)
        return Saved(state, path.open("rb"))

    def ended(self, round_: int) -> Ended:
        return self.outcomes.get(round_, Ended(True, False, ""))

    def assign(self, round_: int, positions: list[int] | None = None) -> None:
        self.port.assign(Assigned(round_, positions), self.ended, self.saved)

    def begin(self) -> None:
        self.port.begin(self.ended, self.saved)
        assert isinstance(self.told(), Begin)

    def submitted(self, round_: int) -> None:
        self.port.submitted(round_, self.ended, self.saved)

    def finish(self, status: str = "finished", reason: str = "") -> None:
        self.port.finish(status, reason, self.ended, self.saved)

    def delivery(self) -> Delivery:
        found = self.trainer.receive()
        assert found is not None, "nothing came in time"
        return found

    def told(self) -> Any:
        return self.delivery().message

    def quiet(self) -> bool:
        """Whether nothing waits for the trainer."""
        self.trainer.socket.setblocking(False)
        try:
            self.trainer.socket.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return True
        finally:
            self.trainer.socket.settimeout(LIMIT)
        return False


@pytest.fixture
def wired(initial: AgreedState, tmp_path: Path) -> Iterator[Wired]:
    made = Wired(initial, tmp_path)
    yield made
    made.trainer.close()
    made.port.close()


def test_a_trainer_is_answered_in_the_order_of_a_round(wired: Wired) -> None:
    wired.begin()
    wired.assign(0, [4, 1, 9])
    opened = wired.delivery()
    assert opened.message == Open(0, True, ("peer-a", "peer-b"))
    assert opened.take(1) == b"".join(n.to_bytes(8, "little") for n in (4, 1, 9))
    assert AgreedState.decode(opened.take(0)).root() == wired.state.root()
    wired.submitted(0)
    assert wired.quiet(), "the round has not ended"
    wired.assign(1)
    closed, opened = wired.delivery(), wired.delivery()
    assert closed.message == Close(0, True, False, "")
    assert AgreedState.decode(closed.take()).root() == wired.state.root()
    assert opened.message == Open(1, False, ("peer-a", "peer-b"))
    assert opened.take() == b"", "the same state is not sent twice"


def test_a_state_is_read_after_its_file_is_gone(wired: Wired) -> None:
    (wired.folder / "state.safetensors").unlink()
    wired.port.begin(wired.ended, wired.saved)
    assert AgreedState.decode(wired.delivery().take()).root() == wired.state.root()


def test_a_round_that_was_decided_long_ago_is_closed_and_the_newest_opened(wired: Wired) -> None:
    wired.begin()
    wired.assign(0)
    assert wired.told().round == 0
    wired.outcomes[0] = Ended(False, False, "late")
    for number in range(1, 9):
        wired.assign(number)
        assert wired.quiet(), "it still trains round 0"
    wired.submitted(0)
    assert wired.told() == Close(0, False, False, "late")
    assert wired.told().round == 8
    assert wired.quiet()


def test_a_void_round_is_told_as_void_with_its_reason(wired: Wired) -> None:
    wired.begin()
    wired.assign(3)
    wired.told()
    wired.outcomes[3] = Ended(False, True, "2 of 3 contributions")
    wired.submitted(3)
    wired.assign(4)
    assert wired.told() == Close(3, False, True, "2 of 3 contributions")
    assert wired.told().round == 4


def test_a_round_that_was_assigned_before_the_trainer_came_is_opened_when_it_comes(
    wired: Wired,
) -> None:
    wired.assign(7)  # after a restart the model is there before the trainer
    assert wired.quiet()
    wired.begin()
    assert wired.told().round == 7


def test_a_run_that_was_over_before_the_trainer_came_ends_when_it_comes(wired: Wired) -> None:
    wired.finish()
    assert not wired.port.idle
    wired.begin()
    assert wired.told() == Over("finished", "", "")
    assert wired.port.idle


def test_the_end_waits_for_the_round_that_the_trainer_is_in(wired: Wired) -> None:
    wired.begin()
    wired.assign(0)
    wired.told()
    wired.finish()
    assert wired.quiet()
    assert not wired.port.idle
    wired.submitted(0)
    assert wired.told() == Close(0, True, False, "")
    assert wired.told() == Over("finished", "", "")
    assert wired.port.idle


@pytest.mark.parametrize("status", ["halted", "stopped"])
def test_a_halt_reaches_a_trainer_in_the_middle_of_a_round(wired: Wired, status: str) -> None:
    wired.begin()
    wired.assign(0)
    wired.told()
    wired.finish(status, "why")
    assert wired.told() == Over(status, "why", "")
    wired.submitted(0)
    wired.finish(status, "again")
    assert wired.quiet(), "the end is told once"


def test_a_trainer_that_is_gone_is_told_nothing_and_breaks_nothing(wired: Wired) -> None:
    wired.begin()
    wired.trainer.close()
    wired.loop.run_one()
    assert wired.heard == [None]
    wired.port.gone()
    wired.assign(0)
    wired.finish()
    assert wired.port.idle
    assert not wired.port.attached


def test_sending_to_a_trainer_that_died_unnoticed_marks_it_gone(wired: Wired) -> None:
    wired.begin()
    wired.trainer.close()
    wired.assign(0)
    assert not wired.port.attached


def test_what_the_trainer_says_comes_to_the_event_loop_in_order(wired: Wired) -> None:
    said = [Hello(ROOT), Submit(0, ROOT, ROOT, 0.5), Evaluation(0, 1.0, None, 0.5, 0.1), Leave()]
    wired.trainer.send(said[0], b"state")
    wired.trainer.send(said[1], b"payload")
    wired.trainer.send(said[2])
    wired.trainer.send(said[3])
    for _ in said:
        wired.loop.run_one()
    assert [delivery.message for delivery in wired.heard] == said
    assert wired.heard[1].take() == b"payload"


def test_a_broken_frame_ends_the_link_as_if_the_trainer_were_gone(wired: Wired) -> None:
    wired.trainer.socket.sendall(b"\xff" * 64)
    wired.loop.run_one()
    assert wired.heard == [None]


def test_an_event_loop_that_has_ended_ends_the_reader(wired: Wired) -> None:
    def closed(call: Any, argument: Any) -> None:
        raise RuntimeError("Event loop is closed")

    wired.loop.call_soon_threadsafe = closed  # type: ignore[method-assign]
    wired.trainer.send(Leave())
    wired.reader.join(LIMIT)
    assert not wired.reader.is_alive()


# --- the trainer's own end ------------------------------------------------------------------------


@pytest.fixture
def pair(initial: AgreedState) -> Iterator[tuple[Endpoint, ProcessLink]]:
    node, trainer = endpoints()
    node.socket.settimeout(LIMIT)
    yield node, ProcessLink(trainer)
    node.close()


def test_the_trainers_end_speaks_in_rounds(
    pair: tuple[Endpoint, ProcessLink], initial: AgreedState
) -> None:
    node, link = pair
    state = initial.encode()
    node.send(Begin(0), state)
    assert link.start(initial).root() == initial.root()
    hello = node.receive()
    assert hello is not None
    assert hello.message == Hello(initial.root())
    node.send(Open(0, True, ("peer-a",)), state, (5).to_bytes(8, "little"))
    opened = link.next_round()
    assert isinstance(opened, RoundStart)
    assert (opened.round, opened.positions) == (0, [5])
    link.submit(0, b"payload", ROOT, ROOT)
    submitted = node.receive()
    assert submitted is not None
    assert submitted.take() == b"payload"
    node.send(Close(0, False, True, "void"), state)
    outcome = link.outcome(0)
    assert isinstance(outcome, RoundOutcome)
    assert (outcome.void, outcome.reason) == (True, "void")
    node.send(Over("finished", "", ""), state)
    over = link.next_round()
    assert isinstance(over, RunOver)
    assert over.status == "finished"


@pytest.mark.parametrize(
    ("status", "raised"),
    [("refused", ConfigError), ("storage", StorageError), ("halted", HaltError)],
)
def test_a_node_that_cannot_start_says_why_through_its_trainer(
    pair: tuple[Endpoint, ProcessLink], initial: AgreedState, status: str, raised: type[Exception]
) -> None:
    node, link = pair
    node.send(Over(status, "127.0.0.1:7700: the port is in use by process 7", "stop it"))
    with pytest.raises(raised, match="in use by process 7") as error:
        link.start(initial)
    assert error.value.hint == "stop it"  # type: ignore[attr-defined]


def test_a_node_that_stops_in_the_middle_of_a_round_ends_the_training_without_an_error(
    pair: tuple[Endpoint, ProcessLink], initial: AgreedState
) -> None:
    node, link = pair
    node.send(Begin(0), initial.encode())
    link.start(initial)
    node.send(Open(0, False, ("peer-a",)), initial.encode(), b"")
    link.next_round()
    node.send(Over("stopped", "told to stop", ""), initial.encode())
    node.close()
    link.submit(0, b"payload", ROOT, ROOT)
    link.report(0, 1.0, None, None)
    outcome = link.outcome(0)
    assert isinstance(outcome, RunOver)
    assert (outcome.status, outcome.reason) == ("stopped", "told to stop")
    link.leave()
    link.leave()
