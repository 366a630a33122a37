"""Routes, pages and files as clients receive them. They match their declarations, and only this peer's scripts run."""

from __future__ import annotations

import inspect
import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from aiohttp import web

from clients.gateway.http_routes import PROGRAM
from curation.pages.annotation_pages import PAGES
from curation.rpc import CurationRpc
from curation.service.access_control import ANNOTATOR, AccessControl
from peer.api.running_peer import RunningPeer
from peer.features import FEATURES
from tests.web.client import Person, Site
from tests.web.room import Room, assigned, enrolled, said
from web.app import make_application
from web.routes import OPERATOR, Route
from web.site import load_site
from web.web_service import WebService

SITE = load_site(FEATURES)
ROUTES = SITE.routes

TASKS = [{"text": f"text {number}", "suggestion": "sad"} for number in range(4)]
PROJECT = {"name": "moods", "kind": "label", "options": ["glad", "sad"], "guidelines": "Be fair.", "tasks": TASKS}


async def operator(daemon: RunningPeer) -> str:
    api: CurationRpc = daemon.api  # type: ignore[assignment]
    return await api.create_web_token()


async def disputed(site: Site, task: dict[str, Any], first: Person, second: Person) -> None:
    """Let two people answer a task with two votes differently, so that it waits for its author. `first` already has its lease."""
    (lease,) = [lease["assignment"] for lease in await assigned(site, second, 8) if lease["task"] == task["task"]]
    for person, assignment, answer in ((first, task["assignment"], (1,)), (second, lease, (0,))):
        assert (await said(person.submit, site, assignment, answer)).status == 201
    for assignment in (task["assignment"], lease):
        while (await said(site.annotation, assignment)).body["state"] != "opened":
            pass


async def founded(site: Site, token: str, **changes: Any) -> Any:
    reply = await said(site.ask, "POST", "/api/v1/projects", {**PROJECT, **changes}, token)
    assert reply.status == 201, reply
    return reply.body


@pytest.mark.real("sockets")
async def test_every_route_answers_as_it_is_declared(tmp_path: Path) -> None:
    async with Room(tmp_path).serving(role="full") as (daemon, site):
        token = await operator(daemon)
        project = (await founded(site, token, votes=2))["project"]
        ann, bob = await enrolled(site, "ann", "bob")
        contested, other, more, *_ = await assigned(site, ann, 4, 3)
        first, second = contested["assignment"], other["assignment"]
        tokens = {ANNOTATOR: ann.token(site), OPERATOR: token}
        await disputed(site, contested, ann, bob)
        spare = min({0, 1, 2} - {int(task["text"].split()[1]) for task in (contested, other)})
        challenge = (await said(ann.challenge, site)).body
        bodies = {
            "enrol_annotator": {"key": ann.key.hex(), "name": "ann", "signature": enrolment(ann, site)},
            "create_challenge": {"key": ann.key.hex()},
            "sign_up": {"name": "bob", "passphrase": "correct horse"},
            "sign_in": {"name": "bob", "passphrase": "correct horse"},
            "create_session": {"key": ann.key.hex(), **challenge, "signature": session(ann, site, **challenge)},
            "submit_answer": ann.statement(site, first, (1,), b"s" * 16),
            "heartbeat": {"assignments": []},
            "skip_task": {"reason": "unclear"},
            "create_project": {**PROJECT, "name": "more"},
            "add_tasks": {"tasks": TASKS},
            "operator_sign_in": {"token": token},
            "preview_import": b'{"text": "one"}\n',
            "redact_task": {"task": spare},
            "decide_task": {"answer": [1]},
            "start_job": {"name": "proverbs", "rounds": 3, "overrides": {"byzantine_max": "0"}},
        }
        ids = {
            "project": project,
            "annotation": first,
            "assignment": second,
            "annotator": ann.key.hex(),
            "job": "00" * 32,
            "height": 2,
            "task": contested["task"],
        }
        for route in sorted(ROUTES, key=lambda route: route.operation == "sign_out"):  # sign-out comes last
            if (
                route.operation == "events" or route.client == PROGRAM
            ):  # tests/clients/test_gateway.py makes the calls of programs
                continue
            ids["assignment"] = more["assignment"] if route.operation == "release_task" else second
            path = route.path.format(**ids, name={"static": "annotate.js", "vendor": "preact.mjs"}.get(route.operation))
            path += {"preview_import": "?format=jsonl&kind=label&options=glad%0Asad"}.get(route.operation, "")
            body = bodies.get(route.operation)
            if route.client:
                for wrong in ("", "x" * 32):
                    reply = await said(site.ask, route.method, path, body, wrong)
                    assert (reply.status, reply.code) == (401, "unauthorized"), route
            if route.client == OPERATOR:
                reply = await said(site.ask, route.method, path, body, tokens[ANNOTATOR])
                assert (reply.status, reply.code) == (403, "forbidden"), route
            reply = await said(site.ask, route.method, path, body, tokens[route.client] if route.client else "")
            if route.operation == "create_invitation":
                assert reply.code == "refused", "sign-up is open here"
                continue
            assert reply.status in route.replies, (route, reply)
            ids |= {"job": reply.body["job"]} if route.operation == "start_job" else {}
            declared = route.replies[reply.status]
            assert set(declared.field_names.split()) <= set(reply.body if declared.field_names else ()), route
            content_type = reply.headers["content-type"].partition(";")[0]
            assert declared.content_type in (content_type, "application/octet-stream"), route
            assert (await said(site.ask, "DELETE", path)).code == "method", route


def enrolment(person: Person, site: Site) -> str:
    return person.sign(site.network["chain_id"], "enrol", person.name, site.peer_key, False).hex()


def session(person: Person, site: Site, nonce: str, expires_ms: int) -> str:
    return person.sign(site.network["chain_id"], "session", site.peer_key, bytes.fromhex(nonce), expires_ms).hex()


def test_the_application_has_the_routes_that_are_declared_and_no_other() -> None:
    class Any_:
        event_feeds, stats = (), SimpleNamespace(find_health_problem=None)

        def __getattr__(self, name: str) -> Any:
            return lambda *arguments: None

        def __call__(self, *arguments: Any) -> Any: ...

    app: web.Application = make_application(SITE, Any_(), Any_())  # type: ignore[arg-type]
    found = {(route.method, route.resource.canonical) for route in app.router.routes() if route.resource}
    declared = {(route.method, route.path) for route in ROUTES}
    assert found == declared | {("HEAD", path) for method, path in declared if method == "GET"} | {("*", "/{path}")}


@pytest.mark.parametrize("route", [route for route in ROUTES if not route.takes_request], ids=lambda route: route.operation)
def test_a_handler_takes_what_its_route_declares(route: Route) -> None:
    fields = {field.name for field in (*route.path_fields, *route.query_fields, *route.body_fields)}
    fields |= {route.client.argument} if route.client else set()
    fields |= {"before"} if route.sets_cookie else {"token"} if route.ends_cookie else set()
    fields |= ({"file"} if route.upload else set()) | ({"host"} if route.by_host else set())
    fields |= {"body"} if route.takes_bytes else set()
    assert set(inspect.signature(route.handler).parameters) - {"self"} == fields


@pytest.mark.real("sockets")
async def test_the_document_says_what_programs_need(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        document = (await said(site.get, "/api/v1/openapi.json")).body
    assert document["openapi"].startswith("3.1.")
    operations = [(path, method, said) for path, methods in document["paths"].items() for method, said in methods.items()]
    assert len(operations) == len(ROUTES) == len({said["operationId"] + path for path, _, said in operations})
    for path, _, operation in operations:
        assert {item["name"] for item in operation.get("parameters", []) if item["in"] == "path"} == {
            part[1:-1] for part in path.split("/") if part.startswith("{")
        }
        assert operation["responses"].keys() > {"default"}
    submit = document["paths"]["/api/submit"]["post"]
    assert submit["security"] == [{"annotator": []}] and {"200", "201", "202", "409", "422"} <= submit["responses"].keys()
    schema = submit["requestBody"]["content"]["application/json"]["schema"]
    assert schema["properties"]["answer"]["maxItems"] == 16 and schema["required"] == ["assignment", "answer"]


@pytest.mark.real("sockets")
async def test_an_operator_makes_a_project_adds_to_it_and_ends_it(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)

        async def ask(path: str, body: Any = None, method: str = "POST") -> tuple[int, Any]:
            reply = await said(site.ask, method, f"/api/v1/projects{path}", body, token)
            return reply.status, reply.body if reply.status < 300 else reply.code

        made = await founded(site, token)
        path = f"/{made['project']}"
        assert (made["tasks"], made["state"], made["votes"], made["kind"]) == (4, "open", 1, "label")
        status, more = await ask(f"{path}/tasks", {"tasks": [{"text": "more"}]})
        assert (status, more["tasks"]) == (201, 5)
        assert await ask(f"{path}/pause") == (200, {**more, "state": "paused"})
        assert await ask(f"{path}/open") == await ask(f"{path}/open") == (200, more)
        for changes, code in (
            ({"options": ["glad"]}, "misfit"),
            ({"tasks": []}, "misfit"),
            ({"tasks": [{"text": "fine"}, {"text": " "}]}, "misfit"),
            ({"tasks": [{"text": "\ud800"}]}, "misfit"),
            ({"tasks": ["text"]}, "malformed"),
            ({"votes": 8}, "malformed"),
            ({"guidelines": "\ud800"}, "malformed"),
            ({"name": "x" * 65}, "refused"),
        ):
            assert (await ask("", PROJECT | changes))[1] == code, changes
        assert (await ask("", PROJECT | {"padding": "x" * (64 << 10)}))[0] == 413
        await founded(site, token, name="second")
        assert (await ask(f"{path}/close"))[1]["state"] == "closed" and await ask(f"{path}/open") == (409, "refused")
        _, listed = await ask("", method="GET")
        assert [(row["name"], row["state"]) for row in listed["projects"]] == [("second", "open"), ("moods", "closed")]
        assert await ask("/" + "00" * 32, method="GET") == (404, "not-found")


async def test_tokens_end_with_their_day_and_when_they_are_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    doors = AccessControl(tmp_path)
    first, second = doors.create_operator_token(), doors.create_operator_token()
    assert doors.find_operator(first) and doors.find_operator(second) and not doors.find_operator(first[:-1])
    assert (tmp_path / "doors.sqlite").stat().st_mode & 0o077 == 0
    assert first.encode() not in (tmp_path / "doors.sqlite").read_bytes()
    monkeypatch.setattr("curation.service.access_control.OPERATOR_TOKEN_MS", 0)
    assert not doors.find_operator(doors.create_operator_token())
    doors.close()
    again = AccessControl(tmp_path)
    assert again.find_operator(first), "a restart ends none"
    assert again.revoke_operators() >= 2 and not again.find_operator(first)
    again.close()


@pytest.mark.real("sockets")
async def test_a_code_enrols_one_annotator_for_ever(tmp_path: Path) -> None:
    room = Room(tmp_path)
    ann, bob, eve = Person("ann"), Person("bob"), Person("eve")
    async with room.serving("invited", sign_up_invitations=("sesame",)) as (daemon, site):
        api: CurationRpc = daemon.api  # type: ignore[assignment]
        assert (await said(ann.enrol, site, "sesame")).status == 201
        assert (await said(bob.enrol, site, "sesame")).code == "forbidden"
        made = await api.create_annotator_invitation()
        assert (await said(bob.enrol, site, made)).status == 201
        assert (await said(eve.enrol, site, made)).code == "forbidden"
    async with room.serving("invited", sign_up_invitations=("sesame",)) as (_, site):
        for code in ("sesame", made):
            assert (await said(eve.enrol, site, code)).code == "forbidden", "also after a restart"


@pytest.mark.real("sockets")
async def test_what_the_network_did_not_enrol_leaves_its_code_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with Room(tmp_path).serving("invited", sign_up_invitations=("sesame",)) as (_, site):
        with monkeypatch.context() as full:
            full.setattr("curation.ledger.curation_module.ANNOTATORS_MAX", 0)
            assert (await said(Person("ann").enrol, site, "sesame")).code == "forbidden"
        assert (await said(Person("bob").enrol, site, "sesame")).status == 201


@pytest.mark.real("sockets")
async def test_guidelines_come_with_the_task_and_a_suggestion_after_the_answer(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        made = await founded(site, token)
        (ann,) = await enrolled(site, "ann")
        (task,) = await assigned(site, ann)
        assert "suggestion" not in task
        assert task["name"] == "moods" and (await said(site.get, task["guidelines"])).text == "Be fair."
        assert (await said(ann.submit, site, task["assignment"], (0,))).body["suggestion"] == [1]
        await said(site.ask, "POST", f"/api/v1/projects/{made['project']}/close", None, token)
        await founded(site, token, name="first", suggests_first=True, guidelines="")
        (task,) = [task for task in await assigned(site, ann, 2) if task["project"] != made["project"]][:1]
        assert task["suggestion"] == [1] and "guidelines" not in task
        assert "suggestion" not in (await said(ann.submit, site, task["assignment"], (0,))).body


@pytest.mark.real("sockets")
async def test_exports_and_agreement(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        project = (
            await founded(
                site,
                token,
                kind="pair",
                options=[],
                votes=2,
                tasks=[{"text": "q", "items": [f"a{number}", "b"]} for number in range(10)],
            )
        )["project"]
        ann, bob = await enrolled(site, "ann", "bob")

        async def answers(person: Person, task: dict[str, Any]) -> None:
            choice = int(task["items"][0] in ("a0", "a1", "a2"))
            assert (await said(person.submit, site, task["assignment"], (choice,))).status == 201, task

        for limit in (8, 2):
            async with trio.open_nursery() as nursery:
                for person in (ann, bob):
                    for task in await assigned(site, person, limit, least=limit):
                        nursery.start_soon(answers, person, task)
        while (await said(site.stats))["settled"] < 10:
            pass
        found = (await said(site.get, f"/api/v1/projects/{project}/agreement")).body
        (pair,) = found["pairs"]
        assert found["alpha"] == "1" and (pair["common"], pair["kappa"]) == (10, "1")
        assert {pair["first"], pair["second"]} == {ann.key.hex(), bob.key.hex()}
        rows = [json.loads(line) for line in (await said(site.export, project, "preferences")).text.splitlines()]
        assert len(rows) == 10 and all(row["p"] == 1 for row in rows)
        assert sum(row["chosen"] == "b" for row in rows) == 3
        assert all("chosen_score" in row for row in rows if row["chosen"] == "b")
        shown = (await said(site.export, project, "label-studio")).body
        assert len(shown) == 10 and shown[0]["annotations"][0]["result"][0]["type"] == "pairwise"
        api: CurationRpc = daemon.api  # type: ignore[assignment]
        for form in ("jsonl", "csv", "label-studio", "preferences"):
            path = tmp_path / form
            assert (await api.export_tasks(project, str(path), form)).tasks == 10
            assert path.read_bytes().decode() == (await said(site.export, project, form)).text, "the same bytes"
        view = await api.agreement("moods")
        assert view.alpha == "1" and {view.pairs[0].first_name, view.pairs[0].second_name} == {"ann", "bob"}


POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
INLINE = re.compile(r"<style|<script(?![^>]* src=\"/)|\sstyle=|\son\w+=|javascript:", re.IGNORECASE)


@pytest.mark.real("sockets")
async def test_defence_pages_and_their_files_have_a_policy_and_nothing_inline(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (_, site):
        start = await said(site.get, "/")
        assert (start.status, start.headers["location"]) == (302, PAGES.pages[0].path)
        for page in PAGES.pages:
            shown = await said(site.get, page.path)
            assert shown.headers["content-type"] == "text/html; charset=utf-8"
            assert not INLINE.search(shown.text), page
            assert "<noscript>" in shown.text and f'href="{page.path}" aria-current="page"' in shown.text
            files = re.findall(r'(?:src|href)="(/(?:static|vendor)/[^"]+)"', shown.text)
            assert f"/static/{page.name}.js" in files
            for reply in [shown, *[await said(site.get, file) for file in files]]:
                assert reply.status == 200
                assert reply.headers["content-security-policy"] == POLICY
                assert reply.headers["x-content-type-options"] == "nosniff"
                assert reply.headers["referrer-policy"] == "no-referrer"


@pytest.mark.real("sockets")
async def test_a_peer_without_the_package_of_pages_says_so_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    warned: list[str] = []
    desk: Any = SimpleNamespace(folder=tmp_path, running_features=FEATURES, log_warning=warned.append)
    await WebService(desk).run()
    assert warned == ["web pages are not served: the package jinja2 is not installed; install the extra `web`"]
