"""Jobs in the ledger: their queue, rounds, records of members, anchors and rollbacks.

Specifications and models are opaque here.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Annotated, ClassVar, Protocol, TypeVar

from consensus.voter_set import VoterSet, quorum
from ledger.core.genesis import TRAINER, ModuleVersion
from ledger.core.module import BlockContext, DecodedTransaction, Module, Refused, StateChange, StateReader
from ledger.members import MembersState
from ledger.model_anchors import (
    SAVED_MODELS_MAX,
    UNDONE_KEPT,
    ModelAnchor,
    ModelAnchors,
    UndoneRounds,
    UndoReason,
    anchors_to_keep,
    newest_anchor_up_to,
)
from ledger.network_governance import NetworkState
from protocol.codec import Between, Count, Digest, Key, Length, added_field, encode
from protocol.errors import RemoteProtocolError
from protocol.identity import Signed, short_id
from protocol.limits import AUDIT_WINDOW_MS_MAX, MEMBERS_MAX, TRAINERS_MAX, TRANSACTION_BYTES_MAX, VOTERS_MAX
from protocol.messages import Name, Transaction
from protocol.verdicts import ABSENT
from rounds.round_state import RoundResult
from rounds.round_terms import RoundTerms

RUNNING_MAX = 8  # jobs with open rounds at once: each one costs every peer the memory of a model
ON_REQUEST_MAX = 64  # unfinished jobs on request: each costs every disk a model, and at most one of them has an open round
# Finished jobs with training that stay in the state, for the commands `jobs` and `sample`. Older jobs remain in the blocks.
TRAINED_KEPT_MAX = 32
UNTRAINED_KEPT_MAX = 16  # finished jobs without training that stay in the state: they cost nothing, so any member can start many
WINDING_UP_MAX = 16  # finished jobs with open audits: beyond this number, audits end early (`ledger.audits.state_machine`)
BASES_MAX = 8  # finished jobs that stay because other jobs start from or read their models: each costs every disk a model
# Finished jobs that stay because jobs on request read their models, also those that are over and have saved models. These places
# are apart, because idle jobs on request would otherwise keep other jobs from starting.
BASES_ON_REQUEST_MAX = 8
PLANNED_MAX = 12  # finished or paused jobs that stay because modules will resume them, or start other jobs from them
# Finished jobs that stay to replay jobs with open audits: at most one base and one read model for each.
REPLAYED_MAX = 2 * WINDING_UP_MAX
# Jobs on request with saved models, for which they stay when they are over: each is a specification in every state. They are more
# than the unfinished ones, because models are saved in order to outlast their jobs.
SAVING_MAX = 2 * ON_REQUEST_MAX
# Maximum number of finished jobs in the state. All running jobs may end in one block.
FINISHED_KEPT_MAX = (
    TRAINED_KEPT_MAX
    + UNTRAINED_KEPT_MAX
    + WINDING_UP_MAX
    + BASES_MAX
    + BASES_ON_REQUEST_MAX
    + PLANNED_MAX
    + REPLAYED_MAX
    + RUNNING_MAX
)
JOBS_MAX = RUNNING_MAX + ON_REQUEST_MAX + SAVING_MAX + FINISHED_KEPT_MAX  # jobs in the state
assert UNTRAINED_KEPT_MAX >= 2 * RUNNING_MAX  # so many may end in one block, beside jobs on request
BRIEF_BYTES_MAX = 512  # bytes of a brief, which every state contains while the round is open
QUEUE_MAX = 32  # jobs that wait for their turn: each is a specification of up to 256 KiB in every state
QUEUE_PER_MEMBER_MAX = 4  # queued jobs of one member, which therefore cannot fill the queue alone
TIMEOUT_DOUBLINGS_MAX = 6  # doublings of the time for re-execution, one for each round that could not be judged in time
MISSED_VOUCHES_MAX = 3  # consecutive closed rounds in which a re-executor was asked and did not vouch, before it is asked last
CALLED_LAST_ROUNDS = 20  # rounds in which a re-executor that missed vouches is asked last
WRONG_VOUCHES_MAX = 3  # false vouches in WRONG_VOUCH_ROUNDS, after which a re-executor is not asked for `suspension_rounds`
WRONG_VOUCH_ROUNDS = 20
# False updates in INVALID_UPDATE_ROUNDS, after which a trainer is suspended: each costs over f re-executions.
INVALID_UPDATES_MAX = 3
INVALID_UPDATE_ROUNDS = 20
NO_PROGRESS_ROUNDS = 8  # consecutive rounds with only refused updates, which end a job: bad luck and a warm-up are shorter
# Doublings of a trainer's suspension: 1024 times the first one is nearly permanent, and round numbers stay small.
SUSPENSION_DOUBLINGS_MAX = 10


@dataclass(frozen=True, slots=True)
class AuditTerms:
    """Terms of sampled audits in a job's specification."""

    rate: float  # average number of re-executors that are drawn for a proposal, divided by `auditors`
    auditors: int
    window: int  # number of rounds in which auditors may report on a proposal and judge it
    suspension_rounds: int  # rounds of a trainer's first suspension; each further suspension is twice as long
    # Times of a proposal's trainer with the slowest allowed link. 0: windows depend on rounds alone.
    response_ms: int = 0  # ms until the first byte of an answer arrives, for any size
    serving_ms_per_reexecutor: int = 0  # ms to send the data that one re-executor downloads for a proposal
    closing: int = 0  # number of last rounds with re-execution before the ballot, so that the job's end need not wait for audits

    def served_ms(self, reexecutors: int) -> int:
        """Return the time in ms in which a trainer with the slowest allowed link serves its proposal to all other re-executors of
        the round.
        """
        return self.response_ms + self.serving_ms_per_reexecutor * max(1, reexecutors - 1)

    def window_ms(self, reexecutors: int) -> int:
        """Return the minimum length of an audit window in ms: time to serve the proposal's data, and time for the answers."""
        return self.served_ms(reexecutors) + self.response_ms


@dataclass(frozen=True, slots=True)
class ModelReference:
    """The final model of a finished job, which another job starts from or reads."""

    job: Digest
    round: Count
    root: Digest


@dataclass(frozen=True, slots=True)
class JobTerms:
    """The terms of a job specification that the ledger needs."""

    name: str
    objective: str
    rounds: int
    audited: bool  # whether all updates are re-executed before the ballot
    needs_worker: bool  # True: only voters that train can re-execute; False: every voter can
    proposal_seconds: float  # maximum time in seconds for which a round waits for proposals
    audits: AuditTerms | None = None  # terms of sampled audits, which exclude `audited`; None: no sampled audits
    base: ModelReference | None = None
    start: bytes | None = None  # digest of the initial parameters, unless the job starts from another job's model
    read: ModelReference | None = None  # final model of another job that all trainers of this job read
    continues: ModelReference | None = None  # saved model of another job, with which this job on request begins
    requires: tuple[ModuleVersion, ...] = ()  # modules that the network must run, each in this version or a later one
    parameters: int = 0  # number of parameters of the job's model
    pass_parameters: int = 0  # number of parameters of the transformer that a pass over a batch computes with
    # Number of elements in each stored vector of the model: of a job on request its own tensors alone.
    trained_parameters: int = 0
    # Rounds of a suspension for false vouches, or for updates that were found false before the ballot.
    suspension_rounds: int = 20
    anchor_rounds: int = 8  # rounds between two anchors
    role: str = TRAINER  # role of the members that train if the job needs a worker; voters among them re-execute
    on_request: bool = False  # True: a round of the job opens only by a `JobBrief`

    @property
    def is_reexecuted(self) -> bool:
        return self.audited or self.audits is not None

    @property
    def leaves_model(self) -> bool:
        """True if the job's last model outlasts the job. What a job on request leaves are its saved models."""
        return self.needs_worker and not self.on_request

    def is_audited(self, taken: int) -> bool:
        """Return whether updates are re-executed before the ballot in the round that follows `taken` rounds of the model."""
        return self.audited or (self.audits is not None and self.rounds - taken <= self.audits.closing)


Record = TypeVar("Record")  # type of a member's record in one job


class JobSpecRules(Protocol):
    def terms_of_spec(self, spec: bytes) -> JobTerms:
        """Return the terms of a specification. Raises `RemoteProtocolError` if it is invalid."""

    def why_base_refused(self, base: bytes, spec: bytes) -> str | None:
        """Return the reason why a job cannot start from the model of another job with the specification `base`; None: it can."""

    def why_read_model_refused(self, read: bytes, spec: bytes) -> str | None:
        """Return the reason why a job cannot read the model of another job with the specification `read`; None: it can."""

    def why_continuation_refused(self, before: bytes, spec: bytes) -> str | None:
        """Return the reason why a job cannot continue from a model of a job with the specification `before`; None: it can."""


class JobPhase(enum.StrEnum):
    RUNNING = "running"
    PAUSED = "paused"  # the job waits between two rounds, and no round is open
    SETTLING = "settling"  # all rounds are closed, but audits may still undo some of them
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class VouchRecord:
    """A re-executor's record in one job, made from round certificates. Its numbers are numbers of rounds."""

    # Number of consecutive closed rounds in which the re-executor was asked and did not vouch.
    missed_vouches: Annotated[int, Between(0, MISSED_VOUCHES_MAX)] = 0
    assigned_last_until: Count = 0  # first round in which the re-executor is no longer asked last
    # Last rounds in which the re-executor vouched falsely.
    wrong_vouch_rounds: Annotated[tuple[Count, ...], Length(0, WRONG_VOUCHES_MAX)] = ()
    suspended_until: Count = 0  # first round in which the re-executor is asked again

    def after_round(self, round: int, is_false: bool, is_silent: bool, suspension_rounds: int) -> VouchRecord:
        """Return the record after a closed round.

        In that round, the voter vouched or was asked to re-execute an accepted proposal.
        """
        silences = self.missed_vouches + 1 if is_silent else 0
        recent = tuple(of for of in self.wrong_vouch_rounds if of + WRONG_VOUCH_ROUNDS > round) + (round,) * is_false
        record = replace(self, missed_vouches=silences, wrong_vouch_rounds=recent)
        if silences == MISSED_VOUCHES_MAX:
            record = replace(record, missed_vouches=0, assigned_last_until=round + 1 + CALLED_LAST_ROUNDS)
        if len(recent) == WRONG_VOUCHES_MAX:
            record = replace(record, wrong_vouch_rounds=(), suspended_until=round + 1 + suspension_rounds)
        return record

    def is_expired(self, round: int) -> bool:
        """Return whether the record has no effect from this round on."""
        is_counted = self.missed_vouches or any(of + WRONG_VOUCH_ROUNDS > round for of in self.wrong_vouch_rounds)
        return not is_counted and max(self.assigned_last_until, self.suspended_until) <= round


@dataclass(frozen=True, slots=True)
class TrainerRecord:
    """A trainer's record in one job, from rounds with re-execution before the ballot. Its numbers are numbers of rounds."""

    # Last rounds in which the trainer's update was found false.
    invalid_update_rounds: Annotated[tuple[Count, ...], Length(0, INVALID_UPDATES_MAX)] = ()
    suspended_until: Count = 0  # first round in which the trainer trains again
    suspensions: Annotated[int, Between(0, SUSPENSION_DOUBLINGS_MAX)] = 0

    def after_invalid_update(self, round: int, suspension_rounds: int) -> TrainerRecord:
        """Return the record after a closed round in which the trainer's update was found false.

        A suspended trainer may train if no other trainer does. Its suspension is not extended for updates of that time.
        """
        if self.suspended_until > round:
            return self
        recent = (*(of for of in self.invalid_update_rounds if of + INVALID_UPDATE_ROUNDS > round), round)
        if len(recent) < INVALID_UPDATES_MAX:
            return replace(self, invalid_update_rounds=recent)
        until, times = round + 1 + (suspension_rounds << self.suspensions), min(SUSPENSION_DOUBLINGS_MAX, self.suspensions + 1)
        return TrainerRecord(suspended_until=until, suspensions=times)

    def is_expired(self, round: int) -> bool:
        """Return whether the record may be deleted.

        A record with suspensions stays, because it sets the length of the next suspension.
        """
        return not self.suspensions and all(of + INVALID_UPDATE_ROUNDS <= round for of in self.invalid_update_rounds)


TrainerKeys = Annotated[tuple[Key, ...], Length(0, TRAINERS_MAX)]


@dataclass(frozen=True, slots=True)
class Job:
    spec: Annotated[bytes, Length(1, TRANSACTION_BYTES_MAX)]
    name: Name
    author: Key
    started_height: Count  # height of the block that started the job
    rounds: Count
    phase: JobPhase
    round: Count  # number of the round that starts from the present model: the open round, or else the next one
    opened_height: Count  # height of the block that opened or renewed the round, or that paused or ended the job
    model_root: Digest
    fully_audited: bool  # whether all updates of the open round are re-executed before the ballot
    # Members of the open round: its voters, and in the next three fields its re-executors, trainers and awaited trainers.
    voters: TrainerKeys
    reexecutors: TrainerKeys  # voters that can re-execute; empty if the job has no re-execution
    trainers: TrainerKeys
    awaited: TrainerKeys
    base_job: Digest | None = None  # job from whose model this job started, and which stays in the state while this job runs
    stop_requests: TrainerKeys = ()  # voters that request the job's end
    timeout_doublings: Annotated[int, Between(0, TIMEOUT_DOUBLINGS_MAX)] = 0
    # Numbers of updates in all rounds of the job, by trainer. More members may train in all rounds together than in one round.
    accepted: Annotated[dict[Key, Count], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    rejected: Annotated[dict[Key, dict[Name, Count]], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    # Rotated keys of the open round's trainers: former key -> next key, which is also in `trainers`.
    successors: Annotated[dict[Key, Key], Length(0, TRAINERS_MAX)] = field(default_factory=dict)
    # Trainers of the open round whose member votes with another key: key of the trainer -> key of the voter.
    voting_keys: Annotated[dict[Key, Key], Length(0, TRAINERS_MAX)] = field(default_factory=dict)
    vouch_records: Annotated[dict[Key, VouchRecord], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    trainer_records: Annotated[dict[Key, TrainerRecord], Length(0, MEMBERS_MAX)] = field(default_factory=dict)
    rounds_in_model: Count = 0  # number of rounds in the model's history, without undone rounds
    anchors: ModelAnchors = ()  # in ascending order of rounds: the newest final anchor, and all anchors after it
    undone_rounds: Annotated[tuple[UndoneRounds, ...], Length(0, UNDONE_KEPT)] = ()
    # Members that were convicted in this job, whose updates are re-executed before the ballot.
    distrusted_members: Annotated[tuple[Key, ...], Length(0, MEMBERS_MAX)] = ()
    # Trainers of the open round whose updates are re-executed, unless it is `fully_audited`.
    trainers_to_vouch_for: TrainerKeys = ()
    # Voter -> anchor to which it requests a rollback, given by the round that began with the anchor.
    rollback_requests: Annotated[dict[Key, Count], Length(0, VOTERS_MAX)] = field(default_factory=dict)
    # Number of refused rounds since the last accepted update or the last rollback.
    refused_rounds: Annotated[int, Between(0, NO_PROGRESS_ROUNDS)] = 0
    # What the open round computes, in the form of the job's objective. Empty unless the job is on request.
    brief: Annotated[bytes, Length(0, BRIEF_BYTES_MAX)] = added_field(b"")
    # Earlier models that stay, also after the job is over, in ascending order of rounds.
    saved_models: Annotated[tuple[ModelAnchor, ...], Length(0, SAVED_MODELS_MAX)] = added_field(())

    def with_model(self, root: bytes, is_anchor: bool) -> Job:
        """Return the job with the model of this root for its open round, and with a new anchor if this model is one."""
        anchors = (*self.anchors, ModelAnchor(self.round, self.rounds_in_model, root)) if is_anchor else self.anchors
        return replace(self, model_root=root, anchors=anchors)

    @property
    def is_trained(self) -> bool:
        """True if no further round opens unless a rollback opens one."""
        return self.phase in (JobPhase.SETTLING, JobPhase.FINISHED)

    @property
    def last_rollback(self) -> int:
        """Height of the block with the job's last rollback; 0: there was none."""
        return self.undone_rounds[-1].height if self.undone_rounds else 0

    @property
    def made_no_progress(self) -> bool:
        """True if the job ended because its last rounds refused all updates."""
        return self.phase is JobPhase.FINISHED and self.refused_rounds == NO_PROGRESS_ROUNDS

    @property
    def is_done(self) -> bool:
        """True if the job is over and all its rounds are in its model."""
        return self.phase is JobPhase.FINISHED and self.rounds_in_model == self.rounds

    @property
    def failed_rounds(self) -> int:
        """Number of refused rounds if the job ended without progress; otherwise 0."""
        if self.made_no_progress:
            return NO_PROGRESS_ROUNDS
        return self.rounds if self.is_done and not self.accepted else 0

    @property
    def rejections(self) -> dict[str, int]:
        """Return verdict -> number of rejected updates, over all trainers."""
        return dict(sum(map(Counter, self.rejected.values()), Counter[str]()))

    @property
    def last_closed(self) -> int:
        """Number of the last closed round of a job that is over, even if a rollback has undone that round."""
        return max((self.round - 1, *(undone.last for undone in self.undone_rounds)))

    @property
    def suspended_trainers(self) -> dict[bytes, int]:
        """Member -> the first round in which the member trains again after its suspension.

        Only suspensions for updates that were found false before the ballot are included.
        """
        untils = {key: record.suspended_until for key, record in self.trainer_records.items()}
        trains = () if self.phase is JobPhase.PAUSED else self.trainers
        return {key: until for key, until in untils.items() if until > self.round and key not in trains}

    def round_terms(self, job: bytes) -> RoundTerms:
        records = self.vouch_records.items()
        return RoundTerms(
            job=job,
            round=self.round,
            model_root=self.model_root,
            voters=frozenset(self.voters),
            reexecutors=frozenset(self.reexecutors) if self.fully_audited or self.trainers_to_vouch_for else frozenset(),
            trainers=frozenset(self.trainers),
            awaited=frozenset(self.awaited),
            trainers_to_vouch_for=frozenset(self.trainers if self.fully_audited else self.trainers_to_vouch_for),
            successors=frozenset(self.successors.items()),
            voting_keys=frozenset(self.voting_keys.items()),
            called_last=frozenset(key for key, record in records if record.assigned_last_until > self.round),
            suspended=frozenset(key for key, record in records if record.suspended_until > self.round),
            may_be_empty=bool(self.brief),
        )


@dataclass(frozen=True, slots=True)
class QueuedJob:
    """A job that the ledger has accepted, and that waits to be started."""

    job: Digest
    spec: Annotated[bytes, Length(1, TRANSACTION_BYTES_MAX)]
    name: Name
    author: Key
    since: Count  # height of the block with the transaction that started the job
    base_job: Digest | None = None
    stop_requests: TrainerKeys = ()  # voters that request the job's removal from the queue
    start_model_holders: TrainerKeys = ()  # voters that have the job's initial parameters and checked them


@dataclass(frozen=True, slots=True)
class JobsState:
    jobs: Annotated[dict[Digest, Job], Length(0, JOBS_MAX)] = field(default_factory=dict)
    queue: Annotated[tuple[QueuedJob, ...], Length(0, QUEUE_MAX)] = ()  # queued jobs in the order of their transactions

    def unfinished(self) -> dict[bytes, Job]:
        """Return the running, paused and settling jobs."""
        return {key: job for key, job in self.jobs.items() if job.phase is not JobPhase.FINISHED}

    def running(self) -> dict[bytes, Job]:
        return {key: job for key, job in self.jobs.items() if job.phase is JobPhase.RUNNING}


@dataclass(frozen=True, slots=True)
class StartJob:
    """`job/start`: start a job. The specification is opaque here."""

    spec: Annotated[bytes, Length(1, TRANSACTION_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class StopJob:
    """`job/stop`: end a job and abandon its open round. The author alone, or a quorum of voters, can end it."""

    job: Digest


@dataclass(frozen=True, slots=True)
class AttestStartModel:
    """`job/attest-start-model`: a voter's statement that it has valid initial parameters of a queued job."""

    job: Digest


@dataclass(frozen=True, slots=True)
class RequestRollback:
    """`job/rollback`: a voter's request to return the job to an anchor. A quorum of equal requests causes the rollback."""

    job: Digest
    round: Count  # round that began with the anchor; the round of the current model withdraws the voter's request
    last: Count = 0  # height of the last rollback that the voter knows: a request that missed a newer rollback is refused


SuspendedUntil = Mapping[bytes, int]  # trainer -> the first round in which it may train again
NO_SUSPENSIONS: SuspendedUntil = MappingProxyType({})
MODEL_ROOT_PENDING = bytes(32)  # model root of a job until its first model is made, when the block that starts the job is applied


def job_id(author: bytes, transaction: Transaction) -> bytes:
    return hashlib.sha256(b"folkmoot/job\x00" + author + encode(transaction)).digest()


@dataclass(frozen=True, slots=True)
class JobFact:
    """A fact about one job: see `ledger.core.module`."""

    job: bytes


@dataclass(frozen=True, slots=True)
class ClosedRound(JobFact):
    """A fact: the block closes this round of the job. The fact has the data for the model's step and for display."""

    round: int
    outcome: RoundResult
    proposals: tuple[Signed, ...]  # accepted proposals of the round
    ballots: tuple[bytes, ...]  # voters whose ballots are in the round certificate
    reveals: Mapping[bytes, bytes] = field(default_factory=dict)  # voter -> nonce that the voter's ballot reveals
    # Voter -> commitment to the voter's next nonce, from its ballot.
    commitments: Mapping[bytes, bytes] = field(default_factory=dict)
    brief: bytes = b""  # brief of the round, in a job on request


@dataclass(frozen=True, slots=True)
class SuspendedTrainers(JobFact):
    """A fact: these trainers are suspended in this job."""

    trainers: SuspendedUntil


@dataclass(frozen=True, slots=True)
class ContestableRound(JobFact):
    """A fact: audits may still undo this round of the job, and no earlier round."""

    round: int


@dataclass(frozen=True, slots=True)
class RollbackDue(JobFact):
    """A fact: the job must return to a model before this round, because an update was false or could not be audited.

    `trainer` is None if a quorum of voters requested the rollback.
    """

    round: int
    reason: UndoReason
    trainer: bytes | None


@dataclass(frozen=True, slots=True)
class JobRolledBack(JobFact):
    """A fact: the job returns to this anchor, and continues in round `round`.

    If the job ends there, `round` is the anchor's own round.
    """

    anchor: ModelAnchor
    round: int


@dataclass(frozen=True, slots=True)
class JobAnchored(JobFact):
    """A fact: the job's model after this block is an anchor."""


@dataclass(frozen=True, slots=True)
class JobRetained(JobFact):
    """A fact: this job must stay in the state, although it is over."""


@dataclass(frozen=True, slots=True)
class SavedJobModels(JobFact):
    """A fact: these models of the job stay, and its other saved models need not."""

    models: tuple[ModelAnchor, ...]


@dataclass(frozen=True, slots=True)
class JobLaunch(JobFact):
    """A fact: a module starts a job in the name of a member. If the job is refused, no job of this id exists after the block."""

    spec: bytes
    author: bytes


@dataclass(frozen=True, slots=True)
class JobHalt(JobFact):
    """A fact: a module ends an unfinished or queued job in the name of its author."""

    author: bytes


@dataclass(frozen=True, slots=True)
class JobHold(JobFact):
    """A fact: the block opens no round of this job, and does not start the job from the queue. An open round may still close."""


@dataclass(frozen=True, slots=True)
class JobBrief(JobFact):
    """A fact: this job on request may open its next round in this block, with this trainer alone.

    If the trainer of the job's open round is gone, the fact names the next one.
    """

    trainer: bytes
    brief: bytes


@dataclass(frozen=True, slots=True)
class JobLastRound(JobFact):
    """A fact: the round that the block closes is the job's last one, although the job's specification has more rounds."""


@dataclass(frozen=True, slots=True)
class JobStarted(JobFact):
    """A fact: this job has started."""


@dataclass(frozen=True, slots=True)
class JobEnded(JobFact):
    """A fact: this job is over."""


class JobsModule(Module[JobsState]):
    name = "jobs"
    # Cost of each transaction, in signature checks. A start reads all members that may train, and the specifications of all
    # jobs.
    costs: ClassVar[Mapping[str, int]] = {"job/start": 64, "job/stop": 8, "job/attest-start-model": 8, "job/rollback": 8}
    contents: ClassVar[Mapping[str, type]] = {
        "job/start": StartJob,
        "job/stop": StopJob,
        "job/rollback": RequestRollback,
        "job/attest-start-model": AttestStartModel,
    }
    state_type = JobsState

    def __init__(self, rules: JobSpecRules) -> None:
        self.rules = rules

    def apply_transaction(
        self, state: JobsState, said: DecodedTransaction, view: StateReader, context: BlockContext
    ) -> StateChange:
        author = said.author
        match said.content:
            case StartJob(spec):
                if self.rules.terms_of_spec(spec).on_request:
                    raise Refused("a job on request is started by the module that requests its rounds")
                return StateChange(self.start_job(state, view, job_id(author, said.transaction), spec, author, context.height))
            case StopJob(key):
                return StateChange(_stop(state, view.module_state(MembersState), key, author, context.height))
            case RequestRollback(key):
                if key in state.jobs and self._is_on_request(state.jobs[key]):
                    raise Refused(
                        "a job on request is not rolled back: its rounds were reported to the program that requested them"
                    )
                return StateChange(_with_rollback(state, view.module_state(MembersState), said.content, author))
            case AttestStartModel(key):
                return StateChange(self._with_start_model_holder(state, view.module_state(MembersState), key, author))
        raise AssertionError(said.content)

    def start_job(self, state: JobsState, view: StateReader, key: bytes, spec: bytes, author: bytes, height: int) -> JobsState:
        """Return the state with one more job, which runs or is queued.

        Raises `Refused`, or `RemoteProtocolError` for a bad `spec`.
        """
        members, network = view.module_state(MembersState), view.module_state(NetworkState)
        # Every program of a network knows the network's modules and their parts of a specification, so all peers refuse the
        # same jobs.
        for wanted in self.rules.terms_of_spec(spec).requires:
            if network.module_version(wanted.name) < wanted.version:
                needs = f"this job needs version {wanted.version} of the module {wanted.name}"
                raise Refused(f"{needs}, which this network does not run: `peer features` lists its modules")
        network.require_parameters_allowed(self.rules.terms_of_spec(spec).parameters)
        window_ms = self.audit_window_ms(spec, members)
        # Audits that take too long over the slowest allowed link are refused, so that no trainer is suspended for its link.
        if window_ms > AUDIT_WINDOW_MS_MAX:
            takes = f"an audit of this job may take {window_ms / 60_000:.0f} minutes over the slowest link that it allows"
            most = f"at most {AUDIT_WINDOW_MS_MAX // 60_000} are allowed"
            raise Refused(f"{takes}, {most}: choose a smaller model, another audit, or a higher uplink_mbit_min")
        return self._start(state, members, key, spec, author, height)

    def _with_start_model_holder(self, state: JobsState, members: MembersState, key: bytes, author: bytes) -> JobsState:
        """Add a voter that attests a queued job's initial parameters.

        The job can start when a quorum has attested them. Raises `Refused`.
        """
        waiting = next((waiting for waiting in state.queue if waiting.job == key), None)
        if waiting is None or self.rules.terms_of_spec(waiting.spec).start is None:
            raise Refused(f"no queued job {key.hex()[:8]} waits for initial parameters")
        if author not in members.voters:
            raise Refused(f"{short_id(author)} is not a voter, and only voters attest initial parameters")
        if author in waiting.start_model_holders:
            raise Refused(f"{short_id(author)} has already attested the initial parameters of job {key.hex()[:8]}")
        holders = tuple(sorted({*waiting.start_model_holders, author} & set(members.voters)))
        line = (replace(other, start_model_holders=holders) if other is waiting else other for other in state.queue)
        return replace(state, queue=tuple(line))

    def audit_window_ms(self, spec: bytes, members: MembersState) -> int:
        """Return the length of an audit window in ms for a trainer with the slowest allowed link; 0 without sampled audits."""
        terms = self.rules.terms_of_spec(spec)
        if terms.audits is None:
            return 0
        workers = [key for key in members.round_voters if terms.role in members.members[key].roles]
        return terms.audits.window_ms(len(workers) if terms.needs_worker else len(members.round_voters))

    def end_block(self, state: JobsState, view: StateReader, context: BlockContext) -> StateChange:
        """Advance all jobs by one block.

        - Count closed rounds, and apply rollbacks.
        - Open the next rounds, the first rounds of new jobs, and rounds of jobs that are no longer held.
        - Renew rounds that might never close.
        - End jobs without trainers.
        - Start queued jobs.
        - Forget old jobs.
        """
        state = self._commanded(state, view, context)
        members, height, jobs = view.module_state(MembersState), context.height, dict(state.jobs)
        barred = {fact.job: fact.trainers for fact in context.facts_of(SuspendedTrainers)}
        for saved in context.facts_of(SavedJobModels):
            jobs[saved.job] = replace(jobs[saved.job], saved_models=saved.models)
        held, last = {fact.job for fact in context.facts_of(JobHold)}, {fact.job for fact in context.facts_of(JobLastRound)}
        briefs = {fact.job: fact for fact in context.facts_of(JobBrief)}
        convictions, doubtful = _convictions(context, jobs, members), _doubtful(context)
        outcomes = {closed.job: closed.outcome for closed in context.facts_of(ClosedRound)}
        back = dict[bytes, JobRolledBack]()
        for key in sorted(outcomes.keys() | convictions.keys()):
            job, closed, suspended = jobs[key], outcomes.get(key), barred.get(key, NO_SUSPENSIONS)
            job = job if closed is None else self.count_round(job, members, closed)
            job = replace(job, distrusted_members=tuple(sorted({*map(members.current_key, job.distrusted_members), *suspended})))
            if job.phase is not JobPhase.FINISHED and key in last:
                job = replace(job, phase=JobPhase.FINISHED, opened_height=height, rounds=job.rounds_in_model)
            elif job.phase is not JobPhase.FINISHED:
                found = convictions.get(key)
                if found is not None:
                    job, back[key] = _rolled_back(job, found, height, was_open=closed is None)
                job = self._go_on(job, members, height, closed, suspended, key in held, key in doubtful)
            jobs[key] = job
        anchored = [JobAnchored(key) for key in outcomes if key not in back and self._is_anchor(jobs[key])]
        started = tuple(sorted(key for key, job in jobs.items() if job.model_root == MODEL_ROOT_PENDING))
        for key in started:  # other transactions of this block may have changed voters and trainers
            jobs[key] = self.open_round(jobs[key], members, height, None)
        for key, job in jobs.items():
            terms, brief = self.rules.terms_of_spec(job.spec), briefs.get(key)
            may_open = job.phase is JobPhase.PAUSED and key not in held and terms.on_request == (brief is not None)
            if may_open and self._has_place(jobs, terms):
                suspended = barred.get(key, NO_SUSPENSIONS)
                jobs[key] = self.open_round(replace(job, phase=JobPhase.RUNNING), members, height, None, suspended, brief)
        # Open rounds that might never close get the present voters and trainers. All else in such a round stays.
        for key, job in jobs.items():
            if _is_stuck(job, members):
                jobs[key] = self._renewed(job, members, height, barred.get(key, NO_SUSPENSIONS), briefs.get(key))
        # Without a trainer, no proposal would arrive and the open round would never close.
        for key, job in jobs.items():
            if job.phase is JobPhase.RUNNING and not any(map(members.may_be_awaited, job.trainers)):
                jobs[key] = replace(job, phase=JobPhase.FINISHED, opened_height=height)
        for key, job in jobs.items():
            if job.phase is JobPhase.SETTLING and key not in doubtful:
                job = replace(job, phase=JobPhase.FINISHED, opened_height=height)
            elif job.phase is JobPhase.FINISHED and job.opened_height == height and key in doubtful:
                job, back[key] = _cut(key, job, doubtful[key], height, was_open=key not in outcomes, is_last=key in last)
            is_over = job.phase is JobPhase.FINISHED or not job.anchors
            anchors = () if is_over else anchors_to_keep(job.anchors, doubtful.get(key, job.round))
            rollbacks = {} if is_over else job.rollback_requests
            # An unchanged job stays the same object, so that readers need not scan it again.
            is_same = (anchors, rollbacks) == (job.anchors, job.rollback_requests)
            jobs[key] = job if is_same else replace(job, anchors=anchors, rollback_requests=rollbacks)
        ended = tuple(sorted(key for key, job in jobs.items() if job.phase is JobPhase.FINISHED and job.opened_height == height))
        state = self._called_up(JobsState(jobs, state.queue), members, height, held)
        started = tuple(sorted({*started, *(state.jobs.keys() - jobs.keys())}))
        needed = {fact.job for fact in context.facts_of(JobRetained)} | self._held(state)
        jobs = self.forget_old_jobs(state.jobs, members, needed, {*outcomes, *back, *started})
        facts = (*map(JobStarted, started), *map(JobEnded, ended), *back.values(), *anchored, *map(JobAnchored, started))
        return StateChange(replace(state, jobs=jobs), facts)

    def _commanded(self, state: JobsState, view: StateReader, context: BlockContext) -> JobsState:
        """Apply the facts by which other modules end and start jobs.

        These modules must check the result, because refusals are silent.
        """
        for halt in context.facts_of(JobHalt):
            with contextlib.suppress(Refused):
                state = _stop(state, view.module_state(MembersState), halt.job, halt.author, context.height)
        for launch in context.facts_of(JobLaunch):
            with contextlib.suppress(Refused, RemoteProtocolError):
                state = self.start_job(state, view, launch.job, launch.spec, launch.author, context.height)
        return state

    def _require_saved(self, state: JobsState, named: ModelReference, spec: bytes) -> None:
        """Raise `Refused` unless the named model is saved, and a job with this specification can continue from it."""
        job = state.jobs.get(named.job)
        if job is None or (named.round, named.root) not in {(model.round, model.root) for model in job.saved_models}:
            raise Refused(f"job {named.job.hex()[:8]} has no saved model with the root {named.root.hex()[:8]}")
        if problem := self.rules.why_continuation_refused(job.spec, spec):
            raise Refused(f"the job cannot continue from {named.job.hex()[:8]}: {problem}")

    def _held(self, state: JobsState) -> set[bytes]:
        """Return the finished jobs whose models are in use: unfinished or queued jobs start from these models, or read them."""
        return self._models_of((*state.unfinished().values(), *state.queue))

    def _models_of(self, live: Sequence[Job | QueuedJob]) -> set[bytes]:
        """Return the jobs whose models these jobs start from, or read."""
        read = {terms.read.job for terms in (self.rules.terms_of_spec(job.spec) for job in live) if terms.read is not None}
        return {job.base_job for job in live if job.base_job is not None} | read

    def _start(self, state: JobsState, members: MembersState, key: bytes, spec: bytes, author: bytes, height: int) -> JobsState:
        """Start the job, or append it to the queue if it has to wait."""
        terms = self.rules.terms_of_spec(spec)
        if terms.base is not None:
            self._require_whole(state, terms.base, "start from", spec, self.rules.why_base_refused)
        if terms.read is not None:
            self._require_whole(state, terms.read, "read", spec, self.rules.why_read_model_refused)
        if terms.continues is not None:
            self._require_saved(state, terms.continues, spec)
        models = {of.job for of in (terms.base, terms.read) if of is not None}
        live: tuple[Job | QueuedJob, ...] = (*state.unfinished().values(), *state.queue)
        alike = [job for job in live if self._is_on_request(job) == terms.on_request]
        most = BASES_ON_REQUEST_MAX if terms.on_request else BASES_MAX
        if models and len(self._models_of(alike) | models) > most:
            raise Refused(f"other jobs already use {most} models of finished jobs, the maximum: wait until one of them ends")
        job = self._made(terms, spec, author, members, height)
        if terms.on_request:  # It waits in the state, because it needs no place before its first round.
            waiting_for_briefs = [known for known in state.unfinished().values() if self._is_on_request(known)]
            if len(waiting_for_briefs) >= ON_REQUEST_MAX:
                raise Refused(f"{ON_REQUEST_MAX} jobs on request are unfinished, the maximum: end one of them")
            return replace(state, jobs={**state.jobs, key: job})
        # No queued job waits for the same resource: jobs that need a worker wait for each other, and so do scratch jobs.
        is_alone = all(self.rules.terms_of_spec(waiting.spec).needs_worker != terms.needs_worker for waiting in state.queue)
        if self._has_place(state.jobs, terms) and is_alone and terms.start is None:
            return replace(state, jobs={**state.jobs, key: job})
        mine = sum(members.current_key(waiting.author) == author for waiting in state.queue)
        if mine >= QUEUE_PER_MEMBER_MAX:
            queued = f"{short_id(author)} already has {QUEUE_PER_MEMBER_MAX} queued jobs"
            raise Refused(f"{queued}, the maximum: wait, or `peer cancel` one")
        if len(state.queue) >= QUEUE_MAX:
            raise Refused(f"the queue is full with {QUEUE_MAX} jobs: try again when one has started")
        return replace(state, queue=(*state.queue, QueuedJob(key, spec, terms.name, author, height, job.base_job)))

    def _require_whole(
        self, state: JobsState, named: ModelReference, what: str, spec: bytes, misfit: Callable[[bytes, bytes], str | None]
    ) -> None:
        """Require that a model which a job names is the final model of a finished job in the state, and is compatible.

        Raises `Refused`.
        """
        job = state.jobs.get(named.job)
        if job is None or job.phase is not JobPhase.FINISHED:
            raise Refused(f"no finished job {named.job.hex()[:8]} to {what}: `peer jobs` lists the finished jobs that are kept")
        if (job.round, job.model_root) != (named.round, named.root):
            raise Refused(f"the named model is not the final model of job {job.name!r}, which is that of round {job.round}")
        problem = misfit(job.spec, spec)
        if problem is not None:
            raise Refused(f"this job cannot {what} job {job.name!r}: {problem}")

    def _has_place(self, jobs: Mapping[bytes, Job], terms: JobTerms) -> bool:
        """Return whether a job with these terms can start now.

        Only one job that needs a worker runs at a time. Scratch jobs run beside it.
        """
        # A rollback may resume a settling job. A job on request opens one round meanwhile.
        phases = (JobPhase.RUNNING,) if terms.on_request else (JobPhase.RUNNING, JobPhase.SETTLING)
        running = [job for job in jobs.values() if job.phase in phases]
        trains = terms.needs_worker and any(self.rules.terms_of_spec(job.spec).needs_worker for job in running)
        return len(running) < RUNNING_MAX and not trains

    def _made(self, terms: JobTerms, spec: bytes, author: bytes, members: MembersState, height: int) -> Job:
        """Return a new job with its first open round. Raises `Refused` if the present members cannot train it."""
        job = Job(
            spec,
            terms.name,
            author,
            height,
            terms.rounds,
            JobPhase.RUNNING,
            0,
            height,
            MODEL_ROOT_PENDING,
            terms.audited,
            voters=(),
            reexecutors=(),
            trainers=(),
            awaited=(),
            base_job=terms.base.job if terms.base else None,
        )
        job = self.open_round(job, members, height, None)
        if not job.trainers and terms.needs_worker:
            raise Refused(f"no member has the role {terms.role}: run a peer with the role {terms.role} or full")
        if not job.trainers:
            only = f"only {short_id(author)} could train this job, but it was retired"
            raise Refused(f"{only}: it must register again or become a candidate first")
        needed = 2 * VoterSet(job.voters).faults_tolerated + 1
        if terms.is_reexecuted and len(job.reexecutors) < needed:
            mode = "full" if terms.audited else "sampled"
            there = f"found {len(job.reexecutors)}: let more voters train, or choose another audit"
            raise Refused(f"audit {mode!r} needs {needed} voters with a worker, {there}")
        return replace(job, phase=JobPhase.PAUSED) if terms.on_request else job

    def _is_on_request(self, job: Job | QueuedJob) -> bool:
        return self.rules.terms_of_spec(job.spec).on_request

    def _called_up(self, state: JobsState, members: MembersState, height: int, held: Set[bytes]) -> JobsState:
        """Start queued jobs in order, while a job can start.

        A job stays queued if a module holds it, if the present members cannot train it, or if no quorum of voters has attested
        its initial parameters. A job without these parameters would make all peers wait, perhaps for ever.
        """
        jobs, left = dict(state.jobs), list[QueuedJob]()
        for waiting in state.queue:
            has_place = self._has_place(jobs, self.rules.terms_of_spec(waiting.spec))
            job = self._called(waiting, members, height, held) if has_place else None
            if job is not None:
                jobs[waiting.job] = job
            elif members.is_current_key(members.current_key(waiting.author)):  # queued jobs of an expelled member are dropped
                left.append(waiting)
        return JobsState(jobs, tuple(left))

    def _called(self, waiting: QueuedJob, members: MembersState, height: int, held: Set[bytes]) -> Job | None:
        """Return a queued job as it starts at this height. None: it can start only later."""
        terms, author = self.rules.terms_of_spec(waiting.spec), members.current_key(waiting.author)
        holders = set(waiting.start_model_holders) & set(members.voters)
        is_ready = terms.start is None or len(holders) >= VoterSet(members.voters).quorum
        if not (is_ready and members.is_current_key(author) and waiting.job not in held):
            return None
        try:
            return self._made(terms, waiting.spec, author, members, height)
        except Refused:
            return None

    def has_startable_job(self, state: JobsState, members: MembersState, height: int, held: Set[bytes]) -> bool:
        """Return whether a queued job that needs a worker only waits until no other such job runs."""
        waiting = (waiting for waiting in state.queue if self.rules.terms_of_spec(waiting.spec).needs_worker)
        return any(self._called(job, members, height, held) is not None for job in waiting)

    def open_round(
        self,
        job: Job,
        members: MembersState,
        height: int,
        closed: RoundResult | None,
        suspended: SuspendedUntil = NO_SUSPENSIONS,
        brief: JobBrief | None = None,
    ) -> Job:
        """Return the job with its next open round.

        The members at `height` determine the round's voters, re-executors and trainers. A brief names the only trainer.
        """
        terms = self.rules.terms_of_spec(job.spec)
        voters, author = members.round_voters, members.current_key(job.author)
        workers = {key for key, member in members.members.items() if terms.role in member.roles}
        may_train = workers if terms.needs_worker else {author} if members.may_be_awaited(author) else set[bytes]()
        accepted = {members.current_key(trainer) for trainer in closed.accepted} if closed is not None else set[bytes]()
        trainer_records = _by_present_key(job.trainer_records, members, _trainer_severity)
        able = {key for key in may_train if suspended.get(key, 0) <= job.round}
        unsuspended = {key for key in able if key not in trainer_records or trainer_records[key].suspended_until <= job.round}
        # If no accepted trainer is left, suspended trainers stay: otherwise the round might never close.
        if accepted & unsuspended:
            able = unsuspended
        if brief is not None:
            able = {brief.trainer} & may_train
        trainers = tuple(sorted(_by_seniority(able, members)[:TRAINERS_MAX]))
        auditors: tuple[bytes, ...] = ()
        if terms.is_reexecuted:
            auditors = tuple(sorted(workers & set(voters))) if terms.needs_worker else voters
        lied = {key for key, record in trainer_records.items() if record.suspensions}
        new = set(trainers) - set(job.trainers) - lied
        if closed is None:
            awaited = trainers
        else:
            stay = accepted or set(job.awaited)
            awaited = tuple(sorted(stay & set(trainers) | new)) or trainers
        # Draws of the audits of these rounds could be foreseen: voters have not committed to a nonce yet, or ballots of the
        # undone round revealed the nonces.
        is_foreseen = not job.round or (job.undone_rounds and job.undone_rounds[-1].last + 1 == job.round)
        audited = terms.is_audited(job.rounds_in_model) or (terms.audits is not None and bool(is_foreseen))
        return replace(
            job,
            opened_height=height,
            fully_audited=audited,
            successors={},
            voting_keys={},
            vouch_records=_by_present_key(job.vouch_records, members, _vouch_severity),
            trainer_records=trainer_records,
            voters=voters,
            reexecutors=auditors,
            trainers=trainers,
            awaited=awaited,
            trainers_to_vouch_for=_vouched(job, trainers, members) if terms.audits is not None else (),
            brief=brief.brief if brief is not None else b"",
        )

    def _renewed(
        self, job: Job, members: MembersState, height: int, suspended: SuspendedUntil, brief: JobBrief | None = None
    ) -> Job:
        """Return the job with its open round renewed for the present members.

        All messages of the round still count: ballots name no voter set, and the round's trainers stay trainers. A job on
        request gets a further trainer only by a brief.
        """
        fresh = self.open_round(job, members, height, None, suspended, brief)
        if brief is None and self._is_on_request(job):
            fresh = replace(fresh, trainers=tuple(trainer for trainer in fresh.trainers if trainer in job.trainers))
        new = _by_seniority(set(fresh.trainers) - set(job.trainers), members)[: TRAINERS_MAX - len(job.trainers)]
        awaited = set(job.awaited) & set(fresh.trainers) | set(new)
        # Member -> last key of the member among the trainers of this round.
        last = {members.current_key(key): key for key in job.trainers if key not in job.successors}
        successors = {**job.successors, **{last[key]: key for key in new if key in last}}
        trainers = tuple(sorted((*job.trainers, *new)))
        present = {trainer: members.current_key(trainer) for trainer in trainers}
        voting_keys = {trainer: key for trainer, key in present.items() if key != trainer and key in fresh.voters}
        vouched = _vouched(job, trainers, members) if self.rules.terms_of_spec(job.spec).audits is not None else ()
        return replace(
            fresh,
            trainers=trainers,
            awaited=tuple(sorted(awaited)),
            brief=job.brief,
            fully_audited=job.fully_audited,
            trainers_to_vouch_for=vouched,
            successors=successors,
            voting_keys=voting_keys,
        )

    def _is_anchor(self, job: Job) -> bool:
        """Return whether the job's model, after a closed round, is an anchor."""
        return job.phase is not JobPhase.FINISHED and job.rounds_in_model % self.rules.terms_of_spec(job.spec).anchor_rounds == 0

    def _go_on(
        self,
        job: Job,
        members: MembersState,
        height: int,
        closed: RoundResult | None,
        suspended: SuspendedUntil,
        is_held: bool,
        is_doubtful: bool,
    ) -> Job:
        """Return the job after its open round was closed or undone. Opens the next round unless the job is over or held."""
        if job.rounds_in_model >= job.rounds:
            return replace(job, phase=JobPhase.SETTLING if is_doubtful else JobPhase.FINISHED, opened_height=height)
        if job.refused_rounds == NO_PROGRESS_ROUNDS:
            return replace(job, phase=JobPhase.FINISHED, opened_height=height)
        if job.phase is JobPhase.PAUSED or is_held or self._is_on_request(job):
            return replace(job, phase=JobPhase.PAUSED, opened_height=height)
        job = replace(job, phase=JobPhase.RUNNING)
        return self.open_round(job, members, height, closed, suspended)

    def count_round(self, job: Job, members: MembersState, closed: RoundResult) -> Job:
        """Return the job with the results of its closed round in its members' records. The model takes the step later."""
        terms, accepted = self.rules.terms_of_spec(job.spec), dict(job.accepted)
        for trainer in closed.accepted:
            accepted[trainer] = accepted.get(trainer, 0) + 1
        rejected = {trainer: dict(reasons) for trainer, reasons in job.rejected.items()}
        # Reasons are names of codes, because the objective's labels belong to the program and may differ in another release.
        told = {trainer: closed.rejection_reason(trainer) for trainer in closed.rejected}
        told |= dict.fromkeys(closed.absent, ABSENT)
        for trainer, reason in told.items():
            reasons = rejected.setdefault(trainer, {})
            reasons[reason] = reasons.get(reason, 0) + 1
        patience = job.timeout_doublings
        if closed.unjudged:
            patience = min(TIMEOUT_DOUBLINGS_MAX, patience + 1)
        # The time for re-execution shrinks only after rounds whose duration all peers can measure.
        elif closed.accepted and closed.absent.isdisjoint(job.awaited):
            patience = max(0, patience - 1)
        # Records of re-executors and trainers, by their present keys.
        of_voters = dict(job.vouch_records)
        called = {voter for voters in closed.vouchers.values() for voter in voters}
        for voter in called | closed.wrong_vouchers | closed.silent_reexecutors:
            record = of_voters.get(voter, VouchRecord())
            is_false, is_silent = voter in closed.wrong_vouchers, voter in closed.silent_reexecutors
            of_voters[voter] = record.after_round(job.round, is_false, is_silent, terms.suspension_rounds)
        of_voters = {voter: record for voter, record in of_voters.items() if not record.is_expired(job.round + 1)}
        of_trainers = _by_present_key(job.trainer_records, members, _trainer_severity)
        for trainer in map(members.current_key, closed.trainers_with_invalid_updates):
            known = of_trainers.get(trainer, TrainerRecord())
            of_trainers[trainer] = known.after_invalid_update(job.round, terms.suspension_rounds)
        of_trainers = {trainer: record for trainer, record in of_trainers.items() if not record.is_expired(job.round + 1)}
        # A round without an accepted update counts as refused if more than f trainers were rejected. Otherwise honest trainers
        # may be absent. A job that a person stops in this block did not end for lack of progress.
        counts = not closed.accepted and terms.needs_worker and not terms.on_request
        is_refused = closed.refuses_honest and job.phase is not JobPhase.FINISHED
        return replace(
            job,
            vouch_records=_by_present_key(of_voters, members, _vouch_severity),
            trainer_records=dict(sorted(of_trainers.items())),
            accepted=accepted,
            rejected=rejected,
            timeout_doublings=patience,
            refused_rounds=job.refused_rounds + is_refused if counts else 0,
            round=job.round + 1,
            rounds_in_model=job.rounds_in_model + 1,
        )

    def forget_old_jobs(
        self, jobs: dict[bytes, Job], members: MembersState, needed: Set[bytes], changed: Set[bytes]
    ) -> dict[bytes, Job]:
        """Forget finished jobs beyond the limits, at the end of each block. Jobs in `needed` stay.

        Jobs in `changed` get a model by this block, and are forgotten by the next one. Only jobs on request, of which many may
        end in one block, make this difference.

        Jobs that trained nothing have their own limit: beyond it, the oldest is forgotten. Beyond the limit of the other jobs,
        the author with the most jobs loses its oldest. Jobs without training, which cost nothing, therefore cannot displace the
        results of other members.
        """
        finished = [key for key, job in jobs.items() if job.phase is JobPhase.FINISHED and key not in needed]
        finished.sort(key=lambda key: (jobs[key].opened_height, key))
        untrained = [key for key in finished if not self.has_trained(jobs[key])]
        trained = [key for key in finished if key not in untrained]
        forgotten = set(untrained[: max(0, len(untrained) - UNTRAINED_KEPT_MAX)])
        while len(trained) > TRAINED_KEPT_MAX:
            authors = Counter(members.current_key(jobs[key].author) for key in trained)
            # `max` returns the first of equals, which is the oldest.
            oldest = max(trained, key=lambda key: authors[members.current_key(jobs[key].author)])
            trained.remove(oldest)
            forgotten.add(oldest)
        return {key: job for key, job in jobs.items() if key not in forgotten or key in changed}

    def has_trained(self, job: Job) -> bool:
        """Return whether a finished job stays beyond jobs without training."""
        return bool(job.accepted) and self.rules.terms_of_spec(job.spec).leaves_model


class JobsModuleV2(JobsModule):
    """Version 2 of the module.

    Its rules are those of version 1. A network that runs it has only programs that know the kinds of layers, and the fields of a
    specification, that were added after 0.3.0. `JobTerms.requires` of a job with one of these names it.
    """

    version = 2

    def upgrade_state(self, old: JobsState, version: int) -> JobsState:
        return old


def _stop(state: JobsState, members: MembersState, key: bytes, author: bytes, height: int) -> JobsState:
    waiting = next((waiting for waiting in state.queue if waiting.job == key), None)
    if waiting is not None:
        stops, is_over = add_stop_request(waiting.author, waiting.stop_requests, members, author)
        others = tuple(replace(other, stop_requests=stops) if other is waiting else other for other in state.queue)
        return replace(state, queue=tuple(other for other in others if not (is_over and other.job == key)))
    job = state.jobs.get(key)
    if job is None or job.phase is JobPhase.FINISHED:
        raise Refused(f"job {key.hex()[:8]} is not running, paused or queued: `peer jobs` lists the jobs")
    if job.model_root == MODEL_ROOT_PENDING:
        raise Refused(f"job {key.hex()[:8]} starts in this block: stop it after the next one")
    stops, is_over = add_stop_request(job.author, job.stop_requests, members, author)
    phase, opened = (JobPhase.FINISHED, height) if is_over else (job.phase, job.opened_height)
    return replace(state, jobs={**state.jobs, key: replace(job, stop_requests=stops, phase=phase, opened_height=opened)})


def add_stop_request(
    owner: bytes, stop_requests: TrainerKeys, members: MembersState, author: bytes
) -> tuple[tuple[bytes, ...], bool]:
    """Add the author's request to end a job of `owner`. Raises `Refused`.

    Returns all requesting members, and whether the job ends: by its owner, or by a quorum of voters.
    """
    is_author = author == members.current_key(owner)
    if not is_author and author not in members.voters:
        raise Refused(f"{short_id(author)} is neither its author nor a voter, so it cannot stop it")
    stops = tuple(sorted({*stop_requests, author} & {*members.voters, author}))
    return stops, is_author or len(set(stops) & set(members.voters)) >= VoterSet(members.voters).quorum


def _with_rollback(state: JobsState, members: MembersState, asked: RequestRollback, author: bytes) -> JobsState:
    """Return the state with this voter's request for a rollback, or without the request that the voter withdraws.

    Raises `Refused`.
    """
    job = state.jobs.get(asked.job)
    if job is None or job.phase is JobPhase.FINISHED:
        raise Refused(f"job {asked.job.hex()[:8]} is not running, paused or settling: the model of a finished job is final")
    if author not in members.voters:
        raise Refused(f"{short_id(author)} is not a voter, so it cannot request a rollback")
    if asked.last != job.last_rollback:
        raise Refused("the job was rolled back in the meantime: check its rounds with `peer rounds`, then request again")
    rollbacks = {voter: number for voter, number in job.rollback_requests.items() if voter in members.voters and voter != author}
    taken = {anchor.round: anchor.rounds_in_model for anchor in job.anchors} | {job.round: job.rounds_in_model}
    if asked.round not in taken:
        anchors = ", ".join(f"@{anchor.round}" for anchor in job.anchors)
        raise Refused(f"no anchor @{asked.round} is kept: choose one of {anchors}")
    if taken[asked.round] < job.rounds_in_model:
        rollbacks[author] = asked.round
    elif author not in job.rollback_requests:
        raise Refused(f"@{asked.round} is the current model, and {short_id(author)} has no rollback request to withdraw")
    return replace(state, jobs={**state.jobs, asked.job: replace(job, rollback_requests=dict(sorted(rollbacks.items())))})


def _voted_back(job: Job, members: MembersState) -> int | None:
    """Return the anchor to which a quorum of the voters requests a rollback, given by its round.

    None: there is no quorum, or the anchor is no longer stored.
    """
    wanted = Counter(number for voter, number in job.rollback_requests.items() if voter in members.voters)
    number, voters = max(wanted.items(), key=lambda item: item[1], default=(0, 0))
    is_kept = number in {anchor.round for anchor in job.anchors}
    return number if voters >= VoterSet(members.voters).quorum and is_kept else None


def _convictions(context: BlockContext, jobs: Mapping[bytes, Job], members: MembersState) -> dict[bytes, RollbackDue]:
    """Return, by job, the rollback to the earliest round that this block's convictions or voters' requests undo."""
    found = dict[bytes, RollbackDue]()
    voted = {key: _voted_back(job, members) for key, job in jobs.items() if job.rollback_requests}
    wanted = [RollbackDue(key, number, UndoReason.VOTED, None) for key, number in voted.items() if number is not None]
    for fact in (*context.facts_of(RollbackDue), *wanted):
        found[fact.job] = min(found.get(fact.job, fact), fact, key=lambda fact: fact.round)
    return found


def _doubtful(context: BlockContext) -> dict[bytes, int]:
    """Return, by job, the first round that audits may still undo, or that this block undoes."""
    found = dict[bytes, int]()
    for fact in context.facts_of(ContestableRound) + context.facts_of(RollbackDue):
        found[fact.job] = min(found.get(fact.job, fact.round), fact.round)
    return found


def _rolled_back(job: Job, found: RollbackDue, height: int, was_open: bool) -> tuple[Job, JobRolledBack]:
    """Return the job with the model of the newest anchor at or before the round to undo, and the fact for other modules.

    The number of the open round is not reused: a second proposal with that number would be evidence against an honest trainer.
    """
    anchor, last = newest_anchor_up_to(job.anchors, found.round), job.round - (not was_open)
    undone = UndoneRounds(anchor.round, last, height, found.reason, found.trainer)
    job = replace(_moved(job, anchor, undone, last + 1), refused_rounds=0)
    return job, JobRolledBack(found.job, anchor, last + 1)


def _cut(key: bytes, job: Job, doubtful: int, height: int, was_open: bool, is_last: bool) -> tuple[Job, JobRolledBack]:
    """Return a job that ended before audits of its last rounds, with its newest final model, and the fact for other modules."""
    anchor = newest_anchor_up_to(job.anchors, doubtful)
    undone = UndoneRounds(anchor.round, job.round - (not was_open), height, UndoReason.STOPPED)
    # After the fact `JobLastRound`, the job must not seem to lack rounds.
    rounds = anchor.rounds_in_model if is_last and job.rounds_in_model == job.rounds else job.rounds
    return replace(_moved(job, anchor, undone, anchor.round), rounds=rounds), JobRolledBack(key, anchor, anchor.round)


def _moved(job: Job, anchor: ModelAnchor, undone: UndoneRounds, number: int) -> Job:
    """Return the job with this anchor's model for the round `number`. The model root is set after the block."""
    anchors = tuple(of for of in job.anchors if of.round <= anchor.round)
    listed = (*job.undone_rounds, undone)[-UNDONE_KEPT:]
    return replace(
        job, round=number, rounds_in_model=anchor.rounds_in_model, anchors=anchors, undone_rounds=listed, rollback_requests={}
    )


def _vouched(job: Job, trainers: Iterable[bytes], members: MembersState) -> tuple[bytes, ...]:
    """Return the trainers that were convicted in this job, and whose updates are therefore re-executed before each ballot."""
    convicted = set(map(members.current_key, job.distrusted_members))
    return tuple(sorted(trainer for trainer in trainers if members.current_key(trainer) in convicted))


def _is_stuck(job: Job, members: MembersState) -> bool:
    """Return whether the open round may never close, although blocks are decided.

    Up to n − q silent voters do not stop blocks.
    """
    if job.phase is not JobPhase.RUNNING:
        return False
    voters = members.round_voters
    ballots = len(set(voters) & set(job.voters)) - (len(voters) - quorum(len(voters)))
    return ballots < VoterSet(job.voters).quorum or not any(map(members.may_be_awaited, job.trainers))


def _by_present_key(
    records: Mapping[bytes, Record], members: MembersState, severity: Callable[[Record], tuple[int, ...]]
) -> dict[bytes, Record]:
    """Return the members' records by present key. If two keys of a member have a record, the more severe record stays."""
    kept = dict[bytes, Record]()
    for key, record in sorted(records.items(), key=lambda item: item[0]):
        present = members.current_key(key)
        kept[present] = max(kept.get(present, record), record, key=severity)
    return dict(sorted(kept.items(), key=lambda item: item[0]))


def _vouch_severity(record: VouchRecord) -> tuple[int, ...]:
    """Return a sort key of vouch records: the longer suspension is more severe, then the longer time of being asked last."""
    return record.suspended_until, record.assigned_last_until, record.missed_vouches


def _trainer_severity(record: TrainerRecord) -> tuple[int, ...]:
    """Return a sort key of trainer records: the longer suspension is more severe, then more suspensions, then later false
    updates.
    """
    return record.suspended_until, record.suspensions, *record.invalid_update_rounds


def _by_seniority(keys: Iterable[bytes], members: MembersState) -> list[bytes]:
    """Return the keys sorted: voters first, then members by height of admission.

    A voter can invite many members, and a member can choose its key, so neither decides the order.
    """
    voters = set(map(members.current_key, members.voters))
    return sorted(keys, key=lambda key: (key not in voters, members.members[key].admitted, key))
