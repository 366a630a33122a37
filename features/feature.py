"""A feature: everything that a package brings to the house, as one value.

Nothing else names a feature's parts: `peer/features.py` lists the features, and the state, the documents' tables, the fuzz
targets, the help and the completion follow from that list. Whoever reads the list imports none of the parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from features.roles import Role
from features.settings import Setting

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules

Modules = Callable[["JobSpecRules"], "tuple[Module[Any], ...]"]


def no_modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
    return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    name: str
    about: str  # for people, in one line
    modules: Modules = no_modules  # parts of the state, in their order inside a block
    objectives: str = ""  # `module:name` of a tuple of them (`training.objectives.objective`)
    engines: Mapping[str, str] = field(default_factory=dict)  # name -> `module:name` of an `EngineBackend`, for the worker alone
    words: str = ""  # the module that declares them, as `features.words` says
    roles: tuple[Role, ...] = ()
    parts: Mapping[str, str] = field(default_factory=dict)  # name -> `module:name` of what makes it (`features.parts.MakePart`)
    everywhere: tuple[str, ...] = ()  # names of parts that run at every peer, whatever its role
    settings: tuple[Setting, ...] = ()
    calls: str = ""  # `module:class` of the protocol that declares them, as `features.calls` says
    # `module:function`: takes the states before and after a block as `StateReader`s, gives `features.news.News`.
    news: str = ""
    answers: str = ""  # `module:class` of what answers these calls; it is made with the running peer
