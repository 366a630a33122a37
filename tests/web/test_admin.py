"""Pages and calls of operators over HTTP at a real peer, and their protection against everybody else."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import trio

from curation.import_export.task_import import TaskWithGold
from curation.ledger.curation_state import CurationState, ProjectPhase
from curation.service.access_control import AccessControl
from curation.service.project_author import ProjectAuthor, digest_tasks
from curation.tasks.task_pages import AnnotationTask
from tests.waiting import patience
from tests.web.client import Person, Reply, Site
from tests.web.room import Room, assigned, enrolled, said
from tests.web.test_routes import disputed, founded, operator
from web.calls import HttpProblem

ADMIN = "/api/v1/admin"


async def signed_in(site: Site, token: str, headers: dict[str, str] | None = None) -> Reply:
    return await said(site.ask, "POST", f"{ADMIN}/sign-in", {"token": token}, "", headers)


def browser(site: Site, reply: Reply) -> dict[str, str]:
    cookie = reply.headers["set-cookie"].partition(";")[0]
    return {"Cookie": cookie, "Origin": f"http://{site.host}:{site.port}", "X-Folkmoot": "1"}


async def log(site: Site, token: str) -> list[tuple[str, str, str]]:
    entries = (await said(site.get, f"{ADMIN}/log", token)).body["entries"]
    return [(entry["action"], entry["about"], entry["result"]) for entry in entries]


@pytest.fixture
def room(tmp_path: Path) -> Room:
    return Room(tmp_path)


@pytest.mark.real("sockets")
async def test_of_a_file_that_is_refused_nothing_is_kept_until_somebody_looks_for_cycles(room: Room) -> None:
    async with room.serving() as (daemon, site):
        token, view = await operator(daemon), await room.project(daemon)
        gc.collect()
        gc.disable()
        try:
            reply = await said(site.ask, "POST", f"/api/v1/projects/{view.project}/tasks?format=csv", b"none", token)
            assert reply.code == "misfit"
            with patience():
                while any(type(thing) is HttpProblem for thing in gc.get_objects()):  # noqa: ASYNC110 - no event announces it
                    await trio.sleep(0.05)
        finally:
            gc.enable()


@pytest.mark.real("sockets")
async def test_what_failed_stands_in_the_log_as_what_nobody_knows(monkeypatch: pytest.MonkeyPatch, room: Room) -> None:
    async def fails(founding: ProjectAuthor, project: bytes, phase: ProjectPhase) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(ProjectAuthor, "set_phase", fails)
    async with room.serving() as (daemon, site):
        token, view = await operator(daemon), await room.project(daemon)
        assert (await said(site.ask, "POST", f"/api/v1/projects/{view.project}/pause", {}, token)).code == "internal"
        assert await log(site, token) == [("pause", "project 'moods'", "cut off")]


@pytest.mark.real("sockets")
async def test_a_token_is_exchanged_for_a_session_that_ends_with_it(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        for wrong in ("x" * 32, token[1:]):
            assert (await signed_in(site, wrong)).code == "unauthorized"
        assert await log(site, token) == [("sign in", "one or more attempts with an invalid token", "unauthorized")]
        assert (await signed_in(site, token, {"Origin": "http://evil.example"})).code == "forbidden"
        reply = await signed_in(site, token)
        parts = {part.strip().lower() for part in reply.headers["set-cookie"].split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/"} <= parts and reply.body["seconds"] > 80_000
        assert reply.status == 201 and "token" not in reply.body and token not in str(reply.headers)
        own = browser(site, reply)
        assert (await said(site.ask, "GET", f"{ADMIN}/health", None, "", own)).status == 200
        assert (await signed_in(site, own["Cookie"].partition("=")[2])).code == "unauthorized", "a session begins no other one"
        again = browser(site, await signed_in(site, token, {"Cookie": own["Cookie"]}))
        assert (await said(site.ask, "GET", f"{ADMIN}/health", None, "", own)).code == "unauthorized", "a new one at each sign-in"
        for changed in ({"X-Folkmoot": ""}, {"Origin": ""}, {"Origin": "http://evil.example"}):
            assert (
                await said(
                    site.ask,
                    "POST",
                    f"{ADMIN}/invite",
                    None,
                    "",
                    {name: value for name, value in (again | changed).items() if value},
                )
            ).code == "forbidden", changed
        assert (await said(site.ask, "POST", f"{ADMIN}/sign-out", None, "", again)).status == 200
        assert (await said(site.ask, "GET", f"{ADMIN}/health", None, "", again)).code == "unauthorized"
        last = browser(site, await signed_in(site, token))
        assert await daemon.api.revoke_operator_tokens() == 1  # type: ignore[attr-defined]
        assert (await said(site.ask, "GET", f"{ADMIN}/health", None, "", last)).code == "unauthorized"


@pytest.mark.real("sockets")
async def test_health_tells_of_the_disk_the_queues_and_the_versions(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        while (body := (await said(site.get, f"{ADMIN}/health", token)).body)["state"] != "working":
            assert body["problem"].startswith("behind: ")
        assert body["problem"] == "" and body["heights_behind"] <= 1
        assert body["disk"]["used_bytes"] > 0 and 0 < body["disk"]["free_bytes"] <= body["disk"]["total_bytes"]
        assert body["memory_bytes"] > 1 << 20 and body["queues"]["statements_waiting"] == 0
        assert {"module": "curation", "active_version": 1, "known_versions": [1]} in body["versions"]["modules"]
        assert (await said(site.get, f"{ADMIN}/alerts", token)).body == {"alerts": []}


@pytest.mark.real("sockets")
async def test_whoever_is_refused_gets_no_more_tasks_here_also_after_a_restart(room: Room) -> None:
    ann, bob = Person("ann"), Person("bob")
    async with room.serving() as (daemon, site):
        token = await operator(daemon)
        await room.project(daemon, tasks=5)
        for person in (ann, bob):
            assert (await said(person.enrol, site)).status == 201
        (task,) = await assigned(site, ann)
        path = f"{ADMIN}/people/{ann.key.hex()}"
        assert (await said(site.ask, "POST", f"{path}/refuse", None, token)).body["is_refused"] is True
        assert (await said(ann.tasks, site)).code == "forbidden" and len(await assigned(site, bob)) == 1
        assert (await said(ann.submit, site, task["assignment"], (0,))).status == 201, "what it has it may answer"
        rows = (await said(site.get, f"{ADMIN}/people?search=an", token)).body["people"]
        assert [(row["name"], row["is_refused"], row["is_here"], row["answers"]) for row in rows] == [("ann", True, True, 1)]
        assert (await said(site.ask, "POST", f"{ADMIN}/people/{'00' * 32}/refuse", None, token)).code == "not-found"
    async with room.serving() as (daemon, site):
        assert (await said(ann.tasks, site)).code == "forbidden"
        assert daemon.driver.state.module_state(CurationState).annotators.get_record(ann.key).leases == ()  # type: ignore[union-attr]
        assert (await said(site.ask, "POST", f"{path}/allow", None, token)).body["is_refused"] is False
        assert len(await assigned(site, ann)) == 1


@pytest.mark.real("sockets")
async def test_an_invitation_of_an_operator_enrols_one_annotator(tmp_path: Path) -> None:
    async with Room(tmp_path).serving("invited") as (daemon, site):
        made = (await said(site.ask, "POST", f"{ADMIN}/invite", None, await operator(daemon))).body
        assert made["path"] == f"/join#{made['invitation']}"
        assert (await said(Person("ann").enrol, site, made["invitation"])).status == 201
        assert (await said(Person("bob").enrol, site, made["invitation"])).code == "forbidden"


@pytest.mark.real("sockets")
async def test_a_job_is_started_listed_and_cancelled(tmp_path: Path) -> None:
    async with Room(tmp_path).serving(role="full") as (daemon, site):
        token = await operator(daemon)

        async def train(**more: Any) -> Reply:
            return await said(
                site.ask,
                "POST",
                f"{ADMIN}/jobs",
                {"name": "proverbs", "rounds": 300, "overrides": {"byzantine_max": "0"}} | more,
                token,
            )

        assert (await train(data="/etc/passwd")).code == "malformed", "no path from a request to the disk"
        assert (await train(overrides={"nonsense": "1"})).code == "refused"
        made = await train()
        assert made.status == 201, made
        (job,) = (await said(site.get, f"{ADMIN}/jobs", token)).body["jobs"]
        assert (job["job"], job["name"], job["rounds"]) == (made.body["job"], "proverbs", 300)
        cancel = f"{ADMIN}/jobs/{job['job']}/cancel"
        assert "has ended" in (await said(site.ask, "POST", cancel, None, token)).body["said"]
        assert (await said(site.ask, "POST", cancel, None, token)).code == "refused"
        assert (await log(site, token))[:2] == [
            ("cancel", f"job {job['job'][:8]}", "refused"),
            ("cancel", f"job {job['job'][:8]}", "done"),
        ]


@pytest.mark.real("sockets")
async def test_the_log_names_who_did_what_outlives_a_restart_and_is_bounded(monkeypatch: pytest.MonkeyPatch, room: Room) -> None:
    async with room.serving() as (daemon, site):
        first, second = await operator(daemon), await operator(daemon)
        project = (await founded(site, first))["project"]
        assert (
            await said(
                site.ask, "POST", f"/api/v1/projects/{project}/pause", None, "", browser(site, await signed_in(site, second))
            )
        ).status == 200
    async with room.serving() as (_, site):
        entries = (await said(site.get, f"{ADMIN}/log", first)).body["entries"]
        assert [(entry["action"], entry["result"]) for entry in entries] == [
            ("pause", "done"),
            ("sign in", "done"),
            ("make", "done"),
        ]
        doors = AccessControl(room.directory / "services" / "serve")
        names = [doors.find_operator(token) for token in (second, second, first)]
        assert [entry["operator"] for entry in entries] == names and names[0] != names[2]
        monkeypatch.setattr("curation.service.access_control.ENTRIES_MAX", 2)
        await said(site.ask, "POST", f"/api/v1/projects/{project}/open", None, first)
        assert [action for action, *_ in await log(site, first)] == ["open", "pause"]
        assert (await said(site.get, f"{ADMIN}/log?limit=1&before={entries[0]['number']}", first)).body["entries"] == []


@pytest.mark.real("sockets")
async def test_annotators_and_strangers_see_and_do_nothing(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        await operator(daemon)
        (ann,) = await enrolled(site, "ann")
        session = await said(ann.token, site)
        for path in ("health", "alerts", "people", "log", "jobs"):
            assert (await said(site.get, f"{ADMIN}/{path}")).status == 401
            assert (await said(site.get, f"{ADMIN}/{path}", "x" * 32)).status == 401
            assert (await said(site.get, f"{ADMIN}/{path}", session)).status == 403


# Projects ------------------------------------------------------------------------------------------------------------


@pytest.mark.real("sockets")
async def test_a_file_is_seen_before_it_is_imported_and_each_line_that_is_no_task_is_named(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)

        async def sends(path: str, data: bytes, who: str = token) -> Reply:
            return await said(site.ask, "POST", f"/api/v1/projects{path}", data, who)

        draft = "/check?kind=label&options=glad%0Asad&format="
        good = b'{"text": "one", "gold": "sad"}\n{"text": "two"}\n'
        found = (await sends(f"{draft}jsonl", good)).body
        assert (found["count"], found["items"], found["problems"]) == (2, 0, [])
        assert found["preview"][0] == {"text": "one", "items": [], "suggestion": None, "gold": [1]}
        bad = b'text,gold\n"a\nb",glad\n ,sad\none,angry\ntwo,sad,more\n'
        problems = [
            "moods.csv:4: the text is empty",
            "moods.csv:5: gold 'angry' is not one of the options: glad, sad",
            "moods.csv:6: this line does not have the columns of the first line",
        ]
        for name, shown in (("moods.txt", "moods.txt"), ("moods.csv", "tasks.jsonl")):
            found = (await sends(f"{draft}jsonl&name={name}", b"{}")).body
            assert found["problems"] == [f"{shown}:1: the text is empty"]
        assert (await sends(f"{draft}csv&name=moods.csv", bad)).body == {
            "count": 0,
            "items": 0,
            "preview": [],
            "problems": problems,
        }
        assert (await sends("/check?kind=label&options=glad&format=csv", bad)).code == "misfit", "one option is no choice"
        project = await empty(site, token)
        path = f"/{project}/tasks?format="
        assert (await sends(f"{path}csv&name=moods.csv", bad)).body["detail"].split("\n") == problems
        assert (await log(site, token))[0] == ("import", "moods.csv into project 'moods'", "misfit")
        assert (await sends(f"{path}jsonl&check=1", good)).body["count"] == 2
        assert await tasks_of(site, token, project) == 0, "nothing is imported yet"
        made = await sends(f"{path}jsonl", good)
        assert (made.status, made.body["tasks"]) == (201, 2)
        assert (
            await sends(
                f"{path}json", json.dumps([{"data": {"text": "three"}, "predictions": 5}, {"data": {"text": "four"}}]).encode()
            )
        ).body["tasks"] == 4
        # This body is larger than other calls accept.
        large = b"".join(b'{"text": "%d %s"}\n' % (number, b"x" * 400) for number in range(600))
        assert len(large) > 64 << 10 and (await sends(f"{path}jsonl", large)).body["tasks"] == 604
        assert (await sends(f"{path}jsonl", b"x" * ((16 << 20) + 1))).code == "too-large"


@pytest.mark.real("sockets")
@pytest.mark.real("a site on a socket")
async def test_a_file_is_imported_once_by_http_and_its_labels_are_told(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        project = await empty(site, token)

        async def sends(query: str, data: bytes | dict[str, Any]) -> Reply:
            return await said(site.ask, "POST", f"/api/v1/projects{query}", data, token)

        data = "text;label\nCafé;sad\ntwo;angry\n".encode("windows-1252")
        path = f"/{project}/tasks?format=csv&name=moods.tsv"
        draft = (await sends("/check?kind=label&options=glad%0Asad&format=csv&name=moods.tsv", data)).body
        assert (draft["count"], draft["preview"][0]["suggestion"]) == (2, [1]) and "already" not in draft
        assert [note[:38] for note in draft["notes"]] == [
            "moods.tsv is read as Windows-1252, wit",
            "1 label of 'label' became a suggestion",
            "1 label of 'label' left out (moods.tsv",
        ]
        wrong = await sends(f"{path}&gold_from=label", data)
        assert (wrong.code, wrong.body["detail"]) == (
            "misfit",
            "moods.tsv:3: label 'angry' is not one of the options: glad, sad",
        )
        made = await sends(path, data)
        assert (made.status, made.body["tasks"], made.body["notes"]) == (201, 2, draft["notes"])
        refused = await sends(path, data)
        assert (refused.status, refused.code) == (409, "already-imported")
        assert refused.body["detail"].endswith("so nothing changed; again=1 adds them once more")
        assert (await sends(f"{path}&check=1", data)).body["already"] == await tasks_of(site, token, project) == 2
        draft = (await sends("/check?kind=label&options=glad%0Asad&format=csv&name=moods.tsv", data)).body
        assert "project 'moods' already has these tasks" in draft["notes"]
        assert (await sends(f"{path}&again=1", data)).body["tasks"] == 4
        more = await sends(f"/{project}/tasks?gold_from=label", {"tasks": [{"text": "three", "label": "sad"}]})
        assert (more.status, more.body["tasks"], "notes" in more.body) == (201, 5, False)
        numbers = {"name": "stars", "kind": "rating", "options": ["0", "1", "2"], "tasks": [{"text": "a", "label": 1}]}
        assert "became a suggestion" in (await sends("", numbers)).body["notes"][0]
        numbers["tasks"] = [{"text": "a", "gold": 3}]
        assert (
            "gold '3' is not one of the options: 0, 1, 2; by its position it would be '2'"
            in (await sends("", numbers)).body["detail"]
        )


@pytest.mark.real("sockets")
async def test_a_large_body_of_a_stranger_is_not_read(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        await operator(daemon)
        project = await empty(site, await operator(daemon))
        async with await trio.open_tcp_stream(site.host, site.port) as stream:
            await stream.send_all(
                f"POST /api/v1/projects/{project}/tasks?format=csv HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer x\r\n"
                f"Content-Length: {8 << 20}\r\n\r\n".encode()
            )
            assert b" 401 " in await stream.receive_some()


@pytest.mark.real("sockets")
async def test_an_import_goes_on_when_it_takes_longer_than_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add, go_on = ProjectAuthor.add_tasks, trio.Event()

    async def takes_long(founding: ProjectAuthor, project: bytes, tasks: list[TaskWithGold]) -> None:
        await go_on.wait()
        await add(founding, project, tasks)

    monkeypatch.setattr(ProjectAuthor, "add_tasks", takes_long)
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        project = await empty(site, token)
        path, data = f"/api/v1/projects/{project}/tasks?format=jsonl", b'{"text": "one"}\n' * 3_000
        monkeypatch.setattr("curation.service.operators.project_api.DECISION_WAIT_SECONDS", 0.0)
        assert (await said(site.ask, "POST", path, data, token)).status == 202
        assert (await said(site.ask, "POST", path, data, token)).code == "too-many"
        go_on.set()
        while await tasks_of(site, token, project) < 3_000:
            pass
        while ("import", "3000 tasks into project 'moods'", "done") not in await log(site, token):
            pass


@pytest.mark.real("sockets")
async def test_an_import_that_a_stop_cuts_off_is_noted_and_its_first_part_stays(
    monkeypatch: pytest.MonkeyPatch, room: Room
) -> None:
    monkeypatch.setattr("curation.service.operators.project_api.DECISION_WAIT_SECONDS", 0.0)
    async with room.serving() as (daemon, site):
        token = await operator(daemon)
        project = await empty(site, token)
        assert (
            await said(site.ask, "POST", f"/api/v1/projects/{project}/tasks?format=jsonl", b'{"text": "one"}\n' * 90_000, token)
        ).status == 202
        while not await tasks_of(site, token, project):
            pass
    async with room.serving() as (_, site):
        assert 0 < await tasks_of(site, token, project) < 90_000
        assert (await log(site, token))[0] == ("import", "90000 tasks into project 'moods'", "cut off")


async def empty(site: Site, token: str) -> str:
    made = (
        await said(site.ask, "POST", "/api/v1/projects", {"name": "moods", "kind": "label", "options": ["glad", "sad"]}, token)
    ).body
    assert (made["tasks"], made["is_mine"], made["options"]) == (0, True, ["glad", "sad"])
    project: str = made["project"]
    return project


async def tasks_of(site: Site, token: str, project: str) -> int:
    count: int = (await said(site.get, f"/api/v1/projects/{project}", token)).body["tasks"]
    return count


@pytest.mark.real("sockets")
async def test_the_author_reviews_what_needs_it_first_decides_and_redacts(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        project = (await founded(site, token, votes=2))["project"]
        path = f"/api/v1/projects/{project}"
        ann, bob = await enrolled(site, "ann", "bob")
        first, second, third, fourth = await assigned(site, ann, 4)
        await disputed(site, first, ann, bob)
        assert (await said(ann.submit, site, second["assignment"], (0,))).status == 201
        (lease,) = [task for task in await assigned(site, bob, 8) if task["task"] == second["task"]]
        assert (await said(bob.submit, site, lease["assignment"], (0,))).status == 201
        assert (await said(ann.skip, site, third["assignment"], "unclear")).status == 200
        while (await said(site.stats))["settled"] < 1:
            pass

        async def review(query: str = "") -> list[dict[str, Any]]:
            found, after = [], ""
            while True:  # page by page
                body = (await said(site.get, f"{path}/review?limit=1{query}{after}", token)).body
                found += body["tasks"]
                if body["next"] is None:
                    return found
                after = f"&after={body['next']}"

        found = await review()
        assert [(row["state"], row["text"]) for row in found] == [
            ("waiting", first["text"]), ("skipped", third["text"]), ("begun", fourth["text"]), ("settled", second["text"]),
        ]  # fmt: skip
        assert sorted((vote["name"], vote["answer"]) for vote in found[0]["votes"]) == [("ann", [1]), ("bob", [0])]
        assert (found[0]["suggestion"], found[1]["skips"], found[3]["label"]) == ([1], 1, [0])
        reasons = {vote["name"]: vote["reason"] for vote in found[1]["votes"] if vote["state"] == "skipped"}
        assert reasons == {"ann": "unclear"}, "bob may have a lease of it"
        for query, texts in (
            ("&state=settled", [second["text"]]),
            (f"&search={first['text'][-1]}", [first["text"]]),
            ("&annotator=BOB&state=waiting", [first["text"]]),
            (f"&annotator={ann.key.hex()[:8]}&state=skipped", [third["text"]]),
            ("&annotator=nobody", []),
            ("&label=1", [first["text"]]),
            ("&label=0", [first["text"], second["text"]]),
        ):
            assert [row["text"] for row in await review(query)] == texts, query

        async def post(tail: str, body: Any) -> Reply:
            return await said(site.ask, "POST", f"{path}/{tail}", body, token)

        decide = f"tasks/{first['task']}/decide"
        assert (await post(decide, {"answer": [2]})).code == "misfit"
        assert (await post(f"tasks/{second['task']}/decide", {"answer": [1]})).code == "refused", "it waits for nobody"
        assert (await post(f"tasks/{'00' * 32}/decide", {"answer": [1]})).code == "not-found"
        assert (await post(decide, {"answer": [1]})).body == {"task": first["task"], "label": [1]}
        (row,) = await review(f"&search={first['text'][-1]}")
        assert (row["state"], row["label"], row["is_reviewed"]) == ("decided", [1], True)
        table = (await said(site.get, f"{path}/confusions", token)).body
        assert (table["values"], table["counts"]) == (["glad", "sad"], [[2, 0], [1, 1]])
        assert {row["name"]: row["counts"] for row in table["annotators"]} == {"ann": [[1, 0], [0, 1]], "bob": [[1, 0], [1, 0]]}
        assert (await post("redact", {"task": 4})).code == "not-found"
        redacted = await post("redact", {"task": row["number"], "reason": "a name in it"})
        assert redacted.body["said"] == f"task {row['number']} of 'moods' is redacted: every peer deletes its text"
        (gone,) = await review("&state=redacted")
        assert (gone["text"], gone["label"]) == (None, [1])
        assert ("redact", f"task {row['number']} of 'moods': a name in it", "done") in await log(site, token)


def test_texts_and_items_in_their_order_are_the_same_tasks_whatever_their_labels() -> None:
    plain = [TaskWithGold(AnnotationTask("a", ("x", "y")), None), TaskWithGold(AnnotationTask("b"), None)]
    assert digest_tasks(plain) == digest_tasks(
        [TaskWithGold(AnnotationTask("a", ("x", "y"), (1,)), None), TaskWithGold(AnnotationTask("b"), (0,))]
    )
    others = [plain[::-1], plain[:1], [*plain, plain[1]], [TaskWithGold(AnnotationTask("a", ("y", "x")), None), plain[1]]]
    assert digest_tasks(plain) not in map(digest_tasks, others)
