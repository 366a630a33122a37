"""Registry of the functions that engines implement: objectives, and kinds of layers.

Features register implementations by engine (`features.feature.Feature.implementations`). The worker process imports these when an
engine first needs them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeVar

from features.lazy_import import import_object
from protocol.errors import UserError

T = TypeVar("T")
USUAL_ENGINE: Final = "pytorch"  # name of the engine that computes all jobs of this program


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveFunctions:
    """An engine's implementation of an objective. The engine determines the types of model, arrays and data."""

    # Function of the model and of the arrays from `Objective.batch_arrays`, which returns the mean loss. None: `engine` is given.
    loss: Callable[..., Any] | None = None
    engine: Callable[..., Any] | None = None  # class of the objective's own engine; None: the backend's engine computes the loss
    # A function of the model, the specification, the data and a heartbeat. It returns the model's metrics by name.
    metrics: Callable[..., Mapping[str, float]] | None = None
    # A function that is called before each step and each measurement, with the engine, the step's examples (None: the held-out
    # data) and a heartbeat. It computes the outputs of the first round's model on these examples and adds them to the data.
    reference: Callable[..., None] | None = None
    declarer: Callable[..., Any] | None = None  # function of the engine; returns an object that makes and checks declarations


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineImplementations:
    """A feature's implementations for one engine, by the names of objectives and of kinds of layers."""

    objectives: Mapping[str, ObjectiveFunctions] = field(default_factory=dict)
    # Implementations by the name of the kind of layer; the engine documents their type.
    layers: Mapping[str, Any] = field(default_factory=dict)


_places: dict[str, tuple[str, ...]] = {USUAL_ENGINE: ("training.engines.pytorch.implementations:IMPLEMENTATIONS",)}


def register_implementations(engine: str, place: str) -> None:
    """Register an `EngineImplementations` for an engine. `place` is its `module:name`. A second registration changes nothing."""
    _places[engine] = tuple(dict.fromkeys((*_places.get(engine, ()), place)))


def objective_functions(engine: str, objective: str) -> ObjectiveFunctions:
    """Return the engine's functions for an objective. Raises `UserError` if the engine does not compute it."""
    return _find("objective", engine, objective, _imported(_places.get(engine, ())).objectives)


def layer_implementation(engine: str, layer: str) -> Any:
    """Return the engine's implementation of a kind of layer. Raises `UserError` if the engine does not compute it."""
    return _find("layer", engine, layer, _imported(_places.get(engine, ())).layers)


def require_implemented(what: str, engine: str, name: str, known: Collection[str]) -> None:
    """Raise `UserError` if `name` is not among the values of a job that the engine computes."""
    if name not in known:
        cannot = f"the engine {engine!r} cannot compute the {what} {name!r}: it computes {', '.join(known) or 'none'}"
        raise UserError(
            cannot if engine == USUAL_ENGINE else f"{cannot}; start this peer with engine {USUAL_ENGINE} for such jobs"
        )


def _find(what: str, engine: str, name: str, known: Mapping[str, T]) -> T:
    require_implemented(what, engine, name, known)
    return known[name]


@lru_cache(maxsize=8)
def _imported(places: tuple[str, ...]) -> EngineImplementations:
    objectives: dict[str, ObjectiveFunctions] = {}
    layers: dict[str, Any] = {}
    for place in places:
        found: EngineImplementations = import_object(place)
        assert objectives.keys().isdisjoint(found.objectives) and layers.keys().isdisjoint(found.layers), place
        objectives |= found.objectives
        layers |= found.layers
    return EngineImplementations(objectives=objectives, layers=layers)
