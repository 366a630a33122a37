"""The memory for large bodies of requests. Each has its part reserved from before it is read until its call returns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from aiohttp import web

from web.calls import HttpProblem
from web.routes import BODY_BYTES_MAX, Route

# Bytes of all large bodies in memory. A program alone may have half of them: eleven requests of 5 MB that wait to be decoded.
LARGE_BODIES_BYTES_MAX: Final = 128 << 20
RETRY_SECONDS: Final = 1  # time after which a program may send a refused body again


class LargeBodies:
    """The large bodies in memory, by the tokens of their clients. A client has at most half of the bytes that others leave."""

    def __init__(self, bytes_max: int = LARGE_BODIES_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._reserved = Counter[str]()

    @contextmanager
    def reserve_bytes(self, token: str, count: int) -> Iterator[None]:
        """Reserve memory in the `with` block. Raises `HttpProblem` if the client has too many bytes already."""
        left_by_others = self._bytes_max - self._reserved.total() + self._reserved[token]
        if self._reserved[token] + count > left_by_others // 2:
            raise HttpProblem("too-many", "other large requests are being received: send this one again", RETRY_SECONDS)
        self._reserved[token] += count
        try:
            yield
        finally:
            self._reserved -= Counter({token: count})


def count_large_bytes(request: web.Request, route: Route) -> int:
    """Return the largest number of bytes that the body may have in memory, or 0 for a body within the limit of other routes."""
    bytes_max = route.body_bytes_max
    # The length in the header is that before decompression.
    if request.content_length is not None and "Content-Encoding" not in request.headers:
        bytes_max = min(bytes_max, request.content_length)
    return bytes_max if bytes_max > BODY_BYTES_MAX else 0
