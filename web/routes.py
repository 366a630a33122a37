"""Declarations of HTTP calls, and those that every site has.

The application's routes, the parsing of requests, the OpenAPI document and the table in docs/protocol/curation.md follow from
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from web.event_stream import LISTENERS_MAX, LISTENERS_OF_HOST_MAX
from web.html_pages import PAGES, START_PAGE
from web.problem_details import STATUS_BY_CODE
from web.request_fields import (
    FLAG,
    LINE,
    REQUIRED,
    TEXT,
    RequestField,
    hex_type,
    integer_type,
    query_integer_type,
)

ANNOTATOR, OPERATOR = "annotator", "operator"
SETS_COOKIE, ENDS_COOKIE = "sets", "ends"  # what a call does to the cookie of a session
TOKEN_LETTERS: Final = {"": "", ANNOTATOR: "T", OPERATOR: "O"}  # of the table
FILE_BYTES_MAX: Final = 16 << 20
SIGNATURE_TYPE, KEY_TYPE = hex_type(64), hex_type(32)
TIME_TYPE: Final = integer_type(0, 2**53 - 1)


@dataclass(frozen=True, slots=True)
class RouteReply:
    field_names: str = ""  # fields of the JSON object, with blanks between them
    about: str = ""
    content_type: str = "application/json"
    short_text: str = ""  # instead of the names, for people

    @property
    def text(self) -> str:
        names = self.short_text or ", ".join(f"`{name}`" for name in self.field_names.split())
        return " ".join(part for part in (names, self.about) if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    operation: str  # the method of `web.api_backend.ApiBackend`, or of the application itself
    method: str
    path: str  # fields stand in braces
    about: str
    token_owner: str = ""  # whose token it takes
    path_fields: tuple[RequestField, ...] = ()  # in the path
    query_fields: tuple[RequestField, ...] = ()
    body_fields: tuple[RequestField, ...] = ()
    cookie: str = ""
    cookie_owner: str = ANNOTATOR  # whose cookie
    by_host: bool = False  # the site is told which host asks, as the argument `host`
    upload: bool = False  # a file is its body, and the argument `file`, where the query names a `format`
    replies: Mapping[int, RouteReply]
    problem_codes: Mapping[str, str] = field(default_factory=dict)  # of problems that are its own, and when

    @property
    def status(self) -> int:
        """Unless the site says otherwise."""
        return next(iter(self.replies))


def key_path_field(name: str) -> tuple[RequestField, ...]:
    return (RequestField(name, KEY_TYPE),)


CORE_ROUTES: Final = (
    Route(
        operation="events", method="GET", path="/api/v1/events", about="what happens, as it does",
        query_fields=(RequestField("live", query_integer_type(0, 1), "1: `live` events, too", default=0),),
        replies={200: RouteReply("", "a stream of [server-sent events](#events)", "text/event-stream")},
        problem_codes={"too-many": f"above {LISTENERS_OF_HOST_MAX} streams of one address, {LISTENERS_MAX} in all"},
    ),
    Route(
        operation="openapi", method="GET", path="/api/v1/openapi.json", about="this table, for programs",
        replies={200: RouteReply("openapi info paths components")},
    ),
    Route(
        operation="health", method="GET", path="/healthz", about="whether this peer works",
        replies={200: RouteReply("", "`ok`", "text/plain")}, problem_codes={"unhealthy": "with the reason"},
    ),
    Route(
        operation="metrics", method="GET", path="/metrics", about="counts of this peer, for Prometheus",
        replies={200: RouteReply("", "Prometheus' text format", "text/plain")},
        problem_codes={"unauthorized": "without `O`, unless a program of this machine asks by itself"},
    ),
    Route(
        operation="start", method="GET", path="/", about="leads to a page for people",
        replies={302: RouteReply("", f"to `{START_PAGE.path}`", "text/plain")},
    ),
    *(
        Route(
            operation=page.operation, method="GET", path=page.path, about="a page for people",
            replies={200: RouteReply("", "HTML", "text/html")},
        )
        for page in PAGES
    ),
    *(
        Route(
            operation=call, method="GET", path=f"/{call}/{{name}}", about="its files", path_fields=(RequestField("name", TEXT),),
            replies={200: RouteReply("", "a file", "application/octet-stream")}, problem_codes={"not-found": ""},
        )
        for call in ("static", "vendor")
    ),
)  # fmt: skip


# The documents --------------------------------------------------------------------------------------------------------


def markdown_table(routes: Iterable[Route]) -> list[str]:
    """Rows of docs/protocol/curation.md."""
    return [f"| `{route.method} {route.path}` | {_sends(route)} | {_replies(route)} |" for route in routes]


def _sends(route: Route) -> str:
    said = [_shown(item) for item in (*route.query_fields, *route.body_fields)]
    return "; ".join(part for part in (TOKEN_LETTERS[route.token_owner], ", ".join(said)) if part)


def _shown(item: RequestField) -> str:
    shown = {
        REQUIRED: "",
        None: " (custodial: none)",
        False: " (else false)",
        "": " (else empty)",
        (): " (else none)",
        b"": " (else of all)",
    }
    is_number = type(item.default) is int  # 0 is no False
    default = f" (else {item.default})" if is_number else shown.get(item.default, f" (else {item.default})")
    kind = (
        "" if item.kind in (KEY_TYPE, SIGNATURE_TYPE, TIME_TYPE, FLAG, LINE, TEXT) or item.about else f" {item.kind.description}"
    )
    return f"`{item.name}`{kind}{' ' * bool(item.about)}{item.about}{default}"


def _replies(route: Route) -> str:
    said = [f"{status} {reply.text}".replace(" ;", ";").replace(" :", ":") for status, reply in route.replies.items()]
    return ". ".join(
        ["; ".join(said), ", ".join(f"`{code}` {when}".strip() for code, when in route.problem_codes.items())]
    ).rstrip(". ")


def openapi_document(version: str, routes: Iterable[Route]) -> dict[str, Any]:
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route)
    problem = {
        "type": "object",
        "required": ["title", "status", "code", "detail"],
        "properties": {"status": {"type": "integer"}, "code": {"enum": list(STATUS_BY_CODE)}},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "Folkmoot", "version": version},
        "paths": paths,
        "components": {
            "schemas": {"Problem": problem},
            "securitySchemes": {who: {"type": "http", "scheme": "bearer"} for who in (ANNOTATOR, OPERATOR)},
        },
    }


def _operation(route: Route) -> dict[str, Any]:
    found: dict[str, Any] = {"operationId": route.operation, "summary": route.about}
    if route.token_owner:
        found["security"] = [{route.token_owner: []}]
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
    return found | {"responses": found["responses"] | _problems(route)}


def _response(reply: RouteReply) -> dict[str, Any]:
    schema: dict[str, Any] = (
        {"type": "object", "required": reply.field_names.split()} if reply.field_names else {"type": "string"}
    )
    return {"description": reply.text or "the reply", "content": {reply.content_type: {"schema": schema}}}


def _problems(route: Route) -> dict[str, Any]:
    """Its own by status; of all others, `default`."""
    content = {"application/problem+json": {"schema": {"$ref": "#/components/schemas/Problem"}}}
    by_status: dict[str, list[str]] = {"default": ["a problem"]}
    for code, when in route.problem_codes.items():
        by_status.setdefault(str(STATUS_BY_CODE[code]), []).append(f"{code} {when}".strip())
    return {status: {"description": "; ".join(said), "content": content} for status, said in by_status.items()}
