"""What a call of the HTTP API is sent: each field by name and kind. A kind reads a value, and says what it takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from web.problems import Problem

Schema = dict[str, Any]
NEEDED: Final = object()  # in the place of a default: the field has to be there


@dataclass(frozen=True, slots=True)
class Kind:
    says: str  # what it takes, after "is"
    schema: Schema  # the same, in JSON Schema
    fits: Callable[[Any], bool]
    read: Callable[[Any], Any] = lambda value: value  # of what fits


@dataclass(frozen=True, slots=True)
class Field:
    name: str
    kind: Kind
    about: str = ""
    default: Any = NEEDED

    def read(self, given: Any) -> Any:
        """Raises `Problem` for what is not of the kind."""
        if not self.kind.fits(given):
            raise Problem("malformed", f"{self.name} is {self.kind.says}")
        return self.kind.read(given)


def hexadecimal(size: int) -> Kind:
    def fits(value: Any) -> bool:
        return isinstance(value, str) and len(value) == 2 * size and set(value) <= set("0123456789abcdef")

    schema = {"type": "string", "pattern": f"^[0-9a-f]{{{2 * size}}}$"}
    return Kind(f"{size} bytes in lower-case hex", schema, fits, bytes.fromhex)


def _is_whole(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def whole(low: int, high: int) -> Kind:
    schema = {"type": "integer", "minimum": low, "maximum": high}
    return Kind(f"a whole number from {low} to {high}", schema, lambda value: _is_whole(value, low, high))


def whole_in_query(low: int, high: int) -> Kind:
    """The text of a URL."""

    def fits(value: Any) -> bool:
        return value.isascii() and value.isdecimal() and len(value) <= len(str(high)) and low <= int(value) <= high

    kind = whole(low, high)
    return Kind(kind.says, kind.schema, fits, int)


def wholes(most: int, high: int) -> Kind:
    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= most and all(_is_whole(item, 0, high) for item in value)

    schema = {"type": "array", "maxItems": most, "items": whole(0, high).schema}
    return Kind(f"an array of at most {most} whole numbers from 0 to {high}", schema, fits, tuple)


def hexadecimals(most: int, size: int) -> Kind:
    one = hexadecimal(size)

    def fits(value: Any) -> bool:
        return isinstance(value, list) and len(value) <= most and all(map(one.fits, value))

    schema = {"type": "array", "maxItems": most, "items": one.schema}
    return Kind(f"an array of at most {most}, each {one.says}", schema, fits, lambda value: tuple(map(bytes.fromhex, value)))


def is_unicode(text: str) -> bool:
    """JSON may write halves of characters: no text."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def one_of(*values: str) -> Kind:
    return Kind("one of " + ", ".join(filter(None, values)), {"enum": list(values)}, lambda value: value in values)


LINE: Final = Kind(
    "a line of text, all of its characters printable",
    {"type": "string", "minLength": 1},
    lambda value: isinstance(value, str) and value != "" and value.isprintable(),
)
TEXT: Final = Kind("text", {"type": "string"}, lambda value: isinstance(value, str) and is_unicode(value))
FLAG: Final = Kind("true or false", {"type": "boolean"}, lambda value: isinstance(value, bool))
TEXTS: Final = Kind(
    "an array of texts",
    {"type": "array", "items": LINE.schema},
    lambda value: isinstance(value, list) and all(map(LINE.fits, value)),
    tuple,
)


def _reads_cursor(value: Any) -> bool:
    place, _, number = value.partition(":")
    return all(part.isascii() and part.isdecimal() and len(part) <= 7 for part in (place, number))


CURSOR: Final = Kind(
    "`next` of another reply",
    {"type": "string", "pattern": "^[0-9]{1,7}:[0-9]{1,7}$"},
    _reads_cursor,
    lambda value: tuple(map(int, value.split(":"))),
)
TEXTS_BY_NAME: Final = Kind(
    "an object of at most 32 texts",
    {"type": "object", "maxProperties": 32, "additionalProperties": LINE.schema},
    lambda value: isinstance(value, dict) and len(value) <= 32 and all(map(LINE.fits, (*value, *value.values()))),
)
OBJECTS: Final = Kind(
    "an array of JSON objects",
    {"type": "array", "items": {"type": "object"}},
    lambda value: isinstance(value, list) and all(isinstance(item, dict) for item in value),
)


def read_all(fields: Sequence[Field], given: Any) -> dict[str, Any]:
    """Values by name, from a mapping; what it has beside them is passed over. Raises `Problem`."""
    found = {}
    for field in fields:
        if field.name not in given and field.default is not NEEDED:
            found[field.name] = field.default
        else:
            found[field.name] = field.read(given.get(field.name))
    return found
