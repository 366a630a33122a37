"""Commands of a project's author and of a voter, at a real peer that serves annotators."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections.abc import AsyncIterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
import trio

from curation.import_export.task_import import read_tasks
from curation.ledger.curation_module import project_id
from curation.ledger.curation_state import CurationState, ProjectSpec, page_key
from curation.ledger.transaction_types import CreateProject
from curation.limits import GUIDELINES_BYTES_MAX
from curation.rpc import ImportView
from curation.tasks.answers import QuestionKind
from ledger.core.module import BlobReplacement
from peer import cli
from peer.api.running_peer import RunningPeer
from peer.runtime import transaction_submitter as authors
from peer.runtime.blob_retention import BlobPinner
from tests.peer.processes import peer
from tests.transport.helpers import until
from tests.web.client import Person, Site
from tests.web.room import Room, assigned, enrolled, said, settled

pytestmark = pytest.mark.real("sockets")


@dataclass
class Author:
    room: Room
    daemon: RunningPeer
    site: Site
    capture: pytest.CaptureFixture[str]

    async def types(self, *words: str) -> str:
        """Run a command and return its output in a terminal."""
        self.capture.readouterr()
        status = await trio.to_thread.run_sync(cli.main, [*words, "--data-dir", str(self.room.directory)])
        shown = self.capture.readouterr()
        assert (status == 0) == (not shown.err), shown
        return " ".join((shown.out + shown.err).split())


def curation(daemon: RunningPeer) -> CurationState:
    return daemon.driver.state.module_state(CurationState)


@pytest.fixture
async def author(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> AsyncIterator[Author]:
    room = Room(tmp_path)
    async with room.serving() as (daemon, site):
        yield Author(room, daemon, site, capsys)


async def contested(author: Author) -> tuple[ImportView, list[Person], list[str]]:
    """Let two people give different answers to the only task, so that it waits for its author."""
    view = await author.room.project(author.daemon, tasks=1, votes=2)
    people = await enrolled(author.site, "ann", "bob")
    leases = [(await assigned(author.site, who))[0]["assignment"] for who in people]
    for who, lease, answer in zip(people, leases, ((0,), (1,)), strict=True):
        assert (await said(who.submit, author.site, lease, answer)).status == 201
    applied = author.daemon.driver.block_applied  # taken before the query, so that no block is missed
    while (await author.daemon.api.projects())[0].review == 0:  # type: ignore[attr-defined]
        await applied.wait()
        applied = author.daemon.driver.block_applied
    return view, people, leases


async def test_the_author_says_the_label_of_a_task_that_waits_for_it(author: Author) -> None:
    view, _, leases = await contested(author)
    shown = await author.types("tasks", "review", "moods")
    assert "text 0" in shown and "1 × glad, 1 × sad" in shown
    assert "'loud' is not one of the options: glad, sad" in (
        await author.types("tasks", "review", "moods", "0", "--label", "loud")
    )
    assert "has 1 task, numbered from 0" in await author.types("tasks", "review", "moods", "1", "--label", "sad")
    assert "unknown or unassigned task" in await author.types("tasks", "review", "moods", "--label", "sad")
    assert "task 0 needs a label: add --label" in await author.types("tasks", "review", "moods", "0")
    (waiting,) = await author.daemon.api.tasks_in_review(view.project)  # type: ignore[attr-defined]
    assert waiting.skips == {}, "a vote has no reason"
    assert await author.types("tasks", "review", waiting.task, "--label", "sad") == "task 0 of 'moods': sad"
    assert await author.types("tasks", "review", "moods") == "no task of this project waits for its author"
    again = await author.types("tasks", "review", "moods", "0", "--label", "sad")
    assert "task 0 does not wait for its author: `tasks review moods` lists the tasks that do" in again
    reply = await said(author.site.annotation, leases[0])
    assert (reply.body["state"], reply.body["label"]) == ("settled", [1])


async def test_the_author_reads_why_people_skipped_a_task(author: Author) -> None:
    view = await author.room.project(author.daemon, tasks=1, votes=2)
    for number, reason in enumerate(("unclear", "harmful", "unclear", "two \u202etexts")):
        (person,) = await enrolled(author.site, f"person {number}")
        (lease,) = await assigned(author.site, person)
        assert (await said(person.skip, author.site, lease["assignment"], reason)).status == (400 if number == 3 else 200)
        if number == 3:
            assert (await said(person.skip, author.site, lease["assignment"], "two texts")).status == 200
    (waiting,) = await author.daemon.api.tasks_in_review(view.project)  # type: ignore[attr-defined]
    assert waiting.skips == {"unclear": 2, "harmful": 1, "two texts": 1}
    assert "2 × unclear, 1 × harmful, 1 × two texts" in await author.types("tasks", "review", "moods")


async def test_of_a_closed_project_nothing_waits_for_its_author_any_more(author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    await contested(author)
    monkeypatch.setattr("curation.ledger.curation_module.OPENING_MS", 1)
    await author.types("tasks", "close", "moods")
    await until(lambda: not curation(author.daemon).closing)
    assert (await author.types("projects")).endswith("closed 2 1 1 0 0")
    assert await author.types("tasks", "review", "moods") == "no task of this project waits for its author"


async def test_an_option_that_would_do_nothing_is_refused(author: Author) -> None:
    proven = await author.types("tasks", "export", "moods", "--proofs", "--format", "label-studio")
    assert "--proofs cannot be combined with --format" in proven
    await author.room.project(author.daemon, tasks=1)
    file = str(author.room.folder / "moods.jsonl")
    for more in (
        ("--votes", "3"),
        ("--guidelines", file),
        ("--many",),
        ("--suggest-first",),
        ("--price", "0"),
        ("--name", "x"),
        ("--display", "chat"),
    ):
        assert f"{more[0]} cannot be changed" in await author.types("tasks", "import", file, "--project", "moods", *more)
    assert "2 tasks, open" in await author.types("tasks", "import", file, "--project", "moods", "--again")
    assert "--revoke does not revoke invitations" in await author.types("web", "invite", "--revoke")
    assert "this peer needs no invitations" in await author.types("web", "invite")
    await author.types("web", "token")
    address = await author.daemon.api.web_address()  # type: ignore[attr-defined]
    assert address == f"http://{author.site.host}:{author.site.port}"
    assert await author.types("web", "token", "--revoke") == "revoked 1 token"


async def test_on_a_terminal_a_token_comes_with_the_address_that_signs_in(
    author: Author, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(await author.types("web", "token")) == 32, "a program takes it as it is"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    token, address, *_ = (await author.types("web", "token")).split()
    assert address == f"http://{author.site.host}:{author.site.port}/admin#{token}"


async def test_the_only_voter_closes_a_project(author: Author) -> None:
    await author.room.project(author.daemon, tasks=1)
    assert await author.types("tasks", "stop", "moods") == "project 'moods' is closed"
    assert "unknown project, or it is closed already" in await author.types("tasks", "stop", "moods")


def texts_on_disk(author: Author) -> list[str]:
    found = [file.read_bytes() for file in (author.room.directory / "blobs").iterdir()]
    return sorted({f"text {number}" for number in range(3) for data in found if b"text %d" % number in data})


async def test_a_redacted_text_is_gone_and_its_label_stays(author: Author) -> None:
    view = await author.room.project(author.daemon, tasks=3)
    (ann,) = await enrolled(author.site, "ann")
    tasks = {task["text"]: task["assignment"] for task in await assigned(author.site, ann, 3)}
    assert (await said(ann.submit, author.site, tasks["text 0"], (1,))).status == 201
    label = (await settled(author.site, tasks["text 0"])).body["label"]
    (line,) = [json.loads(line) for line in (await said(author.site.export, view.project)).text.splitlines()]
    assert texts_on_disk(author) == ["text 0", "text 1", "text 2"] and line["text"] == "text 0"
    assert await author.types("tasks", "redact", line["task"]) == "task 0 of 'moods' is redacted: every peer deletes its text"
    assert await author.types("tasks", "redact", "moods", "1") == "task 1 of 'moods' is redacted: every peer deletes its text"
    assert "the task is already redacted" in await author.types("tasks", "redact", "moods", "1")
    await until(lambda: texts_on_disk(author) == ["text 2"])
    (after,) = [json.loads(line) for line in (await said(author.site.export, view.project)).text.splitlines()]
    assert after == {key: value for key, value in line.items() if key not in ("text", "items")} | {"redacted": True}
    assert after["label"] == label
    folder = str(author.room.folder / "proven")
    await author.types("tasks", "export", "moods", "--proofs", "-o", folder)
    assert "1 label, all as decided" in await author.types("tasks", "verify", folder)
    assert [task["text"] for task in await assigned(author.site, ann, 1)] == ["text 2"]
    assert (await said(ann.submit, author.site, tasks["text 1"], (1,))).code == "gone"


async def test_what_was_replaced_while_a_peer_was_away_goes_when_it_is_back(tmp_path: Path) -> None:
    """The peer stopped between the decision and the deletion, so the old page is still on its disk."""
    room = Room(tmp_path)
    async with room.serving() as (daemon, _):
        await room.project(daemon, tasks=2)
        (old,) = [file for file in (room.directory / "blobs").iterdir() if b"text 0" in file.read_bytes()]
        data = old.read_bytes()
        await daemon.api.redact_task("moods", 0)  # type: ignore[attr-defined]
        await until(lambda: not old.exists())
    old.write_bytes(data)
    async with room.serving():
        await until(lambda: not old.exists())


async def test_gold_is_said_at_the_close_and_is_the_label(author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bob is wrong in each task. Two of the three tasks are gold."""
    monkeypatch.setattr("curation.ledger.curation_module.OPENING_MS", 1)
    daemon, site = author.daemon, author.site
    view = await author.room.project(daemon, tasks=3, gold=2)
    (bob,) = await enrolled(site, "bob")
    tasks = {task["text"]: task["assignment"] for task in await assigned(site, bob, 3)}
    for number in range(3):
        assert (await said(bob.submit, site, tasks[f"text {number}"], (1 - number % 2,))).status == 201
        assert (await settled(site, tasks[f"text {number}"])).body["label"] == [1 - number % 2]
    assert await author.types("tasks", "close", "moods") == f"project {view.project[:8]} (moods) is closed"
    while curation(daemon).closing:
        await daemon.driver.block_applied.wait()
    assert [(await said(site.annotation, tasks[f"text {number}"])).body["label"] for number in range(3)] == [[0], [1], [1]]


async def test_no_page_tells_whether_it_has_gold(author: Author) -> None:
    """Three hundred tasks fill two pages. One task is gold, and no blob contains anything about it."""
    view = await author.room.project(author.daemon, tasks=300, gold=1)
    rows = [curation(author.daemon).pages.get_record(page_key(bytes.fromhex(view.project), number)) for number in range(2)]
    assert all(row is not None and row.gold is not None for row in rows)
    assert b"gold" not in b"".join(file.read_bytes() for file in (author.room.directory / "blobs").iterdir())


async def test_gold_that_is_no_answer_is_named_and_nothing_is_imported(author: Author) -> None:
    file = author.room.folder / "more.csv"
    file.write_text("text,gold\none,glad\ntwo,angry\n")
    shown = await author.types("tasks", "import", str(file), "--options", "glad,sad")
    assert "more.csv:3: gold 'angry' is not one of the options: glad, sad" in shown
    assert await author.types("projects") == "no projects yet; create one with `tasks import FILE`"


@pytest.mark.real("a peer that serves on a socket")
async def test_texts_of_a_project_are_shown_as_its_import_says(author: Author) -> None:
    for display in ("plain", "markdown", "chat"):
        file = author.room.folder / f"{display}.jsonl"
        file.write_text(json.dumps({"text": display}))
        more = () if display == "plain" else ("--display", display)
        await author.types("tasks", "import", str(file), "--options", "glad,sad", *more)
    shown = {view.name: view.display for view in await author.daemon.api.projects()}  # type: ignore[attr-defined]
    assert shown == {display: display for display in ("plain", "markdown", "chat")}


async def test_the_same_file_is_imported_once_unless_asked_again(author: Author) -> None:
    file = author.room.folder / "moods.csv"
    file.write_text("text;label\none;glad\ntwo;sad\nthree;angry\n")
    importing = ("tasks", "import", str(file), "--options", "glad,sad")
    first = await author.types(*importing)
    assert "3 tasks, open 2 labels of 'label' became suggestions; --gold-from label imports them as gold instead" in first
    assert "1 label of 'label' left out (moods.csv:4: label 'angry' is not one of the options: glad, sad)" in first
    again = await author.types(*importing)
    there = "3 tasks, open project 'moods' already has the 3 tasks of moods.csv, so nothing changed; --again adds them once more"
    assert there in again
    assert there in await author.types("tasks", "import", str(file), "--project", "moods")
    file.write_text("text,label\none,glad\ntwo,sad\nthree,angry\n", "utf-16")
    assert there in await author.types(*importing), "the same tasks in another form"
    ((_, row),) = curation(author.daemon).projects.items()
    assert row.tasks == 3
    assert "6 tasks" in await author.types("tasks", "import", str(file), "--project", "moods", "--again")
    assert "6 tasks, open project 'moods' already has" in await author.types(*importing)
    assert "angry' is not one of the options" in await author.types(*importing, "--gold-from", "label")
    other = await author.types(*importing, "--name", "other")
    assert "(other): 3 tasks, open" in other and len(dict(curation(author.daemon).projects.items())) == 2


@pytest.mark.real("a peer that serves on a socket, and pages on its disk")
async def test_an_import_that_was_cut_off_goes_on(author: Author, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("curation.import_export.task_import.PAGE_TASKS_MAX", 2)
    file = author.room.folder / "moods.csv"
    file.write_text("text\n" + "same\n" * 7)
    await author.types("tasks", "import", str(file), "--options", "glad,sad", "--name", "other")
    ((key, _),) = curation(author.daemon).projects.items()
    folder = author.room.directory / "services" / "serve"
    with closing(sqlite3.connect(folder / "imported.sqlite")) as database, database:
        # The peer seems to have stopped before the page at 4 was decided.
        database.execute("DELETE FROM imported WHERE first > 4")
        database.execute("UPDATE imported SET root = ? WHERE first = 4", (bytes(32),))
    shown = await author.types("tasks", "import", str(file), "--project", "other")
    assert "10 tasks, open project 'other' already had 4 of the 7 tasks of moods.csv; the others are added" in shown
    assert "so nothing changed" in await author.types("tasks", "import", str(file), "--project", "other")
    assert curation(author.daemon).projects.get_record(key).tasks == 10  # type: ignore[union-attr]


@pytest.mark.real("a peer that serves on a socket")
async def test_an_export_of_a_peer_can_be_imported_again(author: Author) -> None:
    file = author.room.folder / "moods.csv"
    file.write_text('text\n"=1+1"\n"a;\nb"\n')
    await author.types("tasks", "import", str(file), "--options=2,-1,=x")
    unsettled = author.room.folder / "unsettled.jsonl"
    assert "no task of 'moods' is settled yet" in await author.types("tasks", "export", "moods", "-o", str(unsettled))
    assert not unsettled.exists()
    (ann,) = await enrolled(author.site, "ann")
    for place, task in enumerate(await assigned(author.site, ann, 2, 2)):
        assert (await said(ann.submit, author.site, task["assignment"], (place,))).status == 201
        await settled(author.site, task["assignment"])
    for format, ending in (("jsonl", "jsonl"), ("csv", "csv"), ("label-studio", "json")):
        path = author.room.folder / f"labels.{ending}"
        await author.types("tasks", "export", "moods", "--format", format, "-o", str(path))
        ((project, _),) = curation(author.daemon).projects.items()
        sent = await said(author.site.get, f"/api/v1/projects/{project.hex()}/export?format={format}")
        assert sent.text == path.read_text(), format
        read = read_tasks(path.name, path.read_bytes(), QuestionKind.LABEL, ("2", "-1", "=x"), False, gold_from="label")
        labels = {given.task.text: given.gold for given in read.tasks}
        assert set(labels) == {"=1+1", "a;\nb"} and set(labels.values()) == {(0,), (1,)}
    assert "\n0,'=1+1," in (author.room.folder / "labels.csv").read_text()


async def test_wrong_lines_of_a_file_stand_below_one_another(author: Author) -> None:
    file = author.room.folder / "bad.jsonl"
    file.write_text('{"txt": "two"}\n{"text": "one"}\n[]\n')
    arguments = ("tasks", "import", str(file), "--options", "glad,sad", "--data-dir", str(author.room.directory))
    status, _, error = await said(peer, *arguments)
    assert (status, error.splitlines()) == (
        2,
        [
            "peer: error: bad.jsonl:1: the text is empty; 'txt' is not one of text, items, suggestion, gold",
            'bad.jsonl:3: a task must be a JSON object, such as {"text": "…"}',
        ],
    )


async def test_a_blob_that_is_too_large_is_no_guidelines_no_page_and_stays(tmp_path: Path) -> None:
    """A member may name any blob as its own, even a model of 400 MB on its peer's disk. No stranger's call reads it."""
    async with Room(tmp_path).serving() as (daemon, site):
        author, blobs, made = authors.TransactionSubmitter(daemon.driver), daemon.driver.blobs, list[bytes]()
        large = blobs.add_bytes(bytes(GUIDELINES_BYTES_MAX + 1))
        asked = ProjectSpec("moods", QuestionKind.LABEL, ("glad", "sad"), False, 0, large, 1, 1, False)
        project = project_id(
            daemon.driver.signer.public, (await author.submit("curation/create-project", CreateProject(asked))).nonce
        )
        reply = await said(site.get, f"/api/v1/projects/{project.hex()}/guidelines")
        assert (reply.status, reply.code) == (404, "not-found")

        def make(old: bytes) -> bytes:
            made.append(old)
            return b"new"

        await BlobPinner(daemon.driver)._replace(BlobReplacement(large, GUIDELINES_BYTES_MAX, make))
        assert not made and blobs.size(large) is not None
        await BlobPinner(daemon.driver)._replace(BlobReplacement(large, GUIDELINES_BYTES_MAX + 1, make))
        assert len(made) == 1 and blobs.size(large) is None
