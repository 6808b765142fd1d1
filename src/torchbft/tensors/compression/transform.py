"""Changes of basis before selection, such as a discrete cosine transform (DeMo, Peng et al. 2024).

Shape suffix: D parameter values.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Transform(Protocol):
    """An invertible map on the parameter section; the same bits on every CPU."""

    def forward(self, values_D: Tensor) -> Tensor: ...
    def inverse(self, values_D: Tensor) -> Tensor: ...


class Identity:
    """Values are selected in the basis in which the model holds them."""

    def forward(self, values_D: Tensor) -> Tensor:
        return values_D

    def inverse(self, values_D: Tensor) -> Tensor:
        return values_D
