"""What operators see and do by HTTP, and who else cannot: at a real peer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from curation.state import CurationState
from peer.serving.doors import Doors
from tests.web.client import Person, Reply, Site
from tests.web.room import Room, assigned, enrolled, said
from tests.web.test_routes import founded, operator

ADMIN = "/api/v1/admin"


async def signed_in(site: Site, token: str, headers: dict[str, str] | None = None) -> Reply:
    return await said(site.ask, "POST", f"{ADMIN}/sign-in", {"token": token}, "", headers)


def browser(site: Site, reply: Reply) -> dict[str, str]:
    cookie = reply.headers["set-cookie"].partition(";")[0]
    return {"Cookie": cookie, "Origin": f"http://{site.host}:{site.port}", "X-Folkmoot": "1"}


async def log(site: Site, token: str) -> list[tuple[str, str, str]]:
    entries = (await said(site.get, f"{ADMIN}/log", token)).body["entries"]
    return [(entry["action"], entry["about"], entry["result"]) for entry in entries]


async def test_a_token_is_exchanged_for_a_session_that_ends_with_it(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        assert (await signed_in(site, "x" * 32)).code == "unauthorized"
        assert (await signed_in(site, token, {"Origin": "http://evil.example"})).code == "forbidden"
        reply = await signed_in(site, token)
        parts = {part.strip().lower() for part in reply.headers["set-cookie"].split(";")[1:]}
        assert {"httponly", "samesite=strict", "path=/"} <= parts and reply.body["seconds"] > 80_000
        assert reply.status == 201 and "token" not in reply.body and token not in str(reply.headers)
        own = browser(site, reply)
        assert (await said(site.ask, "GET", f"{ADMIN}/health", None, "", own)).status == 200
        session = own["Cookie"].partition("=")[2]
        assert (await signed_in(site, session)).code == "unauthorized", "a session begins no other one"
        again = browser(site, await signed_in(site, token, {"Cookie": own["Cookie"]}))
        assert (await said(site.ask, "GET", f"{ADMIN}/health", None, "", own)).code == "unauthorized", "a new one at each sign-in"
        for changed in ({"X-Folkmoot": ""}, {"Origin": ""}, {"Origin": "http://evil.example"}):
            headers = {name: value for name, value in (again | changed).items() if value}
            assert (await said(site.ask, "POST", f"{ADMIN}/invite", None, "", headers)).code == "forbidden", changed
        assert (await said(site.ask, "POST", f"{ADMIN}/sign-out", None, "", again)).status == 200
        assert (await said(site.ask, "GET", f"{ADMIN}/health", None, "", again)).code == "unauthorized"
        last = browser(site, await signed_in(site, token))
        assert await daemon.api.web_revoke() == 1  # type: ignore[attr-defined]
        assert (await said(site.ask, "GET", f"{ADMIN}/health", None, "", last)).code == "unauthorized"


async def test_health_tells_of_the_disk_the_queues_and_the_versions(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        token = await operator(daemon)
        while (body := (await said(site.get, f"{ADMIN}/health", token)).body)["state"] != "working":
            assert body["problem"].startswith("behind: ")
        assert body["problem"] == "" and body["behind"] <= 1
        assert body["disk"]["used_bytes"] > 0 and 0 < body["disk"]["free_bytes"] <= body["disk"]["total_bytes"]
        assert body["memory_bytes"] > 1 << 20 and body["queues"]["statements_waiting"] == 0
        assert {"module": "curation", "runs": 1, "knows": [1]} in body["versions"]["modules"]
        assert (await said(site.get, f"{ADMIN}/alerts", token)).body == {"alerts": []}


async def test_whoever_is_refused_gets_no_more_tasks_here_also_after_a_restart(tmp_path: Path) -> None:
    room = Room(tmp_path)
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
        assert daemon.driver.state.of(CurationState).annotators.get(ann.key).leases == ()  # type: ignore[union-attr]
        assert (await said(site.ask, "POST", f"{path}/allow", None, token)).body["is_refused"] is False
        assert len(await assigned(site, ann)) == 1


async def test_an_invitation_of_an_operator_enrols_one_annotator(tmp_path: Path) -> None:
    async with Room(tmp_path).serving("invited") as (daemon, site):
        made = (await said(site.ask, "POST", f"{ADMIN}/invite", None, await operator(daemon))).body
        assert made["path"] == f"/join#{made['invitation']}"
        assert (await said(Person("ann").enrol, site, made["invitation"])).status == 201
        assert (await said(Person("bob").enrol, site, made["invitation"])).code == "forbidden"


async def test_a_job_is_started_listed_and_cancelled(tmp_path: Path) -> None:
    async with Room(tmp_path).serving(role="full") as (daemon, site):
        token = await operator(daemon)

        async def train(**more: Any) -> Reply:
            body = {"name": "proverbs", "rounds": 3, "overrides": {"liars": "0"}} | more
            return await said(site.ask, "POST", f"{ADMIN}/jobs", body, token)

        assert (await train(data="/etc/passwd")).code == "malformed", "no path from a request to the disk"
        assert (await train(overrides={"nonsense": "1"})).code == "refused"
        made = await train()
        assert made.status == 201, made
        (job,) = (await said(site.get, f"{ADMIN}/jobs", token)).body["jobs"]
        assert (job["job"], job["name"], job["rounds"]) == (made.body["job"], "proverbs", 3)
        cancel = f"{ADMIN}/jobs/{job['job']}/cancel"
        assert "is ended" in (await said(site.ask, "POST", cancel, None, token)).body["said"]
        assert (await said(site.ask, "POST", cancel, None, token)).code == "refused"
        assert (await log(site, token))[:2] == [
            ("cancel", f"job {job['job'][:8]}", "refused"),
            ("cancel", f"job {job['job'][:8]}", "done"),
        ]


async def test_the_log_names_who_did_what_outlives_a_restart_and_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        first, second = await operator(daemon), await operator(daemon)
        project = (await founded(site, first))["project"]
        own = browser(site, await signed_in(site, second))
        assert (await said(site.ask, "POST", f"/api/v1/projects/{project}/pause", None, "", own)).status == 200
    async with room.serving() as (_, site):
        entries = (await said(site.get, f"{ADMIN}/log", first)).body["entries"]
        assert [(entry["action"], entry["result"]) for entry in entries] == [
            ("pause", "done"),
            ("sign in", "done"),
            ("make", "done"),
        ]
        doors = Doors(room.directory / "parts" / "serve")
        names = [doors.operator_of(token) for token in (second, second, first)]
        assert [entry["operator"] for entry in entries] == names and names[0] != names[2]
        monkeypatch.setattr("peer.serving.operators.ENTRIES_MAX", 2)
        await said(site.ask, "POST", f"/api/v1/projects/{project}/open", None, first)
        assert [action for action, *_ in await log(site, first)] == ["open", "pause"]
        older = (await said(site.get, f"{ADMIN}/log?limit=1&before={entries[0]['number']}", first)).body["entries"]
        assert older == []


async def test_annotators_and_strangers_see_and_do_nothing(tmp_path: Path) -> None:
    async with Room(tmp_path).serving() as (daemon, site):
        await operator(daemon)
        (ann,) = await enrolled(site, "ann")
        session = await said(ann.token, site)
        for path in ("health", "alerts", "people", "log", "jobs"):
            assert (await said(site.get, f"{ADMIN}/{path}")).status == 401
            assert (await said(site.get, f"{ADMIN}/{path}", "x" * 32)).status == 401
            assert (await said(site.get, f"{ADMIN}/{path}", session)).status == 403
