"""The open rounds of one peer, without I/O.

The peer collects the messages of rounds, and signs its own when they are due. T1 is the timeout for proposals and T2 the one for
re-executors' ballots (`rounds.round_state`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Container, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from consensus.effects import OwnRoundStatement
from consensus.evidence import Evidence
from ledger.audits.loss_commitments import LossOpening
from ledger.jobs import Job, JobPhase
from ledger.ledger_state import LedgerState
from peer.node.audit_secrets import AuditSecrets
from peer.node.future_messages import ROUND_MESSAGES, FutureRoundMessages, RoundKey, RoundMessage
from protocol import codec
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, Signer, sign_message
from protocol.messages import Ballot, CutOff, Proposal, Vouch
from protocol.verdicts import Verdict
from rounds.round_state import VOUCH_SECONDS_MIN, OpenRoundState, RoundTimeouts
from rounds.round_terms import RoundTerms, signed_body_digest

VOUCH_SECONDS_START = 10.0  # assumed time from the delivery of a proposal to its vouch, until this peer has measured this time
# T2 − T1 as a multiple of the usual time of a vouch. If a vouch is late, other re-executors begin after twice the usual time,
# have twice the work, and may be three times as slow.
REPLAYS_FACTOR = 8.0
# Time to check one proposal in a job without re-execution before the ballot: enough for a large payload on a busy machine.
CHECK_SECONDS = 1.0
CHECKS_FACTOR = 3.0  # factor by which other voters may be slower than `CHECK_SECONDS`
TIMINGS_MAX = 16  # last rounds of a job whose measured times are stored
RETURN_ROUNDS_MAX = 256  # most rounds between two waits for one idle trainer: each wait costs all peers the time T1
NO_LINKS: Mapping[bytes, float] = MappingProxyType({})
# Seconds between requests for the messages of a round that cannot be closed.
ROUND_REQUEST_SECONDS = 3.0


@dataclass(slots=True)
class RoundEffects:
    """The effects of one input: records to make durable, then messages to send."""

    records: list[OwnRoundStatement] = field(default_factory=list)
    sends: list[Signed] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    # messages of rounds that began to count, as (signer, message), for displays
    counted_messages: list[tuple[bytes, RoundMessage]] = field(default_factory=list)


@dataclass(slots=True)
class _ReturningTrainer:
    """A trainer that the ledger does not await. Few rounds wait for it, because each wait costs T1 if the trainer stays idle."""

    alive: int = 0  # number of rounds at whose opening the trainer was alive
    waits: int = 0  # number of rounds that waited for the trainer


@dataclass(slots=True)
class RoundTimings:
    """Times that this peer measured in earlier rounds. They stay valid if a snapshot replaces the peer's state."""

    # Job -> seconds from a proposal to its vouch in each recent round.
    vouches: dict[bytes, list[float]] = field(default_factory=dict)
    # job -> for each recent round: (seconds until a majority of the awaited trainers had proposed, all awaited trainers)
    paces: dict[bytes, list[tuple[float, frozenset[bytes]]]] = field(default_factory=dict)
    # job -> trainer -> its state
    returns: dict[bytes, dict[bytes, _ReturningTrainer]] = field(default_factory=dict)
    begun: dict[bytes, float] = field(default_factory=dict)  # job -> time at which its last round opened at this peer

    def retain_jobs(self, running: Container[bytes]) -> None:
        self.paces = {key: paces for key, paces in self.paces.items() if key in running}
        self.vouches = {key: vouches for key, vouches in self.vouches.items() if key in running}
        self.returns = {key: returns for key, returns in self.returns.items() if key in running}
        self.begun = {key: begun for key, begun in self.begun.items() if key in running}

    def record_round(self, key: bytes, closed: OpenRoundState) -> None:
        if closed.vouching.vouch_seconds:
            self.vouches[key] = [*self.vouches.get(key, []), _robust_time(closed.vouching.vouch_seconds)][-TIMINGS_MAX:]
        if closed.majority_arrival_seconds:  # zero if the proposals came before the round opened at this peer
            self.paces[key] = [*self.paces.get(key, []), (closed.majority_arrival_seconds, closed.terms.awaited)][-TIMINGS_MAX:]


class OpenRounds:
    """The open rounds of running jobs in the applied state.

    The ledger shares the collected messages in `books` and closes rounds with them.
    """

    def __init__(
        self, signer: Signer, chain_id: bytes, books: dict[bytes, OpenRoundState], measured: RoundTimings | None = None
    ) -> None:
        self._signer, self._chain_id = signer, chain_id
        self.books, self.measured = books, measured or RoundTimings()
        self._finished: Set[bytes] = frozenset()  # finished jobs, whose messages are ignored
        self._opened: dict[bytes, int] = {}  # job -> height whose block assigned its open round to the voters
        self._patience: dict[bytes, int] = {}  # job -> how often its timeouts were doubled
        self._replaced: dict[bytes, OpenRoundState] = {}  # job -> book of a round that is renewed, until that round opens again
        self.early = FutureRoundMessages(signer.public)
        self._sought: dict[bytes, float] = {}
        self.is_silent = False  # True while this peer signs nothing, because it may have forgotten earlier signatures
        # Open rounds in which this peer signs nothing more: a restored message of its own may contradict new ones.
        self.muted: frozenset[RoundKey] = frozenset()
        self._to_publish: dict[RoundKey, Proposal] = {}
        self.secrets = AuditSecrets(signer, chain_id)

    # Opening and closing

    def apply_state(self, state: LedgerState) -> tuple[list[RoundKey], list[RoundKey]]:
        """Follow the applied state.

        Return (rounds that opened, rounds that ended). A renewed round has new voters and is in each of the lists.
        """
        running = {key: job for key, job in state.jobs.jobs.items() if job.phase is JobPhase.RUNNING}
        before = {(key, book.terms.round) for key, book in self.books.items()}
        now = {(key, job.round) for key, job in running.items()}
        renewed = {(key, number) for key, number in before & now if running[key].opened_height != self._opened[key]}
        for key, _ in before - now:
            self.measured.record_round(key, self.books.pop(key))
        for key, _ in renewed:
            self._replaced[key] = self.books.pop(key)
        for key, _ in before - now | renewed:
            self._sought.pop(key, None)
        self._finished = state.jobs.jobs.keys() - state.jobs.unfinished().keys()
        self.secrets.update_state(state)
        self.measured.retain_jobs(running)
        self.early.drop_old_messages(state)
        self.muted &= now
        self._to_publish = {key: proposal for key, proposal in self._to_publish.items() if key in now}
        return sorted(now - before | renewed), sorted(before - now | renewed)

    def open_round(
        self,
        key: bytes,
        job: Job,
        now: float,
        spoken: Mapping[str, Signed],
        proposal_seconds: float,
        heard: Mapping[bytes, float] = NO_LINKS,
        accepted: Sequence[Signed] = (),
    ) -> RoundEffects:
        """Open the round of job `key` and add the known messages of this round.

        Known messages are our own from before a restart (`spoken`, by tag), the proposals that our ballot accepts (`accepted`)
        and messages that came too early. A renewed round has those of its earlier book, too. `proposal_seconds` bounds T1.
        `heard` has the time of the last message on each link, or the time at which a link without messages was opened.
        """
        terms = job.round_terms(key)
        usual, trainers = self._usual_pace(key, job, terms)
        returning = self._returning(key, terms, heard)
        self.measured.begun[key] = now
        self._patience[key] = job.timeout_doublings
        seconds = self._vouch_seconds(key, (), proposal_seconds)
        timers = RoundTimeouts(proposal_seconds, self._replays(terms, seconds), usual, trainers, returning, seconds)
        me = self._signer.public if self._signer.public in terms.voters else None
        self.books[key], self._opened[key] = OpenRoundState(terms, me, now, timers), job.opened_height
        replaced = self._replaced.pop(key, None)
        # Different terms mean that the ledger's earlier state here was wrong, so messages of the earlier book do not count.
        if replaced is not None and replaced.terms.signed_fields == terms.signed_fields:
            self.books[key].import_from(replaced)
        effects = RoundEffects(sends=list(spoken.values()))
        self._resume(self.books[key], spoken, now, effects)
        for signed in accepted:
            # Refused messages are dropped: the renewed round may have other trainers.
            with contextlib.suppress(RemoteProtocolError):
                self._add_message(self.books[key], signed, _decoded(signed, Proposal), now, effects)
        for kept in self.early.pop_round((key, job.round)):
            try:
                self._accept_message(self.books[key], kept.signed, kept.decode(), now, effects)
            except RemoteProtocolError:
                # A message that is invalid in this round is dropped: it came before the round opened and could not be checked.
                continue
        return effects

    def _usual_pace(self, key: bytes, job: Job, terms: RoundTerms) -> tuple[float | None, frozenset[bytes]]:
        """Return (usual seconds until a majority of the awaited trainers had proposed in earlier rounds, these trainers).

        Without measurements, the seconds are None before the job's first accepted update, and zero after it. Zero means not to
        wait: other peers have measured by then, and each round would wait for a peer that waits longer than they do.
        """
        paces = self.measured.paces.get(key, [])
        if not paces:
            return (0.0 if job.accepted else None), terms.trainers
        return _upper_quartile([pace for pace, _ in paces]), frozenset[bytes]().union(*(who for _, who in paces))

    def _returning(self, key: bytes, terms: RoundTerms, heard: Mapping[bytes, float]) -> frozenset[bytes]:
        """Return the returning trainers: this round waits for them although the ledger does not await them.

        Without this wait, a returning trainer must be faster than all awaited ones to be accepted again. A returning trainer must
        have been alive at the openings of two rounds. Each wait for it doubles the number of rounds to the next wait. Rounds are
        chosen by their number, so that all voters wait in the same rounds, and for all idle trainers at once.

        | trainer       | is alive if                                    | because                                           |
        | this peer     | always                                         |                                                   |
        | another voter | it sent a message since the last round opened  | a running voter sends messages in each round      |
        | non-voter     | it is linked and has sent a message            | it sends nothing before it proposes               |
        """
        before = self.measured.returns.get(key, {})
        returns = self.measured.returns[key] = {
            trainer: before.get(trainer) or _ReturningTrainer() for trainer in terms.trainers - terms.awaited
        }
        returning = set()
        for trainer, entry in returns.items():
            since = self.measured.begun.get(key, math.inf) if trainer in terms.voters else -math.inf
            if trainer != self._signer.public and heard.get(trainer, -math.inf) <= since:
                continue
            entry.alive += 1
            if entry.alive > 1 and terms.round % min(RETURN_ROUNDS_MAX, 2 << entry.waits) == 0:
                returning.add(trainer)
                entry.waits += 1
        return frozenset(returning)

    def _resume(self, book: OpenRoundState, spoken: Mapping[str, Signed], now: float, effects: RoundEffects) -> None:
        for signed in spoken.values():
            try:
                message = _decoded(signed, *ROUND_MESSAGES)
                if not isinstance(message, Proposal) and signed.signer not in _signers(book.terms, message):
                    # The message does not count: we have no vote and no re-execution in this round now, so no second message can
                    # follow.
                    continue
                self._add_message(book, signed, message, now, effects)
            except RemoteProtocolError:
                # We signed the message on a wrong state, which was replaced since. It remains valid as evidence, so we sign no
                # other in this round.
                self.muted |= {(book.terms.job, book.terms.round)}

    def _replays(self, terms: RoundTerms, vouch_seconds: float) -> float:
        """Return T2 − T1 in seconds: time for re-executions, or for checks if the job re-executes nothing before ballots."""
        if not terms.trainers_to_vouch_for:
            return CHECKS_FACTOR * len(terms.trainers) * CHECK_SECONDS * 2 ** self._patience[terms.job]
        return REPLAYS_FACTOR * vouch_seconds * 2 ** self._patience[terms.job]

    def _vouch_seconds(self, key: bytes, measured: Sequence[float], proposal_seconds: float) -> float:
        """Return the usual seconds from the delivery of a proposal to its vouch.

        `measured` are the times of the open round. The result is at most `proposal_seconds`, because faulty trainers and
        re-executors could produce long times together.
        """
        before = self.measured.vouches.get(key)
        if not before and not measured:
            return min(VOUCH_SECONDS_START, max(VOUCH_SECONDS_MIN, proposal_seconds))
        usual = _upper_quartile(before) if before else _robust_time(measured)
        return max(VOUCH_SECONDS_MIN, min(usual, proposal_seconds))

    # Messages in

    def receive_message(self, signed: Signed, message: RoundMessage, now: float) -> RoundEffects | None:
        """Add a message whose signature the caller has verified, and return the effects.

        Return None if the message's round is not open. A message of a later round is buffered.
        """
        book = self.books.get(message.job)
        if message.job in self._finished:
            return None
        if book is None or message.round > book.terms.round:
            self.early.add_message(signed, message)
            return None
        if message.round < book.terms.round:
            return None
        if signed.signer not in _signers(book.terms, message):
            self.early.add_message(signed, message)  # the next block may renew the round with this signer
        effects = RoundEffects()
        self._accept_message(book, signed, message, now, effects)
        return effects

    def _accept_message(
        self, book: OpenRoundState, signed: Signed, message: RoundMessage, now: float, effects: RoundEffects
    ) -> None:
        if signed.signer != self._signer.public:
            self._add_message(book, signed, message, now, effects)
        elif isinstance(message, Vouch) and signed.signer not in book.terms.reexecutors:
            return  # we signed this vouch before the round was renewed, and are no re-executor of the renewed round
        elif all(signed.body != known.body for known in book.statements_signed_by(self._signer.public)):
            self._restore_own_message(book, signed, message, now, effects)

    def _restore_own_message(
        self, book: OpenRoundState, signed: Signed, message: RoundMessage, now: float, effects: RoundEffects
    ) -> None:
        """Add a message of this peer that is missing from its disk.

        The message remains valid, and this peer signs no other in the round.
        """
        self.muted |= {(message.job, message.round)}
        if not book.has_seen_statement(signed.signer, message):
            record = _record(book, signed, message)
            self._add_message(book, signed, message, now, effects)
            effects.records.append(record)

    def _is_mute(self, book: OpenRoundState) -> bool:
        return self.is_silent or (book.terms.job, book.terms.round) in self.muted

    def _add_message(
        self, book: OpenRoundState, signed: Signed, message: RoundMessage, now: float, effects: RoundEffects
    ) -> None:
        pair = None
        is_new = not book.has_seen_statement(signed.signer, message)
        match message:
            case Proposal():
                pair = book.add_proposal(signed, message)
            case Ballot():
                pair = book.add_ballot(signed, message, now)
            case Vouch():
                pair = book.add_vouch(signed, message, now)
                # A peer that restarted during the round has only guessed T2, and its cut-off may be needed. So measured vouches
                # change T2.
                seconds = self._vouch_seconds(book.terms.job, book.vouching.vouch_seconds, book.timers.proposals_max_seconds)
                book.timers = replace(book.timers, replay_seconds=self._replays(book.terms, seconds), vouch_usual_seconds=seconds)
                if is_new and pair is None and signed.signer != self._signer.public:
                    # Relayed: the vouch's author may know few peers, or send the vouch to a few deliberately.
                    effects.sends.append(signed)
            case CutOff():
                first = book.signed_cut_offs.get(signed.signer, signed)
                book.add_cut_off(signed, message)
                if first.body != signed.body:
                    effects.evidence.append(Evidence(first, signed))
        if is_new:
            effects.counted_messages.append((signed.signer, message))
        if pair is not None:
            effects.evidence.append(Evidence(*pair))
            effects.sends.extend(pair)  # both are relayed: otherwise some voters would judge one proposal and some the other

    def record_verdict(self, key: RoundKey, trainer: bytes, verdict: Verdict, now: float) -> None:
        """Record the verdict on a trainer's proposal from the checks that need no re-execution."""
        book = self.books.get(key[0])
        if book is not None and book.terms.round == key[1]:
            book.record_verdict(trainer, verdict, now)

    def record_replay_start(self, key: RoundKey, trainer: bytes) -> None:
        """Record that all data for the re-execution of this trainer's proposal has arrived."""
        book = self.books.get(key[0])
        if book is not None and book.terms.round == key[1]:
            book.vouching.started.add(trainer)

    def record_replay_verdict(self, key: RoundKey, trainer: bytes, verdict: Verdict, now: float) -> None:
        """Record the verdict on a trainer's proposal from our own re-execution."""
        book = self.books.get(key[0])
        if book is not None and book.terms.round == key[1]:
            book.record_replay_verdict(trainer, verdict, now)

    # Messages out

    def publish_proposal(self, proposal: Proposal, now: float, opening: LossOpening | None = None) -> RoundEffects:
        """Sign our proposal for an open round as soon as this peer may sign, unless it has proposed in the round already.

        In jobs with sampled audits the proposal commits to `opening`.
        """
        effects, book = RoundEffects(), self.books.get(proposal.job)
        if book is not None and book.terms.round == proposal.round:
            self._to_publish[proposal.job, proposal.round] = self.secrets.with_commitment(proposal, opening)
            self._publish(book, now, effects)
        return effects

    def _publish(self, book: OpenRoundState, now: float, effects: RoundEffects) -> None:
        proposal = self._to_publish.get((book.terms.job, book.terms.round))
        if proposal is not None and self._signer.public not in book.proposals and not self._is_mute(book):
            self._sign_message(book, proposal, now, effects)

    def sign_due_messages(self, now: float) -> RoundEffects:
        """Sign and return our vouches, ballots and cut-offs that are due.

        Proposals that had to wait until this peer may sign are included.
        """
        effects = RoundEffects()
        for book in self.books.values():
            if self._is_mute(book):
                continue
            self._publish(book, now, effects)
            book.assign_reexecutions(now)
            vouch = book.vouching.make_vouch_if_due()
            if vouch is not None:
                self._sign_message(book, vouch, now, effects)
            ballot = book.make_ballot_if_due(now)
            if ballot is not None:
                self._sign_message(book, self.secrets.with_nonce(ballot), now, effects)
            cut_off = book.make_cut_off_if_due(now)
            if cut_off is not None:
                self._sign_message(book, cut_off, now, effects)
        return effects

    def _sign_message(self, book: OpenRoundState, message: RoundMessage, now: float, effects: RoundEffects) -> None:
        signed = sign_message(self._signer, self._chain_id, message)
        effects.records.append(_record(book, signed, message))
        effects.sends.append(signed)
        self._add_message(book, signed, message, now, effects)

    def rounds_to_request(self, now: float) -> Iterator[RoundKey]:
        """Yield the rounds whose messages this peer must now request from other peers.

        | condition                                          | requests                                                         |
        | the messages here cannot close the round           | one each ROUND_REQUEST_SECONDS                                   |
        | they can close it by cut-offs only                 | the same: a leader needs the ballots that the cut-offs name      |
        | a ballot or vouch names a proposal that differs    | one at once and no more, since a voter may have invented         |
        | from the one here                                  | the proposal                                                     |

        Two proposals of one trainer are evidence, even if the round can be closed without them. Faulty voters may send their
        ballots to some voters only.
        """
        for key, book in self.books.items():
            due = self._seek_due(key, book)
            if due is not None and now >= due:
                self._sought[key] = now
                yield key, book.terms.round

    def _seek_due(self, key: bytes, book: OpenRoundState) -> float | None:
        """Return the time of the next request for messages of the job's open round, or None if the round can be closed.

        Before the first ballot, the request is not earlier than T1, because the trainers compute until then.
        """
        if book.is_contradicted and key not in self._sought:
            return book.opened_at
        closing = book.certificate()
        if closing is not None and not closing.cut_offs:
            return None
        if key in self._sought:
            return self._sought[key] + ROUND_REQUEST_SECONDS
        soon = book.opened_at + ROUND_REQUEST_SECONDS
        return soon if book.ballots else max(soon, book.proposals_due_at)

    def messages_of_round(self, key: RoundKey) -> list[Signed]:
        book = self.books.get(key[0])
        if book is None or book.terms.round != key[1]:
            return []
        vouches = book.vouching.signed.values()
        return [*book.proposals.values(), *vouches, *book.signed_ballots.values(), *book.signed_cut_offs.values()]

    def own_messages(self) -> list[Signed]:
        """Return our own messages of the open rounds. They are sent to each new link."""
        return [signed for book in self.books.values() for signed in book.statements_signed_by(self._signer.public)]

    def deadline(self, now: float) -> float | None:
        if not self.books:
            return None
        times = [time for book in self.books.values() if (time := book.next_deadline(now)) is not None]
        times += [due for key, book in self.books.items() if (due := self._seek_due(key, book)) is not None]
        return min(times, default=None)


def _record(book: OpenRoundState, signed: Signed, message: RoundMessage) -> OwnRoundStatement:
    """Return the record of our message for the disk.

    The record of a ballot contains the other trainers' proposals that the ballot accepts. A round certificate needs the bytes of
    these proposals. Without them, a round could stay open forever if the trainer has lost its disk and all accepting voters have
    restarted.
    """
    judgements = message.judgements if isinstance(message, Ballot) else ()
    others = [
        (j.proposal, book.proposals.get(j.trainer))
        for j in judgements
        if j.verdict is Verdict.ACCEPT and j.trainer != signed.signer
    ]
    accepted = [held for digest, held in others if held is not None and signed_body_digest(held) == digest]
    # Each of our vouches in a round needs its own tag. The tag has the first trainer that no earlier vouch of ours names.
    tag = message.TAG
    if isinstance(message, Vouch):
        tag += f":{book.vouching.new_judgements(signed.signer, message)[0].trainer.hex()}"
    return OwnRoundStatement(tag, message.job, message.round, signed, tuple(accepted))


def _signers(terms: RoundTerms, message: RoundMessage) -> frozenset[bytes]:
    """Return the peers that may sign a message of this kind in the round."""
    match message:
        case Proposal():
            return terms.trainers
        case Vouch():
            return terms.reexecutors
        case Ballot() | CutOff():
            return terms.voters


def _robust_time(seconds: Sequence[float]) -> float:
    """Return the 0.4 quantile of the times.

    Faulty peers cannot increase it: at least 4/9 of the times are of honest voters and trainers.
    """
    return sorted(seconds)[2 * len(seconds) // 5]


def _upper_quartile(seconds: Sequence[float]) -> float:
    """Return the upper quartile of the times. The maximum would contain pauses of this peer itself."""
    return sorted(seconds)[3 * len(seconds) // 4]


def _decoded(signed: Signed, *kinds: type[RoundMessage]) -> RoundMessage:
    message: RoundMessage = codec.decode_message(signed.body, kinds)
    return message
