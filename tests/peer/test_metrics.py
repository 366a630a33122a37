"""`/healthz` and `/metrics` on loopback: what monitors read, and what a stranger on this machine cannot do with it."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from peer.settings.config import load_settings
from protocol.addresses import parse_address
from protocol.api import AlertView, StatsView
from protocol.errors import UserError
from tests.peer.fake_api import ME, OTHER, STATS, FakeApi
from tests.waiting import patience
from web import metrics_endpoint

HOSTILE = 'a"b\\c\nd'  # a name of a network cannot be that; a monitor must read whatever comes all the same


@dataclass
class Desk:
    """As much of one as the part uses."""

    folder: Path
    listen: str = "127.0.0.1:0"
    api: FakeApi = field(default_factory=FakeApi)
    told: list[str] = field(default_factory=list)

    def get_setting(self, name: str) -> str:
        assert name == "metrics"
        return self.listen

    @property
    def state(self) -> Any:
        return SimpleNamespace(module_state=lambda kind: SimpleNamespace(members={b"a": None, b"b": None}))

    def log_event(self, text: str) -> None:
        self.told.append(text)

    def log_warning(self, text: str) -> None:
        self.told.append(f"WARNING {text}")


@asynccontextmanager
async def serving(desk: Desk) -> AsyncIterator[tuple[str, int]]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(metrics_endpoint.MetricsEndpoint(desk).run)  # type: ignore[arg-type]
        with patience():
            while not desk.told:
                await trio.lowlevel.checkpoint()
        yield parse_address((desk.folder / metrics_endpoint.ADDRESS_FILE).read_text())
        nursery.cancel_scope.cancel()


async def asked(place: tuple[str, int], request: bytes) -> tuple[int, dict[str, str], str]:
    """Status, headers and body."""
    answer = b""
    with patience():
        async with await trio.open_tcp_stream(*place) as stream:
            await stream.send_all(request)
            while part := await stream.receive_some():
                answer += part
    head, _, body = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.lower().split(": ", 1) for line in lines), body.decode()


def get(path: str) -> bytes:
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()


@pytest.mark.real("sockets")
async def test_another_parser_reads_every_figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = dataclasses.replace(STATS.status, network=HOSTILE, decided_seconds_ago=2.5, reachability="relayed")
    desk = Desk(tmp_path)
    stats: StatsView = dataclasses.replace(STATS, status=status, decision_ms_p99=80.0, refused={HOSTILE: 7})

    async def look() -> StatsView:
        return stats

    async def alerts() -> tuple[AlertView, ...]:
        return (AlertView("disk-low", "", "warning", "…"), AlertView("liar-found", ME, "info", "…"))

    monkeypatch.setattr(desk.api, "stats", look)
    monkeypatch.setattr(desk.api, "alerts", alerts)
    async with serving(desk) as place:
        code, headers, text = await asked(place, get("/metrics?x=1"))
    assert (code, headers["content-type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    found = {(one.name, *sorted(one.labels.items())): one.value for family in families.values() for one in family.samples}
    assert found["folkmoot_height",] == status.height and found["folkmoot_members",] == 2
    assert found["folkmoot_refused_total", ("reason", HOSTILE)] == 7
    assert found["folkmoot_decision_seconds", ("quantile", "0.99")] == 0.08
    assert found["folkmoot_decided_seconds_ago",] == 2.5 and found["folkmoot_reachable",] == 0
    assert found["folkmoot_alert", ("about", ME), ("cause", "liar-found"), ("severity", "info")] == 1
    assert found["folkmoot_memory_bytes",] == STATS.memory_mb * 1e6 and found["folkmoot_disk_free_bytes",] > 0
    who = ("name", "[bold]ben"), ("peer", OTHER)
    assert found["folkmoot_link_round_trip_seconds", *who] == 0.0025 and found["folkmoot_link_relayed", *who] == 0
    assert not families["folkmoot_link_bytes_per_second"].samples, "nothing was transferred"
    [info] = families["folkmoot_info"].samples
    assert (info.labels["peer"], info.labels["network"]) == (status.peer, HOSTILE)
    assert {family.type for family in families.values()} == {"counter", "gauge"}
    assert len(found) == sum(not line.startswith("#") for line in text.splitlines()), "no line is read as another one"


@pytest.mark.real("sockets")
async def test_health_says_why_and_heads_have_no_body(tmp_path: Path) -> None:
    async with serving(Desk(tmp_path)) as place:
        assert (await asked(place, get("/healthz")))[::2] == (200, "ok\n")
        code, headers, body = await asked(place, get("/healthz").replace(b"GET", b"HEAD"))
        assert (code, headers["content-length"], headers["connection"], body) == (200, "3", "close", "")
    ill = Desk(tmp_path)

    async def look() -> StatsView:
        return dataclasses.replace(STATS, status=dataclasses.replace(STATS.status, state="halted", halted="HALTED: the disk"))

    ill.api.stats = look  # type: ignore[method-assign]
    async with serving(ill) as place:
        assert (await asked(place, get("/healthz")))[::2] == (503, "halted: HALTED: the disk\n")


@pytest.mark.real("sockets")
async def test_what_is_no_request_for_either_has_an_answer_and_costs_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    desk = Desk(tmp_path)
    async with serving(desk) as place:
        assert (await asked(place, get("/")))[0] == 404
        code, headers, _ = await asked(place, get("/metrics").replace(b"GET", b"POST"))
        assert (code, headers["allow"]) == (405, "get, head")
        for wrong in (b"\x16\x03\x01\r\n\r\n", b"GET /metrics\r\n\r\n", b"GET /metrics HTTP/2\r\n\r\n", b"\r\n\r\n"):
            assert (await asked(place, wrong))[0] == 400, wrong
        assert (await asked(place, b"GET /" + b"a" * metrics_endpoint.REQUEST_BYTES_MAX + b" HTTP/1.1\r\n"))[0] == 400

        async def fails() -> StatsView:
            raise OSError("the disk")

        desk.api.stats = fails  # type: ignore[method-assign]
        with caplog.at_level(logging.CRITICAL):
            assert (await asked(place, get("/metrics")))[0] == 500
        del desk.api.stats

        async def odd() -> tuple[AlertView, ...]:
            return (AlertView("disk-low", "\udc80", "warning", "…"),)  # no encoding has that

        desk.api.alerts = odd  # type: ignore[method-assign]
        with caplog.at_level(logging.CRITICAL):
            assert (await asked(place, get("/metrics")))[0] == 500
        del desk.api.alerts
        assert (await asked(place, get("/metrics")))[0] == 200, "it goes on"


@pytest.mark.real("sockets")
async def test_whoever_holds_connections_loses_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_endpoint, "CONNECTIONS_MAX", 2)
    async with serving(Desk(tmp_path)) as place:
        held = [await trio.open_tcp_stream(*place) for _ in range(2)]
        for stream in held:
            await stream.send_all(b"GET")
        with patience():
            while (answer := await _first(place)) is not None:  # until both are counted
                assert answer.startswith(b"HTTP/1.1 200")
        for stream in held:
            await stream.aclose()
        with patience():
            while await _first(place) is None:
                pass
    monkeypatch.setattr(metrics_endpoint, "REQUEST_SECONDS_MAX", 0.05)
    async with serving(Desk(tmp_path)) as place, await trio.open_tcp_stream(*place) as silent:
        with patience():
            assert await silent.receive_some() == b"", "it says nothing and is closed"


async def _first(place: tuple[str, int]) -> bytes | None:
    """What a monitor gets; None if it is turned away."""
    async with await trio.open_tcp_stream(*place) as stream:
        try:
            await stream.send_all(get("/healthz"))
            return bytes(await stream.receive_some()) or None
        except trio.BrokenResourceError:
            return None


@pytest.mark.real("sockets")
async def test_a_taken_port_is_told_and_ends_nothing(tmp_path: Path) -> None:
    async with serving(Desk(tmp_path)) as (host, port):
        desk = Desk(tmp_path / "other", f"{host}:{port}")
        desk.folder.mkdir()
        await metrics_endpoint.MetricsEndpoint(desk).run()  # type: ignore[arg-type]
        [told] = desk.told
        assert (
            told.startswith("WARNING ")
            and f"{port}: address already in use; name another" in told.lower()
            and not (desk.folder / metrics_endpoint.ADDRESS_FILE).exists()
        )


async def test_it_is_off_unless_named_and_only_on_loopback(tmp_path: Path) -> None:
    await metrics_endpoint.MetricsEndpoint(Desk(tmp_path, "")).run()  # type: ignore[arg-type]
    assert load_settings({}, {}).config.feature_settings["metrics"] == ""
    for address in ("127.0.0.1:7790", "[::1]:7790", "localhost:0"):
        assert load_settings({"metrics": address}, {}).config.feature_settings["metrics"] == address
    for address in ("0.0.0.0:7790", "192.0.2.1:7790", "7790", "example.org:1"):
        with pytest.raises(UserError, match="metrics = "):
            load_settings({"metrics": address}, {})
