"""Annotators at a real peer, with a client that shares no code with it, over real sockets."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from curation.ledger.curation_state import AssignmentState, CurationState, Redaction, page_key
from curation.ledger.transaction_types import AnswerCommitment, AnswerOpening, ReleaseAssignment
from curation.rpc import CurationRpc
from curation.service.annotators import annotator_api, statement_batcher
from curation.service.annotators.statement_batcher import Statement, StatementBatcher
from curation.service.public_api import PublicApi
from peer.runtime.transaction_submitter import TransactionSubmitter
from tests.waiting import patience
from tests.web.client import Person, Reply, Site, committed, receipt_holds
from tests.web.room import Room, assigned, enrolled, said, settled
from tests.web.test_routes import operator

pytestmark = pytest.mark.real("sockets")

SALT = b"s" * 16


@pytest.fixture
def room(tmp_path: Path) -> Iterator[Room]:
    yield Room(tmp_path)


def problem(reply: Reply) -> tuple[int, str]:
    return reply.status, reply.code


async def test_two_names_at_once_enrol_a_key_under_one(room: Room) -> None:
    ann = Person("ann")
    replies: list[Reply] = []

    async def enrol(who: Person, site: Site) -> None:
        replies.append(await said(who.enrol, site))

    async with room.serving() as (_, site):
        await said(lambda: site.network)
        async with trio.open_nursery() as nursery:
            for who in (ann, Person("bob", bytes(ann._secret))):
                nursery.start_soon(enrol, who, site)
    assert sorted(reply.status for reply in replies) == [201, 409], replies


async def test_people_enrol_label_and_read_what_was_decided(room: Room) -> None:
    async with room.serving() as (daemon, site):
        view = await room.project(daemon, tasks=3)
        network = await said(lambda: site.network)
        assert set(network) == {"name", "wire", "chain_id", "peer_key", "height", "time_ms", "sign_up"}
        assert (network["name"], network["sign_up"]) == ("lab", "open") and site.peer_key == daemon.driver.signer.public
        (ann,) = await enrolled(site, "ann")
        assert (await said(ann.enrol, site)).status in (200, 201), "the same wish again is no error"
        assert problem(await said(Person("bob", bytes(ann._secret)).enrol, site)) == (409, "already-enrolled")
        challenge = await said(ann.challenge, site)
        assert challenge.status == 201 and set(challenge.body) == {"nonce", "expires_ms"}
        assert re.fullmatch("[0-9a-f]{32}", challenge.body["nonce"])
        tasks = await assigned(site, ann, 8)
        assert sorted(task["text"] for task in tasks) == ["text 0", "text 1", "text 2"]
        assert all(
            set(task) == {"assignment", "task", "project", "name", "kind", "text", "options", "many", "display"} for task in tasks
        )
        assert {task["project"] for task in tasks} == {view.project} and tasks[0]["options"] == ["glad", "sad"]
        assert (await said(ann.tasks, site, 8)).body["tasks"] == tasks, "leases stay"
        assignment = tasks[0]["assignment"]
        reply = await said(ann.submit, site, assignment, (1,))
        assert reply.status == 201 and reply.body["annotation"] == assignment
        commitment = committed(bytes.fromhex(assignment), SALT, (1,))
        assert receipt_holds(reply.body["receipt"], site, assignment, commitment, reply.body["height"])
        assert not receipt_holds(reply.body["receipt"], site, assignment, commitment, reply.body["height"] + 1)
        again = await said(ann.submit, site, assignment, (1,))
        assert again.status == 200 and again.body == reply.body
        assert problem(await said(ann.submit, site, assignment, (0,))) == (409, "already-answered")
        assert problem(await said(ann.submit, site, assignment, (1,), b"t" * 16)) == (409, "already-answered")
        assert (await said(ann.skip, site, tasks[1]["assignment"], "I cannot read it")).status == 200
        assert (await said(ann.submit, site, tasks[2]["assignment"], (0,))).status == 201
        assert (await settled(site, assignment)).body == {
            "annotation": assignment, "state": "settled", "height": reply.body["height"], "label": [1]
        }  # fmt: skip
        stats = await said(site.stats)
        assert set(stats) == {"height", "state_root", "annotators", "annotations", "settled", "projects"}
        assert (stats["annotators"], stats["annotations"]) == (1, 2)
        (shown,) = stats["projects"]
        assert {"project", "name", "kind", "tasks", "settled", "alpha"} <= set(shown) and shown["tasks"] == 3
        (row,) = (await said(site.leaderboard))["rows"]
        assert set(row) == {"rank", "annotator", "name", "accepted", "points"} and (row["rank"], row["name"]) == (1, "ann")
        export = await said(site.export, view.project)
        lines = export.text.splitlines()
        assert export.status == 200 and len(lines) == stats["settled"] == 2
        assert all(f'"annotator": "{ann.key.hex()}"' in line for line in lines)
        assert problem(await said(site.export, view.project, "parquet")) == (400, "malformed")


async def test_each_refusal_has_its_status_and_code(room: Room) -> None:
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=6)
        ann, bob = await enrolled(site, "ann", "bob")
        (task,) = await assigned(site, ann)
        await said(bob.token, site)
        assignment, unknown = task["assignment"], "00" * 32

        async def submitted(by: Person = ann, token: str | None = None, **changes: Any) -> tuple[int, str]:
            return problem(
                await said(
                    site.ask,
                    "POST",
                    "/api/submit",
                    ann.statement(site, assignment, (1,), SALT) | changes,
                    by.token(site) if token is None else token,
                )
            )

        assert await submitted(token="") == (401, "unauthorized")
        assert await submitted(token="no such token") == (401, "unauthorized")
        assert problem(await said(site.get, "/api/tasks?limit=1", "x" * 32)) == (401, "unauthorized")
        assert await submitted(by=bob) == (403, "forbidden")
        assert await submitted(assignment=unknown) == (404, "not-found")
        assert await submitted(assignment=assignment.upper()) == (400, "malformed"), "bytes are in lower-case hex"
        assert await submitted(answer=[2]) == (422, "misfit")
        assert await submitted(answer=[0, 1]) == (422, "misfit")
        assert await submitted(answer="glad") == (400, "malformed")
        assert await submitted(answer=[0]) == (422, "bad-signature"), "signed for another answer"
        assert await submitted(salt="ab" * 16) == (422, "bad-signature")
        assert await submitted(signature="00" * 64) == (422, "bad-signature")
        assert await submitted(padding="x" * (64 << 10)) == (413, "too-large")
        for path in ("/api/v1/annotations/" + unknown, f"/api/v1/projects/{unknown}/export", "/api/v2"):
            assert problem(await said(site.get, path)) == (404, "not-found")
        assert problem(await said(site.get, "/api/v1/annotations/xyz")) == (400, "malformed")
        assert problem(await said(site.get, "/api/tasks?limit=9", ann.token(site))) == (400, "malformed")
        assert problem(await said(site.ask, "POST", "/api/v1/challenges", b"{")) == (400, "malformed")
        assert (await said(site.ask, "DELETE", "/api/tasks")).code == "method"
        assert problem(await said(bob.skip, site, assignment, "why not")) == (403, "forbidden")
        assert (await said(ann.skip, site, assignment, "unclear")).status == 200
        refused = await said(ann.submit, site, assignment, (0,))
        assert (problem(refused), refused.body["detail"]) == ((410, "gone"), "you have skipped this task")
        # Sessions and enrolment.
        challenge = (await said(ann.challenge, site)).body
        expires = challenge["expires_ms"]
        assert problem(await said(bob.begin, site, challenge["nonce"], expires)) == (401, "unauthorized"), "another's nonce"
        assert problem(await said(ann.begin, site, challenge["nonce"], expires, bytes(64))) == (422, "bad-signature")
        assert problem(await said(ann.begin, site, challenge["nonce"], 1)) == (422, "misfit")
        assert (await said(ann.begin, site, challenge["nonce"], expires)).status == 201
        assert problem(await said(ann.begin, site, challenge["nonce"], expires)) == (401, "unauthorized"), "used once"
        stranger = Person("eve")
        challenge = (await said(stranger.challenge, site)).body
        assert problem(await said(stranger.begin, site, **challenge)) == (403, "forbidden"), "not enrolled"
        assert problem(await said(Person("x" * 33).enrol, site)) == (422, "misfit")
        assert problem(
            await said(site.ask, "POST", "/api/v1/annotators", {"key": stranger.key.hex(), "name": "eve", "signature": "00" * 64})
        ) == (422, "bad-signature")


async def test_a_peer_for_invited_people_asks_for_an_invitation(room: Room) -> None:
    async with room.serving("invited", sign_up_invitations=("open sesame",)) as (_, site):
        assert (await said(lambda: site.network))["sign_up"] == "invited"
        ann = Person("ann")
        assert problem(await said(ann.enrol, site)) == (403, "forbidden")
        assert problem(await said(ann.enrol, site, "please")) == (403, "forbidden")
        assert (await said(ann.enrol, site, "open sesame")).status == 201


async def test_a_lease_that_is_over_is_gone_once_somebody_has_its_place(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curation.ledger.curation_module.LEASE_MS", 1_500)
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=1)
        ann, bob = await enrolled(site, "ann", "bob")
        (task,) = await assigned(site, ann)
        tasks = await assigned(site, bob)
        assert tasks[0]["task"] == task["task"] and tasks[0]["assignment"] != task["assignment"]
        assert problem(await said(ann.submit, site, task["assignment"], (0,))) == (410, "gone")
        assert (await said(bob.submit, site, tasks[0]["assignment"], (1,))).status == 201


async def test_a_lease_of_a_closed_project_is_not_shown_and_takes_the_place_of_no_other(room: Room) -> None:
    async with room.serving() as (daemon, site):
        api: CurationRpc = daemon.api  # type: ignore[assignment]
        await room.project(daemon, tasks=7, name="first")
        (ann,) = await enrolled(site, "ann")
        assert len(await assigned(site, ann, 7)) == 7
        second = await room.project(daemon, tasks=2, name="second")
        await api.set_project_phase("first", "closed")
        assert [task["project"] for task in await assigned(site, ann)] == [second.project]
        assert [task["project"] for task in await assigned(site, ann, 8)] == [second.project], "it has eight leases"


async def test_a_project_whose_tasks_are_not_here_takes_no_leases(room: Room) -> None:
    """The project's page is on no disk, so no peer could show the tasks of such leases."""
    async with room.serving() as (daemon, site):
        lost = await room.project(daemon, tasks=20, name="lost")
        page = daemon.driver.state.module_state(CurationState).pages.get_record(page_key(bytes.fromhex(lost.project), 0))
        assert page is not None
        (path,) = [path for path in (room.directory / "blobs").rglob("*") if path.name.startswith(page.digest.hex())]
    path.unlink()
    async with room.serving() as (daemon, site):
        (ann,) = await enrolled(site, "ann")
        assert await assigned(site, ann, 8, least=0) == []
        assert daemon.driver.state.module_state(CurationState).annotators.get_record(ann.key).leases == ()  # type: ignore[union-attr]
        here = await room.project(daemon, tasks=8, name="here")
        assert {task["project"] for task in await assigned(site, ann, 8, least=8)} == {here.project}


async def test_sixty_answers_a_minute_are_enough_whatever_the_session(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotator_api, "ANSWERS_PER_MINUTE", 3)
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=6)
        (ann,) = await enrolled(site, "ann")
        tasks = [task["assignment"] for task in await assigned(site, ann, 6)]
        for assignment in tasks[:3]:
            assert (await said(ann.submit, site, assignment, (1,))).status == 201
        assert (await said(ann.submit, site, tasks[0], (1,))).status == 200, "the same answer again is no other one"
        for anew in (False, True):
            await said(ann.token, site, anew=anew)
            reply = await said(ann.submit, site, tasks[3], (1,))
            assert problem(reply) == (429, "too-many") and 1 <= int(reply.headers["retry-after"]) <= 61


async def test_what_is_not_decided_in_time_is_accepted_and_what_cannot_be_is_told(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While no batch is decided, the peer stores an answer and cannot confirm an enrolment. Later both are decided."""
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=2)
        (ann,) = await enrolled(site, "ann")
        (task,) = await assigned(site, ann)
        hindered, go_on = StatementBatcher._decide, trio.Event()

        async def later(gatherer: StatementBatcher, taken: list[Any]) -> None:
            await go_on.wait()
            await hindered(gatherer, taken)

        for module in (annotator_api, statement_batcher):
            monkeypatch.setattr(module, "DECISION_WAIT_SECONDS", 1.0)
        monkeypatch.setattr(StatementBatcher, "_decide", later)
        reply = await said(ann.submit, site, task["assignment"], (1,))
        assert (reply.status, reply.body) == (202, {"annotation": task["assignment"]})
        assert problem(await said(ann.submit, site, task["assignment"], (0,))) == (409, "already-answered"), (
            "the first one counts"
        )
        assert (await said(ann.submit, site, task["assignment"], (1,))).status == 202
        assert problem(await said(site.annotation, task["assignment"])) == (404, "not-found")
        bob = Person("bob")
        refusal = await said(bob.enrol, site)
        assert problem(refusal) == (503, "no-quorum") and int(refusal.headers["retry-after"]) > 0
        assert problem(await said(bob.enrol, site)) == (503, "no-quorum")
        monkeypatch.undo()
        go_on.set()
        assert (await settled(site, task["assignment"])).body["label"] == [1]
        assert (await said(ann.submit, site, task["assignment"], (1,))).status == 200
        assert (await said(bob.enrol, site)).status == 201
        assert (await said(site.stats))["annotators"] == 2


async def test_a_restart_between_commitment_and_opening_loses_nothing(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    put = StatementBatcher.add_statement

    def without_openings(gatherer: StatementBatcher, statement: Any, *done: trio.Event) -> trio.Event:
        return trio.Event() if isinstance(statement, AnswerOpening) else put(gatherer, statement, *done)

    async with room.serving() as (daemon, site):
        view = await room.project(daemon, tasks=2, votes=7)
        ann, bob = await enrolled(site, "ann", "bob")
        first = await assigned(site, ann, 2)
        assert (await said(ann.submit, site, first[0]["assignment"], (1,), b"1" * 16)).status == 201
        assert (await said(ann.submit, site, first[1]["assignment"], (0,), b"2" * 16)).status == 201
        second = {task["task"]: task["assignment"] for task in await assigned(site, bob, 2)}
        assert second.keys() == {task["task"] for task in first}
        monkeypatch.setattr(StatementBatcher, "add_statement", without_openings)
        assert (await said(bob.submit, site, second[first[0]["task"]], (1,), b"3" * 16)).status == 201
        reply = await said(site.annotation, first[0]["assignment"])
        assert (reply.body["state"], reply.body["label"]) == ("committed", None), "all are committed, nothing is opened"
    monkeypatch.setattr(StatementBatcher, "add_statement", put)
    async with room.serving() as (daemon, site):
        assert (await settled(site, first[0]["assignment"])).body["label"] == [1]
        assert (await said(bob.submit, site, second[first[1]["task"]], (0,), b"4" * 16)).status == 201
        assert (await settled(site, first[1]["assignment"])).body["label"] == [0]
        lines = (await said(site.export, view.project)).text.splitlines()
        assert len(lines) == 2 and all(line.count('"annotator"') == 2 for line in lines)


async def test_a_restart_before_the_commitment_is_decided_loses_nothing(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    decide = StatementBatcher._decide

    async def without_commits(gatherer: StatementBatcher, taken: list[Any]) -> None:
        await decide(gatherer, [(said, done) for said, done in taken if not isinstance(said, AnswerCommitment)])

    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=2)
        (ann,) = await enrolled(site, "ann")
        first, second = await assigned(site, ann, 2)
        monkeypatch.setattr(StatementBatcher, "_decide", without_commits)
        monkeypatch.setattr(annotator_api, "DECISION_WAIT_SECONDS", 0.5)
        assert (await said(ann.submit, site, first["assignment"], (1,))).status == 202
    async with room.serving() as (_, site):
        await said(ann.token, site, anew=True)
        assert problem(await said(ann.submit, site, first["assignment"], (0,))) == (409, "already-answered"), (
            "not lost, not changed"
        )
        assert (await said(ann.submit, site, second["assignment"], (0,))).status == 202
    monkeypatch.setattr(StatementBatcher, "_decide", decide)
    async with room.serving() as (_, site):
        assert (await settled(site, first["assignment"])).body["label"] == [1]
        assert (await settled(site, second["assignment"])).body["label"] == [0]


async def test_two_that_wait_for_one_answer_are_told_alike_that_it_was_passed_over(
    room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit, entered, go_on, replies = annotator_api.AnnotatorApi.submit_answer, list[int](), trio.Event(), list[tuple[int, str]]()

    async def counted(site: annotator_api.AnnotatorApi, *given: Any, **named: Any) -> Any:
        entered.append(1)
        return await submit(site, *given, **named)

    monkeypatch.setattr(annotator_api.AnnotatorApi, "submit_answer", counted)
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=1)
        (ann,) = await enrolled(site, "ann")
        (task,) = await assigned(site, ann)

        async def passes_over(gatherer: StatementBatcher, taken: list[Any]) -> None:
            await go_on.wait()
            for statement, done in taken:
                gatherer._events.pop(statement, None)
                done.set()

        async def ask() -> None:
            replies.append(problem(await said(ann.submit, site, task["assignment"], (1,))))

        monkeypatch.setattr(StatementBatcher, "_decide", passes_over)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            nursery.start_soon(ask)
            while len(entered) < 2:  # noqa: ASYNC110
                await trio.sleep(0.01)
            go_on.set()
        assert replies == [(410, "gone")] * 2


async def test_a_slip_in_a_call_costs_that_call_and_not_the_peer(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    async def slips(site: PublicApi) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(PublicApi, "network_stats", slips)
    async with room.serving() as (_, site):
        assert problem(await said(site.get, "/api/stats")) == (500, "internal")
        assert (await said(site.get, "/api/leaderboard")).status == 200


async def test_a_lease_whose_page_is_nowhere_does_not_block_its_annotator(room: Room) -> None:
    """An author can replace a page that has leases with a page that nobody holds."""
    async with room.serving() as (daemon, site):
        projects = {
            view.project
            for view in (await room.project(daemon, tasks=2, name="a"), await room.project(daemon, tasks=2, name="b"))
        }
        (ann,) = await enrolled(site, "ann")
        (first,) = await assigned(site, ann)
        state: CurationState = daemon.driver.state.module_state(CurationState)
        project, lease = bytes.fromhex(first["project"]), state.assignments.get_record(bytes.fromhex(first["assignment"]))
        page = state.pages.get_record(page_key(project, 0))
        assert page is not None and lease is not None
        await TransactionSubmitter(daemon.driver).submit(
            "curation/redact", Redaction(project, 0, 1 - lease.number, page.digest, b"n" * 32, 99)
        )
        (other,) = await assigned(site, ann)
        assert {first["project"], other["project"]} == projects
        assert await assigned(site, ann) == [other]


async def test_somebody_chooses_among_projects_and_gives_leases_of_others_back(room: Room) -> None:
    async with room.serving() as (daemon, site):
        other = (await room.project(daemon, tasks=16)).project
        ann, bob = await enrolled(site, "ann", "bob")
        held = await assigned(site, ann, 8, 8)
        chosen = (await room.project(daemon, tasks=6, name="second")).project
        watched = held[0]["assignment"]
        heartbeat = await said(site.ask, "POST", "/api/v1/heartbeat", {"assignments": [watched]}, ann.token(site))
        assert heartbeat.body == {"assignments": [watched]}
        # All eight leases belong to the other project. Three of those without a heartbeat are released.
        with patience():
            tasks = await assigned(site, ann, 3, 3, chosen)
        assert {task["project"] for task in tasks} == {chosen} and {task["project"] for task in held} == {other}
        rows = daemon.driver.state.module_state(CurationState).assignments
        states = [rows.get_record(bytes.fromhex(task["assignment"])).state for task in held]  # type: ignore[union-attr]
        assert states[0] is AssignmentState.LEASED and states.count(AssignmentState.RELEASED) == 3
        # Answers to released tasks count while nobody else has their places.
        released = held[states.index(AssignmentState.RELEASED)]["assignment"]
        assert (await said(ann.submit, site, released, (1,))).status == 201
        for _ in range(2):
            reply = await said(ann.release, site, watched)
            assert (reply.status, reply.body) == (200, {"assignment": watched, "state": "released"})
        assert problem(await said(bob.release, site, watched)) == (403, "forbidden")
        assert problem(await said(ann.release, site, released)) == (410, "gone")
        assert problem(await said(ann.tasks, site, 1, "00" * 32)) == (404, "not-found")
        assert problem(await said(ann.tasks, site, 1, "moods")) == (400, "malformed")
        assert (await said(site.ask, "POST", f"/api/v1/projects/{chosen}/close", {}, await operator(daemon))).status == 200
        refused = await said(ann.tasks, site, 1, chosen)
        assert problem(refused) == (404, "not-found") and chosen in refused.body["detail"]
        assert {task["project"] for task in await assigned(site, ann, 8)} == {other}


async def test_where_a_chosen_project_has_no_task_left_nothing_is_decided(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    async with room.serving() as (daemon, site):
        chosen = (await room.project(daemon, tasks=1)).project
        await room.project(daemon, tasks=4, name="second")
        (ann,) = await enrolled(site, "ann")
        held = await assigned(site, ann, 1, 1, chosen)
        monkeypatch.delattr(StatementBatcher, "add_statement")  # every lease request fails
        assert await assigned(site, ann, 2, 1, chosen) == held


def first_release(monkeypatch: pytest.MonkeyPatch) -> trio.Event:
    """Return an event that is set when a release waits for its decision."""
    put, waits = StatementBatcher.add_statement, trio.Event()

    def noted(gatherer: StatementBatcher, statement: Statement, done: trio.Event | None = None) -> trio.Event:
        if isinstance(statement, ReleaseAssignment):
            waits.set()
        return put(gatherer, statement, done)

    monkeypatch.setattr(StatementBatcher, "add_statement", noted)
    return waits


async def test_no_more_leases_are_given_back_than_a_chosen_project_needs(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds also if other blocks are decided before the one with the releases."""
    waits = first_release(monkeypatch)
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=8)
        (ann,) = await enrolled(site, "ann")
        await assigned(site, ann, 8, 8)
        chosen = (await room.project(daemon, tasks=6, name="second")).project
        monkeypatch.setattr(statement_batcher, "BATCH_LINGER_SECONDS", 1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(assigned, site, ann, 3, 3, chosen)
            await waits.wait()
            await room.project(daemon, tasks=1, name="third")
        rows = daemon.driver.state.module_state(CurationState).assignments
        # type: ignore[union-attr]
        leased = [
            rows.get_record(lease)
            for lease in daemon.driver.state.module_state(CurationState).annotators.get_record(ann.key).leases
        ]
        assert [row.project.hex() == chosen for row in leased if row is not None].count(False) == 5


async def test_a_lease_that_is_being_given_back_is_no_task(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = first_release(monkeypatch)
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=1)
        (ann,) = await enrolled(site, "ann")
        (task,) = await assigned(site, ann)
        before = daemon.driver.state.module_state(CurationState).assignments.get_record(bytes.fromhex(task["assignment"]))
        monkeypatch.setattr(statement_batcher, "BATCH_LINGER_SECONDS", 1.0)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(said, ann.release, site, task["assignment"])
            await waits.wait()
            (again,) = await assigned(site, ann)
        assert again == task
        after = daemon.driver.state.module_state(CurationState).assignments.get_record(bytes.fromhex(task["assignment"]))
        assert before is not None and after is not None and after.deadline_ms > before.deadline_ms, "the task was leased anew"


async def test_an_answer_waits_for_the_release_of_its_lease(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = first_release(monkeypatch)
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=1)
        (ann,) = await enrolled(site, "ann")
        (task,) = await assigned(site, ann)
        monkeypatch.setattr(statement_batcher, "BATCH_LINGER_SECONDS", 1.0)
        replies: list[Reply] = []

        async def release() -> None:
            replies.append(await said(ann.release, site, task["assignment"]))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(release)
            await waits.wait()
            assert (await said(ann.submit, site, task["assignment"], (1,))).status == 201
        assert replies[0].body == {"assignment": task["assignment"], "state": "released"}
        assert daemon.driver.state.module_state(CurationState).passed_over == 0


async def test_an_annotator_gives_back_so_many_leases_at_once(room: Room, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(annotator_api, "GIVE_BACK_BURST", 2)
    monkeypatch.setattr(annotator_api, "GIVE_BACK_INTERVAL_SECONDS", 3_600.0)
    async with room.serving() as (daemon, site):
        await room.project(daemon, tasks=8)
        ann, bob = await enrolled(site, "ann", "bob")
        tasks = [task["assignment"] for task in await assigned(site, ann, 4, 4)]
        assert (await said(ann.release, site, tasks[0])).status == 200
        assert (await said(ann.skip, site, tasks[1], "no")).status == 200
        assert problem(await said(ann.release, site, tasks[2])) == (429, "too-many")
        assert problem(await said(ann.skip, site, tasks[2], "no")) == (429, "too-many")
        assert (await said(ann.submit, site, tasks[2], (0,))).status == 201
        (other,) = await assigned(site, bob)
        assert (await said(bob.release, site, other["assignment"])).status == 200
