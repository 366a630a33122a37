"""A generator of values for any wire type, made from its annotations, so that new messages need no further code."""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Iterator
from typing import Annotated, Any

from hypothesis import strategies as st

from ledger.tables import Table
from protocol import codec
from protocol.codec import COLLECTION_MAX, INTEGER_MAX, Between, Length
from protocol.limits import ROW_KEY_BYTES_MAX

EXTRA_BYTES_MAX = 48  # bytes and text are made this much longer than their shortest: enough for every form of length prefix
EXTRA_ITEMS_MAX = 3  # the same for collections, which nest


@functools.cache
def strategy_of(kind: Any) -> st.SearchStrategy[Any]:
    """Return values of `kind`. Raises `TypeError` if it is no wire type: either the message or this function is wrong."""
    return _bounded(kind, Length(0, COLLECTION_MAX))


def _bounded(kind: Any, bound: Length | Between) -> st.SearchStrategy[Any]:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        return _bounded(*arguments)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if part is type(None) else strategy_of(part) for part in arguments))
    if kind is int:
        low, high = (bound.low, bound.high) if isinstance(bound, Between) else (-INTEGER_MAX, INTEGER_MAX)
        return st.integers(low, high)
    if kind is bool:
        return st.booleans()
    if kind is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return st.sampled_from(kind)
    if dataclasses.is_dataclass(kind):
        return _record(kind)
    if origin is Table:
        return _table(*arguments)
    assert isinstance(bound, Length)
    return _sized(kind, origin, arguments, bound)


def _table(record: Any) -> st.SearchStrategy[Any]:
    keys = st.binary(min_size=1, max_size=ROW_KEY_BYTES_MAX)
    return st.dictionaries(keys, strategy_of(record), max_size=EXTRA_ITEMS_MAX).map(Table(record).with_rows)


def _sized(kind: Any, origin: Any, arguments: tuple[Any, ...], bound: Length) -> st.SearchStrategy[Any]:
    characters, items = min(bound.high, bound.low + EXTRA_BYTES_MAX), min(bound.high, bound.low + EXTRA_ITEMS_MAX)
    if kind is bytes:
        return st.binary(min_size=bound.low, max_size=characters)
    if kind is str:
        return st.text(min_size=bound.low, max_size=characters)
    if origin is dict:
        return st.dictionaries(*map(strategy_of, arguments), min_size=bound.low, max_size=items)
    if origin is tuple and arguments[-1] is Ellipsis:
        return st.lists(strategy_of(arguments[0]), min_size=bound.low, max_size=items).map(tuple)
    if origin is tuple:
        return st.tuples(*map(strategy_of, arguments))
    raise TypeError(f"{kind!r} has no strategy")


def _record(kind: Any) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    return st.builds(kind, **{field.name: strategy_of(hints[field.name]) for field in dataclasses.fields(kind)})


# Out of bounds --------------------------------------------------------------------------------------------------------


SIZE_MAX = 1 << 20  # longer bounds cost too much to exceed in every run; the same code checks them
Change = tuple[str, Any]  # the change, and the whole plain value with it


def outside(kind: Any, value: Any) -> Iterator[Change]:
    """Yield plain forms of `value` in which one number, length or count is just out of bounds, at each possible place."""
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
    for index, kind in enumerate(kinds[: len(plain) - start], start):  # added fields may be omitted
        for what, changed in _outside(kind, plain[index], None):
            yield what, [*plain[:index], changed, *plain[index + 1 :]]
