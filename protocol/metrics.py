"""Health and metrics of a peer, from what it says of itself: whoever serves them, they are made here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from protocol.api import PeerState, StatsView, StatusView

CONTENT_TYPE = "text/plain; version=0.0.4"
PREFIX = "folkmoot_"


@dataclass(frozen=True, slots=True)
class Metric:
    name: str  # without the prefix; what only grows ends with `_total`
    about: str
    values: Mapping[str, float]  # by label, such as `status="200"`; without one: by the empty text


def why_unhealthy(status: StatusView) -> str:
    """Why this peer does not take part as it should; empty if it does."""
    if status.state in (PeerState.WORKING, PeerState.SUSPENDED):
        return ""
    behind = "" if status.behind is None else f"{status.behind} heights behind"
    return f"{status.state}: {status.halted or status.waiting or behind}"


def of_peer(stats: StatsView, members: int) -> tuple[Metric, ...]:
    status = stats.status

    def one(name: str, about: str, value: float) -> Metric:
        return Metric(name, about, {"": value})

    return (
        one("healthy", "1 if this peer takes part as it should", float(not why_unhealthy(status))),
        one("height", "blocks decided and applied", status.height),
        one("behind", "heights that others have decided and this peer has not applied", status.behind or 0),
        one("links", "peers that are connected", status.links),
        one("members", "members of the network", members),
        one("voters", "voters of the network", status.voters),
        one("quorum", "voters that decide", status.quorum),
        one("decisions_total", "blocks decided while this peer ran", stats.decisions),
        one("transactions_pending", "transactions that wait for a block", stats.transactions_pending),
        one("memory_bytes", "of the daemon and its worker", stats.memory_mb * 1_048_576),
        one("uptime_seconds", "since the peer started", status.uptime_seconds),
        Metric("sent_bytes_total", "by kind of traffic", _labelled("kind", stats.bytes_sent)),
        Metric("received_bytes_total", "by kind of traffic", _labelled("kind", stats.bytes_received)),
        Metric("refused_total", "what peers sent and this one did not take", _labelled("reason", stats.refused)),
    )


def _labelled(label: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f'{label}="{name}"': value for name, value in values.items()}


def exposition(metrics: Iterable[Metric]) -> str:
    """In Prometheus' text format."""
    lines = []
    for metric in metrics:
        kind = "counter" if metric.name.endswith("_total") else "gauge"
        lines += [f"# HELP {PREFIX}{metric.name} {metric.about}", f"# TYPE {PREFIX}{metric.name} {kind}"]
        lines += [f"{PREFIX}{metric.name}{{{label}}} {value:.15g}".replace("{}", "") for label, value in metric.values.items()]
    return "".join(line + "\n" for line in lines)
