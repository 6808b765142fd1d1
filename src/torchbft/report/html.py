"""One self-contained page on a run: no network, styles and script inline, light and dark.

Everything a peer wrote (names, reasons, versions) is escaped, and a content policy in the page
forbids loading anything, so a liar cannot reach the reader's browser through its reasons.
"""

from __future__ import annotations

import statistics
from datetime import UTC, datetime
from html import escape
from importlib.resources import files

from torchbft import __version__
from torchbft.report.answers import cost, liars, paragraph, refusals, table, threshold
from torchbft.report.chart import Series, line_chart, stacked_bars
from torchbft.report.findings import Verdict
from torchbft.report.gather import AGREEMENT, Cell, RoundCost, RunView
from torchbft.report.words import LEGEND, look, percent, seconds, sentence, size

MAX_MATRIX_ROUNDS = 400
"""Columns of the matrix; the page of a longer run shows the last ones and says so."""
ROOMY_ROUNDS = 24
"""So few rounds get wider cells."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
MIB = 1024.0 * 1024.0


def render(view: RunView, verdict: Verdict | None = None) -> str:
    """The page as text. ``verdict`` is the offline verifier's, if it ran."""
    name = escape(_name(view))
    sections = (
        _tiles(view, verdict),
        _section("learning", "Learning on the agreed model", _learning(view)),
        _section("matrix", "Every contribution, every round", _matrix(view)),
        _section("costs", "Time and bytes per round", _costs(view)),
        _section(
            "threshold",
            "1. How many may lie, and what stops one peer from coming as many?",
            threshold(view, verdict),
        ),
        _section("added", "2. What does agreement add to an inner step?", cost(view)),
        _section(
            "refused",
            "3. How was a refused contribution told from a merely different one?",
            refusals(view, verdict),
        ),
        _section("facts", "About this run", _facts(view, verdict)),
    )
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name} – torchbft'
        '</title><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="color-scheme" content="light dark"><style>{_asset("report.css")}</style>'
        f"</head><body>{_head(view, name)}<main>{''.join(sections)}</main>"
        f"<script>{_asset('report.js')}</script></body></html>\n"
    )


def _asset(name: str) -> str:
    return files("torchbft.report").joinpath(name).read_text(encoding="utf-8")


def _section(anchor: str, title: str, body: str) -> str:
    return f'<section id="{anchor}"><h2>{escape(title)}</h2>{body}</section>'


def _name(view: RunView) -> str:
    return view.spec.name if view.spec else (view.started.name if view.started else "run")


def _head(view: RunView, name: str) -> str:
    started = view.started
    identity = started.run_id if started else (view.spec.run_id.hex() if view.spec else "")
    parts = [f"<code>{escape(identity[:16])}…</code>" if identity else ""]
    if started:
        parts += [
            f"{len(started.members)} peers",
            f"rule {escape(started.rule)}",
            f"codec {escape(started.codec)}",
            f"{started.parameters:,} parameters" if started.parameters else "",
            datetime.fromtimestamp(started.at, UTC).strftime("%Y-%m-%d %H:%M UTC"),
        ]
    facts = " · ".join(part for part in parts if part)
    return f'<header><p class="brand">torchbft report</p><h1>{name}</h1><p>{facts}</p></header>'


# Figures at a glance


def _tiles(view: RunView, verdict: Verdict | None) -> str:
    tiles = [_status_tile(view), *_quality_tiles(view), *_cost_tiles(view), _named_tile(view)]
    if verdict is not None:
        word = "proven" if verdict.ok else "FALSE"
        note = f"{sum(verdict.checked.values()):,} checks offline"
        tiles.append(_tile("log", word, note, bad=not verdict.ok))
    return f'<div class="tiles">{"".join(tile for tile in tiles if tile)}</div>'


def _tile(label: str, figure: str, note: str, *, bad: bool = False) -> str:
    return (
        f'<div class="tile{" alarm" if bad else ""}"><span>{escape(label)}</span>'
        f"<b>{escape(figure)}</b><small>{escape(note)}</small></div>"
    )


def _status_tile(view: RunView) -> str:
    end, rounds = view.end, view.rounds()
    void = sum(ended.void for ended in rounds)
    status = end.status if end else "unfinished"
    note = f"{len(rounds)} rounds" + (f", {void} void" if void else ", none void")
    if end and end.reason:
        note += f": {end.reason}"
    return _tile("run", status, note, bad=status == "halted")


def _quality_tiles(view: RunView) -> list[str]:
    latest = [p.evaluations[max(p.evaluations)] for p in view.peers.values() if p.evaluations]
    if not latest:
        return []
    right = [e.accuracy for e in latest if e.accuracy is not None]
    tiles = [_tile("loss", f"{statistics.median(e.loss for e in latest):.4f}", "agreed model")]
    if right:
        note = "agreed model, held-out data"
        if isinstance(reference := view.demo.get("reference_accuracy"), int | float):
            note += f"; {reference:.1f} % with a trusted mean and no liars"
        tiles.append(_tile("accuracy", percent(statistics.median(right)), note))
    return tiles


def _cost_tiles(view: RunView) -> list[str]:
    costs = view.measured()
    if not costs:
        return []
    per_step = statistics.median(each.seconds_per_step for each in costs)
    share = statistics.median(each.share for each in costs)
    volume = statistics.median(each.bytes_per_step for each in costs)
    return [
        _tile("agreement", seconds(per_step), f"per inner step, {percent(share)} of the time"),
        _tile("sent", size(volume), "per peer and inner step"),
    ]


def _named_tile(view: RunView) -> str:
    named = sorted({item.peer for item in view.accusations() if item.named})
    absent = {item.peer for item in view.accusations() if item.absent}
    suspected = {item.peer for item in view.accusations()} - set(named) - absent
    note = f"{len(suspected)} suspected" if suspected else "none suspected"
    note += f", {len(absent)} never connected" if absent else ""
    return _tile("named with evidence", ", ".join(named) or "nobody", note)


# Curves


def _learning(view: RunView) -> str:
    losses = _curves(view, "loss")
    accuracies = _curves(view, "accuracy")
    parts = [line_chart(losses, title="Loss on the agreed model per round", y_label="loss")]
    if accuracies:
        parts.append(
            line_chart(accuracies, title="Accuracy of the agreed model", y_label="accuracy, %")
        )
    figures = "".join(f"<figure>{part}</figure>" for part in parts)
    return _sameness(view) + f'<div class="pair">{figures}</div>'


def _curves(view: RunView, what: str) -> list[Series]:
    """One series per distinct curve: peers with equal values share a line and a label."""
    groups: dict[tuple[tuple[float, float], ...], list[str]] = {}
    for name, peer in sorted(view.peers.items()):
        points = tuple(
            (float(number), value * (100.0 if what == "accuracy" else 1.0))
            for number, record in sorted(peer.evaluations.items())
            if (value := getattr(record, what)) is not None
        )
        if points:
            groups.setdefault(points, []).append(name)
    return [
        Series(_crowd(names), points)
        for points, names in sorted(groups.items(), key=lambda item: -len(item[1]))
    ]


def _crowd(names: list[str]) -> str:
    if len(names) > 3:
        return f"{len(names)} peers: {names[0]} … {names[-1]}"
    return ", ".join(names)


def _sameness(view: RunView) -> str:
    """Whether the peers that finished hold the same model."""
    ended = view.agreed(view.last_round)
    if ended is None:
        return ""
    roots = {peer.rounds[ended.round].root for peer in view.peers.values()
             if ended.round in peer.rounds}  # fmt: skip
    told = sum(ended.round in peer.rounds for peer in view.peers.values())
    if len(roots) == 1:
        return paragraph(
            f"After round {ended.round} all {told} peers that recorded it hold the same model,"
            f" bit for bit: root <code>{escape(ended.root[:16])}…</code>."
        )
    return paragraph(
        f"<strong>{len(roots)} different roots</strong> were recorded after round {ended.round}."
    )


# The matrix


def _matrix(view: RunView) -> str:
    rounds = view.rounds()[-MAX_MATRIX_ROUNDS:]
    if not rounds:
        return paragraph("No round has been finished.")
    cells = view.matrix()
    head = "".join(
        f'<th scope="col" class="{"void" if r.void else ""}" data-tip="{escape(_round_tip(r))}">'
        f"{r.round if r.round % 5 == 0 else ''}<span class=sr>round {r.round}</span></th>"
        for r in rounds
    )
    body = "".join(
        f'<tr><th scope="row">{escape(name)}{_mark(view, name)}</th>'
        + "".join(_cell(name, r.round, cells[name].get(r.round)) for r in rounds)
        + "</tr>"
        for name in cells
    )
    cut = view.last_round + 1 - len(rounds)
    roomy = " roomy" if len(rounds) <= ROOMY_ROUNDS else ""
    note = paragraph(f"The first {cut} rounds are left out here.") if cut > 0 else ""
    return (
        paragraph(
            "One row a peer, one column a round. The bar in an accepted cell is the weight that"
            " the rule gave it; a full bar is an equal share. Point at a cell, or move to it with"
            " the arrow keys, for the reason."
        )
        + f'<div class="wide"><table class="matrix{roomy}"><thead><tr><td></td>{head}</tr></thead>'
        f'<tbody>{body}</tbody></table></div><p id="tip" class="tip" role="status">&nbsp;</p>'
        + _legend(view)
        + note
    )


def _round_tip(ended: object) -> str:
    void, number = getattr(ended, "void", False), getattr(ended, "round", 0)
    accepted, reason = getattr(ended, "accepted", ()), getattr(ended, "reason", "")
    return f"round {number}: void, {reason}" if void else f"round {number}: {len(accepted)} counted"


def _cell(name: str, number: int, cell: Cell | None) -> str:
    shown = look(cell)
    if cell is None:
        return '<td class="s-none"></td>'
    words = escape(f"{name}, round {number}: {sentence(cell)}", quote=True)
    fill = 1.0 if cell.relative is None else min(cell.relative, 1.0)
    inner = (
        f'<i style="height:{100 * fill:.0f}%"></i>' if cell.accepted else f"<b>{shown.glyph}</b>"
    )
    return (
        f'<td class="s-{shown.style}" tabindex="-1" data-tip="{words}">'
        f'{inner}<span class="sr">{escape(shown.label)}</span></td>'
    )


def _mark(view: RunView, name: str) -> str:
    return ' <span class="liar">liar (demo)</span>' if name in liars(view) else ""


def _legend(view: RunView) -> str:
    present = {look(cell).label for row in view.matrix().values() for cell in row.values()}
    items = "".join(
        f'<li><span class="s-{item.style} sample">'
        + ('<i style="height:100%"></i>' if item.style == "ok" else
           '<i style="height:30%"></i>' if item.label == "down-weighted" else
           f"<b>{item.glyph}</b>")
        + f"</span>{escape(item.label)}: {escape(item.meaning)}</li>"
        for item in LEGEND
        if item.label in present
    )  # fmt: skip
    return f'<ul class="key">{items}</ul>'


# Costs per round


def _costs(view: RunView) -> str:
    costs = view.costs()
    if not costs:
        return paragraph("No round has been finished.")
    names = [name for name in AGREEMENT if name in costs[-1].phases]
    phases = [_layer(name, costs, _milliseconds(name)) for name in names] or [
        _layer("consensus", costs, lambda c: 1e3 * (c.consensus or 0.0))
    ]
    rounds = [
        _layer("training", costs, lambda c: 1e3 * (c.train or 0.0)),
        _layer("waiting for the slowest", costs, lambda c: 1e3 * c.wait),
        _layer("agreement", costs, lambda c: 1e3 * (c.consensus or 0.0)),
    ]
    volume = [
        _layer("payloads", costs, lambda c: c.sent_payload / MIB),
        _layer("control", costs, lambda c: c.sent_control / MIB),
    ]
    charts = (
        stacked_bars(rounds, title="Training and agreement, ms per round", y_label="ms"),
        stacked_bars(phases, title="Agreement by phase, ms per round", y_label="ms"),
        stacked_bars(volume, title="Sent per peer and round, MiB", y_label="MiB"),
        stacked_bars(
            [_layer("blocks", costs, lambda c: c.blocks)],
            title="Blocks per round", y_label="blocks",
        ),
    )  # fmt: skip
    titles = ("Training and agreement", "Agreement by phase", "Bytes sent per peer", "Blocks")
    figures = "".join(
        f"<figure><figcaption>{title}</figcaption>{chart}</figure>"
        for title, chart in zip(titles, charts, strict=True)
    )
    return f'<div class="pair">{figures}</div>{_numbers(costs)}'


def _layer(name: str, costs: list[RoundCost], figure: object) -> Series:
    assert callable(figure)
    return Series(name, [(float(c.round), float(figure(c))) for c in costs])


def _milliseconds(name: str) -> object:
    return lambda c: 1e3 * c.phases.get(name, 0.0)


def _numbers(costs: list[RoundCost]) -> str:
    rows = [
        (
            str(c.round) + (" (void)" if c.void else ""),
            seconds(c.train),
            seconds(c.wait),
            seconds(c.consensus),
            percent(c.share) if c.consensus is not None else "–",
            size(c.sent_control),
            size(c.sent_payload),
            f"{c.blocks:g}",
        )
        for c in costs
    ]
    head = (
        "round",
        "training",
        "waiting",
        "agreement",
        "share",
        "control sent",
        "payload sent",
        "blocks",
    )
    return f"<details><summary>The same as a table</summary>{table(head, rows)}</details>"


# Facts


def _facts(view: RunView, verdict: Verdict | None) -> str:
    parts = []
    if started := view.started:
        rows = [
            ("inner steps per round (H)", str(started.inner_steps)),
            ("batch size", str(started.batch_size)),
            ("ledger engine", escape(started.engine)),
            ("payloads", "encrypted" if started.encrypted else "in clear (public data)"),
            ("machine", escape(started.machine)),
            *((escape(name), escape(v)) for name, v in sorted(started.versions.items())),
        ]
        parts.append(table(("", "value"), rows, caption="As the peers recorded it"))
    if view.demo:
        plain = {k: v for k, v in view.demo.items() if isinstance(v, str | int | float | list)}
        shown = [(escape(key), escape(_short(value))) for key, value in plain.items()]
        parts.append(table(("demo", "value"), shown, caption="What the demo knows and measured"))
    if verdict is not None:
        rows = [(escape(name), f"{count:,}") for name, count in verdict.checked.items()]
        parts.append(table(("verified offline", "count"), rows))
        problems = [(escape(p.where), escape(p.what)) for p in verdict.problems]
        parts.append(table(("problem in", "what"), problems) if problems else "")
    parts.append(
        paragraph(
            f'<span class="note">torchbft {escape(__version__)}. Times, bytes and curves come'
            " from the peers' own traces, which prove nothing; what counted and why is on the"
            " signed ledger, which <code>torchbft verify</code> checks offline.</span>"
        )
    )
    return "".join(parts)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    return text if len(text) <= 200 else text[:199] + "…"
