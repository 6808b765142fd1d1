"""The whole idea in one file: seven peers, two liars, one model, in the order of a round.

    python examples/one_round.py            # 12 rounds of digits, about ten seconds

Everything runs in this process, so that nothing hides the order of things. What is real: keys and
signatures, commitments, payload bytes and their bounded decoder, the aggregation rule, the outer
step, the agreed state and its root. What is left out: the ledger's three-hop agreement (here a
record that nobody can rewrite), time-outs, networks and restarts; see src/torchbft/protocols and
src/torchbft/node for those.
"""

from __future__ import annotations

import argparse
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from torchbft import robust
from torchbft.primitives import wire
from torchbft.primitives.digests import payload_root, sha256
from torchbft.primitives.errors import DecodeError
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import SigningKey, verify
from torchbft.pytorch.task import Task, evaluate
from torchbft.pytorch.tasks import get_task
from torchbft.tensors.advance import LedgerFields, advance
from torchbft.tensors.compression import Residual, get_codec
from torchbft.tensors.outer import DILOCO
from torchbft.tensors.state import AgreedState
from torchbft.tensors.update import Update, difference

PEERS = [PeerId(f"peer-{index}") for index in range(7)]
INNER_STEPS, BATCH = 20, 32
CODEC = get_codec("int8")
RULE = robust.get("arc+nnm+trimmed_mean")
# One type turns the size of a set into its fault bound and its quorum: n=7 gives f=2, quorum 5.
FAULTS = FaultModel(len(PEERS))


@dataclass(frozen=True)
class Opening:
    """What a commitment hides until all commitments are final."""

    round: int
    peer: PeerId
    salt: bytes
    root: bytes
    length: int

    def digest(self) -> bytes:
        """The commitment: binds the payload, its author and the round; the salt hides it."""
        return sha256(
            "example/commitment",
            wire.encode((self.round, self.peer, self.length)),
            self.salt,
            self.root,
        )


@dataclass
class Ledger:
    """An ordered, signed record that all peers read alike. In torchbft a BFT protocol writes it;
    here an author's first valid statement of a kind and round counts, and a second one convicts."""

    keys: dict[PeerId, bytes]
    statements: dict[tuple[str, int, PeerId], bytes] = field(default_factory=dict)
    named: dict[PeerId, str] = field(default_factory=dict)

    def write(self, kind: str, round: int, peer: PeerId, body: bytes, signature: bytes) -> None:
        signed = wire.encode((kind, round, peer, body))
        if not verify(self.keys[peer], "example", signed, signature):
            return  # a forger writes in nobody's name but its own
        first = self.statements.setdefault((kind, round, peer), body)
        if first != body:
            self.named.setdefault(peer, f"signed two different {kind}s in round {round}")

    def read(self, kind: str, round: int) -> dict[PeerId, bytes]:
        return {p: body for (k, r, p), body in self.statements.items() if (k, r) == (kind, round)}


@dataclass
class Peer:
    """One member: its key, its copy of the agreed state, and what it has received."""

    name: PeerId
    key: SigningKey
    state: AgreedState
    model: torch.nn.Module
    residual: Residual
    payloads: dict[bytes, bytes] = field(default_factory=dict)

    def sign(self, ledger: Ledger, kind: str, round: int, body: bytes) -> None:
        signature = self.key.sign("example", wire.encode((kind, round, self.name, body)))
        ledger.write(kind, round, self.name, body, signature)


# ---------------------------------------------------------------------------- 1. train


def assigned(round: int, beacon: bytes, samples: int) -> dict[PeerId, list[int]]:
    """Disjoint slices of a permutation that nobody could choose: the beacon was fixed before."""
    seed = sha256("example/slices", beacon, round.to_bytes(8, "big"))
    generator = torch.Generator().manual_seed(int.from_bytes(seed[:8], "big") >> 1)
    each = INNER_STEPS * BATCH
    order: list[int] = []
    while len(order) < each * len(PEERS):
        order += torch.randperm(samples, generator=generator).tolist()
    return {peer: order[i * each : (i + 1) * each] for i, peer in enumerate(PEERS)}


def train(peer: Peer, task: Task, positions: Sequence[int]) -> Update:
    """H inner steps from the agreed state. The update is the pseudo-gradient start − end."""
    peer.state.load_into(peer.model)
    optimizer = task.build_optimizer(peer.model)  # a fresh one: nothing but the state is agreed
    x, y = task.train_set.tensors  # type: ignore[attr-defined]
    for step in range(INNER_STEPS):
        rows = torch.tensor(positions[step * BATCH : (step + 1) * BATCH])
        optimizer.zero_grad()
        task.loss(peer.model, (x[rows], y[rows]), torch.Generator()).backward()
        optimizer.step()
    return difference(peer.state, peer.model)


def lie(update: Update, honest: Sequence[Update]) -> Update:
    """The first liar's contribution: −4 times the mean of the honest ones. It looks like any
    other payload, so nothing can prove it; only the rule stands between it and the model."""
    mean_D = torch.stack([other.parameters_D for other in honest]).mean(dim=0)
    return Update(mean_D * -4, update.float_buffers_B, update.int_buffers_I)


# ---------------------------------------------------------------------------- 2. compress


def compress(peer: Peer, update: Update) -> bytes:
    """Bytes on the wire; what int8 could not say joins the next update (error feedback)."""
    payload, pending = CODEC.encode(update, peer.residual)
    peer.residual = pending.settled(accepted=True)
    return payload


# ---------------------------------------------------------------------------- 3. commit


def commit(peer: Peer, ledger: Ledger, round: int, payload: bytes) -> Opening:
    """A salted digest fixes the contribution before any other one can be seen or copied."""
    opening = Opening(
        round, peer.name, secrets.token_bytes(32), payload_root(payload), len(payload)
    )
    peer.sign(ledger, "commitment", round, opening.digest())
    return opening


# ---------------------------------------------------------------------------- 4. reveal


def reveal(
    peer: Peer, ledger: Ledger, opening: Opening, payload: bytes, all: Sequence[Peer]
) -> None:
    """Only once all commitments are final: the opening to the ledger, the payload to the peers."""
    body = wire.encode((opening.salt, opening.root, opening.length))
    peer.sign(ledger, "opening", opening.round, body)
    for receiver in all:
        receiver.payloads[opening.root] = payload


def opened(ledger: Ledger, round: int) -> dict[PeerId, bytes]:
    """Payload roots by author, where the opening is the one that was committed to."""
    commitments, roots = ledger.read("commitment", round), {}
    for name, body in ledger.read("opening", round).items():
        salt, root, length = wire.decode(body, tuple[bytes, bytes, int])
        if Opening(round, name, salt, root, length).digest() == commitments.get(name):
            roots[name] = root
        else:
            ledger.named.setdefault(name, f"opened in round {round} what it had not committed to")
    return roots


def attest(peer: Peer, ledger: Ledger, round: int, roots: dict[PeerId, bytes]) -> None:
    """ "I hold these payloads, and they decode": a bounded decoder that never crashes looks."""
    held = []
    for name, root in sorted(roots.items()):
        payload = peer.payloads.get(root)
        try:
            if payload is not None and payload_root(payload) == root:
                CODEC.decode(payload, peer.state.layout)
                held.append(name)
        except DecodeError:
            continue
    peer.sign(ledger, "attestation", round, wire.encode(held))


# ---------------------------------------------------------------------------- 5. decide


def decide(ledger: Ledger, round: int) -> list[PeerId]:
    """The accepted set: openings that more than f attestations call held, so that at least one
    honest peer can serve them. It follows from the ledger alone; every peer computes the same."""
    votes: dict[PeerId, int] = {}
    for body in ledger.read("attestation", round).values():
        for name in wire.decode(body, list[PeerId]):
            votes[name] = votes.get(name, 0) + 1
    return sorted(n for n, count in votes.items() if count > FAULTS.f and n not in ledger.named)


# ---------------------------------------------------------------------------- 6. and 7. apply


def apply(
    peer: Peer, accepted: Sequence[PeerId], roots: dict[PeerId, bytes]
) -> dict[PeerId, float]:
    """Robust aggregation and the outer step, the same bits on every CPU. Returns the weights."""
    updates = [(n, CODEC.decode(peer.payloads[roots[n]], peer.state.layout)) for n in accepted]
    state = peer.state
    ledger_fields = LedgerFields(
        state.round + 1,
        state.inner_step + INNER_STEPS,
        0,
        0,
        state.membership_digest,
        state.credit_digest,
    )
    peer.state, info = advance(
        state, updates, rule=RULE, f=FAULTS.f, outer=DILOCO, ledger=ledger_fields
    )
    peer.payloads.clear()
    return dict(info.weights)


def signed_root(peers: Sequence[Peer], ledger: Ledger, round: int) -> bytes:
    """A quorum of equal signatures makes the root *signed*; the next round starts from it."""
    for peer in peers:
        peer.sign(ledger, "root", round, peer.state.root())
    roots = list(ledger.read("root", round).values())
    winner = max(roots, key=roots.count)
    if roots.count(winner) < FAULTS.quorum:
        raise SystemExit("no quorum of equal roots: halt, and print who signed what")
    return winner


# ---------------------------------------------------------------------------- the round


def play_round(round: int, peers: list[Peer], ledger: Ledger, task: Task, beacon: bytes) -> None:
    liar, cheat = peers[5], peers[6]
    slices = assigned(round, beacon, len(task.train_set))
    updates = {peer.name: train(peer, task, slices[peer.name]) for peer in peers}
    updates[liar.name] = lie(updates[liar.name], [updates[peer.name] for peer in peers[:5]])
    payloads = {peer.name: compress(peer, updates[peer.name]) for peer in peers}
    openings = {peer.name: commit(peer, ledger, round, payloads[peer.name]) for peer in peers}

    # The second liar waits for the others' payloads and opens a copy of the first one's.
    payloads[cheat.name] = copied = payloads[peers[0].name]
    salt = openings[cheat.name].salt
    openings[cheat.name] = Opening(round, cheat.name, salt, payload_root(copied), len(copied))

    for peer in peers:
        reveal(peer, ledger, openings[peer.name], payloads[peer.name], peers)
    roots = opened(ledger, round)
    for peer in peers:
        attest(peer, ledger, round, roots)
    accepted = decide(ledger, round)
    weights = [apply(peer, accepted, roots) for peer in peers]
    root = signed_root(peers, ledger, round)

    peers[0].state.load_into(peers[0].model)
    _, accuracy = evaluate(task, peers[0].model)
    shares = "  ".join(f"{name[-1]}:{share:.2f}" for name, share in weights[0].items())
    print(f"round {round:2}  root {root.hex()[:12]}  accuracy {accuracy:.3f}  weights {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=12)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    torch.manual_seed(0)
    task = get_task("digits")
    start = AgreedState.initial(task.build_model(), rule=RULE)
    RULE.check(n=FAULTS.quorum, f=FAULTS.f)  # a round may count with n − f contributions
    peers = [
        Peer(name, SigningKey.generate(), start, task.build_model(), Residual.zero(start.layout))
        for name in PEERS
    ]
    ledger = Ledger({peer.name: peer.key.public for peer in peers})
    for round in range(rounds):
        play_round(round, peers, ledger, task, beacon=b"fixed in an earlier round")
    agreed = {peer.state.root().hex() for peer in peers}
    print(f"{len(agreed)} model on {len(peers)} peers: {agreed.pop()[:16]}")
    for name, reason in ledger.named.items():
        print(f"named: {name}, which {reason}")


if __name__ == "__main__":
    main()
