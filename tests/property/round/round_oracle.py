"""ROUND.md read a second time, slowly and without the project's reader: the oracle of the tests.

Items are tuples ``(kind, author, round, content)``. After each block everything is worked out again
from the list of all blocks; nothing is updated in place. n equal members, each power 1.
"""

from __future__ import annotations

from dataclasses import dataclass, field

Item = tuple[str, str, int, object]
SLOTS = ("commit", "open", "attest", "close-commit", "close-open", "void", "rooted")


@dataclass
class Play:
    """One round: items that came while it was previous, current or next, with their moment."""

    number: int
    contributors: tuple[str, ...]
    f: int
    waited: tuple[str, ...]
    phase: str = "commit"
    items: list[tuple[Item, str]] = field(default_factory=list)
    """Each with the round's phase at the time: early, commit, open, attest or over."""
    verdict: str = ""
    accepted: tuple[str, ...] = ()
    rooted: bool = False
    opened: bool = False

    def said(self, kind: str, author: str) -> list[tuple[object, str]]:
        return [(i[3], when) for i, when in self.items if i[0] == kind and i[1] == author]

    def first(self, kind: str, author: str, in_time: tuple[str, ...]) -> object:
        said = self.said(kind, author)
        return said[0][0] if said and said[0][1] in in_time else None

    def twice(self, author: str) -> bool:
        return any(len(self.said(kind, author)) > 1 for kind in ("commit", "open", "attest"))


class Oracle:
    """Reads blocks; ``summary`` is what every honest reader must agree on."""

    def __init__(self, names: tuple[str, ...], f: int, m_min: int, rounds: int) -> None:
        self.names, self.f, self.m_min, self.rounds = names, f, m_min, rounds
        self.quorum = len(names) - (len(names) - 1) // 3
        self.f_votes = (len(names) - 1) // 3
        self.convicts: set[str] = set()
        self.plays: list[Play] = []
        self.early: list[tuple[Item, str]] = []
        self.parked: dict[str, int] = {}
        self.spells = dict.fromkeys(names, 0)
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
        if kind in ("commit", "open") and author not in self.contributors_of(number):
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

    def contributors_of(self, number: int) -> tuple[str, ...]:
        play = self.play(number)
        if play is not None:
            return play.contributors
        return tuple(name for name in self.names if name not in self.convicts)

    def block(self, items: list[Item]) -> list[bool]:
        taken = []
        for item in items:
            taken.append(self.admits(item))
            if taken[-1]:
                self.take(item)
        self.convict()
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
            if len(voters) >= self.quorum:
                play.verdict = "voted"

    def convict(self) -> None:
        for play in self.plays[-2:]:
            self.convicts |= {name for name in self.names if play.twice(name)}
        early = Play(-1, (), 0, (), items=self.early)
        self.convicts |= {name for name in self.names if early.twice(name)}

    # judging --------------------------------------------------------------------------------

    def judge(self) -> bool:
        play = self.now
        before = self.plays[-2] if len(self.plays) > 1 else None
        if play.phase in ("commit", "root"):
            voted = [p for p in self.plays[-2:] if p.verdict == "voted" and p.accepted]
            if voted:
                return self.revoke(voted[0])
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
        counting = 0
        for name in self.names:
            said = play.said(f"close-{window}", name)
            if said:
                listed = said[0][0]
                counting += all(play.first(window, who, times) is not None for who in listed)
        return counting >= self.quorum

    def judge_commit(self, play: Play) -> bool:
        times = ("early", "commit")
        here = {n for n in play.contributors if play.first("commit", n, times) is not None}
        good = {n for n in here if not play.twice(n)}
        all_here = {n for n in play.waited if n not in self.convicts} <= here
        if not ((all_here and len(good) >= self.m_min) or self.closed(play, "commit", times)):
            return False
        if len(good) < self.m_min:
            return self.end(play, "void")
        play.phase, play.opened = "open", True
        return True

    def committers(self, play: Play) -> set[str]:
        times = ("early", "commit")
        here = {n for n in play.contributors if play.first("commit", n, times) is not None}
        return {n for n in here if not play.twice(n)}

    def judge_open(self, play: Play) -> bool:
        times = ("early", "commit", "open")
        good = self.committers(play)
        here = {n for n in good if play.first("open", n, times) is not None}
        all_here = {n for n in play.waited if n in good} <= here
        if not ((all_here and len(here) >= self.m_min) or self.closed(play, "open", times)):
            return False
        fitting = {n for n in here if self.opens(play, n, times)}
        if len(fitting) < self.m_min:
            return self.end(play, "void")
        play.phase = "attest"
        play.items.append((("fitting", "", play.number, tuple(sorted(fitting))), "attest"))
        return True

    def opens(self, play: Play, name: str, times: tuple[str, ...]) -> bool:
        return play.first("open", name, times) == play.first("commit", name, times)

    def judge_attest(self, play: Play) -> bool:
        times = ("early", "commit", "open", "attest")
        votes = {n: play.first("attest", n, times) for n in self.names}
        votes = {n: vote for n, vote in votes.items() if vote is not None}
        if len(votes) < self.quorum:
            return False
        fitting = next(i[3] for i, _ in play.items if i[0] == "fitting")
        held = [n for n in fitting if sum(v.get(n) == 1 for v in votes.values()) > self.f_votes]
        accepted = tuple(n for n in held if not play.twice(n))
        if len(accepted) < self.m_min:
            return self.end(play, "void")
        play.accepted = accepted
        return self.end(play, "fixed")

    def end(self, play: Play, verdict: str) -> bool:
        play.verdict = verdict
        if play.number + 1 < self.rounds:
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
        seated = tuple(name for name in self.names if name not in self.convicts)
        f = max(0, min(self.f - len(self.convicts), (len(seated) - 1) // 3))
        free = f - sum(name in seated for name in self.parked)
        away = [n for n in seated if n not in self.parked and self.absent(n) >= 2]
        number = self.plays[-1].number + 1 if self.plays else 0
        for name in sorted(away, key=lambda n: (-self.absent(n), n))[: max(free, 0)]:
            self.parked[name] = number
            self.spells[name] += 1
        after_void = bool(self.plays) and self.plays[-1].verdict in ("void", "voted")
        waited = tuple(name for name in seated if after_void or name not in self.parked)
        play = Play(number, seated, f, waited)
        play.items = [
            e for e in self.early if e[0][0] not in ("commit", "open") or e[0][1] in seated
        ]
        self.early = []
        self.plays.append(play)

    def summary(self) -> object:
        return (
            self.now.number,
            self.now.phase,
            sorted(self.convicts),
            self.now.waited,
            [(p.number, p.verdict, p.accepted) for p in self.plays[:-1] if p.verdict],
        )
