"""Canonical msgpack with strict, typed decoding.

A wire type is a frozen dataclass. It travels as the msgpack array of its fields; a *message* (a dataclass with a `TAG`)
travels as `[tag, fields…]`. Dictionaries travel as arrays of pairs with strictly ascending keys. There is exactly one
byte string per value: each number, length and key has one form, and decoders refuse every other.

A decoder reads the bytes once, in order, by type. It checks each length before it reads the data, and builds only parts of the
value. (A general msgpack reader would use 64 bytes of memory for one byte from a stranger.)

Supported types are `bool int float str bytes tuple[T, ...] tuple[A, B] dict[K, V] T | None`, enums of int or str, and dataclasses
of these. `Annotated[T, Length(low, high)]` bounds bytes, text and collections, and `Annotated[int, Between(low, high)]` bounds
numbers. A class with a `WIRE` type travels as a value of that type, which `to_wire` returns and `from_wire` takes.

A program may add fields to a record of an earlier release with `added_field`. Records without values in these fields keep their
encoding.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import struct
import types
from collections.abc import Callable, Mapping
from typing import Annotated, Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

import msgpack

from protocol.errors import RemoteProtocolError
from protocol.limits import MESSAGE_BYTES_MAX

T = TypeVar("T")
Plain = Any  # nested lists of None, bool, int, float, str and bytes, as msgpack decodes them
Reader = Callable[[bytes, int], tuple[Any, int]]  # function from (data, position) to (value, end position)
Writer = Callable[[Any], Plain]

INTEGER_MAX = 2**63 - 1  # largest encoded integer: every programming language has integers of this size
COLLECTION_MAX = 1 << 20  # maximum length of bytes, text and collections whose type has no Length


@dataclasses.dataclass(frozen=True, slots=True)
class Length:
    low: int
    high: int


@dataclasses.dataclass(frozen=True, slots=True)
class Between:
    low: int
    high: int


Digest = Annotated[bytes, Length(32, 32)]  # SHA-256 hash
Key = Annotated[bytes, Length(32, 32)]  # Ed25519 public key, which identifies a peer
SignatureBytes = Annotated[bytes, Length(64, 64)]  # Ed25519 signature
COUNT_MAX = 2**53 - 1
# Number of heights, views, bytes or milliseconds, which a double of every language represents exactly.
Count = Annotated[int, Between(0, COUNT_MAX)]


_ADDED = "added"  # key of a field's metadata


def added_field(default: Any) -> Any:
    """Declare a field that was added at the end of a dataclass after a release.

    Trailing added fields that equal their defaults are not encoded, so earlier encodings stay canonical.
    """
    return dataclasses.field(default=default, metadata={_ADDED: True})


def is_added(field: dataclasses.Field[Any]) -> bool:
    """Return whether the field was declared with `added_field`."""
    return _ADDED in field.metadata


def has_added_value(record: Any) -> bool:
    """Return whether an added field of the dataclass instance, or of a dataclass instance in it, differs from its default."""
    values = [(field, getattr(record, field.name)) for field in dataclasses.fields(record)]
    return any(
        (is_added(field) and value != field.default) or (dataclasses.is_dataclass(value) and has_added_value(value))
        for field, value in values
    )


def encode(value: Any) -> bytes:
    """Return the canonical bytes of a message, record or plain value. Raises `TypeError` if the value has none."""
    return pack(to_plain(value))


def decode(kind: type[T], data: bytes, size_max: int = MESSAGE_BYTES_MAX) -> T:
    """Return the value of type `kind` whose canonical encoding is `data`.

    Raises `RemoteProtocolError` if there is no such value.
    """
    _check_size(data, size_max)
    return _whole(data, kind)


def decode_message(data: bytes, kinds: tuple[type[T], ...], size_max: int = MESSAGE_BYTES_MAX) -> T:
    """Return the message in `data`. Raises `RemoteProtocolError` if its type is not in `kinds`, or `data` is not canonical."""
    _check_size(data, size_max)
    tag = _tag(data)
    for kind in kinds:
        if getattr(kind, "TAG") == tag:  # noqa: B009 - TAG is what makes a dataclass a message
            return _whole(data, kind)
    raise RemoteProtocolError("unknown-message", repr(tag)[:40])


def _check_size(data: bytes, size_max: int) -> None:
    if len(data) > size_max:
        raise RemoteProtocolError("oversized", f"{len(data)} bytes, at most {size_max} are allowed")


def _tag(data: bytes) -> str:
    """Return the tag with which a message begins."""
    try:
        count, at = _read_count(data, 0)
        tag: str = _text(data, at)[0] if count else ""
    except (RemoteProtocolError, IndexError):
        raise RemoteProtocolError("unknown-message", repr(data[:20])) from None
    return tag


def _whole(data: bytes, kind: type[T]) -> T:
    value: T
    try:
        value, end = _reader(cast(Any, kind))(data, 0)
    except IndexError:
        raise RemoteProtocolError("malformed", f"{_name(kind)} is truncated after {len(data)} bytes") from None
    except RemoteProtocolError as error:
        raise RemoteProtocolError(error.reason, f"{_name(kind)}: {error.detail}") from None
    if end != len(data):
        raise RemoteProtocolError("malformed", f"{_name(kind)} has {len(data) - end} trailing bytes")
    return value


def _name(kind: Any) -> str:
    return str(getattr(kind, "TAG", None) or getattr(kind, "__name__", kind))


def encoded_item(data: bytes, index: int) -> bytes:
    """Return the encoding of one item of an array. The other items may have any types and are skipped.

    Raises `RemoteProtocolError` if `data` is not an array with this item. The encoding need not be canonical.
    """
    unpacker = msgpack.Unpacker(max_buffer_size=len(data))
    unpacker.feed(data)
    try:
        if unpacker.read_array_header() > index:
            for _ in range(index):
                unpacker.skip()
            start = unpacker.tell()
            unpacker.skip()
            return data[start : unpacker.tell()]
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError):
        pass
    raise RemoteProtocolError("malformed", f"no array with an item {index}")


def array_length(data: bytes) -> int:
    """Return the length of the array at the start of `data`. Raises `RemoteProtocolError` if no array begins there."""
    try:
        found, _ = _read_count(data, 0)
    except IndexError:
        raise RemoteProtocolError("malformed", "the array is truncated") from None
    return found


# Plain values, for programs of one person on one machine, which need no types ---------------------------------------------


def unpack(data: bytes, size_max: int) -> Plain:
    """Decode any msgpack.

    The result may take 70 times the memory of `data`, so never use this function for bytes from strangers.
    """
    _check_size(data, size_max)
    try:
        return msgpack.unpackb(data, raw=False, use_list=True, strict_map_key=True)
    except (ValueError, msgpack.exceptions.UnpackException, RecursionError) as error:
        raise RemoteProtocolError("malformed", f"not msgpack: {type(error).__name__}") from None


def pack(plain: Plain) -> bytes:
    """Encode a plain value."""
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    return packed


def from_plain(kind: type[T], plain: Plain) -> T:
    """Return the value of type `kind` for an unpacked plain value.

    Raises `RemoteProtocolError` if the plain value does not fit the type.
    """
    try:
        return decode(kind, pack(plain))
    except (ValueError, OverflowError, TypeError) as error:
        raise RemoteProtocolError("malformed", f"{_name(kind)}: {error}") from None


# Writing -----------------------------------------------------------------------------------------------------------------


def to_plain(value: Any) -> Plain:
    kind: Any = type(value)
    if kind in _AS_THEY_ARE:
        return value
    return _writer(kind)(value)


_AS_THEY_ARE = frozenset({bytes, int, str, bool, type(None)})


@functools.cache
def _writer(kind: Any) -> Writer:
    """Return the function that turns values of one class into plain values. The result is cached."""
    if issubclass(kind, enum.Enum):
        return lambda value: value.value
    if issubclass(kind, float):
        return _write_float
    if issubclass(kind, (bool, int, str, bytes)):
        return lambda value: value
    if issubclass(kind, (tuple, list)):
        return lambda value: [item if type(item) in _AS_THEY_ARE else to_plain(item) for item in value]
    if issubclass(kind, dict):
        return lambda value: [[to_plain(key), to_plain(item)] for key, item in sorted(value.items())]
    if dataclasses.is_dataclass(kind):
        return _record_writer(kind)
    if hasattr(kind, "WIRE"):
        return lambda value: to_plain(value.to_wire())
    raise TypeError(f"{kind.__name__} has no canonical encoding")


def _write_float(value: float) -> float:
    if not math.isfinite(value):
        raise TypeError(f"{value!r} has no canonical encoding")
    return value


def _record_writer(kind: Any) -> Writer:
    names = _field_names(kind)
    tag = getattr(kind, "TAG", None)
    head = [] if tag is None else [tag]
    defaults = _added_defaults(kind)
    least = len(head) + len(names) - len(defaults)
    if len(names) < 2:  # `attrgetter` returns a tuple only for two names or more
        return lambda value: head + [to_plain(getattr(value, name)) for name in names]
    values = operator.attrgetter(*names)

    def write(value: Any) -> Plain:
        plain = head.copy()
        for item in values(value):
            plain.append(item if type(item) in _AS_THEY_ARE else to_plain(item))
        return plain

    def write_without_defaults(value: Any) -> Plain:
        plain = write(value)
        while len(plain) > least and plain[-1] == defaults[len(plain) - least - 1]:
            plain.pop()
        return plain

    return write_without_defaults if defaults else write


def _added_defaults(kind: Any) -> list[Plain]:
    """Return the plain default values of a dataclass's added fields. Raises `TypeError` if another field follows them."""
    of = dataclasses.fields(kind)
    added = list(filter(is_added, of))
    if added != list(of[len(of) - len(added) :]) or (added and len(of) == len(added)):
        raise TypeError(f"{kind.__name__}: added fields come last, after at least one other field")
    return [to_plain(field.default) for field in added]


def _field_names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind))


# Reading -----------------------------------------------------------------------------------------------------------------


@functools.cache
def _reader(kind: Any, bound: Any = None) -> Reader:
    """Return the strict reader of values of one type. The result is cached."""
    origin, arguments = get_origin(kind), get_args(kind)
    length = bound if isinstance(bound, Length) else Length(0, COLLECTION_MAX)
    if origin is Annotated:
        return _reader(*arguments)
    if origin in (Union, types.UnionType):
        return _optional(arguments)
    if origin is tuple:
        return _sequence(_reader(arguments[0]), length) if arguments[-1] is Ellipsis else _fixed(arguments)
    if origin is dict:
        return _mapping(arguments[0], arguments[1], length)
    if hasattr(kind, "WIRE"):
        return _deputy(kind)
    if dataclasses.is_dataclass(kind):
        return _record(cast(type, kind))
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return _enumeration(kind)
    if kind in (bytes, str):
        return _string(kind, length)
    if kind is int:
        return _integer(bound if isinstance(bound, Between) else Between(-INTEGER_MAX, INTEGER_MAX))
    if kind in (bool, float):
        return _truth if kind is bool else _real
    raise TypeError(f"{kind!r} is not a wire type")


def _refuse(expected: str, data: bytes, at: int) -> RemoteProtocolError:
    return RemoteProtocolError("mistyped", f"expected {expected} at byte {at}, got {data[at : at + 8].hex()}")


def _long_form(at: int) -> RemoteProtocolError:
    return RemoteProtocolError("non-canonical", f"the encoding at byte {at} is not the shortest one")


def _truth(data: bytes, at: int) -> tuple[bool, int]:
    head = data[at]
    if head not in (0xC2, 0xC3):
        raise _refuse("bool", data, at)
    return head == 0xC3, at + 1


def _real(data: bytes, at: int) -> tuple[float, int]:
    if data[at] != 0xCB:
        raise _refuse("float", data, at)
    if len(data) < at + 9:
        raise IndexError
    value: float = _DOUBLE.unpack_from(data, at + 1)[0]
    if not math.isfinite(value):
        raise _refuse("finite float", data, at)
    return value, at + 9


_DOUBLE = struct.Struct(">d")


def _integer(bound: Between) -> Reader:
    low, high = bound.low, bound.high

    def read(data: bytes, at: int) -> tuple[int, int]:
        value = head = data[at]
        end = at + 1
        if head > 0x7F:
            value, end = _long_integer(data, at)
        if not low <= value <= high:
            raise RemoteProtocolError("mistyped", f"{value} at byte {at} is outside {low}..{high}")
        return value, end

    return read


_INTEGER_FORMS = {  # first byte -> size in bytes, whether the integer is negative, and the least absolute value for this form
    0xCC: (1, False, 0x80),
    0xCD: (2, False, 0x100),
    0xCE: (4, False, 0x1_0000),
    0xCF: (8, False, 0x1_0000_0000),
    0xD0: (1, True, 0x21),
    0xD1: (2, True, 0x81),
    0xD2: (4, True, 0x8001),
    0xD3: (8, True, 0x8000_0001),
}


def _long_integer(data: bytes, at: int) -> tuple[int, int]:
    head = data[at]
    if head >= 0xE0:
        return head - 0x100, at + 1
    if head not in _INTEGER_FORMS:
        raise _refuse("int", data, at)
    size, signed, least = _INTEGER_FORMS[head]
    end = at + 1 + size
    if end > len(data):
        raise IndexError
    value = int.from_bytes(data[at + 1 : end], "big", signed=signed)
    if (-value if signed else value) < least:
        raise _long_form(at)
    return value, end


def _string(kind: type, length: Length) -> Reader:
    low, high = length.low, length.high

    def read_bytes(data: bytes, at: int) -> tuple[bytes, int]:
        if data[at] == 0xC4:
            size, start = data[at + 1], at + 2
        else:
            size, start = _long_size(data, at, _BYTES_FORMS, "bytes")
        end = start + size
        if not low <= size <= high:
            raise RemoteProtocolError("oversized", f"length {size} at byte {at}, allowed {low}..{high}")
        if end > len(data):
            raise IndexError
        return data[start:end], end

    def read_text(data: bytes, at: int) -> tuple[str, int]:
        head = data[at]
        if 0xA0 <= head <= 0xBF:
            size, start = head - 0xA0, at + 1
        else:
            size, start = _long_size(data, at, _TEXT_FORMS, "str")
        end = start + size
        if size > 4 * high:  # a character has at most four bytes in UTF-8
            raise RemoteProtocolError("oversized", f"{size} bytes of text at byte {at}, allowed {low}..{high} characters")
        if end > len(data):
            raise IndexError
        try:
            text = data[start:end].decode()
        except UnicodeDecodeError:
            raise RemoteProtocolError("malformed", f"invalid UTF-8 at byte {at}") from None
        if not low <= len(text) <= high:
            raise RemoteProtocolError("oversized", f"{len(text)} characters at byte {at}, allowed {low}..{high}")
        return text, end

    return read_bytes if kind is bytes else read_text


# First byte -> size of the length field in bytes, and least length for this form. Shorter lengths have a shorter form.
_BYTES_FORMS = {0xC4: (1, 0), 0xC5: (2, 0x100), 0xC6: (4, 0x1_0000)}
_TEXT_FORMS = {0xD9: (1, 0x20), 0xDA: (2, 0x100), 0xDB: (4, 0x1_0000)}
_LIST_FORMS = {0xDC: (2, 0x10), 0xDD: (4, 0x1_0000)}


def _long_size(data: bytes, at: int, forms: Mapping[int, tuple[int, int]], what: str) -> tuple[int, int]:
    """Return the length in the length field after the first byte at `at`, and the position of the data after the field."""
    if data[at] not in forms:
        raise _refuse(what, data, at)
    width, least = forms[data[at]]
    start = at + 1 + width
    if start > len(data):
        raise IndexError
    size = int.from_bytes(data[at + 1 : start], "big")
    if size < least:
        raise _long_form(at)
    return size, start


_text = _string(str, Length(0, COLLECTION_MAX))


def _read_count(data: bytes, at: int) -> tuple[int, int]:
    """Return the number of items of a list, and the position of its first item."""
    head = data[at]
    if 0x90 <= head <= 0x9F:
        return head - 0x90, at + 1
    return _long_size(data, at, _LIST_FORMS, "list")


def _optional(arguments: tuple[Any, ...]) -> Reader:
    kinds = [kind for kind in arguments if kind is not type(None)]
    if len(kinds) != 1:
        raise TypeError("only T | None is a wire union")
    inner = _reader(kinds[0])
    return lambda data, at: (None, at + 1) if data[at] == 0xC0 else inner(data, at)


def _counted(length: Length, data: bytes, at: int) -> tuple[int, int]:
    count, start = _read_count(data, at)
    if not length.low <= count <= length.high:
        raise RemoteProtocolError("oversized", f"{count} items at byte {at}, allowed {length.low}..{length.high}")
    return count, start


def _sequence(inner: Reader, length: Length) -> Reader:
    def read(data: bytes, at: int) -> tuple[tuple[Any, ...], int]:
        count, at = _counted(length, data, at)
        items = []
        for _ in range(count):
            item, at = inner(data, at)
            items.append(item)
        return tuple(items), at

    return read


def _fixed(kinds: tuple[Any, ...]) -> Reader:
    readers = [_reader(kind) for kind in kinds]

    def read(data: bytes, at: int) -> tuple[tuple[Any, ...], int]:
        count, at = _read_count(data, at)
        if count != len(readers):
            raise RemoteProtocolError("mistyped", f"{count} items before byte {at}, expected {len(readers)}")
        items = []
        for reader in readers:
            item, at = reader(data, at)
            items.append(item)
        return tuple(items), at

    return read


def _mapping(key_kind: Any, value_kind: Any, length: Length) -> Reader:
    read_key, read_value = _reader(key_kind), _reader(value_kind)

    def read(data: bytes, at: int) -> tuple[dict[Any, Any], int]:
        count, at = _counted(length, data, at)
        pairs: dict[Any, Any] = {}
        before = None
        for _ in range(count):
            if data[at] != 0x92:
                raise _refuse("pair", data, at)
            key, end = read_key(data, at + 1)
            if before is not None and not before < key:
                raise RemoteProtocolError("non-canonical", f"keys must be strictly ascending, at byte {at}")
            before = key
            pairs[key], at = read_value(data, end)
        return pairs, at

    return read


def _deputy(kind: Any) -> Reader:
    """Return the reader of a class with a `WIRE` type. The reader passes the type arguments of a generic class to `from_wire`."""
    inner, arguments = _reader(kind.WIRE), get_args(kind)

    def read(data: bytes, at: int) -> tuple[Any, int]:
        value, end = inner(data, at)
        return kind.from_wire(value, *arguments), end

    return read


def _enumeration(kind: type[enum.Enum]) -> Reader:
    values: set[Any] = {type(member.value) for member in kind}
    inner = _reader(values.pop())
    assert not values, f"{kind.__name__} mixes types"

    def read(data: bytes, at: int) -> tuple[enum.Enum, int]:
        value, end = inner(data, at)
        try:
            return kind(value), end
        except ValueError:
            raise RemoteProtocolError("mistyped", f"{value!r} at byte {at} is not a {kind.__name__}") from None

    return read


def _record(kind: type) -> Reader:
    hints = get_type_hints(kind, include_extras=True)
    names = _field_names(kind)
    readers = [_reader(hints[name]) for name in names]
    tag = getattr(kind, "TAG", None)
    by_name = any(field.kw_only for field in dataclasses.fields(kind))
    defaults = [field.default for field in dataclasses.fields(kind)]
    least = len(names) - len(_added_defaults(kind))

    def read(data: bytes, at: int) -> tuple[Any, int]:
        count, at = _read_count(data, at)
        if tag is not None:
            found, end = _text(data, at) if count else ("", at)
            if found != tag:
                raise RemoteProtocolError("unknown-message", f"expected {tag} at byte {at}")
            count, at = count - 1, end
        if not least <= count <= len(readers):
            what = "missing" if count < len(readers) else "unknown"
            raise RemoteProtocolError("mistyped", f"{what} field before byte {at}: {count} fields, expected {len(readers)}")
        values: list[Any] = []
        try:
            for reader in readers[:count]:
                value, at = reader(data, at)
                values.append(value)
        except RemoteProtocolError as error:
            raise RemoteProtocolError(error.reason, f"{names[len(values)]}: {error.detail}") from None
        if count > least and values[-1] == defaults[count - 1]:
            raise RemoteProtocolError("non-canonical", f"{names[count - 1]} has its default value before byte {at}")
        values += defaults[count:]
        return kind(**dict(zip(names, values, strict=True))) if by_name else kind(*values), at

    return read
