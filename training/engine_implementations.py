"""What each engine computes: functions for objectives, and an implementation of each kind of layer.

Features register them by engine (`features.feature.Feature.implementations`). They are imported where an engine first asks, in
the worker process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar

from features.lazy_import import import_object
from protocol.errors import UserError

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveFunctions:
    """How an engine computes an objective. The types of model, arrays and data are the engine's."""

    loss: Callable[..., Any]  # takes the model and `Objective.batch_arrays`, returns the mean over them
    # Takes the model, the specification, the data and a heartbeat, returns the figures of a model by name.
    metrics: Callable[..., Mapping[str, float]] | None = None
    # Called before each step and before each measurement. Takes the engine, what was drawn (None: what is held out) and a
    # heartbeat, and adds to the data what the model of the first round says of it.
    reference: Callable[..., None] | None = None
    declarer: Callable[..., Any] | None = None  # takes the engine; makes and checks declarations, for objectives with them


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineImplementations:
    """What a feature brings for one engine, by the names of objectives and of kinds of layers."""

    objectives: Mapping[str, ObjectiveFunctions] = field(default_factory=dict)
    layers: Mapping[str, Any] = field(default_factory=dict)  # of the type that the engine documents


_places: dict[str, tuple[str, ...]] = {"pytorch": ("training.engines.pytorch.implementations:IMPLEMENTATIONS",)}


def register_implementations(engine: str, place: str) -> None:
    """`place` is the `module:name` of `EngineImplementations`. Registering one again changes nothing."""
    _places[engine] = tuple(dict.fromkeys((*_places.get(engine, ()), place)))


def objective_functions(engine: str, objective: str) -> ObjectiveFunctions:
    """`UserError` names an objective that the engine does not compute."""
    return _find("objective", engine, objective, _imported(_places.get(engine, ())).objectives)


def layer_implementation(engine: str, layer: str) -> Any:
    """`UserError` names a kind of layer that the engine does not compute."""
    return _find("layer", engine, layer, _imported(_places.get(engine, ())).layers)


def _find(what: str, engine: str, name: str, known: Mapping[str, T]) -> T:
    if name not in known:
        raise UserError(f"the engine {engine!r} cannot compute the {what} {name!r}: it computes {', '.join(known) or 'none'}")
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
