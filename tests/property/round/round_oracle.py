"""ROUND.md read a second time, slowly and without the project's reader: the oracle of the tests.

Items are tuples ``(kind, author, round, content)``. After each block everything is worked out again
from the list of all blocks. Changes of the membership are items ``("member:" + repr(change),
author, round, change)`` with the change as a plain tuple: ``("admit", name, roles, power, tag)``,
``("remove", name)`` or ``("rotate", name, tag)``; a key is a pair of name and tag.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

Item = tuple[str, str, int, object]
STILL_HEARD = ("attest", "close-commit", "close-open", "rooted")
"""What moves a round on by its frozen set: heard of convicts, too."""


@dataclass(frozen=True)
class Person:
    """A member as the votes made it."""

    contributes: bool
    power: int
    """0: no validator."""
    key: tuple[str, str]


def quorum(power: int) -> int:
    return power - (power - 1) // 3


@dataclass
class Play:
    """One round: items that came while it was previous, current or next, with their moment."""

    number: int
    people: dict[str, Person]
    """Who has a seat in it."""
    f: int
    m_min: int
    waited: tuple[str, ...]
    phase: str = "commit"
    items: list[tuple[Item, str]] = field(default_factory=list)
    """Each with the round's phase at the time: early, ready, commit, open, attest or over."""
    verdict: str = ""
    accepted: tuple[str, ...] = ()
    rooted: bool = False
    opened: bool = False

    def said(self, kind: str, author: str) -> list[tuple[object, str]]:
        return [(i[3], when) for i, when in self.items if i[0] == kind and i[1] == author]

    def first(self, kind: str, author: str, in_time: tuple[str, ...]) -> object:
        said = self.said(kind, author)
        return said[0][0] if said and said[0][1] in in_time else None

    @property
    def contributors(self) -> tuple[str, ...]:
        return tuple(sorted(name for name, one in self.people.items() if one.contributes))

    @property
    def voters(self) -> dict[tuple[str, str], int]:
        """Power by key."""
        return {one.key: one.power for one in self.people.values() if one.power}

    @property
    def quorum(self) -> int:
        return quorum(sum(self.voters.values()))

    def power(self, names: set[str]) -> int:
        return sum(self.people[name].power for name in names if name in self.people)

    def twice(self, author: str) -> bool:
        return any(len(self.said(kind, author)) > 1 for kind in ("commit", "open", "attest"))


class Oracle:
    """Reads blocks; ``summary`` is what every honest reader must agree on."""

    def __init__(
        self,
        names: tuple[str, ...],
        f: int,
        m_min: int,
        rounds: int,
        order: Callable[[tuple], object],
    ) -> None:
        """``order``: what sorts changes that pass together: their bytes on the wire."""
        self.order = order
        self.rounds, self.first = rounds, (len(names), f, m_min)
        self.people = {name: Person(True, 1, (name, "")) for name in names}
        self.keys = {(name, "") for name in names}
        self.passed: list[tuple[str, ...]] = []
        self.epoch = 0
        self.convicts: set[str] = set()
        self.plays: list[Play] = []
        self.early: list[tuple[Item, str]] = []
        self.parked: dict[str, int] = {}
        self.spells: dict[str, int] = {}
        self.released: dict[str, int] = {}
        self.open_next()

    @property
    def now(self) -> Play:
        return self.plays[-1]

    # reading --------------------------------------------------------------------------------

    def admits(self, item: Item) -> bool:
        kind, author, number, _ = item
        if self.now.phase == "finished" or number >= self.rounds:
            return False
        if number not in (self.now.number - 1, self.now.number, self.now.number + 1) or number < 0:
            return False
        play = self.play(number)
        who = (play.people if play else self.seated(self.people)).get(author)
        if who is None or not (who.contributes if kind in ("commit", "open") else who.power):
            return False
        if author in self.convicts and kind not in STILL_HEARD:
            return False
        if kind == "ready" and (self.now.phase != "ready" or number != self.now.number):
            return False
        if kind.startswith("member:") and not self.possible(item[3]):
            return False
        if kind in ("void", "rooted"):
            due = [p for p in self.plays[-2:] if p.verdict == "fixed" and not p.rooted]
            if not due or due[0].number != number:
                return False
        items = self.early if play is None else play.items
        same = [i for i, _ in items if i[:2] == (kind, author)]
        return len(same) < 2 and item not in same

    def play(self, number: int) -> Play | None:
        return next((p for p in self.plays if p.number == number), None)

    # the membership ------------------------------------------------------------------------

    def seated(self, people: dict[str, Person]) -> dict[str, Person]:
        return {name: one for name, one in people.items() if name not in self.convicts}

    def changed(
        self, people: dict[str, Person], keys: set[tuple[str, str]], change: tuple
    ) -> tuple[dict[str, Person], set[tuple[str, str]]] | None:
        """People and used keys after a change, or None if it cannot be."""
        kind, name = change[:2]
        new = dict(people)
        if kind == "remove":
            if name not in people:
                return None
            del new[name]
        else:
            key = (name, change[-1])
            if (kind == "admit") == (name in people) or key in keys or name in self.convicts:
                return None
            keys = keys | {key}
            if kind == "admit":
                new[name] = Person("c" in change[2], change[3] if "v" in change[2] else 0, key)
            else:
                new[name] = replace(people[name], key=key)
        seated = self.seated(new).values()
        if not any(p.power for p in seated) or not any(p.contributes for p in seated):
            return None
        return new, keys

    def plan(self) -> tuple[dict[str, Person], set[tuple[str, str]]]:
        plan = self.people, self.keys
        for change in self.passed:
            plan = self.changed(*plan, change) or plan
        return plan

    def possible(self, change: tuple) -> bool:
        return change not in self.passed and self.changed(*self.plan(), change) is not None

    def count_votes(self) -> None:
        votes: dict[tuple, set[str]] = {}
        for (kind, author, _, change), when in self.now.items:
            if kind.startswith("member:") and when != "over":
                votes.setdefault(change, set()).add(author)
        for change in sorted(votes, key=self.order):
            if change not in self.passed and self.now.power(votes[change]) >= self.now.quorum:
                self.passed.append(change)

    def bounds(self, n: int) -> tuple[int, int]:
        first, f, m_min = self.first
        most = (n - 1) // 3
        f = most if f == (first - 1) // 3 else min(f, most)
        return f, (n - f if m_min == first - self.first[1] else min(m_min, n - f))

    def block(self, items: list[Item]) -> list[bool]:
        taken = []
        for item in items:
            taken.append(self.admits(item))
            if taken[-1]:
                self.take(item)
        self.convict()
        self.count_votes()
        while self.judge():
            pass
        return taken

    def take(self, item: Item) -> None:
        kind, _, number, _ = item
        play = self.play(number)
        if play is None:
            self.early.append((item, "early"))
            return
        when = play.phase if play is self.now else "over"
        play.items.append((item, "over" if when in ("root", "finished") else when))
        if kind == "rooted":
            play.rooted = True
        if kind == "void":
            voters = {i[1] for i, _ in play.items if i[0] == "void"}
            if play.power(voters) >= play.quorum:
                play.verdict = "voted"

    def convict(self) -> None:
        early = Play(-1, {}, 0, 0, (), items=self.early)
        for play in [*self.plays[-2:], early]:
            self.convicts |= {item[1] for item, _ in play.items if play.twice(item[1])}

    # judging --------------------------------------------------------------------------------

    def judge(self) -> bool:
        play = self.now
        before = self.plays[-2] if len(self.plays) > 1 else None
        if play.phase in ("commit", "root"):
            voted = [p for p in self.plays[-2:] if p.verdict == "voted" and p.accepted]
            if voted:
                return self.revoke(voted[0])
        if play.phase == "ready":
            up = {item[1] for item, _ in play.items if item[0] == "ready"}
            play.phase = "commit" if play.power(up) >= play.quorum else "ready"
            return play.phase == "commit"
        if play.phase == "commit":
            if before is not None and before.verdict == "fixed" and not before.rooted:
                return False
            return self.judge_commit(play)
        if play.phase == "open":
            return self.judge_open(play)
        if play.phase == "attest":
            return self.judge_attest(play)
        if play.phase == "root" and play.rooted:
            play.phase = "finished"
        return False

    def closed(self, play: Play, window: str, times: tuple[str, ...]) -> bool:
        counting = set()
        for name in play.people:
            said = play.said(f"close-{window}", name)
            listed = [who for who in said[0][0] if who in play.people] if said else []
            if said and all(
                who in self.convicts or play.first(window, who, times) is not None for who in listed
            ):
                counting.add(name)
        return play.power(counting) >= play.quorum

    def judge_commit(self, play: Play) -> bool:
        times = ("early", "ready", "commit")
        here = {n for n in play.contributors if play.first("commit", n, times) is not None}
        good = {n for n in here if not play.twice(n)}
        all_here = {n for n in play.waited if n not in self.convicts} <= here
        if not ((all_here and len(good) >= play.m_min) or self.closed(play, "commit", times)):
            return False
        if len(good) < play.m_min:
            return self.end(play, "void")
        play.phase, play.opened = "open", True
        return True

    def committers(self, play: Play) -> set[str]:
        times = ("early", "ready", "commit")
        here = {n for n in play.contributors if play.first("commit", n, times) is not None}
        return {n for n in here if not play.twice(n)}

    def judge_open(self, play: Play) -> bool:
        times = ("early", "ready", "commit", "open")
        good = self.committers(play)
        here = {n for n in good if play.first("open", n, times) is not None}
        all_here = {n for n in play.waited if n in good - self.convicts} <= here
        if not ((all_here and len(here) >= play.m_min) or self.closed(play, "open", times)):
            return False
        fitting = {n for n in here if self.opens(play, n, times)}
        if len(fitting) < play.m_min:
            return self.end(play, "void")
        play.phase = "attest"
        play.items.append((("fitting", "", play.number, tuple(sorted(fitting))), "attest"))
        return True

    def opens(self, play: Play, name: str, times: tuple[str, ...]) -> bool:
        return play.first("open", name, times) == play.first("commit", name, times)

    def judge_attest(self, play: Play) -> bool:
        times = ("early", "ready", "commit", "open", "attest")
        votes = {n: play.first("attest", n, times) for n in play.people}
        votes = {n: vote for n, vote in votes.items() if vote is not None}
        if play.power(set(votes)) < play.quorum:
            return False
        fitting = next(i[3] for i, _ in play.items if i[0] == "fitting")
        f_votes = (sum(play.voters.values()) - 1) // 3
        says = {n: {who for who, v in votes.items() if v.get(n) == 1} for n in fitting}
        held = [n for n in fitting if play.power(says[n]) > f_votes]
        accepted = tuple(n for n in held if not play.twice(n))
        if len(accepted) < play.m_min:
            return self.end(play, "void")
        play.accepted = accepted
        return self.end(play, "fixed")

    def end(self, play: Play, verdict: str) -> bool:
        play.verdict = verdict
        if play.number + 1 < self.rounds:
            self.make_changes()
            self.open_next()
        else:
            play.phase = "root" if verdict == "fixed" else "finished"
        return True

    def revoke(self, play: Play) -> bool:
        play.accepted, play.verdict = (), "void"
        if play is self.now:
            play.phase = "finished"
            return True
        return self.end(self.now, "void")

    def make_changes(self) -> None:
        before = self.people
        self.people, self.keys = self.plan()
        self.passed = []
        for name in before.keys() - self.people.keys():
            self.parked.pop(name, None)
        for name in self.people.keys() - before.keys():
            self.released[name] = self.now.number

    # whom to wait for -----------------------------------------------------------------------

    def absent(self, name: str) -> int:
        """Rounds that count, in a row, without an accepted contribution; since its last release."""
        count = 0
        for play in self.plays:
            if play.number <= self.released.get(name, -1):
                continue
            if play.verdict == "fixed":
                count = 0 if name in play.accepted else count + 1
        return count

    def showed_up(self, play: Play, name: str) -> bool:
        here = bool(play.said("commit", name))
        return here and (not play.opened or bool(play.said("open", name)))

    def open_next(self) -> None:
        if len(self.plays) >= 2:
            for name in sorted(self.parked):
                done = [p for p in self.plays[:-1] if p.number >= self.parked[name] - 1]
                row = 0
                for play in done:
                    row = row + 1 if self.showed_up(play, name) else 0
                if row >= min(2 ** self.spells[name], 64):
                    del self.parked[name]
                    self.released[name] = self.plays[-1].number
        people = self.seated(self.people)
        seated = tuple(sorted(name for name, one in people.items() if one.contributes))
        f, m_min = self.bounds(max(len(seated), 1))
        free = f - sum(name in seated for name in self.parked)
        away = [n for n in seated if n not in self.parked and self.absent(n) >= 2]
        number = self.plays[-1].number + 1 if self.plays else 0
        for name in sorted(away, key=lambda n: (-self.absent(n), n))[: max(free, 0)]:
            self.parked[name] = number
            self.spells[name] = self.spells.get(name, 0) + 1
        after_void = bool(self.plays) and self.plays[-1].verdict in ("void", "voted")
        waited = tuple(name for name in seated if after_void or name not in self.parked)
        play = Play(number, people, f, m_min, waited)
        if self.plays and play.voters != self.now.voters:
            self.epoch += 1
            play.phase = "ready"
        elif self.plays:
            play.items = [entry for entry in self.early if self.kept(entry[0], play)]
        self.early = []
        self.plays.append(play)

    def kept(self, item: Item, play: Play) -> bool:
        """Whether an early item still means what it said."""
        kind, author = item[:2]
        old, new = self.now.people.get(author), play.people.get(author)
        if old is None or new is None or old.key != new.key:
            return False
        if kind.startswith("close-") or kind == "attest":
            return bool(new.power) and sorted(self.now.people) == sorted(play.people)
        return new.contributes if kind in ("commit", "open") else bool(new.power)

    def summary(self) -> object:
        return (
            self.now.number,
            self.now.phase,
            self.epoch,
            sorted(self.convicts),
            self.now.waited,
            [(name, one.key, one.power) for name, one in sorted(self.now.people.items())],
            (self.now.f, self.now.m_min),
            self.passed,
            [
                # A vote takes effect once the next round is open; a new epoch delays that.
                (p.number, "fixed" if p.verdict == "voted" else p.verdict, p.accepted)
                for p in self.plays[:-1]
                if p.verdict
            ],
        )
