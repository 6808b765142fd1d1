"""This validator's own keys: which one signs at a height, and whether its past is known."""

from __future__ import annotations

from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import KeyRing, SigningKey
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger.certificates import ValidatorSet
from torchbft.protocols.ledger.messages import Kind, SignerState, Vote, sign_vote
from torchbft.protocols.ledger.outbox import Outbox
from torchbft.protocols.ledger.recovery import lost


class Signer:
    """Signs with the key that a height's set lists for us. ``recorded``: the keys that the log
    ``votes`` knows; each must be there before it is in force."""

    def __init__(self, run_id: bytes, me: PeerId, keys: KeyRing, recorded: set[bytes]) -> None:
        self._run_id, self._me = run_id, me
        self._keys, self._recorded = keys, recorded

    def key(self, validators: ValidatorSet) -> SigningKey | None:
        """Our key in this set; None where we only observe."""
        return self._keys.get(validators.publics.get(self._me))

    def add(self, key: SigningKey, out: Outbox) -> None:
        """Have one more key, for heights to come."""
        self._keys.add(key)
        self.note(out)

    def note(self, out: Outbox) -> None:
        """Record each key that the log does not know: that tells a new key from a lost log."""
        for public in self._keys.publics:
            if public not in self._recorded:
                self._recorded.add(public)
                out.persist("votes", encode(SignerState(self._run_id, public)))

    def check(self, validators: ValidatorSet) -> None:
        """Raise HaltError if our key in this set is not in the log: nobody knows what it signed."""
        key = self.key(validators)
        if key is not None and key.public not in self._recorded:
            what = "begins after its key was in force" if self._recorded else "is missing"
            raise lost(f"the log of signed votes {what} beside a log of blocks")

    def vote(
        self,
        validators: ValidatorSet,
        kind: Kind,
        height: Height,
        view: View,
        digest: bytes,
        high: View = View(0),  # noqa: B008 - an int
    ) -> Vote:
        """A vote of ours. Whether it may be signed is decided in ``safety.py``."""
        key = self.key(validators)
        assert key is not None, "asked only where this set has our key"
        return sign_vote(key, self._run_id, self._me, kind, height, view, digest, high)
