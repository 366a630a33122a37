"""Declarations of HTTP routes and pages, which features name in `Feature.routes` and `Feature.pages`. The application, the
parsing of requests, the OpenAPI document and docs/reference/http-api.md are derived from the declarations. This module imports no
HTTP library.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from features.services import ServiceContext
from protocol.prometheus_metrics import PrometheusMetric
from web.calls import REQUIRED, Credentials, Json, RequestField, hex_type, integer_type
from web.held_replies import HeldReplies

BODY_BYTES_MAX: Final = 64 << 10  # default limit of a JSON body
FILE_BYTES_MAX: Final = 16 << 20
SIGNATURE_TYPE, KEY_TYPE = hex_type(64), hex_type(32)
TIME_TYPE: Final = integer_type(0, 2**53 - 1)


@dataclass(frozen=True, slots=True)
class ClientClass:
    """A class of clients with tokens, such as operators.

    Exactly one feature checks the tokens of a class (`RouteHandlers.authorizers`).
    """

    name: str  # name of the security scheme in the OpenAPI document
    # Name of the cookie of a browser's session; each class has another, since a browser may have several sessions.
    cookie_name: str
    argument: str  # name of the handler's argument with the client's identity, which the authorizer returns
    header: str = ""  # header that programs may set to the token, instead of `Authorization: Bearer TOKEN`


# A function that returns the identity of a client, or raises `HttpProblem` if the peer does not serve the client.
Authorizer = Callable[[Credentials], Awaitable[object]]


def authorize_by_token(find_client: Callable[[str], object]) -> Authorizer:
    """Return an authorizer of clients by their tokens alone. `find_client` runs in Trio's thread, so it must not block."""

    async def authorize(credentials: Credentials) -> object:
        return find_client(credentials.token)

    return authorize


OPERATOR: Final = ClientClass("operator", "folkmoot-operator", "operator")


@dataclass(frozen=True, slots=True)
class RouteReply:
    field_names: str = ""  # fields of the JSON object, separated by spaces
    about: str = ""  # sentences about the reply, without the last period
    content_type: str = "application/json"
    short_text: str = ""  # text for people in place of the field names

    @property
    def text(self) -> str:
        names = self.short_text or ", ".join(f"`{name}`" for name in self.field_names.split())
        return ". ".join(part for part in (names, self.about) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    # Method of a handler object that answers the call. It gets the declared fields by name, and runs in Trio's thread.
    handler: Callable[..., Awaitable[Any]]
    takes_request: bool = False  # True for the server's own handlers, which get aiohttp's request and run in asyncio's thread
    operation_id: str = ""  # id of the operation in the OpenAPI document; required if several routes have the same handler
    method: str
    path: str  # path of the URL, with names of fields in braces
    about: str  # summary of the call as an imperative phrase, for the OpenAPI document and the reference
    client: ClientClass | None = None  # class of clients that may call the route; None for all clients
    body_bytes_max: int = BODY_BYTES_MAX  # limit of a JSON body; a file has FILE_BYTES_MAX
    path_fields: tuple[RequestField, ...] = ()  # fields that the path contains
    query_fields: tuple[RequestField, ...] = ()
    body_fields: tuple[RequestField, ...] = ()
    sets_cookie: ClientClass | None = None  # class whose session the call begins, with a cookie for the browser
    ends_cookie: ClientClass | None = None  # class whose session the call ends
    by_host: bool = False  # True if the handler gets the client's address as the argument `host`
    takes_bytes: bool = False  # True if the handler gets the body's bytes as the argument `body`, at most `body_bytes_max`
    upload: bool = False  # True if the body is a file when the query has `format`: the file becomes the argument `file`
    replies: Mapping[int, RouteReply]
    problem_codes: Mapping[str, str] = field(default_factory=dict)  # problem code of the route itself -> condition of the problem

    @property
    def operation(self) -> str:
        """Name of the operation in the OpenAPI document."""
        return self.operation_id or self.handler.__name__

    @property
    def status(self) -> int:
        """HTTP status of a reply, unless the handler returns another status."""
        return next(iter(self.replies))


@dataclass(frozen=True, slots=True)
class EventFeed:
    """A source of server-sent events.

    While it has listeners, `wait_for_look` is called for looks: JSON objects with the peer's state.
    """

    # Function of the last look, at first {}. Returns a newer look, or the last look again after some seconds.
    wait_for_look: Callable[[Json], Awaitable[Json]]
    order: str  # name of the field of a look that grows from one look to the next
    # Function of two looks. Returns (kind, data) of each event that leads from the first look to the second.
    events_between: Callable[[Json, Json], Iterator[tuple[str, Json]]]
    is_on_request: bool = False  # True if only listeners that request `live` events get this feed


@dataclass(frozen=True, kw_only=True)
class RouteHandlers:
    """Handlers of one feature's routes at a running peer."""

    objects: tuple[object, ...]  # objects whose methods are the handlers of the routes
    authorizers: Mapping[ClientClass, Authorizer] = field(default_factory=dict)
    metrics: Callable[[], tuple[PrometheusMetric, ...]] = tuple  # function that returns the feature's metrics for `/metrics`
    event_feeds: tuple[EventFeed, ...] = ()
    background_tasks: tuple[Callable[[], Awaitable[None]], ...] = ()  # tasks that run while the routes are served
    held_replies: HeldReplies = field(default_factory=HeldReplies)


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSet:
    """The routes of one feature, as `Feature.routes` names them."""

    # Beginnings of paths: each route's path equals a prefix or lies below it, and features share no prefix.
    prefixes: tuple[str, ...]
    routes: tuple[Route, ...]
    make_handlers: Callable[[ServiceContext], RouteHandlers]
    problem_statuses: Mapping[str, int] = field(default_factory=dict)  # problem code of the feature itself -> HTTP status

    def __post_init__(self) -> None:
        for route in self.routes:
            assert any(is_below(route.path, prefix) for prefix in self.prefixes), f"{route.path} is below none of {self.prefixes}"


@dataclass(frozen=True, slots=True)
class HtmlPage:
    name: str  # name in the page's path, template, script and style sheet
    title: str  # title of the page, also in the navigation
    is_for_operators: bool = False  # True if pages for other people do not link to this page

    @property
    def path(self) -> str:
        return f"/{self.name}"


@dataclass(frozen=True, slots=True)
class PageSet:
    """The pages of one feature."""

    # Folder with `templates/NAME.html`, `static/NAME.js` and `static/NAME.css` for each page. `static` is served under
    # `/static/`.
    folder: Path
    pages: tuple[HtmlPage, ...]
    values: Mapping[str, Any] = field(default_factory=dict)  # variables of the templates


def is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")


def key_path_field(name: str) -> tuple[RequestField, ...]:
    return (RequestField(name, KEY_TYPE),)


def openapi_document(version: str, routes: Collection[Route], problem_statuses: Mapping[str, int]) -> dict[str, Any]:
    """Return the OpenAPI document of these routes. `problem_statuses` is problem code -> HTTP status."""
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
    """Return the OpenAPI responses for a route's own problems by HTTP status, and `default` for all other problems."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    by_status: dict[str, list[str]] = {"default": ["Any other problem"]}
    for code, when in route.problem_codes.items():
        by_status.setdefault(str(problem_statuses[code]), []).append(f"{code}: {when}" if when else code)
    return {status: {"description": "; ".join(said), "content": content} for status, said in by_status.items()}
