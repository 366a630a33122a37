"""The part `serve`: a site for annotators, and what it needs of this peer."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

import trio

from curation.module import is_run
from curation.redacting import outdated
from curation.state import CurationState, TaskPage, page_key
from features.parts import Desk
from ledger.members import MembersState
from protocol.addresses import parse_address
from protocol.errors import MissingBlobError

LISTEN = "web_listen"
SERVED_AT = "annotators are served at "  # and the address


@dataclass
class Serve:
    desk: Desk

    async def run(self) -> None:
        while not is_run(self.desk.state):
            await self.desk.block_above(self.desk.height)
        try:
            # Only a peer that serves needs aiohttp, and pays for it.
            from peer.bridge import Bridge
            from peer.serving.annotating import Annotating
        except ModuleNotFoundError as error:
            self.desk.tell(f"annotators are not served: the package {error.name} is not installed; the extra `web` has it")
            return

        host, port = parse_address(str(self.desk.setting(LISTEN)))
        site = Annotating(self.desk)
        async with trio.open_nursery() as nursery:
            try:
                address = await nursery.start(Bridge(site, host, port).run)
            except OSError as error:
                # Most often a second peer of this machine: both have the default address. It goes on with all else.
                self.desk.tell(f"annotators are not served: {error.strerror}; name another address with --web-listen, or port 0")
                return
            shown = f"[{address[0]}]" if ":" in address[0] else address[0]
            nursery.start_soon(site.gatherer.run)
            nursery.start_soon(site.follow)
            nursery.start_soon(_fetch_pages, self.desk, nursery)
            self.desk.tell(f"{SERVED_AT}http://{shown}:{address[1]}/")


async def _fetch_pages(desk: Desk, nursery: trio.Nursery) -> None:
    """The tasks of all open projects, as they come."""
    asked: set[bytes] = set()
    while True:
        height, state, members = desk.height, desk.state.of(CurationState), desk.state.of(MembersState)
        for key in state.open:
            project = state.projects.get(key)
            assert project is not None
            author = members.current(project.author)
            for number in range(project.pages):
                page = state.pages.get(page_key(key, number))
                if page is not None and page.digest not in asked:
                    asked.add(page.digest)
                    nursery.start_soon(_fetch_page, desk, page_key(key, number), page, author)
            if project.asked.guidelines is not None and project.asked.guidelines not in asked:
                asked.add(project.asked.guidelines)
                nursery.start_soon(desk.fetch, project.asked.guidelines, 64 << 10, (author,))
        await desk.block_above(height)


async def _fetch_page(desk: Desk, key: bytes, page: TaskPage, author: bytes) -> None:
    await desk.fetch(page.digest, page.bytes, (author,))
    state = desk.state.of(CurationState)
    now = state.pages.get(key)
    assert now is not None
    if now.digest != page.digest:  # it was redacted on the way
        with contextlib.suppress(MissingBlobError):  # it may be deleted already
            if outdated(state, now, page.digest, desk.read(page.digest)) is not None:
                desk.delete(page.digest)
