"""Routes that every HTTP server has, with their handlers, which run in asyncio's thread."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from aiohttp import web

from protocol.prometheus_metrics import CONTENT_TYPE, PrometheusMetric, format_exposition
from web import connection_limits, header_trust
from web.calls import TEXT, Credentials, HttpProblem, RequestField, parse_fields, query_integer_type
from web.event_stream import LISTENERS_MAX, LISTENERS_OF_HOST_MAX, EventStreams
from web.routes import OPERATOR, ClientClass, HtmlPage, Route, RouteReply

QUERY_OF_EVENTS: Final = (RequestField("live", query_integer_type(0, 1), "1 adds `live` events", default=0),)


@dataclass(frozen=True, kw_only=True)
class ServerHandlers:
    openapi_text: str
    pages: Mapping[str, str]  # path of a page -> its HTML, in the order of the navigation
    static_files: Mapping[str, Path]  # name -> file: a request can name no other path
    vendor_files: Mapping[str, Path]
    statuses: Counter[int]  # HTTP status -> number of replies
    streams: EventStreams
    clients: Collection[ClientClass]
    # The next three functions run in Trio's thread.
    find_health_problem: Callable[[], Awaitable[str]]
    read_metrics: Callable[[], Awaitable[tuple[PrometheusMetric, ...]]]
    authorize: Callable[[ClientClass, Credentials], Awaitable[object]]

    async def start(self, request: web.Request) -> web.StreamResponse:
        if not self.pages:
            raise HttpProblem("not-found", "this peer has no pages")
        first = next(iter(self.pages))
        return web.Response(text=f"{first}\n", status=302, headers={"Location": first})

    async def page(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.pages[request.path], content_type="text/html")

    async def static(self, request: web.Request) -> web.StreamResponse:
        return _send_file(self.static_files, request)

    async def vendor(self, request: web.Request) -> web.StreamResponse:
        return _send_file(self.vendor_files, request)

    async def openapi(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text=self.openapi_text, content_type="application/json")

    async def events(self, request: web.Request) -> web.StreamResponse:
        given = parse_fields(QUERY_OF_EVENTS, request.query)
        connection_limits.set_reply_deadline(request, math.inf)
        return await self.streams.stream_events(request, given["live"] == 1, header_trust.client_host(request))

    async def health(self, request: web.Request) -> web.StreamResponse:
        if problem := await self.find_health_problem():
            raise HttpProblem("unhealthy", problem)
        return web.Response(text="ok\n")

    async def metrics(self, request: web.Request) -> web.StreamResponse:
        if not header_trust.is_local_request(request):
            await self.authorize(OPERATOR, header_trust.read_credentials(request, OPERATOR, self.clients))
        by_status = {f'status="{status}"': float(count) for status, count in sorted(self.statuses.items())}
        metrics = (*await self.read_metrics(), PrometheusMetric("http_calls_total", "by status of the reply", by_status))
        return web.Response(body=format_exposition(metrics).encode(), headers={"Content-Type": CONTENT_TYPE})


def _send_file(files: Mapping[str, Path], request: web.Request) -> web.StreamResponse:
    if (path := files.get(request.match_info["name"])) is None:
        raise HttpProblem("not-found", "there is no such file")
    return web.FileResponse(path)


def _own_route(
    handler: Callable[[ServerHandlers, web.Request], Awaitable[web.StreamResponse]], path: str, about: str, **more: Any
) -> Route:
    return Route(handler=handler, takes_request=True, method="GET", path=path, about=about, **more)


def page_route(page: HtmlPage) -> Route:
    return _own_route(
        ServerHandlers.page,
        page.path,
        "Show a page",
        operation_id=f"page_{page.name}",
        replies={200: RouteReply("", "HTML", "text/html")},
    )


_FILE: Final[dict[str, Any]] = {
    "path_fields": (RequestField("name", TEXT),),
    "replies": {200: RouteReply("", "The file", "application/octet-stream")},
    "problem_codes": {"not-found": ""},
}
# Paths of the server itself: no feature may have a path below them.
SERVER_PREFIXES: Final = ("/healthz", "/metrics", "/static", "/vendor")
SERVER_ROUTES: Final = (
    _own_route(
        ServerHandlers.events, "/api/v1/events", "Stream events as they happen", query_fields=QUERY_OF_EVENTS,
        replies={200: RouteReply("", "A stream of [server-sent events](#server-sent-events)", "text/event-stream")},
        problem_codes={"too-many": f"more than {LISTENERS_OF_HOST_MAX} streams of one address, or {LISTENERS_MAX} in all"},
    ),
    _own_route(
        ServerHandlers.openapi, "/api/v1/openapi.json", "Describe all calls as an OpenAPI document",
        replies={200: RouteReply("openapi info paths components")},
    ),
    _own_route(
        ServerHandlers.health, "/healthz", "Check the health of this peer",
        replies={200: RouteReply("", "`ok`", "text/plain")}, problem_codes={"unhealthy": "`detail` has the reason"},
    ),
    _own_route(
        ServerHandlers.metrics, "/metrics", "Show metrics of this peer",
        replies={200: RouteReply("", "Text format of Prometheus", "text/plain")},
        problem_codes={"unauthorized": "no operator's token, unless a program on the same machine calls without a proxy"},
    ),
    _own_route(
        ServerHandlers.start, "/", "Redirect to the first page",
        replies={302: RouteReply("", "A redirection", "text/plain")},
    ),
    _own_route(ServerHandlers.static, "/static/{name}", "Fetch a file of the pages", **_FILE),
    _own_route(ServerHandlers.vendor, "/vendor/{name}", "Fetch a library of the pages", **_FILE),
)  # fmt: skip
