"""The aiohttp application: it reads requests as `web.routes` declares them, calls the site, and writes what it says."""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Collection
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from protocol.prometheus_metrics import CONTENT_TYPE, PrometheusMetric, format_exposition
from web import asking, connections, defence
from web.fields import read_all
from web.listening import Listening
from web.pages import PAGES, START, rendered
from web.problems import Problem
from web.routes import ENDS, FILE_BYTES_MAX, OPERATOR, ROUTES, SETS, Route, openapi
from web.site import File, Json, Site, Text

VERSION = version("folkmoot")
BODY_BYTES_MAX = 64 << 10
UPLOADS_MAX = 2  # files that are in memory at once
STATIC = Path(__file__).with_name("static")
VENDOR = Path(__file__).with_name("vendor")
QUERY_OF_EVENTS = next(route.query for route in ROUTES if route.call == "events")
UNKNOWN = "/{path:.*}"
SECURITY = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
HSTS = "max-age=31536000"  # a year: a browser that was here once does not come by plain HTTP again
PROXIES = web.AppKey("proxies", Collection)

log = logging.getLogger("site")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(site: Site, names: Collection[str] = (), proxies: Collection[str] = ()) -> web.Application:
    """`names`: of this host, beside its addresses. `proxies`: addresses of reverse proxies, which say for whom they ask."""
    answers, uploads = Counter[int](), Counter[str]()
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_counted(answers), _guarded(names, proxies)])
    app[PROXIES] = proxies
    listening = Listening(site, SECURITY)
    app.on_shutdown.append(listening.end)
    app.on_response_prepare.append(_headed)
    own: dict[str, Handler] = {
        "start": _start,
        **{page.call: _text("text/html", rendered(page)) for page in PAGES},
        "static": _files(STATIC),
        "vendor": _files(VENDOR),
        "openapi": _text("application/json", json.dumps(openapi(VERSION))),
        "health": partial(_health, site),
        "metrics": partial(_metrics, site, answers),
        "events": partial(_events, listening),
    }
    for route in ROUTES:
        handler = own.get(route.call) or partial(_answer, route, site, uploads)
        app.router.add_route(route.method, route.path, handler, expect_handler=_expect)
        if route.method == "GET":
            app.router.add_route("HEAD", route.path, handler, expect_handler=_expect)
    unknown, resolve = app.router.add_route("*", UNKNOWN, _unknown, expect_handler=_expect), app.router.resolve

    async def resolved(request: web.Request) -> web.UrlMappingMatchInfo:
        """What has no path, as CONNECT, is for an unknown one: the library fails over some headers of it."""
        found = await resolve(request)
        return found if found.http_exception is None else web.UrlMappingMatchInfo({"path": ""}, unknown)

    app.router.resolve = resolved  # type: ignore[method-assign]
    return app


async def _headed(request: web.Request, response: web.StreamResponse) -> None:
    """Headers of each reply, of streams too."""
    response.headers["Server"] = connections.SERVER
    if _is_secure(request):
        response.headers["Strict-Transport-Security"] = HSTS


def _counted(answers: Counter[int]) -> Any:
    @web.middleware
    async def counted(request: web.Request, handler: Handler) -> web.StreamResponse:
        response = await handler(request)
        answers[response.status] += 1
        return response

    return counted


async def _answer(route: Route, site: Site, uploads: Counter[str], request: web.Request) -> web.StreamResponse:
    call: Callable[..., Awaitable[Any]] = getattr(site, route.call)
    given: dict[str, Any] = {"token": defence.token_of(request, route.who, _is_secure(request))} if route.who else {}
    given |= read_all(route.ids, request.match_info) | read_all(route.query, request.query)
    if route.by_host:
        given["host"] = _host(request)
    if route.upload and given["format"]:
        connections.begin(request, connections.FILE_SECONDS)
        await site.authorise(given["token"])
        given["file"] = await _file(request, uploads)
    elif route.body:
        given |= read_all(route.body, await _body(request))
    if route.cookie == SETS:
        defence.require_own_origin(request)
        given["before"] = request.cookies.get(defence.cookie_of(route.of, _is_secure(request)), "")
    said: Json | Text | File | tuple[int, Json] = await call(**given)
    if isinstance(said, File):
        return _sent(request, said)
    if isinstance(said, Text):
        return web.Response(text=said.text, content_type=said.content_type, status=route.status)
    status, body = said if isinstance(said, tuple) else (route.status, said)
    token = body.pop("token") if route.cookie == SETS else ""
    response = web.json_response(body, status=status)
    if route.cookie == SETS:
        defence.keep(response, route.of, _is_secure(request), token, body["seconds"])
    elif route.cookie == ENDS:
        defence.drop(response, route.of, _is_secure(request))
    return response


def _sent(request: web.Request, file: File) -> web.StreamResponse:
    """The library sends a file piece by piece, and closes it; but not where the reply has no body."""
    if request.method != "HEAD":
        connections.begin(request, connections.FILE_SECONDS)
        return web.Response(body=file.body, content_type=file.content_type, charset="utf-8")
    with file.body as body:
        length = {"Content-Length": str(body.seek(0, os.SEEK_END))}
    return web.Response(content_type=file.content_type, charset="utf-8", headers=length)


def _guarded(names: Collection[str], proxies: Collection[str]) -> Any:
    told = list[str]()  # the first one

    @web.middleware
    async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
        connections.begin(request, connections.REQUEST_SECONDS)
        if not told and (proxy := asking.unnamed_proxy(request, proxies)):
            told.append(proxy)
            log.warning("a reverse proxy asks from %s, and all its clients count as one: name it in `web_proxies`", proxy)
        try:
            defence.require_host(request, names)
            response = await handler(request)
        except Problem as problem:
            response = _problem(problem)
        except web.HTTPRequestEntityTooLarge:
            response = _problem(Problem("too-large", f"a body has at most {BODY_BYTES_MAX} bytes"))
        except web.HTTPNotFound:
            response = _problem(Problem("not-found", f"there is nothing at {request.path}"))
        except web.HTTPException as error:
            if error.status < 400:
                raise
            code = "method" if error.status == 405 else error.reason.lower().replace(" ", "-")
            response = _refusal(error.status, code, f"{request.method} {request.path}: {error.reason}")
        for name, value in SECURITY.items():
            response.headers.setdefault(name, value)
        return response

    return guarded


def _problem(problem: Problem) -> web.Response:
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
    return web.Response(text=f"{START.path}\n", status=302, headers={"Location": START.path})


def _files(folder: Path) -> Handler:
    """Serves the files that the folder has now: a stranger names one of them, never a path."""
    files = {path.name: path for path in folder.iterdir() if path.is_file()}

    async def file(request: web.Request) -> web.StreamResponse:
        if (path := files.get(request.match_info["name"])) is None:
            raise Problem("not-found", "there is no such file")
        return web.FileResponse(path)

    return file


def _text(content_type: str, text: str) -> Handler:
    async def document(request: web.Request) -> web.StreamResponse:
        return web.Response(text=text, content_type=content_type)

    return document


async def _events(listening: Listening, request: web.Request) -> web.StreamResponse:
    given = read_all(QUERY_OF_EVENTS, request.query)
    connections.begin_stream(request)
    return await listening.stream(request, given["live"] == 1, _host(request))


async def _health(site: Site, request: web.Request) -> web.StreamResponse:
    if problem := await site.health():
        raise Problem("unhealthy", problem)
    return web.Response(text="ok\n")


async def _metrics(site: Site, answers: Counter[int], request: web.Request) -> web.StreamResponse:
    if not asking.is_of_this_machine(request):
        await site.authorise(defence.token_of(request, OPERATOR, _is_secure(request)))
    by_status = {f'status="{status}"': float(count) for status, count in sorted(answers.items())}
    metrics = (*await site.metrics(), PrometheusMetric("http_calls_total", "by status of the reply", by_status))
    return web.Response(body=format_exposition(metrics).encode(), headers={"Content-Type": CONTENT_TYPE})


# Reading what strangers send ------------------------------------------------------------------------------------------


async def _file(request: web.Request, uploads: Counter[str]) -> bytes:
    """A body in memory, of an operator: some of them at once, and one of each host."""
    host = _host(request)
    if uploads.total() >= UPLOADS_MAX or uploads[host]:
        raise Problem("too-many", "another file is being read: try again", 2)
    data = bytearray()
    uploads[host] += 1
    try:
        async for part in request.content.iter_chunked(1 << 16):
            data += part
            if len(data) > FILE_BYTES_MAX:
                raise Problem("too-large", f"a file has at most {FILE_BYTES_MAX >> 20} MiB: import it in parts")
    except (web.RequestPayloadError, HttpProcessingError):
        raise Problem("malformed", "the body is not encoded as its headers say") from None
    finally:
        uploads -= Counter([host])
    return bytes(data)


def _is_secure(request: web.Request) -> bool:
    return asking.is_secure(request, request.app[PROXIES])


def _host(request: web.Request) -> str:
    return asking.host_of(request, request.app[PROXIES])


async def _body(request: web.Request) -> dict[str, Any]:
    try:
        data = await request.read()
    except (web.RequestPayloadError, HttpProcessingError):
        raise Problem("malformed", "the body is not encoded as its headers say") from None
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise Problem("malformed", "the body is no JSON") from None
    if not isinstance(body, dict):
        raise Problem("malformed", "the body is no JSON object")
    return body
