"""The wire format of protobuf: a strict reader of messages, and writers of single fields.

A message is a series of fields in any order (https://protobuf.dev/programming-guides/encoding). Each has a tag, which is its
number and its wire type, and a value. A missing field has the default value of its type. The last value of a field counts that
has one number, one text or bytes. The reader skips fields with unknown numbers by their length and refuses groups, so no input
makes it recurse.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Final, NamedTuple

from protocol.errors import RemoteProtocolError

# Fields of one body in all its messages: 64 for each of 1,024 examples, of which a loss with four inputs needs 28. A reader takes
# 0.2 s for so many, in which it takes turns with the ledger.
FIELDS_MAX: Final = 1 << 16
FIELD_NUMBER_MAX: Final = (1 << 29) - 1
TEXT_BYTES_MAX: Final = 256  # bytes of an id or a name; the longest one is the id of a session and a number
VARINT_BYTES_MAX: Final = 10  # 7 bits in a byte give 64 bits
TAG_BYTES_MAX: Final = 5  # a tag has 32 bits
INTEGER_BITS: Final = 64


class WireType(enum.IntEnum):
    VARINT = 0
    FIXED64 = 1
    BYTES = 2  # bytes, text, messages and packed repeated numbers, each after its length
    FIXED32 = 5


VARINT, BYTES = WireType.VARINT, WireType.BYTES
FIXED_BYTES: Final[Mapping[int, int]] = {WireType.FIXED64: 8, WireType.FIXED32: 4}


class EntryField(enum.IntEnum):
    """The fields of an entry of a map."""

    KEY = 1
    VALUE = 2


class Field(NamedTuple):
    number: int
    wire_type: int
    integer: int  # value of a varint, an unsigned number of 64 bits; 0 for other wire types
    data: memoryview  # bytes of the value for other wire types; empty for a varint


FieldTypes = Mapping[int, Collection[WireType]]  # possible wire types of the known fields of a message, by number
VARINT_FIELD: Final = (WireType.VARINT,)
FIXED64_FIELD: Final = (WireType.FIXED64,)
BYTES_FIELD: Final = (WireType.BYTES,)
VARINTS_FIELD: Final = (WireType.BYTES, WireType.VARINT)  # repeated numbers, of which a client may pack some or all

# Fields of the entries of maps. Implementations of protobuf treat unknown fields there in different ways, so none are allowed.
NUMBER_ENTRY: Final[FieldTypes] = {EntryField.KEY: BYTES_FIELD, EntryField.VALUE: FIXED64_FIELD}
MESSAGE_ENTRY: Final[FieldTypes] = {EntryField.KEY: BYTES_FIELD, EntryField.VALUE: BYTES_FIELD}


class FieldReader:
    """A reader of the messages of one body. The messages together have at most `FIELDS_MAX` fields."""

    def __init__(self) -> None:
        self._fields_left = FIELDS_MAX

    def read_fields(self, message: memoryview, types: FieldTypes, *, skips_unknown: bool = True) -> Iterator[Field]:
        """Yield the fields with a number in `types`, in their order.

        Raises `RemoteProtocolError` for malformed or too many fields, for fields with another wire type than in `types`, and for
        fields with another number unless `skips_unknown`.
        """
        at = 0
        while at < len(message):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise RemoteProtocolError("oversized", f"the body has more than {FIELDS_MAX} fields")
            tag, at = read_varint(message, at, TAG_BYTES_MAX)
            number, wire_type = tag >> 3, tag & 7
            if not 1 <= number <= FIELD_NUMBER_MAX:
                raise RemoteProtocolError("malformed", f"field number {number} is not in 1..{FIELD_NUMBER_MAX}")
            integer, size = 0, 0
            if wire_type == VARINT:
                integer, at = read_varint(message, at)
            elif wire_type == BYTES:
                size, at = read_varint(message, at)
            elif wire_type in FIXED_BYTES:
                size = FIXED_BYTES[wire_type]
            else:
                raise RemoteProtocolError("malformed", f"field {number} has the wire type {wire_type}, which is not supported")
            if size > (left := len(message) - at):
                raise RemoteProtocolError("malformed", f"field {number} has {size} bytes, and its message ends after {left}")
            if number in types:
                if wire_type not in types[number]:
                    expected = " or ".join(f"{possible:d}" for possible in types[number])
                    raise RemoteProtocolError("mistyped", f"field {number} has the wire type {wire_type}, not {expected}")
                yield Field(number, wire_type, integer, message[at : at + size])
            elif not skips_unknown:
                raise RemoteProtocolError("malformed", f"an entry of a map has field {number}: it has a key and a value alone")
            at += size

    def read_number_entry(self, message: memoryview) -> tuple[str, float]:
        """Return the key and the value of an entry of a map from texts to doubles. Raises `RemoteProtocolError`."""
        key, number = "", 0.0
        for field in self.read_fields(message, NUMBER_ENTRY, skips_unknown=False):
            if field.number == EntryField.KEY:
                key = read_text(field.data)
            else:
                number = read_double(field.data)
        return key, number

    def read_message_entry(self, message: memoryview) -> tuple[str, memoryview]:
        """Return the key and the value of an entry of a map from texts to messages. Raises `RemoteProtocolError`."""
        key, value = "", memoryview(b"")
        for field in self.read_fields(message, MESSAGE_ENTRY, skips_unknown=False):
            if field.number == EntryField.KEY:
                key = read_text(field.data)
            elif value:
                raise RemoteProtocolError("malformed", "an entry of a map has two values")
            else:
                value = field.data
        return key, value


def read_varint(data: memoryview, at: int, bytes_max: int = VARINT_BYTES_MAX) -> tuple[int, int]:
    """Return the unsigned number at a position, and the position after it. Raises `RemoteProtocolError` if it is malformed."""
    value = 0
    try:
        for place in range(bytes_max):
            byte = data[at + place]
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                break
        else:
            raise RemoteProtocolError("malformed", f"a number has more than {bytes_max} bytes")
    except IndexError:
        raise RemoteProtocolError("malformed", "the message ends within a number") from None
    if value >> INTEGER_BITS:
        raise RemoteProtocolError("malformed", f"a number has more than {INTEGER_BITS} bits")
    return value, at + place + 1


def read_integers(field: Field) -> Iterator[int]:
    """Yield the signed numbers of a field with `VARINTS_FIELD`. Raises `RemoteProtocolError` if one is malformed."""
    if field.wire_type == VARINT:
        yield _signed(field.integer)
    at = 0
    while at < len(field.data):
        value, at = read_varint(field.data, at)
        yield _signed(value)


def read_double(data: memoryview) -> float:
    """Return the number of a field with the wire type `FIXED64`."""
    value: float = struct.unpack("<d", data)[0]
    return value


def read_text(data: memoryview) -> str:
    """Return the text of a field. Raises `RemoteProtocolError` if it is too long or invalid UTF-8."""
    if len(data) > TEXT_BYTES_MAX:
        start = bytes(data[:32])
        raise RemoteProtocolError(
            "oversized", f"a text has {len(data)} bytes, more than {TEXT_BYTES_MAX}; it begins with {start!r}"
        )
    try:
        return str(data, "utf-8")
    except UnicodeDecodeError:
        raise RemoteProtocolError("malformed", f"a text is invalid UTF-8: {bytes(data[:32])!r}") from None


def encode_varint(number: int, value: int) -> bytes:
    """Return a field with an unsigned number. Its default value 0 is left out, as protobuf does."""
    return _varint(number << 3 | WireType.VARINT) + _varint(value) if value else b""


def encode_double(number: int, value: float) -> bytes:
    return _varint(number << 3 | WireType.FIXED64) + struct.pack("<d", value)


def encode_bytes(number: int, data: bytes) -> bytes:
    """Return a field with bytes, UTF-8 text or a message."""
    return _varint(number << 3 | WireType.BYTES) + _varint(len(data)) + data


def encode_entry(number: int, key: str, value: bytes) -> bytes:
    """Return an entry of the map in a field. `value` is the encoded field `EntryField.VALUE`."""
    return encode_bytes(number, encode_bytes(EntryField.KEY, key.encode()) + value)


def _signed(value: int) -> int:
    return value - (1 << INTEGER_BITS) if value >> INTEGER_BITS - 1 else value


def _varint(value: int) -> bytes:
    assert 0 <= value < 1 << INTEGER_BITS
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
