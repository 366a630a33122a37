"""The wire format of protobuf: a strict reader of messages, and writers of single fields.

A message is a series of fields (https://protobuf.dev/programming-guides/encoding). Each has a tag, which is its number and its
wire type, and a value. The reader skips fields with unknown numbers by their length and refuses groups, so no input makes it
recurse.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from protocol.errors import RemoteProtocolError

FIELDS_MAX: Final = 1 << 19  # fields of one body in all its messages: 512 for each of 1,024 examples
FIELD_NUMBER_MAX: Final = (1 << 29) - 1
TEXT_BYTES_MAX: Final = 256  # bytes of an id or a name; the longest one is the id of a session and a number
VARINT_BYTES_MAX: Final = 10  # 7 bits in a byte give 64 bits
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
    integer: int  # value of a varint, an unsigned number of 64 bits; 0 for other wire types
    data: memoryview  # bytes of the value for other wire types; empty for a varint


FieldTypes = Mapping[int, WireType]  # wire types of the known fields of a message, by number


class FieldReader:
    """A reader of the messages of one body. The messages together have at most `FIELDS_MAX` fields."""

    def __init__(self) -> None:
        self._fields_left = FIELDS_MAX

    def read_fields(self, message: memoryview, types: FieldTypes) -> Iterator[Field]:
        """Yield the fields with a number in `types`, in their order.

        Raises `RemoteProtocolError` for malformed or too many fields, and for fields with another wire type than in `types`.
        """
        at = 0
        while at < len(message):
            self._fields_left -= 1
            if self._fields_left < 0:
                raise RemoteProtocolError("oversized", f"the body has more than {FIELDS_MAX} fields")
            tag, at = read_varint(message, at)
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
                if wire_type != types[number]:
                    raise RemoteProtocolError("mistyped", f"field {number} has the wire type {wire_type}, not {types[number]:d}")
                yield Field(number, integer, message[at : at + size])
            at += size

    def read_entry(self, message: memoryview, value_type: WireType) -> tuple[str, memoryview]:
        """Return the key and the value of an entry of a map. Raises `RemoteProtocolError` if it has not each of them once."""
        entry = dict[int, memoryview]()
        for field in self.read_fields(message, {EntryField.KEY: WireType.BYTES, EntryField.VALUE: value_type}):
            if field.number in entry:
                raise RemoteProtocolError("malformed", f"an entry of a map has field {field.number} twice")
            entry[field.number] = field.data
        if len(entry) != len(EntryField):
            raise RemoteProtocolError(
                "malformed", f"an entry of a map has the fields {sorted(entry)}: a key and a value are needed"
            )
        return read_text(entry[EntryField.KEY]), entry[EntryField.VALUE]


def read_varint(data: memoryview, at: int) -> tuple[int, int]:
    """Return the unsigned number at a position, and the position after it. Raises `RemoteProtocolError` if it is malformed."""
    value = 0
    try:
        for place in range(VARINT_BYTES_MAX):
            byte = data[at + place]
            value |= (byte & 0x7F) << 7 * place
            if byte < 0x80:
                break
        else:
            raise RemoteProtocolError("malformed", f"a number has more than {VARINT_BYTES_MAX} bytes")
    except IndexError:
        raise RemoteProtocolError("malformed", "the message ends within a number") from None
    if value >> INTEGER_BITS:
        raise RemoteProtocolError("malformed", f"a number has more than {INTEGER_BITS} bits")
    return value, at + place + 1


def read_packed(data: memoryview) -> Iterator[int]:
    """Yield the signed numbers of a packed repeated field. Raises `RemoteProtocolError` if one is malformed."""
    at = 0
    while at < len(data):
        value, at = read_varint(data, at)
        yield value - (1 << INTEGER_BITS) if value >> INTEGER_BITS - 1 else value


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


def _varint(value: int) -> bytes:
    assert 0 <= value < 1 << INTEGER_BITS
    found = bytearray()
    while value > 0x7F:
        found.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes((*found, value))
