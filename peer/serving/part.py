"""The part `serve`: a site for annotators, and what it needs of this peer."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path

import trio

from curation.module import is_run
from features.calls import under_one_roof
from features.parts import Desk
from peer.serving.doors import Doors
from peer.serving.fetching import Fetching
from protocol.addresses import parse_address

LISTEN = "web_listen"
ADDRESS = "address"  # a file: where people find this peer, while it serves them
ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
SERVED_AT = "annotators are served at "  # and the address


@dataclass
class Serve:
    desk: Desk

    async def run(self) -> None:
        written = self.desk.folder / ADDRESS
        written.unlink(missing_ok=True)
        while not is_run(self.desk.state):
            await self.desk.block_above(self.desk.height)
        try:
            # Only a peer that serves needs aiohttp, and pays for it.
            from peer.bridge import Bridge
            from peer.serving.accounts import Accounts
            from peer.serving.administering import Administering
            from peer.serving.annotating import Annotating
            from peer.serving.custody import Custody
            from peer.serving.importing import Imports
            from peer.serving.live import Live
            from peer.serving.operating import Operating
            from peer.serving.operators import Operators
            from peer.serving.reading import Reading
            from peer.serving.reviewing import Reviewing
            from peer.serving.watching import Watching
        except ModuleNotFoundError as error:
            self.desk.tell(f"annotators are not served: the package {error.name} is not installed; the extra `web` has it")
            return

        try:
            tls = self._tls()
        except (OSError, ValueError) as error:
            self.desk.tell(f"annotators are not served: {error}; see the settings web_tls_cert and web_tls_key")
            return
        host, port = parse_address(str(self.desk.setting(LISTEN)))
        doors, fetching = Doors(self.desk.folder), Fetching(self.desk)
        annotating = Annotating(self.desk, doors, fetching)
        live = Live(self.desk)
        operators = Operators(self.desk.folder, doors, annotating.is_annotator)
        imports = Imports(self.desk, operators)
        site = under_one_roof(
            (
                annotating,
                Reading(self.desk),
                Custody(self.desk, Accounts(self.desk.folder), annotating),
                Operating(self.desk, operators, imports),
                Reviewing(self.desk, operators),
                Administering(self.desk, doors, operators, lambda: annotating.gatherer.waiting),
                live,
                Watching(self.desk, annotating.gatherer),
            )
        )
        names = tuple(str(name).lower() for name in self.desk.setting("web_names"))
        async with trio.open_nursery() as nursery:
            try:
                address = await nursery.start(Bridge(site, host, port, names, tls).run)
            except OSError as error:
                # Most often a second peer of this machine: both have the default address. It goes on with all else.
                self.desk.tell(f"annotators are not served: {error.strerror}; name another address with --web-listen, or port 0")
                return
            scheme = "https" if tls else "http"
            shown = f"[{address[0]}]" if ":" in address[0] else address[0]
            written.write_text(f"{scheme}://{(*names, ANY_HOST.get(shown, shown))[0]}:{address[1]}")
            nursery.start_soon(annotating.gatherer.run)
            nursery.start_soon(annotating.follow)
            nursery.start_soon(fetching.run)
            nursery.start_soon(live.follow_labels)
            nursery.start_soon(imports.run)
            self.desk.tell(f"{SERVED_AT}{scheme}://{shown}:{address[1]}/")

    def _tls(self) -> ssl.SSLContext | None:
        """Raises `OSError` or `ValueError` for files that are no certificate and its key."""
        certificate, key = str(self.desk.setting("web_tls_cert")), str(self.desk.setting("web_tls_key"))
        if not certificate and not key:
            return None
        for path in (certificate, key):
            if not Path(path).is_file():
                raise ValueError(f"there is no file {path!r}")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            raise ValueError(f"{certificate} and {key} are no certificate and its key ({error.reason})") from None
        return context
