"""Derivation of a preference set from the labels and pages of a project. The peer fetches missing pages from other peers."""

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
from rlhf.data.preference_sets import PreferencePair
from rlhf.ledger.decided_pairs import decided_pairs
from rlhf.ledger.preference_set_attestation import PreferenceSetSource, decided_pages

# Timeout of one fetch in seconds. After it the peer reads the state again: a page that was redacted in the meantime never
# arrives.
FETCHING_SECONDS = 10.0


class _PageReplaced(FolkmootError):
    """A redaction has replaced a page of the project during the derivation."""


class NoLongerNeeded(FolkmootError):
    """No tuning plan waits for the preference set any more."""


async def derive_pairs(
    desk: ServiceContext,
    source: PreferenceSetSource,
    goes_on: Callable[[], bool] = lambda: True,
    threads: trio.CapacityLimiter | None = None,
) -> list[PreferencePair]:
    """Fetch the pages of a project and return `decided_pairs` of the current state.

    The fetch uses no thread. Raises `NoLongerNeeded` when `goes_on` returns False.
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
    """Fetch the pages `pages` of a project. Raises `_PageReplaced` or `NoLongerNeeded`."""
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
    """Read the project's pages and return its decided pairs. It runs in a thread. Raises `_PageReplaced` if a page is missing."""

    def page(key: bytes, entry: TaskPageRow) -> TaskPageBlob | None:
        try:
            return decode_page(desk.read_blob(entry.digest, PAGE_BYTES_MAX), QuestionKind.PAIR, entry.root, entry.count)
        except MissingBlobError:
            raise _PageReplaced("a page was replaced") from None
        except RemoteProtocolError:
            return None  # the blob is no page; every peer gets this result

    return decided_pairs(state, source.project, source.height, page)
