"""A site asks its peer by these calls: `web.routes` declares each of them, and its arguments by name.

What a call gives is the JSON object of its reply, the HTTP status and that object, a text or a file. It raises
`web.problem_details.HttpProblem`.
"""

from __future__ import annotations

from typing import IO, Any, NamedTuple, Protocol

from protocol.prometheus_metrics import PrometheusMetric

Json = dict[str, Any]


class TextReply(NamedTuple):
    content_type: str
    text: str


class FileReply(NamedTuple):
    """Text in UTF-8, to be sent and closed."""

    content_type: str
    body: IO[bytes]


class ApiBackend(Protocol):
    """Beside the calls of `web.routes`, what the application itself asks."""

    async def health_problem(self) -> str:
        """Why this peer does not work; empty if it does."""

    async def require_operator(self, token: str) -> None:
        """Raises `HttpProblem` unless an operator has this token."""

    async def metrics(self) -> tuple[PrometheusMetric, ...]: ...

    async def wait_for_block(self, after: int) -> Json:
        """The newest state, once there is a block above this height, or after some seconds."""

    async def wait_for_change(self, after: int) -> Json:
        """What `live_snapshot` says and its `number`, once that is above this one, or after some seconds."""
