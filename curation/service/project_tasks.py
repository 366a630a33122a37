"""Tasks of projects at this peer: pages, which the peer fetches from other peers, and exports of settled tasks. The HTTP API and
`peer tasks export` write the same exports: each task with its label and every vote.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import trio

from curation.estimation.annotator_agreement import agreement_units, pairwise_kappas
from curation.import_export import export_proofs
from curation.import_export.export_formats import FORMATS, label_record
from curation.ledger.curation_module import project_alpha
from curation.ledger.curation_state import Assignment, CurationState, Project, TaskPageRow, TaskRow, page_key
from curation.ledger.redaction import find_replaced_page
from curation.limits import (
    EXCLUDED_PROJECTS_MAX,
    GUIDELINES_BYTES_MAX,
    KAPPA_COMMON_MIN,
    KAPPA_PAIRS_MAX,
    KAPPA_TASKS_MAX,
    PAGE_BYTES_MAX,
)
from curation.rpc import AgreementView, KappaView
from curation.tasks.task_pages import TaskPageBlob, assignment_id, decode_page, task_id
from features.services import ServiceContext
from ledger.core.genesis import Genesis
from ledger.ledger_state import LedgerState
from ledger.members import MembersState
from ledger.row_proofs import make_row_proof
from protocol.errors import FolkmootError, MissingBlobError, UserError
from protocol.messages import LightBlock
from web.calls import HttpProblem

LINES_BETWEEN_CANCEL_CHECKS: Final = 64  # lines of an export between two checks for cancellation
# function of a blob's digest and maximum size; raises `FolkmootError` if this peer lacks the blob
BlobReader = Callable[[bytes, int], bytes]


def require_project(state: CurationState, key: bytes) -> Project:
    """Return the project with the id `key`. Raises `HttpProblem` if no project has this id."""
    found = state.projects.get_record(key)
    if found is None:
        raise HttpProblem("not-found", "unknown project")
    return found


def project_pages(state: CurationState, key: bytes, project: Project) -> Iterator[TaskPageRow]:
    """Yield a project's pages, in the order of their tasks."""
    for number in range(project.pages):
        yield state.pages[page_key(key, number)]


def read_task_page(project: Project, page: TaskPageRow, read: BlobReader) -> TaskPageBlob | None:
    """Return a decoded page, or None if its blob is missing or is not a page of these tasks."""
    try:
        return decode_page(read(page.digest, PAGE_BYTES_MAX), project.spec.kind, page.root, page.count)
    except FolkmootError:
        return None


def settled_rows(state: CurationState, key: bytes, page: TaskPageRow) -> Iterator[tuple[int, bytes, TaskRow]]:
    """Yield the settled tasks of a page: index in the page, task id and row."""
    for index in range(page.count):
        task = task_id(key, page.first + index)
        row = state.tasks.get_record(task)
        if row is not None and row.label is not None:
            yield index, task, row


def task_votes(state: CurationState, task: bytes, row: TaskRow) -> Iterator[Assignment | None]:
    """Return the assignments of all annotators that ever leased the task, in the order of their first leases."""
    return (state.assignments.get_record(assignment_id(task, who)) for who in row.annotators)


def settled_task_lines(state: CurationState, key: bytes, project: Project, read: BlobReader) -> Iterator[dict[str, Any]]:
    """Yield a line for each settled task, in ascending order. If this peer lacks a task's text, its line has only the label."""
    for page in project_pages(state, key, project):
        shown = read_task_page(project, page, read)
        for index, task, row in settled_rows(state, key, page):
            yield label_record(project.spec, row, shown.entries[index].task if shown else None, task_votes(state, task, row))


def compute_agreement(state: CurationState, key: bytes, project: Project) -> AgreementView:
    """Return Krippendorff's α of all settled tasks, and Cohen's κ of annotators from the first KAPPA_TASKS_MAX."""
    asked = project.spec
    kind, options, many = asked.kind, len(asked.options), asked.many
    rows = ((task, row) for page in project_pages(state, key, project) for _, task, row in settled_rows(state, key, page))

    def units() -> Iterator[dict[bytes, int]]:
        for task, row in islice(rows, KAPPA_TASKS_MAX):
            said = {vote.annotator: vote.answer for vote in task_votes(state, task, row) if vote and vote.answer is not None}
            for values in agreement_units(kind, options, many, list(said.values())) if said else ():
                yield dict(zip(said, values, strict=True))

    def name(who: bytes) -> str:
        row = state.annotators.get_record(who)
        return row.name if row else ""

    pairs = tuple(
        KappaView(a.hex(), name(a), b.hex(), name(b), common, "" if found is None else str(found))
        for a, b, common, found in pairwise_kappas(units(), KAPPA_COMMON_MIN, KAPPA_PAIRS_MAX)
    )
    alpha = project_alpha(state, key)
    return AgreementView(key.hex(), asked.name, "" if alpha is None else str(alpha), pairs)


def write_export(file: IO[bytes], state: CurationState, key: bytes, project: Project, read: BlobReader, format: str) -> None:
    """Write an export of `state` to a file. It runs in a Trio thread, and ends early if the thread's caller is cancelled.

    Raises `UserError` if the format does not support the kind of project.
    """

    def lines() -> Iterator[dict[str, Any]]:
        for count, line in enumerate(settled_task_lines(state, key, project, read)):
            if count % LINES_BETWEEN_CANCEL_CHECKS == 0:
                trio.from_thread.check_cancelled()
            yield line

    for text in FORMATS[format].write(project.spec, lines):
        file.write(text.encode())


def write_label_proofs(
    folder: Path, genesis: Genesis, state: LedgerState, links: tuple[LightBlock, ...], key: bytes, read: BlobReader
) -> int:
    """Write an export with proofs to a new folder. Return its number of labels. `links`: blocks that certify `state`.

    Raises `UserError` if the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} already exists: choose a new folder with -o") from None
    except OSError as error:
        raise UserError(f"cannot create {folder}: {error.strerror}") from None
    try:
        return _write(folder, genesis, state, links, key, read)
    except BaseException as error:
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(f"cannot write {folder}: {error.strerror}") from None
        raise


def _write(
    folder: Path, genesis: Genesis, state: LedgerState, links: tuple[LightBlock, ...], key: bytes, read: BlobReader
) -> int:
    curation: CurationState = state.module_state(CurationState)
    project = curation.projects.get_record(key)
    if project is None:
        raise UserError("this project is not in a certified state yet: try again after the next block")
    (folder / export_proofs.PROJECT_PROOF).write_bytes(make_row_proof(genesis, state, links, "curation/projects", key))
    (folder / export_proofs.PAGES_PROOF).write_bytes(b"".join(export_proofs.iter_page_proofs(curation, key)))
    (folder / export_proofs.PAGES).mkdir()
    for number, page in enumerate(project_pages(curation, key, project)):
        if read_task_page(project, page, read) is not None:  # tasks of a missing page are exported without text
            (folder / export_proofs.PAGES / str(number)).write_bytes(read(page.digest, PAGE_BYTES_MAX))
    count = 0
    with (
        open(folder / export_proofs.LABELS, "x", encoding="utf-8", newline="\n") as labels,
        open(folder / export_proofs.LABELS_PROOF, "xb") as proofs,
    ):
        for line, proof in export_proofs.iter_proven_lines(curation, key, lambda page: read_task_page(project, page, read)):
            labels.write(line)
            proofs.write(proof)
            count += 1
    return count


class PageFetcher:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk = desk
        self._asked: set[bytes] = set()
        self._lacks: set[bytes] = set()  # keys of pages that this peer does not have yet

    @property
    def projects_without_pages(self) -> tuple[bytes, ...]:
        """Projects of which this peer lacks pages, at most EXCLUDED_PROJECTS_MAX: it could not show their tasks."""
        return tuple(sorted({page[:32] for page in self._lacks}))[:EXCLUDED_PROJECTS_MAX]

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                height, state = self._desk.height, self._desk.state.module_state(CurationState)
                for key in state.open:
                    self._fetch_project(nursery, state, key)
                await self._desk.wait_for_block_above(height)

    def _fetch_project(self, nursery: trio.Nursery, state: CurationState, key: bytes) -> None:
        """Start to fetch the project's pages and guidelines, each once."""
        project = state.projects[key]
        author = self._desk.state.module_state(MembersState).current_key(project.author)
        for name in (page_key(key, number) for number in range(project.pages)):
            page = state.pages.get_record(name)
            if page is not None and page.digest not in self._asked:
                self._asked.add(page.digest)
                self._lacks.add(name)
                nursery.start_soon(self._fetch_page, name, page, author)
        guidelines = project.spec.guidelines
        if guidelines is not None and guidelines not in self._asked:
            self._asked.add(guidelines)
            nursery.start_soon(self._desk.fetch_blob, guidelines, GUIDELINES_BYTES_MAX, (author,))

    async def _fetch_page(self, key: bytes, page: TaskPageRow, author: bytes) -> None:
        if await fetch_task_page(self._desk, key, page, author):
            self._lacks.discard(key)


async def fetch_task_page(desk: ServiceContext, key: bytes, page: TaskPageRow, author: bytes) -> bool:
    """Fetch a page. Return False if a redaction has replaced the page in the meantime; the fetched page is then deleted."""
    await desk.fetch_blob(page.digest, page.bytes, (author,))
    state = desk.state.module_state(CurationState)
    now = state.pages[key]
    if now.digest == page.digest:
        return True
    with suppress(MissingBlobError):  # the peer may have deleted the redacted page already
        if find_replaced_page(state, now, page.digest, desk.read_blob(page.digest, PAGE_BYTES_MAX)) is not None:
            desk.delete_blob(page.digest)
    return False
