"""Settled tasks of a project, each with its label and every vote: what the HTTP API and `tasks export` write alike."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final

import trio

from curation.estimation.annotator_agreement import agreement_units, pairwise_kappas
from curation.import_export import export_proofs
from curation.import_export.export_formats import FORMATS, label_record
from curation.ledger.curation_module import project_alpha
from curation.ledger.curation_state import Assignment, CurationState, Project, TaskPageRow, TaskRow, page_key
from curation.limits import KAPPA_COMMON_MIN, KAPPA_PAIRS_MAX, KAPPA_TASKS_MAX, PAGE_BYTES_MAX
from curation.rpc import AgreementView, KappaView
from curation.tasks.task_pages import TaskPageBlob, assignment_id, decode_page, task_id
from ledger.core.genesis import Genesis
from ledger.ledger_state import LedgerState
from ledger.row_proofs import make_row_proof
from protocol.errors import FolkmootError, UserError
from protocol.messages import LightBlock
from web.replies import HttpProblem

LINES_BETWEEN_CANCEL_CHECKS: Final = 64  # lines that are written before the peer is asked whether it ends
BlobReader = Callable[[bytes, int], bytes]  # a blob by its digest; raises `FolkmootError` if it is not here, or larger than that


def require_project(state: CurationState, key: bytes) -> Project:
    """Raises `HttpProblem`."""
    found = state.projects.get_record(key)
    if found is None:
        raise HttpProblem("not-found", "no such project")
    return found


def project_pages(state: CurationState, key: bytes, project: Project) -> Iterator[TaskPageRow]:
    """A project's pages, in the order of their tasks."""
    for number in range(project.pages):
        yield state.pages[page_key(key, number)]


def read_task_page(project: Project, page: TaskPageRow, read: BlobReader) -> TaskPageBlob | None:
    """The page's tasks; None if they are not here, or are none."""
    try:
        return decode_page(read(page.digest, PAGE_BYTES_MAX), project.spec.kind, page.root, page.count)
    except FolkmootError:
        return None


def settled_rows(state: CurationState, key: bytes, page: TaskPageRow) -> Iterator[tuple[int, bytes, TaskRow]]:
    """Settled tasks of a page: the place in it, the task, its row."""
    for index in range(page.count):
        task = task_id(key, page.first + index)
        row = state.tasks.get_record(task)
        if row is not None and row.label is not None:
            yield index, task, row


def task_votes(state: CurationState, task: bytes, row: TaskRow) -> Iterator[Assignment | None]:
    """The assignments of all that ever had the task, as they came."""
    return (state.assignments.get_record(assignment_id(task, who)) for who in row.annotators)


def settled_task_lines(state: CurationState, key: bytes, project: Project, read: BlobReader) -> Iterator[dict[str, Any]]:
    """One line a task, ascending. A task whose text is not here has its label all the same."""
    for page in project_pages(state, key, project):
        shown = read_task_page(project, page, read)
        for index, task, row in settled_rows(state, key, page):
            yield label_record(project.spec, row, shown.entries[index].task if shown else None, task_votes(state, task, row))


def compute_agreement(state: CurationState, key: bytes, project: Project) -> AgreementView:
    """α of all settled tasks; κ of the first KAPPA_TASKS_MAX."""
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
    """Writes the file, in a thread of Trio's, which ends with the call. Blocks that are applied meanwhile change nothing of it.

    Raises `UserError` for a format that is none of such a project.
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
    """Into a new folder; how many labels. `state` is the one that the last link certifies. Raises `UserError`."""
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"{folder} exists: name a new folder with -o") from None
    except OSError as error:
        raise UserError(f"cannot make {folder}: {error.strerror}") from None
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
        raise UserError("the last certified state does not have this project yet: try again after the next block")
    (folder / export_proofs.PROJECT_PROOF).write_bytes(make_row_proof(genesis, state, links, "curation/projects", key))
    (folder / export_proofs.PAGES_PROOF).write_bytes(b"".join(export_proofs.iter_page_proofs(curation, key)))
    (folder / export_proofs.PAGES).mkdir()
    for number, page in enumerate(project_pages(curation, key, project)):
        if read_task_page(project, page, read) is not None:  # else its lines have no text
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
