"""The aiohttp application: it reads requests, calls the site, and writes what it says. It knows nothing of curation."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from web.problems import Problem
from web.site import Site

BODY_BYTES_MAX = 64 << 10
STATIC = Path(__file__).with_name("static")
VENDOR = Path(__file__).with_name("vendor")
UNKNOWN = "/{path:.*}"
SECURITY = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def application(site: Site) -> web.Application:
    app = web.Application(client_max_size=BODY_BYTES_MAX, middlewares=[_guarded])
    calls = Calls(site)
    app.add_routes(
        [
            web.get("/", _page, expect_handler=_expect),
            web.get("/healthz", _health, expect_handler=_expect),
            web.get("/api/v1/network", calls.network, expect_handler=_expect),
            web.post("/api/v1/annotators", calls.enrol, expect_handler=_expect),
            web.post("/api/v1/challenges", calls.challenge, expect_handler=_expect),
            web.post("/api/v1/sessions", calls.session, expect_handler=_expect),
            web.get("/api/tasks", calls.tasks, expect_handler=_expect),
            web.post("/api/submit", calls.submit, expect_handler=_expect),
            web.post("/api/v1/assignments/{id}/skip", calls.skip, expect_handler=_expect),
            web.get("/api/v1/annotations/{id}", calls.annotation, expect_handler=_expect),
            web.get("/api/stats", calls.stats, expect_handler=_expect),
            web.get("/api/leaderboard", calls.leaderboard, expect_handler=_expect),
            web.get("/api/v1/projects/{id}/export", calls.export, expect_handler=_expect),
            web.get("/static/{name}", _files(STATIC), expect_handler=_expect),
            web.get("/vendor/{name}", _files(VENDOR), expect_handler=_expect),
            web.route("*", UNKNOWN, _unknown, expect_handler=_expect),
        ]
    )
    return app


@web.middleware
async def _guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
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


async def _page(request: web.Request) -> web.StreamResponse:
    return web.FileResponse(STATIC / "label.html")


def _files(folder: Path) -> Handler:
    """Serves the files that the folder has now: a stranger names one of them, never a path."""
    files = {path.name: path for path in folder.iterdir() if path.is_file()}

    async def file(request: web.Request) -> web.StreamResponse:
        if (path := files.get(request.match_info["name"])) is None:
            raise Problem("not-found", "there is no such file")
        return web.FileResponse(path)

    return file


async def _health(request: web.Request) -> web.StreamResponse:
    return web.Response(text="ok\n")


class Calls:
    def __init__(self, site: Site) -> None:
        self._site = site

    async def network(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._site.network())

    async def enrol(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        key, signature = _bytes(body, "key", 32), _bytes(body, "signature", 64)
        custodial, invitation = body.get("custodial", False), body.get("invitation", "")
        if not isinstance(custodial, bool) or not isinstance(invitation, str):
            raise Problem("malformed", "custodial is true or false, invitation is text")
        return web.json_response(await self._site.enrol(key, _text(body, "name"), signature, custodial, invitation), status=201)

    async def challenge(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._site.challenge(_bytes(await _body(request), "key", 32)), status=201)

    async def session(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        key, nonce, signature = _bytes(body, "key", 32), _bytes(body, "nonce", 16), _bytes(body, "signature", 64)
        return web.json_response(await self._site.session(key, nonce, _number(body, "expires_ms"), signature), status=201)

    async def tasks(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._site.tasks(_token(request), _limit(request, 1, 8)))

    async def submit(self, request: web.Request) -> web.StreamResponse:
        token, body = _token(request), await _body(request)
        answer = body.get("answer")
        if not isinstance(answer, list) or not all(type(item) is int and 0 <= item < 256 for item in answer) or len(answer) > 16:
            raise Problem("malformed", "answer is an array of at most 16 integers from 0 to 255")
        assignment, salt, signature = _bytes(body, "assignment", 32), _bytes(body, "salt", 16), _bytes(body, "signature", 64)
        status, reply = await self._site.submit(token, assignment, tuple(answer), salt, signature)
        return web.json_response(reply, status=status)

    async def skip(self, request: web.Request) -> web.StreamResponse:
        token, body = _token(request), await _body(request)
        return web.json_response(await self._site.skip(token, _id(request), _text(body, "reason")))

    async def annotation(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._site.annotation(_id(request)))

    async def stats(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._site.stats())

    async def leaderboard(self, request: web.Request) -> web.StreamResponse:
        return web.json_response(await self._site.leaderboard(_limit(request, 20, 1000)))

    async def export(self, request: web.Request) -> web.StreamResponse:
        content_type, text = await self._site.export(_id(request), request.query.get("format", "jsonl"))
        return web.Response(text=text, content_type=content_type)


# Reading what strangers send ------------------------------------------------------------------------------------------


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


def _bytes(body: dict[str, Any], name: str, size: int) -> bytes:
    return _hex(body.get(name), name, size)


def _hex(value: object, name: str, size: int) -> bytes:
    if isinstance(value, str) and len(value) == 2 * size and set(value) <= set("0123456789abcdef"):
        return bytes.fromhex(value)
    raise Problem("malformed", f"{name} is {size} bytes in lower-case hex")


def _text(body: dict[str, Any], name: str) -> str:
    value = body.get(name)
    if not isinstance(value, str) or not value or not value.isprintable():
        raise Problem("malformed", f"{name} is text, at least one printable character")
    return value


def _number(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if type(value) is not int or not 0 <= value < 2**53:
        raise Problem("malformed", f"{name} is a whole number of 0 or more")
    return value


def _id(request: web.Request) -> bytes:
    return _hex(request.match_info["id"], "the id", 32)


def _limit(request: web.Request, default: int, most: int) -> int:
    text = request.query.get("limit", str(default))
    if not (text.isascii() and text.isdecimal() and len(text) <= 6 and 1 <= int(text) <= most):
        raise Problem("malformed", f"limit is a whole number from 1 to {most}")
    return int(text)


def _token(request: web.Request) -> str:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Problem("unauthorized", "say `Authorization: Bearer` and the token of a session")
    return token
