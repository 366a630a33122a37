"""The API of a peer: calls and values that the console, the control socket, the demo and the pages share.

All values are frozen codec dataclasses, so they cross the control socket unchanged. Peers, jobs and roots are full texts
(`peer_id` or hex), which displays shorten.
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
)  # shares of `bulk` traffic: all blobs, and the blobs that audits request


INVITATION_DAYS = 7  # default lifetime of an invitation
INVITATION_DAYS_MAX = 90  # after more days, nobody remembers for whom an invitation was made


@dataclass(frozen=True, slots=True)
class LinkMinute:
    """Measurements of one minute, over all links to a peer."""

    ago_seconds: float  # seconds since the end of the minute; 0: the current minute
    pings: int
    round_trip_ms: float | None  # mean; None: not measured, as in the next four fields
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
    relay: str | None = None  # peer id of the relay, if it is relayed
    mbit_per_second: float | None = None  # rate of transfers to this peer while the link was the bottleneck
    retransmitted: float | None = None  # share of segments in the last hour; None: the kernel does not report it
    silent_seconds: float | None = None  # seconds since the last message, if they are suspiciously many
    history: tuple[LinkMinute, ...] = ()  # last hour, oldest first, without minutes that have no measurement


@dataclass(frozen=True, slots=True)
class PeerView:
    peer: str
    name: str
    roles: tuple[str, ...]
    member: bool
    voter: bool
    leader: bool  # whether it leads the open height
    me: bool
    link: LinkView | None
    approvals: tuple[str, ...]  # voters that approve this member as a voter
    membership: str  # the last decision about its membership, for people
    departed: str = ""  # reason why this key no longer takes part: expulsion, or another key of its owner


@dataclass(frozen=True, slots=True)
class DialView:
    """An address that this peer cannot reach."""

    address: str
    peer: str  # expected peer id; empty: any
    reason: str
    attempts: int  # consecutive failures
    next_attempt_seconds: float
    text: str  # all fields in one line, for people


class PeerState(enum.StrEnum):
    """States of a peer, the gravest last. A peer reports the gravest one that is true."""

    WORKING = "working"
    SUSPENDED = "suspended"  # the peer votes, but does not train for some time
    BEHIND = "behind"
    WAITING = "waiting"  # the peer can decide nothing before another peer connects
    SILENT = "silent"  # the peer signs nothing until the network has passed heights that it may have signed before
    JOINING = "joining"
    HALTED = "halted"
    EXPELLED = "expelled"


@dataclass(frozen=True, slots=True)
class OptionalServiceView:
    """A service that the operator has turned on, such as UPnP or mDNS."""

    name: str  # name of the setting
    is_working: bool
    text: str  # its state or its failure, for people


@dataclass(frozen=True, slots=True)
class StatusView:
    """A peer's status, cheap enough to be requested every second."""

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
    halted: str  # reason why this peer signs nothing, for good or for some time; empty: it signs
    uptime_seconds: float
    waiting: str = ""  # peers that this peer needs for any decision and waits for; empty: none
    suspended: str = ""  # the end of this trainer's suspension, and the reason; empty: it may train
    unaudited: tuple[str, ...] = ()  # names of running jobs without re-execution
    fork: str = ""  # two certified blocks at one height; empty: none. It stops nothing
    module_failure: str = ""  # the last failure of a module since the start, which is a bug. It stops nothing
    state: str = "working"  # a value of `PeerState`
    decided_seconds_ago: float | None = None  # seconds since the last decision here; None: there was none
    unreached_addresses: tuple[DialView, ...] = ()  # addresses that this peer cannot reach
    heights_behind: int | None = 0  # heights that others have decided and this peer has not applied; None: no peer is connected
    straggling: str = ""  # reason why this trainer's updates are late, and the remedy; empty: they are in time
    reexecution_limits: str = ""  # running jobs in which this peer re-executes last or never, with end and reason
    disk_shortage: str = ""  # jobs that do not fit on this peer's disk, and the consequence; empty: all fit
    parameters_max: int = 0  # limit of this network for a job's model
    reachability: str = "unknown"  # direct: others can dial this peer; relayed: they cannot; unknown: too few tried
    listen_addresses: tuple[str, ...] = ()  # where this peer accepts connections, with the actual ports
    announced_addresses: tuple[str, ...] = ()  # addresses that it announces to other peers
    optional_services: tuple[OptionalServiceView, ...] = ()  # UPnP and mDNS, if they are on


@dataclass(frozen=True, slots=True)
class StatsView:
    status: StatusView
    decisions: int
    decision_ms_p50: float | None
    decision_ms_p99: float | None
    seconds_to_first_decision: float | None
    bytes_sent: dict[str, int]  # kind of traffic -> bytes: vote, control, bulk, and `BULK_TRAFFIC_KINDS`
    bytes_received: dict[str, int]
    refused: dict[str, int]  # reason -> number of refused messages and connections
    evidence: tuple[str, ...]
    transactions_pending: int
    worker: str  # state of the worker process; empty: there is none
    memory_mb: float  # PSS of the daemon and all processes of its worker
    expelled: tuple[str, ...] = ()  # peer ids
    audit_record: AuditRecordView | None = None  # None: this peer took part in no sampled audit


class AlertSeverity(enum.StrEnum):
    """Severities of alerts, the gravest first."""

    CRITICAL = "critical"  # the network decides nothing, or this peer does not participate
    WARNING = "warning"  # the problem will grow unless a person acts
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
    """A problem that the operator should know. There is one alert for each cause and subject, while the cause lasts."""

    cause: str  # a value of `AlertCause`
    about: str  # peer id; empty: this peer, or the network
    severity: str  # a value of `AlertSeverity`
    text: str
    since_ms: int = 0  # time when this peer first noticed the problem


@dataclass(frozen=True, slots=True)
class DiskView:
    used_bytes: int  # bytes of the data directory
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class JobView:
    job: str
    name: str
    objective: str
    state: str  # waiting, running, settling, finished
    round: int  # number of the open round; undone rounds count, too
    rounds: int
    model_root: str
    audit: str
    data: str  # hash of the text, "local", or empty for a job without text
    accepted: dict[str, int]  # trainer -> proposals accepted
    rejected: dict[str, dict[str, int]]  # trainer -> reason -> count
    started_height: int
    suspended_until: dict[str, int] = field(default_factory=dict)  # trainer -> the first round in which it may train again
    audits_open: int = 0  # audits without a report, and open disputes
    queue_position: int = 0  # place in the queue, from 1; 0: it is not queued
    data_origin: str = ""  # origin of data that people have labeled, or may have labeled
    precision: str = "fp32"  # number format of matrix products; a job in bf16 cannot be audited
    parameters: int = 0  # number of parameters of its model
    disk_bytes: int = 0  # maximum on this peer's disk, without its text; 0: the job is over
    # Number of voters that hold the job's first model, and the number that it needs to start.
    initial_model_holders: str = ""
    notes: tuple[str, ...] = ()  # statistics of the file from which its data set was made, for people
    reexecution_limits: dict[str, str] = field(default_factory=dict)  # voter that re-executes last or never -> end and reason
    machine_time: str = ""  # time of one machine for local steps and re-execution, for people
    rounds_in_model: int = 0  # rounds in its model
    final_round: int = 0  # number of rounds before its newest final model
    anchors: tuple[int, ...] = ()  # the models to which a rollback may return, each by the first round on it
    undone_rounds: tuple[str, ...] = ()  # rounds that a rollback has undone, with reasons, for people


@dataclass(frozen=True, slots=True)
class RoundView:
    """One closed round."""

    job: str
    round: int
    height: int
    verdicts: dict[str, str]  # trainer -> "accept", a reason, or "absent"
    ballots: tuple[str, ...]  # voters whose ballots were decided
    stepped: bool
    plain_mean: bool  # aggregation by the mean: only re-execution protects it against false updates
    model_root: str  # model root after the round
    held_out_bits_per_byte: float | None  # measured by this peer; None: it does not measure
    training_nats: float | None  # this trainer's own loss per token; None: the objective has no such loss
    seconds: float | None  # seconds since it opened here; None, as the next field, if it was only replayed
    decision_ms: float | None  # ms from the closing block's arrival here to its certificate
    training_loss: float | None = None  # this trainer's own loss in the objective's unit, if it is not per token
    # Accepted trainer -> voters that vouch for its update in the block; empty: no re-execution before the ballots.
    vouchers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    undone: bool = False  # a rollback has undone its step


@dataclass(frozen=True, slots=True)
class RoundVotesView:
    """The votes of one round, open or closed. Peers are given by their ids."""

    job: str
    round: int
    phase: str  # training, voting, closing, closed
    height: int | None  # height of the block that closed it; None: it is open
    quorum: int  # ballots that a closing needs; 0: it is closed
    voters: tuple[str, ...]  # empty, as the next field, if it is closed
    trainers: tuple[str, ...]  # trainers whose proposals are awaited
    proposed: tuple[str, ...]
    votes: dict[str, dict[str, str]]  # voter -> trainer -> "accept" or a reason
    seconds: float | None = None  # seconds since it opened here; None: it is closed
    # Re-executor -> trainer -> verdict of its vouch, as in `votes`; "unjudged" means unsure.
    vouches: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditRecordView:
    """A member's results in the sampled audits of all jobs."""

    peer: str
    rewards: int  # accepted proposals whose audit window ended without a conviction
    rewards_lost: int  # rewards lost by suspensions, and by losses that it did not open
    suspensions: int
    reports: int  # reports as a drawn auditor
    reports_lapsed: int  # audits without its report
    challenges_upheld: int  # challenges that led to a suspension
    challenges_refuted: int  # challenges that were found false
    wrong_losses: int = 0  # reports with another loss than the trainer opened


@dataclass(frozen=True, slots=True)
class AuditView:
    """One decided result of a sampled audit."""

    height: int
    job: str
    round: int
    trainer: str  # peer id, as the next field
    auditor: str
    result: str  # passed, challenged, lapsed, suspended, refuted, shunned, dropped
    finding: str  # the auditor's finding; empty: it reported nothing
    relative_error: float | None


@dataclass(frozen=True, slots=True)
class SuspensionView:
    """The cause of a suspension in a running job. It is kept here, since the log of results is short."""

    until: int  # the first round in which it may train again
    cause: AuditView


@dataclass(frozen=True, slots=True)
class AuditsView:
    records: tuple[AuditRecordView, ...]
    results: tuple[AuditView, ...]  # the oldest first
    suspensions: tuple[SuspensionView, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockView:
    """A decided block without its body, with the proof of its decision. docs/protocol/blocks.md describes how to verify it."""

    height: int
    digest: str
    time_ms: int
    proposer: str  # peer id
    view: int  # view in which it was decided
    signers: tuple[str, ...]  # peer ids
    voters_count: int
    quorum: int
    certified_root: str  # state root after the previous height, which the signers of this block also sign
    own_root: str  # state root that this peer computed for that height; empty: not kept
    body_bytes: int
    header: str  # hex, as the next two fields: the bytes that are hashed and signed
    certificate: str
    voters: str


NEWEST: Final = "@newest"  # after a job's name: its newest model, even if audits may still undo it


@dataclass(frozen=True, slots=True)
class TextPieceView:
    """A piece of generated text. The next piece follows without a blank."""

    text: str
    is_withheld: bool = False  # the text may not be shown, since it has a word of the job's blocklist
    is_checked: bool = False  # in the first piece: the text is shown only after all of it was compared with a blocklist
    newer_round: int = 0  # in the first piece: rounds of the newest model, if audits may still undo it; or 0
    round: int = 0  # beside `newer_round`: rounds of this model


@dataclass(frozen=True, slots=True)
class SampleView:
    """Text that this peer generated with a model during training."""

    job: str
    round: int  # first round on this model
    text: str


@dataclass(frozen=True, slots=True)
class EventView:
    """One event. Its number lets a reader continue after the last event that it has read."""

    number: int
    at_ms: int
    kind: str  # decided, round, ballot, proposal, peer, evidence, job, member, test, warning
    text: str
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """A job to start. Empty or zero values mean the default of `training.job_spec.JobSpec`."""

    name: str
    data: str  # a path on the peer's machine; empty: the built-in text; "local": each trainer's own data
    rounds: int
    vocabulary: int  # above 256, a byte-level BPE of this size is trained on the text
    overrides: dict[str, str]  # other fields of the specification, as a person typed them
    initial_model: str = ""  # finished job whose model it starts from: a name or the start of an id; empty: none
    examples: str = ""  # path on the peer's machine of JSONL with prompts and responses to learn; empty: none
    # Path on the peer's machine, if `initial_model` may also be a folder with a model. Empty: it is a job.
    model_folder: str = ""
    accept_risk: bool = False  # start it even if no measurement shows that sampled audits find liars in time
    skip_bad: bool = False  # leave out lines of `examples` that cannot be learned
    truncate: str = ""  # left, right: the end of a text in `examples` that is cut off to fit the context; empty: none
    column: str = ""  # field or column with the text in records of `data`; empty: `text`


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
    """An exported model, as files for other programs."""

    path: str
    job: str
    name: str
    round: int  # rounds applied
    model_root: str
    format: str
    files: int
    bytes: int
    omitted_tensors: tuple[str, ...]  # vectors of the model that the format cannot hold
    # Rounds applied to the newest model, if audits may still undo it; 0: this is the newest, or a round was named.
    newer_round: int = 0


@dataclass(frozen=True, slots=True)
class RowProofView:
    """A file that proves a row of a table, or its absence."""

    path: str
    height: int  # the row is in the state after this height, which the next block certifies
    has_row: bool
    bytes: int
    row_bytes: int  # bytes of the path from the table's root to the row


@dataclass(frozen=True, slots=True)
class InvitationView:
    """An invitation that this peer made."""

    token: str  # name of the invitation, whose start suffices to revoke it. It admits nobody
    state: str  # open, used, revoked, expired, or the reason why it has no effect
    made_ms: int
    expires_ms: int  # by the network's clock, which is the time of its last block
    addresses: tuple[str, ...]


# Each call is declared only here: its name, the types of its arguments and of its answer, and a description. `features/rpc.py`
# derives the client, the server and the decoders from that. Every call may raise `UserError`, whose text is for the person who
# asked.


@dataclass(frozen=True, slots=True)
class ModuleView:
    """A module: the version that the network runs, and the versions that this program knows."""

    module: str
    feature: str  # the feature with this module; empty: this program has none
    about: str
    active_version: int  # 0: the network has no such module
    known_versions: tuple[int, ...]
    due_version: int  # 0: no upgrade is decided
    due_height: int
    wishes: tuple[str, ...]  # votes for undecided upgrades, for people


@dataclass(frozen=True, slots=True)
class LimitView:
    """A limit that the voters of this network set."""

    name: str
    maximum: int
    wishes: tuple[str, ...]  # undecided votes for other values, for people


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device of the worker. MB are 10^6 bytes."""

    device: str  # a value of the setting `device`
    about: str
    memory_mb: int
    free_mb: int | None  # None: not known, since the worker does not use this GPU
    held_mb: int  # used by this peer's worker
    in_use: bool


@dataclass(frozen=True, slots=True)
class EngineView:
    """An engine that this program knows."""

    engine: str  # a value of the setting `engine`
    in_use: bool
    state: str  # state of the worker with this engine; empty: there is none
    threads: int = 0
    versions: dict[str, str] = field(default_factory=dict)
    devices: tuple[DeviceView, ...] = ()


# Observer -> voter -> seconds of silence. None: the observer never heard it, or has sent no report.
LivenessMatrix = dict[str, dict[str, float | None]]


class LocalPeerRpc(Protocol):
    async def status(self) -> StatusView: ...

    async def stats(self) -> StatsView: ...

    async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
        """Return events with numbers above `after` (negative: the last ones). Waits up to `wait_seconds` for the first one."""

    async def alerts(self) -> tuple[AlertView, ...]:
        """Return the current alerts, the gravest first."""

    async def disk_usage(self) -> DiskView: ...

    async def engines(self) -> tuple[EngineView, ...]:
        """Return the engines of this peer. A busy worker's last report is used."""

    async def stop_peer(self) -> None: ...


class BlockRpc(Protocol):
    async def block(self, height: int) -> BlockView:
        """Return a decided block with its certificate. Height 0 means the last one."""


class MemberRpc(Protocol):
    async def peers(self) -> tuple[PeerView, ...]: ...

    async def approve_voter(self, peer: str) -> str:
        """Approve a member as a voter, by its name or id. Returns the numbers of approvals that it has and needs, for people."""

    async def retire_member(self, peer: str, lower_tolerance: bool) -> str:
        """Vote to retire an absent member. Returns the numbers of such votes given and needed, for people."""

    async def resign_as_voter(self) -> str: ...


class InvitationRpc(Protocol):
    async def create_invitation(self, days: int, addresses: tuple[str, ...] = ()) -> str:
        """Make an invitation with these addresses. None given: the addresses at which this peer assumes to be reached."""

    async def invitations(self) -> tuple[InvitationView, ...]:
        """Return the invitations that this peer made, the oldest first."""

    async def revoke_invitation(self, token: str) -> str:
        """Submit a transaction that revokes an invitation of this peer."""

    async def dial_address(self, address: str) -> str:
        """Dial an address at once, and return the peer that answered, for people."""


class JobRpc(Protocol):
    async def jobs(self) -> tuple[JobView, ...]: ...

    async def rounds(self, last: int) -> tuple[RoundView, ...]: ...

    async def votes(self, last: int) -> tuple[RoundVotesView, ...]:
        """Return the votes of the `last` closed rounds, the oldest first, and of all open rounds."""

    async def start_job(self, request: TrainRequest) -> str:
        """Submit a job, and return its id after it is decided."""

    async def run_test_round(self) -> str:
        """Start a test round on the live network, and return its job id. `events` has its phases."""

    async def cancel_job(self, job: str) -> str:
        """Request the end of a job, by its id or the start of it. Its author ends it alone, or voters by a quorum."""

    async def request_rollback(self, job: str, round: int) -> str:
        """Request the return of a job to the anchor JOB@round, for which voters need a quorum.

        The number of the open round withdraws this peer's request.
        """


class AuditRpc(Protocol):
    async def audits(self, last: int) -> AuditsView:
        """Return the last results of sampled audits, the audit records of all members, and the current suspensions."""

    async def challenge_trainer(self, trainer: str, round: int | None) -> str:
        """Re-execute the accepted proposals of a round on this peer, and return the finding for this trainer, for people.

        `round` None: the newest round that can be re-executed.
        """


class ModelRpc(Protocol):
    def sample_text(
        self, prompt: str, how: SamplingOptions, job: str = "", turns: tuple[str, ...] | None = None
    ) -> AsyncGenerator[TextPieceView, None]:
        """Yield pieces of a continuation of the prompt, by the model of JOB[@ROUND]; without a name, of the last job started.

        `turns` are the prompts and answers of a chat, the oldest first. The last ones that fit the model's context stand before
        the prompt. In a chat, a line break ends the text of a model that has not learned an end.
        """

    async def saved_samples(self) -> tuple[SampleView, ...]:
        """Return the samples that this peer generated during training, the oldest first. Empty if it generates none."""

    async def export_run(self, path: str) -> RunExportView: ...

    async def export_model(self, path: str, job: str, format: str) -> ModelFilesView:
        """Write a model into a new folder. `job` is JOB, JOB@ROUND, or empty for the latest model of text."""


class RowProofRpc(Protocol):
    async def prove_row(self, table: str, key: bytes, path: str) -> RowProofView:
        """Write a proof of a key's row, or of its absence, at the newest height that a block certifies."""


class NetworkRpc(Protocol):
    async def voter_liveness(self) -> LivenessMatrix:
        """Return the seconds for which each observer has not heard each voter, by peer ids. None: not known."""

    async def modules(self) -> tuple[ModuleView, ...]:
        """Return the modules that this program knows or the network runs, in their order inside a block."""

    async def request_upgrade(self, module: str, version: int, height: int) -> str:
        """Vote for an upgrade of a module to a version, from a height on. Height 0 means soon."""

    async def limits(self) -> tuple[LimitView, ...]: ...

    async def set_limit(self, name: str, most: int) -> str:
        """Vote for a maximum of a limit. Returns the numbers of such votes given and needed, for people."""


class PeerApi(LocalPeerRpc, BlockRpc, MemberRpc, InvitationRpc, JobRpc, AuditRpc, ModelRpc, RowProofRpc, NetworkRpc, Protocol):
    """All calls that a peer answers, independent of its features."""
