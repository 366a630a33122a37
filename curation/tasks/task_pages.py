"""Tasks and pages of tasks. A page is a blob; the ledger has its digest and a Merkle root over its tasks."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from curation.limits import PAGE_BYTES_MAX, PAGE_TASKS_MAX, RANKED_MAX, TEXT_CHARACTERS_MAX
from curation.tasks.answers import QuestionKind, Salt, items_problem
from protocol import codec, merkle
from protocol.codec import Count, Digest, Length
from protocol.errors import RemoteProtocolError

Text = Annotated[str, Length(0, TEXT_CHARACTERS_MAX)]


@dataclass(frozen=True, slots=True)
class AnnotationTask:
    """Content of a task for annotators: a text, or items to compare with an optional text above them."""

    text: Text
    items: Annotated[tuple[Text, ...], Length(0, RANKED_MAX)] = ()
    suggestion: Annotated[tuple[Count, ...], Length(0, 16)] | None = None  # answer that a model suggests


@dataclass(frozen=True, slots=True)
class PageEntry:
    """Entry of a page: a task with its salt, or only the leaf of a redacted task.

    With the leaf, the page's Merkle root stays the same without the text.
    """

    salt: Salt | None
    task: AnnotationTask | None
    leaf: Digest | None = None


@dataclass(frozen=True, slots=True)
class TaskPageBlob:
    entries: Annotated[tuple[PageEntry, ...], Length(1, PAGE_TASKS_MAX)]


def task_leaf(salt: bytes, task: AnnotationTask) -> bytes:
    return hashlib.sha256(b"folkmoot/task\x00" + salt + codec.encode(task)).digest()


def entry_leaf(entry: PageEntry) -> bytes:
    """Return the Merkle leaf of an entry. Raises `RemoteProtocolError` if the entry is neither a task nor a leaf."""
    if entry.leaf is not None and entry.salt is None and entry.task is None:
        return entry.leaf
    if entry.leaf is None and entry.salt is not None and entry.task is not None:
        return task_leaf(entry.salt, entry.task)
    raise RemoteProtocolError("bad-page", "an entry is a salted task or a leaf")


def page_merkle_root(page: TaskPageBlob) -> bytes:
    return merkle.merkle_root([entry_leaf(entry) for entry in page.entries])


def redact_entry(page: TaskPageBlob, index: int) -> bytes:
    """Return the encoded page with the entry `index` reduced to its leaf. Every peer with the page gets the same bytes."""
    entries = list(page.entries)
    entries[index] = PageEntry(None, None, entry_leaf(entries[index]))
    return codec.encode(TaskPageBlob(tuple(entries)))


def decode_page(data: bytes, kind: QuestionKind, root: bytes, count: int) -> TaskPageBlob:
    """Decode a page.

    Raises `RemoteProtocolError` if its Merkle root or number of tasks differs, or its items do not fit the kind.
    """
    page = codec.decode(TaskPageBlob, data, PAGE_BYTES_MAX)
    if len(page.entries) != count or page_merkle_root(page) != root:
        raise RemoteProtocolError("bad-page", "it has other tasks than its project says")
    for entry in page.entries:
        if entry.task and (problem := items_problem(kind, len(entry.task.items))):
            raise RemoteProtocolError("bad-page", problem)
    return page


def task_id(project: bytes, number: int) -> bytes:
    return hashlib.sha256(b"folkmoot/task-id\x00" + project + number.to_bytes(8, "big")).digest()


def assignment_id(task: bytes, annotator: bytes) -> bytes:
    return hashlib.sha256(b"folkmoot/assignment\x00" + task + annotator).digest()
