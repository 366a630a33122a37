"""Health of a peer, and `/healthz` and `/metrics` on loopback. Monitors read them, and strangers cannot change anything."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from consensus.pbft.block_sync import BlockSync
from peer.commands.definitions.status_commands import EXIT_STATUS
from peer.runtime.telemetry.event_log import EventLog
from peer.runtime.telemetry.health import (
    BEHIND_MIN,
    BEHIND_SECONDS,
    STALLED_SECONDS,
    heights_behind,
    peer_state,
    why_stalled,
)
from peer.runtime.telemetry.node_observer import NodeObserver
from peer.settings.config import load_settings
from protocol.addresses import parse_address
from protocol.api import AlertView, PeerState, StatsView
from protocol.errors import UserError
from protocol.identity import short_id
from tests.peer.fake_api import ME, OTHER, STATS, FakeApi
from tests.peer.network import network, one_root, poll, service_of
from tests.sim.keys import FastSigner
from tests.waiting import patience
from transport.wire.failure_detector import KeepaliveConfig
from web import metrics_endpoint

HOSTILE = 'a"b\\c\nd'  # a network cannot have this name, but a monitor must parse any text


@dataclass
class Desk:
    """A desk with only the fields that the part uses."""

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
    """Send a request and return status, headers and body."""
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
            return (AlertView("disk-low", "\udc80", "warning", "…"),)  # no encoding has this character

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
    """Return the first bytes of the answer to a monitor, or None if it is turned away."""
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
            and f"{port}: address already in use; choose another" in told.lower()
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


KEYS = sorted(FastSigner(f"voter {number}").public for number in range(4))
STRANGER, JOB = FastSigner("stranger").public, bytes(32)
HALTED = "HALTED: 2 of 4 differ"


def node(
    me: bytes = KEYS[0], voters: int = 4, claims: dict[bytes, int] | None = None, books: dict[bytes, Any] | None = None
) -> Any:
    """Return a node at height 10 with one more decided block, which is not applied."""
    catch_up = BlockSync()
    for peer, height in (claims or {}).items():
        catch_up.record_claim(peer, height)
    return SimpleNamespace(
        me=me,
        state=SimpleNamespace(
            height=10,
            members=SimpleNamespace(voters=tuple(KEYS[:voters])),
            jobs=SimpleNamespace(jobs={JOB: SimpleNamespace(name="text")}),
        ),
        replica=SimpleNamespace(height=11, height_claimed_by=catch_up.height_claimed_by),
        rounds=SimpleNamespace(books=books or {}),
    )


def book(proposals: int = 1, opened: float = 0.0, times_up: float = 20.0) -> Any:
    terms = SimpleNamespace(round=3, quorum=3, trainers=frozenset(KEYS[1:3]))
    return SimpleNamespace(
        terms=terms,
        opened_at=opened,
        cut_off_due_at=times_up,
        proposals=dict.fromkeys(KEYS[:proposals]),
        ballots=dict.fromkeys(KEYS[:2]),
    )


# The peer's state in one word ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("halted", "waiting", "behind", "ago", "suspended", "state", "status"),
    [
        ("", "", 0, 4.0, "", PeerState.WORKING, 0),
        ("", "", 0, 86_400.0, "", PeerState.WORKING, 0),  # an idle network is working
        ("", "", None, None, "", PeerState.WORKING, 0),  # alone from the beginning
        ("", "", BEHIND_MIN - 1, BEHIND_SECONDS - 1, "", PeerState.WORKING, 0),  # votes on their way
        ("", "", 0, 4.0, "suspended until round 9", PeerState.SUSPENDED, 0),
        ("", "", BEHIND_MIN, 0.0, "", PeerState.BEHIND, 3),
        ("", "", 1, BEHIND_SECONDS, "suspended until round 9", PeerState.BEHIND, 3),
        ("", "", 1, None, "", PeerState.BEHIND, 3),  # a newcomer
        ("", "waiting for a quorum", 9, 4.0, "suspended", PeerState.WAITING, 3),
        ("silent until height 7: …", "waiting", 9, 4.0, "", PeerState.SILENT, 3),
        ("not a member: …", "waiting", 9, None, "", PeerState.JOINING, 3),
        (HALTED, "waiting", 9, 4.0, "", PeerState.HALTED, 4),
        ("EXPELLED at height 6: …", "waiting", 9, 4.0, "", PeerState.EXPELLED, 4),
    ],
)
def test_the_gravest_state_is_told_and_becomes_the_exit_status(
    halted: str, waiting: str, behind: int | None, ago: float | None, suspended: str, state: PeerState, status: int
) -> None:
    assert peer_state(halted, waiting, behind, ago, suspended) is state
    assert EXIT_STATUS[state] == status


# How far behind ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("linked", "claims", "behind"),
    [
        ((), {}, None),
        ((STRANGER,), {STRANGER: 99}, None),
        (KEYS[1:], {}, 0),
        (KEYS[1:], {KEYS[1]: 99}, 0),  # one of four may lie
        (KEYS[1:], {KEYS[1]: 99, KEYS[2]: 14}, 3),
        (KEYS[1:], {STRANGER: 99, KEYS[2]: 14}, 0),
        (KEYS[1:2], {KEYS[1]: 14}, 3),  # nobody else can confirm it
        (KEYS[1:], {KEYS[1]: 5, KEYS[2]: 6}, 0),  # this peer has passed them since
    ],
)
def test_as_many_heights_behind_as_an_honest_voter_says(linked: tuple[bytes, ...], claims: dict[bytes, int], behind: int) -> None:
    assert heights_behind(node(claims=claims), frozenset(linked)) == behind


def test_the_only_voter_is_never_behind() -> None:
    assert heights_behind(node(voters=1), frozenset()) == 0


# A peer that waits although it has links -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("waits", "linked", "since", "now", "words"),
    [
        pytest.param(node(), KEYS, 0.0, 1e6, "", id="without work nothing is waited for"),
        pytest.param(node(), KEYS[1:3], STALLED_SECONDS - 1, 0.0, "", id="work without a decision is not yet waited for"),
        pytest.param(
            node(),
            KEYS[1:3],
            STALLED_SECONDS,
            0.0,
            "waiting for a decision: height 11 has been undecided for 30 s (3 of 4 voters are connected)",
            id="work without a decision is waited for after a while",
        ),
        pytest.param(
            node(me=STRANGER),
            (),
            0.0,
            0.0,
            "waiting for the voters: 0 of 4 are connected",
            id="a peer without a vote needs a voter",
        ),
        pytest.param(node(me=STRANGER), KEYS[:1], 0.0, 0.0, "", id="a peer without a vote needs one voter only"),
        pytest.param(node(books={JOB: book()}), KEYS, 0.0, 20.0 + STALLED_SECONDS - 1, "", id="times of a round are nearly up"),
        pytest.param(
            node(books={JOB: book()}),
            KEYS,
            0.0,
            20.0 + STALLED_SECONDS,
            "waiting for the ballots of round 4 of 'text', open for 50 s: 2 of 3 needed have arrived",
            id="a round whose times are up waits for ballots",
        ),
        pytest.param(
            node(books={JOB: book(proposals=0)}), KEYS[1:2], 0.0, 1e6, "", id="somebody may still compute: nobody is waited for"
        ),
        pytest.param(
            node(books={JOB: book(proposals=0)}),
            KEYS[3:],
            0.0,
            60.0,
            "waiting for a trainer of round 4 of 'text', open for 60 s: 0 of 2 are connected",
            id="no trainer is here",
        ),
    ],
)
def test_why_a_peer_is_stalled(waits: Any, linked: Sequence[bytes], since: float, now: float, words: str) -> None:
    assert why_stalled(waits, frozenset(linked), since, now) == words


async def test_the_time_of_waiting_begins_with_the_work_and_ends_with_a_decision() -> None:
    now = 100.0
    witness = NodeObserver(EventLog(), lambda: now)
    witness.record_pending_work(True)
    now = 130.0
    witness.record_pending_work(True)
    assert witness.pending_work_seconds == 30.0
    block = SimpleNamespace(time_ms=1_000)
    decided = SimpleNamespace(height=5, certificate=SimpleNamespace(signatures={}), decode=lambda: block)
    witness.record_step(SimpleNamespace(records=(), decided_blocks=(decided,)))
    witness.record_pending_work(True)
    assert (witness.pending_work_seconds, witness.last_decision_at) == (0.0, 1.0), "decided long ago, heard now"
    now = 140.0
    witness.record_pending_work(False)
    assert witness.pending_work_seconds == 0.0


# In a network --------------------------------------------------------------------------------------------------------


async def test_a_cut_off_peer_waits_and_an_idle_one_works(tmp_path: Path) -> None:
    async with network(tmp_path, founders=4, observers=1) as made:
        *voters, observer = made.seats
        await one_root(made.seats, await voters[0].start_job())
        await poll(lambda: len({seat.driver.state.height for seat in made.seats}) == 1)
        status = await service_of(voters[0]).status()
        assert (status.state, status.heights_behind) == ("working", 0)
        assert status.decided_seconds_ago is not None and status.decided_seconds_ago < 60
        assert (await service_of(observer).status()).state == "joining"
        for seat in voters[2:]:
            await seat.stop()
        await poll(lambda: len(voters[0].network.connected_peers()) == 2)
        status = await service_of(voters[0]).status()
        assert (status.state, status.waiting) == ("waiting", "waiting for a quorum: 2 of 4 voters are connected, 3 are needed")
        voters[0].network.keepalive = KeepaliveConfig(suspect_seconds=0.1)
        await poll(lambda: bool(voters[0].hearing.partition_text(voters[0].events.names)))
        status = await service_of(voters[0]).status()
        sides = [sorted(short_id(seat.public) for seat in side) for side in (voters[:2], voters[2:])]
        here, there = (", ".join(f"founder ({key})" for key in side) for side in sides)
        told = f"partition: 2 of 4 voters are connected ({here}), 3 are needed; not heard: {there}"
        assert (status.state, status.waiting) == ("waiting", told)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(voters[0].start_job)
            await poll(lambda: voters[0].driver.observer.pending_work_seconds > 0)
            nursery.cancel_scope.cancel()
