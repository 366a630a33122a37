"""Every engine computes the same gradients, steps, metrics and texts, within bounds far below the tolerance of audits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from peer import features
from protocol.errors import UserError
from protocol.sampling import EndReason, SamplingOptions
from tests.training.engines import conformance
from tests.training.engines.conformance import JOB, MODELS, STEPS, TRAINER, spec_of
from tests.training.engines.stepping import inner_step
from training.engines.engine import CompilingEngine
from training.engines.local_training import LocalTraining
from training.job_spec import PRESETS
from training.objectives.objective import InnerStep
from training.replay.inner_state import InnerState, inner_error, l2_distance
from training.replicated.tensor_layout import Float32Array, initial_parameters

GRADIENT_ERROR_MAX = 1e-5  # of a tensor, on a batch that the model was not trained on
HEART_ERROR_MAX = 1e-4  # of a tensor, on a batch that the model knows by heart
STEPS_ERROR_MAX = 1e-4  # of Δ and of the state after each of ten steps
BITS_ERROR_MAX = 1e-5  # of held-out bits per byte
LOGPROB_ERROR_MAX = 1e-4  # of a token's log-probability, in nats

# Other engines than torch compile for about half a minute, in child processes.
COMPILED = [pytest.mark.real("compilers"), pytest.mark.long]
features.register_features()
KINDS = [pytest.param(name, marks=[] if name == "pytorch" else COMPILED) for name in features.engines()]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    if missing := features.why_engine_missing(request.param):
        pytest.skip(f"engine {request.param}: {': '.join(missing)}")
    before = dict(os.environ)
    conformance.start_engine(request.param, tmp_path_factory.mktemp("programs"))
    yield request.param
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def engine(kind: str, model: str) -> LocalTraining:
    return conformance.open_engine(kind, spec_of(model))


@pytest.fixture(scope="module")
def tied(kind: str) -> LocalTraining:
    """Return an engine for the smallest model."""
    return conformance.open_engine(kind, spec_of("tied"))


def test_each_tensor_s_gradient_is_that_of_float64(engine: LocalTraining, model: str) -> None:
    spec = spec_of(model)
    start = initial_parameters(spec)
    error = conformance.worst_tensor_error(
        conformance.gradient_of(engine, start), conformance.reference_gradient(spec, start), spec
    )
    assert error < GRADIENT_ERROR_MAX


def test_each_tensor_s_gradient_is_that_of_float64_on_a_batch_learned_by_heart(engine: LocalTraining, model: str) -> None:
    spec, known = spec_of(model), conformance.parameters_by_heart(model)
    error = conformance.worst_tensor_error(
        conformance.gradient_of(engine, known), conformance.reference_gradient(spec, known), spec
    )
    assert error < HEART_ERROR_MAX


States = list[tuple[Float32Array, InnerState]]


def steps_of(engine: LocalTraining, beats: Callable[[], None] = lambda: None) -> tuple[Float32Array, States]:
    states: States = []

    def take(parameters: Float32Array, state: InnerState) -> None:
        states.append((parameters.copy(), InnerState(state.steps, state.moments.copy())))

    delta, losses = engine.local_steps(initial_parameters(engine.spec), JOB, 1, TRAINER, beats, on_state=take)
    assert len(losses) == len(states) == engine.spec.local_steps
    return delta, states


def distance(a: Float32Array, b: Float32Array) -> float:
    return l2_distance(a, b) / float(np.linalg.norm(b))


def test_ten_steps_and_the_states_between_are_torch_s_with_other_micro_batches(engine: LocalTraining, model: str) -> None:
    engine.spec = spec_of(model)
    torch = conformance.torch_engine(model)
    torch.micro_batch = 1
    (delta, states), (expected, others) = steps_of(engine), steps_of(torch)
    assert len(states) == STEPS and distance(delta, expected) < STEPS_ERROR_MAX
    before = initial_parameters(engine.spec), InnerState.fresh(engine.spec)
    for number, (parameters, state) in enumerate(others):  # Each step is replayed from torch's state, as by an auditor.
        found, found_state = inner_step(engine, *before, InnerStep(JOB, 1, TRAINER, number))
        assert inner_error(found_state, state, engine.spec) < STEPS_ERROR_MAX
        assert distance(found, parameters) < STEPS_ERROR_MAX
        before = parameters, state


def test_the_same_round_gives_the_same_bits_and_continues_from_a_state(tied: LocalTraining) -> None:
    delta, states = steps_of(tied)
    again, _ = steps_of(tied)
    assert np.array_equal(delta, again)
    start, state = states[-1]
    kept = state.moments.copy()
    tied.local_steps(start, JOB, 2, TRAINER, inner=state)
    assert np.array_equal(state.moments, kept), "an engine works on a copy of a state"


def test_a_job_that_sends_gradients_gives_torch_s_clipped_gradient(kind: str) -> None:
    spec = replace(spec_of("tied"), **PRESETS["per-step"])
    engine, torch = conformance.open_engine(kind, spec), conformance.open_engine("pytorch", spec)
    (found, _), (expected, _) = (one.local_steps(initial_parameters(spec), JOB, 1, TRAINER) for one in (engine, torch))
    assert np.linalg.norm(found) == pytest.approx(spec.gradient_clip, rel=1e-5) and distance(found, expected) < GRADIENT_ERROR_MAX


def test_metrics_and_log_probabilities_are_torch_s(tied: LocalTraining) -> None:
    torch, tokens = conformance.torch_engine("tied"), conformance.TEXT[100 : 100 + MODELS["tied"].context + 1].tolist()
    for parameters in (conformance.parameters_by_heart("tied"), initial_parameters(tied.spec)):  # one model after another
        found, expected = (one.compute_metrics(parameters) for one in (tied, torch))
        assert found.keys() == expected.keys() == {"held_out_bits_per_byte"}
        assert found["held_out_bits_per_byte"] == pytest.approx(expected["held_out_bits_per_byte"], rel=BITS_ERROR_MAX)
        scores, others = (one.score_tokens(parameters, tokens) for one in (tied, torch))  # type: ignore[attr-defined]
        assert scores.shape == others.shape and np.abs(scores - others).max() < LOGPROB_ERROR_MAX


def test_the_likeliest_text_is_torch_s_beyond_the_context_too(tied: LocalTraining) -> None:
    how = SamplingOptions(max_tokens=2 * MODELS["tied"].context, temperature=0.0)
    parameters = conformance.parameters_by_heart("tied")
    texts = [b"".join(one.generate_text(parameters, b"The", how)) for one in (tied, conformance.torch_engine("tied"))]
    assert texts[0] == texts[1] and len(texts[0]) == how.max_tokens


def test_drawn_samples_follow_their_seed_and_end(tied: Any) -> None:
    parameters, how = initial_parameters(tied.spec), SamplingOptions(max_tokens=6, temperature=1.0, top_k=40, seed=5)

    def drawn(seed: int) -> list[list[int]]:
        options = replace(how, seed=seed)
        found: list[list[int]] = [[], []]
        ends: list[EndReason | None] = [None, None]
        for step in tied.generate_tokens(parameters, [1, 2, 3], 2, options, lambda made: False):
            for each in step:
                found[each.sample].append(each.token)
                ends[each.sample] = each.end
                assert each.logprob <= 0
        assert ends == [EndReason.LENGTH] * 2
        return found

    assert drawn(5) == drawn(5) != drawn(6) and list(map(len, drawn(5))) == [6, 6]


def test_running_out_of_memory_halves_the_micro_batch(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = replace(spec_of("tied"), local_steps=1)
    engine = conformance.open_engine(kind, spec)
    add, sizes = engine.add_gradient, list[int]()

    def scarce(examples: Any, weight: float) -> Any:
        sizes.append(len(examples[0]))
        if len(examples[0]) > 1:
            raise MemoryError("no memory is left")
        return add(examples, weight)

    monkeypatch.setattr(engine, "add_gradient", scarce)
    expected = conformance.open_engine("pytorch", spec).local_steps(initial_parameters(spec), JOB, 1, TRAINER)[0]
    found = engine.local_steps(initial_parameters(spec), JOB, 1, TRAINER)[0]
    assert engine.micro_batch == 1 and sizes == [3, 1, 1, 1, 1]
    assert distance(found, expected) < STEPS_ERROR_MAX


def test_an_engine_beats_between_micro_batches_and_while_it_compiles(kind: str, tied: LocalTraining) -> None:
    beats = list[int]()
    steps_of(tied)
    steps_of(tied, lambda: beats.append(1))
    assert len(beats) == STEPS * 2, "one beat for each micro-batch, after the programs are compiled"
    fresh = conformance.open_engine(kind, replace(spec_of("tied"), micro_batch=2))
    if isinstance(fresh, CompilingEngine):
        before = len(beats)
        fresh.compile_programs(lambda: beats.append(1))
        assert len(beats) > before + 1


def test_work_can_be_stopped_between_micro_batches(tied: LocalTraining) -> None:
    def stop() -> None:
        raise UserError("nobody waits")

    with pytest.raises(UserError, match="nobody waits"):
        steps_of(tied, stop)
