"""Exports of labels with proofs that everybody can verify. Each line follows from rows of the ledger's tables. Each row has a
proof under a state root that a quorum has signed. An exported folder has `labels.jsonl`, like any export, and the proofs of its
lines:

| file | content |
|---|---|
| `project.proof` | row of the project, as `peer prove` writes it: the genesis, the voters' signatures, the roots of all tables |
| `pages.proof` | rows of its pages: encodings of `RowWithProof`, each after its length (u32) |
| `labels.proof` | rows of each line: encodings of `LineProof`, each after its length |
| `pages/N` | page number N, with the tasks under the root in its row |

Each line follows from these rows alone: the verifier computes the line again and compares the two lines. The export is complete
if its number of lines equals the number of settled tasks in the project's row, and task numbers ascend.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, TypeVar

from curation.import_export.export_formats import label_record, to_json_line
from curation.ledger.curation_module import CurationModule
from curation.ledger.curation_state import Assignment, CurationState, Project, TaskPageRow, TaskRow, page_key
from curation.limits import ASSIGNED_MAX
from curation.tasks.task_pages import TaskPageBlob, assignment_id, decode_page, task_id
from features.text_tables import KeyValueTable, pluralize
from ledger.row_proofs import PROOF_FILE_BYTES_MAX, VerifiedRow, verify_row_proof_file
from ledger.tables import KeyProof, Table, verify_key
from ledger.tables.table_proofs import RowValue
from protocol import codec
from protocol.codec import Length
from protocol.errors import RemoteProtocolError, UserError
from protocol.identity import Ed25519Verifier
from protocol.limits import ROW_BYTES_MAX
from storage.regular_files import open_regular

LABELS: Final = "labels.jsonl"
LABELS_PROOF: Final = "labels.proof"
PAGES_PROOF: Final = "pages.proof"
PROJECT_PROOF: Final = "project.proof"
PAGES: Final = "pages"
# largest size in bytes of a line's rows with their proofs
PROVEN_BYTES_MAX: Final = (1 + ASSIGNED_MAX) * (ROW_BYTES_MAX + 34 * 256)


R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class RowWithProof:
    """Row of a table with its proof. The row's key is left out, because the verifier knows which row it needs."""

    value: RowValue
    proof: KeyProof


@dataclass(frozen=True, slots=True)
class LineProof:
    task: RowWithProof
    # all assignments of the task, in the order of `TaskRow.annotators`
    votes: Annotated[tuple[RowWithProof, ...], Length(0, ASSIGNED_MAX)]


@dataclass(frozen=True, slots=True)
class VerifiedExport:
    """Verified content of an exported folder. Its proof holds for readers who trust the genesis of its chain."""

    row: VerifiedRow  # row of the project
    project: Project
    lines: int
    without_text: int


# Export ------------------------------------------------------------------------------------------------------------------


def iter_page_proofs(state: CurationState, key: bytes) -> Iterator[bytes]:
    for number in range(state.projects[key].pages):
        yield _framed(codec.encode(_shown(state.pages, page_key(key, number))))


def iter_proven_lines(
    state: CurationState, key: bytes, page: Callable[[TaskPageRow], TaskPageBlob | None]
) -> Iterator[tuple[str, bytes]]:
    """Yield each line of the export with its entry in `labels.proof`.

    `page` returns a page's tasks. Reading rows may raise `StorageError`.
    """
    project = state.projects[key]
    for number in range(project.pages):
        entry = state.pages[page_key(key, number)]
        found = page(entry)
        for index in range(entry.count):
            task = task_id(key, entry.first + index)
            row = state.tasks.get_record(task)
            if row is None or row.label is None:
                continue
            keys = [assignment_id(task, annotator) for annotator in row.annotators]
            votes = map(state.assignments.get_record, keys)
            line = label_record(project.spec, row, found.entries[index].task if found else None, votes)
            proof = LineProof(_shown(state.tasks, task), tuple(_shown(state.assignments, key) for key in keys))
            yield to_json_line(line), _framed(codec.encode(proof))


def _shown(table: Table[Any], key: bytes) -> RowWithProof:
    value = table.encoded_record(key)
    assert value is not None
    return RowWithProof(value, table.prove_key(key))


def _framed(data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + data


# Verification ------------------------------------------------------------------------------------------------------------


class LabelProofVerifier:
    """Verifier of an exported folder. Its errors are `RemoteProtocolError`s with the file, the line and the fault.

    `read` returns the content of a small file in the folder, by name; for a page that the folder lacks, no bytes.
    """

    def __init__(self, read: Callable[[str], bytes]) -> None:
        self._read = read
        self.row = verify_row_proof_file(read(PROJECT_PROOF), (CurationModule(),), Ed25519Verifier())
        if self.row.table != "curation/projects" or not isinstance(self.row.record, Project):
            raise _bad(f"{PROJECT_PROOF} proves a row of {self.row.table}, not a project")
        self._project, self._key = self.row.record, self.row.key

    def verify_lines(self, lines: Iterable[str], proofs: Iterator[bytes]) -> VerifiedExport:
        """Verify all lines of the export. `proofs` are the entries in `labels.proof`, see `iter_frames`."""
        pages = self._pages()
        before, count, without_text = -1, 0, 0
        for count, line in enumerate(lines, 1):
            where = f"{LABELS}:{count}"
            data = next(proofs, None)
            if data is None:
                raise _bad(f"{where}: this line has no proof")
            row, votes = self._rows(where, data)
            if row.number <= before:
                raise _bad(f"{where}: task {row.number} follows task {before}: lines must be in ascending order")
            before = row.number
            text = next(
                (
                    page.entries[row.number - first].task if page else None
                    for first, last, page in pages
                    if first <= row.number < last
                ),
                None,
            )
            _compare(where, line, label_record(self._project.spec, row, text, votes))
            without_text += text is None
        if count != self._project.settled:
            raise _bad(f"{LABELS} has {count} lines, but the project has {self._project.settled} settled tasks")
        return VerifiedExport(self.row, self._project, count, without_text)

    def _pages(self) -> list[tuple[int, int, TaskPageBlob | None]]:
        """Return for each page its range of task numbers, and its tasks if the folder has them."""
        found = list[tuple[int, int, TaskPageBlob | None]]()
        proofs = iter_frames(io.BytesIO(self._read(PAGES_PROOF)))
        for number in range(self._project.pages):
            where = f"{PAGES_PROOF}: page {number}"
            shown = _decoded(RowWithProof, next(proofs, b""), PROVEN_BYTES_MAX, where)
            row = self._proven(TaskPageRow, "pages", page_key(self._key, number), shown, where)
            data = self._read(f"{PAGES}/{number}")
            if data and hashlib.sha256(data).digest() != row.digest:
                raise _bad(f"{PAGES}/{number} differs from the decided page")
            page = decode_page(data, self._project.spec.kind, row.root, row.count) if data else None
            found.append((row.first, row.first + row.count, page))
        return found

    def _rows(self, where: str, data: bytes) -> tuple[TaskRow, list[Assignment]]:
        proof = _decoded(LineProof, data, PROVEN_BYTES_MAX, where)
        task = task_id(self._key, _decoded(TaskRow, proof.task.value, ROW_BYTES_MAX, where).number)
        row = self._proven(TaskRow, "tasks", task, proof.task, where)
        if row.label is None or len(proof.votes) != len(row.annotators):
            raise _bad(f"{where}: {LABELS_PROOF} has a task without a label, or lacks votes")
        keys = (assignment_id(task, annotator) for annotator in row.annotators)
        return row, [self._proven(Assignment, "assignments", *vote, where) for vote in zip(keys, proof.votes, strict=True)]

    def _proven(self, kind: type[R], table: str, key: bytes, shown: RowWithProof, where: str) -> R:
        if not verify_key(self.row.root_of(CurationState, table).hash, key, shown.value, shown.proof):
            raise _bad(f"{where}: the row in the table {table} is not under the certified state root")
        return _decoded(kind, shown.value, ROW_BYTES_MAX, where)


def _compare(where: str, line: str, decided: dict[str, Any]) -> None:
    if line == to_json_line(decided):
        return
    try:
        said = json.loads(line)
    except ValueError:
        raise _bad(f"{where}: this line is not valid JSON") from None
    for name in decided if isinstance(said, dict) else ():
        if said.get(name) != decided[name]:
            raise _bad(f"{where}: {name} is {said.get(name)!r}, but {decided[name]!r} was decided")
    raise _bad(f"{where}: this line is not in the canonical form of an export")


def _decoded(kind: type[R], data: bytes, bytes_max: int, where: str) -> R:
    try:
        return codec.decode(kind, data, bytes_max)
    except RemoteProtocolError as error:
        raise _bad(f"{where}: its proof cannot be read: {error.detail or error}") from None


def iter_frames(stream: BinaryIO) -> Iterator[bytes]:
    while head := stream.read(4):
        size = int.from_bytes(head, "big")
        data = stream.read(size) if len(head) == 4 and size <= PROVEN_BYTES_MAX else b""
        if not data or len(data) < size:
            raise _bad("a file of proofs ends within a proof")
        yield data


def _bad(detail: str) -> RemoteProtocolError:
    return RemoteProtocolError("bad-proof", detail)


def verify_folder(directory: Path, chain_id: str) -> VerifiedExport:
    """Verify an exported folder.

    Raises `UserError` with the file, the line and the fault. `chain_id`: in hex; empty accepts any chain.
    """
    if chain_id and not re.fullmatch("[0-9a-fA-F]{64}", chain_id):
        raise UserError(f"--chain-id {chain_id!r} is not a chain id: it must have 64 hexadecimal digits")

    def read(name: str) -> bytes:
        path = directory / name
        if name.startswith(f"{PAGES}/") and not path.exists():
            return b""
        with open_regular(path) as stream:
            return stream.read(PROOF_FILE_BYTES_MAX)

    try:
        folder = LabelProofVerifier(read)
        found = folder.row.genesis.chain_id.hex()
        if chain_id and found != chain_id.lower():
            raise UserError(
                f"{directory} belongs to another network: its chain id is {found[:16]}…, --chain-id is {chain_id[:16]}…"
            )
        with (
            TextIOWrapper(open_regular(directory / LABELS), encoding="utf-8", newline="\n") as labels,
            open_regular(directory / LABELS_PROOF) as proofs,
        ):
            return folder.verify_lines(labels, iter_frames(proofs))
    except OSError as error:
        raise UserError(
            f"cannot read {error.filename}: {error.strerror}; `tasks export PROJECT --proofs -o FOLDER` writes such a folder"
        ) from None
    except UnicodeDecodeError:
        raise UserError(f"{directory / LABELS} is not UTF-8 text") from None
    except RemoteProtocolError as error:
        raise UserError(f"{directory}: {error.detail or error}") from None


def verification_table(found: VerifiedExport, trusted: str) -> KeyValueTable:
    row, header = found.row, found.row.certified.header
    at = f"{datetime.fromtimestamp(header.time_ms / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    signed = f"{len(row.certified.certificate.signatures)} of {len(row.voters)} voters signed"
    lines = pluralize(found.lines, "label")
    return KeyValueTable(
        {
            "network": f"{row.genesis.network}, chain id {row.genesis.chain_id.hex()}",
            "trust from": "the chain id that you gave"
            if trusted
            else "the folder alone: compare the chain id, or give --chain-id",
            "state": f"after height {row.height}, root {header.state_root.hex()}",
            "certified": f"by block {header.height} of {at}, which {signed}",
            "project": f"{row.key.hex()} ({found.project.spec.name})",
            "labels": f"{lines}, all as decided, with all votes, none missing"
            + (f"; {found.without_text} without text" if found.without_text else ""),
        }
    )
