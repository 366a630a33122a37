"""A cache of decoded messages: equal bytes give the same frozen value.

Everything crosses the simulated wire as bytes. With n peers each message would be decoded n times, and its certificates more
often. A share of the seeds runs without this cache and must behave alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from protocol import codec

ENTRIES_MAX = 20_000  # two generations of these: several heights of a network of ten

_decode, _decode_message = codec.decode, codec.decode_message


class Decoded:
    """An LRU of two generations, keyed by bytes."""

    def __init__(self) -> None:
        self._young: dict[Any, Any] = {}
        self._old: dict[Any, Any] = {}

    def get(self, key: Any) -> Any:
        value = self._young.get(key)
        if value is None:
            value = self._old.get(key)
            if value is not None:
                self.put(key, value)
        return value

    def put(self, key: Any, value: Any) -> None:
        if len(self._young) >= ENTRIES_MAX:
            self._old, self._young = self._young, {}
        self._young[key] = value


@contextlib.contextmanager
def decoding_once() -> Iterator[None]:
    """Cache the results of `codec.decode` and `codec.decode_message` inside the block. Errors are not cached."""
    messages, values = Decoded(), Decoded()

    def decode_message(data: bytes, kinds: tuple[type, ...], size_max: int = codec.MESSAGE_BYTES_MAX) -> Any:
        value = messages.get(data)
        if value is not None and type(value) in kinds and len(data) <= size_max:
            return value
        value = _decode_message(data, kinds, size_max)
        messages.put(data, value)
        return value

    def decode(kind: Any, data: bytes, size_max: int = codec.MESSAGE_BYTES_MAX) -> Any:
        key = (kind, data)
        value = values.get(key)
        if value is not None and len(data) <= size_max:
            return value
        value = _decode(kind, data, size_max)
        values.put(key, value)
        return value

    codec.decode, codec.decode_message = decode, decode_message  # type: ignore[assignment]
    try:
        yield
    finally:
        codec.decode, codec.decode_message = _decode, _decode_message
