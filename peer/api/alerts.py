"""Alerts for the operator: a pure function of the peer's own views, and a tracker of their start times."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from features.peer_names import SHORT_ID_LENGTH
from protocol.api import AlertCause, AlertSeverity, AlertView, PeerState, StatusView

DISK_WARNING_BYTES = 4 << 30
DISK_CRITICAL_BYTES = 512 << 20  # a full disk ends the peer
EXPULSION_ALERT_HEIGHTS = 1_000  # an expulsion is shown this long; the member table keeps it forever
WORKER_START_SECONDS_MAX = 120.0  # a first start may take as long: torch is read from a cold disk
# Links come and go, so these causes are shown only after this time. A voter that restarts is away for a minute or less.
HOLD_MS = {AlertCause.NO_QUORUM: 3_000, AlertCause.NO_SPARE: 60_000, AlertCause.STALLED: 3_000, AlertCause.BEHIND: 10_000}
# Prefixes of `StatusView.waiting` that mean a missing quorum.
NO_QUORUM_PREFIXES = ("partition", "waiting for a quorum", "waiting for the voters", "waiting for a decision")
SEVERITY_ORDER = list(AlertSeverity)


@dataclass(frozen=True, slots=True)
class AlertInputs:
    status: StatusView
    worker: str  # as in `StatsView`
    free_bytes: int
    expelled: Mapping[str, int]  # peer id -> height of the expulsion
    suspended: Mapping[str, str]  # peer id -> name of the job
    unheard: Collection[str] = ()  # peer ids of silent voters
    failed: Collection[str] = ()  # jobs and plans that failed, with reasons
    without_progress: Collection[str] = ()  # jobs that ended because no update was accepted


def find_alerts(look: AlertInputs) -> Iterator[AlertView]:
    """Yield each alert once for each cause and peer, without its `since_ms`."""
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
    """Start times of the current alerts. An alert that ends and comes again counts as new."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], int] = {}

    def update_alerts(self, found: Iterable[AlertView], now_ms: int) -> tuple[AlertView, ...]:
        """Return the alerts that have lasted for the time in `HOLD_MS`, most severe first."""
        alerts = {(alert.cause, alert.about): alert for alert in found}
        self._since = {key: self._since.get(key, now_ms) for key in alerts}
        dated = (replace(alert, since_ms=self._since[key]) for key, alert in alerts.items())
        held = (alert for alert in dated if now_ms - alert.since_ms >= HOLD_MS.get(AlertCause(alert.cause), 0))
        return tuple(sorted(held, key=lambda alert: (SEVERITY_ORDER.index(AlertSeverity(alert.severity)), alert.since_ms)))
