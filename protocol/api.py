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
)  # parts of the `bulk` traffic that are counted separately: all blobs, and the blobs that audits request


INVITATION_DAYS = 7  # default lifetime of an invitation in days
INVITATION_DAYS_MAX = 90  # maximum lifetime in days: later, nobody remembers for whom an invitation was made


@dataclass(frozen=True, slots=True)
class LinkMinute:
    """Measurements of one minute, over all links to a peer."""

    ago_seconds: float  # seconds since the end of the minute; 0: the current minute
    pings: int
    round_trip_ms: float | None  # mean of the pings; None: not measured, as in the next four fields
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
    round_trip_ms: float | None  # median of the last five pings
    bytes_sent: int
    bytes_received: int
    kind: str = "direct"  # kind of link: direct, relayed
    relay: str | None = None  # peer id of the relay of a relayed link
    mbit_per_second: float | None = None  # rate of transfers to this peer while the link was their bottleneck
    retransmitted: float | None = None  # share of retransmitted segments in the last hour; None: the kernel does not report it
    silent_seconds: float | None = None  # seconds since the peer's last message, if there are suspiciously many; otherwise None
    history: tuple[LinkMinute, ...] = ()  # measurements of the last hour, the oldest first, without minutes that have none


@dataclass(frozen=True, slots=True)
class PeerView:
    peer: str
    name: str
    roles: tuple[str, ...]
    member: bool
    voter: bool
    leader: bool  # whether this peer is the leader of the current view
    me: bool
    link: LinkView | None
    approvals: tuple[str, ...]  # peer ids of voters that approve this member as a voter
    membership: str  # accepted proposals, candidacy and retirement of this member, for people
    departed: str = ""  # why this key no longer takes part: its expulsion, or the key that replaced it; empty: it takes part


@dataclass(frozen=True, slots=True)
class DialView:
    """An address that this peer tries to dial and cannot reach."""

    address: str
    peer: str  # peer id that is expected at the address; empty: any
    reason: str
    attempts: int  # consecutive failed attempts
    next_attempt_seconds: float
    text: str  # all other fields in one line, for people


class PeerState(enum.StrEnum):
    """States of a peer, the most serious last. A peer reports the most serious state that applies."""

    WORKING = "working"
    SUSPENDED = "suspended"  # the peer votes, but does not train for some time
    BEHIND = "behind"
    WAITING = "waiting"  # the peer can decide nothing until another peer connects
    SILENT = "silent"  # the peer signs nothing until the network has passed all heights at which the peer may have signed before
    JOINING = "joining"
    HALTED = "halted"
    EXPELLED = "expelled"


@dataclass(frozen=True, slots=True)
class OptionalServiceView:
    """A service that the operator has turned on: UPnP or mDNS."""

    name: str  # name of the setting that turns the service on
    is_working: bool
    text: str  # state or failure of the service, for people


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
    height: int  # height of the last block that this peer has applied
    view: int
    state_root: str
    voter: bool
    voters: int
    tolerated: int  # f, the number of faulty voters that the voters tolerate
    quorum: int  # number of votes that a decision needs
    links: int
    halted: str  # why this peer signs nothing, for ever or for some time; empty: it signs
    uptime_seconds: float
    waiting: str = ""  # peers without which no decision is possible and which are not connected; empty: none
    suspended: str = ""  # end and reason of this trainer's suspension; empty: it may train
    unaudited: tuple[str, ...] = ()  # names of running jobs without re-execution of updates
    fork: str = ""  # two certified blocks of one height, for people; empty: none. The peer continues
    module_failure: str = ""  # last failure of a module since the start, which is a bug; empty: none. The peer continues
    state: str = "working"  # a value of `PeerState`
    decided_seconds_ago: float | None = None  # seconds since this peer last decided a block; None: it has decided none
    unreached_addresses: tuple[DialView, ...] = ()  # addresses that this peer cannot reach
    heights_behind: int | None = 0  # number of decided heights that this peer has not applied; None: no peer is connected
    straggling: str = ""  # why this trainer's updates arrive late, and the remedy; empty: they arrive in time
    # Running jobs in which this peer is asked last or never to re-execute, with end and reason; empty: none.
    reexecution_limits: str = ""
    disk_shortage: str = ""  # jobs whose data do not fit on this peer's disk, and the consequence; empty: all fit
    parameters_max: int = 0  # maximum number of parameters that the network allows for a job's model
    reachability: str = "unknown"  # direct: other peers can dial this peer; relayed: they cannot; unknown: too few have tried
    listen_addresses: tuple[str, ...] = ()  # addresses on which this peer accepts connections, with the actual ports
    announced_addresses: tuple[str, ...] = ()  # addresses that this peer announces to other peers
    optional_services: tuple[OptionalServiceView, ...] = ()  # states of UPnP and mDNS, if they are turned on


@dataclass(frozen=True, slots=True)
class StatsView:
    status: StatusView
    decisions: int
    decision_ms_p50: float | None
    decision_ms_p99: float | None
    seconds_to_first_decision: float | None
    bytes_sent: dict[str, int]  # kind of traffic -> bytes; the kinds are vote, control, bulk, and `BULK_TRAFFIC_KINDS`
    bytes_received: dict[str, int]
    refused: dict[str, int]  # reason -> number of refused messages and connections, see `protocol.refusal_reasons`
    evidence: tuple[str, ...]
    transactions_pending: int
    worker: str  # state of the worker process; empty: no worker runs
    memory_mb: float  # memory (PSS) of the daemon and all processes of its worker
    expelled: tuple[str, ...] = ()  # peer ids of expelled members
    audit_record: AuditRecordView | None = None  # audit record of this peer; None: it took part in no sampled audit


class AlertSeverity(enum.StrEnum):
    """Severities of alerts, the most serious first."""

    CRITICAL = "critical"  # the network decides nothing, or this peer takes no part
    WARNING = "warning"  # the problem will grow unless a person solves it
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
    """A problem that the operator should know. One alert exists for each cause and subject, as long as the problem lasts."""

    cause: str  # a value of `AlertCause`
    about: str  # peer id of the subject; empty: this peer, or the network
    severity: str  # a value of `AlertSeverity`
    text: str
    since_ms: int = 0  # time at which this peer first noticed the problem


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
    state: str  # state of the job: waiting (queued), running, paused, settling, finished
    round: int  # number of the open round, which also counts undone rounds
    rounds: int
    model_root: str
    audit: str
    data: str  # hash of the training text, or "local"; empty: the job trains on no text
    accepted: dict[str, int]  # trainer -> number of accepted proposals
    rejected: dict[str, dict[str, int]]  # trainer -> reason -> number of rejected proposals
    started_height: int
    suspended_until: dict[str, int] = field(default_factory=dict)  # trainer -> first round in which it may train again
    audits_open: int = 0  # number of reports that are awaited, and of open disputes
    queue_position: int = 0  # position in the queue, from 1; 0: the job is not queued
    data_origin: str = ""  # origin of data that people may have labeled; empty: none
    precision: str = "fp32"  # number format of matrix products; audits of bf16 compare single gradients
    parameters: int = 0  # number of parameters of the job's model
    disk_bytes: int = 0  # maximum bytes on this peer's disk, without the training text; 0: the job is over
    # Number of voters that have the queued job's initial parameters, and number that the job needs to start.
    initial_model_holders: str = ""
    notes: tuple[str, ...] = ()  # statistics of the file from which the job's data set was made, for people
    # Voter that is asked last or never to re-execute -> end and reason.
    reexecution_limits: dict[str, str] = field(default_factory=dict)
    machine_time: str = ""  # time that one machine needs for local steps and for re-execution, for people
    rounds_in_model: int = 0  # number of rounds in the model
    final_round: int = 0  # round that began with the job's newest final model
    anchors: tuple[int, ...] = ()  # models to which a rollback may return, given by the first round on each
    undone_rounds: tuple[str, ...] = ()  # rounds that rollbacks have undone, with reasons, for people


@dataclass(frozen=True, slots=True)
class RoundView:
    """One closed round."""

    job: str
    round: int
    height: int
    verdicts: dict[str, str]  # trainer -> "accept", a reason, or "absent"
    ballots: tuple[str, ...]  # voters whose ballots are in the round certificate
    stepped: bool
    plain_mean: bool  # True: the aggregate is the mean, which only re-execution protects against false updates
    model_root: str  # model root after the round
    held_out_bits_per_byte: float | None  # loss on held-out text as measured by this peer; None: it does not measure
    training_nats: float | None  # this peer's own training loss per token; None: the objective has no such loss
    # Seconds since the round opened at this peer; None, as in the next field: this peer only replayed the round.
    seconds: float | None
    decision_ms: float | None  # ms from the arrival of the closing block at this peer to the block's certificate
    training_loss: float | None = None  # this peer's own training loss in the objective's unit, if this is not nats per token
    # Accepted trainer -> voters that vouch for its update in the block. Empty: no re-execution before the ballots.
    vouchers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    undone: bool = False  # True: a rollback has undone the round's step


@dataclass(frozen=True, slots=True)
class RoundVotesView:
    """The votes of one open or closed round. Peers are given by their ids."""

    job: str
    round: int
    phase: str  # phase of the round: training, voting, closing, closed
    height: int | None  # height of the block that closed the round; None: the round is open
    quorum: int  # number of ballots that close the round; 0: the round is closed
    voters: tuple[str, ...]  # voters of the round; empty, as in the next field: the round is closed
    trainers: tuple[str, ...]  # trainers whose proposals are awaited
    proposed: tuple[str, ...]
    votes: dict[str, dict[str, str]]  # voter -> trainer -> verdict of its ballot: "accept" or a reason
    seconds: float | None = None  # seconds since the round opened at this peer; None: the round is closed
    # Re-executor -> trainer -> verdict of its vouch, as in `votes`. "unjudged": the re-executor is unsure.
    vouches: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AuditRecordView:
    """A member's results in the sampled audits of all jobs."""

    peer: str
    rewards: int  # accepted proposals whose audit window ended without a conviction
    rewards_lost: int  # rewards lost by suspensions, and by losses that the trainer did not open
    suspensions: int
    reports: int  # reports on proposals for which the member was drawn
    reports_lapsed: int  # proposals for which the member was drawn, but did not report in time
    challenges_upheld: int  # challenges of the member that led to a suspension
    challenges_refuted: int  # challenges of the member that were found false
    wrong_losses: int = 0  # reports of the member with another loss than the trainer opened


@dataclass(frozen=True, slots=True)
class AuditView:
    """One decided result of a sampled audit."""

    height: int
    job: str
    round: int
    trainer: str  # peer id of the audited trainer; the next field has that of the auditor
    auditor: str
    result: str  # result: passed, challenged, lapsed, suspended, refuted, shunned, dropped, wrong-loss, lazy
    finding: str  # finding of the auditor; empty: it has not reported
    relative_error: float | None


@dataclass(frozen=True, slots=True)
class SuspensionView:
    """The cause of a suspension in a running job. The log of results may have dropped it."""

    until: int  # first round in which the suspended trainer may train again
    cause: AuditView


@dataclass(frozen=True, slots=True)
class AuditsView:
    records: tuple[AuditRecordView, ...]
    results: tuple[AuditView, ...]  # the oldest first
    suspensions: tuple[SuspensionView, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockView:
    """A decided block without its body, with the proof of its decision.

    docs/protocol/blocks.md describes how to verify the proof.
    """

    height: int
    digest: str
    time_ms: int
    proposer: str  # peer id of the voter that made the block
    view: int  # view in which the block was decided
    signers: tuple[str, ...]  # peer ids of the voters whose commits are in the certificate
    voters_count: int
    quorum: int
    certified_root: str  # state root after the previous height, which the signers of this block certify
    own_root: str  # state root after the previous height as this peer computed it; empty: no longer stored
    body_bytes: int
    header: str  # hex of the bytes that are hashed and signed; the next two fields are hex, too
    certificate: str
    voters: str


NEWEST: Final = "@newest"  # suffix of a job's name that selects its newest model, even if audits may still undo it


@dataclass(frozen=True, slots=True)
class TextPieceView:
    """A piece of generated text. The next piece follows without a space."""

    text: str
    is_withheld: bool = False  # True: the text may not be displayed, because it has a word on the job's blocklist
    # In the first piece, True: the whole text is compared with a blocklist before any of it is displayed.
    is_checked: bool = False
    newer_round: int = 0  # in the first piece: number of rounds of the newest model, if audits may still undo it; otherwise 0
    round: int = 0  # if `newer_round` is set: number of rounds of the model that generates the text


@dataclass(frozen=True, slots=True)
class SampleView:
    """Text that this peer generated with a model during training."""

    job: str
    round: int  # first round that starts with this model
    text: str


@dataclass(frozen=True, slots=True)
class EventView:
    """One event at a peer. With its number, a reader can request all later events."""

    number: int
    at_ms: int
    kind: str  # kind of event: decided, round, ballot, proposal, peer, evidence, job, member, test, warning
    text: str
    fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class TrainRequest:
    """A request to start a job. Empty or zero values mean the default of `training.job_spec.JobSpec`."""

    name: str
    data: str  # path on the peer's machine; empty: the built-in text; "local": each trainer's own data
    rounds: int
    vocabulary: int  # size of the vocabulary; above 256, a byte-level BPE of this size is trained on the text
    overrides: dict[str, str]  # field of the specification -> value, as a person typed it
    initial_model: str = ""  # finished job from whose model the job starts, as a name or the start of an id; empty: none
    examples: str = ""  # path on the peer's machine of a JSONL file with prompts and responses to learn; empty: none
    # Path on the peer's machine, used if `initial_model` names no job: a folder with a model. Empty: `initial_model` must be a
    # job.
    model_folder: str = ""
    # True: start the job even if no measurement shows that its sampled audits find faulty trainers in time.
    accept_risk: bool = False
    skip_bad: bool = False  # True: leave out lines of `examples` that cannot be learned
    truncate: str = ""  # left, right: the end of a text in `examples` that is cut off to fit the context length; empty: none
    column: str = ""  # field or column of `data` that contains the text; empty: `text`


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
    round: int  # number of rounds applied to the exported model
    model_root: str
    format: str
    files: int
    bytes: int
    omitted_tensors: tuple[str, ...]  # tensors of the model that the format cannot contain
    # Number of rounds applied to the newest model, if audits may still undo it and no round was named. 0: otherwise.
    newer_round: int = 0


@dataclass(frozen=True, slots=True)
class RowProofView:
    """A file that proves a row of a table, or the absence of a row."""

    path: str
    height: int  # height whose state contains the row, and whose state root the next block certifies
    has_row: bool
    bytes: int
    row_bytes: int  # bytes of the part of the proof from the table's root to the row


@dataclass(frozen=True, slots=True)
class InvitationView:
    """An invitation that this peer made."""

    token: str  # public key that names the invitation, and whose start suffices to revoke it; it admits no member
    state: str  # state: open, used, revoked, expired, or the reason why the invitation has no effect
    made_ms: int
    expires_ms: int  # expiry by the network's clock, which is the time of the last block
    addresses: tuple[str, ...]


# Each call of a peer's API is declared only here, with its name, the types of its arguments and result, and a description.
# `features/rpc.py` derives the client, the server and the decoders from the declarations. Every call may raise `UserError`,
# whose text is for the person who asked.


@dataclass(frozen=True, slots=True)
class ModuleView:
    """A module of the ledger, with the version that the network runs and the versions that this program has."""

    module: str
    feature: str  # feature that contains the module; empty: this program does not have the module
    about: str
    active_version: int  # version that the network runs; 0: the network does not have the module
    known_versions: tuple[int, ...]
    due_version: int  # version of a decided upgrade; 0: no upgrade is decided
    due_height: int
    wishes: tuple[str, ...]  # votes for upgrades that are not decided, for people


@dataclass(frozen=True, slots=True)
class LimitView:
    """A limit that the network's voters can set."""

    name: str
    maximum: int
    wishes: tuple[str, ...]  # votes for other values of the limit, for people
    meaning: str = ""  # meaning of the limit with its present value, for people: a sentence without a point


@dataclass(frozen=True, slots=True)
class DeviceView:
    """A device on which the worker can compute. MB are 10^6 bytes."""

    device: str  # a value of the setting `device`
    about: str
    memory_mb: int
    free_mb: int | None  # free memory; None: not known, because the worker does not use this GPU
    held_mb: int  # memory that this peer's worker uses
    in_use: bool


@dataclass(frozen=True, slots=True)
class EngineView:
    """A computing engine that this program knows."""

    engine: str  # a value of the setting `engine`
    in_use: bool
    state: str  # state of the worker with this engine; empty: there is no such worker
    threads: int = 0
    versions: dict[str, str] = field(default_factory=dict)  # by library; of an engine without a worker, of its package only
    devices: tuple[DeviceView, ...] = ()
    compiler: str = ""  # path of the compiler that the engine needs; empty: none was found, or none is needed
    missing: str = ""  # what this machine lacks for the engine, and the remedy; empty: nothing


# Observing voter -> observed voter -> seconds without a message. None: the observer never heard it, or has sent no report.
LivenessMatrix = dict[str, dict[str, float | None]]


class LocalPeerRpc(Protocol):
    async def status(self) -> StatusView: ...

    async def stats(self) -> StatsView: ...

    async def events(self, after: int, wait_seconds: float) -> tuple[EventView, ...]:
        """Return the events with numbers above `after`; negative: the last events.

        If there is none yet, the call waits up to `wait_seconds` for the first one.
        """

    async def alerts(self) -> tuple[AlertView, ...]:
        """Return the current alerts, the most serious first."""

    async def disk_usage(self) -> DiskView: ...

    async def engines(self) -> tuple[EngineView, ...]:
        """Return the engines of this peer. While the worker is busy, its last report is used."""

    async def stop_peer(self) -> None: ...


class BlockRpc(Protocol):
    async def block(self, height: int) -> BlockView:
        """Return a decided block with its certificate. Height 0 means the last one."""


class MemberRpc(Protocol):
    async def peers(self) -> tuple[PeerView, ...]: ...

    async def approve_voter(self, peer: str) -> str:
        """Approve a member as a voter, by its name or id. Returns a text with the numbers of approvals given and needed."""

    async def retire_member(self, peer: str, lower_tolerance: bool) -> str:
        """Vote to retire an absent member. Returns a text with the numbers of votes given and needed."""

    async def resign_as_voter(self) -> str: ...


class InvitationRpc(Protocol):
    async def create_invitation(self, days: int, addresses: tuple[str, ...] = ()) -> str:
        """Make an invitation with these addresses. Empty: with the addresses at which this peer is probably reachable."""

    async def invitations(self) -> tuple[InvitationView, ...]:
        """Return the invitations that this peer made, the oldest first."""

    async def revoke_invitation(self, token: str) -> str:
        """Submit a transaction that revokes an invitation of this peer."""

    async def dial_address(self, address: str) -> str:
        """Dial an address at once. Returns a text about the peer that answered."""


class JobRpc(Protocol):
    async def jobs(self) -> tuple[JobView, ...]: ...

    async def rounds(self, last: int) -> tuple[RoundView, ...]: ...

    async def votes(self, last: int) -> tuple[RoundVotesView, ...]:
        """Return the votes of the `last` newest closed rounds, the oldest first, and of all open rounds."""

    async def start_job(self, request: TrainRequest) -> str:
        """Submit a job. Returns the job's id after a block has decided the transaction."""

    async def run_test_round(self) -> str:
        """Start a test round on the live network. Returns the job's id. `events` returns the phases of the test."""

    async def cancel_job(self, job: str) -> str:
        """Request the end of a job, given by its id or the start of its id.

        The author alone, or a quorum of voters, can end it.
        """

    async def request_rollback(self, job: str, round: int) -> str:
        """Vote to roll back a job to the anchor JOB@round. This peer must be a voter.

        The job returns to the anchor when a quorum of voters has requested it. If `round` is the open round, the call withdraws
        this peer's request instead.
        """


class AuditRpc(Protocol):
    async def audits(self, last: int) -> AuditsView:
        """Return the `last` newest results of sampled audits, the audit records of all members, and the current suspensions."""

    async def challenge_trainer(self, trainer: str, round: int | None) -> str:
        """Re-execute the accepted proposals of a round on this peer, and return the finding for this trainer, for people.

        If `round` is None, the newest round that can be re-executed is used.
        """


class ModelRpc(Protocol):
    def sample_text(
        self, prompt: str, how: SamplingOptions, job: str = "", turns: tuple[str, ...] | None = None
    ) -> AsyncGenerator[TextPieceView, None]:
        """Yield pieces of a text that continues the prompt. The model is that of JOB[@ROUND], or of the last started job.

        `turns` are the prompts and answers of a chat, the oldest first. The last ones that fit the model's context stand before
        the prompt. In a chat, a line break ends the text of a model that has not learned an end.
        """

    async def saved_samples(self) -> tuple[SampleView, ...]:
        """Return the texts that this peer generated during training, the oldest first. Empty: this peer generates none."""

    async def export_run(self, path: str) -> RunExportView: ...

    async def export_model(self, path: str, job: str, format: str) -> ModelFilesView:
        """Write a model into a new folder. `job` is JOB, JOB@ROUND, or empty for the newest model of text."""


class RowProofRpc(Protocol):
    async def prove_row(self, table: str, key: bytes, path: str) -> RowProofView:
        """Write a proof that a key has a row or none, at the newest height that a block certifies."""


class NetworkRpc(Protocol):
    async def voter_liveness(self) -> LivenessMatrix:
        """Return observer -> voter -> seconds since the observer last heard the voter, by peer ids. None: not known."""

    async def modules(self) -> tuple[ModuleView, ...]:
        """Return all modules that this program has or the network runs, in the order in which they act in a block."""

    async def request_upgrade(self, module: str, version: int, height: int) -> str:
        """Vote for an upgrade of a module to a version, which acts from a height on. Height 0: as early as the notice allows."""

    async def limits(self) -> tuple[LimitView, ...]: ...

    async def set_limit(self, name: str, most: int) -> str:
        """Vote for another value of a limit. Returns a text with the numbers of votes given and needed."""


class PeerApi(LocalPeerRpc, BlockRpc, MemberRpc, InvitationRpc, JobRpc, AuditRpc, ModelRpc, RowProofRpc, NetworkRpc, Protocol):
    """All calls of a peer's API that do not belong to a feature."""
