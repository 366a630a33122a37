"""Fields that a call of the HTTP API receives, and values that its handler returns or raises.

Each field has a name and a type. The type checks and converts the field's value. A handler returns a JSON object, a status with
such an object, a text, bytes or a file. It raises `HttpProblem` to refuse a call, in the form of RFC 9457: a status, a code for
programs, and a sentence for people.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO, Any, Final, NamedTuple

Json = dict[str, Any]
REQUIRED: Final = object()  # value of `RequestField.default` for a field that must be present


class TextReply(NamedTuple):
    content_type: str
    text: str


class FileReply(NamedTuple):
    """A reply with a file of text in UTF-8. The server sends and closes the file."""

    content_type: str
    body: IO[bytes]


class BytesReply(NamedTuple):
    content_type: str
    data: bytes


class HeldReply(NamedTuple):
    """A reply to a call whose result is not there yet. The server waits for the result, and then calls the handler again."""

    name: str  # name of the result, by which `web.held_replies.HeldReplies.announce` tells that it is there
    body: Json  # JSON of the reply if the result does not come in time


class Credentials(NamedTuple):
    """What a client's request says about the client."""

    token: str  # empty on routes for everybody
    host: str  # the client's address; for IPv6, its /64 network
    is_local: bool  # True for a program on this machine that is no reverse proxy


# Problem code -> HTTP status. Features declare further codes in `web.routes.RouteSet.problem_statuses`.
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


@dataclass(frozen=True, slots=True)
class FieldType:
    description: str  # description of valid values, which completes the sentence "NAME must be …"
    schema: Json  # JSON Schema of valid values
    is_valid: Callable[[Any], bool]
    convert: Callable[[Any], Any] = lambda value: value  # conversion of a valid value


@dataclass(frozen=True, slots=True)
class RequestField:
    name: str
    kind: FieldType
    about: str = ""
    default: Any = REQUIRED

    def parse_value(self, given: Any) -> Any:
        """Return the field's converted value from a mapping, or its default.

        Raises `HttpProblem` if the value is not of the field's type.
        """
        if self.name not in given and self.default is not REQUIRED:
            return self.default
        value = given.get(self.name)
        if not self.kind.is_valid(value):
            raise HttpProblem("malformed", f"{self.name} must be {self.kind.description}")
        return self.kind.convert(value)


def hex_type(size: int) -> FieldType:
    def fits(value: Any) -> bool:
        return isinstance(value, str) and len(value) == 2 * size and set(value) <= set("0123456789abcdef")

    schema = {"type": "string", "pattern": f"^[0-9a-f]{{{2 * size}}}$"}
    return FieldType(f"{size} bytes in lower-case hex", schema, fits, bytes.fromhex)


def integer_type(low: int, high: int) -> FieldType:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return FieldType(f"a whole number from {low} to {high}", schema, lambda value: type(value) is int and low <= value <= high)


def query_integer_type(low: int, high: int) -> FieldType:
    """Return the type of an integer in a query, where it is a text of decimal digits."""

    def fits(value: Any) -> bool:
        return value.isascii() and value.isdecimal() and len(value) <= len(str(high)) and low <= int(value) <= high

    kind = integer_type(low, high)
    return FieldType(kind.description, kind.schema, fits, int)


def integers_type(most: int, high: int) -> FieldType:
    return _array_type(f"an array of at most {most} whole numbers from 0 to {high}", integer_type(0, high), most)


def hex_list_type(most: int, size: int) -> FieldType:
    one = hex_type(size)
    return _array_type(f"an array of at most {most}, each {one.description}", one, most)


def _array_type(description: str, one: FieldType, most: int) -> FieldType:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= most and all(map(one.is_valid, value))

    schema = {"type": "array", "maxItems": most, "items": one.schema}
    return FieldType(description, schema, fits, lambda value: tuple(map(one.convert, value)))


def choice_type(*values: str) -> FieldType:
    return FieldType("one of " + ", ".join(filter(None, values)), {"enum": list(values)}, lambda value: value in values)


LINE: Final = FieldType(
    "a line of printable characters",
    {"type": "string", "minLength": 1},
    lambda value: isinstance(value, str) and value != "" and value.isprintable(),
)


def line_type(characters_max: int) -> FieldType:
    return FieldType(
        f"a line of 1 to {characters_max} printable characters",
        LINE.schema | {"maxLength": characters_max},
        lambda value: LINE.is_valid(value) and len(value) <= characters_max,
    )


TEXT: Final = FieldType(
    "text",
    {"type": "string"},
    # Texts of JSON may contain unpaired surrogates, which are no characters and are refused.
    lambda value: isinstance(value, str) and not any("\ud800" <= character <= "\udfff" for character in value),
)
FLAG: Final = FieldType("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
TEXTS: Final = FieldType(
    "an array of texts",
    {"type": "array", "items": LINE.schema},
    lambda value: isinstance(value, list) and all(map(LINE.is_valid, value)),
    tuple,
)


CURSOR: Final = FieldType(
    "the `next` of an earlier reply",
    {"type": "string", "pattern": "^[0-9]{1,7}:[0-9]{1,7}$"},
    lambda value: re.fullmatch("[0-9]{1,7}:[0-9]{1,7}", value) is not None,
    lambda value: tuple(map(int, value.split(":"))),
)
TEXTS_BY_NAME: Final = FieldType(
    "an object of at most 32 texts",
    {"type": "object", "maxProperties": 32, "additionalProperties": LINE.schema},
    lambda value: isinstance(value, dict) and len(value) <= 32 and all(map(LINE.is_valid, (*value, *value.values()))),
)
OBJECTS: Final = FieldType(
    "an array of JSON objects",
    {"type": "array", "items": {"type": "object"}},
    lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value),
)


def parse_fields(fields: Sequence[RequestField], given: Any) -> dict[str, Any]:
    """Return the values of the declared fields by name.

    Other entries of the mapping are ignored. Raises `HttpProblem` for an invalid value.
    """
    return {field.name: field.parse_value(given) for field in fields}
