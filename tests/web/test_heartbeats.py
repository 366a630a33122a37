"""Leases of pages that are gone are released; clients without heartbeats keep theirs."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from curation.ledger.curation_state import AssignmentState, CurationState
from curation.ledger.transaction_types import ReleaseAssignment
from curation.service.annotators.annotator_api import HEARTBEAT_SECONDS_MAX, LeaseHeartbeats
from curation.service.annotators.answer_openings import AnswerStore, UnopenedAnswer
from curation.service.annotators.session_api import SessionApi
from curation.service.annotators.statement_batcher import StatementBatcher
from tests.waiting import patience_seconds
from tests.web.room import Room, assigned, enrolled, said
from tests.web.test_routes import founded, operator

A, B = bytes([1] * 32), bytes([2] * 32)


def test_an_assignment_lapses_once_a_while_after_its_last_heartbeat() -> None:
    beats = LeaseHeartbeats()
    assert beats.seconds_left(0.0) == HEARTBEAT_SECONDS_MAX  # a first one may come at once
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
        other = await said(bob.token, site)
        foreign = await said(site.ask, "POST", "/api/v1/heartbeat", {"assignments": [watched]}, other)
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
            beat = {"assignments": [task["assignment"]]}
            assert (await said(site.ask, "POST", "/api/v1/heartbeat", beat, token)).status == 200
        assert released == []
