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

ADDRESS_FILE = "address"  # name of a file with the URL for people, which exists while pages are served
ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}
SERVED_AT_PREFIX = "web pages are served at "  # beginning of the event that the URL of the pages completes


@dataclass
class WebService:
    desk: ServiceContext

    async def run(self) -> None:
        written = self.desk.folder / ADDRESS_FILE
        written.unlink(missing_ok=True)
        while not (features := [item for item in self.desk.running_features if item.routes or item.pages]):
            await self.desk.wait_for_block_above(self.desk.height)
        try:
            # Only peers that serve pages need aiohttp, whose import takes time and memory.
            import jinja2  # noqa: F401 - another thread imports it later, but a missing package is reported here

            from web.asyncio_bridge import AsyncioBridge
            from web.site import SiteHandlers, load_site

            site = load_site(features)
        except ModuleNotFoundError as error:
            self.desk.log_warning(f"web pages are not served: the package {error.name} is not installed; install the extra `web`")
            return

        try:
            tls = self._tls()
        except (OSError, ValueError) as error:
            self.desk.log_warning(f"web pages are not served: {error}; check the settings web_tls_cert and web_tls_key")
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
                # The usual cause is another peer on this machine with the same default address. This peer continues without
                # pages.
                why = os.strerror(error.errno).lower() if error.errno else str(error)
                self.desk.log_warning(
                    f"web pages are not served at {listen}: {why}; choose another address with --web-listen, or port 0"
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
        """Load the certificate again after each SIGHUP, for new connections.

        The old certificate stays if the files contain no valid one.
        """
        while True:
            await self.desk.wait_for_reload()
            try:
                bridge.tls = self._tls() or bridge.tls
            except (OSError, ValueError) as error:
                self.desk.log_warning(f"kept the old certificate: {error}")
            else:
                self.desk.log_event(f"reloaded the certificate from {self.desk.get_setting('web_tls_cert')}")

    def _tls(self) -> ssl.SSLContext | None:
        """Return the TLS context of the configured certificate, or None without a certificate.

        Raises `OSError` or `ValueError` for an invalid pair of files.
        """
        certificate, key = str(self.desk.get_setting("web_tls_cert")), str(self.desk.get_setting("web_tls_key"))
        if not certificate and not key:
            return None
        for path in (certificate, key):
            if not Path(path).is_file():
                raise ValueError(f"file {path!r} does not exist")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(certificate, key)
        except ssl.SSLError as error:
            raise ValueError(f"{certificate} and {key} are not a certificate and its private key ({error.reason})") from None
        return context
