"""What an operator should know: a pure function of what the peer says of itself; and since when each of it holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from features.peer_names import SHORT_ID_LENGTH
from protocol.api import AlertCause, AlertSeverity, AlertView, PeerState, StatusView

DISK_WARNING_BYTES = 4 << 30
DISK_CRITICAL_BYTES = 512 << 20  # a full disk ends the peer
EXPULSION_ALERT_HEIGHTS = 1_000  # for how long an expelled liar is told: the membership keeps it for ever
WORKER_START_SECONDS_MAX = 120.0  # until its first start is late: torch comes from a cold disk
# Links come and go: these causes are told when they have held for so long.
# A voter that is started again is away for a minute or less.
HOLD_MS = {AlertCause.NO_QUORUM: 3_000, AlertCause.NO_SPARE: 60_000, AlertCause.STALLED: 3_000, AlertCause.BEHIND: 10_000}
# As `StatusView.waiting` begins.
NO_QUORUM_PREFIXES = ("partition", "waiting for a quorum", "waiting for the voters", "waiting for a decision")
SEVERITY_ORDER = list(AlertSeverity)


@dataclass(frozen=True, slots=True)
class AlertInputs:
    status: StatusView
    worker: str  # as in `StatsView`
    free_bytes: int
    expelled: Mapping[str, int]  # peer id -> at which height
    suspended: Mapping[str, str]  # peer id -> in which job
    unheard: Collection[str] = ()  # peer ids of voters that this peer does not hear
    failed: Collection[str] = ()  # jobs and plans that failed, with reasons
    without_progress: Collection[str] = ()  # jobs that ended because nothing was accepted any more


def find_alerts(look: AlertInputs) -> Iterator[AlertView]:
    """Each cause once for whomever it is about; `since_ms` is not known here."""
    status = look.status
    if status.halted and status.state != PeerState.JOINING:
        yield AlertView(AlertCause.HALTED, "", AlertSeverity.CRITICAL, status.halted)
    if status.fork:
        yield AlertView(AlertCause.DISPUTED, "", AlertSeverity.CRITICAL, status.fork)
    if status.module_failure:
        yield AlertView(AlertCause.MODULE_FAILED, "", AlertSeverity.CRITICAL, status.module_failure)
    if status.waiting.startswith(NO_QUORUM_PREFIXES):
        yield AlertView(AlertCause.NO_QUORUM, "", AlertSeverity.CRITICAL, status.waiting)
    elif status.waiting:
        yield AlertView(AlertCause.STALLED, "", AlertSeverity.WARNING, status.waiting)
    elif look.unheard and status.voter and status.voters - len(look.unheard) == status.quorum:
        here = f"{status.quorum} of {status.voters} voters are here, as many as decide: if one more stops, nothing is decided"
        text = f"{here}; not heard: {', '.join(peer[:SHORT_ID_LENGTH] for peer in look.unheard)}"
        yield AlertView(AlertCause.NO_SPARE, "", AlertSeverity.WARNING, text)
    if status.state == PeerState.BEHIND:
        yield AlertView(
            AlertCause.BEHIND, "", AlertSeverity.WARNING, f"this peer is {status.heights_behind} heights behind the others"
        )
    if look.free_bytes < DISK_WARNING_BYTES:
        severity = AlertSeverity.CRITICAL if look.free_bytes < DISK_CRITICAL_BYTES else AlertSeverity.WARNING
        yield AlertView(AlertCause.DISK_LOW, "", severity, f"{look.free_bytes >> 20} MiB are free on the disk of this peer")
    if status.disk_shortage:
        yield AlertView(AlertCause.NO_ROOM, "", AlertSeverity.WARNING, status.disk_shortage)
    if look.worker.startswith("starting") and ("restarted" in look.worker or status.uptime_seconds > WORKER_START_SECONDS_MAX):
        yield AlertView(AlertCause.WORKER_GONE, "", AlertSeverity.WARNING, f"the worker of this peer is gone: {look.worker}")
    if look.failed:
        yield AlertView(AlertCause.TRAINING_FAILED, "", AlertSeverity.WARNING, "; ".join(look.failed))
    if look.without_progress:
        yield AlertView(AlertCause.NO_PROGRESS, "", AlertSeverity.WARNING, "; ".join(look.without_progress))
    yield from _liars(look)


def _liars(look: AlertInputs) -> Iterator[AlertView]:
    for peer, height in look.expelled.items():
        if peer != look.status.peer and look.status.height - height < EXPULSION_ALERT_HEIGHTS:
            text = f"expelled at height {height}: it signed two statements that exclude each other"
            yield AlertView(AlertCause.LIAR_FOUND, peer, AlertSeverity.INFO, text)
    for peer, job in look.suspended.items():
        if peer not in look.expelled:
            severity = AlertSeverity.WARNING if peer == look.status.peer else AlertSeverity.INFO
            yield AlertView(
                AlertCause.LIAR_FOUND, peer, severity, f"suspended in {job}: its updates were found false or withheld"
            )


class AlertTracker:
    """Since when each alert holds. One that has ended is forgotten: it is a new one when it comes again."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], int] = {}

    def update_alerts(self, found: Iterable[AlertView], now_ms: int) -> tuple[AlertView, ...]:
        """Those that have held for long enough, the gravest first."""
        alerts = {(alert.cause, alert.about): alert for alert in found}
        self._since = {key: self._since.get(key, now_ms) for key in alerts}
        dated = (replace(alert, since_ms=self._since[key]) for key, alert in alerts.items())
        held = (alert for alert in dated if now_ms - alert.since_ms >= HOLD_MS.get(AlertCause(alert.cause), 0))
        return tuple(sorted(held, key=lambda alert: (SEVERITY_ORDER.index(AlertSeverity(alert.severity)), alert.since_ms)))
