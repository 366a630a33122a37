"""Types that are decoded from bytes, found in the source so that none is forgotten."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from tests.packages import PACKAGES

# They decode nothing that a peer sends, and may need a library that is not installed.
OF_WORKERS = (
    "training.engines.pytorch",
    "training.engines.tinygrad",
    "training.engines.jax",
    "rlhf.pytorch",
    "rlhf.pytorch.losses",
    "peer.worker.main",
)


@functools.cache
def modules() -> tuple[ModuleType, ...]:
    found = []
    for package in PACKAGES:
        names = (info.name for info in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."))
        found += [importlib.import_module(name) for name in names if not name.startswith(OF_WORKERS)]
    return tuple(found)


@functools.cache
def messages() -> tuple[type, ...]:
    """Return every dataclass with a tag."""
    kinds = (kind for module in modules() for kind in vars(module).values() if _is_own(kind, module))
    return tuple(kind for kind in kinds if getattr(kind, "TAG", None) is not None)


@functools.cache
def records() -> tuple[type, ...]:
    """Return every dataclass without a tag that a `codec.decode(…)` names, and those in tables of kinds that it selects from."""
    found = {kind: None for module in modules() for call in _decode_calls(module) for kind in _named(call.args[0], module)}
    return tuple(kind for kind in found if kind not in messages())


def _is_own(value: Any, module: ModuleType) -> bool:
    return isinstance(value, type) and dataclasses.is_dataclass(value) and value.__module__ == module.__name__


def _decode_calls(module: ModuleType) -> Iterator[ast.Call]:
    source = inspect.getsource(module)
    if "codec.decode" not in source and "_decoded" not in source:
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="codec"), attr="decode"), args=[_, *_]):
                yield node
            case ast.Call(func=ast.Attribute(attr="_decoded"), args=[_, *_]):  # the store's wrapper of it
                yield node


def _named(expression: ast.expr, module: ModuleType) -> list[type]:
    match expression:
        case ast.Name(id="cls"):
            return [kind for kind in vars(module).values() if _is_own(kind, module) and "decode" in vars(kind)]
        case ast.Name(id=name) | ast.Attribute(attr=name):
            value = getattr(module, name, None)
            return [value] if isinstance(value, type) and dataclasses.is_dataclass(value) else []
        case ast.Subscript(value=ast.Name(id=name)):
            return list(getattr(module, name).values())
    return []
