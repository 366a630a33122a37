"""Health and metrics of a peer, from what it says of itself: whoever serves them, they are made here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from protocol.api import LinkView, PeerState, PeerView, StatsView, StatusView

CONTENT_TYPE = "text/plain; version=0.0.4"
PREFIX = "folkmoot_"


@dataclass(frozen=True, slots=True)
class PrometheusMetric:
    name: str  # without the prefix; what only grows ends with `_total`
    help_text: str
    values: Mapping[str, float]  # by `format_labels`, such as `status="200"`; without any: by the empty text


def why_unhealthy(status: StatusView) -> str:
    """Why this peer does not take part as it should; empty if it does."""
    if status.state in (PeerState.WORKING, PeerState.SUSPENDED):
        return ""
    behind = "" if status.heights_behind is None else f"{status.heights_behind} heights behind"
    return f"{status.state}: {status.halted or status.waiting or behind}"


def peer_metrics(stats: StatsView, members: int) -> tuple[PrometheusMetric, ...]:
    status = stats.status
    who = format_labels(peer=status.peer, name=status.name, network=status.network, role=status.role, version=status.version)
    times_ms = {"0.5": stats.decision_ms_p50, "0.99": stats.decision_ms_p99}
    seconds = {quantile: time / 1_000 for quantile, time in times_ms.items() if time is not None}
    reachable = {"": float(status.reachability == "direct")} if status.reachability in ("direct", "relayed") else {}
    ago = {} if status.decided_seconds_ago is None else {"": status.decided_seconds_ago}

    def one(name: str, about: str, value: float) -> PrometheusMetric:
        return PrometheusMetric(name, about, {"": value})

    return (
        PrometheusMetric("info", "who this peer is; always 1", {who: 1}),
        one("healthy", "1 if this peer takes part as it should", float(not why_unhealthy(status))),
        one("height", "blocks decided and applied", status.height),
        one("behind", "heights that others have decided and this peer has not applied", status.heights_behind or 0),
        one("links", "peers that are connected", status.links),
        one("unreached", "addresses that this peer dials in vain", len(status.unreached_addresses)),
        one("members", "members of the network", members),
        one("voters", "voters of the network", status.voters),
        one("quorum", "voters that decide", status.quorum),
        one("decisions_total", "blocks decided while this peer ran", stats.decisions),
        PrometheusMetric(
            "reachable", "1 if others dial this peer, 0 if they cannot; left out while too few have said", reachable
        ),
        PrometheusMetric("decided_seconds_ago", "since the last decision that came here", ago),
        PrometheusMetric("decision_seconds", "how long decisions took", _labelled("quantile", seconds)),
        one("transactions_pending", "transactions that wait for a block", stats.transactions_pending),
        one("memory_bytes", "of the daemon and its worker", stats.memory_mb * 1_000_000),
        one("uptime_seconds", "since the peer started", status.uptime_seconds),
        PrometheusMetric("sent_bytes_total", "by kind of traffic", _labelled("kind", stats.bytes_sent)),
        PrometheusMetric("received_bytes_total", "by kind of traffic", _labelled("kind", stats.bytes_received)),
        PrometheusMetric("refused_total", "what peers sent and this one did not take", _labelled("reason", stats.refused)),
    )


def link_metrics(peers: Iterable[PeerView]) -> tuple[PrometheusMetric, ...]:
    """What was measured on each link; a link of which something was not measured is left out there."""
    links = {format_labels(peer=peer.peer, name=peer.name): peer.link for peer in peers if peer.link}

    def each(name: str, about: str, value: Callable[[LinkView], float | None]) -> PrometheusMetric:
        return PrometheusMetric(name, about, {who: found for who, link in links.items() if (found := value(link)) is not None})

    return (
        each("link_relayed", "1 if a member forwards this link", lambda link: float(link.kind != "direct")),
        each("link_round_trip_seconds", "of the last pings", lambda link: link.round_trip_ms and link.round_trip_ms / 1_000),
        each("link_bytes_per_second", "that transfers had", lambda link: link.mbit_per_second and link.mbit_per_second * 125_000),
        each("link_retransmitted_ratio", "share of the bytes sent in the last hour", lambda link: link.retransmitted),
    )


def _labelled(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {format_labels(**{label: name}): value for name, value in values.items()}


def format_labels(**named: str) -> str:
    """As they stand between braces, escaped as the text format wants it."""
    escaped = ((name, text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, text in named.items())
    return ",".join(f'{name}="{text}"' for name, text in escaped)


def format_exposition(metrics: Iterable[PrometheusMetric]) -> str:
    """In Prometheus' text format."""
    lines = []
    for metric in metrics:
        kind = "counter" if metric.name.endswith("_total") else "gauge"
        lines += [f"# HELP {PREFIX}{metric.name} {metric.help_text}", f"# TYPE {PREFIX}{metric.name} {kind}"]
        of = {label and f"{{{label}}}": value for label, value in metric.values.items()}
        lines += [f"{PREFIX}{metric.name}{label} {value:.15g}" for label, value in of.items()]
    return "".join(line + "\n" for line in lines)
