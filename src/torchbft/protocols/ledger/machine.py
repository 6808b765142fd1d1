"""The embedded ledger: Byzantine agreement on one block per height, three hops when all is well.

Source
    Castro and Liskov, "Practical Byzantine Fault Tolerance" (OSDI 1999): prepare and finalize
    (there: commit) phases, and the view change by signed proofs. The form of the view change, with
    certificates carried in time-outs, is that of Gelashvili et al., "Jolteon and Ditto" (FC 2022),
    whose two-chain commit rule becomes two votes on one block here.

Steps, at height h, for n validators of which at most f are Byzantine (counts are power)
    1. *Propose.* The leader of view 0 signs a block once its mempool holds something and either the
       gate says that the pending set is complete or ``proposal_wait`` has passed.
    2. *Prepare.* Who finds the block valid makes it durable and sends a prepare vote to all. n−f of
       them are a prepare certificate.
    3. *Finalize.* Who holds a prepare certificate of its current view makes it durable and sends a
       finalize vote to all. n−f of them finalize the block: it is made durable and executed, and
       height h+1 begins.
    4. *Time-out.* A view that lasts too long is left by a signed time-out with the highest prepare
       certificate known; f+1 time-outs pull the others along. n−f of them are a time-out
       certificate, which begins the next view. Its leader proposes the block of the highest prepare
       certificate in it again, or a fresh one if there is none.
    5. *Catch up.* Who hears of a greater height asks for finalized blocks and checks their
       certificates. Messages of an unfinished height are sent again as the same bytes.

Deviations, and why
    - One instance per height and no pipelining: block h+1 carries the application hash after h, so
      h must be final before h+1 is proposed, exactly as under ABCI. Nothing is executed twice.
    - No checkpoints or watermarks: certificates per block take their place.
    - Votes go to all instead of to the next leader: three hops instead of five at n² messages,
      which at n ≤ 64 and two blocks a second are few.
    - No empty blocks, and no view timer without work: an idle ledger is silent but for a
      ``Status``. A timer starts with a pending transaction, a leader's signed proposal, or messages
      of more than f power; one liar alone cannot make an idle swarm change views.
    - Leaders that fail are skipped for a while (``leaders.py``).
    - A finalize vote needs the certificate, not the block: more than f honest validators made the
      block durable before the certificate existed, and hand it out on ``Want``.

Properties
    *Safety* (``safety.py``), at any delay and loss, with up to f Byzantine and any number of
    crashes and restarts from disk. *Liveness*: after the network heals, a transaction that is
    pending at f+1 honest validators is finalized (views double, so that one lasts long enough; f+1
    time-outs synchronise them). *Evidence*: two contradicting votes seen by one honest peer convict
    their author; leaders' diverging proposals are shown to those who voted otherwise.

What a peer sends never raises. Effects come in the order persist, send, apply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from torchbft.primitives.abci import Application
from torchbft.primitives.effects import Effect, Received, Tick
from torchbft.primitives.errors import DecodeError, HaltError, MisuseError, StorageError
from torchbft.primitives.evidence import Fault
from torchbft.primitives.ids import Height, PeerId, View
from torchbft.primitives.keys import KeyRing, SigningKey
from torchbft.primitives.wire import encode
from torchbft.protocols.ledger import safety
from torchbft.protocols.ledger.catchup import EarlyMessages, History, Limits
from torchbft.protocols.ledger.certificates import (
    ValidatorSet,
    check_high,
    check_timeouts,
    encoded_finalized,
    make_certificate,
    make_timeout_certificate,
    verify_finalized,
)
from torchbft.protocols.ledger.leaders import LeaderSchedule
from torchbft.protocols.ledger.mempool import Mempool
from torchbft.protocols.ledger.messages import (
    MAX_BLOCK_TXS,
    NO_DIGEST,
    Block,
    Blocks,
    Body,
    Certificate,
    FinalizedBlock,
    Kind,
    Prepared,
    Proposal,
    Status,
    Timeout,
    TimeoutCertificate,
    Transaction,
    Vote,
    Want,
    block_digest,
    decode_finalized,
    decode_message,
    vote_is_signed,
)
from torchbft.protocols.ledger.outbox import Accusations, Outbox
from torchbft.protocols.ledger.recovery import check_own_vote, check_signers, read_votes, restore
from torchbft.protocols.ledger.signer import Signer
from torchbft.protocols.ledger.state import (
    GENESIS_DIGEST,
    Finalized,
    HeightState,
    LedgerConfig,
    Tip,
)

MAX_RESEND_DOUBLINGS = 3
"""Repetitions slow down to 8 intervals, so that a long outage does not flood the healed network."""

IDLE_INTERVALS = 8
"""An idle validator asks one peer for its height every 8 resend intervals."""

NO_VIEW = View(0)

Gate = Callable[[Sequence[bytes]], bool]


class LedgerMachine:
    """One validator, or an observer at heights whose set has none of its keys under its name.
    Sans-I/O; see the module's head. ``key``: one, or a ring, of which the set's is used.

    ``application``: at genesis (``init_chain`` done, height 0). ``gate``: whether the pending
    transactions are all that the current phase waits for. ``records``: logs ``votes`` and
    ``blocks`` from before a restart; the blocks are executed again. A host's own log of blocks,
    which grows meanwhile, also serves those who lag far behind. Raises HaltError or StorageError
    on unusable records.
    """

    def __init__(
        self,
        config: LedgerConfig,
        key: SigningKey | KeyRing,
        validators: ValidatorSet,
        application: Application,
        gate: Gate,
        records: Mapping[str, Sequence[bytes]],
    ) -> None:
        self._config, self._gate = config, gate
        self._application, self._mempool = application, Mempool(application)
        self._validators, self._upcoming = validators, validators
        self._schedule = LeaderSchedule(validators)
        blocks = records.get("blocks", ())
        self._history, self._early, self._limits = History(blocks), EarlyMessages(), Limits()
        self._out = Outbox()
        self._accusations = Accusations(config.run_id, self._out)
        self._now = 0.0
        self._tick_at: float | None = None
        self._ticks = 0
        self._turn = 0
        self._tried: tuple[int, int, int, bool] | None = None
        self._early_is_due = False
        self._recorded = read_votes(records.get("votes", ()), config.run_id)
        keys, signers = KeyRing.of(key), self._recorded.signers
        check_signers(signers, keys.publics, blocks=len(blocks))
        self._signer = Signer(config.run_id, config.me, keys, signers)
        info = application.info()
        if info.last_height != 0:
            raise MisuseError("the application must start from genesis: blocks are replayed")
        self._tip = Tip(info.last_height, GENESIS_DIGEST, info.last_app_hash)
        self._state = self._fresh_state()
        self._replay(blocks)

    # -- what the host calls

    def start(self, now: float) -> list[Effect]:
        """First call: what is to be sent after a start or restart."""
        self._now = now
        self._signer.note(self._out)
        self._state.active_since = None  # replay knew no time
        if self._state.signed.votes:
            self._activate()
        self._tick()
        self._settle()
        return self._out.drain()

    def handle(self, event: Received | Transaction | Tick, now: float) -> list[Effect]:
        """Take in one input. Raises MisuseError for anything that is not one, and HaltError if a
        certificate proves that this validator's record of its votes is incomplete."""
        self._now = now
        if isinstance(event, Received):
            self._receive(event.sender, event.message)
        elif isinstance(event, Transaction):
            self._add(event)
        elif not isinstance(event, Tick):
            raise MisuseError(f"{type(event).__name__} is not an input of the ledger")
        self._on_time()
        self._settle()
        return self._out.drain()

    def add_key(self, key: SigningKey) -> list[Effect]:
        """Have one more own key, for heights to come whose set lists it."""
        self._signer.add(key, self._out)
        return self._out.drain()

    def deadline(self) -> float | None:
        """When to send a ``Tick`` at the latest."""
        state = self._state
        times = (state.view_ends, state.propose_at, self._tick_at)
        return min((t for t in times if t is not None), default=None)

    @property
    def height(self) -> Height:
        """The height that is being decided."""
        return self._state.height

    @property
    def view(self) -> View:
        """The current view of that height."""
        return self._state.view

    @property
    def tip(self) -> Tip:
        """The last finalized block."""
        return self._tip

    @property
    def validators(self) -> ValidatorSet:
        """The validators of the height that is being decided."""
        return self._validators

    @property
    def leader(self) -> PeerId:
        """Who may propose in the current view."""
        return self._schedule.leader(self._state.height, self._state.view)

    @property
    def pending(self) -> int:
        """Transactions that wait for a block."""
        return len(self._mempool)

    # -- inputs

    def _receive(self, sender: PeerId, data: bytes) -> None:
        try:
            message = decode_message(data)
        except DecodeError as error:
            self._accusations.suspect(sender, "malformed-message", str(error))
            return
        if isinstance(message, Status):
            self._on_status(sender, message)
        elif isinstance(message, Want):
            self._on_want(sender, message)
        elif isinstance(message, Blocks):
            self._on_blocks(sender, message)
        elif isinstance(message, Body):
            self._on_body(message)
        elif self._is_current(sender, message, data):
            self._on_agreement(sender, message, data)

    def _on_agreement(
        self, sender: PeerId, message: Vote | Proposal | Timeout | TimeoutCertificate, data: bytes
    ) -> None:
        if isinstance(message, Vote):
            self._on_vote(sender, message)
        elif isinstance(message, Proposal):
            self._on_proposal(sender, message, data)
        elif isinstance(message, Timeout):
            self._on_timeout(sender, message)
        else:
            self._on_timeout_certificate(sender, message)

    def _is_current(
        self, sender: PeerId, message: Vote | Proposal | Timeout | TimeoutCertificate, data: bytes
    ) -> bool:
        """Whether a message is of this height and one of its validators; early ones are kept, and
        tell that we lag."""
        height = message.vote.height if isinstance(message, Proposal | Timeout) else message.height
        if height == self._state.height:
            return sender in self._validators.powers
        if height == self._state.height + 1 and sender in self._upcoming.powers:
            self._early.hold(sender, data)
        elif height > self._state.height and self._limits.may_ask(self._now):
            self._out.send(sender, Status(self._state.height))
        return False

    def _add(self, event: Transaction) -> None:
        if self._mempool.add(event.tx, event.sender):
            self._await_block()

    def _on_vote(self, sender: PeerId, vote: Vote) -> None:
        if vote.kind is Kind.PROPOSE:
            self._on_shown(sender, vote)
        elif vote.kind is Kind.TIME_OUT or vote.high != 0:
            self._accusations.suspect(sender, "malformed-message", "a time-out without its form")
        elif self._is_own(sender, vote) and self._admit(sender, vote):
            self._show_leader(sender, vote)
            self._tally(vote.kind, vote.view, vote.digest)

    def _on_shown(self, sender: PeerId, vote: Vote) -> None:
        """A leader's vote shown by somebody else: of use only if we hold a different one."""
        known = self._state.votes.get(vote.slot, {}).get(PeerId(vote.author))
        if known is not None and known.digest != vote.digest:
            self._conflict(sender, known, vote)

    def _on_proposal(self, sender: PeerId, proposal: Proposal, data: bytes) -> None:
        state, vote = self._state, proposal.vote
        if vote.kind is not Kind.PROPOSE or vote.high != 0 or vote.view < state.view:
            return
        if vote.author != sender or sender != self._schedule.leader(vote.height, vote.view):
            self._accusations.suspect(sender, "bad-proposal", "is not the leader of this view")
            return
        if not self._admit(sender, vote):
            return
        self._activate()
        wrong = self._unjustified(proposal) or self._refuses(proposal)
        if wrong:
            self._accusations.suspect(sender, "bad-proposal", wrong)
            return
        if proposal.justification is not None and vote.view > state.view:
            self._enter_by(proposal.justification)
        if self._state is not state:  # its certificate finalized the height
            return
        state.keep_body(vote.digest, proposal.block)
        if state.final is not None and state.final.digest == vote.digest:
            self._finalize(state.final)
            return
        for other in state.slot(Kind.PREPARE, vote.view).values():
            self._show_leader(PeerId(other.author), other)
        self._prepare(proposal, data)

    def _on_timeout(self, sender: PeerId, message: Timeout) -> None:
        vote, state = message.vote, self._state
        if vote.kind is not Kind.TIME_OUT or vote.digest != NO_DIGEST:
            self._accusations.suspect(sender, "malformed-message", "a time-out without its form")
            return
        repeated = state.votes.get(vote.slot, {}).get(sender) == vote
        if repeated or vote.view < state.view or not self._is_own(sender, vote):
            return
        run_id, validators = self._config.run_id, self._validators
        wrong = check_high(vote.height, vote.view, vote.high, message.prepared, validators, run_id)
        if wrong:
            self._accusations.suspect(sender, "bad-time-out", wrong)
            return
        if message.prepared is not None:
            self._learn(message.prepared)
        if self._state is state and self._admit(sender, vote):
            state.timeouts[sender] = max(vote.view, state.timeouts.get(sender, vote.view))
            self._join_time_out()
            self._tally_timeouts(vote.view)

    def _on_timeout_certificate(self, sender: PeerId, message: TimeoutCertificate) -> None:
        if message.view < self._state.view:
            return
        wrong = check_timeouts(message, self._validators, self._config.run_id)
        if wrong:
            self._accusations.suspect(sender, "bad-certificate", wrong)
        else:
            self._enter_by(message)

    def _on_status(self, sender: PeerId, message: Status) -> None:
        if message.height < self._state.height:
            self._serve(sender, message.height)
        elif message.height > self._state.height and self._limits.may_ask(self._now):
            self._out.send(sender, Status(self._state.height))

    def _on_want(self, sender: PeerId, message: Want) -> None:
        body = self._state.bodies.get(message.digest)
        if message.height < self._state.height:
            self._serve(sender, message.height)
        elif body is not None and self._limits.may_serve(sender, self._now):
            self._out.send(sender, Body(body))

    def _on_body(self, message: Body) -> None:
        state = self._state
        if state.wanted is None or block_digest(message.block) != state.wanted:
            return
        state.keep_body(state.wanted, message.block)
        state.wanted = None
        if state.final is not None:
            self._finalize(state.final)

    def _on_blocks(self, sender: PeerId, message: Blocks) -> None:
        for data in message.blocks:
            wrong = self._take_block(data)
            if wrong:
                self._accusations.suspect(sender, "bad-block", wrong)
                return
        if message.height > self._state.height and message.blocks:
            self._out.send(sender, Status(self._state.height))

    def _take_block(self, data: bytes) -> str | None:
        """Verify and execute a finalized block of this height; why it cannot be, or None."""
        try:
            finalized = decode_finalized(data)
        except DecodeError as error:
            return str(error)
        if finalized.block.height != self._state.height:
            return None
        wrong = self._tip.refuses(finalized.block, self._config.run_id)
        wrong = wrong or verify_finalized(finalized, self._validators, self._config.run_id)
        if not wrong and self._may_vote:
            check_own_vote(finalized.certificate, self._state, self._config.me)
        if not wrong:
            self._advance(finalized, data)
        return wrong

    # -- votes

    def _is_own(self, sender: PeerId, vote: Vote) -> bool:
        if vote.author == sender:
            return True
        self._accusations.suspect(sender, Fault.BAD_SIGNATURE, f"sent a vote of {vote.author}")
        return False

    def _admit(self, sender: PeerId, vote: Vote) -> bool:
        """Keep the first checked vote of an author in a slot; whether this is it."""
        state = self._state
        if not state.make_room(vote):
            return False
        slot = state.slot(*vote.slot)
        known = slot.get(sender)
        if known is not None:
            if safety.contradict(known, vote):
                self._conflict(sender, known, vote)
            return False
        certified = state.certified.get(vote.slot)
        surplus = certified is not None and certified.digest == vote.digest
        if not surplus and not self._signed(vote):
            self._accusations.suspect(
                sender, Fault.BAD_SIGNATURE, "the signature of a vote is false"
            )
            return False
        slot[sender] = vote
        state.heard.add(sender)
        if self._validators.power_of(state.heard) >= self._validators.faults.one_honest:
            self._activate()
        self._check_denial(sender, vote)
        return True

    def _check_denial(self, sender: PeerId, vote: Vote) -> None:
        """A finalize vote and a time-out that denies its certificate contradict across slots."""
        other = Kind.TIME_OUT if vote.kind is Kind.FINALIZE else Kind.FINALIZE
        if vote.kind not in (Kind.FINALIZE, Kind.TIME_OUT):
            return
        for (kind, _), votes in list(self._state.votes.items()):
            if kind is other and sender in votes and safety.contradict(vote, votes[sender]):
                self._conflict(sender, votes[sender], vote)

    def _signed(self, vote: Vote) -> bool:
        public = self._validators.publics.get(PeerId(vote.author))
        return public is not None and vote_is_signed(public, self._config.run_id, vote)

    def _conflict(self, sender: PeerId, known: Vote, vote: Vote) -> None:
        """Two votes that contradict each other: evidence, if both are signed."""
        if self._accusations.knows(vote.author):
            return
        if not self._signed(vote):
            self._accusations.suspect(
                sender, Fault.BAD_SIGNATURE, "the signature of a vote is false"
            )
        elif self._signed(known):
            self._accusations.accuse(known, vote)

    def _show_leader(self, voter: PeerId, vote: Vote) -> None:
        """Send the leader's signed proposal to one who prepared another block, once a view."""
        leader = self._schedule.leader(vote.height, vote.view)
        proposed = self._state.votes.get((Kind.PROPOSE, vote.view), {}).get(leader)
        if vote.kind is not Kind.PREPARE or proposed is None or voter == self._config.me:
            return
        if proposed.digest != vote.digest:
            self._accusations.show(voter, proposed)

    def _tally(self, kind: Kind, view: View, digest: bytes) -> None:
        state = self._state
        if (kind, view) in state.certified:
            return
        if state.power_for(kind, view, digest) < self._validators.faults.quorum:
            return
        votes = {a: v for a, v in state.slot(kind, view).items() if v.digest == digest}
        certificate = make_certificate(votes, self._validators)
        state.certified[kind, view] = certificate
        if kind is Kind.PREPARE:
            self._learn(certificate)
        else:
            self._finalize(certificate)

    def _learn(self, prepared: Certificate) -> None:
        """Take in a valid prepare certificate; vote to finalize if it is of the current view."""
        state = self._state
        state.signed.learn(prepared)
        if prepared.view > state.view:
            self._enter(prepared.view, None)
        if (
            self._may_vote
            and prepared.view == state.view
            and safety.may_finalize(state.signed, prepared)
        ):
            self._out.persist("votes", encode(Prepared(prepared)))
            vote = self._vote(Kind.FINALIZE, prepared.view, prepared.digest)
            self._publish(vote, vote)
            self._tally(Kind.FINALIZE, prepared.view, prepared.digest)

    def _prepare(self, proposal: Proposal, data: bytes) -> None:
        """Vote for a valid block of the current view, after making it durable."""
        vote, signed = proposal.vote, self._state.signed
        allowed = safety.may_prepare(signed, vote.view, vote.digest, proposal.justification)
        if not self._may_vote or vote.view != self._state.view or not allowed:
            return
        if vote.author != self._config.me:
            self._out.persist("votes", data)
        mine = self._vote(Kind.PREPARE, vote.view, vote.digest)
        self._publish(mine, mine)
        self._tally(Kind.PREPARE, vote.view, vote.digest)

    def _vote(self, kind: Kind, view: View, digest: bytes, high: View = NO_VIEW) -> Vote:
        return self._signer.vote(self._validators, kind, self._state.height, view, digest, high)

    def _publish(self, vote: Vote, message: Vote | Proposal | Timeout) -> None:
        """Record, persist and send a vote of our own."""
        state, data = self._state, encode(message)
        state.signed.record(vote)
        state.mine[vote.slot] = data
        state.slot(*vote.slot)[self._config.me] = vote
        self._out.persist("votes", data)
        self._out.broadcast(data)
        self._activate()

    @property
    def _may_vote(self) -> bool:
        return self._signer.key(self._validators) is not None

    # -- blocks

    def _unjustified(self, proposal: Proposal) -> str | None:
        vote, justification = proposal.vote, proposal.justification
        wrong = safety.unjustified(vote.view, vote.digest, justification)
        if wrong or justification is None:
            return wrong
        if justification.height != vote.height:
            return "carries time-outs of another height"
        return check_timeouts(justification, self._validators, self._config.run_id)

    def _refuses(self, proposal: Proposal) -> str | None:
        """Why a proposed block is not valid. The application's word on a certified one is known."""
        block, vote = proposal.block, proposal.vote
        if block_digest(block) != vote.digest:
            return "carries another block than it signs"
        wrong = self._tip.refuses(block, self._config.run_id)
        if wrong or safety.required_digest(proposal.justification) is not None:
            return wrong
        if block.proposer != vote.author:
            return "names another proposer"
        if sum(map(len, block.txs)) > self._config.max_block_bytes:
            return "is larger than a block may be"
        if self._application.process_proposal(block.height, block.txs):
            return None
        return "was refused by the application"

    def _settle(self) -> None:
        """Do what the last input made possible, until nothing more is."""
        while self._proposes() or self._takes_early():
            pass

    def _takes_early(self) -> bool:
        if not self._early_is_due:
            return False
        self._early_is_due = False
        for sender, data in self._early.release():
            self._receive(sender, data)
        return True

    def _proposes(self) -> bool:
        """Propose if we lead the current view and have what it needs; whether we did."""
        state, config = self._state, self._config
        if not self._may_vote or self.leader != config.me:
            return False
        if not safety.may_propose(state.signed, state.view) or not self._may_open_view():
            return False
        required = safety.required_digest(state.entered)
        block = self._fresh_block() if required is None else state.bodies.get(required)
        if block is None:
            return False
        vote = self._vote(Kind.PROPOSE, state.view, block_digest(block))
        state.keep_body(vote.digest, block)
        state.propose_at = None
        proposal = Proposal(vote, block, state.entered)
        self._publish(vote, proposal)
        self._prepare(proposal, b"")
        return True

    def _may_open_view(self) -> bool:
        return self._state.view == 0 or self._state.entered is not None

    def _fresh_block(self) -> Block | None:
        """A block of pending transactions, if it is time and the application gives any."""
        state, config = self._state, self._config
        if state.pending_since is None or not len(self._mempool):
            return None
        due = state.pending_since + config.proposal_wait
        waited = state.view > 0 or self._now >= due
        attempt = (state.height, state.view, self._mempool.version, waited)
        if attempt == self._tried:
            return None
        self._tried = attempt
        pending = self._mempool.pending()
        if not waited and not self._gate(pending):
            state.propose_at = due
            return None
        state.propose_at = None
        txs = self._application.prepare_proposal(state.height, pending, config.max_block_bytes)
        if not txs:
            self._mempool.recheck()
            return None
        if len(txs) > MAX_BLOCK_TXS or sum(map(len, txs)) > config.max_block_bytes:
            raise MisuseError("the application proposes more than fits into a block")
        return self._tip.block(config.run_id, config.me, txs)

    def _finalize(self, certificate: Certificate) -> None:
        """A quorum voted to finalize: execute the block, or ask for it. With more than f liars it
        may not follow our tip; then this ledger stands still, and the certificates are evidence."""
        state = self._state
        block = state.bodies.get(certificate.digest)
        if block is None:
            state.final = certificate
            self._want(certificate.digest)
        elif self._tip.refuses(block, self._config.run_id) is None:
            finalized = FinalizedBlock(block, certificate)
            self._advance(finalized, encoded_finalized(block, certificate))

    def _advance(self, finalized: FinalizedBlock, encoded: bytes) -> None:
        """Execute a finalized block and begin the next height."""
        since = self._state.active_since
        seconds = 0.0 if since is None else self._now - since
        self._out.persist("blocks", encoded)
        block, view = finalized.block, finalized.certificate.view
        result = self._application.finalize_block(block.height, block.txs)
        self._application.commit()
        self._out.apply(Finalized(block.height, view, block, result, seconds))
        digest = finalized.certificate.digest
        self._tip = Tip(block.height, digest, result.app_hash)
        self._history.append(block.height, encoded)
        self._validators = self._upcoming  # updates of h are in force from h + 2 on, as under ABCI
        self._upcoming = self._upcoming.updated(result.validator_updates, self._config.names)
        self._schedule.record(block.height, PeerId(block.proposer), self._validators)
        self._mempool.remove(block.txs)
        self._mempool.recheck()
        self._begin()

    def _replay(self, blocks: Sequence[bytes]) -> None:
        """Execute the blocks of before a restart again and check that they chain."""
        self._begin()
        for data in blocks:
            try:
                finalized = decode_finalized(data)
            except DecodeError as error:
                raise StorageError(f"a block is unreadable: {error}", where="blocks") from None
            wrong = self._tip.refuses(finalized.block, self._config.run_id)
            if wrong:
                raise HaltError(
                    f"block {finalized.block.height} {wrong}",
                    where="blocks",
                    hint="have the members rotate this peer's key, and join again with that one",
                )
            self._signer.check(self._validators)
            self._advance(finalized, data)
        if blocks:
            self._signer.check(self._validators)
        self._out.drain()

    def _fresh_state(self) -> HeightState:
        return HeightState(self._tip.next_height, self._validators)

    def _begin(self) -> None:
        """Begin the height after the tip."""
        self._state = self._fresh_state()
        restore(self._state, self._recorded.by_height, self._config.me)
        self._accusations.next_height()
        self._tried = None
        self._ticks = 0
        self._early_is_due = True
        self._schedule_tick()
        if self._state.signed.votes:
            self._activate()
        if len(self._mempool):
            self._await_block()

    # -- time

    def _await_block(self) -> None:
        if self._state.pending_since is None:
            self._state.pending_since = self._now
        self._activate()

    def _activate(self) -> None:
        """There is work at this height: run the view timer and repeat messages."""
        state = self._state
        if state.active_since is not None:
            return
        state.active_since = self._now
        state.view_ends = self._now + self._config.view_seconds(state.view)
        self._ticks = 0
        self._schedule_tick()

    def _on_time(self) -> None:
        state = self._state
        if state.view_ends is not None and self._now >= state.view_ends:
            state.view_ends = None
            self._time_out(state.view)
        if state.propose_at is not None and self._now >= state.propose_at:
            state.propose_at = None
        if self._tick_at is not None and self._now >= self._tick_at:
            self._tick()

    def _tick(self) -> None:
        """Repeat what this height still needs, and ask some peers how far they are."""
        state = self._state
        if state.active_since is not None:
            for message in state.repeatable():
                self._out.broadcast(message)
            if state.entered is not None:
                self._out.broadcast(encode(state.entered))
            if state.wanted is not None:
                self._want(state.wanted)
        status = Status(state.height)
        for peer in dict.fromkeys([*self._early.senders(), *self._next_peers()]):
            self._out.send(peer, status)
        self._ticks += 1
        self._schedule_tick()

    def _schedule_tick(self) -> None:
        active = self._state.active_since is not None
        doublings = min(self._ticks, MAX_RESEND_DOUBLINGS)
        intervals = 2**doublings if active else IDLE_INTERVALS
        self._tick_at = self._now + self._config.resend * intervals

    def _next_peers(self) -> list[PeerId]:
        """The next f+1 validators in turn (one, when idle and up to date)."""
        others = [name for name in self._validators.names if name != self._config.me]
        idle = self._state.active_since is None and self._ticks > 0
        count = 1 if idle else min(len(others), self._validators.faults.one_honest)
        chosen = [others[(self._turn + i) % len(others)] for i in range(count) if others]
        self._turn += count
        return chosen

    def _time_out(self, view: View) -> None:
        """Leave a view: sign nothing in it any more, and say which certificate binds us."""
        signed = self._state.signed
        if not self._may_vote or not safety.may_time_out(signed, view):
            return
        vote = self._vote(Kind.TIME_OUT, view, NO_DIGEST, signed.high_mark)
        self._publish(vote, Timeout(vote, signed.high))
        self._state.timeouts[self._config.me] = view
        self._tally_timeouts(view)

    def _join_time_out(self) -> None:
        """Time-outs of more than f power for views ≥ w mean that an honest one left w."""
        state, power = self._state, 0
        for author, view in sorted(state.timeouts.items(), key=lambda item: (-item[1], item[0])):
            power += self._validators.powers.get(author, 0)
            if power >= self._validators.faults.one_honest:
                if view >= state.view:
                    self._activate()
                    self._time_out(view)
                return

    def _tally_timeouts(self, view: View) -> None:
        state = self._state
        votes = state.votes.get((Kind.TIME_OUT, view), {})
        if view < state.view or self._validators.power_of(votes) < self._validators.faults.quorum:
            return
        high = state.signed.high
        self._enter_by(make_timeout_certificate(votes, self._validators, high))

    def _enter_by(self, timeouts: TimeoutCertificate) -> None:
        if timeouts.prepared is not None:
            self._learn(timeouts.prepared)
        if timeouts.view >= self._state.view and timeouts.height == self._state.height:
            self._enter(View(timeouts.view + 1), timeouts)

    def _enter(self, view: View, entered: TimeoutCertificate | None) -> None:
        state = self._state
        state.enter(view, entered)
        self._activate()
        state.view_ends = self._now + self._config.view_seconds(view)
        self._ticks = 0
        self._schedule_tick()
        required = safety.required_digest(entered)
        if required is not None and required not in state.bodies and self.leader == self._config.me:
            self._want(required)

    # -- sending

    def _want(self, digest: bytes) -> None:
        self._state.wanted = digest
        self._out.broadcast(encode(Want(self._state.height, digest)))

    def _serve(self, peer: PeerId, start: Height) -> None:
        if self._limits.may_serve(peer, self._now):
            blocks = self._history.batch(start, self._state.height)
            if blocks:
                self._out.send(peer, Blocks(self._state.height, blocks))
