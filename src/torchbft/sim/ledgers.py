"""n ledger validators over the toy application, with every checker beside them, in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random

from torchbft.primitives.digests import sha256
from torchbft.primitives.effects import Effect
from torchbft.primitives.errors import MisuseError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import Height, PeerId
from torchbft.primitives.keys import SigningKey
from torchbft.protocols.ledger.certificates import Validator, ValidatorSet
from torchbft.protocols.ledger.machine import LedgerMachine
from torchbft.protocols.ledger.messages import Transaction, decode_finalized
from torchbft.protocols.ledger.state import Finalized, LedgerConfig
from torchbft.protocols.round import state as rounds
from torchbft.sim.byzantine import ADVERSARIES, Seat
from torchbft.sim.chaos import HEALTHY
from torchbft.sim.checkers import (
    CertificatesAreValid,
    Checker,
    HeightsInOrder,
    HonestAreNotAccused,
    OneApplicationState,
    OneBlockPerHeight,
    OneVotePerSlot,
    decoded,
)
from torchbft.sim.cluster import Cluster, Machine, Records, Watcher
from torchbft.sim.network import Conditions, Network
from torchbft.sim.toy import ToyApplication

GATE_TXS = 4
"""The toy's phase is complete with this many pending transactions."""


def peer_names(peers: int) -> tuple[PeerId, ...]:
    """Names of a simulated swarm."""
    return tuple(PeerId(f"peer-{i:02d}") for i in range(peers))


class Ledgers(Watcher):
    """A cluster of validators; ``liars`` names the adversary in a peer's seat.

    ``faults``: the quorum rule that the machines use; a wrong one must give violations.
    """

    def __init__(
        self,
        peers: int = 4,
        *,
        seed: int = 0,
        liars: Mapping[PeerId, str] | None = None,
        conditions: Conditions = HEALTHY,
        faults: FaultModel | None = None,
        sync_seconds: float = 0.002,
    ) -> None:
        self.seed, self.liars = seed, dict(liars or {})
        self.run_id = sha256("sim/run", seed.to_bytes(8, "big"))
        self.names = peer_names(peers)
        self.honest = tuple(name for name in self.names if name not in self.liars)
        self.keys = {name: SigningKey.derive(bytes(32), name) for name in self.names}
        members = (Validator(name, key.public) for name, key in self.keys.items())
        self.validators = ValidatorSet(members, faults)
        self.applications: dict[PeerId, ToyApplication] = {}
        self.listeners: list[Callable[[PeerId, Effect], None]] = []
        self._seen = b""
        self._add_checkers()
        random = Random(f"cluster/{seed}")
        self.cluster = Cluster(
            self.names,
            self._build,
            Network(random, conditions),
            random,
            on_effect=self._on_effect,
            on_message=self._on_message,
            watcher=self,
            sync_seconds=sync_seconds,
        )

    def _add_checkers(self) -> None:
        keys = sorted(self.keys.items())
        seats = [rounds.Seat(name, key.public, 1, False, True) for name, key in keys]
        self._certificates = CertificatesAreValid(self.run_id, lambda height: seats)
        self._accusations = HonestAreNotAccused(frozenset(self.honest))
        self.checkers: list[Checker] = [
            OneBlockPerHeight(),
            HeightsInOrder(),
            OneVotePerSlot(),
            OneApplicationState(),
            self._certificates,
            self._accusations,
        ]

    def _build(self, name: PeerId, records: Records) -> Machine:
        if name in self.liars:
            seat = Seat(
                self.run_id,
                name,
                self.names,
                self.keys[name],
                Random(f"{self.seed}/{name}"),
                lambda censored: self._ledger(name, {}, ToyApplication(censored)),
            )
            return ADVERSARIES[self.liars[name]](seat)
        for checker in self.checkers:
            checker.on_start(name)
        self.applications[name] = ToyApplication()
        return self._ledger(name, records, self.applications[name])

    def _ledger(self, name: PeerId, records: Records, application: ToyApplication) -> LedgerMachine:
        config = LedgerConfig(self.run_id, name, proposal_wait=0.2, view_timeout=2.0, resend=0.5)
        key, validators = self.keys[name], self.validators
        return LedgerMachine(config, key, validators, application, _gate, records)

    def _on_effect(self, peer: PeerId, effect: Effect, now: float) -> list[tuple[float, object]]:
        if peer not in self.liars:
            for checker in self.checkers:
                checker.on_effect(peer, effect)
                if isinstance(effect, Finalized):
                    checker.on_state(peer, effect.height, effect.result.app_hash)
            for listener in self.listeners:
                listener(peer, effect)
        return []

    def _on_message(self, peer: PeerId, message: bytes) -> None:
        if peer not in self.liars and message is not self._seen:
            self._seen = message  # a broadcast comes by once per receiver
            value = decoded(message)
            for checker in self.checkers:
                checker.on_message(peer, value)

    def on_record(self, peer: PeerId, log: str, record: bytes) -> None:
        if log == "blocks" and peer not in self.liars:
            finalized = decode_finalized(record)
            for checker in self.checkers:
                checker.on_block(peer, finalized)

    def submit(self, tx: bytes, to: Iterable[PeerId] | None = None) -> None:
        """Hand a transaction to some peers, or to all."""
        for name in self.names if to is None else to:
            self.cluster.feed(name, Transaction(tx))

    def machine(self, name: PeerId) -> LedgerMachine:
        """The running machine of an honest peer."""
        machine = self.cluster.nodes[name].machine
        if not isinstance(machine, LedgerMachine):
            raise MisuseError(f"{name} runs no honest ledger")
        return machine

    def height(self, name: PeerId) -> Height:
        """The last height that an honest peer's application took in."""
        return self.applications[name].info().last_height

    def applied(self, txs: Sequence[bytes], peers: Iterable[PeerId]) -> bool:
        """Whether these peers applied all of these transactions."""
        return all(tx in self.applications[name].applied for name in peers for tx in txs)

    @property
    def accused(self) -> tuple[str, ...]:
        """Everybody against whom an honest peer found evidence."""
        return tuple(sorted(self._accusations.accused))

    def violations(self) -> list[str]:
        """All that the checkers found, after a look at the honest peers' disks."""
        for name in self.honest:
            for record in self.cluster.nodes[name].disk.read().get("blocks", ()):
                self._certificates.check(name, decode_finalized(record))
        return [violation for checker in self.checkers for violation in checker.violations]


def _gate(pending: Sequence[bytes]) -> bool:
    return len(pending) >= GATE_TXS
