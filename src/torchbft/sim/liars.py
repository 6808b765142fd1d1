"""Whole peers in liars' hands, by name: the attack room's agents, the ledger's adversaries, twins.

Each is built like a ``PeerMachine`` and runs on any host. None stops for shame: one that finds out
that its key was used behind its back goes on lying.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any

from msgspec.structs import replace

from torchbft import attacks
from torchbft.attacks.agents.agent import Agent, ledger_message
from torchbft.attacks.agents.liar import LiarPeer, builder
from torchbft.attacks.declaration import Expectation, Leaves
from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Broadcast, Effect, Received, Send
from torchbft.primitives.errors import HaltError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.peer import LEDGER, ROUND
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.interface import OfferPayload
from torchbft.protocols.round.messages import Attestation, RootVote, Status
from torchbft.sim import byzantine
from torchbft.sim.cluster import Machine

Records = Mapping[str, Sequence[bytes]]
BuildMachine = Callable[[RunSpec, PeerId, SigningKey, bytes, Records], Machine]
"""Called like ``PeerMachine``: run, me, key, secret, records."""

BuildLiar = Callable[[bytes, tuple[PeerId, ...]], BuildMachine]
"""Makes a builder from the attack's seed and all liars of the run."""


class Liar:
    """A whole peer in a liar's hands. Where an honest one would halt, it does nothing."""

    def __init__(self, machine: Agent | LiarPeer) -> None:
        self.machine = machine

    @property
    def application(self) -> Application:
        """What the ledger has decided, as this peer sees it."""
        application: Application = self.machine.application
        return application

    def start(self, now: float) -> list[Effect]:
        return self.said(self.machine.start(now))

    def handle(self, event: Any, now: float) -> list[Effect]:
        try:
            return self.said(self.machine.handle(event, now))
        except HaltError:
            return []

    def deadline(self) -> float | None:
        return self.machine.deadline()

    def said(self, effects: list[Effect]) -> list[Effect]:
        """What leaves this peer instead of these effects."""
        return effects


class LedgerLiar(Liar):
    """A peer that is honest but for its ledger's messages, which an adversary changes."""

    def __init__(
        self, machine: LiarPeer, seat: byzantine.Seat, kind: type[byzantine.Adversary]
    ) -> None:
        super().__init__(machine)
        self._adversary = kind(seat)

    def said(self, effects: list[Effect]) -> list[Effect]:
        return [said for effect in effects for said in self._changed(effect)]

    def _changed(self, effect: Effect) -> list[Effect]:
        if not isinstance(effect, Send | Broadcast):
            return [effect]
        message = ledger_message(effect.message)
        if message is None:
            return [effect]
        answers = self._adversary.change(_with(effect, effect.message[1:]), message)
        return [_with(e, LEDGER + e.message) for e in answers if isinstance(e, Send | Broadcast)]


def _with(effect: Send | Broadcast, message: bytes) -> Send | Broadcast:
    return Send(effect.to, message) if isinstance(effect, Send) else Broadcast(message)


class Deaf(Liar):
    """Hears nothing of one half of the others and sends to nobody of it: half a network partition
    that never heals."""

    def __init__(self, machine: LiarPeer, friends: Iterable[PeerId]) -> None:
        super().__init__(machine)
        self.friends = tuple(sorted(friends))

    def handle(self, event: Any, now: float) -> list[Effect]:
        if isinstance(event, Received) and event.sender not in self.friends:
            return []
        return super().handle(event, now)

    def said(self, effects: list[Effect]) -> list[Effect]:
        return _sent_to(self.friends, effects)


def _sent_to(audience: Sequence[PeerId], effects: Iterable[Effect]) -> list[Effect]:
    """The effects, with messages to others than the audience left out."""
    sent: list[Effect] = []
    for effect in effects:
        if isinstance(effect, Broadcast):
            sent += [Send(peer, effect.message) for peer in audience]
        elif not isinstance(effect, Send) or effect.to in audience:
            sent.append(effect)
    return sent


class Perjurer(Agent):
    """Attests to hold what its accomplices opened, whose payloads nobody gets, and finds everybody
    else's malformed."""

    name = "perjurer"
    leaves = Leaves.OBSERVATIONS
    expected = Expectation(named=False, suspected=True, downweighted=False)

    def says(self, effect: Effect, now: float) -> list[Effect]:
        if isinstance(effect, OfferPayload):
            return []
        parsed = self.mine(effect)
        if parsed is None or not isinstance(parsed.statement, Attestation):
            return [effect]
        names = sorted({self.me, *self.others})
        statuses = bytes(
            Status.MALFORMED if name in self.victims else Status.HELD for name in names
        )
        return [Broadcast(self.signed(replace(parsed.statement, statuses=statuses)))]

    def hands_in(self, tx: bytes) -> bool:
        parsed = self.own(tx)
        return parsed is None or parsed.slot != "attest"


class RootLiar(Agent):
    """Signs two roots that it did not compute for each round, one for each half of the others."""

    name = "root_liar"
    leaves = Leaves.NOTHING
    expected = Expectation(named=False, suspected=False, downweighted=False)

    def says(self, effect: Effect, now: float) -> list[Effect]:
        if not isinstance(effect, Broadcast) or effect.message[:1] != ROUND:
            return [effect]
        parsed = self.own(effect.message[1:])
        if parsed is None or not isinstance(parsed.statement, RootVote):
            return [effect]
        roots = (sha256("sim/wrong", bytes([half]), parsed.statement.root) for half in (0, 1))
        votes = (replace(parsed.statement, root=root) for root in roots)
        first, second = (ROUND + self.signed(vote)[1:] for vote in votes)
        return self.split(first, second)


class Twins:
    """Two honest peers with one key and different secrets, each heard by one half of the others:
    they vote, lead, commit, open and attest against each other (Bano et al., 2021)."""

    def __init__(self, twins: tuple[Liar, Liar], others: Sequence[PeerId]) -> None:
        half = len(others) // 2
        self.twins, self.audiences = twins, (tuple(others[:half]), tuple(others[half:]))

    @property
    def application(self) -> Application:
        """The first twin's."""
        return self.twins[0].application

    def start(self, now: float) -> list[Effect]:
        return self._both(lambda twin: twin.start(now))

    def handle(self, event: Any, now: float) -> list[Effect]:
        return self._both(lambda twin: twin.handle(event, now))

    def deadline(self) -> float | None:
        times = [twin.deadline() for twin in self.twins]
        return min((t for t in times if t is not None), default=None)

    def _both(self, act: Callable[[Liar], list[Effect]]) -> list[Effect]:
        pairs = zip(self.audiences, self.twins, strict=True)
        return [effect for audience, twin in pairs for effect in _sent_to(audience, act(twin))]


def agent(kind: type[Agent], strength: float | None = None) -> BuildLiar:
    """A peer in the hands of one of the attack room's agents."""

    def liar(seed: bytes, liars: tuple[PeerId, ...]) -> BuildMachine:
        build = builder(kind, seed=seed, liars=liars, strength=strength)
        return lambda run, me, key, secret, records: Liar(build(run, me, key, secret, records))

    return liar


def _ledger_liar(kind: type[byzantine.Adversary]) -> BuildLiar:
    def liar(seed: bytes, liars: tuple[PeerId, ...]) -> BuildMachine:
        def build(
            run: RunSpec, me: PeerId, key: SigningKey, secret: bytes, records: Records
        ) -> Machine:
            peer = LiarPeer(run, me, key, secret, records)
            seat = byzantine.Seat(
                run.run_id,
                me,
                _names(run),
                key,
                _random(seed, me),
                lambda censored: peer._ledger,
                lambda view: (),
            )
            return LedgerLiar(peer, seat, kind)

        return build

    return liar


def _twins(seed: bytes, liars: tuple[PeerId, ...]) -> BuildMachine:
    def build(
        run: RunSpec, me: PeerId, key: SigningKey, secret: bytes, records: Records
    ) -> Machine:
        secrets = (secret, sha256("sim/twin", secret))
        first, second = (LiarPeer(run, me, key, each, records) for each in secrets)
        return Twins((Liar(first), Liar(second)), _shuffled(run, me, seed))

    return build


def _deaf(seed: bytes, liars: tuple[PeerId, ...]) -> BuildMachine:
    def build(
        run: RunSpec, me: PeerId, key: SigningKey, secret: bytes, records: Records
    ) -> Machine:
        others = _shuffled(run, me, seed)
        peer = LiarPeer(run, me, key, secret, records)
        return Deaf(peer, others[: len(others) // 2])

    return build


def _names(run: RunSpec) -> tuple[PeerId, ...]:
    return tuple(PeerId(member.name) for member in run.members)


def _random(seed: bytes, me: PeerId) -> Random:
    return Random(f"liar/{seed.hex()}/{me}")


def _shuffled(run: RunSpec, me: PeerId, seed: bytes) -> list[PeerId]:
    others = [name for name in _names(run) if name != me]
    _random(seed, me).shuffle(others)
    return others


def _honest(seed: bytes, liars: tuple[PeerId, ...]) -> BuildMachine:
    return lambda run, me, key, secret, records: Liar(LiarPeer(run, me, key, secret, records))


MALFORMED = "malformed"
"""An otherwise honest peer whose payloads the pretend trainer makes unreadable."""

_LEDGER_KINDS: dict[str, type[byzantine.Adversary]] = {
    name: kind
    for name, kind in byzantine.ADVERSARIES.items()
    if isinstance(kind, type) and issubclass(kind, byzantine.Adversary) and kind.censored is None
}
"""Those that change messages. Twins and the censoring agent do what the others do."""

LIARS: dict[str, BuildLiar] = {
    **{
        name: agent(kind)
        for name, kind in attacks.known("agent").items()
        if issubclass(kind, Agent)
    },
    **{f"ledger/{name}": _ledger_liar(kind) for name, kind in _LEDGER_KINDS.items()},
    Perjurer.name: agent(Perjurer),
    RootLiar.name: agent(RootLiar),
    "twins": _twins,
    "deaf": _deaf,
    MALFORMED: _honest,
}
"""All that may sit in a liar's seat, by name."""
