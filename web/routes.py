"""Declarations of HTTP routes and pages, which features name in `Feature.routes` and `Feature.pages`.

The application, the parsing of requests, the OpenAPI document and docs/reference/http-api.md follow from them. This
module imports no HTTP library.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from features.services import ServiceContext
from protocol.prometheus_metrics import PrometheusMetric
from web.calls import REQUIRED, Json, RequestField, hex_type, integer_type

BODY_BYTES_MAX: Final = 64 << 10  # default limit of a JSON body
FILE_BYTES_MAX: Final = 16 << 20
SIGNATURE_TYPE, KEY_TYPE = hex_type(64), hex_type(32)
TIME_TYPE: Final = integer_type(0, 2**53 - 1)


@dataclass(frozen=True, slots=True)
class ClientClass:
    """Class of clients with tokens, such as operators. Exactly one feature checks a class (`RouteHandlers.authorizers`)."""

    name: str  # name of the security scheme in the OpenAPI document
    cookie_name: str  # cookie of a browser's session; a browser may have sessions of several classes
    argument: str  # name of the handler's argument that gets the identity from the authorizer


OPERATOR: Final = ClientClass("operator", "folkmoot-operator", "operator")


@dataclass(frozen=True, slots=True)
class RouteReply:
    field_names: str = ""  # fields of the JSON object, separated by spaces
    about: str = ""  # sentences, without the last period
    content_type: str = "application/json"
    short_text: str = ""  # text for people, which replaces the field names

    @property
    def text(self) -> str:
        names = self.short_text or ", ".join(f"`{name}`" for name in self.field_names.split())
        return ". ".join(part for part in (names, self.about) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    # A method of a handler object. It takes the declared fields by name, and runs in Trio's thread.
    handler: Callable[..., Awaitable[Any]]
    takes_request: bool = False  # the handler is the server's own: it takes aiohttp's request, in asyncio's thread
    operation_id: str = ""  # id in the OpenAPI document; required if several routes share a handler
    method: str
    path: str  # path with names of fields in braces
    about: str  # an imperative phrase: the summary in the OpenAPI document and the reference
    client: ClientClass | None = None  # class of clients that may call it; None: everybody
    body_bytes_max: int = BODY_BYTES_MAX  # limit of a JSON body; a file has FILE_BYTES_MAX
    path_fields: tuple[RequestField, ...] = ()  # fields in the path
    query_fields: tuple[RequestField, ...] = ()
    body_fields: tuple[RequestField, ...] = ()
    sets_cookie: ClientClass | None = None  # begins a session of this class, with a cookie for the browser
    ends_cookie: ClientClass | None = None  # ends the session of this class
    by_host: bool = False  # the handler gets the client's address as the argument `host`
    upload: bool = False  # if the query has a `format`, the body is a file and becomes the argument `file`
    replies: Mapping[int, RouteReply]
    problem_codes: Mapping[str, str] = field(default_factory=dict)  # the route's own problem codes, each with its condition

    @property
    def operation(self) -> str:
        """Name of the operation in the OpenAPI document."""
        return self.operation_id or self.handler.__name__

    @property
    def status(self) -> int:
        """Status of a reply, unless the handler returns another one."""
        return next(iter(self.replies))


@dataclass(frozen=True, slots=True)
class EventFeed:
    """Source of server-sent events. While there are listeners, it takes looks: JSON objects with the peer's state."""

    # Takes the last look, {} at first. Returns a newer look, or the same one after some seconds.
    wait_for_look: Callable[[Json], Awaitable[Json]]
    order: str  # the field that grows from one look to the next
    # Takes two looks. Returns the kinds and the data of the events that lead from the first to the second.
    events_between: Callable[[Json, Json], Iterator[tuple[str, Json]]]
    is_on_request: bool = False  # sent only to listeners that ask for `live` events


@dataclass(frozen=True, kw_only=True)
class RouteHandlers:
    """Handlers of one feature's routes at a running peer."""

    objects: tuple[object, ...]  # instances of the classes whose methods the routes name
    # Takes a token and returns the client's identity. Raises `HttpProblem` for an unknown token.
    authorizers: Mapping[ClientClass, Callable[[str], object]] = field(default_factory=dict)
    metrics: Callable[[], tuple[PrometheusMetric, ...]] = tuple  # metrics for `/metrics`
    event_feeds: tuple[EventFeed, ...] = ()
    background_tasks: tuple[Callable[[], Awaitable[None]], ...] = ()  # run while the routes are served


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSet:
    """The routes of one feature, as `Feature.routes` names them."""

    prefixes: tuple[str, ...]  # each path is a prefix or lies below one; prefixes of features are disjoint
    routes: tuple[Route, ...]
    make_handlers: Callable[[ServiceContext], RouteHandlers]
    problem_statuses: Mapping[str, int] = field(default_factory=dict)  # HTTP status of the feature's own problem codes

    def __post_init__(self) -> None:
        for route in self.routes:
            assert any(is_below(route.path, prefix) for prefix in self.prefixes), f"{route.path} is below none of {self.prefixes}"


@dataclass(frozen=True, slots=True)
class HtmlPage:
    name: str  # name of its path, template, script and style sheet
    title: str  # title of the page, also in the navigation
    is_for_operators: bool = False  # pages for other people do not link to it

    @property
    def path(self) -> str:
        return f"/{self.name}"


@dataclass(frozen=True, slots=True)
class PageSet:
    """Pages of one feature."""

    # It has `templates/NAME.html`, `static/NAME.js` and `static/NAME.css` for each page. `static` is served under `/static/`.
    folder: Path
    pages: tuple[HtmlPage, ...]
    values: Mapping[str, Any] = field(default_factory=dict)  # variables of the templates


def is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def key_path_field(name: str) -> tuple[RequestField, ...]:
    return (RequestField(name, KEY_TYPE),)


def openapi_document(version: str, routes: Collection[Route], problem_statuses: Mapping[str, int]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes. `problem_statuses` has the HTTP status of each of their problem codes."""
    paths: dict[str, Any] = {}
    clients = {OPERATOR.name, *(route.client.name for route in routes if route.client)}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, problem_statuses)
    problem = {
        "type": "object",
        "required": ["title", "status", "code", "detail"],
        "properties": {"status": {"type": "integer"}, "code": {"enum": list(problem_statuses)}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Folkmoot", "version": version},
        "paths": paths,
        "components": {
            "schemas": {"Problem": problem},
            "securitySchemes": {name: {"type": "http", "scheme": "bearer"} for name in sorted(clients)},
        },
    }


def _operation(route: Route, problem_statuses: Mapping[str, int]) -> dict[str, Any]:
    found: dict[str, Any] = {"operationId": route.operation, "summary": route.about}
    if route.client:
        found["security"] = [{route.client.name: []}]
    placed = [("path", item) for item in route.path_fields] + [("query", item) for item in route.query_fields]
    if placed:
        found["parameters"] = [
            {"name": item.name, "in": place, "required": item.default is REQUIRED, "schema": item.kind.schema}
            for place, item in placed
        ]
    if route.body_fields:
        needed = [item.name for item in route.body_fields if item.default is REQUIRED]
        properties = {item.name: item.kind.schema for item in route.body_fields}
        schema = {"type": "object", "required": needed, "properties": properties}
        found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    found["responses"] = {str(status): _response(reply) for status, reply in route.replies.items()}
    return found | {"responses": found["responses"] | _problems(route, problem_statuses)}


def _response(reply: RouteReply) -> dict[str, Any]:
    schema: dict[str, Any] = (
        {"type": "object", "required": reply.field_names.split()} if reply.field_names else {"type": "string"}
    )
    return {"description": reply.text or "The reply", "content": {reply.content_type: {"schema": schema}}}


def _problems(route: Route, problem_statuses: Mapping[str, int]) -> dict[str, Any]:
    """Return the responses for the route's own problems, by status, and `default` for all others."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    by_status: dict[str, list[str]] = {"default": ["Any other problem"]}
    for code, when in route.problem_codes.items():
        by_status.setdefault(str(problem_statuses[code]), []).append(f"{code}: {when}" if when else code)
    return {status: {"description": "; ".join(said), "content": content} for status, said in by_status.items()}
