"""The service `serve`: pages and HTTP routes of the features whose modules the network runs when it begins to serve."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING

import trio

from features.services import ServiceContext
from protocol.addresses import parse_address

if TYPE_CHECKING:
    from web.asyncio_bridge import AsyncioBridge

ADDRESS_FILE = "address"  # a file: where people find this peer, while it serves them
ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
SERVED_AT_PREFIX = "web pages are served at "  # and the address


@dataclass
class WebService:
    desk: ServiceContext

    async def run(self) -> None:
        written = self.desk.folder / ADDRESS_FILE
        written.unlink(missing_ok=True)
        while not (features := [item for item in self.desk.running_features if item.routes or item.pages]):
            await self.desk.wait_for_block_above(self.desk.height)
        try:
            # Only a peer that serves needs aiohttp, and pays for it.
            import jinja2  # noqa: F401 - of pages, in another thread

            from web.asyncio_bridge import AsyncioBridge
            from web.site import SiteHandlers, load_site

            site = load_site(features)
        except ModuleNotFoundError as error:
            self.desk.log_warning(f"web pages are not served: the package {error.name} is not installed; the extra `web` has it")
            return

        try:
            tls = self._tls()
        except (OSError, ValueError) as error:
            self.desk.log_warning(f"web pages are not served: {error}; see the settings web_tls_cert and web_tls_key")
            return
        listen = str(self.desk.get_setting("web_listen"))
        host, port = parse_address(listen)
        names = tuple(str(name).lower() for name in self.desk.get_setting("web_host_names"))
        proxies = tuple(str(ip_address(proxy)) for proxy in self.desk.get_setting("web_trusted_proxies"))
        handlers = SiteHandlers(site, self.desk)
        bridge = AsyncioBridge(site, handlers, host, port, self.desk.http_connections_max, names, tls, proxies)
        async with trio.open_nursery() as nursery:
            try:
                address = await nursery.start(bridge.run)
            except OSError as error:
                # Most often a second peer of this machine: both have the default address. It goes on with all else.
                why = os.strerror(error.errno).lower() if error.errno else str(error)
                self.desk.log_warning(
                    f"web pages are not served at {listen}: {why}; name another address with --web-listen, or port 0"
                )
                return
            scheme = "https" if tls else "http"
            shown = f"[{address[0]}]" if ":" in address[0] else address[0]
            written.write_text(f"{scheme}://{(*names, ANY_HOST.get(shown, shown))[0]}:{address[1]}")
            for beside in handlers.background_tasks:
                nursery.start_soon(beside)
            if tls is not None:
                nursery.start_soon(self._follow_certificate, bridge)
            self.desk.log_event(f"{SERVED_AT_PREFIX}{scheme}://{shown}:{address[1]}/")

    async def _follow_certificate(self, bridge: AsyncioBridge) -> None:
        """After SIGHUP connections get the certificate that the files have then; where they have none, the one before."""
        while True:
            await self.desk.wait_for_reload()
            try:
                bridge.tls = self._tls() or bridge.tls
            except (OSError, ValueError) as error:
                self.desk.log_warning(f"the certificate stays as it was: {error}")
            else:
                self.desk.log_event(f"the certificate was read again from {self.desk.get_setting('web_tls_cert')}")

    def _tls(self) -> ssl.SSLContext | None:
        """Raises `OSError` or `ValueError` for files that are no certificate and its key."""
        certificate, key = str(self.desk.get_setting("web_tls_cert")), str(self.desk.get_setting("web_tls_key"))
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
