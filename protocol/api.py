"""What a peer offers to the people and programs that use it: console, control socket, demo and web site share these values.

All values are frozen codec dataclasses, so that they cross the control socket as they are. Peers, jobs and roots are given in
full as text (`peer_id` or hex); a display shortens them.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Final, Protocol

from protocol.sampling import SamplingOptions

BULK_TRAFFIC_KINDS = (
    "blobs",
    "reveals",
)  # kinds of traffic that are part of `bulk`: what is served by digest, and of that what audits ask for


INVITATION_DAYS = 7  # how long an invitation lives unless its maker says otherwise
INVITATION_DAYS_MAX = 90  # beyond that nobody remembers whom it was meant for


@dataclass(frozen=True, slots=True)
class LinkMinute:
    """What was measured in one minute over all links to a peer."""

    ago_seconds: float  # since its end; 0: it is not over
    pings: int
    round_trip_ms: float | None  # on average; None: nothing was measured, as in the next four
    round_trip_ms_least: float | None
    round_trip_ms_most: float | None
    mbit_per_second: float | None
    retransmitted: float | None


@dataclass(frozen=True, slots=True)
class LinkView:
    peer: str  # peer id
    address: str
    outgoing: bool
    connected_seconds: float
    round_trip_ms: float | None  # the median of the last five pings
    bytes_sent: int
    bytes_received: int
    kind: str = "direct"  # or "relayed"
    relay: str | None = None  # peer id of who forwards it, if it is relayed
    mbit_per_second: float | None = None  # that transfers to this peer had when more was waiting than the link carried
    retransmitted: float | None = None  # share of the segments of the last hour; None: the kernel does not say
    silent_seconds: float | None = None  # for which nothing has come, once that is suspicious
    history: tuple[LinkMinute, ...] = ()  # of the last hour, the oldest first; minutes without a measurement are left out


@dataclass(frozen=True, slots=True)
class PeerView:
    peer: str
    name: str
    roles: tuple[str, ...]
    member: bool
    voter: bool
    leader: bool  # of the height being decided
    me: bool
    link: LinkView | None
    approvals: tuple[str, ...]  # voters that want this member to vote
    membership: str  # what of it was decided last, for people
    departed: str = ""  # why this key takes part no more: it was expelled, or its owner goes on with another key


@dataclass(frozen=True, slots=True)
class DialView:
    """An address that this peer cannot reach."""

    address: str
    peer: str  # peer id of whom it expects there; empty: whoever answers
    reason: str
    attempts: int  # in a row
    next_attempt_seconds: float
    text: str  # all of it, in one line


class PeerState(enum.StrEnum):
    """The gravest that is true, from the last to the first."""

    WORKING = "working"
    SUSPENDED = "suspended"  # it votes, and does not train for a while
    BEHIND = "behind"
    WAITING = "waiting"  # nothing can be decided here before somebody else is there
    SILENT = "silent"  # it signs nothing until a height that it may have signed for before is passed
    JOINING = "joining"
    HALTED = "halted"
    EXPELLED = "expelled"


@dataclass(frozen=True, slots=True)
class OptionalServiceView:
    """What a peer does beside its links because its operator asked for it."""

    name: str  # of the setting
    is_working: bool
    text: str  # what it does, or why not


@dataclass(frozen=True, slots=True)
class StatusView:
    """One look at a peer, cheap enough to ask for every second."""

    peer: str
    name: str
    network: str
    chain_id: str
    role: str
    version: str
    address: str
    data_directory: str
    process: int
    height: int  # blocks decided and applied
    view: int
    state_root: str
    voter: bool
    voters: int
    tolerated: int  # f
    quorum: int  # q
    links: int
    halted: str  # why this peer signs nothing, or nothing for a while; empty when it works
    uptime_seconds: float
    waiting: str = ""  # for whom this peer waits before anything can be decided; empty when for nobody
    suspended: str = ""  # until when and why this peer does not train; empty when it may
    unaudited: tuple[str, ...] = ()  # names of running jobs whose updates nobody re-executes
    fork: str = ""  # that another block is certified beside one that is here; empty when none is. It stops nothing
    module_failure: str = ""  # the last failure of a module of this program since its start: a bug. It stops nothing
    state: str = "working"  # in one word, of `PeerState`
    decided_seconds_ago: float | None = None  # the last decision that came here; None: none yet
    unreached_addresses: tuple[DialView, ...] = ()  # addresses that this peer dials in vain
    heights_behind: int | None = 0  # heights that others have decided and this peer has not applied; None: nobody is there to say
    straggling: str = ""  # why this trainer's updates come too late, and what helps; empty when they do not
    reexecution_limits: str = ""  # running jobs in which this peer is not asked to re-execute, or last: until when, and why
    disk_shortage: str = ""  # which jobs do not fit on this peer's disk, and what follows; empty when all do
    parameters_max: int = 0  # that the network allows a job's model
    reachability: str = "unknown"  # direct: others can dial this peer; relayed: they cannot; unknown: too few have said
    listen_addresses: tuple[str, ...] = ()  # where this peer accepts connections, with the ports that it has
    announced_addresses: tuple[str, ...] = ()  # where others are told to dial it
    optional_services: tuple[OptionalServiceView, ...] = ()  # UPnP and mDNS, where they are on


@dataclass(frozen=True, slots=True)
class StatsView:
    status: StatusView
    decisions: int
    decision_ms_p50: float | None
    decision_ms_p99: float | None
    seconds_to_first_decision: float | None
    bytes_sent: dict[str, int]  # by kind: vote, control, bulk; and `BULK_TRAFFIC_KINDS`
    bytes_received: dict[str, int]
    refused: dict[str, int]  # reason -> count of what peers sent and we did not take
    evidence: tuple[str, ...]
    transactions_pending: int
    worker: str  # state of the worker process; empty without one
    memory_mb: float  # PSS of the daemon and its worker, all of its processes
    expelled: tuple[str, ...] = ()  # peer ids
    audit_record: AuditRecordView | None = None  # this peer's own; None: no sampled audit has been about it or by it


class AlertSeverity(enum.StrEnum):
    """The gravest first."""

    CRITICAL = "critical"  # nothing is decided, or this peer takes no part
    WARNING = "warning"  # it will get worse, unless somebody does something
    INFO = "info"


class AlertCause(enum.StrEnum):
    HALTED = "halted"
    DISPUTED = "disputed"
    MODULE_FAILED = "module-failed"
    NO_QUORUM = "no-quorum"
    NO_SPARE = "no-spare"
    STALLED = "stalled"
    BEHIND = "behind"
    DISK_LOW = "disk-low"
    NO_ROOM = "no-room"
    WORKER_GONE = "worker-gone"
    LIAR_FOUND = "liar-found"
    TRAINING_FAILED = "training-failed"
    NO_PROGRESS = "no-progress"


@dataclass(frozen=True, slots=True)
class AlertView:
    """What the operator should know: there is one for each cause and whom it is about, as long as the cause holds."""

    cause: str  # of `AlertCause`
    about: str  # peer id; empty: this peer, or the network
    severity: str  # of `AlertSeverity`
    text: str
    since_ms: int = 0  # when this peer saw it first


@dataclass(frozen=True, slots=True)
class DiskView:
    used_bytes: int  # by the data directory
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class JobView:
    job: str
    name: str
    objective: str
    state: str  # waiting, running, settling, finished
    round: int  # the number of the open round, which counts undone ones
    rounds: int
    model_root: str
    audit: str
    data: str  # hash of the text, "local", or empty for a job without any
    accepted: dict[str, int]  # trainer -> proposals accepted
    rejected: dict[str, dict[str, int]]  # trainer -> reason -> count
    started_height: int
    suspended_until: dict[str, int] = field(default_factory=dict)  # trainer -> the first round in which it may train again
    audits_open: int = 0  # audits not reported yet, and disputes not settled yet
    queue_position: int = 0  # in the line, from 1 on; 0: it does not wait
    data_origin: str = ""  # of data that people decided, or might have
    precision: str = "fp32"  # of matrix products; with bf16 nobody can audit
    parameters: int = 0  # of its model
    disk_bytes: int = 0  # that it takes on this peer's disk at most, beside its text; 0: it is over
    # Of a job that waits for its first model: how many voters hold it, of how many that are needed.
    initial_model_holders: str = ""
    notes: tuple[str, ...] = ()  # counts of the file that its set was made of, for people
    reexecution_limits: dict[str, str] = field(
        default_factory=dict
    )  # re-executor that is not asked now, or last -> until when, and why
    machine_time: str = ""  # of one machine: own steps and re-execution, for people
    rounds_in_model: int = 0  # rounds in its model
    final_round: int = 0  # rounds that had begun before its newest final model
    anchors: tuple[int, ...] = ()  # the models that a rollback may go to, each by the round that began with it
    undone_rounds: tuple[str, ...] = ()  # which rounds are in the model no more, and why, for people


@dataclass(frozen=True, slots=True)
class RoundView:
    """One closed round."""

    job: str
    round: int
    height: int
    verdicts: dict[str, str]  # trainer -> "accept", a reason, or "absent"
    ballots: tuple[str, ...]  # voters whose ballots were decided
    stepped: bool
    plain_mean: bool  # only re-execution stood against updates that lie
    model_root: str  # after the round
    held_out_bits_per_byte: float | None  # measured by this peer, where it measures
    training_nats: float | None  # this trainer's own loss, a token; None where the objective's is no such figure
    seconds: float | None  # since the round opened here; like the next, None where the round was only replayed
    decision_ms: float | None  # from the closing block's first sight here to its certificate
    training_loss: float | None = None  # this trainer's own, where it is no loss of a token; in the unit of the job's objective
    # Accepted trainer -> voters that vouch for its update in the block; empty where nothing is re-executed before the vote.
    vouchers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    undone: bool = False  # its step is in the model no more


@dataclass(frozen=True, slots=True)
class RoundVotesView:
    """Who voted what in one round, open or closed."""

    job: str
    round: int
    phase: str  # training, voting, closing, closed
    height: int | None  # of the block that closed it; None: it is open
    quorum: int  # ballots that a closing needs; 0 once it is closed
    voters: tuple[str, ...]  # peer ids, as in all that follows; none once it is closed, like the next
    trainers: tuple[str, ...]  # whose proposals are waited for
    proposed: tuple[str, ...]
    votes: dict[str, dict[str, str]]  # voter -> trainer -> "accept", or the reason of the rejection
    seconds: float | None = None  # since it was opened here; None: it is closed
    # Re-executor -> trainer -> verdict of its vouch, as in `votes`; "unjudged": it is unsure.
    vouches: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditRecordView:
    """What sampled audits have shown of one member, in all jobs."""

    peer: str
    rewards: int  # accepted proposals that nobody found false in time
    rewards_lost: int  # rewards that a suspension cost, or losses that it did not open
    suspensions: int
    reports: int  # as a drawn auditor
    reports_lapsed: int  # audits it did not report on
    challenges_upheld: int  # its challenges that ended in a suspension
    challenges_refuted: int  # its challenges that were found false
    wrong_losses: int = 0  # its reports whose loss is another than the trainer opened


@dataclass(frozen=True, slots=True)
class AuditView:
    """One decided result of a sampled audit."""

    height: int
    job: str
    round: int
    trainer: str  # peer id; so is the next
    auditor: str
    result: str  # passed, challenged, lapsed, suspended, refuted, shunned, dropped
    finding: str  # what the auditor says it found; empty where it said nothing
    relative_error: float | None


@dataclass(frozen=True, slots=True)
class SuspensionView:
    """Why a trainer is suspended in a running job: the log of results soon forgets it."""

    until: int  # the first round in which it may train again
    cause: AuditView


@dataclass(frozen=True, slots=True)
class AuditsView:
    records: tuple[AuditRecordView, ...]
    results: tuple[AuditView, ...]  # the oldest first
    suspensions: tuple[SuspensionView, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockView:
    """A decided block without its body, and what shows that it was decided: docs/protocol/blocks.md says how to verify it."""

    height: int
    digest: str
    time_ms: int
    proposer: str  # peer id
    view: int  # in which it was decided
    signers: tuple[str, ...]  # peer ids
    voters_count: int
    quorum: int
    certified_root: str  # the state root after the height before: the signers of this block sign that too
    own_root: str  # what this peer itself computed for that height; empty: not kept
    body_bytes: int
    header: str  # hex, like the next two; these are the very bytes that are hashed and signed
    certificate: str
    voters: str


NEWEST: Final = "@newest"  # behind the name of a job: its newest model, also where audits may still undo it


@dataclass(frozen=True, slots=True)
class TextPieceView:
    """A part of a text that a model goes on with; the next one follows without a blank."""

    text: str
    is_withheld: bool = False  # people may not see the text: it holds a word of the list that the job names
    is_checked: bool = False  # said first, of a text that is not shown before all of it was compared with such a list
    newer_round: int = 0  # said first, if audits may still undo newer models: of the newest, the rounds applied
    round: int = 0  # said with it, of this model


@dataclass(frozen=True, slots=True)
class SampleView:
    """Text of a model, drawn by this peer on its way."""

    job: str
    round: int  # before which the model stood so
    text: str


@dataclass(frozen=True, slots=True)
class EventView:
    """One line of what happened, numbered so that a reader can go on where it stopped."""

    number: int
    at_ms: int
    kind: str  # decided, round, ballot, proposal, peer, evidence, job, member, test, warning
    text: str
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """A job to start. Empty or zero values mean the default of `training.job_spec.JobSpec`."""

    name: str
    data: str  # a path on the peer's machine; empty: the built-in text; "local": each trainer's own
    rounds: int
    vocabulary: int  # more than 256: a byte-level BPE of that size is trained on the text
    overrides: dict[str, str]  # further fields of the job specification, as a person typed them
    initial_model: str = ""  # the finished job whose model it starts from, by its name or the beginning of its id; empty: none
    examples: str = ""  # a path on the peer's machine: JSONL with prompts and responses that the base's model learns; empty: none
    # A path on the peer's machine, if `initial_model` may also mean a folder with a model; empty: it means a job.
    model_folder: str = ""
    accept_risk: bool = False  # start it also where sampled audits were not measured to find liars in time
    skip_bad: bool = False  # leave out lines of `examples` that cannot be learned
    truncate: str = ""  # left, right: which end of texts in `examples` is cut off to fit the context; empty: none is
    column: str = ""  # of records in `data`: the field or column with the text; empty: `text`


@dataclass(frozen=True, slots=True)
class RunExportView:
    path: str
    height: int
    state_root: str
    model_root: str
    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class ModelFilesView:
    """A model as files for other programs."""

    path: str
    job: str
    name: str
    round: int  # rounds applied
    model_root: str
    format: str
    files: int
    bytes: int
    omitted_tensors: tuple[str, ...]  # vectors of the job that the format has no place for
    # Rounds applied to the newest model, if audits may still undo that; 0: it is this one, or a round was named.
    newer_round: int = 0


@dataclass(frozen=True, slots=True)
class RowProofView:
    """A file that shows one row of a table, or that there is none."""

    path: str
    height: int  # the row is that of the state after it, which the next block certifies
    has_row: bool
    bytes: int
    row_bytes: int  # of them, those that lead from the root of the table to the row


@dataclass(frozen=True, slots=True)
class InvitationView:
    """One that this peer made."""

    token: str  # how it is called: its first characters are enough to revoke it. Nobody can join with it
    state: str  # open, used, revoked, expired, or why it has no effect
    made_ms: int
    expires_ms: int  # of the network's time, which is that of its last block
    addresses: tuple[str, ...]


# Calls: each is declared here alone, by its name, the types of its arguments and of its answer, and what it is about. The client,
# the server and what is decoded follow from that (`features/rpc.py`). Every call may raise `UserError`, whose text is for the
# person who asked.


@dataclass(frozen=True, slots=True)
class ModuleView:
    """A part of the state: which of its versions the network runs, and which this program knows."""

    module: str
    feature: str  # that brings it here; empty if none does
    about: str
    active_version: int  # version; 0: the network has no such module
    known_versions: tuple[int, ...]
    due_version: int  # 0: no upgrade is decided
    due_height: int
    wishes: tuple[str, ...]  # of voters for upgrades that are not decided, in words


@dataclass(frozen=True, slots=True)
class LimitView:
    """What the voters allow in this network."""

    name: str
    maximum: int
    wishes: tuple[str, ...]  # of voters for other limits that are not decided, in words


@dataclass(frozen=True, slots=True)
class DeviceView:
    """What the worker can compute on. MB are 10^6 bytes."""

    device: str  # as the setting `device` names it
    about: str
    memory_mb: int
    free_mb: int | None  # None: not known, of a GPU that the worker does not use
    held_mb: int  # by this peer's worker
    in_use: bool


@dataclass(frozen=True, slots=True)
class EngineView:
    """What a worker can compute with, of those that this program knows."""

    engine: str  # as the setting `engine` names it
    in_use: bool
    state: str  # of the worker that uses it; empty where none does
    threads: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    devices: tuple[DeviceView, ...] = ()


# Observer -> voter -> seconds of silence. None: never heard, or no report of that observer is here.
LivenessMatrix = dict[str, dict[str, float | None]]


class LocalPeerRpc(Protocol):
    async def status(self) -> StatusView: ...

    async def stats(self) -> StatsView: ...

    async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
        """Events numbered above `after` (negative: the last ones); waits up to `wait_seconds` for the first."""

    async def alerts(self) -> tuple[AlertView, ...]:
        """What the operator should know now, the gravest first."""

    async def disk_usage(self) -> DiskView: ...

    async def engines(self) -> tuple[EngineView, ...]:
        """What this peer computes with; of a busy worker, what it said last."""

    async def stop_peer(self) -> None: ...


class BlockRpc(Protocol):
    async def block(self, height: int) -> BlockView:
        """A decided block with its certificate; height 0: the last one."""


class MemberRpc(Protocol):
    async def peers(self) -> tuple[PeerView, ...]: ...

    async def approve_voter(self, peer: str) -> str:
        """Approves a member, by its name or id, as a voter; says how many approvals it has and needs."""

    async def retire_member(self, peer: str, lower_tolerance: bool) -> str:
        """Says that a member is gone; says how many voters do, and how many are needed."""

    async def resign_as_voter(self) -> str: ...


class InvitationRpc(Protocol):
    async def create_invitation(self, days: int, addresses: tuple[str, ...] = ()) -> str:
        """An invitation that names these addresses; none: those at which this peer believes to be reached."""

    async def invitations(self) -> tuple[InvitationView, ...]:
        """Those that this peer made, the oldest first."""

    async def revoke_invitation(self, token: str) -> str:
        """Puts it on the log that an invitation of this peer admits nobody any more."""

    async def dial_address(self, address: str) -> str:
        """Dials an address at once, and says who answered."""


class JobRpc(Protocol):
    async def jobs(self) -> tuple[JobView, ...]: ...

    async def rounds(self, last: int) -> tuple[RoundView, ...]: ...

    async def votes(self, last: int) -> tuple[RoundVotesView, ...]:
        """Of so many rounds closed last, the oldest first, and of all that are open."""

    async def start_job(self, request: TrainRequest) -> str:
        """Puts a job on the log and returns its id once it is decided."""

    async def run_test_round(self) -> str:
        """Starts a scratch round on the live network and returns its job id; `events` tells its phases."""

    async def cancel_job(self, job: str) -> str:
        """Asks for the end of a job, by its id or the beginning of it: its author alone ends it, voters by a quorum."""

    async def request_rollback(self, job: str, round: int) -> str:
        """Asks that a job goes back to the anchor JOB@round: voters do that by a quorum. The number of the open round takes back
        what this peer has asked for.
        """


class AuditRpc(Protocol):
    async def audits(self, last: int) -> AuditsView:
        """The last results of sampled audits, and the standing of everybody whom they were about."""

    async def challenge_trainer(self, trainer: str, round: int | None) -> str:
        """Has this peer re-execute the accepted proposals of a round; says what it found in this trainer's.

        `round`: of the proposal; None: the newest that can be re-executed.
        """


class ModelRpc(Protocol):
    def sample_text(
        self, prompt: str, how: SamplingOptions, job: str = "", turns: tuple[str, ...] | None = None
    ) -> AsyncGenerator[TextPieceView, None]:
        """What goes on from the prompt, as it is made, with the model of JOB[@ROUND]; of no name, of the job started last.

        `turns` are a chat's, the oldest first: prompts with what was said to them. As many of the last ones stand before the
        prompt as the model's context can hold. In a chat a line break ends the text of a model that has learned no end.
        """

    async def saved_samples(self) -> tuple[SampleView, ...]:
        """What this peer keeps of each job's models while it trains, the oldest first; none where it does not."""

    async def export_run(self, path: str) -> RunExportView: ...

    async def export_model(self, path: str, job: str, format: str) -> ModelFilesView:
        """Writes a model into a new folder. `job` is JOB, JOB@ROUND, or empty for the latest model of text."""


class RowProofRpc(Protocol):
    async def prove_row(self, table: str, key: bytes, path: str) -> RowProofView:
        """Writes a file that shows the row of a key, or that there is none, at the newest height that a block certifies."""


class NetworkRpc(Protocol):
    async def voter_liveness(self) -> LivenessMatrix:
        """By observer and voter, both as peer ids, for how many seconds the voter was silent; null: nobody here can say."""

    async def modules(self) -> tuple[ModuleView, ...]:
        """What this program knows and what the network runs, a module each, in their order inside a block."""

    async def request_upgrade(self, module: str, version: int, height: int) -> str:
        """Says that this voter wants the network to run a version of a module from a height on; height 0: soon."""

    async def limits(self) -> tuple[LimitView, ...]: ...

    async def set_limit(self, name: str, most: int) -> str:
        """Says that this voter wants the network to allow so many at most; says how many voters do, and how many are needed."""


class PeerApi(LocalPeerRpc, BlockRpc, MemberRpc, InvitationRpc, JobRpc, AuditRpc, ModelRpc, RowProofRpc, NetworkRpc, Protocol):
    """Every call that a peer answers, whatever its features."""
