"""A feature: everything that a package brings to the house, as one value.

Nothing else names a feature's parts: `peer/features.py` lists the features, and the state, the documents' tables, the fuzz
targets, the help and the completion follow from that list.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ledger.core.module import Module
from ledger.jobs import JobRules

Modules = Callable[[JobRules], tuple[Module[Any], ...]]


def no_modules(rules: JobRules) -> tuple[Module[Any], ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    name: str
    about: str  # for people, in one line
    modules: Modules = no_modules  # parts of the state, in their order inside a block
