"""Attacks that send a multiple of an honest direction.

Shapes: D parameters.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from torchbft.attacks.declaration import Expectation, Knowledge, Leaves
from torchbft.attacks.vectors.view import VectorAttack, VectorView


class SignFlip(VectorAttack):
    """−s · μ, μ the honest mean: every liar pushes uphill.

    Strength s, default 4: with f of n liars a plain mean becomes (n − f − s·f)/n · μ, which at
    n=7, f=2 is −3/7 · μ. Source: Li, Xu, Chen, Giannakis and Ling, "RSA" (AAAI 2019), §5, the
    sign-flipping attack; taken of the honest mean instead of the liar's own update.
    """

    name: ClassVar[str] = "sign_flip"
    most_knowledge = Knowledge.OMNISCIENT
    leaves = Leaves.RULE
    default_strength = 4.0
    bites = True
    expected = Expectation(named=False, suspected=False, downweighted=True)

    def forge(self, view: VectorView) -> Tensor:
        return -self.strength * self.reference_D(view)


class InnerProductManipulation(SignFlip):
    """−ε · μ, μ the honest mean: the aggregate's inner product with μ becomes negative.

    Strength ε, default 3: a plain mean turns only beyond (n − f)/f, which is 2.5 at n=7, f=2.
    Source: Xie, Koyejo and Gupta, "Fall of Empires" (UAI 2019), §3, equation of Theorem 1.
    """

    name: ClassVar[str] = "ipm"
    default_strength = 3.0


class Scaled(VectorAttack):
    """s · u, u the liar's own honest update: the right direction, far too long.

    Strength s, default 100. Source: the boosting of Bagdasaryan et al., "How to backdoor
    federated learning" (AISTATS 2020), eq. 3, without a backdoor.
    """

    name: ClassVar[str] = "scaled"
    most_knowledge = Knowledge.OWN
    leaves = Leaves.RULE
    default_strength = 100.0
    bites = True
    expected = Expectation(named=False, suspected=True, downweighted=True)

    def forge(self, view: VectorView) -> Tensor:
        return self.strength * view.own_D


class Copycat(VectorAttack):
    """The update of the honest peer with the smallest id, as it is: pay without work.

    Commit–reveal leaves a real liar (knowledge ``history``) the last aggregate only. A copy is a
    well-formed contribution, so it harms no more than a doubled vote, and equal digests convict
    nobody. Source: the free-riding and copying of "mimic" in Karimireddy, He and Jaggi,
    "Byzantine-robust learning on heterogeneous datasets via bucketing" (ICLR 2022), §3.2.
    """

    name: ClassVar[str] = "copycat"
    most_knowledge = Knowledge.OMNISCIENT
    leaves = Leaves.NOTHING
    default_strength = 0.0
    expected = Expectation(named=False, suspected=False, downweighted=False)

    def forge(self, view: VectorView) -> Tensor:
        if self.knowledge is Knowledge.OMNISCIENT and view.honest_ND is not None:
            return view.honest_ND[0].clone()
        return self.reference_D(view).clone()
