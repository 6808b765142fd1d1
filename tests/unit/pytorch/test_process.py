"""The trainer's end of its node: what each message becomes, and what a node that goes leaves.

The node is a script in a thread: it hears the messages of the types it names and says its own.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from torchbft.node import link
from torchbft.node.link import (
    Begin,
    Close,
    Delivery,
    Evaluation,
    Hello,
    Leave,
    Message,
    Open,
    Over,
    Submit,
    endpoints,
    refusal,
)
from torchbft.primitives.errors import (
    ConfigError,
    DecodeError,
    HaltError,
    MisuseError,
    StorageError,
    TorchbftError,
)
from torchbft.pytorch.connection import connect
from torchbft.pytorch.link import RoundOutcome, RoundStart, RunOver
from torchbft.pytorch.process import ProcessLink
from torchbft.pytorch.solo import local_run
from torchbft.tensors.state import AgreedState

LIMIT = 20.0
ROOT = bytes(range(32))
PEERS = ("peer-a", "peer-b")
POSITIONS = (2**40, 7, 0)

Say = tuple[Message, tuple[bytes, ...]]
Step = Say | type
"""The node says this, or waits for a message of that type."""


def say(message: Message, *blobs: bytes) -> Say:
    return message, blobs


class Node:
    """Plays its script in a thread, then closes its end as a process does that is gone."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        ours, self._end = endpoints()
        ours.socket.settimeout(LIMIT)
        self._end.socket.settimeout(LIMIT)
        self.link = ProcessLink(ours)
        self.heard: list[Delivery] = []
        self._steps, self._failed = steps, list[Exception]()
        self._thread = threading.Thread(target=self._play, daemon=True)
        self._thread.start()

    def _play(self) -> None:
        try:
            for step in self._steps:
                if isinstance(step, type):
                    self._hear(step)
                else:
                    self._end.send(step[0], *step[1])
        except HaltError:  # the trainer went first, as some tests mean it to
            pass
        except (AssertionError, DecodeError) as error:  # raised by ``over``, where a test sees it
            self._failed.append(error)
        finally:
            self._end.close()

    def _hear(self, kind: type) -> None:
        delivery = self._end.receive()
        assert delivery is not None, f"the trainer went before its {kind.__name__}"
        assert isinstance(delivery.message, kind)
        self.heard.append(delivery)

    def over(self) -> None:
        """Wait until the script is played; raises what went wrong in it."""
        self._thread.join(LIMIT)
        assert not self._thread.is_alive()
        if self._failed:
            raise self._failed[0]


MakeNode = Callable[..., Node]


@pytest.fixture
def node() -> Iterator[MakeNode]:
    made: list[Node] = []

    def make(*steps: Step) -> Node:
        made.append(Node(steps))
        return made[-1]

    yield make
    for each in made:
        each.link.leave()
        each.over()


def state_of(number: int = 0, model: nn.Module | None = None) -> AgreedState:
    """A state whose every parameter is ``number``."""
    first = AgreedState.initial(model or nn.Linear(3, 2))
    filled_D = torch.full_like(first.parameters_D, float(number))
    return dataclasses.replace(first, parameters_D=filled_D, round=number)


def same(left: AgreedState, right: AgreedState) -> bool:
    return left.root() == right.root()


BLOBS = tuple(state_of(number).encode() for number in range(3))
POSITION_BYTES = b"".join(position.to_bytes(8, "little") for position in POSITIONS)
ENTERED: tuple[Step, ...] = (Hello, say(Begin(0), BLOBS[0]))
OPENED = say(Open(0, True, PEERS), BLOBS[0], POSITION_BYTES)
CLOSED = say(Close(0, True, False, ""), BLOBS[1])
FINISHED = say(Over("finished", "", ""), BLOBS[2])


# --- entering -------------------------------------------------------------------------------------


def test_start_offers_the_own_state_and_goes_on_from_the_agreed_one(node: MakeNode) -> None:
    peer, mine = node(Hello, say(Begin(2), BLOBS[2])), state_of(9)
    assert same(peer.link.start(mine), state_of(2))
    peer.over()
    hello = peer.heard[0]
    assert hello.message == Hello(mine.root())
    assert same(AgreedState.decode(hello.take()), mine)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ConfigError("not in the roster", hint="ask"), ConfigError),
        (StorageError("disk is full", hint="ask"), StorageError),
        (HaltError("no quorum", hint="ask"), HaltError),
        (ZeroDivisionError("a defect"), HaltError),
    ],
)
def test_a_node_that_refuses_is_raised_as_what_it_was(
    node: MakeNode, error: Exception, raised: type[TorchbftError]
) -> None:
    peer = node(Hello, say(refusal(error)))
    with pytest.raises(raised, match=str(error)) as refused:
        peer.link.start(state_of())
    assert type(refused.value) is raised
    assert refused.value.hint == getattr(error, "hint", "")


def test_the_refusal_of_a_node_that_went_before_it_was_greeted_is_heard(node: MakeNode) -> None:
    peer = node(say(refusal(ConfigError("not in the roster", hint="ask"))))
    peer.over()
    with pytest.raises(ConfigError, match="not in the roster"):
        peer.link.start(state_of())


@pytest.mark.parametrize("steps", [(), (Hello,)])
def test_a_node_that_is_gone_without_a_word_halts_the_start(
    node: MakeNode, steps: tuple[Step, ...]
) -> None:
    peer = node(*steps)
    with pytest.raises(HaltError, match="node of this peer has ended") as gone:
        peer.link.start(state_of())
    assert "node.log" in gone.value.hint


@pytest.mark.parametrize(
    ("blob", "reason"),
    [(state_of(1, nn.Linear(4, 2)).encode(), "layout"), (b"no state", "."), (b"", ".")],
)
def test_a_state_that_does_not_fit_the_model_is_refused(
    node: MakeNode, blob: bytes, reason: str
) -> None:
    peer = node(Hello, say(Begin(0), blob))
    with pytest.raises(DecodeError, match=reason):
        peer.link.start(state_of())


@pytest.mark.parametrize("before", [Hello, OPENED, CLOSED])
def test_nothing_but_a_beginning_or_an_end_follows_the_greeting(
    node: MakeNode, before: Step
) -> None:
    first = say(Leave()) if isinstance(before, type) else before
    peer = node(Hello, first)
    with pytest.raises(MisuseError, match="came out of turn from the node"):
        peer.link.start(state_of())


# --- a round --------------------------------------------------------------------------------------


def entered(node: MakeNode, *steps: Step) -> Node:
    peer = node(*ENTERED, *steps)
    peer.link.start(state_of())
    return peer


def test_a_round_with_public_data_brings_positions_and_the_names_of_all(node: MakeNode) -> None:
    opened = entered(node, OPENED).link.next_round()
    assert isinstance(opened, RoundStart)
    assert (opened.round, opened.positions, opened.peers) == (0, list(POSITIONS), PEERS)
    assert same(opened.state, state_of(0))


def test_a_round_with_private_data_brings_no_positions(node: MakeNode) -> None:
    opened = entered(node, say(Open(4, False, PEERS), BLOBS[1], b"")).link.next_round()
    assert isinstance(opened, RoundStart)
    assert (opened.round, opened.positions) == (4, None)
    assert same(opened.state, state_of(1))


def test_what_is_submitted_and_reported_arrives_as_it_was(node: MakeNode) -> None:
    peer = entered(node, Submit, Evaluation, Evaluation)
    peer.link.submit(3, memoryview(b"payload"), ROOT, ROOT[::-1], 1.5)
    peer.link.report(3, 0.5, None, 0.25, 0.125)
    peer.link.report(4, 0.5, 0.75, None)
    peer.over()
    submitted, *reports = peer.heard[1:]
    assert submitted.message == Submit(3, ROOT, ROOT[::-1], 1.5)
    assert submitted.take() == b"payload"
    assert [report.message for report in reports] == [
        Evaluation(3, 0.5, None, 0.25, 0.125),
        Evaluation(4, 0.5, 0.75, None, 0.0),
    ]


@pytest.mark.parametrize(
    "closed",
    [Close(0, True, False, ""), Close(0, False, False, "late"), Close(0, False, True, "x")],
)
def test_the_outcome_says_what_became_of_the_contribution(node: MakeNode, closed: Close) -> None:
    outcome = entered(node, say(closed, BLOBS[1])).link.outcome(0)
    assert isinstance(outcome, RoundOutcome)
    told = (outcome.round, outcome.accepted, outcome.void, outcome.reason)
    assert told == (0, closed.accepted, closed.void, closed.reason)
    assert same(outcome.state, state_of(1))


def test_the_outcome_of_another_round_is_out_of_turn(node: MakeNode) -> None:
    peer = entered(node, say(Close(1, True, False, ""), BLOBS[1]))
    with pytest.raises(MisuseError, match="Close came out of turn"):
        peer.link.outcome(0)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda end: end.next_round(), CLOSED),
        (lambda end: end.next_round(), say(Begin(0), BLOBS[0])),
        (lambda end: end.next_round(), say(Leave())),
        (lambda end: end.outcome(0), OPENED),
        (lambda end: end.outcome(0), say(Begin(0), BLOBS[0])),
        (lambda end: end.outcome(0), say(Submit(0, ROOT, ROOT, 0.0), b"")),
    ],
)
def test_a_message_out_of_turn_is_misuse_and_names_itself(
    node: MakeNode, call: Callable[[ProcessLink], object], said: Say
) -> None:
    peer = entered(node, said)
    with pytest.raises(MisuseError, match=f"{type(said[0]).__name__} came out of turn") as error:
        call(peer.link)
    assert error.value.where == "trainer link"


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda end: end.next_round(), Open(0, False, PEERS)),
        (lambda end: end.outcome(0), Close(0, True, False, "")),
    ],
)
def test_a_message_without_its_state_is_a_decode_error(
    node: MakeNode, call: Callable[[ProcessLink], object], said: Message
) -> None:
    peer = entered(node, say(said))
    with pytest.raises(DecodeError, match="lacks its shared memory"):
        call(peer.link)


def test_an_opening_without_its_positions_is_a_decode_error(node: MakeNode) -> None:
    peer = entered(node, say(Open(0, True, PEERS), BLOBS[0]))
    with pytest.raises(DecodeError, match="lacks its shared memory"):
        peer.link.next_round()


def test_shared_memory_is_closed_also_when_it_is_no_state(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[bool] = []
    close = link.Blob.close

    def noted(blob: link.Blob) -> None:
        close(blob)
        closed.append(True)

    monkeypatch.setattr(link.Blob, "close", noted)
    peer = node(Hello, say(Begin(0), b"no state"))
    with pytest.raises(DecodeError):
        peer.link.start(state_of())
    assert closed


# --- the end --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", ["finished", "halted", "stopped"])
@pytest.mark.parametrize("call", ["next_round", "outcome"])
def test_the_end_of_a_run_comes_instead_of_a_round_or_its_outcome(
    node: MakeNode, call: str, status: str
) -> None:
    peer = entered(node, say(Over(status, "because", ""), BLOBS[2]))
    over = peer.link.next_round() if call == "next_round" else peer.link.outcome(0)
    assert isinstance(over, RunOver)
    assert (over.status, over.reason) == (status, "because")
    assert same(over.state, state_of(2))


def test_an_end_without_a_state_keeps_the_last_one(node: MakeNode) -> None:
    peer = entered(node, CLOSED, say(Over("halted", "disk is full", "")))
    peer.link.outcome(0)
    over = peer.link.next_round()
    assert isinstance(over, RunOver)
    assert same(over.state, state_of(1))


ROUND: tuple[Step, ...] = (OPENED, Submit, CLOSED, Evaluation)


def play(end: ProcessLink) -> RunOver:
    """A trainer's calls in the order of a round, until it is over."""
    end.start(state_of())
    while True:
        opened = end.next_round()
        if isinstance(opened, RunOver):
            return opened
        end.submit(opened.round, b"payload", ROOT, ROOT)
        closed = end.outcome(opened.round)
        if isinstance(closed, RunOver):
            return closed
        end.report(opened.round, 0.5, None, None)


def test_a_whole_conversation_ends_with_the_agreed_state(node: MakeNode) -> None:
    peer = node(*ENTERED, *ROUND, *ROUND, FINISHED)
    over = play(peer.link)
    peer.over()
    assert (over.status, over.reason) == ("finished", "")
    assert same(over.state, state_of(2))
    kinds = [type(delivery.message) for delivery in peer.heard]
    assert kinds == [Hello, Submit, Evaluation, Submit, Evaluation]


@pytest.mark.parametrize("steps", range(len(ROUND) + 1))
def test_a_node_that_goes_in_a_round_leaves_the_last_agreed_state(
    node: MakeNode, steps: int
) -> None:
    over = play(node(*ENTERED, *ROUND[:steps]).link)
    assert (over.status, over.reason) == ("stopped", "the node of this peer has ended")
    assert same(over.state, state_of(1 if steps > ROUND.index(CLOSED) else 0))


def test_work_that_is_handed_to_a_node_that_is_gone_is_no_error(node: MakeNode) -> None:
    peer = entered(node)
    peer.over()
    peer.link.submit(0, b"payload", ROOT, ROOT)
    peer.link.report(0, 0.5, None, None)
    over = peer.link.outcome(0)
    assert isinstance(over, RunOver)
    assert over.status == "stopped"
    peer.link.leave()


def test_leaving_tells_the_node_once_and_ends_the_trainers_part(node: MakeNode) -> None:
    peer = entered(node, Leave)
    peer.link.leave()
    peer.link.leave()
    peer.over()
    assert [type(delivery.message) for delivery in peer.heard] == [Hello, Leave]
    for over in (peer.link.next_round(), peer.link.outcome(0)):
        assert isinstance(over, RunOver)
        assert over.status == "stopped"


@pytest.mark.parametrize(
    ("call", "said"),
    [(lambda end: end.next_round(), OPENED), (lambda end: end.outcome(0), CLOSED)],
)
def test_a_round_before_the_start_is_misuse(
    node: MakeNode, call: Callable[[ProcessLink], object], said: Say
) -> None:
    with pytest.raises(MisuseError, match="call start"):
        call(node(said).link)


def test_the_end_of_a_node_before_the_start_is_misuse_of_the_trainer(node: MakeNode) -> None:
    with pytest.raises(MisuseError, match="call start"):
        node().link.next_round()


# --- from a run file to the link ------------------------------------------------------------------


def test_connecting_starts_the_node_of_the_folder_and_speaks_over_its_link(
    node: MakeNode, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    peer = node(*ENTERED)
    spawned: list[object] = []

    def spawn(run: Path, folder: Path, listen: str) -> tuple[link.Endpoint, None]:
        spawned.extend((run, folder, listen))
        return peer.link._endpoint, None

    monkeypatch.setattr("torchbft.node.launch.spawn", spawn)
    monkeypatch.chdir(tmp_path)
    connected = connect("run.toml", Path("peers/peer-a"), "[::]:7700")
    assert spawned == [tmp_path / "run.toml", tmp_path / "peers" / "peer-a", "[::]:7700"]
    assert same(connected.start(state_of()), state_of(0))


def test_a_node_is_started_from_a_file_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="from the path of a run file"):
        connect(local_run(1), tmp_path)
