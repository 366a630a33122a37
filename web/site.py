"""A site asks its peer by these calls: each method is one call of the HTTP API. Bytes are in lower-case hex."""

from __future__ import annotations

from typing import Any, Protocol

Json = dict[str, Any]


class Site(Protocol):
    """Every method raises `web.problems.Problem`."""

    async def network(self) -> Json: ...

    async def enrol(self, key: bytes, name: str, signature: bytes, custodial: bool, invitation: str) -> Json: ...

    async def challenge(self, key: bytes) -> Json: ...

    async def session(self, key: bytes, nonce: bytes, expires_ms: int, signature: bytes) -> Json: ...

    async def tasks(self, token: str, limit: int) -> Json: ...

    async def submit(
        self, token: str, assignment: bytes, answer: tuple[int, ...], salt: bytes, signature: bytes
    ) -> tuple[int, Json]:
        """The HTTP status, and the body."""

    async def skip(self, token: str, assignment: bytes, reason: str) -> Json: ...

    async def annotation(self, annotation: bytes) -> Json: ...

    async def stats(self) -> Json: ...

    async def leaderboard(self, limit: int) -> Json: ...

    async def export(self, project: bytes, format: str) -> tuple[str, str]:
        """Content type and text."""
