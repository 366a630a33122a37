"""The features of this program. A feature is one folder and one line of `FEATURES`. The order of lines is the order in which
modules handle a block.

The command line reads this list at each start and must answer at once, so slow modules are imported at their use.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from clients.feature import CLIENTS
from curation.feature import CURATION
from features.feature import EngineKind, Feature, Role, Setting
from features.lazy_import import import_object
from protocol.errors import UserError
from rlhf.feature import RLHF
from web.feature import WEB

if TYPE_CHECKING:
    from ledger.core.genesis import Genesis, ModuleVersion
    from ledger.core.module import Module
    from ledger.jobs import JobSpecRules, JobTerms
    from ledger.ledger_state import LedgerRules
    from protocol.identity import Verifier
    from training.worker_protocol import WorkerRequestKind

T = TypeVar("T")
FULL_ROLE = "full"  # name of the role that does the work of all other roles


def _core_modules(job_rules: JobSpecRules) -> tuple[Module[Any], ...]:
    from ledger.ledger_state import core_modules

    return core_modules(job_rules)


FEATURES: list[Feature] = [
    Feature(
        name="core",
        about="members, jobs, audits, and upgrades of the network",
        modules=_core_modules,
        roles=(Role("voter", "checks, votes on and applies updates with numpy; never loads torch"),),
    ),
    Feature(
        name="training",
        about="language models on text",
        failures="training.api.job_notes:find_failed_jobs",
        objectives="training.objectives.registry:OBJECTIVES",
        layers="training.transformer:LAYERS",
        engines={"pytorch": EngineKind(backend="training.engines.pytorch.backend:BACKEND", package="torch", extra="train")},
        implementations={"pytorch": "training.engines.pytorch.implementations:IMPLEMENTATIONS"},
        worker_requests="training.worker_protocol:REQUESTS",
        roles=(Role("trainer", "trains, and re-executes updates of others", registered_roles=("trainer",), needs_worker=True),),
    ),
    Feature(
        name="tinygrad",
        about="a portable engine for language models, without torch; slow",
        engines={
            "tinygrad": EngineKind(
                backend="training.engines.tinygrad.backend:BACKEND",
                package="tinygrad",
                extra="tinygrad",
                compiler="training.engines.tinygrad.compiler:find_compiler",
                compiler_remedy="training.engines.tinygrad.compiler:REMEDY",
            )
        },
        implementations={"tinygrad": "training.engines.tinygrad.layers:IMPLEMENTATIONS"},
    ),
    Feature(
        name="jax",
        about="an engine for language models on processors, GPUs and TPUs, without torch",
        engines={"jax": EngineKind(backend="training.engines.jax.backend:BACKEND", package="jax", extra="jax")},
        implementations={"jax": "training.engines.jax.layers:IMPLEMENTATIONS"},
    ),
    WEB,
    CURATION,
    RLHF,
    CLIENTS,
]


def roles() -> dict[str, Role]:
    """Return all roles by name: those of features, and `full`."""
    found = _by_name("role", ((role.name, role) for feature in FEATURES for role in feature.roles))
    together = list(found.values())
    able = [role for role in together if not role.needs_package or find_spec(role.needs_package)]
    registers = tuple(sorted({name for role in able for name in role.registered_roles}))
    of_roles = tuple(dict.fromkeys(name for role in together for name in role.services))
    assert set(of_roles) <= services().keys(), "a role names a service that no feature has"
    assert FULL_ROLE not in found, "a feature has a role with the reserved name `full`"
    return {
        **found,
        FULL_ROLE: Role(FULL_ROLE, "all of these roles", registers, of_roles, any(role.needs_worker for role in together)),
    }


def why_engine_missing(engine: str) -> tuple[str, str] | None:
    """Return the reason that this engine cannot start and the remedy, or None if its package and compiler are installed."""
    kind = engines().get(engine)
    if kind is None:
        return None
    if kind.package and not find_spec(kind.package):
        return f"the package {kind.package} is not installed", f"run `pip install 'folkmoot[{kind.extra}]'`"
    if kind.compiler and find_engine_compiler(engine) is None:
        return f"the compiler of the engine {engine} was not found", import_object(kind.compiler_remedy)
    return None


def find_engine_compiler(engine: str) -> str | None:
    """Return the path of the compiler that the engine needs. None: there is none, or the engine needs none."""
    kind = engines().get(engine)
    return import_object(kind.compiler)() if kind is not None and kind.compiler else None


def require_engine(engine: str, use: str, alternative: str = "") -> None:
    """Raise `UserError` if the package or the compiler of this engine is not installed.

    `use` is the beginning of the message, such as `the demo trains`. `alternative` is another remedy.
    """
    if missing := why_engine_missing(engine):
        problem, remedy = missing
        raise UserError(f"{use}, and {problem}: {remedy}" + (f", or {alternative}" if alternative else ""))


def services() -> dict[str, str]:
    """Return the services of all features: name -> factory as `module:name`."""
    return _by_name("service", (item for feature in FEATURES for item in feature.services.items()))


def engines() -> dict[str, EngineKind]:
    """Return the engines of all features by name."""
    return _by_name("engine", (item for feature in FEATURES for item in feature.engines.items()))


def worker_requests() -> dict[str, WorkerRequestKind[Any]]:
    """Return the kinds of requests that the worker process serves, by name."""
    kinds = [kind for feature in FEATURES if feature.worker_requests for kind in import_object(feature.worker_requests)]
    return _by_name("worker request", ((kind.request.TAG, kind) for kind in kinds))


def feature_settings() -> dict[str, Setting]:
    return _by_name("setting", ((setting.name, setting) for feature in FEATURES for setting in feature.settings))


def _by_name(what: str, items: Iterable[tuple[str, T]]) -> dict[str, T]:
    found: dict[str, T] = {}
    for name, item in items:
        assert name not in found, f"two features have a {what} {name!r}"
        found[name] = item
    return found


def register_features() -> None:
    """Register the objectives, layers and engine implementations of all features in this process.

    A program that reads jobs of any feature calls this first.
    """
    from training import engine_implementations, transformer
    from training.objectives import registry

    for feature in FEATURES:
        if feature.layers:
            transformer.register_layers(import_object(feature.layers))
        if feature.objectives:
            registry.register_objectives(import_object(feature.objectives))
        for engine, place in feature.implementations.items():
            engine_implementations.register_implementations(engine, place)


def modules_of(job_rules: JobSpecRules) -> tuple[Module[Any], ...]:
    """Return all versions of all modules, in the order in which modules handle a block."""
    return tuple(module for feature in FEATURES for module in feature.modules(job_rules))


def founding_modules() -> tuple[ModuleVersion, ...]:
    """Return the newest version of each module, for the genesis of a new network."""
    from ledger.ledger_state import newest_module_versions

    return newest_module_versions(known_modules())


def known_modules() -> tuple[Module[Any], ...]:
    """Return all versions of all modules for a program that reads states and applies no block."""
    return modules_of(_NoJobs())


def versions_of(feature: Feature) -> dict[str, tuple[int, ...]]:
    """Return the known versions of each module of a feature."""
    found: dict[str, tuple[int, ...]] = {}
    for module in feature.modules(_NoJobs()):
        found[module.name] = tuple(sorted((*found.get(module.name, ()), module.version)))
    return found


class _NoJobs:
    """Job rules for callers that only list modules: each method raises an error."""

    def terms_of_spec(self, spec: bytes) -> JobTerms:
        raise AssertionError("no job is read")

    def why_base_refused(self, base: bytes, spec: bytes) -> str | None:
        raise AssertionError("no job is read")

    def why_continuation_refused(self, before: bytes, spec: bytes) -> str | None:
        raise AssertionError("no job is read")

    def why_read_model_refused(self, read: bytes, spec: bytes) -> str | None:
        raise AssertionError("no job is read")


def rules_of(genesis: Genesis, job_rules: JobSpecRules, verifier: Verifier | None = None) -> LedgerRules:
    """Return the transition rules of a network, with the modules of all features."""
    from ledger.ledger_state import LedgerRules
    from protocol.identity import Ed25519Verifier

    register_features()
    return LedgerRules(genesis, verifier or Ed25519Verifier(), modules_of(job_rules))
