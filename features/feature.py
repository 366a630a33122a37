"""The declaration of a feature: everything that a package adds to a peer.

`peer/features.py` lists the features. The ledger's state, tables in the documentation, fuzz targets, the help and the shells'
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

    name: str  # name such as `my_name`, as in a file; the flag is `--my-name`, and the variable PEER_MY_NAME
    about: str  # meaning for one line of the help: a noun phrase with the unit
    default: str | int | bool | tuple[str, ...]
    problem: Callable[[object], str | None] = accept_any_value  # returns why a value is invalid, or None for a valid value
    details: str = ""  # further sentences about the setting


@dataclass(frozen=True, slots=True)
class Role:
    """The role of a peer that runs with `--role NAME`."""

    name: str
    about: str  # work of a peer with this role, as a verb phrase
    registered_roles: tuple[str, ...] = ()  # roles in the ledger, which tell other peers what work this peer does
    services: tuple[str, ...] = ()  # names of the services that run at this peer
    needs_worker: bool = False  # True if the role needs the worker process
    needs_package: str = ""  # Python package without which the services do nothing, and `full` does not register these roles


@dataclass(frozen=True, slots=True)
class EventKind:
    """A kind of event in the log of a peer."""

    name: str  # value of the field `kind` in the event's log lines
    meaning: str  # meaning for people: one sentence
    levels: tuple[str, ...] = ("info",)  # levels of the event's log lines
    fields: tuple[str, ...] = ()  # further keys of the event's JSON lines


@dataclass(frozen=True, slots=True)
class EventLine:
    """A line of the event log about a change that a block made."""

    kind: str  # kind of the event: member, job, figures or warning
    text: str
    about: bytes  # key of the member or id of the job


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine of workers, and its requirements on a machine."""

    backend: str  # `module:name` of an `EngineBackend`, for workers
    package: str = ""  # distribution that the engine imports under the same name; empty: every peer has all that it imports
    extra: str = ""  # extra of this program that installs the package
    # `module:function` of a function that returns the path of the engine's compiler, or None if this machine has none.
    # Empty: the engine needs no compiler.
    compiler: str = ""
    compiler_remedy: str = ""  # `module:name` of an imperative sentence for people without the compiler


@dataclass(frozen=True, slots=True, kw_only=True)
class Feature:
    name: str
    about: str  # description of the feature for people, in one line
    modules: ModuleFactory = no_modules  # modules of the ledger, in the order in which a block applies them
    objectives: str = ""  # `module:name` of a tuple of objectives (`training.objectives.objective`)
    layers: str = ""  # `module:name` of a tuple of layers (`training.transformer`)
    engines: Mapping[str, EngineKind] = field(default_factory=dict)  # by engine name
    # By engine name, `module:name` of the engine's code for this feature, for workers (`training.engine_implementations`).
    implementations: Mapping[str, str] = field(default_factory=dict)
    # `module:name` of a tuple of further requests to workers (`training.worker_protocol.WorkerRequestKind`).
    worker_requests: str = ""
    commands: str = ""  # name of the module that declares the feature's commands (`features.commands`)
    roles: tuple[Role, ...] = ()
    # By service name, `module:name` of a `features.services.ServiceFactory`.
    services: Mapping[str, str] = field(default_factory=dict)
    services_everywhere: tuple[str, ...] = ()  # names of services that run at every peer, in all roles
    settings: tuple[Setting, ...] = ()
    rpc: str = ""  # `module:class` of the `Protocol` class that declares the feature's RPC calls (`features.rpc`)
    # `module:function` of a function that takes the states before and after a block, as `StateReader`s, and yields `EventLine`s.
    event_lines: str = ""
    # Kinds of the feature's own events; events of a service have the service's name as kind.
    event_kinds: tuple[EventKind, ...] = ()
    # `module:function` of a function that takes the state and its height, and yields texts for an alert about recent failures.
    failures: str = ""
    rpc_handler: str = ""  # `module:class` that handles the RPC calls; the first call constructs an object with the running peer
    routes: str = ""  # `module:name` of a `web.routes.RouteSet`: HTTP routes and their handlers, for peers that run `serve`
    pages: str = ""  # `module:name` of a `web.routes.PageSet`: pages for people, for peers that run `serve`
