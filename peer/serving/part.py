"""The part `serve`: a site for annotators, and what it needs of this peer."""

from __future__ import annotations

from dataclasses import dataclass

import trio

from curation.module import is_run
from features.calls import under_one_roof
from features.parts import Desk
from peer.serving.doors import Doors
from peer.serving.fetching import Fetching
from protocol.addresses import parse_address

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
            from peer.serving.operating import Operating
            from peer.serving.watching import Watching
        except ModuleNotFoundError as error:
            self.desk.tell(f"annotators are not served: the package {error.name} is not installed; the extra `web` has it")
            return

        host, port = parse_address(str(self.desk.setting(LISTEN)))
        doors, fetching = Doors(self.desk.folder), Fetching(self.desk)
        annotating = Annotating(self.desk, doors, fetching)
        operating = Operating(self.desk, doors, annotating.is_annotator)
        site = under_one_roof((annotating, operating, Watching(self.desk, annotating.gatherer)))
        async with trio.open_nursery() as nursery:
            try:
                address = await nursery.start(Bridge(site, host, port).run)
            except OSError as error:
                # Most often a second peer of this machine: both have the default address. It goes on with all else.
                self.desk.tell(f"annotators are not served: {error.strerror}; name another address with --web-listen, or port 0")
                return
            shown = f"[{address[0]}]" if ":" in address[0] else address[0]
            nursery.start_soon(annotating.gatherer.run)
            nursery.start_soon(annotating.follow)
            nursery.start_soon(fetching.run)
            self.desk.tell(f"{SERVED_AT}http://{shown}:{address[1]}/")
