"""The declaration of a feature: everything that a package adds to a peer.

`peer/features.py` lists the features. The state, the tables of the documents, the fuzz targets, the help and the completion
follow from that list. Reading the list imports no code that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules

ModuleFactory = Callable[["JobSpecRules"], "tuple[Module[Any], ...]"]


def no_modules(rules: JobSpecRules) -> tuple[Module[Any], ...]:
    return ()


def accept_any_value(value: object) -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Setting:
    """A setting of a feature, in files, variables, flags and `peer config show` like the peer's own."""

    name: str  # as in a file; `--my-name` as a flag, PEER_MY_NAME as a variable
    about: str
    default: str | int | bool | tuple[str, ...]
    problem: Callable[[object], str | None] = accept_any_value  # why a value cannot be used; None if it can


@dataclass(frozen=True, slots=True)
class Role:
    """What `--role NAME` makes of a peer."""

    name: str
    about: str  # for people, in one line
    registered_roles: tuple[str, ...] = ()  # roles in the ledger, by which the others count on this peer
    services: tuple[str, ...] = ()  # what runs here beside agreement, by name
    needs_worker: bool = False  # a process that computes
    needs_package: str = ""  # without it the services do nothing, and `full` does not register these roles


@dataclass(frozen=True, slots=True)
class EventLine:
    """A change by a block, as a line of the event log."""

    kind: str  # of an event: member, job, figures or warning
    text: str
    about: bytes  # the member, or the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    name: str
    about: str  # for people, in one line
    modules: ModuleFactory = no_modules  # parts of the state, in their order inside a block
    objectives: str = ""  # `module:name` of a tuple of them (`training.objectives.objective`)
    layers: str = ""  # `module:name` of a tuple of them (`training.transformer`)
    engines: Mapping[str, str] = field(default_factory=dict)  # name -> `module:name` of an `EngineBackend`, for the worker alone
    # name of an engine -> `module:name` of what it computes of this feature (`training.engine_implementations`), for the worker
    # alone
    implementations: Mapping[str, str] = field(default_factory=dict)
    # `module:name` of a tuple of `training.worker_protocol.WorkerRequestKind`
    worker_requests: str = ""
    commands: str = ""  # the module that declares them, as `features.commands` says
    roles: tuple[Role, ...] = ()
    # name -> `module:name` of what makes it (`features.services.ServiceFactory`)
    services: Mapping[str, str] = field(default_factory=dict)
    services_everywhere: tuple[str, ...] = ()  # names of services that run at every peer, whatever its role
    settings: tuple[Setting, ...] = ()
    rpc: str = ""  # `module:class` of the protocol that declares them, as `features.rpc` says
    # `module:function`: takes the states before and after a block as `StateReader`s, gives `EventLine`.
    event_lines: str = ""
    # `module:function`: takes the state and its height, gives what failed in its last heights, as texts for an alert.
    failures: str = ""
    rpc_handler: str = ""  # `module:class` of what answers these calls; the first call makes it with the running peer
    routes: str = ""  # `module:name` of HTTP routes and what answers them (`web.routes.RouteSet`), for peers that run `serve`
    pages: str = ""  # `module:name` of pages for people (`web.routes.PageSet`), for the same peers
