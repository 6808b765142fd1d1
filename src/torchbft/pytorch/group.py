"""A data-parallel job as one peer: its first rank talks to the node, the others hear of it.

Every rank calls ``join`` with its ``DistributedDataParallel`` model and loops as before. Each
takes its own part of every batch; DDP averages the gradients, so all ranks hold the same model,
and the first one's update is the peer's. Ranks belong to one owner and trust each other.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from torchbft.primitives.errors import MisuseError
from torchbft.primitives.ids import PeerId
from torchbft.pytorch.link import NodeLink, RoundOutcome, RoundStart, RunOver
from torchbft.tensors.layout import StateLayout
from torchbft.tensors.state import AgreedState

Group = dist.ProcessGroup


def is_first(group: Group | None) -> bool:
    """Whether this process is the one of the job that talks to the node."""
    return group is None or dist.get_rank(group) == 0


class _Heard(msgspec.Struct, frozen=True):
    """What the first rank heard of the node, without the state."""

    kind: str
    round: int = 0
    positions: list[int] | None = None
    peers: list[str] = []
    accepted: bool = False
    void: bool = False
    reason: str = ""
    status: str = ""


class GroupLink:
    """``NodeLink`` of every rank. ``link`` is the node's, on the first rank alone."""

    def __init__(self, link: NodeLink | None, group: Group, layout: StateLayout) -> None:
        if (link is not None) != is_first(group):
            raise MisuseError("the first rank alone holds the node's link", where="process_group")
        self._link, self._group, self._layout = link, group, layout
        self._source = dist.get_global_rank(group, 0)
        self._device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)

    def start(self, initial: AgreedState) -> AgreedState:
        state = self._link.start(initial) if self._link else None
        return self._shared(_Heard("start"), state)[1]

    def next_round(self) -> RoundStart | RunOver:
        return self._told(self._link.next_round() if self._link else None)  # type: ignore[return-value]

    def submit(
        self,
        round: int,
        payload: bytes | memoryview,
        trace_root: bytes,
        local_root: bytes,
        seconds: float = 0.0,
    ) -> None:
        if self._link:
            self._link.submit(round, payload, trace_root, local_root, seconds)

    def outcome(self, round: int) -> RoundOutcome | RunOver:
        return self._told(self._link.outcome(round) if self._link else None)  # type: ignore[return-value]

    def report(
        self,
        round: int,
        loss: float,
        accuracy: float | None,
        train_loss: float | None,
        seconds: float = 0.0,
    ) -> None:
        if self._link:
            self._link.report(round, loss, accuracy, train_loss, seconds)

    def leave(self) -> None:
        if self._link:
            self._link.leave()

    def _told(
        self, said: RoundStart | RoundOutcome | RunOver | None
    ) -> RoundStart | RoundOutcome | RunOver:
        heard, state = self._shared(_heard(said), said.state if said else None)
        peers = tuple(PeerId(peer) for peer in heard.peers)
        if heard.kind == "round":
            return RoundStart(heard.round, heard.positions, state, peers)
        if heard.kind == "outcome":
            return RoundOutcome(heard.round, heard.accepted, heard.void, heard.reason, state)
        return RunOver(heard.status, heard.reason, state)  # type: ignore[arg-type]

    def _shared(self, heard: _Heard, state: AgreedState | None) -> tuple[_Heard, AgreedState]:
        """Broadcast from the first rank to all; the state travels as its file."""
        header = self._broadcast(msgspec.json.encode(heard))
        body = self._broadcast(b"" if state is None else state.encode())
        if state is None:
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder) / "state.safetensors"
                path.write_bytes(body)
                state = AgreedState.load(path, self._layout)
        return msgspec.json.decode(header, type=_Heard), state

    def _broadcast(self, data: bytes) -> bytes:
        length = torch.tensor([len(data)], device=self._device)
        dist.broadcast(length, self._source, self._group)
        body = torch.zeros(int(length), dtype=torch.uint8)
        if self._link:
            body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        body = body.to(self._device)
        dist.broadcast(body, self._source, self._group)
        return body.cpu().numpy().tobytes()


def _heard(said: RoundStart | RoundOutcome | RunOver | None) -> _Heard:
    if isinstance(said, RoundStart):
        positions = None if said.positions is None else list(said.positions)
        return _Heard("round", said.round, positions, [*said.peers])
    if isinstance(said, RoundOutcome):
        return _Heard(
            "outcome", said.round, accepted=said.accepted, void=said.void, reason=said.reason
        )
    if isinstance(said, RunOver):
        return _Heard("over", reason=said.reason, status=said.status)
    return _Heard("")
