"""Nodes in this process: real codec, real ``advance``, no network and no faults but asked for.

``SoloNode`` is a whole swarm of one peer. ``LocalSwarm`` joins several trainers that run in
threads of one process. Both follow the rounds of a real node; tests and first experiments use
them: ``torchbft.join(run, model, optimizer, link=SoloNode(run))``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from typing import Any

import msgspec

from torchbft.primitives.digests import sha256
from torchbft.primitives.errors import DecodeError, HaltError, MisuseError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec, new_member
from torchbft.pytorch.data import permutation, round_samples
from torchbft.pytorch.link import RoundOutcome, RoundStart, RunOver
from torchbft.tensors.advance import LedgerFields, advance
from torchbft.tensors.recipe import Recipe
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update

LONGEST_WAIT_S = 120.0
"""A trainer in a thread waits at most so long for the others: a test then fails, not hangs."""


def local_run(peers: int = 1, *, seed: int = 0, **tables: Any) -> RunSpec:
    """An unsigned run file of ``peers`` members with keys that nobody keeps.

    ``tables``: fields of RunSpec, tables as dictionaries: ``training={"inner_steps": 4}``.
    """
    members = tuple(
        new_member(f"peer-{index:02d}", SigningKey.generate(), SigningKey.generate())
        for index in range(peers)
    )
    fields = {"name": "local", "seed": sha256("local/seed", seed.to_bytes(8, "big")).hex()}
    return msgspec.convert({**fields, **tables, "members": msgspec.to_builtins(members)}, RunSpec)


class Slices:
    """Who trains on what: one permutation a pass, cut into slices in order of peer."""

    def __init__(self, run: RunSpec, samples: int) -> None:
        self.count = round_samples(run)
        self._samples, self._seed = samples, sha256("local/slices", bytes.fromhex(run.seed))
        self._order: list[int] = []
        self.passes = 0

    @property
    def cursor(self) -> int:
        """Positions of the last begun pass that are used."""
        return self._samples - len(self._order) if self._samples else 0

    def take(self, peers: int) -> list[list[int]]:
        """The next ``peers`` slices of H × accumulate × batch_size positions."""
        while len(self._order) < peers * self.count:
            self._order += permutation(self._samples, self._seed, self.passes)
            self.passes += 1
        taken, self._order = self._order[: peers * self.count], self._order[peers * self.count :]
        return [taken[start : start + self.count] for start in range(0, len(taken), self.count)]


class LocalSwarm:
    """The rounds of a run for trainers in threads of this process.

    ``samples``: of the assigned data set, by default the run file's. ``void``: rounds that end
    without effect. ``refused``: (round, peer) whose contribution is not accepted. The agreed start
    is the initial state of the first peer in order, or ``resume``.
    """

    def __init__(
        self,
        run: RunSpec,
        *,
        samples: int = 0,
        void: Collection[int] = (),
        refused: Collection[tuple[int, str]] = (),
        resume: AgreedState | None = None,
    ) -> None:
        self.run, self.peers = run, tuple(PeerId(m.name) for m in run.contributors)
        self.reports: list[tuple[int, PeerId, float, float | None, float | None]] = []
        self.payloads: dict[tuple[int, PeerId], bytes] = {}
        self.roots: dict[tuple[int, PeerId], tuple[bytes, bytes]] = {}
        self.changed = threading.Condition()
        self.active = set(self.peers)
        self._recipe = Recipe.of(run)
        self._slices = Slices(run, samples or run.data.samples)
        self._void, self._refused = frozenset(void), frozenset(refused)
        self._initial: dict[PeerId, AgreedState] = {}
        self._state, self._round = resume, 0 if resume is None else resume.round
        self._starts: dict[PeerId, RoundStart] = {}
        self._outcomes: dict[int, dict[PeerId, RoundOutcome]] = {}

    def link(self, peer: str) -> LocalNode:
        """The node of one member, for one trainer."""
        if peer not in self.peers:
            raise MisuseError(f"{peer!r} is not a contributor of this run", where="LocalSwarm")
        return LocalNode(self, PeerId(peer))

    def started(self, peer: PeerId, initial: AgreedState) -> AgreedState:
        """See NodeLink.start; waits until every member has started."""
        self._initial[peer] = initial
        self._wait(lambda: self.active <= self._initial.keys())
        if self._state is None:
            self._state = self._initial[min(self._initial)]
        if self._state.layout != initial.layout:
            raise MisuseError(f"the model of {peer} has another layout", where="LocalSwarm")
        return self._state

    def opened(self, peer: PeerId) -> RoundStart | RunOver:
        """See NodeLink.next_round."""
        over = self._over(peer)
        if over is not None:
            return over
        if not self._starts:
            self._open()
        return self._starts[peer]

    def closed(self, round: int, peer: PeerId) -> RoundOutcome | RunOver:
        """See NodeLink.outcome; waits for the other members' contributions."""

        def is_over() -> bool:
            if round == self._round and self.active <= self._offered(round).keys():
                self._close()
            return round in self._outcomes

        self._wait(is_over)
        return self._outcomes[round][peer]

    def _wait(self, holds: Callable[[], bool]) -> None:
        self.changed.notify_all()
        if not self.changed.wait_for(holds, LONGEST_WAIT_S):
            raise HaltError("the other trainers of this process did not come", where="LocalSwarm")
        self.changed.notify_all()

    def _over(self, peer: PeerId) -> RunOver | None:
        state = self._agreed()
        if peer not in self.active:
            return RunOver("stopped", "this peer left", state)
        if self._round >= self.run.training.rounds:
            return RunOver("finished", "", state)
        if len(self.active) < self.run.m_min:
            reason = f"{len(self.active)} of the {self.run.m_min} peers that a round needs"
            return RunOver("halted", reason, state)
        return None

    def _open(self) -> None:
        positions: list[list[int] | None] = [None for _ in self.peers]
        if self.run.data.mode == "assigned":
            positions = [*self._slices.take(len(self.peers))]
        self._starts = {
            peer: RoundStart(self._round, mine, self._agreed(), self.peers)
            for peer, mine in zip(self.peers, positions, strict=True)
        }

    def _offered(self, round: int) -> dict[PeerId, bytes]:
        return {peer: data for (number, peer), data in self.payloads.items() if number == round}

    def _close(self) -> None:
        """Decode what was offered, apply it, and tell everyone."""
        number, before = self._round, self._agreed()
        decoded: dict[PeerId, Update] = {}
        reasons = {peer: "absent" for peer in self.peers}
        for peer, payload in self._offered(number).items():
            if (number, peer) in self._refused:
                reasons[peer] = "refused"
                continue
            try:
                decoded[peer] = self._recipe.codec.decode(payload, before.layout)
            except DecodeError as error:
                reasons[peer] = f"malformed: {error}"
        void = number in self._void or len(decoded) < self.run.m_min
        if not void:
            self._state = self._advanced(before, decoded)
        self._outcomes[number] = {
            peer: RoundOutcome(
                number,
                peer in decoded and not void,
                void,
                "void" if void else reasons[peer] if peer not in decoded else "",
                self._agreed(),
            )
            for peer in self.peers
        }
        self._round, self._starts = number + 1, {}

    def _advanced(self, before: AgreedState, decoded: dict[PeerId, Update]) -> AgreedState:
        after, _ = advance(
            before,
            tuple(decoded.items()),
            rule=self._recipe.rule,
            f=self.run.contributor_faults.f,
            outer=self._recipe.outer,
            ledger=LedgerFields(
                round=before.round + 1,
                inner_step=before.inner_step + self.run.training.inner_steps,
                pass_index=self._slices.passes,
                cursor=self._slices.cursor,
                membership_digest=before.membership_digest,
                credit_digest=before.credit_digest,
            ),
        )
        return after

    def _agreed(self) -> AgreedState:
        if self._state is None:
            raise MisuseError("start comes first", where="LocalSwarm")
        return self._state


class LocalNode:
    """One member's end of a ``LocalSwarm``: a NodeLink."""

    def __init__(self, swarm: LocalSwarm, peer: PeerId) -> None:
        self._swarm, self.peer = swarm, peer

    def start(self, initial: AgreedState) -> AgreedState:
        with self._swarm.changed:
            return self._swarm.started(self.peer, initial)

    def next_round(self) -> RoundStart | RunOver:
        with self._swarm.changed:
            return self._swarm.opened(self.peer)

    def submit(
        self,
        round: int,
        payload: bytes | memoryview,
        trace_root: bytes,
        local_root: bytes,
        seconds: float = 0.0,
    ) -> None:
        with self._swarm.changed:
            self._swarm.payloads[round, self.peer] = bytes(payload)
            self._swarm.roots[round, self.peer] = (trace_root, local_root)

    def outcome(self, round: int) -> RoundOutcome | RunOver:
        with self._swarm.changed:
            return self._swarm.closed(round, self.peer)

    def report(
        self,
        round: int,
        loss: float,
        accuracy: float | None,
        train_loss: float | None,
        seconds: float = 0.0,
    ) -> None:
        with self._swarm.changed:
            self._swarm.reports.append((round, self.peer, loss, accuracy, train_loss))

    def leave(self) -> None:
        with self._swarm.changed:
            self._swarm.active.discard(self.peer)
            self._swarm.changed.notify_all()


class SoloNode(LocalNode):
    """A swarm of one. ``swarm`` shows what was submitted and reported."""

    def __init__(self, run: RunSpec, **options: Any) -> None:
        self.swarm = LocalSwarm(run, **options)
        if len(self.swarm.peers) != 1:
            raise MisuseError(f"a solo node for {len(self.swarm.peers)} members", where="SoloNode")
        super().__init__(self.swarm, self.swarm.peers[0])
