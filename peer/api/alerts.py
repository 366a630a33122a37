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
    status, unheard = look.status, look.unheard
    has_no_quorum = status.waiting.startswith(NO_QUORUM_PREFIXES)
    has_no_spare = not status.waiting and unheard and status.voter and status.voters - len(unheard) == status.quorum
    here = f"{status.quorum} of {status.voters} voters are here, as many as decide: if one more stops, nothing is decided"
    is_disk_low, is_disk_full = (look.free_bytes < bound for bound in (DISK_WARNING_BYTES, DISK_CRITICAL_BYTES))
    is_worker_late = "restarted" in look.worker or status.uptime_seconds > WORKER_START_SECONDS_MAX
    critical, warning = AlertSeverity.CRITICAL, AlertSeverity.WARNING
    rows = (
        (status.halted and status.state != PeerState.JOINING, AlertCause.HALTED, critical, status.halted),
        (status.fork, AlertCause.DISPUTED, critical, status.fork),
        (status.module_failure, AlertCause.MODULE_FAILED, critical, status.module_failure),
        (has_no_quorum, AlertCause.NO_QUORUM, critical, status.waiting),
        (status.waiting and not has_no_quorum, AlertCause.STALLED, warning, status.waiting),
        (
            has_no_spare,
            AlertCause.NO_SPARE,
            warning,
            f"{here}; not heard: {', '.join(peer[:SHORT_ID_LENGTH] for peer in unheard)}",
        ),
        (
            status.state == PeerState.BEHIND,
            AlertCause.BEHIND,
            warning,
            f"this peer is {status.heights_behind} heights behind the others",
        ),
        (
            is_disk_low,
            AlertCause.DISK_LOW,
            critical if is_disk_full else warning,
            f"{look.free_bytes >> 20} MiB are free on the disk of this peer",
        ),
        (status.disk_shortage, AlertCause.NO_ROOM, warning, status.disk_shortage),
        (
            look.worker.startswith("starting") and is_worker_late,
            AlertCause.WORKER_GONE,
            warning,
            f"the worker of this peer is gone: {look.worker}",
        ),
        (look.failed, AlertCause.TRAINING_FAILED, warning, "; ".join(look.failed)),
        (look.without_progress, AlertCause.NO_PROGRESS, warning, "; ".join(look.without_progress)),
    )
    yield from (AlertView(cause, "", severity, text) for holds, cause, severity, text in rows if holds)
    for peer, height in look.expelled.items():
        if peer != look.status.peer and look.status.height - height < EXPULSION_ALERT_HEIGHTS:
            yield AlertView(
                AlertCause.LIAR_FOUND,
                peer,
                AlertSeverity.INFO,
                f"expelled at height {height}: it signed two statements that exclude each other",
            )
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
