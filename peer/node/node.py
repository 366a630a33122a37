"""The node: all decisions of one peer, without its disk, network, clock and threads.

The daemon's driver and the simulator run the same `Node`. It does no I/O, and time is an argument. Each step returns
`StepEffects`, with the records to store and the messages to send.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from consensus import inputs
from consensus.effects import DecidedBlock, OutgoingMessage, PeerFault, RestartState, SendMessage, StepEffects, merge_effects
from consensus.evidence import Evidence
from consensus.pbft.replica import Replica
from consensus.voter_set import VoterSet
from ledger.blocks.application import LedgerApplication
from ledger.blocks.mempool import SIGNED_BYTES, transaction_digest
from ledger.core.module import Refused
from ledger.jobs import Job, JobsModule
from ledger.ledger_state import LedgerRules, LedgerState, StateTransition, decode_body
from ledger.members import ADMIT_KIND
from peer.node.future_messages import ROUND_MESSAGES, RoundKey, RoundMessage
from peer.node.non_voter_rollback_check import NonVoterRollbackCheck
from peer.node.open_rounds import OpenRounds, RoundEffects, RoundTimings
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Signer, Verifier, short_id, sign_message
from protocol.limits import EVIDENCE_PER_BLOCK_MAX, INCLUSION_LIST_MAX, TRANSACTION_BYTES_MAX
from protocol.messages import (
    AGREEMENT_MESSAGES,
    GOSSIP_MESSAGES,
    EvidenceMessage,
    GetRememberedStatements,
    GetRound,
    GossipEnvelope,
    InclusionList,
    Proposal,
    RememberedStatements,
    Transaction,
)
from transport.network import DataReceived, DuplicateIdentity, PeerConnected, PeerDisconnected

# Links that get one request for the messages of a round. Each request goes to the next links, so that 100 links take 40 seconds.
ROUND_REQUEST_LINKS = 8
ROUND_ANSWER_SECONDS = 1.0  # least time between two answers to GetRound requests of one peer

# A new link gets the mempool page by page, so that votes do not wait behind a whole mempool. A transaction that no page contains
# is not lost, because the voters that have it put it into their own blocks and inclusion lists.
POOL_PAGE_MAX = 256  # transactions of one page: a quarter of a block
POOL_PAGE_BYTES = 1 << 20  # bytes of one page: a sixteenth of a link's queue, and four times the largest transaction
POOL_PAGE_SECONDS = 1.0  # least time between two pages for one link; pages are sent when a block is applied

# When a view has failed, the voters send the next leader the transactions that they wait for, since its `Mempool` may have
# dropped them. One valid transaction is enough for a block, so a page must have room for the largest. A leader gets at most one
# such page from each other voter.
AWAITED_MAX = INCLUSION_LIST_MAX  # transactions of such a page, as in an inclusion list
AWAITED_BYTES = TRANSACTION_BYTES_MAX + SIGNED_BYTES

# We send our own transactions again with every block, and after this time if no block comes. Other peers drop a transaction if
# they have not yet applied an earlier block that it needs, such as the one that admits its author.
OWN_REPEAT_SECONDS = 1.0

GOSSIPED_TYPES: tuple[type[Any], ...] = (*ROUND_MESSAGES, Transaction, InclusionList)
UNDERSTOOD: tuple[type[Any], ...] = (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES)


@dataclass(frozen=True, slots=True)
class AppliedBlock:
    """Input of the node: the driver has applied the next decided block, and `state` is durable."""

    decided: DecidedBlock
    transition: StateTransition
    state: LedgerState


@dataclass(frozen=True, slots=True)
class StepAction:
    """A callback that runs inside a step. Its effects are stored and sent with those of the step."""

    run: Callable[[], RoundEffects | None]


@dataclass(slots=True)
class _MempoolCursor:
    """The part of the mempool that a new link has not received yet."""

    start: int  # number in the mempool of the next transaction to send
    end: int
    told: float  # time at which the last page was sent


NodeInput = PeerConnected | PeerDisconnected | DuplicateIdentity | DataReceived | AppliedBlock | StepAction


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round in which the driver may propose, judge and re-execute.

    The driver calls `rounds.publish_proposal`, `.record_verdict`, `.record_replay_start` and `.record_replay_verdict`, each in a
    `StepAction`.
    """

    key: RoundKey
    job: Job
    has_proposed: bool  # True if this peer has proposed in the round before a restart
    renewed: bool  # True if the round was open already, with other voters


@dataclass(frozen=True, slots=True)
class RoundEnded:
    key: RoundKey
    opened_at: float  # time of this peer's clock in seconds
    has_proposed: bool


RoundChange = RoundOpened | RoundEnded


class Node:
    """The state machine of one peer: it handles inputs and returns effects.

    | argument               | meaning                                                                                         |
    | ledger                 | the last applied state                                                                          |
    | restart                | the contents of the journal; the driver first applies the decided blocks above the applied one  |
    | verifier               | verifies signatures outside the transition rules: the caching verifier of `rules`               |
    | spoken(job, round)     | reads our signed messages of a round from disk, by message tag; called when a round opens       |
    | accepted(job, round)   | reads the proposals that our ballot of a round accepts; called when a round opens               |
    | anchor_height          | as for `Replica`                                                                                |
    | measured               | timings of the node that this one replaces, if its state was replaced                           |
    | processor              | returns this thread's processor time in seconds, by which the cost of messages is measured      |

    The driver calls `step` once at the start without items, then for new inputs and at the last `deadline`. Between two calls it
    carries out the effects (`consensus.effects.persist_effects`, then `deliver`) and drops the peers in `faults`. It applies the
    `decided_blocks` in order and at its own pace (`rules.apply_block`, the models' roots, `StateTransition.finish_state`), and
    reports each with `AppliedBlock`.
    """

    def __init__(
        self,
        signer: Signer,
        rules: LedgerRules,
        ledger: LedgerApplication,
        restart: RestartState,
        verifier: Verifier,
        spoken: Callable[[bytes, int], Mapping[str, Signed]],
        accepted: Callable[[bytes, int], Sequence[Signed]],
        anchor_height: int = 0,
        measured: RoundTimings | None = None,
        processor: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self.me = signer.public
        self.chain_id = rules.chain_id
        self.rules, self.ledger = rules, ledger
        self.rounds = OpenRounds(signer, self.chain_id, ledger.rounds, measured)
        ledger.future_messages_of = self.rounds.early.signed_by
        self.replica = Replica(signer, self.chain_id, verifier, ledger, _applied_event(ledger.state), restart, anchor_height)
        # messages of rounds that began to count in the last step, as (signer, message)
        self.counted_messages: tuple[tuple[bytes, RoundMessage], ...] = ()
        # our transactions that left the mempool undecided in the last step, as (transaction, reason)
        self.dropped_transactions: tuple[tuple[Signed, str], ...] = ()
        self.refusal_counts: dict[str, int] = {}  # reason -> number of messages refused for it
        # sender -> processor seconds for each of its messages in the last step
        self.processor_seconds: dict[bytes, list[float]] = {}
        self._processor = processor
        self._signer = signer
        self._spoken, self._accepted = spoken, accepted
        self._links: dict[bytes, float] = {}  # linked peer -> time of its last message
        self._strangers: dict[bytes, None] = {}  # linked peers that are no members: they get only answers to their requests
        self._recall = NonVoterRollbackCheck()
        self._untold: dict[bytes, _MempoolCursor] = {}
        self._answered: dict[bytes, float] = {}
        self._asked_last = self.me
        self._now = 0.0
        self._turns: list[StepEffects] = []
        self._deadline: float | None = None  # next deadline of the replica
        self._repeat_at: float | None = None  # time to send this peer's undecided transactions again
        self._lingers_until: float | None = None  # time until which transactions wait for further ones that share their block
        self._resumes_at: float | None = None  # time at which deferred closings of rounds are tried again
        self._changes: list[RoundChange] = []
        self._has_started = False
        for evidence in restart.evidence:
            ledger.add_evidence(evidence)

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    def is_stranger(self, peer: bytes) -> bool:
        """Return whether `peer` is no member, if this peer is one. A peer that is no member itself has no strangers."""
        members = self.state.members
        return members.is_current_key(self.me) and not members.is_current_key(peer)

    @property
    def may_sign_round_messages(self) -> bool:
        """True once this peer knows all its earlier signatures, so that it cannot contradict them after a disk rollback.

        Other peers can return our messages of a round until they close the round. So this peer signs nothing while a decided
        block is not applied here: the block may close the round.
        """
        is_applied = self.state.height + 1 >= self.replica.height
        if not is_applied or not self.replica.may_sign_round_messages:
            return False
        return self.replica.is_voter or not self._is_heard_in_rounds or self._is_recalled

    @property
    def _is_recalled(self) -> bool:
        return self._recall.has_quorum(self._voters, self.state.height + 1)

    @property
    def _is_heard_in_rounds(self) -> bool:
        """True if this peer may propose or vote in an open round. A round keeps its voters, even if they leave meanwhile."""
        terms = [book.terms for book in self.rounds.books.values()]
        return any(self.me in of_book.trainers or self.me in of_book.voters for of_book in terms)

    @property
    def _voters(self) -> VoterSet:
        return _voter_set(self.state.members.voters)

    def take_round_changes(self) -> tuple[RoundChange, ...]:
        """Return the rounds that opened or ended since the last call, in the order of these events."""
        changes, self._changes = tuple(self._changes), []
        return changes

    # One step --------------------------------------------------------------------------------------------------------

    def step(self, items: Sequence[NodeInput], now: float) -> StepEffects:
        """Handle `items` and return their merged effects, which need one fsync before the sends. `now` is as for `Replica`."""
        self._now = max(now, self._now)
        self._turns, self.counted_messages, self.dropped_transactions, self.processor_seconds = [], (), (), {}
        if not self._has_started:
            self._has_started = True
            self._follow_rounds()
        self.rounds.is_silent = not self.may_sign_round_messages
        for item in items:
            self._handle(item)
        self._ask_what_was_heard()
        self.rounds.is_silent = not self.may_sign_round_messages
        for key in self.rounds.rounds_to_request(self._now):
            self._send(self._next_asked(), GetRound(*key))
        self._emit(self.rounds.sign_due_messages(self._now))
        self._repeat_own()
        self._lingers_until = self.ledger.mempool.release_lingering(self._now)
        self._resumes_at = self.ledger.resume_deferred_rounds(self._now)
        accused = len(self.ledger.pending_evidence)
        self._conclude()
        if len(self.ledger.pending_evidence) > accused:
            self._conclude()  # a message that was buffered for the next height may have been evidence
        own = (self._deadline, self._repeat_at, self._lingers_until, self._resumes_at)
        times = (*own, self.rounds.deadline(self._now), self._recall.deadline(self._now))
        return merge_effects(self._turns, min([time for time in times if time is not None], default=None))

    def _repeat_own(self) -> None:
        own = self.ledger.mempool.transactions_of(self.me)
        if self._repeat_at is not None and self._now >= self._repeat_at:
            self._send(None, *map(GossipEnvelope, own))
            self._repeat_at = None
        if not own:
            self._repeat_at = None
        elif self._repeat_at is None:
            self._repeat_at = self._now + OWN_REPEAT_SECONDS

    def _handle_event(self, event: inputs.ReplicaInput) -> None:
        self.replica.handle_input(event, self._now)

    def _conclude(self) -> None:
        """Let the replica act once on all inputs of this step so far."""
        self._handle_event(inputs.WorkChangedInput())
        height, view = self.replica.height, self.replica.view
        turn = self.replica.finish_step(self._now)
        self._deadline = turn.deadline
        accusing = turn.evidence
        if accusing:
            turn = replace(turn, records=tuple(record for record in turn.records if not isinstance(record, Evidence)))
        self._turns.append(turn)
        for evidence in accusing:
            self._accuse(evidence)
        for signed in turn.remembered_round_messages:
            self._handle_relayed(signed)
        if self.replica.height == height and self.replica.view > view:
            self._tell_leader()

    def _tell_leader(self) -> None:
        """Send the leader the transactions that we wait for in this view.

        Otherwise the view could fail: one voter that waits for a transaction and f faulty voters are enough to end it.
        """
        leader = self.replica.leader
        if (
            leader in self._links
            and self.replica.is_voter
            and self.may_sign_round_messages
            and self.ledger.has_due_transactions()
        ):
            awaited = self.ledger.mempool.select_transactions(self.rules, self.state, AWAITED_BYTES, AWAITED_MAX)
            self._send((leader,), *map(GossipEnvelope, awaited))

    def _ask_what_was_heard(self) -> None:
        if not self.replica.is_voter and self._is_heard_in_rounds and not self._is_recalled:
            asked = self._recall.voters_to_ask(self._voters, self._links.keys(), self._now)
            if asked:
                self._send(asked, GetRememberedStatements())

    def _emit(self, said: RoundEffects) -> None:
        if said.records or said.sends:
            self._turns.append(
                StepEffects(tuple(said.records), tuple(SendMessage(None, GossipEnvelope(signed)) for signed in said.sends))
            )
        self.counted_messages += tuple(said.counted_messages)
        for evidence in said.evidence:
            self._accuse(evidence)

    def _send(self, to: tuple[bytes, ...] | None, *messages: OutgoingMessage) -> None:
        if messages:
            self._turns.append(StepEffects(sends=tuple(SendMessage(to, message) for message in messages)))

    def _handle(self, item: NodeInput) -> None:
        match item:
            case DataReceived(peer=peer, data=data):
                if peer in self._links:
                    self._links[peer] = self._now
                started = self._processor()
                try:
                    self._handle_message(peer, data)
                except RemoteProtocolError as error:
                    self._turns.append(StepEffects(faults=(PeerFault(peer, error),)))
                self.processor_seconds.setdefault(peer, []).append(self._processor() - started)
            case PeerConnected(peer=peer):
                self._links[peer] = self._now
                self._handle_event(inputs.ConnectedInput(peer))
                if self.is_stranger(peer):
                    self._strangers[peer] = None
                else:
                    self._begin_mempool_sync(peer)
            case PeerDisconnected(peer=peer):
                self._links.pop(peer, None)
                self._strangers.pop(peer, None)
                self._answered.pop(peer, None)
                self._untold.pop(peer, None)
                self._handle_event(inputs.DisconnectedInput(peer))
            case DuplicateIdentity(address=address):
                self._handle_event(inputs.DuplicateIdentityInput(address))
                self.rounds.is_silent = True
            case StepAction(run=do):
                self._emit(do() or RoundEffects())
            case AppliedBlock():
                self._handle_applied(item)

    def _handle_applied(self, item: AppliedBlock) -> None:
        self.ledger.advance_state(item.state, item.decided.decode().state_root)
        pruned = self.ledger.mempool.prune_transactions(self.rules, item.state)
        self.dropped_transactions += tuple(entry for entry in pruned if entry[0].signer == self.me)
        if any(failure.module == JobsModule.name for failure in item.transition.failures):
            self.ledger.defer_rounds(decode_body(item.decided.decode().body).round_certificates, self._now)
        self._follow_rounds()  # before the replica may request a block: that block must not close a closed round again
        self._handle_event(_applied_event(item.state))
        self._send(None, *self._accusations())
        # No peer that is behind sends its transactions again.
        if self._repeat_at is not None and item.state.height + 1 == self.replica.height:
            self._repeat_at = self._now
        notice = self.ledger.make_inclusion_list(self.me)
        if notice is not None and self.may_sign_round_messages:
            self.ledger.add_inclusion_list(self.me, notice)
            self._send(None, GossipEnvelope(sign_message(self._signer, self.chain_id, notice)))
        for peer in [peer for peer in self._strangers if not self.is_stranger(peer)]:
            del self._strangers[peer]
            self._begin_mempool_sync(peer)
        for peer, untold in list(self._untold.items()):
            if self._now >= untold.told + POOL_PAGE_SECONDS:
                self._send_mempool_page(peer, untold)

    def _begin_mempool_sync(self, peer: bytes) -> None:
        """Send a new link our own messages, then the first page of the mempool.

        Our own messages come first, even if other peers have sent them to this link: only their author is responsible for them.
        """
        self._send((peer,), *map(GossipEnvelope, self.rounds.own_messages()), *self._accusations())
        pool = self.ledger.mempool
        self._send((peer,), *(GossipEnvelope(signed) for signed in pool if signed.signer == self.me))
        self._untold[peer] = _MempoolCursor(0, pool.count, self._now)
        self._send_mempool_page(peer, self._untold[peer])

    def _send_mempool_page(self, peer: bytes, untold: _MempoolCursor) -> None:
        page, untold.start = self.ledger.mempool.page_of_transactions(untold.start, untold.end, POOL_PAGE_BYTES, POOL_PAGE_MAX)
        untold.told = self._now
        self._send((peer,), *(GossipEnvelope(signed) for signed in page if signed.signer != self.me))
        if untold.start == untold.end:
            del self._untold[peer]

    def _follow_rounds(self) -> None:
        books = dict(self.ledger.rounds)
        opened, closed = self.rounds.apply_state(self.state)
        for key in closed:
            book = books[key[0]]
            self._changes.append(RoundEnded(key, book.opened_at, self.me in book.proposals))
        for key in opened:
            job, spoken = self.state.jobs.jobs[key[0]], self._spoken(*key)
            seconds = self.rules.jobs_module.rules.terms_of_spec(job.spec).proposal_seconds
            self._emit(self.rounds.open_round(key[0], job, self._now, spoken, seconds, self._links, self._accepted(*key)))
            self._changes.append(RoundOpened(key, job, Proposal.TAG in spoken, renewed=key in closed))

    # Messages --------------------------------------------------------------------------------------------------------

    def _handle_message(self, peer: bytes, data: bytes) -> None:
        message: Any = codec.decode_message(data, UNDERSTOOD)
        match message:
            case GossipEnvelope(signed=signed):
                self._handle_relayed(signed)
            case GetRound(job=job, round=number):
                if peer in self._links and self._now - self._answered.get(peer, 0.0) >= ROUND_ANSWER_SECONDS:
                    self._answered[peer] = self._now
                    self._send((peer,), *map(GossipEnvelope, self.rounds.messages_of_round((job, number))))
            case EvidenceMessage(first=first, second=second):
                self._accuse(Evidence(first, second))
            case RememberedStatements():
                is_read = self.replica.accepts_answers_of(peer)
                self._handle_event(inputs.MessageInput(peer, message))
                self._conclude()  # the statements that this peer has forgotten must be known before it signs a message of a round
                if is_read:  # an answer that could not be read does not count: the voter is asked again
                    self._recall.add_answer(peer, message.height)
            case _:
                self._handle_event(inputs.MessageInput(peer, message))

    def _handle_relayed(self, signed: Signed) -> None:
        held = self.ledger.mempool.get_transaction(transaction_digest(signed))
        if held is not None and held.signed == signed:
            return  # the mempool has it, so it was verified: authors repeat their transactions, and so does each new link
        if signed.signer not in self.state.members.members and not _asks_for_admission(signed):
            # Refused before the signature is verified, because strangers can send any number of signed messages.
            self._count_refused(RemoteProtocolError("not-a-member", f"a message of {short_id(signed.signer)}"))
            return
        message: Any = self.rules.open_message(signed, GOSSIPED_TYPES)
        if isinstance(message, Transaction):
            if self._handle_transaction(signed, message):
                self.rules.cache_opened_message(signed, message)
                self._send(None, GossipEnvelope(signed))
            return
        if isinstance(message, InclusionList):
            self.ledger.add_inclusion_list(signed.signer, message)
            return
        try:
            outcome = self.rounds.receive_message(signed, message, self._now)
        except RemoteProtocolError as error:
            self._count_refused(error)
            return
        if outcome is not None:
            self.rules.cache_opened_message(signed, message)
            self._emit(outcome)

    def _handle_transaction(self, signed: Signed, transaction: Transaction) -> bool:
        """Return whether the transaction is new and the mempool has added it.

        The caller then relays it once, since its author may know few peers. Raises `RemoteProtocolError` if an embedded statement
        has a false signature: the sender should have verified the statement.
        """
        member = self.state.members.members.get(signed.signer)
        if member is not None and transaction.nonce <= member.nonce:
            return False
        self.rules.check_embedded_statements(signed, transaction)
        try:
            self.rules.apply_transaction(self.state, signed)
        except Refused as refusal:
            # A member's transaction may depend on a block that this peer has not applied. A stranger has only its admission, and
            # repeats it.
            if member is None or self.ledger.mempool.was_dropped(signed):
                self._count_refused(RemoteProtocolError("not-a-member" if member is None else "refused-before", str(refusal)))
                return False
        except RemoteProtocolError as error:
            self._count_refused(error)
            return False
        return self.ledger.mempool.add_transaction(signed, member is not None)

    def _accuse(self, evidence: Evidence) -> None:
        """Store one piece of evidence for each culprit.

        It is sent now, to each new link, and at each height until a block has it. Raises `RemoteProtocolError` if it proves
        nothing.
        """
        if self.ledger.add_evidence(evidence):
            self._turns.append(StepEffects(records=(evidence,)))
            self._send(None, EvidenceMessage(evidence.first, evidence.second))

    def _accusations(self) -> list[EvidenceMessage]:
        """Return messages with the evidence that waits for a block, at most `EVIDENCE_PER_BLOCK_MAX` pieces."""
        waiting = islice(self.ledger.pending_evidence.values(), EVIDENCE_PER_BLOCK_MAX)
        return [EvidenceMessage(evidence.first, evidence.second) for evidence in waiting]

    def _next_asked(self) -> tuple[bytes, ...]:
        """Return the next links to ask, in the order of their keys after the link that was asked last.

        The first are those after our own key.
        """
        known = [peer for peer in self._links if not self.is_stranger(peer)]
        asked = tuple(sorted(known, key=lambda peer: (peer <= self._asked_last, peer))[:ROUND_REQUEST_LINKS])
        self._asked_last = asked[-1] if asked else self._asked_last
        return asked

    def _count_refused(self, error: RemoteProtocolError) -> None:
        """Count a refused message. The sender stays connected, since it may have applied more or fewer blocks than this peer."""
        self.refusal_counts[error.reason] = self.refusal_counts.get(error.reason, 0) + 1


def _asks_for_admission(signed: Signed) -> bool:
    """Return whether a message is an admission, the only message of strangers that peers relay.

    Raises `RemoteProtocolError` if the body is not a valid message.
    """
    message: Any = codec.decode_message(signed.body, GOSSIPED_TYPES)
    return isinstance(message, Transaction) and message.kind == ADMIT_KIND


def _applied_event(state: LedgerState) -> inputs.AppliedInput:
    members = state.members
    sets = (_voter_set(members.previous), _voter_set(members.voters), _voter_set(members.upcoming))
    return inputs.AppliedInput(state.height, state.state_root, sets)


@functools.lru_cache(maxsize=8)  # cached, because voter sets change rarely, and each `VoterSet` caches its hash
def _voter_set(keys: tuple[bytes, ...]) -> VoterSet:
    return VoterSet(keys)
