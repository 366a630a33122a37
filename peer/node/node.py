"""One peer without its disk, its network, its clock and its threads: everything that is decided between "came in" and "goes out".

The daemon's driver and the simulator run the same `Node`. What must be remembered and sent is in the `StepEffects` it returns;
nothing here does input or output, and time is an argument.
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

# asked at a time for what they hold of a round, other ones each time: everybody of a hundred within forty seconds
ROUND_REQUEST_LINKS = 8
ROUND_ANSWER_SECONDS = 1.0  # GetRound of one peer is answered this often

# A new link hears the waiting transactions page by page, so that votes need not queue behind a whole pool. A transaction that no
# page has is not lost: the voters that hold it lead, too, and name it in their notices.
POOL_PAGE_MAX = 256  # transactions: a quarter of a block
POOL_PAGE_BYTES = 1 << 20  # a sixteenth of what may wait for one link; one transaction is a quarter of it at most
POOL_PAGE_SECONDS = 1.0  # between two pages, which come with the blocks that are applied

# When a view has failed, its voters send the next leader the transactions that they wait for: it may have dropped them
# (`Mempool`).
# One that applies is enough for a block, so the largest must fit. A voter gets at most one page from each other voter in a view.
AWAITED_MAX = INCLUSION_LIST_MAX  # transactions: as many as voters name to each other
AWAITED_BYTES = TRANSACTION_BYTES_MAX + SIGNED_BYTES

# We send our own transactions again with every block, and also if no block comes. A peer that has not applied the block before,
# for example one with a newcomer's admission, could not keep them.
OWN_REPEAT_SECONDS = 1.0

GOSSIPED_TYPES: tuple[type[Any], ...] = (*ROUND_MESSAGES, Transaction, InclusionList)
UNDERSTOOD: tuple[type[Any], ...] = (*AGREEMENT_MESSAGES, *GOSSIP_MESSAGES)


@dataclass(frozen=True, slots=True)
class AppliedBlock:
    """The shell has applied the decided block that follows the last one; `state` is durable."""

    decided: DecidedBlock
    transition: StateTransition
    state: LedgerState


@dataclass(frozen=True, slots=True)
class StepAction:
    """Something to be done inside a turn: what it says goes out with the turn."""

    run: Callable[[], RoundEffects | None]


@dataclass(slots=True)
class _MempoolCursor:
    """What waited when a link was made, and is still to be told to it."""

    start: int  # number in the pool
    end: int
    told: float  # when the last page was


NodeInput = PeerConnected | PeerDisconnected | DuplicateIdentity | DataReceived | AppliedBlock | StepAction


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round in which the shell may propose, judge and re-execute, each inside a `StepAction`: `rounds.publish_proposal`,
    `.record_verdict`, `.record_replay_start` and `.record_replay_verdict`.
    """

    key: RoundKey
    job: Job
    has_proposed: bool  # our proposal of before a restart stands
    renewed: bool  # the round was open already, with other voters


@dataclass(frozen=True, slots=True)
class RoundEnded:
    key: RoundKey
    opened_at: float  # when it was opened here
    has_proposed: bool  # we had said our proposal by then


RoundChange = RoundOpened | RoundEnded


class Node:
    """What one peer makes of what it hears.

    `ledger` holds the last applied state, `restart` what the journal had. Decided heights in the journal above the applied one
    must be applied first thing, each with an `AppliedBlock`. `spoken(job, round)` reads from disk what this key signed in a
    round: {message tag: signed}, and `accepted(job, round)` the proposals that its ballot there accepts; both are called when
    a round opens. `verifier` is asked about every signature outside the transition rules; give the one that `rules` has, and a
    caching one. `anchor_height` is as for `Replica`, `measured` what the node knew whose state this one's replaces. `processor`
    reads the processor time of this thread; the node only passes on what its messages took.

    The shell calls `step` once at the start with no items, then whenever something came in or the last turn's `deadline` has
    passed. Before it calls `step` again, it must have carried out the turn before: `consensus.effects.persist_effects`, then
    `deliver`. Then it applies every block of `turn.decided_blocks` in order and at its own pace (`rules.apply_block`, the models'
    roots, `StateTransition.finish_state`) and reports each with `AppliedBlock`; it drops the peers in `turn.faults`.
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
        # round messages that began to count in the last turn, by signer
        self.counted_messages: tuple[tuple[bytes, RoundMessage], ...] = ()
        # our transactions that left the pool undecided, and why, likewise
        self.dropped_transactions: tuple[tuple[Signed, str], ...] = ()
        self.refusal_counts: dict[str, int] = {}  # how many messages were not for us, by reason
        # for each message of the last turn, by who sent it: seconds of the processor
        self.processor_seconds: dict[bytes, list[float]] = {}
        self._processor = processor
        self._signer = signer
        self._spoken, self._accepted = spoken, accepted
        self._links: dict[bytes, float] = {}  # when each last said something
        self._strangers: dict[bytes, None] = {}  # linked when they were no members: told nothing that they did not ask for
        self._recall = NonVoterRollbackCheck()
        self._untold: dict[bytes, _MempoolCursor] = {}
        self._answered: dict[bytes, float] = {}
        self._asked_last = self.me
        self._now = 0.0
        self._turns: list[StepEffects] = []
        self._deadline: float | None = None  # the replica's
        self._repeat_at: float | None = None  # while transactions of our own wait
        self._lingers_until: float | None = None  # while transactions wait for others
        self._resumes_at: float | None = None  # while closings of rounds are deferred
        self._changes: list[RoundChange] = []
        self._has_started = False
        for evidence in restart.evidence:
            ledger.add_evidence(evidence)

    @property
    def state(self) -> LedgerState:
        return self.ledger.state

    def is_stranger(self, peer: bytes) -> bool:
        """To a peer that is no member itself nobody is one."""
        members = self.state.members
        return members.is_current_key(self.me) and not members.is_current_key(peer)

    @property
    def may_sign_round_messages(self) -> bool:
        """Whether this peer signs anything: not before it knows that it has forgotten nothing that it signed.

        What the others remember of rounds ends with the rounds: so nothing is said in one that a decided block may have closed.
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
        """As a trainer, or with a ballot: a round stays with the voters that it was opened for, and some have left since."""
        terms = [book.terms for book in self.rounds.books.values()]
        return any(self.me in of_book.trainers or self.me in of_book.voters for of_book in terms)

    @property
    def _voters(self) -> VoterSet:
        return _voter_set(self.state.members.voters)

    def take_round_changes(self) -> tuple[RoundChange, ...]:
        """The rounds that opened and closed since this was asked last, in that order."""
        changes, self._changes = tuple(self._changes), []
        return changes

    # One turn --------------------------------------------------------------------------------------------------------

    def step(self, items: Sequence[NodeInput], now: float) -> StepEffects:
        """Everything that `items` lead to, merged: one fsync, then the sends. `now` is as for `Replica`."""
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
            self._conclude()  # a height was decided, and what was kept for the next one showed a liar
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
        """Agreement, for all that came in together."""
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
        """Sends the leader the transactions that we shall wait for in this view.

        A leader without them would fail: f liars and one voter that waits give up its view.
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
        self._follow_rounds()  # before the replica asks for a block: a closed round must not be closed again
        self._handle_event(_applied_event(item.state))
        self._send(None, *self._accusations())
        if self._repeat_at is not None and item.state.height + 1 == self.replica.height:  # not while it catches up
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
        """Begins with what is our own: we answer for it, even if other peers know it."""
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
                self._conclude()  # what we forgot must be known before we say anything in a round
                if is_read:  # else it is asked again
                    self._recall.add_answer(peer, message.height)
            case _:
                self._handle_event(inputs.MessageInput(peer, message))

    def _handle_relayed(self, signed: Signed) -> None:
        held = self.ledger.mempool.get_transaction(transaction_digest(signed))
        if held is not None and held.signed == signed:
            return  # verified when it came: its author says it again every second, every new link tells it
        if signed.signer not in self.state.members.members and not _asks_for_admission(signed):
            # Before the signature is checked: strangers can sign as much as they like.
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
        """Whether it is new and kept, and so relayed once: its author may know few peers.

        Raises `RemoteProtocolError` if a statement in it has a false signature: the sender of this message did not verify it.
        """
        member = self.state.members.members.get(signed.signer)
        if member is not None and transaction.nonce <= member.nonce:
            return False
        self.rules.check_embedded_statements(signed, transaction)
        try:
            self.rules.apply_transaction(self.state, signed)
        except Refused as refusal:
            # A member's may follow something that is not applied here yet; a stranger has one thing to say, and says it again.
            if member is None or self.ledger.mempool.was_dropped(signed):
                self._count_refused(RemoteProtocolError("not-a-member" if member is None else "refused-before", str(refusal)))
                return False
        except RemoteProtocolError as error:
            self._count_refused(error)
            return False
        return self.ledger.mempool.add_transaction(signed, member is not None)

    def _accuse(self, evidence: Evidence) -> None:
        """One proof about each culprit is kept and passed on, at once and at every new link and height, until a block has it.

        `RemoteProtocolError` if it proves nothing.
        """
        if self.ledger.add_evidence(evidence):
            self._turns.append(StepEffects(records=(evidence,)))
            self._send(None, EvidenceMessage(evidence.first, evidence.second))

    def _accusations(self) -> list[EvidenceMessage]:
        """The evidence that waits for a block, as many pieces as one can carry."""
        waiting = islice(self.ledger.pending_evidence.values(), EVIDENCE_PER_BLOCK_MAX)
        return [EvidenceMessage(evidence.first, evidence.second) for evidence in waiting]

    def _next_asked(self) -> tuple[bytes, ...]:
        """The next few links in a ring of all members, which every peer enters at another place."""
        known = [peer for peer in self._links if not self.is_stranger(peer)]
        asked = tuple(sorted(known, key=lambda peer: (peer <= self._asked_last, peer))[:ROUND_REQUEST_LINKS])
        self._asked_last = asked[-1] if asked else self._asked_last
        return asked

    def _count_refused(self, error: RemoteProtocolError) -> None:
        """Whether a message belongs depends on how far we have applied, so the peer that passed it on is not punished."""
        self.refusal_counts[error.reason] = self.refusal_counts.get(error.reason, 0) + 1


def _asks_for_admission(signed: Signed) -> bool:
    """All that a stranger may say to everybody. Raises `RemoteProtocolError` for what is no message."""
    message: Any = codec.decode_message(signed.body, GOSSIPED_TYPES)
    return isinstance(message, Transaction) and message.kind == ADMIT_KIND


def _applied_event(state: LedgerState) -> inputs.AppliedInput:
    members = state.members
    sets = (_voter_set(members.previous), _voter_set(members.voters), _voter_set(members.upcoming))
    return inputs.AppliedInput(state.height, state.state_root, sets)


@functools.lru_cache(maxsize=8)  # the sets change rarely, and each knows its hash
def _voter_set(keys: tuple[bytes, ...]) -> VoterSet:
    return VoterSet(keys)
