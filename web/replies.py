"""What the handler of a route returns: a JSON object, a status and such an object, a text or a file."""

from __future__ import annotations

from typing import IO, Any, Final, NamedTuple

Json = dict[str, Any]


class TextReply(NamedTuple):
    content_type: str
    text: str


class FileReply(NamedTuple):
    """Text in UTF-8, to be sent and closed."""

    content_type: str
    body: IO[bytes]


# Problem code -> HTTP status. A feature declares codes of its own in `web.routes.RouteSet.problem_statuses`.
STATUS_BY_CODE: Final = {
    "malformed": 400,
    "unauthorized": 401,
    "forbidden": 403,
    "not-found": 404,
    "refused": 409,
    "gone": 410,
    "too-large": 413,
    "misdirected": 421,
    "misfit": 422,
    "too-many": 429,
    "internal": 500,
    "no-quorum": 503,
    "stopping": 503,
    "unhealthy": 503,
}


class HttpProblem(Exception):
    def __init__(self, code: str, detail: str, retry_after: int | None = None) -> None:
        super().__init__(detail)
        self.code, self.detail, self.retry_after = code, detail, retry_after
