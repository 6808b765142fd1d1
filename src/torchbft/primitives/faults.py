"""The one place that turns the size of a set into its fault bound and its quorum."""

from __future__ import annotations

from dataclasses import dataclass

from torchbft.primitives.errors import PreconditionError


@dataclass(frozen=True, slots=True)
class FaultModel:
    """n equal seats, or n units of voting power, of which at most f may be Byzantine.

    n: seats or power, >= 1. f: at most ⌊(n−1)/3⌋ (Pease, Shostak and Lamport 1980), the default.
    """

    n: int
    f: int = -1

    def __post_init__(self) -> None:
        if self.n < 1:
            raise PreconditionError(f"a set needs at least one member, not {self.n}")
        most = (self.n - 1) // 3
        if self.f == -1:
            object.__setattr__(self, "f", most)
        if not 0 <= self.f <= most:
            raise PreconditionError(
                f"f={self.f} Byzantine members need n > 3f, but n={self.n}",
                hint=f"with n={self.n} at most f={most} can be tolerated",
            )

    @property
    def quorum(self) -> int:
        """Votes (or power) that any decision needs: n − f."""
        return self.n - self.f

    @property
    def one_honest(self) -> int:
        """The least count that must contain an honest member: f + 1."""
        return self.f + 1
