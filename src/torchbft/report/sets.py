"""Who votes at each height of the embedded ledger: derived from the blocks alone."""

from __future__ import annotations

from torchbft.primitives.ids import Height
from torchbft.primitives.runspec import RunSpec
from torchbft.protocols.ledger.certificates import ValidatorSet
from torchbft.protocols.ledger.messages import Block
from torchbft.protocols.peer import application_of, validators_of


class Sets:
    """Validators by height: those of the run file, and what the blocks change, two heights later.

    ``follow`` takes blocks whose certificate was checked, each height once and in order.
    """

    def __init__(self, run: RunSpec) -> None:
        self._application = application_of(run)
        self._sets = [validators_of(run)] * 2

    def at(self, height: int) -> ValidatorSet:
        """The set of a height; where the blocks before it are not known, the newest known one."""
        return self._sets[min(height, len(self._sets)) - 1]

    def follow(self, block: Block) -> None:
        """Take in the next block; others are left alone."""
        if block.height != self._application.info().last_height + 1:
            return
        result = self._application.finalize_block(Height(block.height), block.txs)
        self._application.commit()
        names = self._application.names
        self._sets.append(self._sets[-1].updated(result.validator_updates, names))
