"""The views of a peer as tables for people."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar

from features.commands import CommandContext
from features.peer_names import SHORT_ID_LENGTH, PeerNames
from features.text_tables import Column, KeyValueTable, Printable, TextTable, format_ordinal, format_quorum, pluralize
from protocol.addresses import format_listen_addresses
from protocol.api import (
    AlertView,
    AuditRecordView,
    AuditView,
    BlockView,
    DeviceView,
    DiskView,
    EngineView,
    EventView,
    InvitationView,
    JobView,
    LimitView,
    LinkView,
    LivenessMatrix,
    ModuleView,
    PeerView,
    RoundView,
    RoundVotesView,
    StatsView,
    StatusView,
    SuspensionView,
)
from protocol.units import display_round_number, format_round_progress
from protocol.verdicts import DIVERGING, Verdict

if TYPE_CHECKING:
    from peer.export.row_proof_file import RowVerdict

REACH_SIGNS = "+: the observer hears the voter; seconds: time of silence; ?: unknown"
NOT_CHECKED = " (unverified: this program does not know the module, so only the file declares the field as a table)"
REACHABILITY_TEXTS = {  # value of `StatusView.reachability` -> text
    "direct": "other peers have dialed this peer",
    "relayed": "other peers cannot dial this peer and reach it over relays",
    "unknown": "too few peers have reported",
}
ACCEPT, UNSURE = Verdict.ACCEPT.label, Verdict.UNJUDGED.label  # labels of verdicts in a vouch; all other labels reject the update
NEUTRAL_REASONS = ("absent", "unjudged")  # labels of verdicts that are no evidence against the trainer

V = TypeVar("V")


def show_table(table: Callable[[V], Printable], empty: str = "") -> Callable[[CommandContext[Any], V], Awaitable[None]]:
    """Return a function that shows the answer of a listing command as a table, or `empty` for an empty answer."""

    async def show(asked: CommandContext[Any], answer: V) -> None:
        asked.show(table(answer) if answer or not empty else empty)

    return show


def show_named_table(
    table: Callable[[V, PeerNames], Printable], empty: str = ""
) -> Callable[[CommandContext[Any], V], Awaitable[None]]:
    """Return a function as `show_table` does. Its table shows the names of peers instead of ids."""

    async def show(asked: CommandContext[Any], answer: V) -> None:
        asked.show(table(answer, await asked.load_names()) if answer or not empty else empty)

    return show


def shorten_id(text: str) -> str:
    return text[:SHORT_ID_LENGTH]


def _filled(table: TextTable, rows: Iterable[Sequence[str]]) -> TextTable:
    for row in rows:
        table.add_row(*row)
    return table


def _optional(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def format_milliseconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.0f} ms"


def format_seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f} s"


def _megabytes(amounts: Mapping[str, int]) -> str:
    return ", ".join(f"{kind} {amount / 1e6:.2f} MB" for kind, amount in amounts.items()) or "nothing"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} {count}" for reason, count in sorted(counts.items())) or "none"


def status(view: StatusView) -> KeyValueTable:
    return KeyValueTable(
        {
            "peer id": view.peer,
            "name": view.name or "–",
            "network": f"{view.network} (chain {shorten_id(view.chain_id)})",
            "role": view.role + (", voter" if view.voter else ", no vote"),
            "state": format_state(view),
            "height": f"{view.height}, view {view.view}",
            "decided": _decided(view),
            "state root": view.state_root,
            **({"late updates": view.straggling} if view.straggling else {}),
            **({"re-execution": view.reexecution_limits} if view.reexecution_limits else {}),
            **({"disk shortage": view.disk_shortage} if view.disk_shortage else {}),
            "unaudited jobs": _unaudited(view),
            "largest model": f"{view.parameters_max} parameters",
            "voters": format_quorum(view.voters, view.tolerated, view.quorum),
            "links": view.links,
            "address": format_listen_addresses(view.listen_addresses, view.announced_addresses),
            "reachable": f"{view.reachability}: {REACHABILITY_TEXTS[view.reachability]}",
            **{aside.name: aside.text for aside in view.optional_services},
            "unreached": "\n".join(dial.text for dial in view.unreached_addresses) or "–",
            "data": view.data_directory,
            "process": f"{view.process}, up {_duration(view.uptime_seconds)}, version {view.version}",
        }
    )


def format_state(view: StatusView) -> str:
    behind = f"behind by {pluralize(view.heights_behind or 0, 'height')}" if view.state == "behind" else ""
    work = view.halted or view.waiting or behind or view.suspended or view.state
    return "; ".join(filter(None, (work, view.fork, view.module_failure)))


def _decided(view: StatusView) -> str:
    ago = "nothing yet" if view.decided_seconds_ago is None else f"{_duration(view.decided_seconds_ago)} ago"
    known = view.heights_behind is not None
    behind = f"behind by {pluralize(view.heights_behind or 0, 'height')}" if known else "no voter is connected to compare heights"
    return ago if view.heights_behind == 0 else f"{ago}; {behind}"


def _unaudited(view: StatusView) -> str:
    what = "no peer re-executes updates; voters check only form and norm"
    return f"{', '.join(view.unaudited)}: {what}" if view.unaudited else "none"


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def format_age(seconds: float) -> str:
    """Return a duration in seconds as text, in the largest suitable unit."""
    for unit, name in ((86_400, "days"), (3_600, "h"), (60, "min")):
        if seconds >= 2 * unit or (seconds >= unit and name != "days"):
            return f"{int(seconds // unit)} {name}"
    return f"{int(seconds)} s"


def stats(view: StatsView) -> KeyValueTable:
    return KeyValueTable(
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
            "expelled": "; ".join(view.expelled) or "none",
            "audits": _standing(view.audit_record) if view.audit_record else "no sampled audits of or by this peer",
            "unaudited jobs": _unaudited(view.status),
            "pending": f"{view.transactions_pending} transactions",
            "worker": view.worker or "none",
            "memory": f"{view.memory_mb:.0f} MB",
            "state": format_state(view.status),
        }
    )


def proven_row(found: RowVerdict) -> KeyValueTable:
    at = _moment(found.certified_ms)
    return KeyValueTable(
        {
            "network": f"{found.network}, chain id {found.chain_id}",
            "trust from": found.trust,
            "state": f"after height {found.height}, root {found.state_root}",
            "certified": f"by block {found.certified_by} of {at}, signed by {found.signatures} of {found.voters} "
            f"voters; {pluralize(found.links, 'change')} of voters since the genesis",
            "table": f"{found.table}, {pluralize(found.rows, 'row')}" + ("" if found.is_table else NOT_CHECKED),
            "key": _bytes(found.key),
            "value": _row(found) if found.has_row else "none (no row with this key)",
        }
    )


def alerts(found: Iterable[AlertView], names: PeerNames) -> TextTable:
    table = TextTable("severity", "cause", Column("details", wraps=True), Column("since", drop_order=1))
    for alert in found:
        text = names.replace_ids(alert.text)
        details = f"{names[alert.about]} {text}" if alert.about else text
        table.add_row(alert.severity, alert.cause, details, _moment(alert.since_ms))
    return table


def disk(view: DiskView) -> KeyValueTable:
    free = f"{_mebibytes(view.free_bytes)} of {_mebibytes(view.total_bytes)}"
    return KeyValueTable({"data directory": _mebibytes(view.used_bytes), "free": free})


def engines(views: Iterable[EngineView]) -> TextTable:
    table = TextTable("engine", "in use", Column("worker", wraps=True), Column("versions", wraps=True))
    for view in views:
        versions = [f"{name} {version}" for name, version in view.versions.items()]
        versions += [view.compiler] if view.compiler else []
        table.add_row(view.engine, "yes" if view.in_use else "–", view.state or view.missing or "–", ", ".join(versions) or "–")
    return table


def devices(views: Iterable[DeviceView]) -> TextTable:
    amounts = (Column(title, is_number=True) for title in ("memory", "free", "worker"))
    rows = (
        (
            view.device,
            view.about,
            "yes" if view.in_use else "–",
            *("–" if size is None else f"{size} MB" for size in (view.memory_mb, view.free_mb, view.held_mb)),
        )
        for view in views
    )
    return _filled(TextTable("device", Column("model", truncates=True), "in use", *amounts), rows)


def block(view: BlockView, names: PeerNames) -> KeyValueTable:
    return KeyValueTable(
        {
            "height": f"{view.height}, decided in view {view.view}",
            "digest": view.digest,
            "time": _moment(view.time_ms),
            "proposed by": names[view.proposer],
            "signed by": f"{' '.join(names[peer] for peer in view.signers)} (quorum {view.quorum} of {view.voters_count})",
            "certified root": f"{view.certified_root} after height {view.height - 1}",
            "own root": {view.certified_root: "equal", "": "not kept"}.get(view.own_root, view.own_root),
            "body": f"{view.body_bytes} bytes",
            "header": view.header,
            "certificate": view.certificate,
            "voters": view.voters,
        }
    )


def votes(found: Iterable[RoundVotesView], names: PeerNames) -> TextTable:
    table = TextTable("round", "phase", "voter", Column("ballot", wraps=True))
    for view in found:
        which, phase = (
            f"{display_round_number(view.round)} {shorten_id(view.job)}",
            view.phase + (f" at {view.height}" if view.height else ""),
        )
        for voter in sorted(view.votes.keys() | view.vouches.keys()):
            ballot = [f"{names[who]}: {verdict}" for who, verdict in view.votes.get(voter, {}).items()] or ["no ballot yet"]
            table.add_row(which, phase, names[voter], "; ".join([*ballot, *_vouches(view.vouches.get(voter, {}), names)]))
        if not view.votes and not view.vouches:
            table.add_row(which, phase, "–", "no ballot yet")
    return table


def _vouches(verdicts: Mapping[str, str], names: PeerNames) -> Iterator[str]:
    """Yield the verdicts of one re-executor: `vouches for anna, ben`, `rejects liar (replay)`, `unsure of cora`."""
    accepted = [names[who] for who, verdict in verdicts.items() if verdict == ACCEPT]
    unsure = [names[who] for who, verdict in verdicts.items() if verdict == UNSURE]
    rejected = [f"{names[who]} ({verdict})" for who, verdict in verdicts.items() if verdict not in (ACCEPT, UNSURE)]
    for what, trainers in (("vouches for", accepted), ("rejects", rejected), ("unsure of", unsure)):
        if trainers:
            yield f"{what} {', '.join(trainers)}"


def _mebibytes(count: int) -> str:
    return f"{count >> 20} MiB"


def _moment(ms: int) -> str:
    """Return a time as text in the local time zone. Another peer chose the value, which may be outside the calendar."""
    try:
        return f"{datetime.fromtimestamp(ms / 1000).astimezone():%Y-%m-%d %H:%M:%S}"
    except (ValueError, OverflowError, OSError):
        return f"{ms} ms after 1970"


def _row(found: RowVerdict) -> str:
    """Return the row of a table in the ledger as text.

    Control characters are escaped, because a stranger may have written the row.
    """
    if found.record is None:
        return f"0x{found.value} (this program does not know its type)"
    record: Any = found.record
    return ", ".join(f"{name} {value!r}" for name, value in record.items()) if isinstance(record, dict) else repr(record)


def _bytes(hex: str) -> str:
    """Return bytes as text in hex, followed by their characters if the bytes are printable UTF-8."""
    text = bytes.fromhex(hex).decode(errors="replace")
    return f"0x{hex} ({text!r})" if text.isprintable() and "\N{REPLACEMENT CHARACTER}" not in text else f"0x{hex}"


def _standing(view: AuditRecordView) -> str:
    trained = f"{view.rewards} rewards, {view.rewards_lost} lost, {view.suspensions} suspensions"
    audited = f"{view.reports} reports, {view.wrong_losses} with a wrong loss, {view.reports_lapsed} lapsed"
    challenged = f"{view.challenges_upheld} challenges upheld, {view.challenges_refuted} refuted"
    return f"{trained}; {audited}, {challenged}"


def audit_records(views: Iterable[AuditRecordView], names: PeerNames) -> TextTable:
    rows = (
        (
            names[view.peer],
            str(view.rewards),
            str(view.rewards_lost),
            str(view.suspensions),
            str(view.reports),
            str(view.reports_lapsed),
            str(view.challenges_upheld),
            str(view.challenges_refuted),
            str(view.wrong_losses),
        )
        for view in views
    )
    counts = ("rewards", "lost", "suspensions", "reports", "lapsed", "upheld", "refuted", "wrong")
    return _filled(TextTable(Column("peer", truncates=True), *counts), rows)


def audits(views: Iterable[AuditView], names: PeerNames) -> TextTable:
    who = (Column("trainer", truncates=True), Column("auditor", truncates=True))
    error = Column("relative error", drop_order=2)
    rows = (
        (
            f"{display_round_number(view.round)} {shorten_id(view.job)}",
            str(view.height),
            names[view.trainer],
            names[view.auditor],
            view.result,
            view.finding or "–",
            _optional(view.relative_error, ".1e"),
        )
        for view in views
    )
    return _filled(TextTable("round", Column("height", drop_order=1), *who, "result", "finding", error), rows)


def suspensions(views: Iterable[SuspensionView], names: PeerNames) -> TextTable:
    trainer, auditor = Column("trainer", truncates=True), Column("auditor", truncates=True)
    table = TextTable(trainer, "suspended until", "job", "false in round", auditor, Column("finding", wraps=True))
    for view in views:
        cause = view.cause
        finding = cause.finding or "–"
        table.add_row(
            names[cause.trainer],
            str(display_round_number(view.until)),
            shorten_id(cause.job),
            str(display_round_number(cause.round)),
            names[cause.auditor],
            f"{cause.result}: {finding}" if cause.result in ("shunned", "lazy") else finding,
        )
    return table


def peers(views: Sequence[PeerView]) -> TextTable:
    names = {view.peer: view.name for view in views}
    traffic = (Column("linked for", drop_order=3), Column("sent", drop_order=2), Column("received", drop_order=1))
    who = (Column("name", truncates=True), "peer id", Column("status", wraps=True))
    measured = (Column("round trip", drop_order=5), Column("Mbit/s", drop_order=4))
    table = TextTable(*who, "link", *measured, *traffic, Column("record", wraps=True))
    for view in views:
        status = view.departed or ("voter" if view.voter else "member" if view.member else "guest")
        status += " (leader)" if view.leader else ""
        status += f" {pluralize(len(view.approvals), 'approval')}" if view.approvals and not view.voter else ""
        status += f" (silent for {view.link.silent_seconds:.0f} s)" if view.link and view.link.silent_seconds is not None else ""
        link = view.link
        table.add_row(
            (view.name or "–") + " (me)" * view.me,
            shorten_id(view.peer),
            f"{status} {','.join(view.roles)}",
            _way(link, names) if link else "–",
            f"{_optional(link.round_trip_ms, '.1f')} ms" if link else "–",
            _optional(link.mbit_per_second, ".3g") if link else "–",
            format_age(link.connected_seconds) if link else "–",
            f"{link.bytes_sent / 1e6:.2f} MB" if link else "–",
            f"{link.bytes_received / 1e6:.2f} MB" if link else "–",
            view.membership,
        )
    return table


def _way(link: LinkView, names: Mapping[str, str]) -> str:
    if link.relay:
        return f"relayed by {names.get(link.relay) or shorten_id(link.relay)}"
    return f"{'→' if link.outgoing else '←'}{link.address}"


def reachability(found: LivenessMatrix, names: PeerNames, me: str) -> TextTable:
    found = {me: found[me], **found}  # the row of this peer comes first
    numbers = {peer: str(number) for number, peer in enumerate(found, 1)}
    heard = sorted({peer for row in found.values() for peer in row}, key=list(found).index)
    columns = (Column(numbers[peer], len(heard) - place, is_number=True) for place, peer in enumerate(heard))
    table = TextTable(Column("no.", is_number=True), Column("observer", truncates=True), *columns)
    for observer, row in found.items():
        shown = {peer: "?" if seconds is None else f"{seconds:.0f} s" if seconds else "+" for peer, seconds in row.items()}
        cells = ("·" if peer == observer else shown[peer] for peer in heard)
        table.add_row(numbers[observer], names[observer], *cells)
    return table


def invitations(views: Iterable[InvitationView]) -> TextTable:
    table = TextTable("token", "state", "made", "expires", Column("addresses", wraps=True))
    for view in views:
        made, expires = (
            f"{datetime.fromtimestamp(ms / 1000).astimezone():%Y-%m-%d %H:%M}" for ms in (view.made_ms, view.expires_ms)
        )
        table.add_row(shorten_id(view.token), view.state, made, expires, " ".join(view.addresses))
    return table


def features(views: Iterable[ModuleView]) -> TextTable:
    table = TextTable("module", "feature", "runs", "supports", Column("upgrade", wraps=True))
    for view in views:
        due = [f"{view.due_version} from height {view.due_height}"] if view.due_version else []
        knows = ", ".join(map(str, view.known_versions)) or "–"
        table.add_row(
            view.module, view.feature or "–", str(view.active_version or "–"), knows, "; ".join([*due, *view.wishes]) or "–"
        )
    return table


def limits(views: Iterable[LimitView]) -> TextTable:
    rows = ((view.name, str(view.maximum), view.meaning, "; ".join(view.wishes) or "–") for view in views)
    return _filled(TextTable("limit", "maximum", Column("meaning", wraps=True), Column("requests", wraps=True)), rows)


def jobs(views: Sequence[JobView], names: PeerNames) -> TextTable:
    beside = (Column("audit", drop_order=3), Column("data", drop_order=1), Column("model root", drop_order=2))
    table = TextTable("job", Column("name", truncates=True), "state", "round", Column("proposals", wraps=True), *beside)
    for view in views:
        told = {
            "accepted": [f"{names[peer]} {count}" for peer, count in view.accepted.items()],
            "rejected": _by_trainer(view.rejected, names, lambda reason: reason not in (*NEUTRAL_REASONS, DIVERGING)),
            DIVERGING: [f"{names[peer]} {of[DIVERGING]}" for peer, of in view.rejected.items() if DIVERGING in of],
            "not judged": _by_trainer(view.rejected, names, lambda reason: reason in NEUTRAL_REASONS),
            "suspended": [f"{names[peer]} until {display_round_number(number)}" for peer, number in view.suspended_until.items()],
            "undone": list(view.undone_rounds),
            "re-executors": [f"{names[peer]} {text}" for peer, text in view.reexecution_limits.items()],
        }
        table.add_row(
            shorten_id(view.job),
            view.name,
            format_job_state(view),
            f"– of {view.rounds}" if view.queue_position else format_round_progress(view.rounds_in_model, view.rounds),
            "; ".join(f"{what}: {', '.join(trainers)}" for what, trainers in told.items() if trainers) or "–",
            view.audit if view.precision == "fp32" else f"{view.audit} ({view.precision})",
            view.data if view.data == "local" else shorten_id(view.data) or "–",
            shorten_id(view.model_root) or "–",
        )
    return table


def format_job_state(view: JobView) -> str:
    if view.queue_position:
        held, _, needed = view.initial_model_holders.partition(" of ")
        return f"queued ({format_ordinal(view.queue_position)})" + (
            f"; initial model held by {pluralize(int(held), 'voter')}, {needed} needed" if held else ""
        )
    if view.state == "settling":
        return "trained; audits may still undo rounds"
    return "stopped" if view.state == "finished" and view.rounds_in_model < view.rounds else view.state


def _by_trainer(counts: Mapping[str, Mapping[str, int]], names: PeerNames, belongs: Callable[[str], bool]) -> list[str]:
    chosen = {peer: {reason: n for reason, n in reasons.items() if belongs(reason)} for peer, reasons in counts.items()}
    return [f"{names[peer]} ({_counts(reasons)})" for peer, reasons in chosen.items() if reasons]


PLAIN_MEAN = " (plain mean)"  # mark of a round without robust aggregation, in which only re-execution could find a false update


def rounds(views: Iterable[RoundView], names: PeerNames) -> TextTable:
    figures = (Column("held-out bits/byte"), Column("seconds", drop_order=4), Column("decision", drop_order=2))
    who = (Column("verdicts", wraps=True), Column("ballots of", wraps=True))
    rows = (
        (
            f"{display_round_number(view.round)} {shorten_id(view.job)}",
            format_verdicts(view, names) + PLAIN_MEAN * view.plain_mean,
            " ".join(names[peer] for peer in view.ballots),
            _optional(view.held_out_bits_per_byte, ".3f"),
            _optional(view.seconds, ".1f"),
            format_milliseconds(view.decision_ms),
            str(view.height),
            shorten_id(view.model_root) + " (no step)" * (not view.stepped) + " (undone)" * view.undone,
        )
        for view in views
    )
    last = (Column("height", drop_order=1), Column("model root", drop_order=3))
    return _filled(TextTable("round", *who, *figures, *last), rows)


def format_verdicts(view: RoundView, names: PeerNames) -> str:
    """Return the verdicts of a round as text, such as `accept: anna (ben, cora vouch) ben (anna vouches); replay: liar`."""
    by_verdict: dict[str, list[str]] = {}
    for peer, verdict in view.verdicts.items():
        voters = view.vouchers.get(peer, ())
        vouch = f" ({', '.join(names[voter] for voter in voters)} {'vouches' if len(voters) == 1 else 'vouch'})" if voters else ""
        by_verdict.setdefault(verdict, []).append(names[peer] + vouch)
    return "; ".join(f"{verdict}: {' '.join(peers)}" for verdict, peers in by_verdict.items())


def event_line(view: EventView, names: PeerNames) -> str:
    # Local time, which the user can compare with a clock.
    time = datetime.fromtimestamp(view.at_ms / 1000).astimezone()
    return f"{time:%H:%M:%S} {view.kind:<9} {names.replace_ids(view.text)}"
