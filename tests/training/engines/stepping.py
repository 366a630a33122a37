"""One inner step at a time, as liars and tests of several steps take them."""

from __future__ import annotations

from collections.abc import Callable

from training.engines.pytorch.engine import Engine, _state_of
from training.objectives.objective import Step
from training.replay.inner_state import InnerState
from training.replicated.layout import Float32Array
from training.replicated.schedule import inner_rate


def inner_step(
    engine: Engine, parameters: Float32Array, inner: InnerState, step: Step, on_step: Callable[[], None] = lambda: None
) -> tuple[Float32Array, InnerState]:
    """Copies of the parameters and the inner state after this step."""
    engine.load(parameters)
    optimizer = engine._inner_optimizer(inner)
    engine._inner_step(optimizer, step, inner_rate(engine.spec, step.round), None, on_step)
    after = _state_of(optimizer)
    return engine.read().copy(), InnerState(after.steps, after.moments.copy())
