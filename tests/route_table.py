"""The table of HTTP routes in docs/protocol/curation.md, made from the declarations of the routes."""

from __future__ import annotations

from collections.abc import Iterable

from web.calls import FLAG, LINE, REQUIRED, TEXT, RequestField
from web.routes import KEY_TYPE, SIGNATURE_TYPE, TIME_TYPE, Route


def markdown_table(routes: Iterable[Route]) -> list[str]:
    """Return the table's rows for docs/protocol/curation.md."""
    return [f"| `{route.method} {route.path}` | {_sends(route)} | {_replies(route)} |" for route in routes]


def _sends(route: Route) -> str:
    said = [_shown(item) for item in (*route.query_fields, *route.body_fields)]
    return "; ".join(part for part in (route.client.letter if route.client else "", ", ".join(said)) if part)


def _shown(item: RequestField) -> str:
    shown = {
        REQUIRED: "",
        None: " (custodial: none)",
        False: " (else false)",
        "": " (else empty)",
        (): " (else none)",
        b"": " (else of all)",
    }
    is_number = type(item.default) is int  # tells 0 from False
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
