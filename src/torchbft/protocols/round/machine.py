"""The sending side of a round, sans I/O: what one peer signs, asks for and waits for.

Source: ROUND.md; numbers in comments are its sentences. The ledger decides, through the pure
reader; this machine only answers three questions, from the committed state and what it saw itself:
what may I sign now, what am I missing, and when do I stop waiting. Every input leads to the same
``_reconcile``, so a restart needs no special path: own statements come back from the log
``statements``, the rest is seen again.

Properties: one statement per slot for ever; persisted before it is submitted, resent as the same
bytes until final or too late; an opening leaves only after the block that closed the commitment
window is final; two roots of one round are never signed; every wait has a deadline that fires
without any message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from torchbft.primitives.effects import Broadcast, Effect, Received, Tick
from torchbft.primitives.errors import MisuseError
from torchbft.primitives.evidence import Evidence, Fault
from torchbft.primitives.faults import FaultModel
from torchbft.primitives.ids import PeerId
from torchbft.primitives.ids import Round as RoundNumber
from torchbft.primitives.keys import KeyRing, SigningKey
from torchbft.primitives.runspec import Timing
from torchbft.primitives.wire import WIRE_VERSION
from torchbft.protocols.round import accusations as told
from torchbft.protocols.round import messages as m
from torchbft.protocols.round.application import Application
from torchbft.protocols.round.deadlines import Deadlines
from torchbft.protocols.round.events import (
    Convicted,
    Event,
    RootSigned,
    RoundFixed,
    RoundVoid,
)
from torchbft.protocols.round.interface import (
    Accuse,
    Advance,
    CatchUp,
    Diverged,
    DropRound,
    Finished,
    Found,
    Halt,
    Heard,
    Input,
    KeyAdded,
    LedgerAdvanced,
    OfferPayload,
    PayloadRefused,
    PayloadStored,
    PreferVoid,
    RootAgreed,
    StartTraining,
    StateAdvanced,
    Trained,
    Waiting,
    Want,
)
from torchbft.protocols.round.outcomes import holders
from torchbft.protocols.round.questions import awaits, fetch, is_at, need
from torchbft.protocols.round.roots import RootVotes, read_vote
from torchbft.protocols.round.sightings import Sightings
from torchbft.protocols.round.state import (
    Accepted,
    LedgerState,
    Phase,
    RoundState,
    Seat,
    SignedRoot,
    Verdict,
    committed,
    fits,
    opening_of,
)
from torchbft.protocols.round.statements import Statements
from torchbft.protocols.round.wishes import Wishes

RESEND_SECONDS = 1.0
"""A submission or root vote is repeated so often: above a block's time, below any time-out."""

NOTICE_SECONDS = 3.0
"""A wait is reported after this long, so that people read it within five seconds."""

CERTIFICATE_HOLD = 5.0
"""The last root's certificate rides in the block of the next commitments, but waits no longer."""

CERTIFICATE_TURN = 0.2
"""Seconds until the next signer in turn submits the certificate as well; a second one is refused
when it comes too late, and costs little when it does not."""

PATIENCE = 4.0
"""Time-outs that a window may last beyond an own final closing until the run halts, if a quorum
closed and yet too few closings count: more than f list what they do not pass on."""

LEAST_PATIENCE = 20.0
"""Seconds at least, where closings of more than f power list what never comes: nothing heals it."""

SILENCE = 600.0
"""Seconds without a quorum of closings, attestations or root votes until the run halts. Silence
looks like a network partition, and that may heal; contradictions halt sooner."""

MAX_VOID_STREAK = 5
"""Void rounds in a row until the run halts: time-outs have grown 16-fold by then."""


@dataclass(frozen=True, slots=True)
class RoundConfig:
    """What one peer's machine is told at its start."""

    me: PeerId
    timing: Timing = field(default_factory=Timing)
    guard_log: bool = True
    """Halt when the ledger holds a statement of this peer that its log does not. Only adversaries,
    whose statements differ from their log on purpose, turn this off."""


@dataclass(slots=True)
class _Span:
    """The phase that the ledger is in, as this peer lives it."""

    number: int
    phase: str
    since: float | None
    notice_at: float
    notice_gap: float = NOTICE_SECONDS
    """Doubles with each notice."""


class RoundMachine:
    """``handle(input, now) -> effects``; ``deadline()`` is when to call with ``Tick`` at last.

    ``secret`` is 32 secret bytes from which salts and shares derive. ``application`` is the peer's
    own, already replayed; it is only read. ``records`` is the log ``statements``.
    """

    def __init__(
        self,
        config: RoundConfig,
        key: SigningKey | KeyRing,
        secret: bytes,
        application: Application,
        records: Sequence[bytes] = (),
    ) -> None:
        if len(secret) != 32:
            raise MisuseError("a peer's secret seed is 32 bytes", where="RoundMachine")
        self._me, self._secret, self._application = config.me, secret, application
        self._keys = KeyRing.of(key)
        self._own = Statements(config.me, self._keys, records, application, RESEND_SECONDS)
        self._wishes = Wishes(self._own)
        self._checked: LedgerState | None = None
        self._guard_log = config.guard_log
        self._deadlines = Deadlines(config.timing)
        self._span: _Span | None = None
        self._wake: float | None = None
        self._over = False
        self._seen = Sightings()
        self._found: dict[str, Evidence] = {}
        self._asked: set[tuple[str, int, str]] = set()
        self._applied: StateAdvanced | None = None
        self._copied: int | None = None
        self._basis: dict[int, SignedRoot | None] = {}
        self._votes: RootVotes | None = None
        self._votes_since = 0.0
        self._vote_sent: float | None = None
        self._agreed: tuple[SignedRoot, float] | None = None
        self._early_votes: dict[str, m.Parsed] = {}

    # --- entry ----------------------------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        """Take up where the log and the ledger stand."""
        state = self._application.state
        effects = []
        for evidence in self._own.accusing():
            self._found.setdefault(evidence.accused, evidence)
        for known in (state.previous, state.current):
            said = known and self._own.statement(known.number, "open")
            if isinstance(said, m.Opening):
                self._note_own(said, now)
                effects += self._own.make(self._commitment(said, state))
        return [*effects, *self._reconcile(now)]

    def handle(self, event: Input, now: float) -> list[Effect]:
        """Take one input. Effects are to be carried out in order."""
        if self._over or (isinstance(event, Heard) and not self._hear(event.tx, now)):
            return []
        return [*self._absorb(event, now), *self._reconcile(now)]

    def deadline(self) -> float | None:
        """When to call ``handle(Tick(), ...)`` if nothing else comes before."""
        return None if self._over else self._wake

    def last_arrival(self, number: int, kind: str) -> float | None:
        """When the newest item of a kind came in a round; None before the first."""
        return max(self._seen.arrivals(number, kind, 0.0), default=None)

    def _absorb(self, event: Input, now: float) -> list[Effect]:
        match event:
            case LedgerAdvanced():
                self._seen.note_ledger(self._application.state, now)
                return [effect for told in event.events for effect in self._told(told)]
            case Trained():
                return self._trained(event, now)
            case PayloadStored() | PayloadRefused():
                self._seen.note_payload(event, now)
            case StateAdvanced():
                self._applied = event
            case Found():
                self._found.setdefault(event.evidence.accused, event.evidence)
            case Received():
                return self._received(event, now)
            case PreferVoid():
                return self._own.make(m.VoidVote(*self._head(event.round), event.reason[:120]))
            case Want():
                self._wishes.replace(event.changes)
            case KeyAdded():
                self._keys.add(event.key)
            case Heard() | Tick():
                pass
        return []

    def _hear(self, tx: bytes, now: float) -> bool:
        """Hold an item of another author. Whether anything may be due that was not: only with the
        first of its kind, since blocks, not items, move a round on."""
        if self._application.unwelcome(tx) is not None:
            return False
        parsed = m.parse(tx)
        number, kind = parsed.statement.round, parsed.slot
        first = self.last_arrival(number, kind) is None
        self._seen.note_item(parsed, tx, now)
        return first

    def _reconcile(self, now: float) -> list[Effect]:
        """Do all that the state and the facts at hand allow; note when to look again."""
        state = self._application.state
        self._wake = None
        self._follow(state, now)
        effects: list[Effect] = []
        for step in (
            self._check_run,
            self._be_ready,
            self._report,
            self._wish,
            self._follow_roots,
            self._advance,
            self._train,
            self._close,
            self._offer,
            self._attest,
            self._stalled,
            self._notice,
            self._finish,
        ):
            if self._over:
                return effects
            effects += step(state, now)
        due, again = self._own.due(now)
        self._wake_at(again)
        return [*effects, *due]

    def _wake_at(self, at: float | None) -> None:
        if at is not None:
            self._wake = at if self._wake is None else min(self._wake, at)

    def _once(self, what: str, number: int, detail: str = "") -> bool:
        """Whether this is the first time since the start that this is asked for."""
        if (what, number, detail) in self._asked:
            return False
        self._asked.add((what, number, detail))
        return True

    def _halt(self, reason: str) -> list[Effect]:
        self._over = True
        return [Halt(reason)]

    def _head(self, number: int) -> tuple[int, bytes, int, int, str]:
        state = self._application.state
        known = state.round_of(number)
        epoch = known.epoch if known is not None else state.epoch
        return (WIRE_VERSION, state.genesis.run_id, epoch, number, self._me)

    def _validates(self, current: RoundState) -> bool:
        seat = current.seat(self._me)
        return seat is not None and seat.validator

    # --- following the ledger ---------------------------------------------------------------------

    def _told(self, event: Event) -> list[Effect]:
        if isinstance(event, RoundFixed):
            self._deadlines.round_ended(void=False)
            return told.accusations(event)
        if isinstance(event, RoundVoid):
            self._deadlines.round_ended(void=True)
            undone = self._applied is not None and self._applied.round == event.round
            self._applied = None if undone else self._applied
            return [DropRound(event.round, event.reason), *told.accusations(event)]
        if isinstance(event, RootSigned):
            return [RootAgreed(event.round, event.root, on_ledger=True)]
        return [told.conviction(event)] if isinstance(event, Convicted) else []

    def _follow(self, state: LedgerState, now: float) -> None:
        """Notice a new phase; its time-out starts when this peer can do its part."""
        span, current = self._span, state.current
        if span is None or (span.number, span.phase) != (current.number, state.phase):
            if span is not None:
                self._measure(span, now)
            self._span = span = _Span(current.number, state.phase, None, now + NOTICE_SECONDS)
            self._forget(current.number)
        waits_for_root = state.phase == Phase.COMMIT and state.unsigned is not None
        if span.since is None and not (waits_for_root and self._agreed_root(state) is None):
            span.since = now

    def _forget(self, current: int) -> None:
        self._own.forget(current)
        self._seen.forget(current - 1)
        self._asked = {k for k in self._asked if k[1] >= current - 1}
        self._basis = {k: v for k, v in self._basis.items() if k >= current - 1}

    def _measure(self, span: _Span, now: float) -> None:
        kind = _MEASURED.get(Phase(span.phase))
        known = self._application.state.round_of(span.number)
        if kind is None or span.since is None or known is None or known.verdict == Verdict.VOID:
            return
        name = "attest" if kind == "payload" else kind
        arrivals = self._seen.arrivals(span.number, kind, span.since)
        self._deadlines.observe(name, arrivals, need(known), now - span.since)

    # --- the steps --------------------------------------------------------------------------------

    def _check_run(self, state: LedgerState, now: float) -> list[Effect]:
        if state is self._checked:
            return []
        self._checked = state
        foreign = self._own.foreign() if self._guard_log else None
        if foreign is not None:
            return self._halt(
                f"the ledger holds a statement of {self._me} that its log does not ({foreign}): "
                "the log was lost, or the key is used twice; rotate the key by vote"
            )
        beyond = told.too_many_convicts(state)
        if beyond is not None:
            return self._halt(beyond)
        if state.void_streak >= MAX_VOID_STREAK:
            return self._halt(
                f"{state.void_streak} rounds in a row are void; the last: "
                f"{(state.previous or state.current).reason}"
            )
        here = len(state.current.contributors)
        if state.phase not in (Phase.READY, Phase.FINISHED) and here < state.current.m_min:
            return self._halt(
                f"{here} contributors are left where {state.current.m_min} are needed"
            )
        return []

    def _be_ready(self, state: LedgerState, now: float) -> list[Effect]:
        if state.phase != Phase.READY or not self._validates(state.current):
            return []
        return self._own.make(m.Ready(*self._head(state.current.number)))

    def _report(self, state: LedgerState, now: float) -> list[Effect]:
        """Put evidence on the ledger, anew in each round until the accused is convicted."""
        effects: list[Effect] = []
        for accused, evidence in list(self._found.items()):
            member, number = state.member(accused), state.current.number
            if member is None or member.convicted or self._application.doubts(evidence):
                del self._found[accused]
            elif state.phase != Phase.FINISHED:
                effects += self._own.make(m.EvidenceTx(*self._head(number), evidence))
        return effects

    def _wish(self, state: LedgerState, now: float) -> list[Effect]:
        return self._wishes.due(state, self._head(state.current.number))

    def _train(self, state: LedgerState, now: float) -> list[Effect]:
        """Train from the newest signed root, never from another."""
        current, applied = state.current, self._applied
        seat = current.seat(self._me)
        if state.phase != Phase.COMMIT or seat is None or not seat.contributor or applied is None:
            return []
        if self._own.own(current.number, "commit") is not None:
            return []
        signed = self._newest_root(state)
        waits = state.unsigned is not None and self._agreed_root(state) is None
        if waits or not is_at(applied, signed) or not self._once("train", current.number):
            return []
        share = dict(current.shares).get(self._me, ())
        return [StartTraining(RoundNumber(current.number), share, applied.root)]

    def _trained(self, event: Trained, now: float) -> list[Effect]:
        """Sign opening and commitment together: a restart must find both, or neither."""
        state = self._application.state
        known = state.round_of(event.round)
        seat = known.seat(self._me) if known is not None else None
        if seat is None or not seat.contributor or self._own.own(event.round, "open") is not None:
            return []
        opening = self._opening(event, state)
        self._note_own(opening, now)
        return [*self._own.make(opening), *self._own.make(self._commitment(opening, state))]

    def _note_own(self, opening: m.Opening, now: float) -> None:
        number = RoundNumber(opening.round)
        self._seen.note(number, "commit", self._me, now)
        self._seen.note_payload(PayloadStored(number, self._me, opening.payload_root), now)

    def _prf(self, purpose: str, number: int) -> bytes:
        return m.secret_for(self._secret, purpose, self._application.state.genesis.run_id, number)

    def _opening(self, event: Trained, state: LedgerState) -> m.Opening:
        number = event.round
        share = m.share_commit(
            m.beacon_hash(self._prf("beacon", number)), m.audit_hash(self._prf("audit", number))
        )
        before = state.round_of(number - 1)
        bound = before is not None and fits(before, self._me)
        return m.Opening(
            *self._head(number),
            self._prf("salt", number),
            event.payload_length,
            event.payload_root,
            event.trace_root,
            share,
            self._prf("beacon", number - 1) if bound else b"",
            m.audit_hash(self._prf("audit", number - 1)) if bound else b"",
        )

    def _commitment(self, opening: m.Opening, state: LedgerState) -> m.Commitment:
        """Commits to the opening, and opens the audit secret of the round just settled (15)."""
        number = opening.round
        before = state.round_of(number - 1)
        said = opening_of(before, self._me) if before is not None else None
        audited = said is not None and said.audit_hash
        secret = self._prf("audit", number - 2) if audited else b""
        return m.Commitment(*self._head(number), m.commitment_digest(opening), secret)

    def _close(self, state: LedgerState, now: float) -> list[Effect]:
        """At the own time-out, list the items held and pass them on (6)."""
        kind, span, current = _KIND_OF.get(Phase(state.phase)), self._span, state.current
        if kind is None or span is None or span.since is None or not self._validates(current):
            return []
        if self._own.own(current.number, f"close-{kind}") is not None:
            return []
        at = self._closes_at(current, kind, span.since)
        if now < at:
            self._wake_at(at)
            return []
        effects: list[Effect] = []
        listed = set()
        for index, seat in enumerate(current.seats):
            held = self._held_item(state, kind, seat)
            if held is not None:
                listed.add(index)
                effects += self._own.relay(held) if held else []
        bits = m.seat_map(listed, len(current.seats))
        closing = m.Closing(*self._head(current.number), kind, bits)
        return [*effects, *self._own.make(closing)]

    def _closes_at(self, current: RoundState, kind: str, since: float) -> float:
        arrivals = self._seen.arrivals(current.number, kind, since)
        return since + self._deadlines.timeout(kind, arrivals=arrivals, need=need(current))

    def _held_item(self, state: LedgerState, kind: str, seat: Seat) -> bytes | None:
        """The author's item that is still to be passed on; empty if it needs none; else None."""
        slot = state.current.slot(kind, seat.name)
        if slot is not None and not slot.late:
            return b""
        if seat.name == self._me and self._own.own(state.current.number, kind) is not None:
            return b""
        for tx in self._seen.items(state.current.number, kind, seat.name):
            if self._application.refusal(tx) is None:
                return tx
        return None

    def _offer(self, state: LedgerState, now: float) -> list[Effect]:
        current = state.current
        if state.phase not in (Phase.OPEN, Phase.ATTEST) or self._me not in committed(current):
            return []
        said = self._own.statement(current.number, "open")
        if not isinstance(said, m.Opening) or not self._once("offer", said.round):
            return []
        return [OfferPayload(RoundNumber(said.round), said.payload_root, said.payload_length)]

    def _attest(self, state: LedgerState, now: float) -> list[Effect]:
        """Fetch what is missing; attest once all that is waited for is here, or at the time-out
        (10). A member that is not waited for costs no time-out by withholding its payload, unless
        the round would be void without it."""
        current, span = state.current, self._span
        if state.phase != Phase.ATTEST or span is None or span.since is None:
            return []
        lacking = [item for item in current.opened if not self._seen.decided(current.number, item)]
        others = tuple(PeerId(seat.name) for seat in current.seats if seat.name != self._me)
        effects: list[Effect] = [
            fetch(current.number, item, others)
            for item in lacking
            if self._once("fetch", current.number, item.author)
        ]
        if not self._validates(current) or self._own.own(current.number, "attest") is not None:
            return effects
        at = span.since + self._attest_timeout(current, span.since)
        if now < at and (awaits(current, lacking) or self._too_few(current, lacking)):
            self._wake_at(at)
            return effects
        opened = {item.author: item for item in current.opened}
        statuses = bytes(
            self._seen.status(current.number, opened.get(seat.name)) for seat in current.seats
        )
        return [*effects, *self._own.make(m.Attestation(*self._head(current.number), statuses))]

    def _too_few(self, current: RoundState, lacking: Sequence[Accepted]) -> bool:
        held = sum(self._seen.stored(current.number, item) for item in current.opened)
        return bool(lacking) and held < current.m_min

    def _attest_timeout(self, current: RoundState, since: float) -> float:
        # What a refused payload's opening claims moves no bytes, and stretches no time-out.
        status, number = self._seen.status, current.number
        moved = [i for i in current.opened if status(number, i) != m.Status.MALFORMED]
        return self._deadlines.timeout(
            "attest",
            size=sum(item.payload_length for item in moved),
            arrivals=self._seen.arrivals(current.number, "payload", since),
            need=need(current),
        )

    def _stalled(self, state: LedgerState, now: float) -> list[Effect]:
        """Halt when more than f validators do not do their part, and say what is missing."""
        current, span = state.current, self._span
        slot = _LAST_WORD.get(Phase(state.phase))
        if slot is None or span is None or span.since is None:
            return []
        said = self._seen.when(current.number, slot, self._me)
        if said is None or current.slot(slot, self._me) is None:
            return []
        least = LEAST_PATIENCE if told.lying_closings(current, slot) > current.voting.f else SILENCE
        at = said + max(PATIENCE * self._phase_timeout(state, span.since), least)
        if now < at:
            self._wake_at(at)
            return []
        return self._halt(told.who_is_silent(current, slot))

    def _phase_timeout(self, state: LedgerState, since: float) -> float:
        kind = _KIND_OF.get(Phase(state.phase))
        if kind is None:
            return self._attest_timeout(state.current, since)
        return self._closes_at(state.current, kind, since) - since

    # --- the agreed state and its root ------------------------------------------------------------

    def _agreed_root(self, state: LedgerState) -> SignedRoot | None:
        """The root of the fixed round that a quorum signed, if its certificate is still to come."""
        due = state.unsigned
        if self._agreed is None or due is None or self._agreed[0].round != due.number:
            return None
        return self._agreed[0]

    def _newest_root(self, state: LedgerState) -> SignedRoot | None:
        """None while the start state is the newest."""
        return self._agreed_root(state) or state.signed

    def _advance(self, state: LedgerState, now: float) -> list[Effect]:
        """Bring the own state to the newest fixed round, or to a signed root if that fails."""
        applied = self._applied
        if applied is None:
            return []
        for known in (state.previous, state.current):
            if known is not None and known.number == applied.round and known.verdict == "void":
                self._applied = None
                return [DropRound(RoundNumber(known.number), known.reason)]
        if state.unsigned is not None:
            self._basis.setdefault(state.unsigned.number, state.signed)
        newest = self._newest_root(state)
        if newest is not None and applied.round == newest.round and applied.root != newest.root:
            return self._resynchronise(state, newest, applied)
        for known in (state.previous, state.current):
            if known is None or known.verdict != Verdict.FIXED or known.number <= applied.round:
                continue
            if known.number in self._basis and is_at(applied, self._basis[known.number]):
                return self._collect(state, known, applied, now)
        if newest is not None and applied.round < newest.round:
            return self._resynchronise(state, newest, applied)
        return []

    def _collect(
        self, state: LedgerState, fixed: RoundState, applied: StateAdvanced, now: float
    ) -> list[Effect]:
        number = fixed.number
        lacking = [item for item in fixed.accepted if not self._seen.stored(number, item)]
        if not lacking:
            if fixed.agreed is None or not self._once("advance", number):
                return []
            return [Advance(RoundNumber(number), fixed.accepted, fixed.agreed, applied.root)]
        effects: list[Effect] = [
            fetch(number, item, tuple(h for h in holders(fixed, item.author) if h != self._me))
            for item in lacking
            if self._once("fetch-accepted", number, item.author)
        ]
        newest = self._newest_root(state)
        if newest is None or newest.round < number or self._agreed is None:
            return effects
        at = self._agreed[1] + self._deadlines.timeout(
            "attest", size=sum(item.payload_length for item in lacking)
        )
        if now < at:
            self._wake_at(at)
            return effects
        return [*effects, *self._resynchronise(state, newest, applied)]

    def _resynchronise(
        self, state: LedgerState, newest: SignedRoot, applied: StateAdvanced
    ) -> list[Effect]:
        if not self._once("resynchronise", newest.round):
            return []
        self._copied = newest.round
        number, peers = RoundNumber(newest.round), self._signers(state, newest)
        if applied.round == newest.round:
            return [Diverged(number, applied.root, newest.root, peers)]
        return [CatchUp(number, newest.root, peers)]

    def _signers(self, state: LedgerState, signed: SignedRoot) -> tuple[PeerId, ...]:
        """Who signed that root, as far as known; else all validators."""
        if self._votes is not None and self._votes.round.number == signed.round:
            names = self._votes.by_root().get(signed.root, ())
            if names:
                return tuple(name for name in names if name != self._me)
        return tuple(
            PeerId(seat.name) for seat in state.current.validators if seat.name != self._me
        )

    def _follow_roots(self, state: LedgerState, now: float) -> list[Effect]:
        due = state.unsigned
        if due is None:
            return []
        if self._votes is None or self._votes.round.number != due.number:
            self._votes, self._votes_since, self._vote_sent = RootVotes(due), now, None
            early, self._early_votes = self._early_votes, {}
            for parsed in early.values():
                self._votes.add(parsed)
        effects = self._vote_root(self._votes, now)
        root = self._votes.agreed()
        if root is None:
            return [*effects, *self._await_roots(self._votes, now)]
        if self._agreed_root(state) is None:
            self._agreed = (SignedRoot(due.number, root), now)
            self._measure_roots(self._votes, now)
            self._follow(state, now)
            effects.append(RootAgreed(RoundNumber(due.number), root, on_ledger=False))
        return [*effects, *self._certify(state, self._votes, root, now)]

    def _measure_roots(self, votes: RootVotes, now: float) -> None:
        since = self._votes_since
        arrivals = self._seen.arrivals(votes.round.number, "root", since)
        need = FaultModel(len(votes.round.validators)).quorum
        self._deadlines.observe("root", arrivals, need, now - since)

    def _vote_root(self, votes: RootVotes, now: float) -> list[Effect]:
        """Sign the own root once, and repeat the vote until the certificate is final (13)."""
        number, applied = votes.round.number, self._applied
        effects: list[Effect] = []
        computed = applied is not None and applied.round == number and self._copied != number
        if computed and applied is not None and self._validates(votes.round):
            effects += self._own.make(m.RootVote(*self._head(number), applied.root))
        tx = self._own.own(number, "root")
        if tx is None:
            return effects
        votes.add(m.parse(tx))
        self._seen.note(number, "root", self._me, now)
        if self._vote_sent is None or now >= self._vote_sent + RESEND_SECONDS:
            self._vote_sent = now
            effects.append(Broadcast(tx))
        self._wake_at(self._vote_sent + RESEND_SECONDS)
        return effects

    def _received(self, event: Received, now: float) -> list[Effect]:
        """A root vote; anything else is none of this machine's and is left alone."""
        parsed = read_vote(event.message)
        state = self._application.state
        if parsed is None or not isinstance(parsed.statement, m.RootVote):
            return []
        vote = parsed.statement
        due = state.unsigned
        if vote.run_id != state.genesis.run_id or vote.author != event.sender:
            return []
        if due is None or due.number != vote.round or self._votes is None:
            if vote.round == state.current.number and state.current.seat(vote.author):
                self._early_votes[vote.author] = parsed
            return []
        reason = self._votes.add(parsed)
        if reason is not None:
            number = RoundNumber(vote.round)
            return [Accuse(event.sender, number, Fault.BAD_SIGNATURE, False, reason)]
        self._seen.note(vote.round, "root", vote.author, now)
        return []

    def _root_timeout(self, votes: RootVotes) -> float:
        size = sum(item.payload_length for item in votes.round.accepted)
        return self._deadlines.timeout("root", size=size)

    def _await_roots(self, votes: RootVotes, now: float) -> list[Effect]:
        """Halt if no root can reach a quorum any more, or none does for long (14)."""
        timeout = self._root_timeout(votes)
        first = self._votes_since + timeout
        last = self._votes_since + max(timeout, SILENCE)
        if now >= last or (now >= first and not votes.possible()):
            return self._halt(told.who_signed(votes))
        self._wake_at(first if now < first else last)
        return []

    def _certify(
        self, state: LedgerState, votes: RootVotes, root: bytes, now: float
    ) -> list[Effect]:
        """Put the quorum's signatures on the ledger, one signer after the other in turn.

        They ride with the next commitments, if those come soon: that saves a block.
        """
        number = votes.round.number
        if not self._validates(votes.round) or self._own.own(number, "rooted") is not None:
            return []
        agreed_at = self._agreed[1] if self._agreed is not None else now
        commits = self._seen.arrivals(number + 1, "commit", 0.0)
        hold = 0.0 if state.phase == Phase.ROOT else CERTIFICATE_HOLD
        ready = max(agreed_at, min([*commits, agreed_at + hold]))
        alive = sorted({*votes.by_root()[root], self._me})
        turn = (alive.index(self._me) - number) % len(alive)
        at = ready + turn * CERTIFICATE_TURN
        if now < at:
            self._wake_at(at)
            return []
        return self._own.make(votes.certificate(self._me, state.genesis.run_id, root))

    # --- telling people ---------------------------------------------------------------------------

    def _notice(self, state: LedgerState, now: float) -> list[Effect]:
        """Say whom the phase waits for, first soon, then ever more rarely."""
        span = self._span
        if span is None or state.phase == Phase.FINISHED:
            return []
        if now < span.notice_at:
            self._wake_at(span.notice_at)
            return []
        span.notice_gap *= 2
        span.notice_at = now + span.notice_gap
        self._wake_at(span.notice_at)
        name, whom, until = self._awaited(state, span)
        if not whom:
            name, until = "ledger", None  # all is here, but no block brings it
        peers = tuple(PeerId(peer) for peer in whom)
        return [Waiting(RoundNumber(state.current.number), name, peers, until)]

    def _awaited(self, state: LedgerState, span: _Span) -> tuple[str, Iterable[str], float | None]:
        current, phase = state.current, Phase(state.phase)
        validators = {seat.name for seat in current.validators}
        if state.unsigned is not None and self._agreed_root(state) is None:
            missing = self._votes.missing() if self._votes is not None else ()
            return "root", missing, None
        kind = _KIND_OF.get(phase)
        if kind is not None:
            waited = set(current.waited) & (
                committed(current) if kind == "open" else {*current.waited}
            )
            until = self._closes_at(current, kind, span.since) if span.since is not None else None
            if self._own.own(current.number, f"close-{kind}") is not None:
                # Nobody's item is waited for any more, but a quorum of closings.
                return kind, self._silent(current.number, f"close-{kind}", validators), None
            return kind, self._silent(current.number, kind, waited), until
        name = {Phase.READY: "ready", Phase.ATTEST: "attest"}.get(phase, "rooted")
        return name, self._silent(current.number, name, validators), None

    def _silent(self, number: int, kind: str, expected: set[str]) -> list[str]:
        """Who has said nothing yet; this peer's own word counts before it is on the ledger."""
        mine = {self._me} if self._own.own(number, kind) is not None else set()
        return self._seen.silent(number, kind, expected - mine)

    def _finish(self, state: LedgerState, now: float) -> list[Effect]:
        if state.phase != Phase.FINISHED or self._applied is None:
            return []
        here = is_at(self._applied, state.signed)
        if not here or not self._once("finish", state.current.number):
            return []
        return [Finished(state.genesis.rounds)]


_LAST_WORD = {Phase.COMMIT: "close-commit", Phase.OPEN: "close-open", Phase.ATTEST: "attest"}
"""What a validator says last in a phase."""
_MEASURED = {Phase.COMMIT: "commit", Phase.OPEN: "open", Phase.ATTEST: "payload"}
_KIND_OF: dict[Phase, m.Window] = {Phase.COMMIT: "commit", Phase.OPEN: "open"}
