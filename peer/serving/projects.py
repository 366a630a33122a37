"""Answers calls about projects: import, export, pause, close."""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from consensus.voters import VoterSet
from curation.answers import Kind, named, options_problem
from curation.calls import CurationCalls, ExportView, ImportRequest, ProjectView, WaitingView
from curation.contents import AddPage, Found, Move, Review, SayGold, StopProject
from curation.importing import Given, in_pages, read_answer, read_tasks
from curation.limits import GUIDELINES_BYTES_MAX, NAME_CHARACTERS_MAX, SALT_BYTES
from curation.module import is_run, project_id
from curation.state import Asked, CurationState, Phase, Project, Redaction, Stage, as_answer
from curation.tasks import Entry, Page, assignment_id, redacted, root_of, task_id
from peer.serving import proving
from peer.serving.exporting import page_of, pages, settled
from peer.serving.golds import GoldPage, Golds
from protocol import codec
from protocol.errors import UserError
from protocol.identity import peer_id

FETCH_SECONDS = 30.0  # for a page that is to be redacted, where this peer lacks it


@dataclass(frozen=True)
class CurationAnswers(CurationCalls):
    peer: Any  # `peer.api.running.RunningPeer`

    @property
    def _state(self) -> CurationState:
        state = self.peer.driver.state
        if not is_run(state):
            raise UserError("this network does not run the module curation: `upgrade curation 1`, said by a quorum, brings it")
        found: CurationState = state.of(CurationState)
        return found

    async def projects(self) -> tuple[ProjectView, ...]:
        rows = sorted(self._state.projects.items(), key=lambda item: (item[1].phase is Phase.CLOSED, item[1].asked.name, item[0]))
        return tuple(self._view(key, row) for key, row in rows)

    def _view(self, key: bytes, row: Project) -> ProjectView:
        asked = row.asked
        counts = (asked.votes, row.tasks, row.drawn, row.settled, row.review)
        author = peer_id(self.peer.driver.state.members.current(row.author))
        return ProjectView(key.hex(), asked.name, asked.kind.value, row.phase.value, author, *counts)

    def _find(self, text: str) -> tuple[bytes, Project]:
        wanted = text.lower()
        rows = self._state.projects.items()
        found = [(key, row) for key, row in rows if key.hex().startswith(wanted) or row.asked.name == text]
        if not wanted or len(found) != 1:
            raise UserError(f"{text!r} fits {len(found)} projects: `projects` lists them")
        return found[0]

    async def import_tasks(self, request: ImportRequest) -> ProjectView:
        self.peer.require_member()
        path = Path(request.file)
        data = await _read(path)
        if request.project:
            key, row = self._find(request.project)
            asked = row.asked
            tasks = await trio.to_thread.run_sync(read_tasks, path.name, data, asked.kind, tuple(asked.options), asked.many)
            _require_alike(path.name, tasks, asked.items)
        else:
            kind = Kind(request.kind)
            problem = options_problem(kind, request.options, request.many)
            if problem:
                raise UserError(f"{problem}: name them with --options A,B")
            tasks = await trio.to_thread.run_sync(read_tasks, path.name, data, kind, request.options, request.many)
            _require_alike(path.name, tasks, len(tasks[0].task.items))
            key = await self._found(request, path, kind, len(tasks[0].task.items))
        has_gold = any(given.gold is not None for given in tasks)
        for page in in_pages(tasks):
            await self._add(key, page, has_gold)
        found = self._state.projects.get(key)
        assert found is not None
        return self._view(key, found)

    async def _found(self, request: ImportRequest, path: Path, kind: Kind, items: int) -> bytes:
        guidelines = None
        if request.guidelines:
            text = await _read(Path(request.guidelines))
            if len(text) > GUIDELINES_BYTES_MAX:
                raise UserError(f"{request.guidelines} has {len(text)} bytes, guidelines have at most {GUIDELINES_BYTES_MAX}")
            guidelines = await trio.to_thread.run_sync(self.peer.driver.blobs.add, text)
        asked = Asked(
            name=(request.name or path.stem)[: 2 * NAME_CHARACTERS_MAX],
            kind=kind,
            options=request.options,
            many=request.many,
            items=items,
            guidelines=guidelines,
            votes=request.votes,
            price=request.price,
            suggests_first=request.suggests_first,
        )
        decided = await self.peer.author.submit("curation/found", Found(asked))
        return project_id(self.peer.me, decided.nonce)

    async def _add(self, project: bytes, tasks: list[Given], has_gold: bool) -> None:
        """Where any task that is imported is gold, no page tells whether it has some."""
        page = Page(tuple(Entry(secrets.token_bytes(SALT_BYTES), given.task) for given in tasks))
        data = codec.encode(page)
        digest = await trio.to_thread.run_sync(self.peer.driver.blobs.add, data)
        gold = GoldPage.draw([given.gold for given in tasks]) if has_gold else None
        if gold is not None:
            with closing(self._golds()) as golds:
                await trio.to_thread.run_sync(golds.keep, gold)
        root = gold.root if gold is not None else None
        await self.peer.author.submit("curation/page", AddPage(project, digest, len(data), root_of(page), len(tasks), root))

    def _golds(self) -> Golds:
        return Golds(self.peer.config.data_directory / "golds.sqlite")

    async def move_project(self, project: str, phase: str) -> ProjectView:
        self.peer.require_member()
        key, row = self._find(project)
        said = await self._say_gold(key, row) if phase == Phase.CLOSED else 0
        if not said or row.phase is not Phase.CLOSED:  # voters may have stopped it: its gold was still missing
            await self.peer.author.submit("curation/move", Move(key, Phase(phase)))
        return self._view(*self._find(key.hex()))

    async def _say_gold(self, key: bytes, row: Project) -> int:
        """How many right answers this peer has said now."""
        state, count = self._state, 0
        with closing(self._golds()) as golds:
            for number, page in enumerate(pages(state, key, row)):
                if page.gold is None:
                    continue
                kept = golds.of(page.gold)
                if kept is None:
                    self.peer.driver.events.add("curation", f"the gold of page {number} of {row.asked.name!r} is not here")
                    continue
                new = [known for known in kept.known if state.golds.get(task_id(key, page.first + known.index)) is None]
                if new:
                    said = SayGold(key, number, tuple(kept.said(known) for known in new))
                    await self.peer.author.submit("curation/gold", said)
                    count += len(new)
        return count

    async def stop_project(self, project: str) -> str:
        self.peer.require_member()
        key, _ = self._find(project)
        await self.peer.author.submit("curation/stop", StopProject(key))
        _, after = self._find(key.hex())
        if after.phase is Phase.CLOSED:
            return f"project {after.asked.name!r} is closed"
        quorum = VoterSet(self.peer.driver.state.members.voters).quorum
        want = f"{len(after.stops)} of the {quorum} voters needed want project {after.asked.name!r} to be closed"
        return f"{want}; the others have to say the same"

    async def waiting_tasks(self, project: str) -> tuple[WaitingView, ...]:
        key, row = self._find(project)
        return tuple(self._waiting(self._state, key, row))

    def _waiting(self, state: CurationState, key: bytes, row: Project) -> Iterator[WaitingView]:
        left = row.review
        for page in pages(state, key, row):
            shown = None
            for index in range(page.count if left else 0):
                task = task_id(key, page.first + index)
                found = state.tasks.get(task)
                if found is None or found.stage is not Stage.REVIEW:
                    continue
                left -= 1
                shown = shown or page_of(row, page, self.peer.driver.blobs.read)
                text = shown.entries[index].task if shown else None
                votes = (state.assignments.get(assignment_id(task, who)) for who in found.annotators)
                said = Counter(_named(row.asked, as_answer(vote.answer)) for vote in votes if vote and vote.answer is not None)
                yield WaitingView(
                    task.hex(), found.number, text.text if text else "", tuple(text.items) if text else (), dict(said)
                )

    async def review_task(self, task: str, number: int | None, label: tuple[str, ...]) -> str:
        self.peer.require_member()
        project, number = self._find_task(task, number)
        row = self._state.projects.get(project)
        assert row is not None
        asked = row.asked
        answer = read_answer(task, "label", list(label), asked.kind, tuple(asked.options), asked.many, asked.items)
        assert answer is not None
        await self.peer.author.submit("curation/review", Review(task_id(project, number), answer))
        return f"task {number} of {asked.name!r}: {_named(asked, answer)}"

    async def redact_task(self, task: str, number: int | None) -> str:
        self.peer.require_member()
        project, number = self._find_task(task, number)
        state, driver = self._state, self.peer.driver
        row = state.projects.get(project)
        assert row is not None
        place, page = next(
            (place, page)
            for place, page in enumerate(pages(state, project, row))
            if page.first <= number < page.first + page.count
        )
        with trio.move_on_after(FETCH_SECONDS):
            await driver.network.fetch(page.digest, page.bytes, (driver.state.members.current(row.author),))
        found = page_of(row, page, driver.blobs.read)
        if found is None:
            raise UserError("this peer lacks the page with this task, and nobody that it reaches has it")
        index = number - page.first
        made = redacted(found, index)
        said = Redaction(project, place, index, page.digest, hashlib.sha256(made).digest(), len(made))
        await self.peer.author.submit("curation/redact", said)
        name, after = f"task {number} of {row.asked.name!r}", self._state.tasks.get(task_id(project, number))
        if after is not None and after.is_redacted:
            return f"{name} is redacted: every peer deletes its text"
        voters = driver.state.members.voters
        alike = sum(self._state.wishes.get(voter) == said for voter in voters)
        needed = VoterSet(voters).faults_tolerated + 1
        return f"{alike} of the {needed} voters needed want {name} to be redacted; others have to say the same"

    def _find_task(self, text: str, number: int | None) -> tuple[bytes, int]:
        """Project and number of a task."""
        if number is not None:
            key, row = self._find(text)
            if number >= row.tasks:
                raise UserError(f"project {row.asked.name!r} has {row.tasks} tasks, from 0 on: there is no number {number}")
            return key, number
        found = self._state.tasks.get(bytes.fromhex(text)) if re.fullmatch("[0-9a-f]{64}", text) else None
        if found is None:
            raise UserError(f"{text!r} is no task that anybody had: name it by its project and number, or by its id of 64 digits")
        return found.project, found.number

    async def export_tasks(self, project: str, path: str) -> ExportView:
        key, row = self._find(project)
        lines = list(settled(self._state, key, row, self.peer.driver.blobs.read))
        try:
            async with await trio.open_file(path, "x", encoding="utf-8") as file:
                for line in lines:
                    await file.write(json.dumps(line, ensure_ascii=False) + "\n")
        except FileExistsError:
            raise UserError(f"{path} exists: name another file with -o") from None
        except OSError as error:
            raise UserError(f"cannot write {path}: {error.strerror}") from None
        return ExportView(path, len(lines))

    async def prove_tasks(self, project: str, directory: str) -> ExportView:
        key, _ = self._find(project)
        proven = await self.peer.driver.snapshots.newest_proven()
        if proven is None:
            raise UserError("no state is certified yet: the next decided block certifies the one before it")
        state, links = proven
        read = self.peer.driver.blobs.read
        count = await trio.to_thread.run_sync(proving.write, Path(directory), self.peer.genesis, state, links, key, read)
        return ExportView(directory, count)


def _named(asked: Asked, answer: tuple[int, ...]) -> str:
    return named(asked.kind, tuple(asked.options), answer)


async def _read(path: Path) -> bytes:
    try:
        return await trio.Path(path).read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def _require_alike(name: str, tasks: list[Given], items: int) -> None:
    for number, (task, _) in enumerate(tasks, 1):
        if len(task.items) != items:
            raise UserError(f"{name}: task {number} has {len(task.items)} items, the others have {items}")
