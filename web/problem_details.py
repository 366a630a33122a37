"""Why a call is refused, as RFC 9457 says it: a status, a code for programs, and a sentence for people."""

from __future__ import annotations

from typing import Final

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
