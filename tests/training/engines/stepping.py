"""Single inner steps, for liars and for tests of several steps."""

from __future__ import annotations

from collections.abc import Callable

from training.engines.local_training import LocalTraining
from training.objectives.objective import InnerStep
from training.replay.inner_state import InnerState
from training.replicated.outer_optimizer import inner_rate
from training.replicated.tensor_layout import Float32Array


def inner_step(
    engine: LocalTraining,
    parameters: Float32Array,
    inner: InnerState,
    step: InnerStep,
    on_step: Callable[[], None] = lambda: None,
) -> tuple[Float32Array, InnerState]:
    """Return copies of the parameters and the inner state after this step."""
    engine.load_parameters(parameters)
    optimizer = engine.make_optimizer(inner)
    with engine.step_context():
        engine.accumulate_gradient(engine.draw_batch(*step.place, engine.spec.batch), on_step)
        optimizer.step(inner_rate(engine.spec, step.round))
    state = engine.read_state(optimizer)
    return engine.read_parameters().copy(), InnerState(state.steps, state.moments.copy())
