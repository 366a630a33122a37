"""The aiohttp application: it reads requests as `web.routes` declares them, calls their handlers and writes the replies."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from contextlib import suppress
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from web import connection_limits, header_trust
from web.calls import BytesReply, Credentials, FileReply, HeldReply, HttpProblem, Json, TextReply, parse_fields
from web.event_stream import EventStreams
from web.held_replies import HeldReplies
from web.large_bodies import LargeBodies, count_large_bytes
from web.routes import FILE_BYTES_MAX, ClientClass, HtmlPage, PageSet, Route, openapi_document
from web.server_routes import ServerHandlers
from web.site import Site, SiteHandlers, bind_method

VERSION = version("folkmoot")
UPLOADS_MAX = 2  # uploaded files that the server has in memory at once
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# Value of Strict-Transport-Security in seconds: for a year, a browser refuses plain HTTP to this peer.
HSTS_HEADER = "max-age=31536000"

TEMPLATES = Path(__file__).with_name("templates")  # folder of templates that all features may extend and include
VENDOR = Path(__file__).with_name("vendor")

log = logging.getLogger("site")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_application(
    site: Site,
    handlers: SiteHandlers,
    call: Callable[..., Awaitable[Any]],
    names: Collection[str] = (),
    proxies: Collection[str] = (),
) -> web.Application:
    """Return the application that serves a site. `handlers` belong to Trio's thread: `call(handler, …)` runs them there.

    `names` are names of this host that requests may use in addition to its addresses. `proxies` are the addresses of trusted
    reverse proxies.
    """
    routes = site.routes
    clients = {route.client: None for route in routes if route.client}
    answers, uploads, bodies = Counter[int](), Counter[str](), LargeBodies()
    app = web.Application(middlewares=[_counted(answers), _guarded(names, site.problem_statuses)])
    app[header_trust.PROXIES] = proxies
    listening = EventStreams(handlers.event_feeds, call, SECURITY_HEADERS)
    app.on_shutdown.append(listening.close_streams)
    app.on_response_prepare.append(_headed)
    server = ServerHandlers(
        openapi_text=json.dumps(openapi_document(VERSION, routes, site.problem_statuses)),
        pages={page.path: _render_page(page, page_set, site.pages) for page_set in site.page_sets for page in page_set.pages},
        static_files=site.static_files,
        vendor_files={path.name: path for path in VENDOR.iterdir() if path.is_file()},
        statuses=answers,
        streams=listening,
        clients=clients,
        find_health_problem=partial(call, handlers.stats.find_health_problem),
        read_metrics=partial(call, handlers.read_metrics),
        authorize=partial(call, handlers.authorize),
    )
    for route in routes:
        if route.takes_request:
            handler: Handler = bind_method(route.handler, (server,))
        else:
            ask, authorize = partial(call, handlers.bind(route)), partial(call, handlers.authorize)
            handler = _answerer(route, ask, authorize, clients, uploads, bodies, handlers.find_held_replies(route))
        app.router.add_route(route.method, route.path, handler, expect_handler=_expect)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, handler, expect_handler=_expect)
    unknown, resolve = app.router.add_route("*", "/{path:.*}", _unknown, expect_handler=_expect), app.router.resolve

    async def resolved(request: web.Request) -> web.UrlMappingMatchInfo:
        """Route requests without a known path, such as CONNECT, to `_unknown`: aiohttp's own handler fails on some headers."""
        found = await resolve(request)
        return found if found.http_exception is None else web.UrlMappingMatchInfo({"path": ""}, unknown)

    app.router.resolve = resolved  # type: ignore[method-assign]
    return app


def _render_page(page: HtmlPage, page_set: PageSet, all_pages: Iterable[HtmlPage]) -> str:
    """Return the HTML of a page.

    It is rendered once: scripts of the page fetch changing data. `all_pages` are the links of its navigation.
    """
    loader = FileSystemLoader((page_set.folder / "templates", TEMPLATES))
    templates = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return templates.get_template(f"{page.name}.html").render(page=page, pages=tuple(all_pages), **page_set.values)


async def _headed(request: web.Request, response: web.StreamResponse) -> None:
    """Set the headers that every reply has, including streams."""
    response.headers["Server"] = connection_limits.SERVER_HEADER
    if header_trust.is_secure(request):
        response.headers["Strict-Transport-Security"] = HSTS_HEADER


def _counted(answers: Counter[int]) -> Any:
    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        answers[response.status] += 1
        return response

    return counted


def _answerer(
    route: Route,
    call: Callable[[Credentials, dict[str, Any]], Awaitable[Any]],
    authorize: Callable[[ClientClass, Credentials], Awaitable[object]],
    clients: Collection[ClientClass],
    uploads: Counter[str],
    bodies: LargeBodies,
    held: HeldReplies,
) -> Handler:
    """Return a handler that reads requests as the route declares them, calls the route's method and writes the reply.

    `call` is a function of (credentials, fields) that calls the method.
    """

    async def answer(request: web.Request) -> web.StreamResponse:
        credentials = header_trust.read_credentials(request, route.client, clients)
        if route.client is None or not (large_bytes := count_large_bytes(request, route)):
            return await respond(request, credentials)
        await authorize(route.client, credentials)  # Otherwise strangers could fill the memory with large bodies.
        with bodies.reserve_bytes(credentials.token, large_bytes):
            return await respond(request, credentials)

    async def respond(request: web.Request, credentials: Credentials) -> web.StreamResponse:
        given = parse_fields(route.path_fields, request.match_info) | parse_fields(route.query_fields, request.query)
        if route.by_host:
            given["host"] = credentials.host
        if route.upload and given["format"]:
            connection_limits.set_reply_deadline(request, connection_limits.FILE_SECONDS)
            if route.client:
                await authorize(route.client, credentials)  # checks the token before a large body is read
            given["file"] = await _file(request, uploads)
        elif route.takes_bytes:
            most = route.body_bytes_max
            given["body"] = await _read(request, most, f"the body is larger than {most} bytes")
        elif route.body_fields:
            given |= parse_fields(route.body_fields, await _body(request, route.body_bytes_max))
        if route.sets_cookie:
            header_trust.require_own_origin(request)
            given["before"] = request.cookies.get(header_trust.cookie_name(request, route.sets_cookie), "")
        elif route.ends_cookie:
            given["token"] = credentials.token
        said: Json | TextReply | BytesReply | FileReply | HeldReply | tuple[int, Json] = await call(credentials, given)
        if isinstance(said, HeldReply):
            with suppress(TimeoutError), connection_limits.held_connection(request, credentials.token) as limit:
                async with limit:
                    said = await held.hold(said.name, partial(call, credentials, given))
        if isinstance(said, HeldReply):
            said = said.body
        if isinstance(said, BytesReply):
            return web.Response(body=said.data, content_type=said.content_type, status=route.status)
        if isinstance(said, FileReply):
            return _sent(request, said)
        if isinstance(said, TextReply):
            return web.Response(text=said.text, content_type=said.content_type, status=route.status)
        status, body = said if isinstance(said, tuple) else (route.status, said)
        session = body.pop("token") if route.sets_cookie else ""
        response = web.json_response(body, status=status)
        if owner := route.sets_cookie or route.ends_cookie:
            name, is_secure = header_trust.cookie_name(request, owner), header_trust.is_secure(request)
            if route.sets_cookie:
                response.set_cookie(
                    name, session, max_age=body["seconds"], path="/", httponly=True, samesite="Strict", secure=is_secure
                )
            else:
                response.del_cookie(name, path="/", httponly=True, samesite="Strict", secure=is_secure)
        return response

    return answer


def _sent(request: web.Request, file: FileReply) -> web.StreamResponse:
    """Return the reply with a file.

    The library aiohttp streams and closes the file. For HEAD, this function closes it, since the reply has no body.
    """
    if request.method != "HEAD":
        connection_limits.set_reply_deadline(request, connection_limits.FILE_SECONDS)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8")
    with file.body as body:
        length = {"Content-Length": str(body.seek(0, os.SEEK_END))}
    return web.Response(content_type=file.content_type, charset="utf-8", headers=length)


def _guarded(names: Collection[str], problem_statuses: Mapping[str, int]) -> Any:
    told = list[str]()  # the first proxy that the settings do not name: it is logged once

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection_limits.set_reply_deadline(request, connection_limits.REQUEST_SECONDS)
        if not told and (proxy := header_trust.find_unnamed_proxy(request)):
            told.append(proxy)
            log.warning(
                "a reverse proxy at %s is not trusted, so all its clients count as one: add it to `web_trusted_proxies`", proxy
            )
        try:
            header_trust.require_host(request, names)
            response = await handler(request)
        except HttpProblem as problem:
            response = _problem(problem, problem_statuses)
        except web.HTTPNotFound:
            response = _problem(HttpProblem("not-found", f"no page or call at {request.path}"), problem_statuses)
        except web.HTTPException as error:
            if error.status < 400:
                raise
            code = "method" if error.status == 405 else error.reason.lower().replace(" ", "-")
            response = _refusal(error.status, code, f"{request.method} {request.path}: {error.reason}")
        for name, value in SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return guarded


def _problem(problem: HttpProblem, problem_statuses: Mapping[str, int]) -> web.Response:
    response = _refusal(problem_statuses[problem.code], problem.code, problem.detail)
    if problem.retry_after is not None:
        response.headers["Retry-After"] = str(problem.retry_after)
    return response


def _refusal(status: int, code: str, detail: str) -> web.Response:
    return web.json_response(
        {"title": code.replace("-", " "), "status": status, "code": code, "detail": detail},
        status=status,
        content_type="application/problem+json",
    )


async def _expect(request: web.Request) -> None:
    """Send the reply to a request's Expect header. The handler of aiohttp fails on values that are not UTF-8."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="only Expect: 100-continue is supported\n")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # aiohttp must not count these bytes as a part of the reply


async def _unknown(request: web.Request) -> web.StreamResponse:
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource.canonical != "/{path}":
            allowed |= (await resource.resolve(request))[1]
    raise web.HTTPMethodNotAllowed(request.method, allowed) if allowed else web.HTTPNotFound()


# Bodies of requests -----------------------------------------------------------------------------------------------------


async def _file(request: web.Request, uploads: Counter[str]) -> bytes:
    """Return an uploaded file. At most UPLOADS_MAX files are read at once, and one file of each host.

    Raises `HttpProblem` if too many other files are being read, or if the file has more than FILE_BYTES_MAX bytes.
    """
    host = header_trust.client_host(request)
    if uploads.total() >= UPLOADS_MAX or uploads[host]:
        raise HttpProblem("too-many", "another file is being uploaded: try again in 2 s", 2)
    uploads[host] += 1
    try:
        return await _read(
            request, FILE_BYTES_MAX, f"the file is larger than {FILE_BYTES_MAX >> 20} MiB: split it and import the parts"
        )
    finally:
        uploads -= Counter([host])


async def _body(request: web.Request, bytes_max: int) -> dict[str, Any]:
    data = await _read(request, bytes_max, f"the body is larger than {bytes_max} bytes")
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise HttpProblem("malformed", "the body is not valid JSON") from None
    if not isinstance(body, dict):
        raise HttpProblem("malformed", "the body must be a JSON object")
    return body


async def _read(request: web.Request, bytes_max: int, limit: str) -> bytes:
    """Return the body of a request.

    Raises `HttpProblem` if the body is malformed, or with the text `limit` if it exceeds `bytes_max`.
    """
    data = bytearray()
    try:
        async for part in request.content.iter_chunked(1 << 16):
            data += part
            if len(data) > bytes_max:
                raise HttpProblem("too-large", limit)
    except RuntimeError as error:  # aiohttp's error for a body whose connection this peer has closed: the client is told nothing
        if request.transport is not None:
            raise
        raise ConnectionAbortedError("the connection was closed before the body was complete") from error
    except (web.RequestPayloadError, HttpProcessingError):
        raise HttpProblem("malformed", "the body does not match its Content-Encoding or Transfer-Encoding header") from None
    return bytes(data)
