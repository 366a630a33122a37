"""The open rounds of one peer: the messages that belong to them, and this peer's own messages when their time comes. No I/O."""

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

VOUCH_SECONDS_START = 10.0  # from a delivery to a vouch, until this peer has measured that
# T2 − T1 beside the usual time of a vouch: if that is late, other re-executors begin after twice the time, have twice as much to
# do then, and may be three times as slow as usual.
REPLAYS_FACTOR = 8.0
# For the checks of one proposal where nothing is re-executed before the ballot: a large payload, a busy machine.
CHECK_SECONDS = 1.0
CHECKS_FACTOR = 3.0  # the others may be that much slower
TIMINGS_MAX = 16  # the last times of each kind that are kept
RETURN_ROUNDS_MAX = 256  # an idle trainer costs everybody T1 once in so many rounds
NO_LINKS: Mapping[bytes, float] = MappingProxyType({})
# while a round cannot be closed, this peer asks some others this often for the messages that they hold
ROUND_REQUEST_SECONDS = 3.0


@dataclass(slots=True)
class RoundEffects:
    """The effects of one input: records to make durable, then messages to send."""

    records: list[OwnRoundStatement] = field(default_factory=list)
    sends: list[Signed] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    # (signer, message that counts now): for people
    counted_messages: list[tuple[bytes, RoundMessage]] = field(default_factory=list)


@dataclass(slots=True)
class _ReturningTrainer:
    """A trainer that is not awaited. If it has nothing to say, each round that waits for it costs T1, so few rounds do."""

    alive: int = 0  # openings at which it was alive
    waits: int = 0  # rounds that waited for it


@dataclass(slots=True)
class RoundTimings:
    """Times that this peer measured in former rounds. They stay true when another state replaces this one."""

    vouches: dict[bytes, list[float]] = field(default_factory=dict)  # by job: seconds to a vouch, of each recent round
    # By job, for recent rounds: (seconds that a majority of the awaited trainers took, all awaited trainers).
    paces: dict[bytes, list[tuple[float, frozenset[bytes]]]] = field(default_factory=dict)
    # by job, of the trainers that are not awaited
    returns: dict[bytes, dict[bytes, _ReturningTrainer]] = field(default_factory=dict)
    begun: dict[bytes, float] = field(default_factory=dict)  # by job: when its last round was opened here

    def retain_jobs(self, running: Container[bytes]) -> None:
        self.paces = {key: paces for key, paces in self.paces.items() if key in running}
        self.vouches = {key: vouches for key, vouches in self.vouches.items() if key in running}
        self.returns = {key: returns for key, returns in self.returns.items() if key in running}
        self.begun = {key: begun for key, begun in self.begun.items() if key in running}

    def record_round(self, key: bytes, closed: OpenRoundState) -> None:
        if closed.vouching.vouch_seconds:
            self.vouches[key] = [*self.vouches.get(key, []), _robust_time(closed.vouching.vouch_seconds)][-TIMINGS_MAX:]
        if closed.majority_arrival_seconds:  # zero says nothing: the proposals were here before the round opened here
            self.paces[key] = [*self.paces.get(key, []), (closed.majority_arrival_seconds, closed.terms.awaited)][-TIMINGS_MAX:]


class OpenRounds:
    """Keeps `books` (shared with the ledger, which closes rounds from them) in step with the applied state."""

    def __init__(
        self, signer: Signer, chain_id: bytes, books: dict[bytes, OpenRoundState], measured: RoundTimings | None = None
    ) -> None:
        self._signer, self._chain_id = signer, chain_id
        self.books, self.measured = books, measured or RoundTimings()
        self._finished: Set[bytes] = frozenset()  # finished jobs: no message of theirs counts any more
        self._opened: dict[bytes, int] = {}  # by book: the height that gave the round to its voters
        self._patience: dict[bytes, int] = {}  # by book: of its job
        self._replaced: dict[bytes, OpenRoundState] = {}  # books of renewed rounds, until these are opened again
        self.early = FutureRoundMessages(signer.public)
        self._sought: dict[bytes, float] = {}
        self.is_silent = False  # nothing is signed: this peer may have forgotten what it signed before
        self.muted: frozenset[RoundKey] = frozenset()  # open rounds in which nothing more is signed
        self._to_publish: dict[RoundKey, Proposal] = {}
        self.secrets = AuditSecrets(signer, chain_id)

    # Opening and closing

    def apply_state(self, state: LedgerState) -> tuple[list[RoundKey], list[RoundKey]]:
        """(rounds that opened, rounds that ended). A renewed round, which has other voters now, is in both."""
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
        """Opens the round, with our messages of it from before a restart (`spoken`, by tag), the proposals of others that our
        ballot accepts (`accepted`), and the messages that came too early.

        `proposal_seconds` bounds T1. `heard` has the time of the last message from each peer that we are linked with.
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
        if replaced is not None and replaced.terms.signed_fields == terms.signed_fields:  # otherwise the state before was wrong
            self.books[key].import_from(replaced)
        effects = RoundEffects(sends=list(spoken.values()))
        self._resume(self.books[key], spoken, now, effects)
        for signed in accepted:
            with contextlib.suppress(RemoteProtocolError):  # the round may have been given to others since
                self._add_message(self.books[key], signed, _decoded(signed, Proposal), now, effects)
        for kept in self.early.pop_round((key, job.round)):
            try:
                self._accept_message(self.books[key], kept.signed, kept.decode(), now, effects)
            except RemoteProtocolError:
                continue  # when it came, this peer could not know that it does not belong
        return effects

    def _usual_pace(self, key: bytes, job: Job, terms: RoundTerms) -> tuple[float | None, frozenset[bytes]]:
        """(seconds that a majority of the trainers took in former rounds, these trainers); None if nobody has measured it.

        A peer that has just come back has measured nothing. If the job has accepted updates, the others have measured: zero then
        says not to wait. If we waited longer than the others, every round would wait for us.
        """
        paces = self.measured.paces.get(key, [])
        if not paces:
            return (0.0 if job.accepted else None), terms.trainers
        return _upper_quartile([pace for pace, _ in paces]), frozenset[bytes]().union(*(who for _, who in paces))

    def _returning(self, key: bytes, terms: RoundTerms, heard: Mapping[bytes, float]) -> frozenset[bytes]:
        """The trainers that this round waits for although they are not awaited.

        Without this, a returning trainer must beat every awaited one to be accepted again. It must have been alive at two
        openings. Each wait doubles the number of rounds to the next. Rounds are chosen by their number, so that all voters wait
        in the same rounds, and for all idle trainers at once.

        | trainer       | is alive if                                    | because                                           |
        | this peer     | always                                         |                                                   |
        | another voter | it sent something since the last round opened  | a voter that runs says something in every round   |
        | no voter      | we are linked with it, and it sent something   | it has nothing to say until it proposes           |
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
                    continue  # we do not vote or re-execute in this round any more, so we shall not sign a second one
                self._add_message(book, signed, message, now, effects)
            except RemoteProtocolError:
                # It was signed on a wrong state, which was replaced since. It stands, so this peer signs nothing else there.
                self.muted |= {(book.terms.job, book.terms.round)}

    def _replays(self, terms: RoundTerms, vouch_seconds: float) -> float:
        """T2 − T1."""
        if not terms.trainers_to_vouch_for:
            return CHECKS_FACTOR * len(terms.trainers) * CHECK_SECONDS * 2 ** self._patience[terms.job]
        return REPLAYS_FACTOR * vouch_seconds * 2 ** self._patience[terms.job]

    def _vouch_seconds(self, key: bytes, measured: Sequence[float], proposal_seconds: float) -> float:
        """The usual time from the delivery of a proposal to a vouch, at most that for proposals: liars may slow each other.

        `measured` are those of the open round.
        """
        before = self.measured.vouches.get(key)
        if not before and not measured:
            return min(VOUCH_SECONDS_START, max(VOUCH_SECONDS_MIN, proposal_seconds))
        usual = _upper_quartile(before) if before else _robust_time(measured)
        return max(VOUCH_SECONDS_MIN, min(usual, proposal_seconds))

    # Messages in

    def receive_message(self, signed: Signed, message: RoundMessage, now: float) -> RoundEffects | None:
        """None if no such round is open here: the message is kept if the round may still come. The signature was verified."""
        book = self.books.get(message.job)
        if message.job in self._finished:
            return None
        if book is None or message.round > book.terms.round:
            self.early.add_message(signed, message)
            return None
        if message.round < book.terms.round:
            return None
        if signed.signer not in _signers(book.terms, message):
            self.early.add_message(signed, message)  # the next block may give the round to its signer
        effects = RoundEffects()
        self._accept_message(book, signed, message, now, effects)
        return effects

    def _accept_message(
        self, book: OpenRoundState, signed: Signed, message: RoundMessage, now: float, effects: RoundEffects
    ) -> None:
        if signed.signer != self._signer.public:
            self._add_message(book, signed, message, now, effects)
        elif isinstance(message, Vouch) and signed.signer not in book.terms.reexecutors:
            return  # it was given before the round was renewed, and we vouch no more here
        elif all(signed.body != known.body for known in book.statements_signed_by(self._signer.public)):
            self._restore_own_message(book, signed, message, now, effects)

    def _restore_own_message(
        self, book: OpenRoundState, signed: Signed, message: RoundMessage, now: float, effects: RoundEffects
    ) -> None:
        """A message of ours that is not in our log: it stands, and we say nothing more in a round that we do not remember."""
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
                # A peer that came back in the middle of the round opened it on a guess, and may be needed for its cut-off.
                seconds = self._vouch_seconds(book.terms.job, book.vouching.vouch_seconds, book.timers.proposals_max_seconds)
                book.timers = replace(book.timers, replay_seconds=self._replays(book.terms, seconds), vouch_usual_seconds=seconds)
                if is_new and pair is None and signed.signer != self._signer.public:
                    effects.sends.append(signed)  # its author may know few peers, and a liar may tell few
            case CutOff():
                first = book.signed_cut_offs.get(signed.signer, signed)
                book.add_cut_off(signed, message)
                if first.body != signed.body:
                    effects.evidence.append(Evidence(first, signed))
        if is_new:
            effects.counted_messages.append((signed.signer, message))
        if pair is not None:
            effects.evidence.append(Evidence(*pair))
            effects.sends.extend(pair)  # otherwise some voters judge one proposal of the liar and some the other

    def record_verdict(self, key: RoundKey, trainer: bytes, verdict: Verdict, now: float) -> None:
        """The result of the cheap checks."""
        book = self.books.get(key[0])
        if book is not None and book.terms.round == key[1]:
            book.record_verdict(trainer, verdict, now)

    def record_replay_start(self, key: RoundKey, trainer: bytes) -> None:
        """All is here that re-executing this trainer's proposal needs."""
        book = self.books.get(key[0])
        if book is not None and book.terms.round == key[1]:
            book.vouching.started.add(trainer)

    def record_replay_verdict(self, key: RoundKey, trainer: bytes, verdict: Verdict, now: float) -> None:
        """The result of our own re-execution."""
        book = self.books.get(key[0])
        if book is not None and book.terms.round == key[1]:
            book.record_replay_verdict(trainer, verdict, now)

    # Messages out

    def publish_proposal(self, proposal: Proposal, now: float, opening: LossOpening | None = None) -> RoundEffects:
        """Signs our proposal for an open round as soon as we may. Nothing if the round is over or we have proposed.

        The proposal commits to `opening` where the network asks for that.
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
        """Signs vouches, ballots and cut-offs whose time has come, and proposals that had to wait."""
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
        """Rounds for which this peer asks others now: with the messages here they cannot be closed, or by cut-offs only, or a
        ballot names a proposal that is not here. Two proposals of one trainer are evidence, even if the round can be closed
        without them: the peer asks at once, and once a round, since a voter may have invented what it names.

        A leader that closes a round by cut-offs needs the ballots that they name. Liars show their ballots to some voters only.
        """
        for key, book in self.books.items():
            due = self._seek_due(key, book)
            if due is not None and now >= due:
                self._sought[key] = now
                yield key, book.terms.round

    def _seek_due(self, key: bytes, book: OpenRoundState) -> float | None:
        """None if the round can be closed. Before the first ballot, not before proposals are due: until then all train."""
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
        """Our messages of the open rounds: a new neighbour must hear them."""
        return [signed for book in self.books.values() for signed in book.statements_signed_by(self._signer.public)]

    def deadline(self, now: float) -> float | None:
        if not self.books:
            return None
        times = [time for book in self.books.values() if (time := book.next_deadline(now)) is not None]
        times += [due for key, book in self.books.items() if (due := self._seek_due(key, book)) is not None]
        return min(times, default=None)


def _record(book: OpenRoundState, signed: Signed, message: RoundMessage) -> OwnRoundStatement:
    """A ballot's has the proposals that it accepts. A closing needs their bytes: were they kept in memory alone, a round could
    never close after all who accept had been restarted, if the trainer's disk was lost.
    """
    judgements = message.judgements if isinstance(message, Ballot) else ()
    others = [
        (j.proposal, book.proposals.get(j.trainer))
        for j in judgements
        if j.verdict is Verdict.ACCEPT and j.trainer != signed.signer
    ]
    accepted = [held for digest, held in others if held is not None and signed_body_digest(held) == digest]
    # Each vouch of a round has a place of its own: the first trainer that no vouch of ours has named before.
    tag = message.TAG
    if isinstance(message, Vouch):
        tag += f":{book.vouching.new_judgements(signed.signer, message)[0].trainer.hex()}"
    return OwnRoundStatement(tag, message.job, message.round, signed, tuple(accepted))


def _signers(terms: RoundTerms, message: RoundMessage) -> frozenset[bytes]:
    """The peers that may sign a message of this kind in the round."""
    match message:
        case Proposal():
            return terms.trainers
        case Vouch():
            return terms.reexecutors
        case Ballot() | CutOff():
            return terms.voters


def _robust_time(seconds: Sequence[float]) -> float:
    """A time that liars do not set: of voters and trainers f may lie, so at least 4/9 of the times are of honest pairs."""
    return sorted(seconds)[2 * len(seconds) // 5]


def _upper_quartile(seconds: Sequence[float]) -> float:
    """The upper quartile. Not the maximum: a peer that stood still for a while has measured that pause, too."""
    return sorted(seconds)[3 * len(seconds) // 4]


def _decoded(signed: Signed, *kinds: type[RoundMessage]) -> RoundMessage:
    message: RoundMessage = codec.decode_message(signed.body, kinds)
    return message
