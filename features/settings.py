"""Settings that a feature brings along. They stand beside the peer's own in files, variables, flags, and `peer config show`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


def anything(value: object) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Setting:
    name: str  # as in a file; `--my-name` as a flag, PEER_MY_NAME as a variable
    about: str
    default: str | int | bool | tuple[str, ...]
    problem: Callable[[object], str | None] = anything  # why a value cannot be used; None if it can
