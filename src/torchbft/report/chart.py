"""Line and stacked-bar charts as inline SVG, by hand: no network, no library, dark mode by CSS.

Colours are classes ``c0`` to ``c7`` (Okabe and Ito's colour-blind safe set in report.css), and
each series also has its own dash or its own place in the stack and a label, so that colour never
carries meaning alone. Each chart's numbers stand in a table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 720, 300
LEFT, RIGHT, TOP, BOTTOM = 66, 14, 12, 44
MAX_BARS = 120
"""More rounds than this are drawn as averages of neighbours; a bar stays at least 4 px wide."""
MAX_POINTS = 400
TICKS = 5
DRAWABLE = 1e30
"""Values beyond are as good as infinite, and no scale in float64 overflows up to here."""


@dataclass(frozen=True, slots=True)
class Series:
    """A named line, or one layer of a stack: ``points`` are (x, y)."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Scale:
    """Maps values in [low, high] to pixels in [start, end]."""

    low: float
    high: float
    start: float
    end: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)


def nice_ticks(low: float, high: float, count: int = TICKS) -> list[float]:
    """Round numbers that span [low, high]; the first is ≤ low and the last ≥ high."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1.0 / DRAWABLE):
        high = low + (abs(low) or 1.0)
    raw = (high - low) / count
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = magnitude * next(m for m in (1, 2, 2.5, 5, 10) if m * magnitude >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, max(last, first + 1) + 1)]


def line_chart(series: Sequence[Series], *, title: str, y_label: str) -> str:
    """Lines over rounds. Values that are not finite are left out."""
    drawn = [Series(s.name, _finite(s.points)) for s in series]
    drawn = [s for s in drawn if s.points]
    if not drawn:
        return _empty(title)
    xs = [x for s in drawn for x, _ in s.points]
    ys = [y for s in drawn for _, y in s.points]
    y_ticks = nice_ticks(min(ys), max(ys))
    x, y = _scales(min(xs), max(xs), y_ticks)
    body = [_axes(x, y, y_ticks, y_label)]
    for index, each in enumerate(drawn):
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in _thinned(each.points))
        body.append(
            f'<polyline class="line c{index % 8} dash{index % 4}" points="{path}">'
            f"<title>{escape(each.name)}</title></polyline>"
        )
        a, b = each.points[-1]
        body.append(f'<circle class="dot c{index % 8}" cx="{x(a):.1f}" cy="{y(b):.1f}" r="3"/>')
    return _figure(title, "".join(body)) + _key([s.name for s in drawn], "line")


def stacked_bars(series: Sequence[Series], *, title: str, y_label: str) -> str:
    """One bar a round, layers from the bottom up; all series share the same x values."""
    series = [Series(s.name, [(x, _bounded(y)) for x, y in s.points]) for s in series]
    series = [s for s in series if any(value for _, value in s.points)]
    if not series:
        return _empty(title)
    binned = [_binned(s.points) for s in series]
    xs = [x for x, _ in binned[0]]
    totals = [sum(layer[i][1] for layer in binned) for i in range(len(xs))]
    y_ticks = nice_ticks(0.0, max(totals))
    x, y = _scales(min(xs) - 0.5, max(xs) + 0.5, y_ticks)
    width = max(2.0, (x.end - x.start) / len(xs) * 0.82)
    body, base = [_axes(x, y, y_ticks, y_label)], [0.0] * len(xs)
    for index, layer in enumerate(binned):
        for i, (at, value) in enumerate(layer):
            top, bottom = y(base[i] + value), y(base[i])
            base[i] += value
            if bottom - top > 0.05:
                body.append(
                    f'<rect class="bar c{index % 8}" x="{x(at) - width / 2:.1f}" y="{top:.1f}"'
                    f' width="{width:.1f}" height="{bottom - top:.1f}"/>'
                )
    return _figure(title, "".join(body)) + _key([s.name for s in series], "bar")


def _finite(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    return [(x, y) for x, y in points if abs(y) <= DRAWABLE]


def _bounded(value: float) -> float:
    """A bar's value: at least 0; what is not finite has no bar."""
    return min(max(value, 0.0), DRAWABLE) if math.isfinite(value) else 0.0


def _thinned(points: Sequence[tuple[float, float]]) -> Sequence[tuple[float, float]]:
    stride = max(1, math.ceil(len(points) / MAX_POINTS))
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


def _binned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    stride = max(1, math.ceil(len(points) / MAX_BARS))
    groups = [points[i : i + stride] for i in range(0, len(points), stride)]
    return [(sum(x for x, _ in g) / len(g), sum(y for _, y in g) / len(g)) for g in groups]


def _scales(x_low: float, x_high: float, y_ticks: list[float]) -> tuple[Scale, Scale]:
    if not x_high > x_low:
        x_low, x_high = x_low - 0.5, x_high + 0.5
    x = Scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    return x, Scale(y_ticks[0], y_ticks[-1], HEIGHT - BOTTOM, TOP)


def _axes(x: Scale, y: Scale, y_ticks: list[float], y_label: str) -> str:
    parts = []
    for tick in y_ticks:
        at = y(tick)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}"'
                     f' y2="{at:.1f}"/><text class="tick" x="{LEFT - 7}" y="{at + 5:.1f}"'
                     f' text-anchor="end">{tick:.4g}</text>')  # fmt: skip
    whole = [t for t in nice_ticks(x.low, x.high, 8) if t == int(t) and x.low <= t <= x.high]
    parts += [
        f'<text class="tick" x="{x(tick):.1f}" y="{HEIGHT - BOTTOM + 18}"'
        f' text-anchor="middle">{int(tick)}</text>'
        for tick in whole
    ]
    parts.append(f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 4}"'
                 f' text-anchor="middle">round</text>')  # fmt: skip
    parts.append(f'<text class="tick" transform="translate(15 {HEIGHT / 2 - 16}) rotate(-90)"'
                 f' text-anchor="middle">{escape(y_label)}</text>')  # fmt: skip
    return "".join(parts)


def _figure(title: str, body: str) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img"'
        f' aria-label="{escape(title)}"><title>{escape(title)}</title>{body}</svg>'
    )


def _key(names: Sequence[str], kind: str) -> str:
    items = "".join(
        f'<li><svg class="swatch" viewBox="0 0 22 10" aria-hidden="true">{_swatch(kind, i)}</svg>'
        f"{escape(name)}</li>"
        for i, name in enumerate(names)
    )
    return f'<ul class="key">{items}</ul>'


def _swatch(kind: str, index: int) -> str:
    if kind == "line":
        return f'<line class="line c{index % 8} dash{index % 4}" x1="0" x2="22" y1="5" y2="5"/>'
    return f'<rect class="bar c{index % 8}" x="4" y="0" width="14" height="10"/>'


def _empty(title: str) -> str:
    return f'<p class="empty">{escape(title)}: nothing was recorded.</p>'
