"""What the handler of a route returns: a JSON object, a status and such an object, a text or a file."""

from __future__ import annotations

from typing import IO, Any, NamedTuple

Json = dict[str, Any]


class TextReply(NamedTuple):
    content_type: str
    text: str


class FileReply(NamedTuple):
    """Text in UTF-8, to be sent and closed."""

    content_type: str
    body: IO[bytes]
