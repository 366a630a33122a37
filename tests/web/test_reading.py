"""Public data, computed once a height; and leases that end with their pages or with their client's heartbeats."""

from __future__ import annotations

import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import trio

from curation.ledger.curation_state import Annotator, AssignmentState, CurationState
from curation.ledger.transaction_types import ReleaseAssignment
from curation.service import public_api
from curation.service.annotators.annotator_api import HEARTBEAT_SECONDS_MAX, LeaseHeartbeats
from curation.service.annotators.answer_openings import AnswerStore, UnopenedAnswer
from curation.service.annotators.session_api import SessionApi
from curation.service.annotators.statement_batcher import StatementBatcher
from curation.service.public_api import OPEN_EXPORTS_MAX, LeaderboardCache
from ledger.tables import Table
from ledger.tables.sparse_merkle_tree import BUCKET_ROWS_MAX
from tests.ledger.tables.memory_store import MemoryBucketStore
from tests.waiting import patience_seconds
from tests.web.client import Reply
from tests.web.room import Room, assigned, enrolled, said, settled, together
from tests.web.test_routes import founded, operator

COUNT = 500


def annotators() -> Table[Annotator]:
    rows = {
        hashlib.sha256(bytes([number % 256, number // 256])).digest(): Annotator(
            f"ann {number}", bytes(32), False, 1, accepted=number, points=number % 7
        )
        for number in range(COUNT)
    }
    table, store = Table(Annotator).with_rows(rows), MemoryBucketStore()
    store.save_table(table)
    return table


def test_the_leaders_are_those_with_most_points_and_of_a_block_only_what_it_changed_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[bytes] = []
    decoded = Table._decoded

    def counted(table: Table[Any], data: bytes) -> Any:
        read.append(data)
        return decoded(table, data)

    monkeypatch.setattr(Table, "_decoded", counted)
    leaders, table = LeaderboardCache(), annotators()

    def check(table: Table[Annotator]) -> None:
        rows = sorted(table.items(), key=lambda item: (-item[1].points, -item[1].accepted, item[0]))
        read.clear()
        assert [(row["annotator"], row["points"]) for row in leaders.top_annotators(table)] == [
            (key.hex(), row.points) for key, row in rows
        ]

    check(table)
    assert len(read) == COUNT
    check(table)
    assert not read
    key, last = min(table.items(), key=lambda item: item[1].points)
    table = table.with_rows({key: replace(last, points=1_000)})
    check(table)
    assert 0 < len(read) <= BUCKET_ROWS_MAX and leaders.top_annotators(table)[0]["name"] == last.name


@pytest.mark.real("sockets")
async def test_whatever_follows_from_the_height_is_made_once_a_height(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(name: str, make: Any) -> Any:
        def count(*arguments: Any) -> Any:
            made.append(name)
            return make(*arguments)

        return count

    monkeypatch.setattr(public_api, "project_alpha", counted("stats", public_api.project_alpha))
    monkeypatch.setattr(LeaderboardCache, "top_annotators", counted("leaderboard", LeaderboardCache.top_annotators))
    monkeypatch.setattr(public_api, "compute_agreement", counted("agreement", public_api.compute_agreement))
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        project = (await room.project(daemon, tasks=2)).project
        paths = {"stats": "/api/stats", "leaderboard": "/api/leaderboard", "agreement": f"/api/v1/projects/{project}/agreement"}
        for name, path in paths.items():
            made.clear()
            replies = await together(5, site.get, path)
            at = {reply.body["height"]: reply.body for reply in replies}  # a block may be applied between the requests
            assert all(reply.status == 200 and reply.body == at[reply.body["height"]] for reply in replies)
            assert set(made) == {name} and len(made) <= len(at)
        height = daemon.driver.state.height
        (ann,) = await enrolled(site, "ann")
        made.clear()
        for path in paths.values():
            (reply,) = await together(1, site.get, path)
            assert reply.body["height"] > height
        assert made == ["stats", "leaderboard"], "nothing was settled, so annotators agree as they did"
        (task,) = await assigned(site, ann)
        assert (await said(ann.submit, site, task["assignment"], (1,))).status == 201
        await settled(site, task["assignment"])
        made.clear()
        assert (await said(site.stats))["settled"] == 1
        (row,) = (await said(site.leaderboard))["rows"]
        assert (row["name"], row["accepted"]) == ("ann", 1)
        assert (await said(site.get, paths["agreement"])).status == 200
        assert made == list(paths)


@pytest.mark.real("sockets")
async def test_files_are_written_one_at_a_time_and_others_are_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered, go_on = threading.Event(), threading.Event()
    export = public_api.write_export

    def slow(*arguments: Any) -> None:
        entered.set()
        assert go_on.wait(60)
        export(*arguments)

    monkeypatch.setattr(public_api, "write_export", slow)
    monkeypatch.setattr(public_api, "TURN_WAIT_SECONDS", 0.1)
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        project = (await room.project(daemon)).project
        replies: list[Reply] = []

        async def ask() -> None:
            replies.append(await said(site.export, project))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.to_thread.run_sync(entered.wait)
            second = await said(site.export, project)
            assert (second.status, second.code, second.headers["retry-after"]) == (429, "too-many", "10")
            assert (await said(site.get, "/api/stats")).status == 200, "the peer answers meanwhile"
            monkeypatch.setattr(public_api, "TURN_WAIT_SECONDS", 60.0)
            go_on.set()
        assert [reply.status for reply in replies] == [200]
        assert (await said(site.export, project)).status == 200


@pytest.mark.real("sockets")
async def test_a_file_is_gone_when_it_is_sent_or_nobody_wants_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        project = (await room.project(daemon)).project
        path = f"/api/v1/projects/{project}/export"
        for method in ("GET", "HEAD") * OPEN_EXPORTS_MAX:
            reply = await said(site.ask, method, path)
            assert reply.status == 200 and reply.headers["content-type"] == "application/jsonl; charset=utf-8"
        monkeypatch.setattr(threading.BoundedSemaphore, "acquire", lambda self, blocking: False)
        reply = await said(site.get, path)
        assert (reply.status, reply.code) == (429, "too-many")


A, B = bytes([1] * 32), bytes([2] * 32)


def test_an_assignment_lapses_once_a_while_after_its_last_heartbeat() -> None:
    beats = LeaseHeartbeats()
    assert beats.seconds_left(0.0) == HEARTBEAT_SECONDS_MAX  # the first heartbeat may come at once
    beats.record_heartbeats([A, B], 0.0)
    beats.record_heartbeats([A], 30.0)
    assert beats.pop_lapsed(HEARTBEAT_SECONDS_MAX - 1) == []
    assert beats.seconds_left(HEARTBEAT_SECONDS_MAX - 1) == 1.0
    assert beats.pop_lapsed(HEARTBEAT_SECONDS_MAX) == [B] and beats.pop_lapsed(HEARTBEAT_SECONDS_MAX) == []
    assert beats.pop_lapsed(30.0 + HEARTBEAT_SECONDS_MAX) == [A]
    assert HEARTBEAT_SECONDS_MAX < 60


@pytest.mark.real("sockets")
async def test_a_task_of_a_closed_page_goes_to_somebody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curation.service.annotators.annotator_api.HEARTBEAT_SECONDS_MAX", 0.3)
    async with Room(tmp_path).serving() as (daemon, site):
        await founded(site, await operator(daemon), tasks=[{"text": "one"}, {"text": "two"}])
        ann, bob = await enrolled(site, "ann", "bob")
        watched, silent = (task["assignment"] for task in await assigned(site, ann, 2, 2))
        foreign = await said(site.ask, "POST", "/api/v1/heartbeat", {"assignments": [watched]}, await said(bob.token, site))
        assert (foreign.status, foreign.body) == (200, {"assignments": []})
        with monkeypatch.context() as patch:
            patch.setattr(SessionApi, "is_here", lambda self, peer: False)
            others = await said(site.ask, "POST", "/api/v1/heartbeat", {"assignments": [silent]}, ann.token(site))
        assert others.body == {"assignments": []}, "a lease that another peer took is that peer's to release"
        reply = await said(site.ask, "POST", "/api/v1/heartbeat", {"assignments": [watched]}, ann.token(site))
        assert (reply.status, reply.body) == (200, {"assignments": [watched]})
        (task,) = await assigned(site, bob, 2)
        rows = daemon.driver.state.module_state(CurationState).assignments
        states = [rows.get_record(bytes.fromhex(key)).state for key in (watched, silent)]  # type: ignore[union-attr]
        assert states == [AssignmentState.RELEASED, AssignmentState.LEASED] and task["assignment"] != watched
        assert (await said(bob.submit, site, task["assignment"], (0,))).status == 201
        assert (await said(ann.submit, site, watched, (0,))).status == 410
        assert (await said(ann.submit, site, silent, (0,))).status == 201


@pytest.mark.real("sockets, and a disk that is slow")
async def test_a_lease_whose_answer_is_on_its_way_is_not_released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curation.service.annotators.annotator_api.HEARTBEAT_SECONDS_MAX", 0.1)
    keeps, lapsed, keep, put = threading.Event(), threading.Event(), AnswerStore.store_answer, StatementBatcher.add_statement
    released = list[ReleaseAssignment]()

    class Watched(LeaseHeartbeats):
        def pop_lapsed(self, now: float) -> list[bytes]:
            found = super().pop_lapsed(now)
            if found:
                lapsed.set()
            return found

    def keep_late(self: AnswerStore, kept: UnopenedAnswer) -> None:
        keeps.set()
        assert lapsed.wait(patience_seconds())
        keep(self, kept)

    def put_watched(self: StatementBatcher, statement: Any, *more: Any) -> trio.Event:
        released.extend([statement] if isinstance(statement, ReleaseAssignment) else [])
        return put(self, statement, *more)

    monkeypatch.setattr("curation.service.annotators.annotator_api.LeaseHeartbeats", Watched)
    monkeypatch.setattr(AnswerStore, "store_answer", keep_late)
    monkeypatch.setattr(StatementBatcher, "add_statement", put_watched)
    async with Room(tmp_path).serving() as (daemon, site):
        await founded(site, await operator(daemon), tasks=[{"text": "one"}])
        (ann,) = await enrolled(site, "ann")
        (task,) = await assigned(site, ann)
        token = await said(ann.token, site)
        async with trio.open_nursery() as nursery:

            async def answer() -> None:
                assert (await said(ann.submit, site, task["assignment"], (0,))).status == 201

            nursery.start_soon(answer)
            assert await said(keeps.wait, patience_seconds())
            assert (await said(site.ask, "POST", "/api/v1/heartbeat", {"assignments": [task["assignment"]]}, token)).status == 200
        assert released == []
