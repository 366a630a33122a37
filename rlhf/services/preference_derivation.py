"""Derives the set of preferences that people decided in a project, from pages that other peers may hold."""

from __future__ import annotations

from collections.abc import Callable

import trio

from curation.ledger.curation_state import CurationState, TaskPageRow
from curation.limits import PAGE_BYTES_MAX
from curation.service.project_tasks import fetch_task_page
from curation.tasks.answers import QuestionKind
from curation.tasks.task_pages import TaskPageBlob, decode_page
from features.services import ServiceContext
from ledger.members import MembersState
from protocol.errors import FolkmootError, MissingBlobError, RemoteProtocolError
from rlhf.data.decided_comparisons import decided_pages
from rlhf.data.preference_sets import PreferencePair, decided_pairs
from rlhf.ledger.preference_set_attestation import PreferenceSetSource

# For one page, before the state is looked at again: a page that was redacted meanwhile never comes.
FETCHING_SECONDS = 10.0


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
