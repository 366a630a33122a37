"""Alerts for the operator: a pure function of the peer's own views finds the alerts, and a tracker stores their start times."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from features.peer_names import SHORT_ID_LENGTH
from protocol.api import AlertCause, AlertSeverity, AlertView, PeerState, StatusView

DISK_WARNING_BYTES = 4 << 30
DISK_CRITICAL_BYTES = 512 << 20  # free bytes below which the alert about the disk is critical: a full disk ends the peer
EXPULSION_ALERT_HEIGHTS = 1_000  # blocks for which an expulsion raises an alert; the member table keeps it forever
WORKER_START_SECONDS_MAX = 120.0  # longest normal start of the worker: the first start reads torch from a cold disk
# Alert cause -> milliseconds that the cause must last before its alert: links break often, and a voter restarts within a minute.
HOLD_MS = {AlertCause.NO_QUORUM: 3_000, AlertCause.NO_SPARE: 60_000, AlertCause.STALLED: 3_000, AlertCause.BEHIND: 10_000}
# Prefixes of the text `StatusView.waiting` that mean a missing quorum.
NO_QUORUM_PREFIXES = ("partition", "waiting for a quorum", "waiting for the voters", "waiting for a decision")
SEVERITY_ORDER = list(AlertSeverity)
CRITICAL, WARNING, INFO = AlertSeverity.CRITICAL, AlertSeverity.WARNING, AlertSeverity.INFO
READ_LOG: Final = "read the lines before it in `peer log`"


@dataclass(frozen=True, slots=True)
class AlertKind:
    """Texts and severities of the alerts of one cause."""

    meaning: str  # one sentence that explains the alert
    severities: tuple[AlertSeverity, ...]  # possible severities of the alert, the usual one first
    remedy: str


ALERT_KINDS: Final = {
    AlertCause.HALTED: AlertKind(
        "This peer signs nothing: its key is expelled or used elsewhere, or its disk, state or version is not up to date.",
        (CRITICAL,),
        f"see docs/how-to/when-something-is-wrong.md for this text; {READ_LOG}",
    ),
    AlertCause.DISPUTED: AlertKind(
        "Two blocks of one height are certified: more voters are faulty than the network tolerates.",
        (CRITICAL,),
        "keep the data directory unchanged, and compare the blocks of that height with the other operators",
    ),
    AlertCause.MODULE_FAILED: AlertKind(
        "The program has a bug, and a module of the ledger skipped a step. The alert lasts until the peer is restarted.",
        (CRITICAL,),
        "report the line, install the release that fixes it, and restart the peer",
    ),
    AlertCause.NO_QUORUM: AlertKind(
        "Too few voters are connected, or no block was decided for 30 seconds although work waits.",
        (CRITICAL,),
        "find the missing voters with `peer peers` and `peer reach`, and ask their operators to start them",
    ),
    AlertCause.NO_SPARE: AlertKind(
        "For a minute, the connected voters have been just a quorum: if one more stops, nothing is decided.",
        (WARNING,),
        "ask the operators of the missing voters to start them; retire a voter that is gone for good with `peer retire`",
    ),
    AlertCause.DISK_LOW: AlertKind(
        "The disk has less than 4 GiB free, or less than 512 MiB (critical). A full disk ends the peer.",
        (WARNING, CRITICAL),
        "free some disk space",
    ),
    AlertCause.STALLED: AlertKind(
        "A round has waited 30 seconds for ballots or for a trainer.",
        (WARNING,),
        f"find missing peers with `peer peers`; {READ_LOG}",
    ),
    AlertCause.BEHIND: AlertKind(
        "This peer applies blocks later than the other voters.",
        (WARNING,),
        "wait until it has caught up; if it does not, use a faster disk, processor or link",
    ),
    AlertCause.NO_ROOM: AlertKind(
        "A job may need more disk space than is free.",
        (WARNING,),
        "free some disk space; until then this peer may not train the job",
    ),
    AlertCause.WORKER_GONE: AlertKind(
        "The worker has not started within two minutes, or has crashed and not restarted yet.",
        (WARNING,),
        f"check memory, torch and the setting `device`; {READ_LOG}",
    ),
    AlertCause.TRAINING_FAILED: AlertKind(
        "A job ended without any accepted update, or a plan failed because its reward model is too inaccurate. "
        "The alert lasts 1,000 heights.",
        (WARNING,),
        "read the verdicts with `peer rounds`, and the reason of a plan with `peer rlhf status`",
    ),
    AlertCause.NO_PROGRESS: AlertKind(
        "A job ended because its last eight rounds accepted no update. The alert lasts 1,000 heights.",
        (WARNING,),
        "read the verdicts with `peer rounds`; if they are `diverging`, start the job again with a lower learning rate",
    ),
    AlertCause.LIAR_FOUND: AlertKind(
        "A member was expelled in the last 1,000 heights, or is suspended in a job. The suspension of this peer is a warning.",
        (INFO, WARNING),
        "read the accusation with `peer audits`",
    ),
}


@dataclass(frozen=True, slots=True)
class AlertInputs:
    status: StatusView
    worker: str  # state of the worker, as in `StatsView`
    free_bytes: int
    expelled: Mapping[str, int]  # id of an expelled peer -> height of the expulsion
    suspended: Mapping[str, str]  # id of a suspended trainer -> name of the job
    unheard: Collection[str] = ()  # peer ids of silent voters
    failed: Collection[str] = ()  # texts that name a failed job or plan with its reason
    without_progress: Collection[str] = ()  # names of jobs that ended because no update was accepted


def find_alerts(look: AlertInputs) -> Iterator[AlertView]:
    """Yield the current alerts, one for each cause and peer. Their `since_ms` is not set yet."""
    status, unheard = look.status, look.unheard
    has_no_quorum = status.waiting.startswith(NO_QUORUM_PREFIXES)
    has_no_spare = not status.waiting and unheard and status.voter and status.voters - len(unheard) == status.quorum
    here, missing = f"{status.quorum} of {status.voters} voters", ", ".join(peer[:SHORT_ID_LENGTH] for peer in unheard)
    is_worker_late = "restarted" in look.worker or status.uptime_seconds > WORKER_START_SECONDS_MAX
    rows = (
        (status.halted and status.state != PeerState.JOINING, AlertCause.HALTED, status.halted),
        (status.fork, AlertCause.DISPUTED, status.fork),
        (status.module_failure, AlertCause.MODULE_FAILED, status.module_failure),
        (has_no_quorum, AlertCause.NO_QUORUM, status.waiting),
        (status.waiting and not has_no_quorum, AlertCause.STALLED, status.waiting),
        (
            has_no_spare,
            AlertCause.NO_SPARE,
            f"only {here} are connected: no block is decided if one more stops; missing: {missing}",
        ),
        (
            status.state == PeerState.BEHIND,
            AlertCause.BEHIND,
            f"this peer is {status.heights_behind} heights behind the other voters",
        ),
        (
            look.free_bytes < DISK_WARNING_BYTES,
            AlertCause.DISK_LOW,
            f"only {look.free_bytes >> 20} MiB are free on the disk of this peer",
        ),
        (status.disk_shortage, AlertCause.NO_ROOM, status.disk_shortage),
        (
            look.worker.startswith("starting") and is_worker_late,
            AlertCause.WORKER_GONE,
            f"the worker does not run: {look.worker}",
        ),
        (look.failed, AlertCause.TRAINING_FAILED, "; ".join(look.failed)),
        (look.without_progress, AlertCause.NO_PROGRESS, "; ".join(look.without_progress)),
    )
    for holds, cause, text in rows:
        if holds:
            is_disk_full = cause == AlertCause.DISK_LOW and look.free_bytes < DISK_CRITICAL_BYTES
            yield AlertView(cause, "", CRITICAL if is_disk_full else ALERT_KINDS[cause].severities[0], text)
    for peer, height in look.expelled.items():
        if peer != status.peer and status.height - height < EXPULSION_ALERT_HEIGHTS:
            text = f"expelled at height {height}: it signed two statements that exclude each other"
            yield AlertView(AlertCause.LIAR_FOUND, peer, INFO, text)
    for peer, job in look.suspended.items():
        if peer not in look.expelled:
            text = f"suspended in {job}: its updates were false, or it withheld its buffers"
            yield AlertView(AlertCause.LIAR_FOUND, peer, WARNING if peer == status.peer else INFO, text)


class AlertTracker:
    """A tracker of the current alerts' start times. An alert that ends and begins again counts as new."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], int] = {}

    def update_alerts(self, found: Iterable[AlertView], now_ms: int) -> tuple[AlertView, ...]:
        """Return the alerts that have lasted for the time in `HOLD_MS`, most severe first."""
        alerts = {(alert.cause, alert.about): alert for alert in found}
        self._since = {key: self._since.get(key, now_ms) for key in alerts}
        dated = (replace(alert, since_ms=self._since[key]) for key, alert in alerts.items())
        held = (alert for alert in dated if now_ms - alert.since_ms >= HOLD_MS.get(AlertCause(alert.cause), 0))
        return tuple(sorted(held, key=lambda alert: (SEVERITY_ORDER.index(AlertSeverity(alert.severity)), alert.since_ms)))
