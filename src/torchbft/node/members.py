"""The node's side of a membership that changes: whom it connects to, and what it votes for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torchbft.node.entries import entry, forget, ring_of, rotated_keys, wanted
from torchbft.node.transports.control import ControlChannel
from torchbft.node.transports.data import DataPlane
from torchbft.node.transports.endpoint import Contact, Endpoint
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import KeyRing, SigningKey
from torchbft.primitives.runspec import Member, RunSpec
from torchbft.protocols.round.changes import Change, described
from torchbft.protocols.round.interface import ChangeTold, KeyAdded, Want
from torchbft.protocols.round.state import LedgerState


def contacts(state: LedgerState, own: Member) -> dict[PeerId, Contact]:
    """Whom to connect to: the ledger's members, those who still have to sign for the round before,
    and oneself. Members of the run file are found where it says, or where they were admitted."""
    last = state.previous.seats if state.previous is not None else ()
    leaving = {seat.name for seat in last} | {own.name}
    found = {
        PeerId(m.name): Contact(m.host, m.port, m.identity)
        for m in state.members
        if not m.left or m.name in leaving
    }
    found[PeerId(own.name)] = Contact(own.host, own.port, bytes.fromhex(own.identity))
    return found


class Members:
    """Follows the ledger's members for one node, and hands its operator's wishes to its machine.

    ``feed`` gives the machine an input; ``notice`` writes a line for people.
    """

    def __init__(
        self,
        run: RunSpec,
        me: PeerId,
        folder: Path,
        feed: Callable[[object], None],
        notice: Callable[[str], None],
    ) -> None:
        self._folder, self._feed, self._notice = folder, feed, notice
        self._own = entry(run, folder, me)
        self._wanted: tuple[Change, ...] = ()
        self._keys = 0
        """Of rotations that the machine has."""

    @property
    def address(self) -> tuple[str, int]:
        """Where this member says that it listens."""
        return self._own.host, self._own.port

    def keys(self, voting: SigningKey) -> SigningKey | KeyRing:
        """The voting key, with those of rotations if there are any."""
        return ring_of(voting, self._folder)

    def roster(self, state: LedgerState) -> dict[PeerId, Contact]:
        return contacts(state, self._own)

    def look(self) -> None:
        """The operator is for these changes, and no others, and may have made a new key."""
        for key in rotated_keys(self._folder)[self._keys :]:
            self._keys += 1
            self._feed(KeyAdded(key))
        changes = wanted(self._folder)
        if changes != self._wanted:
            self._wanted = changes
            self._feed(Want(changes))

    def told(self, effect: ChangeTold) -> None:
        """What became of a wish; one that came true is put away."""
        news = "is in force" if effect.in_force else f"cannot be voted for now: {effect.reason}"
        self._notice(f"{described(effect.change)}: {news}")
        if effect.in_force:
            forget(self._folder, effect.change)
            self._wanted = wanted(self._folder)

    def follow(
        self, state: LedgerState, network: Endpoint, control: ControlChannel, data: DataPlane
    ) -> None:
        """Connect to whom the ledger admitted, and let go of who left."""
        now, before = self.roster(state), network.roster
        if now == before:
            return
        network.update_roster(now)
        control.connect_all()
        gone, come = before.keys() - now.keys(), now.keys() - before.keys()
        for name in gone:
            data.disconnect(name)
        for what, names in (("joined", come), ("left", gone)):
            if names:
                self._notice(f"{what} by the members' votes: {', '.join(sorted(names))}")
