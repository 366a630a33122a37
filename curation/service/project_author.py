"""Projects of which this peer is the author. The control socket and the HTTP API create and change them with `ProjectAuthor`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Annotated, Final

import trio

from consensus.voter_set import VoterSet
from curation.import_export.task_import import TaskWithGold, split_into_pages
from curation.ledger.curation_module import project_id, reviews_left
from curation.ledger.curation_state import Choices, CurationState, Project, ProjectPhase, ProjectSpec, Redaction
from curation.ledger.transaction_types import AddTaskPage, CreateProject, GoldAnswerProof, RevealGold, SetProjectPhase
from curation.limits import GUIDELINES_BYTES_MAX, PAGE_TASKS_MAX, SALT_BYTES
from curation.rpc import ProjectView
from curation.service.project_tasks import project_pages, read_task_page
from curation.tasks.answers import Salt, gold_leaf
from curation.tasks.task_pages import AnnotationTask, PageEntry, TaskPageBlob, page_merkle_root, redact_entry, task_id
from features.services import ServiceContext
from features.text_tables import pluralize
from ledger.members import MembersState
from protocol import codec, merkle
from protocol.codec import Count, Digest, Length
from protocol.errors import UserError
from protocol.identity import peer_id
from storage.service_database import ServiceDatabase

FETCH_SECONDS: Final = 30.0  # timeout for fetching the page with a task to redact


def digest_tasks(tasks: Iterable[TaskWithGold]) -> bytes:
    """Return a digest of the texts and items of tasks. Labels are left out, because a second import may use them differently."""
    found = hashlib.sha256()
    for task, _ in tasks:
        found.update(codec.encode(AnnotationTask(task.text, task.items)))
    return found.digest()


def already_imported_note(file: str, project: str, before: int, count: int, way_out: str) -> str:
    if before < count:
        return f"project {project!r} already had {before} of the {count} tasks of {file}; the others are added"
    there = f"project {project!r} already has the {pluralize(count, 'task')} of {file}"
    return f"{there}, so nothing changed; {way_out} adds {'it' if count == 1 else 'them'} once more"


class ImportRecords(ServiceDatabase):
    """Records of imported pages, by the project and the digest of all tasks of one import.

    A second import of the same file continues an interrupted import, or adds nothing after a complete one.
    """

    file_name = "imported.sqlite"
    schema = """CREATE TABLE IF NOT EXISTS imported
(project BLOB, tasks BLOB, first INTEGER, count INTEGER, root BLOB, PRIMARY KEY (project, tasks, first)) WITHOUT ROWID"""

    def record_page(self, project: bytes, tasks: bytes, first: int, count: int, root: bytes) -> None:
        self._database.execute("INSERT OR REPLACE INTO imported VALUES (?, ?, ?, ?, ?)", (project, tasks, first, count, root))

    def delete_import(self, project: bytes, tasks: bytes) -> None:
        self._database.execute("DELETE FROM imported WHERE project = ? AND tasks = ?", (project, tasks))

    def imported_pages(self, project: bytes, tasks: bytes) -> list[tuple[int, int, bytes]]:
        """Return the pages of an import, in order: index of the page's first task in the import, number of tasks, Merkle root."""
        query = "SELECT first, count, root FROM imported WHERE project = ? AND tasks = ? ORDER BY first"
        return self._database.execute(query, (project, tasks)).fetchall()

    def projects_with_import(self, tasks: bytes) -> list[bytes]:
        query = "SELECT DISTINCT project FROM imported WHERE tasks = ?"
        return [project for (project,) in self._database.execute(query, (tasks,))]


@dataclass(frozen=True, slots=True)
class KnownGold:
    index: Count
    salt: Salt
    answer: Choices


@dataclass(frozen=True, slots=True)
class GoldPage:
    """Leaves of all tasks of a page for its root of gold.

    Tasks without gold have random leaves, so that nobody can tell them from gold.
    """

    leaves: Annotated[tuple[Digest, ...], Length(1, PAGE_TASKS_MAX)]
    known: Annotated[tuple[KnownGold, ...], Length(0, PAGE_TASKS_MAX)]

    @classmethod
    def make_page(cls, golds: Sequence[tuple[int, ...] | None]) -> GoldPage:
        """Return the leaves of a page, with random salts. `golds`: the right answer of each task; None: the task is not gold."""
        known = [KnownGold(index, secrets.token_bytes(SALT_BYTES), gold) for index, gold in enumerate(golds) if gold is not None]
        leaves = [secrets.token_bytes(32) for _ in golds]
        for gold in known:
            leaves[gold.index] = gold_leaf(gold.salt, tuple(gold.answer))
        return cls(tuple(leaves), tuple(known))

    @property
    def root(self) -> bytes:
        return merkle.merkle_root(self.leaves)

    def prove_answer(self, known: KnownGold) -> GoldAnswerProof:
        return GoldAnswerProof(known.index, known.answer, known.salt, tuple(merkle.merkle_proof(self.leaves, known.index)))


class GoldStore(ServiceDatabase):
    """Right answers of this peer's pages with gold, by the root in `AddTaskPage`.

    The answers are durable before their page is decided, and secret until the author reveals them.
    """

    file_name = "golds.sqlite"
    schema = "CREATE TABLE IF NOT EXISTS golds (root BLOB PRIMARY KEY, page BLOB NOT NULL) WITHOUT ROWID"

    def store_page(self, page: GoldPage) -> None:
        self._database.execute("INSERT OR REPLACE INTO golds VALUES (?, ?)", (page.root, codec.encode(page)))

    def load_page(self, root: bytes) -> GoldPage | None:
        found = self._database.execute("SELECT page FROM golds WHERE root = ?", (root,)).fetchone()
        return None if found is None else codec.decode(GoldPage, found[0])


@dataclass(frozen=True)
class ProjectAuthor:
    """Operations on projects by this peer as their author.

    They raise `UserError` for invalid requests and refused transactions.
    """

    desk: ServiceContext

    @property
    def _state(self) -> CurationState:
        return self.desk.state.module_state(CurationState)

    def project_view(self, key: bytes) -> ProjectView:
        row = self._state.projects[key]
        asked, author = row.spec, self.desk.state.module_state(MembersState).current_key(row.author)
        counts = (asked.votes, row.tasks, row.fresh_drawn, row.settled, reviews_left(self._state, key, self.desk.time_ms))
        return ProjectView(
            key.hex(), asked.name, asked.kind.value, row.phase.value, peer_id(author), *counts, asked.display.value
        )

    def project_views(self) -> tuple[ProjectView, ...]:
        """Return all projects, closed ones last."""
        rows = sorted(
            self._state.projects.items(), key=lambda item: (item[1].phase is ProjectPhase.CLOSED, item[1].spec.name, item[0])
        )
        return tuple(self.project_view(key) for key, _ in rows)

    async def create_project(self, asked: ProjectSpec, guidelines: bytes, tasks: list[TaskWithGold]) -> bytes:
        """Create a project with tasks and return its id. `guidelines`: UTF-8 text or empty; their digest is not in `asked`."""
        if len(guidelines) > GUIDELINES_BYTES_MAX:
            raise UserError(f"the guidelines have {len(guidelines)} bytes, more than {GUIDELINES_BYTES_MAX}: shorten them")
        require_equal_item_counts(tasks, asked.items)
        digest = await trio.to_thread.run_sync(self.desk.add_blob, guidelines) if guidelines else None
        decided = await self.desk.submit_transaction("curation/create-project", CreateProject(replace(asked, guidelines=digest)))
        key = project_id(self.desk.me, decided.nonce)
        await self._add(key, tasks)
        return key

    async def add_tasks(self, key: bytes, tasks: list[TaskWithGold]) -> None:
        """Add tasks to a project. Tasks that an earlier import of the same file has added are left out."""
        require_equal_item_counts(tasks, self._state.projects[key].spec.items)
        await self._add(key, tasks)

    async def count_added_tasks(self, key: bytes, tasks: list[TaskWithGold]) -> int:
        """Return the number of first tasks of this file that an earlier import of the same file has added."""
        return await trio.to_thread.run_sync(self._already_added, self._state, key, tasks)

    def _already_added(self, state: CurationState, key: bytes, tasks: list[TaskWithGold]) -> int:
        row = state.projects.get_record(key)
        if row is None:
            return 0
        roots, count = {page.root for page in project_pages(state, key, row)}, 0
        with self._imported() as imported:
            for first, size, root in imported.imported_pages(key, digest_tasks(tasks)):
                count += size if first == count and root in roots else 0
        return count

    async def forget_import(self, key: bytes, tasks: list[TaskWithGold]) -> None:
        """Delete the record of an import, so that the next import of these tasks adds all of them."""

        def forget() -> None:
            with self._imported() as imported:
                imported.delete_import(key, digest_tasks(tasks))

        await trio.to_thread.run_sync(forget)

    async def find_projects_with(self, tasks: list[TaskWithGold]) -> dict[bytes, ProjectSpec]:
        """Return the projects to which an import has added these tasks, or at least the first of them."""
        state = self._state

        def find() -> dict[bytes, ProjectSpec]:
            with self._imported() as imported:
                rows = [(key, state.projects.get_record(key)) for key in imported.projects_with_import(digest_tasks(tasks))]
            return {key: row.spec for key, row in rows if row is not None and self._already_added(state, key, tasks)}

        return await trio.to_thread.run_sync(find)

    async def _add(self, key: bytes, tasks: list[TaskWithGold]) -> None:
        """Add tasks page by page.

        If any task is gold, every page gets a root of gold, so that no page reveals whether it has gold.
        """
        has_gold = any(given.gold is not None for given in tasks)
        digest, first = await trio.to_thread.run_sync(digest_tasks, tasks), await self.count_added_tasks(key, tasks)
        for part in split_into_pages(tasks[first:]):
            page = TaskPageBlob(tuple(PageEntry(secrets.token_bytes(SALT_BYTES), given.task) for given in part))
            data, page_root = codec.encode(page), page_merkle_root(page)
            digest_of_page = await trio.to_thread.run_sync(self.desk.add_blob, data)
            gold = GoldPage.make_page([given.gold for given in part]) if has_gold else None
            if gold is not None:
                await trio.to_thread.run_sync(self._store_gold, gold)
            await trio.to_thread.run_sync(self._record_page, key, digest, first, len(part), page_root)
            root = gold.root if gold is not None else None
            await self.desk.submit_transaction(
                "curation/add-page", AddTaskPage(key, digest_of_page, len(data), page_root, len(part), root)
            )
            first += len(part)

    def _store_gold(self, gold: GoldPage) -> None:
        with closing(GoldStore(self.desk.folder)) as golds:
            golds.store_page(gold)

    def _record_page(self, key: bytes, digest: bytes, first: int, count: int, root: bytes) -> None:
        with self._imported() as imported:
            imported.record_page(key, digest, first, count, root)

    async def redact_task(self, key: bytes, number: int) -> str:
        """Redact a task as the project's author, or vote as a voter to redact it. Return a sentence with the result."""
        state, members = self._state, self.desk.state.module_state(MembersState)
        row = state.projects[key]
        place, page = next(
            (place, page)
            for place, page in enumerate(project_pages(state, key, row))
            if page.first <= number < page.first + page.count
        )
        with trio.move_on_after(FETCH_SECONDS):
            await self.desk.fetch_blob(page.digest, page.bytes, (members.current_key(row.author),))
        found = read_task_page(row, page, self.desk.read_blob)
        if found is None:
            raise UserError("neither this peer nor any connected peer has the page with this task")
        index = number - page.first
        made = redact_entry(found, index)
        said = Redaction(key, place, index, page.digest, hashlib.sha256(made).digest(), len(made))
        await self.desk.submit_transaction("curation/redact", said)
        name, after = f"task {number} of {row.spec.name!r}", self._state.tasks.get_record(task_id(key, number))
        if after is not None and after.is_redacted:
            return f"{name} is redacted: every peer deletes its text"
        voters = self.desk.state.module_state(MembersState).voters
        alike = sum(self._state.wishes.get_record(voter) == said for voter in voters)
        needed = VoterSet(voters).faults_tolerated + 1
        return f"{alike} of {needed} needed votes to redact {name}; run this command at other voters, too"

    def _imported(self) -> closing[ImportRecords]:
        return closing(ImportRecords(self.desk.folder))

    async def set_phase(self, key: bytes, phase: ProjectPhase) -> None:
        """Change the phase of a project. Before it closes, all gold is revealed."""
        row = self._state.projects[key]
        if phase is ProjectPhase.CLOSED:
            await self._say_gold(key, row)  # also if voters have already closed the project
        if row.phase is not phase:
            await self.desk.submit_transaction("curation/set-phase", SetProjectPhase(key, phase))

    async def _say_gold(self, key: bytes, row: Project) -> None:
        state = self._state
        with closing(GoldStore(self.desk.folder)) as golds:
            for number, page in enumerate(project_pages(state, key, row)):
                if page.gold is None:
                    continue
                kept = golds.load_page(page.gold)
                if kept is None:
                    self.desk.log_event(f"this peer does not have the gold of page {number} of {row.spec.name!r}")
                    continue
                new = [known for known in kept.known if state.golds.get_record(task_id(key, page.first + known.index)) is None]
                if new:
                    await self.desk.submit_transaction(
                        "curation/reveal-gold", RevealGold(key, number, tuple(kept.prove_answer(known) for known in new))
                    )


def require_equal_item_counts(tasks: list[TaskWithGold], items: int) -> None:
    for number, (task, _) in enumerate(tasks, 1):
        if len(task.items) != items:
            raise UserError(f"task {number} has {len(task.items)} items, but the others have {items}")
