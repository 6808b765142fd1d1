"""The live view of a run: phase, countdown, quorum and margin, loss, peer × round matrix.

It only reads the run folder, so it runs beside a swarm, after it, or over a copy, and cannot
disturb it. Everything that colour says is also said by a letter. Where the stream is no terminal
it prints one line a round instead.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from torchbft.primitives.evidence import Outcome
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.trace import RoundEnded
from torchbft.report.gather import VOID, Follower, Matrix, PeerView, RunView
from torchbft.report.words import (
    DOWN_WEIGHTED,
    LEGEND,
    TERMINAL,
    accusation,
    look,
    percent,
    printable,
    seconds,
    span,
)

REFRESH_SECONDS = 0.5
"""Looks alive; a picture of seven peers and 200 rounds takes 20 ms, so 4 % of a core."""
TREND_ROUNDS = 12
MAX_FINDINGS = 8
"""Lines on refused peers; the page holds all."""
STALE_SECONDS = 30.0
"""A peer that wrote nothing for so long is shown as silent."""
_BARS = "▁▂▃▄▅▆▇█"
_PLAIN_BARS = "_.-=*#"


class LiveView:
    """Follows a run folder and shows it. ``total_rounds`` 0 means: as the run file says. Without
    ``history``, lines are only those of what comes from now on.

    ``with LiveView(dir, 40) as view: view.refresh()`` or ``LiveView(dir, 40).run(until)``.
    """

    def __init__(
        self,
        run_dir: Path,
        total_rounds: int = 0,
        *,
        console: Console | None = None,
        history: bool = True,
    ) -> None:
        self._console = console or Console(stderr=True)
        self._follower = Follower(run_dir)
        self._total = total_rounds
        self._lines = _RoundLines(total_rounds)
        if not history:
            self._lines.new(self._follower.refresh(), last=True)
        self._live: Live | None = None

    @property
    def view(self) -> RunView:
        """The run as last read."""
        return self._follower.view

    def __enter__(self) -> LiveView:
        if self._console.is_terminal:
            self._live = Live(console=self._console, auto_refresh=False, transient=False)
            self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.refresh(last=True)
        if self._live:
            self._live.__exit__(kind, error, trace)
            self._live = None

    def refresh(self, *, last: bool = False) -> RunView:
        """Read what is new and show it; ``last`` also tells rounds not yet evaluated."""
        view = self._follower.refresh()
        if self._live:
            self._live.update(self._picture(view), refresh=True)
        else:
            for line in self._lines.new(view, last=last):
                self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)
        return view

    def _picture(self, view: RunView) -> RenderableType:
        return picture(
            view,
            total=self._total,
            now=time.time(),
            width=self._console.width,
            ascii_only=self._console.options.ascii_only,
        )

    def run(self, until: Callable[[], bool], *, interval: float = REFRESH_SECONDS) -> RunView:
        """Show the run until ``until()`` is true; then once more. Returns the last view."""
        with self:
            while not until():
                self.refresh()
                time.sleep(interval)
        return self.view


def picture(
    view: RunView,
    *,
    total: int = 0,
    now: float = 0.0,
    width: int = 100,
    ascii_only: bool = False,
) -> RenderableType:
    """The whole live view as something rich can print."""
    cells = view.matrix()
    parts: list[RenderableType] = [
        _headline(view, total, now),
        _quorum_line(view, now),
        *_only_here(view),
        Text(""),
        _matrix(view, cells, width, ascii_only),
        _legend(cells, ascii_only),
    ]
    findings = _findings(view, cells)
    if findings:
        parts += [Text(""), *findings]
    return Group(*parts)


def total_rounds(view: RunView, total: int = 0) -> int:
    """The given number of rounds, else the run file's."""
    return total or (view.spec.training.rounds if view.spec else 0)


def phase_of(view: RunView) -> tuple[str, tuple[str, ...], float | None]:
    """What most peers say they are doing, whom they wait for, and until when (UNIX time)."""
    known = [peer.status for peer in view.peers.values() if peer.status and peer.status.phase]
    if view.end:
        return view.end.status, (), None
    if not known:
        return ("running" if view.last_round >= 0 else "starting"), (), None
    name = Counter(status.phase for status in known).most_common(1)[0][0]
    those = [status for status in known if status.phase == name]
    waiting = Counter(peer for status in those for peer in status.waiting_for)
    ends = [status.until for status in those if status.until is not None]
    return name, tuple(sorted(waiting)), max(ends, default=None)


def _headline(view: RunView, total: int, now: float) -> Text:
    name = view.spec.name if view.spec else (view.started.name if view.started else "run")
    done, total = view.last_round + 1, total_rounds(view, total)
    phase, waiting, until = phase_of(view)
    line = Text.assemble(("torchbft ", "bold cyan"), (name, "bold"), "   ")
    line.append(f"{done}/{total or '?'} rounds   ")
    line.append(phase, "bold")
    if until is not None and now:
        line.append(f" (waits at most {max(0.0, until - now):.0f} s)")
    if waiting:
        line.append(printable(f" for {', '.join(waiting)}"), "yellow")
    line.append(f"   {_clock(_elapsed(view, now))} elapsed")
    left = _left(view, done, total)
    if left and not view.end:
        line.append(f", about {_clock(left)} left")
    return line


def _elapsed(view: RunView, now: float) -> float:
    """Seconds since the first peer started, up to now or to the end of the run."""
    starts = [peer.started.at for peer in view.peers.values() if peer.started]
    last = max((peer.last_at for peer in view.peers.values()), default=0.0)
    return max(0.0, (last if view.end else now) - min(starts)) if starts else 0.0


def _left(view: RunView, done: int, total: int) -> float:
    """Seconds that the remaining rounds take at the pace of the recorded ones."""
    times = sorted(min(p.rounds[r].at for p in view.peers.values() if r in p.rounds)
                   for r in {r for p in view.peers.values() for r in p.rounds})  # fmt: skip
    if len(times) < 2 or total <= done:
        return 0.0
    return (times[-1] - times[0]) / (len(times) - 1) * (total - done)


def _clock(value: float) -> str:
    return f"{int(value // 60)}:{int(value % 60):02d}"


def _faults(view: RunView) -> FaultModel | None:
    if view.spec:
        return view.spec.contributor_faults
    started = view.started
    return FaultModel(started.contributors, started.f) if started else None


def seen(view: RunView, now: float) -> int:
    """Peers that wrote something within the last half minute."""
    latest = [max(p.last_at, p.status.at if p.status else 0.0) for p in view.peers.values()]
    return sum(now - at < STALE_SECONDS for at in latest)


def _quorum_line(view: RunView, now: float) -> Text:
    line, faults, ended = Text(), _faults(view), view.agreed(view.last_round)
    if faults:
        line.append(f"quorum {faults.quorum} of {faults.n}, f = {faults.f}")
    if ended and faults:
        margin = len(ended.accepted) - faults.quorum
        line.append("   last round: ")
        state = f"{len(ended.accepted)} accepted, margin {margin:+d}"
        line.append("void" if ended.void else state, "bold red" if margin < 0 else "")
    if now and not view.end:
        line.append(f"   seen {seen(view, now)}/{len(view.members)}")
    if last := view.cost(view.last_round):
        line.append(f"   consensus {seconds(last.consensus)} a round ({percent(last.share)})")
    return line


def _only_here(view: RunView) -> list[Text]:
    """A line on a folder that holds some members' records alone, as on machines of their own."""
    here = [name for name in view.members if (peer := view.peers.get(name)) and peer.started]
    if not here or len(here) == len(view.members):
        return []
    connected = {peer for name in here if (status := view.peers[name].status)
                 for peer in status.connected} - set(here)  # fmt: skip
    words = (
        f"seen by {', '.join(here)} alone, connected to {', '.join(sorted(connected)) or 'nobody'}"
    )
    return [Text(printable(words + "; the others keep records of their own"), "dim")]


def _matrix(view: RunView, cells: Matrix, width: int, ascii_only: bool) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1), show_header=True, expand=False)
    names = view.members
    longest = max((len(name) for name in names), default=4)
    shown = max(10, width - longest - TREND_ROUNDS - 24)
    rounds = range(max(0, view.last_round + 1 - shown), view.last_round + 1)
    for title, justify in (("peer", "left"), ("loss", "right"), ("acc.", "right")):
        table.add_column(title, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    table.add_column("trend", no_wrap=True)
    table.add_column(_ruler(rounds), no_wrap=True)
    for name in names:
        row = Text()
        looks = [look(cells.get(name, {}).get(number)) for number in rounds]
        for shown_as, equal in groupby(looks):
            glyph = shown_as.plain if ascii_only else shown_as.glyph
            row.append(glyph * len(list(equal)), TERMINAL[shown_as.style])
        table.add_row(Text(name), *_loss(view.peers.get(name), ascii_only), row)
    return table


def _ruler(rounds: range) -> str:
    """``0         10        20``: a tick where each tenth round stands."""
    line = ""
    for number in rounds:
        if number % 10 == 0 and len(line) <= number - rounds.start:
            line += " " * (number - rounds.start - len(line)) + str(number)
    return line or "rounds"


def _loss(peer: PeerView | None, ascii_only: bool) -> tuple[str, str, str]:
    values = [peer.evaluations[r] for r in sorted(peer.evaluations)] if peer else []
    if not values:
        return "", "", ""
    last = values[-1]
    accuracy = f"{100 * last.accuracy:.1f}" if last.accuracy is not None else ""
    trend = sparkline([e.loss for e in values[-TREND_ROUNDS:]], ascii_only=ascii_only)
    return f"{last.loss:.4f}", accuracy, trend


def sparkline(values: list[float], *, ascii_only: bool = False) -> str:
    """A row of bars from the least to the greatest finite value; ``!`` where not finite."""
    bars = _PLAIN_BARS if ascii_only else _BARS
    finite = [value for value in values if abs(value) < float("inf")]
    if not finite:
        return "!" * len(values)
    low, spread = min(finite), (max(finite) - min(finite)) or 1.0
    return "".join(
        bars[round((value - low) / spread * (len(bars) - 1))] if abs(value) < float("inf") else "!"
        for value in values
    )


def _legend(cells: Matrix, ascii_only: bool) -> Text:
    present = {look(cell).label for row in cells.values() for cell in row.values()}
    line = Text()
    for item in LEGEND:
        if item.label in present:
            line.append(item.plain if ascii_only else item.glyph, TERMINAL[item.style])
            line.append(f" {item.label}  ", "dim")
    if DOWN_WEIGHTED.label in present:
        glyph = DOWN_WEIGHTED.plain if ascii_only else DOWN_WEIGHTED.glyph
        line.append(f"\n{glyph} {DOWN_WEIGHTED.meaning}", "dim")
    return line


def _findings(view: RunView, cells: Matrix) -> list[Text]:
    """One line per accused or refused peer: what, how often, why, and with which proof."""
    lines = []
    for item in view.accusations():
        word, words = accusation(item)
        style = "bold red" if item.named else "dim" if item.absent else "yellow"
        lines.append(Text.assemble((f"{word} ", style), printable(words)))
    for name, reason, rounds in refused(cells):
        words = printable(f"{name}: {reason} (round {rounds})")
        lines.append(Text.assemble(("not counted ", "magenta"), words))
    return lines[:MAX_FINDINGS]


def refused(cells: Matrix) -> list[tuple[str, str, str]]:
    """(peer, outcome and reason, rounds) of contributions that did not count."""
    groups: dict[tuple[str, str], list[int]] = {}
    for name, row in cells.items():
        for number, cell in row.items():
            if not cell.accepted and cell.outcome != VOID:
                why = look(cell).label + (f", {cell.reason}" if cell.reason else "")
                groups.setdefault((name, why), []).append(number)
    return [(name, why, span(tuple(rounds))) for (name, why), rounds in groups.items()]


class _RoundLines:
    """The plain form: each round, notice and accusation once, as a line."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._next = 0
        self._told: Counter[str] = Counter()

    def new(self, view: RunView, *, last: bool) -> list[str]:
        """Lines that were not told before."""
        lines = self._notices(view)
        while self._next <= view.last_round:
            ended = view.agreed(self._next)
            if ended is None:
                self._next += 1
                continue
            if not (last or self._complete(view, ended)):
                break
            lines.append(round_line(view, ended, total_rounds(view, self._total)))
            self._next += 1
        return lines

    def _complete(self, view: RunView, ended: RoundEnded) -> bool:
        """Whether a round can be told: evaluated, void, or already followed by another."""
        number = ended.round
        evaluated = any(number in peer.evaluations for peer in view.peers.values())
        return ended.void or evaluated or number < view.last_round or view.end is not None

    def _notices(self, view: RunView) -> list[str]:
        """What is new; a notice that some peer repeats is told again, once for all peers."""
        found: Counter[str] = Counter()
        for peer in view.peers.values():
            found |= Counter(notice.text for notice in peer.notices)
        found |= Counter(
            f"absent: {a.peer}, never connected"
            if a.absent
            else f"{accusation(a)[0]}: {a.peer}, {a.fault}: {a.reason}"
            for a in view.accusations()
        )
        fresh = [text for text in found if found[text] > self._told[text]]
        self._told = found
        return fresh


def round_line(view: RunView, ended: RoundEnded, total: int) -> str:
    """One round as one line of text."""
    n = len(view.members)
    parts = [f"round {ended.round} ({ended.round + 1}/{total or '?'})"]
    parts.append(f"void: {ended.reason}" if ended.void else f"accepted {len(ended.accepted)}/{n}")
    found = [p.evaluations[ended.round] for p in view.peers.values()
             if ended.round in p.evaluations]  # fmt: skip
    if found:
        right = [e.accuracy for e in found if e.accuracy is not None]
        parts.append(f"loss {statistics.median(e.loss for e in found):.4f}")
        parts += [f"accuracy {percent(statistics.median(right))}"] if right else []
    cost = view.cost(ended.round)
    parts.append(f"consensus {seconds(cost.consensus if cost else None)}")
    refused = [f"{r.peer} {r.outcome}" for r in ended.refusals if r.outcome != Outcome.ABSENT]
    absent = [r.peer for r in ended.refusals if r.outcome == Outcome.ABSENT]
    parts += [f"refused {', '.join(refused)}"] if refused else []
    parts += [f"absent {', '.join(absent)}"] if absent else []
    return "  ".join(parts)
