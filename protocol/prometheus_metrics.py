"""Health and metrics of a peer, made from its own status and statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from protocol.api import LinkView, PeerState, PeerView, StatsView, StatusView

CONTENT_TYPE = "text/plain; version=0.0.4"
PREFIX = "folkmoot_"


@dataclass(frozen=True, slots=True)
class PrometheusMetric:
    name: str  # name of the metric without the prefix; names of counters end with `_total`
    help_text: str
    values: Mapping[str, float]  # labels from `format_labels`, such as `status="200"`, -> value; "": the metric has no labels


def why_unhealthy(status: StatusView) -> str:
    """Return why this peer is not healthy. Empty: it works, or is only suspended."""
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
        PrometheusMetric("info", "this peer's id, name, network, role and version as labels; always 1", {who: 1}),
        one("healthy", "1 if this peer is healthy, 0 if it is not", float(not why_unhealthy(status))),
        one("height", "blocks decided and applied", status.height),
        one("behind", "heights that others have decided and this peer has not applied", status.heights_behind or 0),
        one("links", "connected peers", status.links),
        one("unreached", "addresses that this peer cannot reach", len(status.unreached_addresses)),
        one("members", "members of the network", members),
        one("voters", "voters of the network", status.voters),
        one("quorum", "votes that a decision needs", status.quorum),
        one("decisions_total", "blocks decided since this peer started", stats.decisions),
        PrometheusMetric(
            "reachable", "1 if other peers can dial this peer, 0 if they cannot; absent while this is unknown", reachable
        ),
        PrometheusMetric("decided_seconds_ago", "seconds since this peer's last decision", ago),
        PrometheusMetric("decision_seconds", "time to decide a block, in seconds", _labelled("quantile", seconds)),
        one("transactions_pending", "transactions that wait for a block", stats.transactions_pending),
        one("memory_bytes", "memory of the daemon and its worker, in bytes", stats.memory_mb * 1_000_000),
        one("uptime_seconds", "seconds since this peer started", status.uptime_seconds),
        PrometheusMetric("sent_bytes_total", "bytes sent, by kind of traffic", _labelled("kind", stats.bytes_sent)),
        PrometheusMetric("received_bytes_total", "bytes received, by kind of traffic", _labelled("kind", stats.bytes_received)),
        PrometheusMetric("refused_total", "refused messages and connections, by reason", _labelled("reason", stats.refused)),
    )


def link_metrics(peers: Iterable[PeerView]) -> tuple[PrometheusMetric, ...]:
    """Return metrics of each link to a peer. A metric omits links on which it was not measured."""
    links = {format_labels(peer=peer.peer, name=peer.name): peer.link for peer in peers if peer.link}

    def each(name: str, about: str, value: Callable[[LinkView], float | None]) -> PrometheusMetric:
        return PrometheusMetric(name, about, {who: found for who, link in links.items() if (found := value(link)) is not None})

    return (
        each("link_relayed", "1 if a relay forwards this link, 0 if it is direct", lambda link: float(link.kind != "direct")),
        each(
            "link_round_trip_seconds",
            "median round-trip time of the last pings, in seconds",
            lambda link: link.round_trip_ms and link.round_trip_ms / 1_000,
        ),
        each(
            "link_bytes_per_second",
            "transfer rate to the peer, in bytes per second",
            lambda link: link.mbit_per_second and link.mbit_per_second * 125_000,
        ),
        each("link_retransmitted_ratio", "share of TCP segments sent again in the last hour", lambda link: link.retransmitted),
    )


def _labelled(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {format_labels(**{label: name}): value for name, value in values.items()}


def format_labels(**named: str) -> str:
    """Return labels in Prometheus' text format, with its escapes, without the braces around them."""
    escaped = ((name, text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for name, text in named.items())
    return ",".join(f'{name}="{text}"' for name, text in escaped)


def format_exposition(metrics: Iterable[PrometheusMetric]) -> str:
    """Return metrics in Prometheus' text format."""
    lines = []
    for metric in metrics:
        kind = "counter" if metric.name.endswith("_total") else "gauge"
        lines += [f"# HELP {PREFIX}{metric.name} {metric.help_text}", f"# TYPE {PREFIX}{metric.name} {kind}"]
        of = {label and f"{{{label}}}": value for label, value in metric.values.items()}
        lines += [f"{PREFIX}{metric.name}{label} {value:.15g}" for label, value in of.items()]
    return "".join(line + "\n" for line in lines)
