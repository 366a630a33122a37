"""Mutations that make valid bytes invalid: of bytes, of values inside them, and of length prefixes that promise too much."""

from __future__ import annotations

import struct
from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

from protocol.errors import RemoteProtocolError

Path = tuple[int, ...]

HOSTILE_PREFIXES = (
    b"\xdd\xff\xff\xff\xff",  # a list of 4 billion
    b"\xdf\xff\xff\xff\xff",  # a map
    b"\xc6\xff\xff\xff\xff",  # bytes
    b"\xdb\xff\xff\xff\xff",  # text
    b"\xc9\xff\xff\xff\xff\x01",  # an extension
    b"\xdc\xff\xff",
    b"\xc5\xff\xff",
)
STRANGE: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    2**53,
    2**63,
    2**64 - 1,
    -(2**63),
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x" * 65,
    "ßz",
    b"",
    bytes(31),
    bytes(32),
    bytes(33),
    bytes(64),
    [],
    [[]],
    {},
    {"a": 1},
    msgpack.ExtType(5, b"x"),
    msgpack.Timestamp(1, 1),
)
MARKER = b"a marker that no message holds: "


def changed_bytes(data: bytes, random: Random) -> bytes:
    """Return the data with a few bytes changed, lost, repeated or inserted."""
    buffer = bytearray(data)
    for _ in range(random.choice((1, 1, 1, 2, 5))):
        at, length = random.randrange(len(buffer) + 1), random.choice((1, 1, 2, 4, 32))
        match random.randrange(6):
            case 0 if at < len(buffer):
                buffer[at] ^= 1 << random.randrange(8)
            case 1 if at < len(buffer):
                buffer[at] = random.randrange(256)
            case 2:
                del buffer[at : at + length]
            case 3:
                buffer[at:at] = random.randbytes(length)
            case 4:
                buffer[at:at] = buffer[max(0, at - length) : at]
            case _:
                prefix = random.choice(HOSTILE_PREFIXES)
                buffer[at : at + random.choice((0, len(prefix)))] = prefix
    return bytes(buffer)


def changed_value(data: bytes, random: Random) -> bytes:
    """Return well-formed msgpack in which one value is replaced, missing, repeated, or moved."""
    plain = _unpack(data)
    path = random.choice(paths(plain))
    return _pack(_replaced(plain, path, random.choice((_strange, _shortened, _repeated, _shuffled)), random))


def longer_form(data: bytes, random: Random) -> bytes:
    """Return the same value with one number or length in more bytes than it needs."""
    plain = _unpack(data)
    path = random.choice(paths(plain))
    return _pack(_replaced(plain, path, lambda *_: MARKER, random)).replace(_pack(MARKER), _long(_at(plain, path)))


def _long(value: Any) -> bytes:
    packed = _pack(value)
    match value:
        case bool() | None | float():
            return packed
        case int():
            return (b"\xcf" if value >= 0 else b"\xd3") + (value % (1 << 64)).to_bytes(8, "big")
        case bytes():
            return b"\xc6" + len(value).to_bytes(4, "big") + value
        case str():
            return b"\xdb" + len(value.encode()).to_bytes(4, "big") + value.encode()
        case list():
            return b"\xdd" + len(value).to_bytes(4, "big") + b"".join(map(_pack, value))
    return packed


def _at(plain: Any, path: Path) -> Any:
    for index in path:
        plain = plain[index]
    return plain


def truncated(data: bytes, random: Random) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _strange(value: Any, random: Random) -> Any:
    return random.choice(STRANGE)


def _shortened(value: Any, random: Random) -> Any:
    return value[:-1] if isinstance(value, (list, bytes, str)) else _strange(value, random)


def _repeated(value: Any, random: Random) -> Any:
    return value + value[-1:] if isinstance(value, (list, bytes, str)) else _strange(value, random)


def _shuffled(value: Any, random: Random) -> Any:
    return random.sample(value, len(value)) if isinstance(value, list) else _strange(value, random)


def paths(plain: Any, here: Path = ()) -> list[Path]:
    """Return the places of the values inside nested lists."""
    found = [here]
    if isinstance(plain, list):
        for index, item in enumerate(plain):
            found += paths(item, (*here, index))
    return found


def _replaced(plain: Any, path: Path, change: Callable[[Any, Random], Any], random: Random) -> Any:
    if not path:
        return change(plain, random)
    return [_replaced(item, path[1:], change, random) if index == path[0] else item for index, item in enumerate(plain)]


def _unpack(data: bytes) -> Any:
    return msgpack.unpackb(data, raw=False, strict_map_key=False)


def _pack(plain: Any) -> bytes:
    packed: bytes = msgpack.packb(plain, use_bin_type=True)
    return packed


def mutate(data: bytes, random: Random) -> bytes:
    """Apply one of these changes, or a bytewise one if `data` is no plain msgpack."""
    how = random.choice((changed_bytes, changed_bytes, changed_value, changed_value, changed_value, longer_form, truncated))
    try:
        return how(data, random)
    except (ValueError, RemoteProtocolError):
        return changed_bytes(data, random)


def bombs(size: int) -> list[bytes]:
    """Return msgpack of about `size` bytes that could expand to many times its size in memory."""
    count = struct.pack(">I", size)
    return [
        *HOSTILE_PREFIXES,
        b"\xdd" + count + b"\x90" * size,  # empty lists: 64 bytes of memory for one
        b"\xdd" + count + b"\x80" * size,
        b"\xdd" + count + b"\xc0" * size,
        b"\xdd" + struct.pack(">I", size // 3) + b"\xd4\x01\x01" * (size // 3),
        (b"\xdd" + count) * 500 + b"\xc0" * size,  # every level promises a list as long as everything that follows
        b"\x91" * size,
        b"\xc6" + count + bytes(size),
        b"\xdb" + count + b"a" * size,
    ]


def placed(data: bytes, random: Random, bomb: bytes) -> bytes:
    """Return `data` with one of its values replaced by `bomb`, or `bomb` if `data` is no plain msgpack."""
    try:
        plain = _unpack(data)
    except ValueError:
        return bomb
    path = random.choice(paths(plain))
    return _pack(_replaced(plain, path, lambda *_: MARKER, random)).replace(_pack(MARKER), bomb)
