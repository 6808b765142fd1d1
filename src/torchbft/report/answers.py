"""The three questions a reader asks of such a run, answered from its trace and run file.

1. Who may be wrong, and what keeps somebody from coming seven times? 2. What does agreement cost
per inner step? 3. How was a refused contribution told from one that was merely different?
Each answer is HTML; every word that a peer wrote passes ``escape``.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape

from torchbft.primitives.errors import PreconditionError
from torchbft.primitives.faults import FaultModel
from torchbft.report.findings import Verdict
from torchbft.report.gather import AGREEMENT, VOID, Cell, RoundCost, RunView
from torchbft.report.words import PHASES, PROOF, accusation, look, percent, seconds, size, span
from torchbft.tensors.aggregation import describe


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, caption: str = "") -> str:
    """An HTML table of ready HTML cells; the first of each row is its header."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "".join(
        f'<tr><th scope="row">{row[0]}</th>' + "".join(f"<td>{c}</td>" for c in row[1:]) + "</tr>"
        for row in rows
    )
    words = f"<caption>{escape(caption)}</caption>" if caption else ""
    return (
        f'<div class="wide"><table>{words}<thead><tr>{top}</tr></thead>'
        f"<tbody>{body}</tbody></table></div>"
    )


def paragraph(*sentences: str) -> str:
    """A paragraph of ready HTML."""
    return f"<p>{' '.join(sentence for sentence in sentences if sentence)}</p>"


# Question 1: threshold and admission


def threshold(view: RunView, verdict: Verdict | None) -> str:
    """The Byzantine threshold, and how it is enforced against Sybils."""
    started = view.started
    if view.spec:
        contributors, votes = view.spec.contributor_faults, view.spec.validator_faults
    elif started:
        contributors = FaultModel(started.contributors, started.f)
        votes = FaultModel(started.validators)
    else:
        return paragraph("No peer recorded the start of the run.")
    return (
        _arithmetic(contributors, votes)
        + _margins(view, contributors)
        + _admission(view)
        + _proven(verdict, votes)
    )


def _arithmetic(contributors: FaultModel, votes: FaultModel) -> str:
    common = 2 * votes.quorum - votes.n
    return paragraph(
        f"<strong>{votes.n} votes, of which at most f = ⌊({votes.n} − 1)/3⌋ = {votes.f} may be"
        f" Byzantine; every decision needs n − f = {votes.quorum}.</strong>",
        f"Two quorums share at least {common} votes, more than f = {votes.f}, so an honest one"
        " stands in both and no two decisions can conflict."
        if votes.f
        else "With f = 0 every member is needed: one that is down stops the run.",
        f"The aggregation rule withstands {contributors.f} of {contributors.n} contributors, and"
        f" a round counts with at least {contributors.quorum} contributions unless the run file"
        " says otherwise.",
    )


def _margins(view: RunView, faults: FaultModel) -> str:
    counts = [len(ended.accepted) for ended in view.rounds() if not ended.void]
    if not counts:
        return paragraph("No round has been finished.")
    void = sum(ended.void for ended in view.rounds())
    return paragraph(
        f"Measured: {len(counts)} rounds counted, {void} void. The fewest contributions in"
        f" a round were {min(counts)} (margin {min(counts) - faults.quorum:+d} over"
        f" {faults.quorum}), the median {statistics.median(counts):g} of {faults.n}."
    )


def _admission(view: RunView) -> str:
    spec = view.spec
    if spec is None:
        return paragraph("The run file is not in this folder, so admission cannot be checked.")
    signed, need = spec.countersigned_by(), FaultModel(len(spec.members)).quorum
    state = "enough" if len(signed) >= need else "<strong>too few</strong>"
    equal = {member.power for member in spec.members} == {1}
    rows = [
        (
            escape(member.name),
            f"<code>{member.identity[:16]}…</code>",
            str(member.power) if member.validator else "–",
            "one seat" if member.contributor else "–",
            "signed" if member.name in signed else "not signed",
        )
        for member in spec.members
    ]
    return paragraph(
        "<strong>Against Sybils, seats are counted, not connections.</strong>",
        "The roster is part of the run file, whose digest is the run's identity: a peer whose key"
        " is not in it gets no channel, no vote and no place in the rule. To add a seat, n − f"
        " members must countersign the new roster, so f liars cannot admit their own copies.",
        f"Here {len(signed)} of {len(spec.members)} members signed it ({need} needed: {state}).",
        "Each seat has one vote." if equal else "Votes are weighted as in the table.",
        "A vote or statement signed twice for one slot convicts its key, so one key is worth"
        " one voice. What this does not give: whether two keys belong to one owner is for the"
        " members to judge when they sign.",
    ) + table(("member", "identity key", "votes", "contributes", "run file"), rows)


def _proven(verdict: Verdict | None, votes: FaultModel) -> str:
    if verdict is None:
        return ""
    counted = ", ".join(f"{count} {escape(name)}" for name, count in verdict.checked.items())
    if verdict.ok:
        return paragraph(
            f"The offline verifier read all logs again and found each block's certificate to"
            f" hold valid signatures of at least {votes.quorum} of {votes.n} votes ({counted})."
        )
    problem = verdict.problems[0]
    return paragraph(
        "<strong>The offline verifier found a fault</strong> in"
        f" {escape(problem.where)}: {escape(problem.what)}."
    )


# Question 2: what agreement costs per inner step


def cost(view: RunView) -> str:
    """Latency and communication that consensus adds per inner step, absolute and as a share."""
    costs = view.measured()
    if not costs:
        return paragraph("No peer lived through a whole round, so nothing was measured.")
    steps = costs[0].steps
    typical = statistics.median(each.seconds_per_step for each in costs)
    share = statistics.median(each.share for each in costs)
    volume = statistics.median(each.bytes_per_step for each in costs)
    control = _ratio(sum(c.sent_control for c in costs), sum(c.sent_payload for c in costs))
    return (
        paragraph(
            f"<strong>Agreement adds {seconds(typical)} per inner step, {percent(share)} of a"
            f" round's time, and {size(volume)} sent per peer and inner step.</strong>",
            f"A round has H = {steps} inner steps and agrees once; all figures are divided by H.",
            f"Of the bytes, {percent(control)} are the agreement itself (control channel: votes,"
            " commitments, attestations); the rest are the contributions, which any exchange"
            " without a server must send to the others.",
        )
        + _cost_table(costs)
        + _phase_table(costs)
        + paragraph(
            '<span class="note">Time is a peer\'s own clock, median over peers, and covers'
            " everything from the last commitment that counted to the signed root: ledger,"
            " payloads, aggregation. Waiting for the slowest member to finish training, as any"
            " synchronous training must, stands apart. Void rounds are left out. Bytes are"
            " counted at the socket.</span>"
        )
    )


def _ratio(part: float, rest: float) -> float:
    return part / (part + rest) if part + rest else 0.0


def _cost_table(costs: list[RoundCost]) -> str:
    rows: list[tuple[str, Callable[[RoundCost], float], Callable[[float], str]]] = [
        ("agreement, time per inner step", lambda c: c.seconds_per_step, seconds),
        ("agreement, time per round", lambda c: c.consensus or 0.0, seconds),
        ("training, time per round", lambda c: c.train or 0.0, seconds),
        ("waiting for the slowest member to train", lambda c: c.wait, seconds),
        ("agreement, share of the round's time", lambda c: c.share, percent),
        ("control bytes sent per inner step", lambda c: c.sent_control / c.steps, size),
        ("payload bytes sent per inner step", lambda c: c.sent_payload / c.steps, size),
        ("control, share of bytes", lambda c: _ratio(c.sent_control, c.sent_payload), percent),
        ("size of one contribution", lambda c: c.payload, size),
        ("blocks per round", lambda c: c.blocks, lambda value: f"{value:g}"),
    ]
    return table(
        ("per peer", "median", "95th percentile", "largest"),
        [(name, *_spread([figure(c) for c in costs], show)) for name, figure, show in rows],
    )


def _spread(values: list[float], show: Callable[[float], str]) -> tuple[str, str, str]:
    ordered = sorted(values)
    high = ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
    return show(statistics.median(ordered)), show(high), show(ordered[-1])


def _phase_table(costs: list[RoundCost]) -> str:
    names = [name for name in AGREEMENT if name in costs[-1].phases]
    if not names:
        return ""
    whole = sum(sum(c.phases.get(n, 0.0) for n in names) for c in costs) or 1.0
    rows = [
        (
            escape(name),
            escape(PHASES[name]),
            seconds(statistics.median(c.phases.get(name, 0.0) for c in costs)),
            seconds(statistics.median(c.phases.get(name, 0.0) / c.steps for c in costs)),
            percent(sum(c.phases.get(name, 0.0) for c in costs) / whole),
        )
        for name in names
    ]
    head = ("phase", "what happens", "per round", "per inner step", "share of agreement")
    return table(head, rows)


# Question 3: refused, or merely different


def refusals(view: RunView, verdict: Verdict | None = None) -> str:
    """How each refused contribution was told from a merely different one."""
    return _refused(view, _details(verdict)) + _weights(view) + _rule(view) + _accused(view)


_Details = dict[tuple[str, int], str]


def _details(verdict: Verdict | None) -> _Details:
    """What the verifier found in malformed payloads, by peer and round."""
    rounds = verdict.rounds if verdict else ()
    return {(r.peer, told.round): r.detail for told in rounds for r in told.results if r.detail}


def _refused(view: RunView, details: _Details) -> str:
    groups: dict[tuple[str, str, str], list[tuple[int, Cell]]] = {}
    for name, row in view.matrix().items():
        for number, cell in row.items():
            if not cell.accepted and cell.outcome != VOID:
                groups.setdefault((name, cell.outcome, cell.evidence), []).append((number, cell))
    if not groups:
        return paragraph(
            "<strong>No contribution was refused:</strong> each was committed in time, opened its"
            " own commitment and decoded to finite numbers. Nobody can prove such a one wrong; it"
            " can only be weighed."
        )
    rows = [_refused_row(view, key, cells, details) for key, cells in sorted(groups.items())]
    count = sum(len(cells) for cells in groups.values())
    return paragraph(
        f"<strong>{count} contributions were refused.</strong> None for being different: one that"
        " was committed in time, opens its own commitment and decodes to finite numbers is always"
        " accepted, however far it lies from the others; the rule may then give it little weight"
        " or none. What set the refused ones apart:"
    ) + table(("peer", "outcome", "rounds", "what was seen", "how it was told apart"), rows)


def _refused_row(
    view: RunView, key: tuple[str, str, str], cells: list[tuple[int, Cell]], details: _Details
) -> tuple[str, ...]:
    name, _, evidence = key
    shown = look(cells[0][1])
    found = [details.get((name, number), cell.reason) for number, cell in cells]
    reasons = [reason for reason in dict.fromkeys(found) if reason]
    numbers = tuple(number for number, _ in cells)
    kind = f"<strong>{escape(evidence or 'no proof')}</strong>: "
    return (
        escape(name) + _truth(view, name),
        escape(shown.label),
        f"{len(numbers)} ({escape(span(numbers))})",
        escape("; ".join([shown.meaning, *reasons[:3]])),
        kind + escape(PROOF.get(evidence, evidence)),
    )


def _weights(view: RunView) -> str:
    """Accepted contributions: the share that the rule gave each, against an equal share."""
    rows = []
    for name, row in view.matrix().items():
        known = [cell for cell in row.values() if cell.accepted and cell.relative is not None]
        if known:
            shares = [cell.relative or 0.0 for cell in known]
            low = sum(cell.down_weighted for cell in known)
            rows.append((
                escape(name) + _truth(view, name),
                f"{statistics.fmean(shares):.2f} {_meter(statistics.fmean(shares))}",
                f"{min(shares):.2f}",
                f"{low} of {len(known)}",
            ))  # fmt: skip
    if not rows:
        return ""
    return paragraph(
        f"<strong>Accepted, but how much did it count? {_lightest(view)}</strong> The rule weighs"
        " contributions by how they stand to the others; 1 is an equal voice, 0 none. A low weight"
        " is not an accusation: honest peers with unusual data are weighted down too, and the trace"
        " names nobody for it."
    ) + table(("peer", "mean weight", "least", "rounds below half an equal share"), rows)


def _lightest(view: RunView) -> str:
    """Whose contributions hardly counted, in a sentence."""
    low = {
        name: sum(cell.down_weighted for cell in row.values())
        for name, row in view.matrix().items()
    }
    told = ", ".join(f"{escape(name)} in {count}" for name, count in low.items() if count)
    rounds = sum(not ended.void for ended in view.rounds())
    return f"Of {rounds} rounds, less than half an equal share: {told or 'nobody in any'}."


def _rule(view: RunView) -> str:
    """How the run's rule sets apart what differs: the first sentence on each of its parts."""
    name = view.spec.aggregation.rule if view.spec else (view.started.rule if view.started else "")
    try:
        parts = [describe(part.partition("(")[0]) for part in name.split("+")]
    except PreconditionError:
        return ""
    told = "".join(
        f"<li><code>{escape(part.name)}</code>: {escape(part.text.split(chr(10))[0])}</li>"
        for part in parts
    )
    return (
        paragraph(f"The rule of this run, <code>{escape(name)}</code>, in the order of its parts:")
        + f"<ul>{told}</ul>"
    )


def _meter(share: float) -> str:
    width = max(0.0, min(share, 2.0)) * 50
    return f'<span class="meter" aria-hidden="true"><i style="width:{width:.0f}%"></i></span>'


def _accused(view: RunView) -> str:
    found = view.accusations()
    if not found:
        return paragraph("Nobody was accused of anything.")
    rows = [
        (
            escape(item.peer) + _truth(view, item.peer),
            "<strong>named</strong>" if item.named else accusation(item)[0],
            escape(item.fault),
            escape(span(item.rounds)),
            escape("never connected" if item.absent else item.reason),
            str(len(item.accusers)),
        )
        for item in found
    ]
    return paragraph(
        "<strong>Accused.</strong> <em>Named</em> needs evidence that a third party can check;"
        " <em>suspected</em> is an omission or statistics, which honest peers have as well;"
        " <em>absent</em> is one to which nobody was ever connected."
    ) + table(("peer", "", "fault", "rounds", "why", "traces that say so"), rows)


def liars(view: RunView) -> tuple[str, ...]:
    """The demo's own knowledge of who attacked; empty for a real run. Never used to judge."""
    found = view.demo.get("liars", ())
    return tuple(str(name) for name in found) if isinstance(found, list | tuple) else ()


def _truth(view: RunView, name: str) -> str:
    return ' <span class="liar">liar (demo)</span>' if name in liars(view) else ""
