"""Fetches the tasks and guidelines of all open projects, from whoever has them, as they come."""

from __future__ import annotations

from contextlib import suppress

import trio

from curation.ledger.curation_state import CurationState, TaskPageRow, page_key
from curation.ledger.redaction import find_replaced_page
from curation.limits import EXCLUDED_PROJECTS_MAX, GUIDELINES_BYTES_MAX, PAGE_BYTES_MAX
from features.services import ServiceContext
from ledger.members import MembersState
from protocol.errors import MissingBlobError


class PageFetcher:
    def __init__(self, desk: ServiceContext) -> None:
        self._desk = desk
        self._asked: set[bytes] = set()
        self._lacks: set[bytes] = set()  # keys of pages on their way

    @property
    def projects_without_pages(self) -> tuple[bytes, ...]:
        """Projects of which tasks are not here, as many as a wish for leases may name: they could not be shown."""
        return tuple(sorted({page[:32] for page in self._lacks}))[:EXCLUDED_PROJECTS_MAX]

    async def run(self) -> None:
        async with trio.open_nursery() as nursery:
            while True:
                height, state = self._desk.height, self._desk.state.module_state(CurationState)
                for key in state.open:
                    self._fetch_project(nursery, state, key)
                await self._desk.wait_for_block_above(height)

    def _fetch_project(self, nursery: trio.Nursery, state: CurationState, key: bytes) -> None:
        """Asks for its pages and guidelines, each once."""
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
    """Returns when the page is here. False: another one has its place by now, and this one is gone."""
    await desk.fetch_blob(page.digest, page.bytes, (author,))
    state = desk.state.module_state(CurationState)
    now = state.pages[key]
    if now.digest == page.digest:
        return True
    with suppress(MissingBlobError):  # it was redacted on the way, and may be deleted already
        if find_replaced_page(state, now, page.digest, desk.read_blob(page.digest, PAGE_BYTES_MAX)) is not None:
            desk.delete_blob(page.digest)
    return False
