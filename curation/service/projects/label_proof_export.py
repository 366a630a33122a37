"""Writes a folder of labels with their proofs, see `curation.import_export.export_proofs`."""

from __future__ import annotations

import shutil
from pathlib import Path

from curation.import_export import export_proofs
from curation.ledger.curation_state import CurationState, page_key
from curation.limits import PAGE_BYTES_MAX
from curation.service.projects.task_export import BlobReader, read_task_page
from ledger.core.genesis import Genesis
from ledger.ledger_state import LedgerState
from ledger.row_proofs import make_row_proof
from protocol.errors import UserError
from protocol.messages import LightBlock


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
    for number in range(project.pages):
        page = curation.pages.get_record(page_key(key, number))
        assert page is not None
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
