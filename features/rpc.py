"""RPC calls to a running peer. Each call is declared once, as a method of a `Protocol` class.

The method determines the call's name, argument types, result type and description. The client's stub, the server's dispatch and
the decoding in both directions follow from the method. A call with an `AsyncGenerator` streams its result. A reader that stops
early closes the generator (`contextlib.aclosing`), which ends the call.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

from protocol import codec
from protocol.errors import RemoteProtocolError


@dataclass(frozen=True, slots=True)
class RpcMethod:
    name: str
    about: str
    signature: inspect.Signature  # signature of the method without `self`
    argument_types: Mapping[str, Any]  # types of the arguments by name
    result_type: Any  # type of the result, or of each part of a stream
    is_streamed: bool = False  # True if the result is a stream of parts.

    def encode_arguments(self, *arguments: Any, **named: Any) -> list[Any]:
        """Return the encoded arguments of a call, including defaults."""
        bound = self.signature.bind(*arguments, **named)
        bound.apply_defaults()
        values = ((kind, bound.arguments[name]) for name, kind in self.argument_types.items())
        # Python accepts an int where a float is declared, but their encodings differ.
        return [codec.to_plain(float(value) if kind is float else value) for kind, value in values]

    def decode_arguments(self, plain: Any) -> list[Any]:
        """Return the decoded arguments of a call. Raises `RemoteProtocolError` unless they have the declared types."""
        if not isinstance(plain, list) or len(plain) != len(self.argument_types):
            raise RemoteProtocolError("mistyped", f"{self.name} expects the arguments {', '.join(self.argument_types) or 'none'}")
        return [codec.from_plain(kind, item) for kind, item in zip(self.argument_types.values(), plain, strict=True)]

    def decode_result(self, plain: Any) -> Any:
        return None if self.result_type is type(None) else codec.from_plain(self.result_type, plain)


def collect_methods(*protocols: type) -> dict[str, RpcMethod]:
    """Return the calls that these `Protocol` classes declare, by name."""
    found: dict[str, RpcMethod] = {}
    for protocol in protocols:
        for name, function in public_methods(protocol):
            assert name not in found, f"two declarations of the call {name!r}"
            hints = typing.get_type_hints(function, include_extras=True)
            result = hints.pop("return")
            signature = inspect.signature(function)
            without_self = signature.replace(parameters=list(signature.parameters.values())[1:])
            assert list(without_self.parameters) == list(hints), f"the call {name!r} has an argument without a type"
            is_streamed = typing.get_origin(result) is AsyncGenerator
            of_each = typing.get_args(result)[0] if is_streamed else result
            found[name] = RpcMethod(name, inspect.getdoc(function) or "", without_self, hints, of_each, is_streamed)
    return found


def public_methods(kind: type) -> Iterator[tuple[str, Any]]:
    return ((name, function) for name, function in inspect.getmembers(kind, inspect.isfunction) if not name.startswith("_"))


def defer_handlers(makers: Mapping[type, Callable[[], object]]) -> SimpleNamespace:
    """Return one object that handles all calls of these protocols. The first call of a protocol constructs its handler."""
    roof = SimpleNamespace()
    for protocol, maker in makers.items():
        make = cache(partial(_make_handler, protocol, maker))
        for name, _ in public_methods(protocol):
            assert not hasattr(roof, name), f"two protocols declare the call {name!r}"
            setattr(roof, name, _deferred_call(make, name))
    return roof


def _make_handler(protocol: type, maker: Callable[[], object]) -> object:
    handler = maker()
    for name, _ in public_methods(protocol):
        kind = type(handler)
        assert name in vars(kind), f"{kind.__name__} does not implement the call {name!r}"
    return handler


def _deferred_call(make: Callable[[], object], name: str) -> Callable[..., Any]:
    return lambda *arguments, **named: getattr(make(), name)(*arguments, **named)
