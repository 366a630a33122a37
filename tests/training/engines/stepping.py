"""One inner step at a time, as liars and tests of several steps take them."""

from __future__ import annotations

from collections.abc import Callable

from training.engines.pytorch.engine import TorchEngine, _state_of
from training.objectives.objective import InnerStep
from training.replay.inner_state import InnerState
from training.replicated.learning_rate_schedule import inner_rate
from training.replicated.tensor_layout import Float32Array


def inner_step(
    engine: TorchEngine, parameters: Float32Array, inner: InnerState, step: InnerStep, on_step: Callable[[], None] = lambda: None
) -> tuple[Float32Array, InnerState]:
    """Copies of the parameters and the inner state after this step."""
    engine.load_parameters(parameters)
    optimizer = engine._inner_optimizer(inner)
    engine._inner_step(optimizer, step, inner_rate(engine.spec, step.round), None, on_step)
    after = _state_of(optimizer)
    return engine.read_parameters().copy(), InnerState(after.steps, after.moments.copy())
