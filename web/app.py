"""The aiohttp application: it reads requests as `web.routes` declares them, calls the site, and writes what it says."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from protocol.prometheus_metrics import CONTENT_TYPE, PrometheusMetric, format_exposition
from web import browser_security, connection_limits, proxy_headers
from web.api_backend import ApiBackend, FileReply, Json, TextReply
from web.event_stream import EventStreams
from web.html_pages import PAGES, START_PAGE, render_page
from web.problem_details import HttpProblem
from web.request_fields import parse_fields
from web.routes import CORE_ROUTES, ENDS_COOKIE, FILE_BYTES_MAX, OPERATOR, SETS_COOKIE, Route, openapi_document

VERSION = version("folkmoot")
BODY_BYTES_MAX = 64 << 10
UPLOADS_MAX = 2  # files that are in memory at once
STATIC = Path(__file__).with_name("static")
VENDOR = Path(__file__).with_name("vendor")
QUERY_OF_EVENTS = next(route.query_fields for route in CORE_ROUTES if route.operation == "events")
UNKNOWN_PATH = "/{path:.*}"
SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
HSTS_HEADER = "max-age=31536000"  # a year: a browser that was here once does not come by plain HTTP again
PROXIES = web.AppKey("proxies", Collection)

log = logging.getLogger("site")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_application(
    site: ApiBackend, routes: Iterable[Route], names: Collection[str] = (), proxies: Collection[str] = ()
) -> web.Application:
    """`routes`: those that `site` answers, beside `CORE_ROUTES`. `names`: of this host, beside its addresses.

    `proxies`: addresses of reverse proxies, which say for whom they ask.
    """
    routes = (*routes, *CORE_ROUTES)
    answers, uploads = Counter[int](), Counter[str]()
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_counted(answers), _guarded(names, proxies)])
    app[PROXIES] = proxies
    listening = EventStreams(site, SECURITY_HEADERS)
    app.on_shutdown.append(listening.close_streams)
    app.on_response_prepare.append(_headed)
    own: dict[str, Handler] = {
        "start": _start,
        **{page.operation: _text("text/html", render_page(page)) for page in PAGES},
        "static": _files(STATIC),
        "vendor": _files(VENDOR),
        "openapi": _text("application/json", json.dumps(openapi_document(VERSION, routes))),
        "health": partial(_health, site),
        "metrics": partial(_metrics, site, answers),
        "events": partial(_events, listening),
    }
    for route in routes:
        handler = own.get(route.operation) or partial(_answer, route, site, uploads)
        app.router.add_route(route.method, route.path, handler, expect_handler=_expect)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, handler, expect_handler=_expect)
    unknown, resolve = app.router.add_route("*", UNKNOWN_PATH, _unknown, expect_handler=_expect), app.router.resolve

    async def resolved(request: web.Request) -> web.UrlMappingMatchInfo:
        """What has no path, as CONNECT, is for an unknown one: the library fails over some headers of it."""
        found = await resolve(request)
        return found if found.http_exception is None else web.UrlMappingMatchInfo({"path": ""}, unknown)

    app.router.resolve = resolved  # type: ignore[method-assign]
    return app


async def _headed(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of each reply, of streams too."""
    response.headers["Server"] = connection_limits.SERVER_HEADER
    if _is_secure(request):
        response.headers["Strict-Transport-Security"] = HSTS_HEADER


def _counted(answers: Counter[int]) -> Any:
    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        answers[response.status] += 1
        return response

    return counted


async def _answer(route: Route, site: ApiBackend, uploads: Counter[str], request: web.Request) -> web.StreamResponse:
    call: Callable[..., Awaitable[Any]] = getattr(site, route.operation)
    given: dict[str, Any] = (
        {"token": browser_security.read_token(request, route.token_owner, _is_secure(request))} if route.token_owner else {}
    )
    given |= parse_fields(route.path_fields, request.match_info) | parse_fields(route.query_fields, request.query)
    if route.by_host:
        given["host"] = _host(request)
    if route.upload and given["format"]:
        connection_limits.set_reply_deadline(request, connection_limits.FILE_SECONDS)
        await site.require_operator(given["token"])
        given["file"] = await _file(request, uploads)
    elif route.body_fields:
        given |= parse_fields(route.body_fields, await _body(request))
    if route.cookie == SETS_COOKIE:
        browser_security.require_own_origin(request)
        given["before"] = request.cookies.get(browser_security.cookie_name(route.cookie_owner, _is_secure(request)), "")
    said: Json | TextReply | FileReply | tuple[int, Json] = await call(**given)
    if isinstance(said, FileReply):
        return _sent(request, said)
    if isinstance(said, TextReply):
        return web.Response(text=said.text, content_type=said.content_type, status=route.status)
    status, body = said if isinstance(said, tuple) else (route.status, said)
    token = body.pop("token") if route.cookie == SETS_COOKIE else ""
    response = web.json_response(body, status=status)
    if route.cookie == SETS_COOKIE:
        browser_security.set_session_cookie(response, route.cookie_owner, _is_secure(request), token, body["seconds"])
    elif route.cookie == ENDS_COOKIE:
        browser_security.delete_session_cookie(response, route.cookie_owner, _is_secure(request))
    return response


def _sent(request: web.Request, file: FileReply) -> web.StreamResponse:
    """The library sends a file piece by piece, and closes it; but not where the reply has no body."""
    if request.method != "HEAD":
        connection_limits.set_reply_deadline(request, connection_limits.FILE_SECONDS)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8")
    with file.body as body:
        length = {"Content-Length": str(body.seek(0, os.SEEK_END))}
    return web.Response(content_type=file.content_type, charset="utf-8", headers=length)


def _guarded(names: Collection[str], proxies: Collection[str]) -> Any:
    told = list[str]()  # the first one

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        connection_limits.set_reply_deadline(request, connection_limits.REQUEST_SECONDS)
        if not told and (proxy := proxy_headers.find_unnamed_proxy(request, proxies)):
            told.append(proxy)
            log.warning("a reverse proxy asks from %s, and all its clients count as one: name it in `web_trusted_proxies`", proxy)
        try:
            browser_security.require_host(request, names)
            response = await handler(request)
        except HttpProblem as problem:
            response = _problem(problem)
        except web.HTTPRequestEntityTooLarge:
            response = _problem(HttpProblem("too-large", f"a body has at most {BODY_BYTES_MAX} bytes"))
        except web.HTTPNotFound:
            response = _problem(HttpProblem("not-found", f"there is nothing at {request.path}"))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            code = "method" if error.status == 405 else error.reason.lower().replace(" ", "-")
            response = _refusal(error.status, code, f"{request.method} {request.path}: {error.reason}")
        for name, value in SECURITY_HEADERS.items():
            response.headers.setdefault(name, value)
        return response

    return guarded


def _problem(problem: HttpProblem) -> web.Response:
    response = _refusal(problem.status, problem.code, problem.detail)
    if problem.retry_after is not None:
        response.headers["Retry-After"] = str(problem.retry_after)
    return response


def _refusal(status: int, code: str, detail: str) -> web.Response:
    body = {"title": code.replace("-", " "), "status": status, "code": code, "detail": detail}
    return web.json_response(body, status=status, content_type="application/problem+json")


async def _expect(request: web.Request) -> None:
    """The library's own handler fails over what is no text in UTF-8."""
    if request.headers["Expect"].lower() != "100-continue":
        raise web.HTTPExpectationFailed(text="Expect: 100-continue is all that is expected here\n")
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # of the reply, nothing is written


async def _unknown(request: web.Request) -> web.StreamResponse:
    allowed: set[str] = set()
    for resource in request.app.router.resources():
        if resource.canonical != "/{path}":
            allowed |= (await resource.resolve(request))[1]
    raise web.HTTPMethodNotAllowed(request.method, allowed) if allowed else web.HTTPNotFound()


async def _start(request: web.Request) -> web.StreamResponse:
    return web.Response(text=f"{START_PAGE.path}\n", status=302, headers={"Location": START_PAGE.path})


def _files(folder: Path) -> Handler:
    """Serves the files that the folder has now: a stranger names one of them, never a path."""
    files = {path.name: path for path in folder.iterdir() if path.is_file()}

    async def file(request: web.Request) -> web.StreamResponse:
        if (path := files.get(request.match_info["name"])) is None:
            raise HttpProblem("not-found", "there is no such file")
        return web.FileResponse(path)

    return file


def _text(content_type: str, text: str) -> Handler:
    async def document(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=content_type)

    return document


async def _events(listening: EventStreams, request: web.Request) -> web.StreamResponse:
    given = parse_fields(QUERY_OF_EVENTS, request.query)
    connection_limits.clear_reply_deadline(request)
    return await listening.stream_events(request, given["live"] == 1, _host(request))


async def _health(site: ApiBackend, request: web.Request) -> web.StreamResponse:
    if problem := await site.health_problem():
        raise HttpProblem("unhealthy", problem)
    return web.Response(text="ok\n")


async def _metrics(site: ApiBackend, answers: Counter[int], request: web.Request) -> web.StreamResponse:
    if not proxy_headers.is_local_request(request):
        await site.require_operator(browser_security.read_token(request, OPERATOR, _is_secure(request)))
    by_status = {f'status="{status}"': float(count) for status, count in sorted(answers.items())}
    metrics = (*await site.metrics(), PrometheusMetric("http_calls_total", "by status of the reply", by_status))
    return web.Response(body=format_exposition(metrics).encode(), headers={"Content-Type": CONTENT_TYPE})


# Reading what strangers send ------------------------------------------------------------------------------------------


async def _file(request: web.Request, uploads: Counter[str]) -> bytes:
    """A body in memory, of an operator: some of them at once, and one of each host."""
    host = _host(request)
    if uploads.total() >= UPLOADS_MAX or uploads[host]:
        raise HttpProblem("too-many", "another file is being read: try again", 2)
    data = bytearray()
    uploads[host] += 1
    try:
        async for part in request.content.iter_chunked(1 << 16):
            data += part
            if len(data) > FILE_BYTES_MAX:
                raise HttpProblem("too-large", f"a file has at most {FILE_BYTES_MAX >> 20} MiB: import it in parts")
    except (web.RequestPayloadError, HttpProcessingError):
        raise HttpProblem("malformed", "the body is not encoded as its headers say") from None
    finally:
        uploads -= Counter([host])
    return bytes(data)


def _is_secure(request: web.Request) -> bool:
    return proxy_headers.is_secure(request, request.app[PROXIES])


def _host(request: web.Request) -> str:
    return proxy_headers.client_host(request, request.app[PROXIES])


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        data = await request.read()
    except (web.RequestPayloadError, HttpProcessingError):
        raise HttpProblem("malformed", "the body is not encoded as its headers say") from None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise HttpProblem("malformed", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise HttpProblem("malformed", "the body is no JSON object")
    return body
