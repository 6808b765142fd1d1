"""A membership that changes under running nodes: rosters, keys, and what operators wish."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import tomli_w
from node_swarm import LocalSwarm, free_ports, run_swarm

from torchbft.node import entries, members, wish
from torchbft.node.launch import Keys, peer_name
from torchbft.primitives.errors import ConfigError
from torchbft.primitives.ids import PeerId
from torchbft.primitives.keys import KeyRing
from torchbft.primitives.runspec import VOTING_DOMAIN, Member, dump_run, new_member, voting_body
from torchbft.protocols.round.changes import Admit, Change, Remove, Rotate
from torchbft.protocols.round.state import GenesisConfig, changed, genesis_state
from torchbft.report.verify import verify

A, B, C, D, E = (PeerId(f"peer-{letter}") for letter in "abcde")


def newcomer(swarm: LocalSwarm, name: PeerId = E) -> Admit:
    """A member's folder and keys, known to nobody yet, and the change that admits it."""
    folder = swarm.folder / name
    keys = swarm.keys[name] = Keys.create(folder)
    member = new_member(name, keys.identity, keys.voting, port=free_ports(1)[0])
    (folder / "member.toml").write_text(tomli_w.dumps(msgspec.to_builtins(member)))
    swarm.entries[name] = member
    return Admit(
        name,
        keys.identity.public,
        keys.voting.public,
        bytes.fromhex(member.voting_certificate),
        member.host,
        member.port,
        1,
        True,
        True,
    )


def rotation(swarm: LocalSwarm, name: PeerId) -> Rotate:
    key = entries.make_rotated_key(swarm.folder / name)
    body = voting_body(name, key.public, epoch=0)
    return Rotate(name, key.public, swarm.keys[name].identity.sign(VOTING_DOMAIN, body))


def all_want(swarm: LocalSwarm, *changes: Change, who: tuple[PeerId, ...] = (A, B, C, D)) -> None:
    for name in who:
        for change in changes:
            entries.wish_for(swarm.folder / name, change)
        swarm.hosts[name]._look_for_wish()


def state_of(swarm: LocalSwarm, name: PeerId) -> Any:
    return swarm.hosts[name]._machine.application.state


def has_begun(swarm: LocalSwarm) -> bool:
    """Whether the first round is behind all that were started."""
    return all(swarm.status(name).get("round", 0) >= 1 for name in swarm.tasks if name != E)


def seats(swarm: LocalSwarm, name: PeerId = A) -> list[str]:
    return [seat.name for seat in state_of(swarm, name).current.seats]


def test_c15_over_real_connections(tmp_path: Path) -> None:
    """A key is rotated and a fifth member comes; the others only vote, and their files stay. The
    logs prove the run offline, from the first run file."""
    peers = tmp_path / "peers"
    peers.mkdir()

    async def story(swarm: LocalSwarm) -> None:
        for name in (A, B, C, D):
            swarm.up(name)
        admit = newcomer(swarm)
        swarm.up(E)
        await swarm.until(lambda: has_begun(swarm))
        before = swarm.run.run_id
        all_want(swarm, rotation(swarm, B), admit)
        await swarm.until(lambda: seats(swarm) == [A, B, C, D, E])
        await swarm.finished(A, B, C, D, E)
        assert swarm.run.run_id == before
        assert len({swarm.root(name) for name in (A, B, C, D, E)}) == 1
        assert "admit peer-e" in swarm.notices(A)
        assert "joined by the members' votes: peer-e" in swarm.notices(A)
        assert "rotate peer-b to voting key" in swarm.notices(B)
        assert "is in force" in swarm.notices(B)
        last = max(number for number, ended in swarm.rounds(A).items() if ended.root)
        assert E in {author.author for author in state_of(swarm, A).round_of(last).accepted}
        for name in (A, B, C, D):
            assert entries.wanted(peers / name) == (), "put away once they are in force"
        assert state_of(swarm, A).member(B).voting != swarm.keys[B].voting.public

    swarm = LocalSwarm(peers, rounds=24)
    run_swarm(swarm, story)
    (tmp_path / "run.toml").write_text(dump_run(swarm.run))
    verdict = verify(tmp_path)
    assert verdict.problems == ()
    assert verdict.checked["signed roots"] == 24


def test_who_is_voted_out_is_let_go_of(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        for name in swarm.names:
            swarm.up(name)
        await swarm.until(lambda: has_begun(swarm))
        all_want(swarm, Remove(D), who=(A, B, C))
        await swarm.until(lambda: D not in swarm.hosts[A]._network.roster)
        assert seats(swarm) == [A, B, C]
        await swarm.finished(A, B, C)
        assert "left by the members' votes: peer-d" in swarm.notices(A)

    run_swarm(LocalSwarm(tmp_path, rounds=30), story)


# --- parts ----------------------------------------------------------------------------------------


def test_wishes_are_files_that_may_be_garbage(tmp_path: Path) -> None:
    changes = (Remove("peer-c"), Remove("peer-b"))
    for change in changes:
        entries.wish_for(tmp_path, change)
    (tmp_path / entries.WISHES / "peer-x-0").write_bytes(b"\xff" * 9000)
    (tmp_path / entries.WISHES / "peer-y-0").mkdir()
    assert set(entries.wanted(tmp_path)) == set(changes)
    assert entries.forget(tmp_path, changes[0])
    assert not entries.forget(tmp_path, changes[0])
    assert entries.wanted(tmp_path) == (changes[1],)


def test_keys_of_rotations_lie_beside_the_first_in_order(tmp_path: Path) -> None:
    first = Keys.create(tmp_path).voting
    assert entries.ring_of(first, tmp_path) is first
    made = [entries.make_rotated_key(tmp_path) for _ in range(10)]
    assert [key.public for key in entries.rotated_keys(tmp_path)] == [k.public for k in made]
    ring = entries.ring_of(first, tmp_path)
    assert isinstance(ring, KeyRing)
    assert ring.publics == (first.public, *(key.public for key in made))
    assert all((path.stat().st_mode & 0o077) == 0 for path in tmp_path.glob("*.key"))


def test_a_newcomer_is_known_by_its_own_entry_and_a_stranger_is_not(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path)
    newcomer(swarm)
    folder = tmp_path / E
    assert peer_name(swarm.run, folder) == E
    swarm.keys[E].check(swarm.run, E, folder)
    with pytest.raises(ConfigError, match="not in the roster"):
        swarm.keys[E].check(swarm.run, E)
    with pytest.raises(ConfigError, match="is not the one"):
        swarm.keys[A].check(swarm.run, E, folder)
    other = tmp_path / "other"
    Keys.create(other)
    with pytest.raises(ConfigError, match="no member of run"):
        peer_name(swarm.run, other)


def test_the_roster_keeps_who_still_signs_for_the_last_round(tmp_path: Path) -> None:
    swarm = LocalSwarm(tmp_path)
    state = genesis_state(GenesisConfig.from_run(swarm.run))
    own: Member = swarm.run.member(A)
    assert set(members.contacts(state, own)) == {A, B, C, D}
    gone = tuple(changed(m, left=m.name == D) for m in state.members)
    after = changed(state, members=gone, previous=state.current)
    assert D in members.contacts(after, own)
    later = changed(after, previous=None)
    assert set(members.contacts(later, own)) == {A, B, C}
    assert A in members.contacts(changed(later, members=()), own), "oneself always"


def test_the_signal_makes_a_node_look(tmp_path: Path) -> None:
    async def story(swarm: LocalSwarm) -> None:
        swarm.up(A)
        await swarm.until(lambda: swarm.phase(A) != "")
        entries.wish_for(tmp_path / A, Remove("nobody"))
        os.kill(os.getpid(), wish.LOOK)
        await swarm.until(lambda: "cannot be voted for now" in swarm.notices(A))
        assert "remove nobody: cannot be voted for now: nobody is no member" in swarm.notices(A)

    run_swarm(LocalSwarm(tmp_path), story)
