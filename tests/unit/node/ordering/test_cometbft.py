"""When an engine is started again, and how far the others are away."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Collection
from pathlib import Path
from typing import Any

import msgspec
import pytest
from comet_run import IDENTITY, NAMES, RUN, VOTING

from torchbft.node.ordering import cometbft
from torchbft.node.ordering.cometbft import CometEngine, round_trip
from torchbft.node.ordering.rpc import RpcError
from torchbft.primitives.errors import StorageError
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import Member, RunSpec

ME = NAMES[0]
IDS = {member.name: member.ledger_id for member in RUN.members}
LOOKS = 40


class Watched:
    """An engine of four members whose connections are what a test says."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.connected: Collection[str] = NAMES[1:]
        self.reachable: Collection[str] = NAMES
        self.listening: Collection[str] = NAMES
        self.answers = True
        self.falls_silent_at = LOOKS
        self.restarts: list[tuple[int, str]] = []
        self.looks = 0
        self._folder, self._patch = folder, monkeypatch

    async def _ids(self) -> frozenset[str]:
        self.looks += 1
        if self.looks >= LOOKS:
            raise asyncio.CancelledError
        if not self.answers or self.looks > self.falls_silent_at:
            raise RpcError("no", where="net_info")
        return frozenset(IDS[name] for name in self.connected)

    async def _listening(self, members: Collection[Member]) -> list[Member]:
        return [member for member in members if member.name in self.listening]

    def run(self, run: RunSpec = RUN, patience: float = 0.0, silent: float = 0.0) -> list[str]:
        """Look ``LOOKS`` times; returns why the engine was started again, each time."""

        async def main() -> None:
            engine = CometEngine(
                run,
                ME,
                self._folder,
                identity=IDENTITY[ME],
                voting=VOTING[ME],
                notice=lambda _: None,
                reachable=lambda: self.reachable,
            )
            self._patch.setattr(engine.rpc, "connected", self._ids)
            self._patch.setattr(engine.process, "restart", self._restarted)
            self._patch.setattr(type(engine.process), "pid", 7)
            engine._patience = patience
            with contextlib.suppress(asyncio.CancelledError):
                await engine._watch()

        self._patch.setattr(cometbft, "WATCH_SECONDS", 0.0)
        self._patch.setattr(cometbft, "SILENT", silent)
        self._patch.setattr(cometbft, "UNCONNECTED_SECONDS", patience)
        self._patch.setattr(cometbft, "_listening", self._listening)
        asyncio.run(main())
        return [why for _, why in self.restarts]

    def _restarted(self, why: str) -> None:
        self.restarts.append((self.looks, why))


@pytest.fixture
def watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(tmp_path, monkeypatch)


def test_an_engine_that_does_not_find_back_is_started_again(watched: Watched) -> None:
    """By itself it backs off to hours, and then gives up."""
    watched.connected = NAMES[1:2]
    found = watched.run()
    assert found
    assert set(found) == {"it stays unconnected with peer-c, peer-d, who can be reached"}


@pytest.mark.parametrize(
    "change",
    [
        {"connected": NAMES[1:]},
        {"connected": NAMES[1:3]},
        {"connected": (), "reachable": NAMES[:2]},
        {"connected": (), "listening": NAMES[:2]},
        {"connected": (), "answers": False},
    ],
    ids=["connected", "f-missing", "unreachable", "not-listening", "not-answering"],
)
def test_nothing_else_starts_it_again(watched: Watched, change: dict[str, Any]) -> None:
    """Least of all f members, who may be liars that want it to restart."""
    for name, value in change.items():
        setattr(watched, name, value)
    assert watched.run() == []


def test_an_engine_that_falls_silent_is_started_again(watched: Watched) -> None:
    """It hangs now and then where it should end; one that never answered may be replaying."""
    watched.falls_silent_at = 3
    assert watched.run() == ["it has not answered for 0 s"]
    watched.restarts.clear()
    watched.looks = 0
    assert watched.run(silent=3600.0) == []
    watched.looks, watched.falls_silent_at = 0, 0
    assert watched.run() == []


def test_without_faults_to_bear_one_missing_member_is_enough(watched: Watched) -> None:
    three = msgspec.structs.replace(RUN, members=RUN.members[:3])
    watched.connected = NAMES[1:2]
    assert watched.run(three)


def test_it_is_patient_and_more_so_each_time(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched.connected = ()
    assert watched.run(patience=3600.0) == []
    now = 0.0

    def time() -> float:
        nonlocal now
        now += 1.0
        return now

    watched.looks = 0
    loop = asyncio.new_event_loop()
    monkeypatch.setattr(type(loop), "time", lambda _: time())
    loop.close()
    watched.run(patience=4.0)
    at = [look for look, _ in watched.restarts]
    gaps = [b - a for a, b in itertools.pairwise(at)]
    assert len(gaps) >= 2
    assert gaps == sorted(gaps)
    assert gaps[-1] > gaps[0]


# --- round trips ----------------------------------------------------------------------------------


def measured(seconds: dict[str, float | None], monkeypatch: pytest.MonkeyPatch) -> float:
    async def handshake(host: str, port: int) -> float | None:
        return seconds["peer-" + host.removeprefix("host-")]

    monkeypatch.setattr(cometbft, "_handshake", handshake)
    return asyncio.run(round_trip(RUN, ME))


def test_the_round_trip_is_that_to_a_quorum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three others make a quorum of four with us; a slow liar stretches nothing."""
    assert measured({"peer-b": 0.1, "peer-c": 0.2, "peer-d": 9.0}, monkeypatch) == 0.2
    assert measured({"peer-b": None, "peer-c": 0.2, "peer-d": None}, monkeypatch) == 0.2
    assert measured(dict.fromkeys(NAMES, None), monkeypatch) == 0.0


def test_a_handshake_is_measured_and_a_refusal_is_one() -> None:
    async def main() -> tuple[float | None, float | None, float | None]:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        there = await cometbft._handshake("127.0.0.1", port)
        server.close()
        await server.wait_closed()
        refused = await cometbft._handshake("127.0.0.1", port)
        return there, refused, await cometbft._handshake("no such host.invalid", 1)

    there, refused, nowhere = asyncio.run(main())
    assert there is not None
    assert refused is not None
    assert 0 <= there < cometbft.PROBE_SECONDS
    assert nowhere is None


def test_who_listens_is_found_out() -> None:
    async def main() -> list[str]:
        server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        places = {"peer-b": port, "peer-c": 1}
        members = [
            msgspec.structs.replace(m, host="127.0.0.1", ledger_port=places[m.name])
            for m in RUN.members
            if m.name in places
        ]
        found = await cometbft._listening(members)
        server.close()
        return [member.name for member in found]

    assert asyncio.run(main()) == ["peer-b"]


# --- the state ------------------------------------------------------------------------------------


def test_a_state_is_made_for_a_new_member_only_and_a_rotated_key_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def nobody(host: str, port: int) -> None:
        return None

    async def main() -> None:
        engine = CometEngine(
            RUN, ME, tmp_path, identity=IDENTITY[ME], voting=VOTING[ME], notice=lambda _: None
        )
        engine._binary = Path("cometbft")
        engine._open_state().close()
        await engine._prepare()
        assert not engine.home.fresh
        engine._open_state().close()
        new = SigningKey.derive(bytes(32), "new")
        engine.rotate(new, 9)
        state = engine._open_state()
        assert state.last.slot == (9, 0, 3)
        state.close()
        with pytest.raises(StorageError, match="there already"):
            engine.rotate(new, 9)
        for path in engine.home.folder.glob("signed-*.state"):
            path.unlink()
        with pytest.raises(StorageError, match="lost"):
            engine._open_state()

    monkeypatch.setattr(cometbft, "_handshake", nobody)
    asyncio.run(main())
