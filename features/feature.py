"""The declaration of a feature: everything that a package adds to a peer.

`peer/features.py` lists the features. The state, the tables of the documents, the fuzz targets, the help and the shells'
completion follow from that list. Features name code as `module:name`, which is imported at its first use.
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
    """A setting of a feature. Files, variables, flags and `peer config show` treat it like a setting of the peer."""

    name: str  # `my_name` in a file; the flag is `--my-name`, the variable PEER_MY_NAME
    about: str  # a noun phrase with its unit, for a line of the help
    default: str | int | bool | tuple[str, ...]
    problem: Callable[[object], str | None] = accept_any_value  # returns why a value is invalid, or None for a valid value
    details: str = ""  # further sentences


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a peer that runs with `--role NAME`."""

    name: str
    about: str  # its work, as a verb phrase
    registered_roles: tuple[str, ...] = ()  # roles in the ledger, which tell other peers what work this peer does
    services: tuple[str, ...] = ()  # names of the services that run at this peer
    needs_worker: bool = False  # whether the role needs the worker, which computes
    needs_package: str = ""  # if it is not installed, the services do nothing, and `full` does not register these roles


@dataclass(frozen=True, slots=True)
class EventKind:
    """A kind of event in the log of a peer."""

    name: str  # `kind` of the event
    meaning: str  # for people: one sentence
    levels: tuple[str, ...] = ("info",)  # levels of its log lines
    fields: tuple[str, ...] = ()  # further keys of its JSON lines


@dataclass(frozen=True, slots=True)
class EventLine:
    """A line of the event log about a change that a block made."""

    kind: str  # kind of the event: member, job, figures or warning
    text: str
    about: bytes  # key of the member or id of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    name: str
    about: str  # one line for people
    modules: ModuleFactory = no_modules  # modules of the ledger, in the order in which a block applies them
    objectives: str = ""  # `module:name` of a tuple of objectives (`training.objectives.objective`)
    layers: str = ""  # `module:name` of a tuple of layers (`training.transformer`)
    engines: Mapping[str, str] = field(default_factory=dict)  # name -> `module:name` of an `EngineBackend` for workers
    engine_packages: Mapping[str, str] = field(default_factory=dict)  # name of an engine -> the package that it imports
    # name of an engine -> `module:name` of its code for this feature (`training.engine_implementations`) in workers
    implementations: Mapping[str, str] = field(default_factory=dict)
    # `module:name` of a tuple of `training.worker_protocol.WorkerRequestKind`
    worker_requests: str = ""
    commands: str = ""  # the module that declares the commands (`features.commands`)
    roles: tuple[Role, ...] = ()
    # name -> `module:name` of a `features.services.ServiceFactory`
    services: Mapping[str, str] = field(default_factory=dict)
    services_everywhere: tuple[str, ...] = ()  # names of services that run at every peer, in all roles
    settings: tuple[Setting, ...] = ()
    rpc: str = ""  # `module:class` of the `Protocol` class that declares the calls (`features.rpc`)
    # `module:function` from the states before and after a block, as `StateReader`s, to `EventLine`s.
    event_lines: str = ""
    event_kinds: tuple[EventKind, ...] = ()  # kinds of events of its own; the events of a service have the service's name as kind
    # `module:function` from the state and its height to texts for an alert about recent failures.
    failures: str = ""
    rpc_handler: str = ""  # `module:class` that handles the calls; the first call constructs it with the running peer
    routes: str = ""  # `module:name` of a `web.routes.RouteSet`: HTTP routes and their handlers, for peers that run `serve`
    pages: str = ""  # `module:name` of a `web.routes.PageSet`: pages for people, at the same peers
