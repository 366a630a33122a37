"""Canonical msgpack with strict, typed decoding.

A wire type is a frozen dataclass. It travels as the msgpack array of its fields; a *message* (a dataclass with a `TAG`)
travels as `[tag, fields…]`. Dictionaries travel as arrays of pairs with strictly ascending keys. There is exactly one
byte string per value: every decoder encodes again and refuses bytes that differ.

Types understood: `bool int float str bytes tuple[T, ...] tuple[A, B] dict[K, V] T | None`, enums of int or str, and dataclasses
of these; `Annotated[T, Length(low, high)]` bounds bytes, text and collections, `Annotated[int, Between(low, high)]` numbers.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import itertools
import math
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

import msgpack

from protocol.errors import RemoteProtocolError
from protocol.limits import MESSAGE_BYTES_MAX

T = TypeVar("T")
Plain = Any  # what msgpack gives back: nested lists of None, bool, int, float, str, bytes
Reader = Callable[[Plain, str], Any]

INTEGER_MAX = 2**63 - 1  # every implementation language has it
COLLECTION_MAX = 1 << 20  # default bound of bytes, text and collections without a Length of their own


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    low: int
    high: int


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    low: int
    high: int


Digest = Annotated[bytes, Length(32, 32)]  # SHA-256
Key = Annotated[bytes, Length(32, 32)]  # Ed25519 public key: a peer's identity
SignatureBytes = Annotated[bytes, Length(64, 64)]  # Ed25519
Count = Annotated[int, Between(0, 2**53 - 1)]  # heights, views, sizes, milliseconds: exact in every language's double


def encode(value: Any) -> bytes:
    """The canonical bytes of a message, record or plain value. Raises `TypeError` for anything that has none."""
    packed: bytes = msgpack.packb(to_plain(value), use_bin_type=True)
    return packed


def decode(kind: type[T], data: bytes, size_max: int = MESSAGE_BYTES_MAX) -> T:
    """The value of type `kind` whose canonical encoding is `data`; `RemoteProtocolError` for every other byte string."""
    plain = unpack(data, size_max)
    value = from_plain(kind, plain)
    if encode(value) != data:
        raise RemoteProtocolError("non-canonical", f"{_name(kind)} is not in canonical form")
    return value


def decode_message(data: bytes, kinds: tuple[type[T], ...], size_max: int = MESSAGE_BYTES_MAX) -> T:
    """The message in `data` if its tag belongs to one of `kinds`; otherwise `RemoteProtocolError`."""
    plain = unpack(data, size_max)
    tag = plain[0] if isinstance(plain, list) and plain else None
    for kind in kinds:
        if getattr(kind, "TAG") == tag:  # noqa: B009 - TAG is what makes a dataclass a message
            value = from_plain(kind, plain)
            if encode(value) != data:
                raise RemoteProtocolError("non-canonical", f"{tag} is not in canonical form")
            return value
    raise RemoteProtocolError("unknown-message", repr(tag)[:40])


def unpack(data: bytes, size_max: int) -> Plain:
    if len(data) > size_max:
        raise RemoteProtocolError("oversized", f"{len(data)} bytes, at most {size_max} are allowed")
    try:
        return msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError("malformed", f"not msgpack: {type(error).__name__}") from None


def to_plain(value: Any) -> Plain:
    if isinstance(value, enum.Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, str, bytes)):
        return value
    if isinstance(value, float):
        if not math.isfinite(value):
            raise TypeError(f"{value!r} has no canonical encoding")
        return value
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return [[to_plain(key), to_plain(item)] for key, item in sorted(value.items())]
    fields = [to_plain(getattr(value, name)) for name in _fields_of(value)]
    tag = getattr(value, "TAG", None)
    return fields if tag is None else [tag, *fields]


def from_plain(kind: type[T], plain: Plain) -> T:
    value: T = _reader_of(kind)(plain, _name(kind))
    return value


def _reader_of(kind: Any) -> Reader:
    return _reader(kind)


def _fields_of(value: Any) -> tuple[str, ...]:
    kind: Any = type(value)
    return _field_names(kind)


@functools.cache
def _field_names(kind: Any) -> tuple[str, ...]:
    if not dataclasses.is_dataclass(kind):
        raise TypeError(f"{kind.__name__} has no canonical encoding")
    return tuple(field.name for field in dataclasses.fields(kind))


def _name(kind: Any) -> str:
    return str(getattr(kind, "TAG", None) or getattr(kind, "__name__", kind))


def _refuse(path: str, expected: str, plain: Plain) -> RemoteProtocolError:
    return RemoteProtocolError("mistyped", f"{path}: expected {expected}, got {type(plain).__name__} {repr(plain)[:40]}")


@functools.cache
def _reader(kind: Any) -> Reader:
    """The strict reader of one type, built once."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _bounded(_reader(arguments[0]), arguments[1])
    if origin in (typing.Union, types.UnionType):
        return _optional(arguments)
    if origin is tuple:
        return _sequence(arguments[0]) if arguments[-1] is Ellipsis else _fixed(arguments)
    if origin is dict:
        return _mapping(*arguments)
    if dataclasses.is_dataclass(kind):
        return _record(typing.cast(type, kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enumeration(kind)
    if kind in _SCALARS:
        return _scalar(kind)
    raise TypeError(f"{kind!r} is not a wire type")


_SCALARS = (bool, int, float, str, bytes)


def _scalar(kind: type) -> Reader:
    def read(plain: Plain, path: str) -> Any:
        if type(plain) is not kind:
            raise _refuse(path, kind.__name__, plain)
        if isinstance(plain, int) and not -INTEGER_MAX <= plain <= INTEGER_MAX:
            raise _refuse(path, "63-bit int", plain)
        if isinstance(plain, float) and not math.isfinite(plain):
            raise _refuse(path, "finite float", plain)
        if isinstance(plain, (str, bytes)) and len(plain) > COLLECTION_MAX:
            raise RemoteProtocolError("oversized", f"{path}: {len(plain)} > {COLLECTION_MAX}")
        return plain

    return read


def _bounded(inner: Reader, bound: Any) -> Reader:
    def read_length(plain: Plain, path: str) -> Any:
        # The size is looked at before the content is read, so that an oversized list costs nothing.
        if isinstance(plain, (bytes, str, list)) and not bound.low <= len(plain) <= bound.high:
            raise RemoteProtocolError("oversized", f"{path}: length {len(plain)}, allowed {bound.low}..{bound.high}")
        return inner(plain, path) if not isinstance(plain, (bytes, str)) else _exact(inner, plain, path, bound.high)

    def read_between(plain: Plain, path: str) -> Any:
        value = inner(plain, path)
        if not bound.low <= value <= bound.high:
            raise RemoteProtocolError("mistyped", f"{path}: {value} is outside {bound.low}..{bound.high}")
        return value

    return read_between if isinstance(bound, Between) else read_length


def _exact(inner: Reader, plain: Plain, path: str, high: int) -> Any:
    """Bytes and text may have bounds above the default one."""
    if len(plain) <= COLLECTION_MAX:
        return inner(plain, path)
    inner(plain[:0], path)  # still checks the type
    return plain


def _optional(arguments: tuple[Any, ...]) -> Reader:
    kinds = [kind for kind in arguments if kind is not type(None)]
    if len(kinds) != 1:
        raise TypeError("only T | None is a wire union")
    inner = _reader(kinds[0])
    return lambda plain, path: None if plain is None else inner(plain, path)


def _list(plain: Plain, path: str) -> list[Plain]:
    if not isinstance(plain, list):
        raise _refuse(path, "list", plain)
    if len(plain) > COLLECTION_MAX:
        raise RemoteProtocolError("oversized", f"{path}: {len(plain)} > {COLLECTION_MAX}")
    return plain


def _sequence(kind: Any) -> Reader:
    inner = _reader(kind)
    return lambda plain, path: tuple(inner(item, f"{path}[{i}]") for i, item in enumerate(_list(plain, path)))


def _fixed(kinds: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in kinds]

    def read(plain: Plain, path: str) -> Any:
        if len(_list(plain, path)) != len(readers):
            raise RemoteProtocolError("mistyped", f"{path}: {len(plain)} items, expected {len(readers)}")
        return tuple(reader(item, f"{path}[{i}]") for i, (reader, item) in enumerate(zip(readers, plain, strict=True)))

    return read


def _mapping(key_kind: Any, value_kind: Any) -> Reader:
    read_pair = _fixed((key_kind, value_kind))

    def read(plain: Plain, path: str) -> Any:
        pairs = [read_pair(item, f"{path}[{i}]") for i, item in enumerate(_list(plain, path))]
        if any(left[0] >= right[0] for left, right in itertools.pairwise(pairs)):
            raise RemoteProtocolError("non-canonical", f"{path}: keys must be strictly ascending")
        return dict(pairs)

    return read


def _enumeration(kind: type[enum.Enum]) -> Reader:
    def read(plain: Plain, path: str) -> Any:
        if type(plain) not in (int, str):
            raise _refuse(path, kind.__name__, plain)
        try:
            return kind(plain)
        except ValueError:
            raise RemoteProtocolError("mistyped", f"{path}: {plain!r} is no {kind.__name__}") from None

    return read


def _record(kind: type) -> Reader:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = _field_names(kind)
    tag = getattr(kind, "TAG", None)
    readers: list[Reader] = []  # filled at first use, so that a type may contain itself

    def read(plain: Plain, path: str) -> Any:
        if not readers:
            readers.extend(_reader(hints[name]) for name in names)
        fields = _list(plain, path)
        if tag is not None:
            if not fields or fields[0] != tag:
                raise RemoteProtocolError("unknown-message", f"{path}: expected {tag}")
            fields = fields[1:]
        if len(fields) != len(names):
            what = "missing" if len(fields) < len(names) else "unknown"
            raise RemoteProtocolError("mistyped", f"{path}: {what} field, {len(fields)} instead of {len(names)}")
        columns = zip(names, readers, fields, strict=True)
        return kind(**{name: reader(item, f"{path}.{name}") for name, reader, item in columns})

    return read
