"""What an operator wishes of a running node: once, bounded, and only what it can do."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from node_swarm import LocalSwarm, run_swarm

from torchbft.node import wish
from torchbft.primitives.ids import PeerId
from torchbft.protocols.round.interface import PreferVoid

A = PeerId("peer-a")


def test_a_wish_is_signalled_and_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[tuple[int, int]] = []
    monkeypatch.setattr(wish, "os", SimpleNamespace(kill=lambda *given: sent.append(given)))
    assert wish.taken(tmp_path) is None
    wish.ask_to_void(tmp_path, 77, "x" * 500)
    assert sent == [(77, signal.SIGURG)]
    assert wish.is_waiting(tmp_path)
    assert wish.taken(tmp_path) == "x" * wish.MAX_REASON
    assert wish.taken(tmp_path) is None
    assert not wish.is_waiting(tmp_path)


def test_bytes_that_are_no_text_are_no_fault(tmp_path: Path) -> None:
    wish.take_back(tmp_path)
    (tmp_path / "prefer-void").write_bytes(b"\xff\xfe")
    assert wish.taken(tmp_path) == "\ufffd\ufffd"


def test_the_signal_alone_ends_no_process() -> None:
    """A node that has not begun to listen for it must live on."""
    assert signal.getsignal(wish.LOOK) in (signal.SIG_DFL, None)
    os.kill(os.getpid(), wish.LOOK)


def test_a_node_votes_to_void_the_round_whose_root_is_due_and_no_other(tmp_path: Path) -> None:
    fed: list[Any] = []

    async def story(swarm: LocalSwarm) -> None:
        host = swarm.up(A)
        await swarm.until(lambda: swarm.phase(A) != "")
        wish.ask_to_void(tmp_path / A, os.getpid(), "too early")
        await swarm.until(lambda: not wish.is_waiting(tmp_path / A))
        await swarm.until(lambda: host._machine._round._applied is not None)  # nothing is under way
        due = SimpleNamespace(unsigned=SimpleNamespace(number=4))
        honest = host._machine
        host._machine = SimpleNamespace(application=SimpleNamespace(state=due))  # type: ignore[assignment]
        host.feed = fed.append  # type: ignore[method-assign]
        wish.ask_to_void(tmp_path / A, os.getpid(), "two versions")
        await swarm.until(lambda: not wish.is_waiting(tmp_path / A))
        host._machine = honest
        host._look_for_wish()

    swarm = LocalSwarm(tmp_path)
    run_swarm(swarm, story)
    assert fed == [PreferVoid(4, "two versions")]
    assert "none waits for its root" in swarm.notices(A)
    assert "round 4: this peer votes to void it: two versions" in swarm.notices(A)
