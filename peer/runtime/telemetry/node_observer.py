"""The driver's observations for people: lines of the event log, and durations of decisions.

No decision of the network depends on them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

from consensus.effects import StepEffects, StoredBlock
from consensus.evidence import Evidence
from consensus.pbft.replica import Replica
from features.feature import EventLine
from features.lazy_import import import_object
from features.peer_names import NAMED_MARK, SHORT_ID_LENGTH, PeerNames
from features.text_tables import pluralize
from ledger.core.deterministic_failures import ModuleFailure
from ledger.jobs import NO_PROGRESS_ROUNDS, ClosedRound, Job, JobPhase
from ledger.ledger_state import LedgerState
from ledger.members import MembersState, RotateKey
from ledger.model_anchors import format_undone_rounds
from peer.features import FEATURES
from peer.node.future_messages import RoundKey, RoundMessage
from peer.node.node import RoundEnded
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.health import (
    COMPARE_PEERS,
    StragglerDetector,
    duplicate_identity_text,
    fork_text,
    vote_lockout_text,
)
from peer.runtime.telemetry.risk_warnings import (
    NO_AUDITS_WITHOUT_TOLERANCE_RISK,
    SAMPLED_AUDITS_RISK,
    SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK,
)
from protocol import codec
from protocol.identity import Signed, peer_id, short_id
from protocol.messages import Ballot, CutOff, Judgement, Proposal, Transaction, Vouch
from protocol.units import display_round_number
from protocol.verdicts import DIVERGING, Verdict, verdict_label
from training.job_spec import AuditMode, JobSpec

REPORT_IT = "this is a bug that affects every peer: report this line"
FAILURES_REPORTED_MAX = 64  # failures of modules that this peer remembers, so that each is reported once
DECISION_TIMES_KEPT = 10_000  # last decisions whose durations are stored for percentiles

# Functions that return the event lines of features. They are imported at start, because a later import fails without a free
# file descriptor.
FEATURE_EVENT_SOURCES = tuple(import_object(feature.event_lines) for feature in FEATURES if feature.event_lines)


class NodeObserver:
    def __init__(self, event_log: EventLog, now: Callable[[], float], state: LedgerState | None = None) -> None:
        self.events, self._now = event_log, now
        self.started_at = now()
        self.decisions = 0
        self.first_decision_at: float | None = None
        self.last_decision_at: float | None = None
        self._awaits_since: float | None = None
        self._late: dict[bytes, StragglerDetector] = {}  # job -> detector of this trainer's lateness
        self.decision_seconds: deque[float] = deque(maxlen=DECISION_TIMES_KEPT)
        self._first_seen: dict[int, float] = {}  # height -> time when this peer first stored a block for the height
        self._decided_in: dict[int, float] = {}
        self._conditions: dict[str, str | bool | None] = {}  # kind of condition -> its cause after the last step
        self.failure = ""  # text about the last failure of a module
        self._failures: dict[str, None] = {}  # failures that were reported, in order
        self._silent_below = 0
        self._muted: Set[RoundKey] = frozenset()
        self._signers: set[bytes] = set()
        self._before = state  # last applied state
        self.membership_problem = ""  # reason why this peer's membership differs from the operator's settings
        if state is not None:
            self.events.names = member_names(state.members)

    def record_step(self, turn: StepEffects) -> None:
        for record in turn.records:
            if isinstance(record, StoredBlock):
                self._first_seen.setdefault(record.height, self._now())
        for decided in turn.decided_blocks:
            self.first_decision_at = self.first_decision_at or self._now()
            self._awaits_since = None
            self.decisions += 1
            signers = sorted(decided.certificate.signatures)
            self._signers.update(signers)
            text = f"height {decided.height} decided with {len(signers)} signatures"
            seen = self._first_seen.pop(decided.height, None)
            fields = {"height": decided.height, "signers": " ".join(map(short_id, signers)), "seen": seen is not None}
            self.events.add_detail("decided", text, **fields)
            # A block that this peer had not stored was decided while the peer was away. The block's own time is then the time of
            # the decision.
            self.last_decision_at = self._now() if seen is not None else decided.decode().time_ms / 1_000
            if seen is not None:
                self._decided_in[decided.height] = self._now() - seen
                self.decision_seconds.append(self._now() - seen)
            self._first_seen = {height: at for height, at in self._first_seen.items() if height > decided.height}

    def take_signers(self) -> Set[bytes]:
        """Return the keys with signatures in certificates of blocks that were decided since the last call."""
        taken, self._signers = self._signers, set()
        return taken

    def record_pending_work(self, decision: bool) -> None:
        """Record whether voters have work that waits for a decision after this step."""
        if not decision:
            self._awaits_since = None
        elif self._awaits_since is None:
            self._awaits_since = self._now()

    @property
    def pending_work_seconds(self) -> float:
        """Seconds for which work has waited without a decision, or 0 without work."""
        return 0.0 if self._awaits_since is None else self._now() - self._awaits_since

    def report_evidence(self, evidence: Evidence) -> None:
        self.events.add(
            "evidence", f"{short_id(evidence.signer)} signed two statements that exclude each other", peer=evidence.signer
        )

    def report_conditions(self, replica: Replica, unsupported: str) -> None:
        """Warn of lasting conditions when they begin. A condition with a new cause is reported again, except for a copied key.
        `unsupported` describes a decided upgrade that this program does not support. The warning comes long before the upgrade
        takes effect.
        """
        copied, fork, split = replica.duplicate_identity_reason, fork_text(replica), replica.state_root_split
        refusal = replica.block_refusal
        conditions = {
            "refusal": (
                refusal,
                f"this peer does not prepare the block that was proposed for height {replica.height}: {refusal}",
            ),
            "split": (split, f"{split}; {COMPARE_PEERS}"),
            "fork": (fork, fork),
            "copy": (copied is not None, f"HALTED: {duplicate_identity_text(copied or '')}"),
            "upgrade": (unsupported, unsupported),
        }
        for topic, (cause, text) in conditions.items():
            if cause and cause != self._conditions.get(topic):
                self.events.add("warning", text)
            self._conditions[topic] = cause

    def report_expulsion(self, evidence: Evidence) -> None:
        first, second = (str(codec.unpack(of.body, len(of.body))[0]) for of in (evidence.first, evidence.second))
        what = f"two different {first}s" if first == second else f"a {first} and a {second} that exclude each other"
        self.events.add("member", f"{short_id(evidence.signer)} was expelled: it signed {what}", peer=evidence.signer)

    def report_rotation(self, old: bytes, new: bytes) -> None:
        self.events.add("member", f"{short_id(new)} is now the key of {short_id(old)}", peer=new)

    def report_failures(self, where: str, failures: Iterable[ModuleFailure]) -> None:
        """Report failures of modules, which are bugs of the program.

        The command `status` shows the last one until this peer is restarted.
        """
        for failure in failures:
            self.failure = f"FAILED: {where}: {failure}"
            if str(failure) not in self._failures:
                self._failures[str(failure)] = None
                self.events.add("warning", f"{self.failure}; {REPORT_IT}")
        while len(self._failures) > FAILURES_REPORTED_MAX:
            del self._failures[next(iter(self._failures))]

    def report_vote_lockout(self, height: int, below: int) -> None:
        if height < below and below != self._silent_below:
            self._silent_below = below
            self.events.add("warning", vote_lockout_text(below))

    def report_muted_rounds(self, rounds: Set[RoundKey]) -> None:
        for job, number in sorted(rounds - self._muted):
            text = f"this peer signs nothing more in round {display_round_number(number)}: the disk lacks a message of it"
            self.events.add("warning", text, job=job, round=number)
        self._muted = rounds

    def report_membership_problem(self, problem: str) -> None:
        if problem != self.membership_problem:
            self.events.add("warning", f"membership: {problem}")
        self.membership_problem = problem

    def report_round_message(self, signer: bytes, message: RoundMessage) -> None:
        fields = {"peer": signer, "job": message.job, "round": message.round}
        self.events.add_detail(
            message.TAG, f"round {display_round_number(message.round)}: {short_id(signer)} {self._words(message)}", **fields
        )

    def _words(self, message: RoundMessage) -> str:
        match message:
            case Proposal():
                return "proposes"
            case Ballot():
                verdicts = (f"{short_id(j.trainer)}: {self._label(message.job, j.verdict)}" for j in message.judgements)
                return f"votes {', '.join(verdicts)}"
            case Vouch():
                return ", ".join(self._vouch(message.job, judgement) for judgement in message.judgements)
            case CutOff():
                return "ends its wait for proposals"

    def _vouch(self, job: bytes, judgement: Judgement) -> str:
        name, verdict = short_id(judgement.trainer), judgement.verdict
        if verdict is Verdict.ACCEPT:
            return f"vouches for {name}"
        return f"is unsure of {name}" if verdict is Verdict.UNJUDGED else f"rejects {name} ({self._label(job, verdict)})"

    def _label(self, job: bytes, verdict: Verdict) -> str:
        return verdict_label(verdict, self._labels(job))

    def _labels(self, job: bytes) -> tuple[str, ...]:
        known = self._before.jobs.jobs.get(job) if self._before else None
        return JobSpec.decode(known.spec).resolved_objective.reason_labels if known else ()

    def record_closed_round(self, closed: ClosedRound, state: LedgerState, opened: float | None) -> dict[str, float]:
        """Add an event for a closed round, and return measurements of the round.

        `opened` is the time when this peer opened the round.
        """
        outcome = closed.outcome
        parts = [f"accepted {short_id(trainer)}" for trainer in outcome.accepted]
        own = self._labels(closed.job)
        parts += [_refused(trainer, outcome.rejection_reason(trainer, own)) for trainer in outcome.rejected]
        parts += [f"absent {short_id(trainer)}" for trainer in sorted(outcome.absent)]
        root = state.jobs.jobs[closed.job].model_root
        fields = {"job": closed.job, "round": closed.round, "root": root, "height": state.height}
        self.events.add("round", f"round {display_round_number(closed.round)}: {', '.join(parts)}", **fields)
        decided_in = self._decided_in.pop(state.height, None)
        if decided_in is None:  # this peer was away when the block that closes the round was decided
            return {}
        figures = {"decision_ms": 1_000 * decided_in}
        return figures if opened is None else figures | {"seconds": self._now() - opened}

    def check_straggling(self, closed: ClosedRound, state: LedgerState, me: bytes, round: RoundEnded) -> None:
        """Warn the operator while this trainer's updates come too late, with fewer warnings as time goes on."""
        running = state.jobs.running()
        self._late = {key: late for key, late in self._late.items() if key in running}
        if closed.job in running:
            late = self._late.setdefault(closed.job, StragglerDetector())
            if late.record_round(closed.outcome, me, round.has_proposed, self._now() - round.opened_at):
                self.events.add("warning", late.describe_cause(running[closed.job].name), job=closed.job, round=closed.round)

    def straggler_text(self, running: Mapping[bytes, Job]) -> str:
        """Return the reasons why this trainer is a straggler in running jobs, or an empty string."""
        return "; ".join(
            filter(None, (late.describe_cause(running[key].name) for key, late in self._late.items() if key in running))
        )

    def report_started_job(self, key: bytes, state: LedgerState) -> None:
        job = state.jobs.jobs[key]
        spec = JobSpec.decode(job.spec)
        caveats = [SAMPLED_AUDITS_RISK] * (spec.audit is AuditMode.SAMPLED)
        if not spec.byzantine_max:
            caveats += {
                AuditMode.SAMPLED: [SAMPLED_AUDITS_WITHOUT_TOLERANCE_RISK],
                AuditMode.OFF: [NO_AUDITS_WITHOUT_TOLERANCE_RISK],
            }.get(spec.audit, [])
        for caveat in caveats:
            self.events.add("warning", f"job {job.name}: {caveat}", job=key, author=peer_id(job.author))

    def report_renewed_round(self, key: RoundKey, job: Job) -> None:
        text = (
            f"round {display_round_number(key[1])} of {job.name} continues with {len(job.voters)} voters: too few "
            "of its original voters are left"
        )
        self.events.add("job", text, job=key[0], round=key[1])

    def record_applied_block(self, state: LedgerState) -> None:
        self._learn_names(state)
        self.events.add_detail(
            "applied",
            f"height {state.height} applied, state root {state.state_root.hex()[:16]}",
            height=state.height,
            root=state.state_root,
        )
        # No events if blocks were skipped, as by a snapshot.
        if self._before is not None and self._before.height + 1 == state.height:
            for item in block_events(self._before, state):
                if item.kind == "member":
                    self.events.add("member", item.text, peer=item.about)
                elif JobSpec.decode(state.jobs.jobs[item.about].spec).resolved_objective.needs_worker:
                    # Jobs whose objective needs no worker are tests and have no events.
                    self.events.add(item.kind, item.text, job=item.about)
        self._before = state
        self._decided_in = {height: seconds for height, seconds in self._decided_in.items() if height > state.height}

    def record_restored_state(self, state: LedgerState, me: bytes) -> None:
        """Continue from a restored snapshot, and add an event if the new state admits this peer.

        Other events of skipped blocks are lost.
        """
        self._learn_names(state)
        item = admission_event(me, self._before.members, state.members) if self._before is not None else None
        if item is not None:
            self.events.add("member", item.text, peer=me)
        self._before = state

    def _learn_names(self, state: LedgerState) -> None:
        if self._before is None or self._before.members.members is not state.members.members:
            self.events.names = member_names(state.members)


def key_rotations(transactions: Iterable[Signed]) -> Iterator[tuple[bytes, bytes]]:
    """Yield (old key, new key) for the transactions that replace a key."""
    for signed in transactions:
        transaction = codec.decode_message(signed.body, (Transaction,))
        if transaction.kind == "member/rotate":
            yield signed.signer, codec.decode(RotateKey, transaction.content).new_key


def _refused(trainer: bytes, reason: str) -> str:
    name = short_id(trainer)
    return f"{reason} {name}" if reason in (Verdict.UNJUDGED.label, DIVERGING) else f"rejected {name} ({reason})"


def block_events(before: LedgerState, after: LedgerState) -> Iterator[EventLine]:
    """Yield the event lines of one block, from the states before and after the block."""
    assert after.height == before.height + 1
    yield from _of_members(before.members, after.members)
    for key, job in after.jobs.jobs.items():
        yield from _of_job(key, before.jobs.jobs.get(key), job)
    for of_feature in FEATURE_EVENT_SOURCES:
        yield from of_feature(before, after)


def _of_members(before: MembersState, after: MembersState) -> Iterator[EventLine]:
    replaced = {member.successor for member in after.members.values()}  # new keys of members: such a key is no new member
    for key, member in after.members.items():
        known = before.members.get(key)
        if known is None and key not in replaced and (item := admission_event(key, before, after)) is not None:
            yield item
        elif known is not None and known.name != member.name:
            # The name of a founder without a name in the genesis is the short form of its id.
            was = f", renamed from {known.name}" if known.name != short_id(key) else ""
            yield EventLine("member", f"{short_id(key)} {NAMED_MARK} {member.name}{was}", key)
    voted, vote = (set(map(after.current_key, voters)) for voters in (before.voters, after.voters))
    for key in sorted(vote - voted):
        yield EventLine("member", f"{short_id(key)} is now one of {len(after.voters)} voters", key)
    for key in sorted(voted - vote):
        yield EventLine("member", f"{short_id(key)} has lost its vote; {len(after.voters)} voters are left", key)


def admission_event(key: bytes, before: MembersState, after: MembersState) -> EventLine | None:
    """Return the event of a member's admission by an invitation, or None if there was none between the two states."""
    member = after.members.get(key)
    if member is None or member.invited_by is None or key in before.members:
        return None
    return EventLine("member", f"{short_id(key)} was admitted as a member, invited by {short_id(member.invited_by)}", key)


def member_names(members: MembersState) -> PeerNames:
    present = {peer_id(key): member.name for key, member in members.members.items() if members.is_current_key(key)}
    return PeerNames(present, {peer_id(key): member.name for key, member in members.members.items()})


def _of_job(key: bytes, before: Job | None, after: Job) -> Iterator[EventLine]:
    if before is None:
        yield EventLine("job", f"job {after.name} of {short_id(after.author)} started: {pluralize(after.rounds, 'round')}", key)
    if before is not None and (before.phase, after.phase) == (JobPhase.RUNNING, JobPhase.PAUSED):
        yield EventLine("job", f"job {after.name} is paused after {pluralize(after.rounds_in_model, 'round')}", key)
    if before is not None and (before.phase, after.phase) == (JobPhase.PAUSED, JobPhase.RUNNING):
        yield EventLine("job", f"job {after.name} continues with round {display_round_number(after.round)}", key)
    if after.phase is JobPhase.FINISHED and (before is None or before.phase is not JobPhase.FINISHED):
        ended = "ended early after" if after.rounds_in_model < after.rounds else "finished after"
        why = f": its last {NO_PROGRESS_ROUNDS} rounds accepted no update" * after.made_no_progress
        yield EventLine("job", f"job {after.name} {ended} {pluralize(after.rounds_in_model, 'round')}{why}", key)
    asked = before.rollback_requests if before is not None else {}
    for voter, number in after.rollback_requests.items():
        if asked.get(voter) != number:
            text = f"{short_id(voter)} voted to roll back job {after.name} to @{number}"
            yield EventLine("job", f"{text}: to agree, run `peer rollback {key.hex()[:SHORT_ID_LENGTH]} {number}`", key)
    for undone in after.undone_rounds[-1:] if before is not None and after.undone_rounds != before.undone_rounds else ():
        yield EventLine("job", f"job {after.name}: {format_undone_rounds(undone)}", key)
