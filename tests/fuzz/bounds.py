"""Values one step outside the bounds that a type states."""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from protocol import codec
from protocol.codec import Between, Length

SIZE_MAX = 1 << 20  # longer bounds cost too much to exceed in every run; the same code checks them
Change = tuple[str, Any]  # what is wrong, and the whole plain value with it


def outside(kind: Any, value: Any) -> Iterator[Change]:
    """Plain forms of `value` in which one number, length or count is just out of bounds, wherever that can be."""
    yield from _outside(kind, codec.to_plain(value), None)


def _outside(kind: Any, plain: Any, bound: Any) -> Iterator[Change]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        yield from _outside(arguments[0], plain, arguments[1])
    elif origin in (typing.Union, types.UnionType):
        inner = next(part for part in arguments if part is not type(None))
        yield from _outside(inner, plain, None) if plain is not None else ()
    elif isinstance(bound, Between):
        yield from ((f"{kind.__name__} {number}", number) for number in (bound.low - 1, bound.high + 1))
    else:
        yield from _lengths(plain, bound) if isinstance(bound, Length) else ()
        yield from _inside(kind, origin, arguments, plain)


def _lengths(plain: Any, bound: Length) -> Iterator[Change]:
    filler = plain[:1] if len(plain) else {bytes: b"x", str: "x", list: [0]}[type(plain)]
    for length in (bound.low - 1, bound.high + 1):
        if 0 <= length <= SIZE_MAX:
            yield f"length {length}", filler * length


def _inside(kind: Any, origin: Any, arguments: tuple[Any, ...], plain: Any) -> Iterator[Change]:
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind, include_extras=True)
        start = int(getattr(kind, "TAG", None) is not None)
        parts = [hints[field.name] for field in dataclasses.fields(kind)]
        yield from _each(parts, plain, start)
    elif origin is dict:
        pair = tuple[arguments]  # type: ignore[valid-type]
        yield from _each([pair] * len(plain), plain, 0)
    elif origin is tuple:
        parts = [arguments[0]] * len(plain) if arguments[-1] is Ellipsis else list(arguments)
        yield from _each(parts, plain, 0)


def _each(kinds: list[Any], plain: list[Any], start: int) -> Iterator[Change]:
    for index, kind in enumerate(kinds[: len(plain) - start], start):  # added fields may be left out
        for what, changed in _outside(kind, plain[index], None):
            yield what, [*plain[:index], changed, *plain[index + 1 :]]
