"""What a peer says of itself, as tables for people."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime

from rich import box
from rich.markup import escape
from rich.table import Table

from protocol.api import (
    AuditView,
    EventView,
    InvitationView,
    JobView,
    PeerView,
    RoundView,
    StandingView,
    StatsView,
    StatusView,
    SuspensionView,
)

SHORT = 8  # characters of an id or root that people see
NOT_JUDGED = ("absent", "unjudged")  # says nothing against the trainer's work


def short(text: str) -> str:
    return text[:SHORT]


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _pairs(rows: Mapping[str, object]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows.items():
        table.add_row(name, escape(str(value)))
    return table


def _optional(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms"


def seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _megabytes(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {amount / 1e6:.2f} MB" for kind, amount in amounts.items()) or "nothing"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "none"


def status(view: StatusView) -> Table:
    return _pairs(
        {
            "peer id": view.peer,
            "name": view.name or "–",
            "network": f"{view.network} (chain {short(view.chain_id)})",
            "role": view.role + (", votes" if view.voter else ", does not vote"),
            "state": _state(view),
            "height": f"{view.height}, view {view.view}",
            "decided": _decided(view),
            "state root": view.state_root,
            "unaudited": _unaudited(view),
            "voters": f"{view.voters}; {view.quorum} decide, {view.tolerated} may lie",
            "links": view.links,
            "address": view.address,
            "data": view.data_directory,
            "process": f"{view.process}, up {_duration(view.uptime_seconds)}, version {view.version}",
        }
    )


def _state(view: StatusView) -> str:
    behind = f"behind by {view.behind} heights" if view.state == "behind" else ""
    work = view.halted or view.waiting or behind or view.suspended or view.state
    return f"{work}; {view.disputed}" if view.disputed else work


def _decided(view: StatusView) -> str:
    ago = "nothing yet" if view.decided_seconds_ago is None else f"{_duration(view.decided_seconds_ago)} ago"
    behind = "no voter is here to say how far the others are" if view.behind is None else f"behind by {view.behind} heights"
    return ago if view.behind == 0 else f"{ago}; {behind}"


def _unaudited(view: StatusView) -> str:
    what = "nobody re-executes the updates; votes check their form and norm only"
    return f"{', '.join(view.unaudited)}: {what}" if view.unaudited else "none of the running jobs"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def stats(view: StatsView) -> Table:
    return _pairs(
        {
            "height": f"{view.status.height}, view {view.status.view}",
            "state root": view.status.state_root,
            "decisions": view.decisions,
            "decision time": f"p50 {_optional(view.decision_ms_p50, '.0f')} ms, p99 {_optional(view.decision_ms_p99, '.0f')} ms",
            "first decision": f"{_optional(view.seconds_to_first_decision, '.1f')} s after start",
            "sent": _megabytes(view.bytes_sent),
            "received": _megabytes(view.bytes_received),
            "refused": _counts(view.refused),
            "evidence": "; ".join(view.evidence) or "none",
            "expelled": "; ".join(view.expelled) or "nobody",
            "audits": _standing(view.standing) if view.standing else "none of this peer, and none by it",
            "unaudited": _unaudited(view.status),
            "pending": f"{view.transactions_pending} transactions",
            "worker": view.worker or "none",
            "memory": f"{view.memory_mb:.0f} MB",
            "state": _state(view.status),
        }
    )


def _standing(view: StandingView) -> str:
    trained = f"{view.rewards} rewards, {view.lost} lost, {view.suspensions} suspensions"
    audited = f"{view.reports} reports, {view.lapsed} lapsed, {view.upheld} challenges upheld, {view.refuted} refuted"
    return f"{trained}; {audited}"


def standings(views: Iterable[StandingView]) -> Table:
    table = _table("peer", "rewards", "lost", "suspensions", "reports", "lapsed", "upheld", "refuted")
    for view in views:
        counts = (view.rewards, view.lost, view.suspensions, view.reports, view.lapsed, view.upheld, view.refuted)
        table.add_row(short(view.peer), *map(str, counts))
    return table


def audits(views: Iterable[AuditView]) -> Table:
    table = _table("round", "height", "trainer", "step", "auditor", "result", "finding", "relative error")
    for view in views:
        table.add_row(
            f"{view.round} {short(view.job)}",
            str(view.height),
            short(view.trainer),
            str(view.step),
            short(view.auditor),
            view.result,
            view.finding or "–",
            _optional(view.relative_error, ".1e"),
        )
    return table


def suspensions(views: Iterable[SuspensionView]) -> Table:
    table = _table("suspended", "until round", "in job", "because of round", "step", "found by", "finding")
    for view in views:
        cause = view.cause
        finding = cause.finding or "–"
        table.add_row(
            short(cause.trainer),
            str(view.until),
            short(cause.job),
            str(cause.round),
            str(cause.step),
            short(cause.auditor),
            f"shunned: {finding}" if cause.result == "shunned" else finding,
        )
    return table


def peers(views: Iterable[PeerView]) -> Table:
    table = _table("peer", "name", "part", "link", "round trip", "sent", "received", "record")
    for view in views:
        part = view.gone or ("voter" if view.voter else "member" if view.member else "guest")
        part += " (leader)" if view.leader else ""
        part += f" {len(view.approvals)} approvals" if view.approvals and not view.voter else ""
        link = view.link
        table.add_row(
            short(view.peer) + (" me" if view.me else ""),
            escape(view.name),
            f"{part} {','.join(view.roles)}",
            ("→ " if link.outgoing else "← ") + escape(link.address) if link else "–",
            _optional(link.round_trip_ms, ".1f") + " ms" if link else "–",
            f"{link.bytes_sent / 1e6:.2f} MB" if link else "–",
            f"{link.bytes_received / 1e6:.2f} MB" if link else "–",
            escape(view.record),
        )
    return table


def invitations(views: Iterable[InvitationView]) -> Table:
    table = _table("token", "state", "made", "expires", "addresses")
    for view in views:
        made, expires = (
            f"{datetime.fromtimestamp(ms / 1000).astimezone():%Y-%m-%d %H:%M}" for ms in (view.made_ms, view.expires_ms)
        )
        table.add_row(short(view.token), view.state, made, expires, escape(" ".join(view.addresses)))
    return table


def jobs(views: Iterable[JobView]) -> Table:
    table = _table(
        "job", "name", "state", "round", "audit", "data", "accepted", "rejected", "not judged", "suspended", "model root"
    )
    for view in views:
        table.add_row(
            short(view.job),
            escape(view.name),
            "stopped" if view.state == "finished" and view.round < view.rounds else view.state,
            f"{view.round}/{view.rounds}",
            view.audit,
            view.data if view.data == "local" else short(view.data) or "–",
            " ".join(f"{short(peer)}:{count}" for peer, count in view.accepted.items()) or "–",
            _by_trainer(view.rejected, lambda reason: reason not in NOT_JUDGED),
            _by_trainer(view.rejected, lambda reason: reason in NOT_JUDGED),
            " ".join(f"{short(peer)} until {number}" for peer, number in view.suspended.items()) or "–",
            short(view.model_root),
        )
    return table


def _by_trainer(counts: Mapping[str, Mapping[str, int]], belongs: Callable[[str], bool]) -> str:
    chosen = {peer: {reason: n for reason, n in reasons.items() if belongs(reason)} for peer, reasons in counts.items()}
    return " ".join(f"{short(peer)}: {_counts(reasons)}" for peer, reasons in chosen.items() if reasons) or "–"


PLAIN_MEAN = " (plain mean)"  # of two updates no statistic can say which one lies: re-execution alone does


def rounds(views: Iterable[RoundView]) -> Table:
    # So narrow beside the verdicts that eighty columns break none of them, and no id.
    table = _table("round", "height", "verdicts; by whose ballots", "held-out\nbits/byte", "seconds", "decision", "model\nroot")
    table.collapse_padding = True
    for view in views:
        verdicts = " ".join(f"{short(peer)}:{verdict}" for peer, verdict in view.verdicts.items())
        table.add_row(
            f"{view.round} {short(view.job)}",
            str(view.height),
            f"{verdicts}{PLAIN_MEAN if view.plain_mean else ''}; by {' '.join(map(short, view.ballots))}",
            _optional(view.held_out_bits_per_byte, ".3f"),
            _optional(view.seconds, ".1f"),
            milliseconds(view.decision_ms),
            short(view.model_root) + ("" if view.stepped else "\n(no step)"),
        )
    return table


def event(view: EventView) -> str:
    # Local time, because that is what the reader's clock shows.
    time = datetime.fromtimestamp(view.at_ms / 1000).astimezone()
    return f"{time:%H:%M:%S} {view.kind:<9} {view.text}"
