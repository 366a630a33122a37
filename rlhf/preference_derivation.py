"""Derives the set of preferences that people decided in a project, from pages that other peers may hold."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import trio

from curation.estimation.rank_aggregation import FIRST, TIE
from curation.import_export.export_formats import preference_share
from curation.ledger.curation_state import CurationState, TaskPageRow, TaskRow
from curation.limits import PAGE_BYTES_MAX
from curation.service.project_tasks import fetch_task_page
from curation.tasks.answers import QuestionKind
from curation.tasks.task_pages import TaskPageBlob, assignment_id, decode_page
from features.services import ServiceContext
from ledger.members import MembersState
from protocol.errors import FolkmootError, MissingBlobError, RemoteProtocolError
from rlhf.data.preference_sets import PERMILLE, PreferencePair
from rlhf.ledger.preference_set_attestation import PreferenceSetSource, decided_pages

# For one page, before the state is looked at again: a page that was redacted meanwhile never comes.
FETCHING_SECONDS = 10.0
PageOf = Callable[[bytes, TaskPageRow], TaskPageBlob | None]


class _PageReplaced(FolkmootError):
    """A page has another one in its place by now."""


class NoLongerNeeded(FolkmootError):
    """Nobody waits for the set any more."""


async def derive_pairs(
    desk: ServiceContext,
    source: PreferenceSetSource,
    goes_on: Callable[[], bool] = lambda: True,
    threads: trio.CapacityLimiter | None = None,
) -> list[PreferencePair]:
    """As `decided_pairs`, of the state as it is now. It waits for pages that are not here as long as it `goes_on`, and holds no
    thread meanwhile. Raises `NoLongerNeeded`.
    """
    while True:
        state = desk.state.module_state(CurationState)
        try:
            pages = await trio.to_thread.run_sync(_pages, state, source, limiter=threads)
            await _fetched(desk, state, source, pages, goes_on)
            return await trio.to_thread.run_sync(_pairs, desk, state, source, limiter=threads)
        except _PageReplaced:
            await trio.lowlevel.checkpoint()


def _pages(state: CurationState, source: PreferenceSetSource) -> list[tuple[bytes, TaskPageRow]]:
    return [(key, entry) for key, entry, _ in decided_pages(state, source.project, source.height)]


async def _fetched(
    desk: ServiceContext,
    state: CurationState,
    source: PreferenceSetSource,
    pages: list[tuple[bytes, TaskPageRow]],
    goes_on: Callable[[], bool],
) -> None:
    """Returns when all of them are here. Raises `_PageReplaced`, `NoLongerNeeded`."""
    project = state.projects.get_record(source.project)
    assert project is not None
    author = desk.state.module_state(MembersState).current_key(project.author)
    for key, entry in pages:
        is_here = False
        while not is_here:
            if not goes_on():
                raise NoLongerNeeded("no plan waits for this set")
            if desk.state.module_state(CurationState).pages.get_record(key) != entry:
                raise _PageReplaced("a page was replaced")
            with trio.move_on_after(FETCHING_SECONDS):
                if not await fetch_task_page(desk, key, entry, author):
                    raise _PageReplaced("a page was replaced")
                is_here = True


def _pairs(desk: ServiceContext, state: CurationState, source: PreferenceSetSource) -> list[PreferencePair]:
    """In a thread. Raises `_PageReplaced`."""

    def page(key: bytes, entry: TaskPageRow) -> TaskPageBlob | None:
        try:
            return decode_page(desk.read_blob(entry.digest, PAGE_BYTES_MAX), QuestionKind.PAIR, entry.root, entry.count)
        except MissingBlobError:
            raise _PageReplaced("a page was replaced") from None
        except RemoteProtocolError:
            return None  # as at every peer: no tasks have this digest

    return decided_pairs(state, source.project, source.height, page)


def decided_pairs(state: CurationState, project: bytes, height: int, page: PageOf) -> list[PreferencePair]:
    """What people decided of a project's pairs up to a height, the same at every peer that has the same state.

    `page` gives the tasks of a page, by its key and its row; None: the blob that its author named holds none. Left out are pairs
    of which both responses are bad, and those whose text is taken out. p is the share of the votes, a tie counting half, and at
    least 1/2 for the label: the label has weighed the votes, and the close of a project may change it. `UserError`: it is no
    project that compares responses.
    """
    pairs: list[PreferencePair] = []
    for key, entry, settled in decided_pages(state, project, height):
        tasks = page(key, entry)
        if tasks is None:
            continue
        for index, task, row in settled:
            text = tasks.entries[index].task
            if text is not None and all(text.items):
                first, second = text.items
                pairs.append(PreferencePair(task, text.text, first, second, _share(state, task, row)))
    return sorted(pairs, key=lambda pair: pair.id)


def _share(state: CurationState, task: bytes, row: TaskRow) -> int:
    assert row.label is not None
    label = row.label[0]
    if label == TIE:
        return PERMILLE // 2
    votes = (state.assignments.get_record(assignment_id(task, annotator)) for annotator in row.annotators)
    said = preference_share(label, [vote.answer[0] for vote in votes if vote is not None and vote.answer is not None])
    permille = math.floor(PERMILLE * said + Fraction(1, 2))
    return permille if label == FIRST else PERMILLE - permille
