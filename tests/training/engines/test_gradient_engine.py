"""The base of engines that bring only a gradient and logits: its steps, its texts, and its refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pytest
import torch

from protocol.codec import added_field
from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from tests.training.engines.conformance import JOB, SPEC, TRAINER, spec_of, tokens_of
from training import engine_implementations
from training.data.tokenizer import ByteTokenizer
from training.engine_implementations import EngineImplementations, ObjectiveFunctions, require_implemented
from training.engine_resources import EngineResources, ParallelMode
from training.engines import gradient_engine, token_sampling
from training.engines.adamw import LEAST_NORMAL, FlatAdamW, clip_gradient, weight_decay_mask
from training.engines.gradient_engine import GradientEngine, pad_examples, require_plain_resources
from training.engines.local_training import Examples
from training.engines.pytorch import layers
from training.engines.pytorch.inner_optimizers import AdamW
from training.engines.transformer_decoder import rotary_tables
from training.job_spec import AuditMode, InnerOptimizerKind, JobSpec, Precision
from training.replay.inner_state import InnerState
from training.replicated.tensor_layout import Float32Array, initial_parameters

IMPLEMENTED = EngineImplementations(objectives={"language": ObjectiveFunctions(loss=lambda: None)})


class FakeEngine(GradientEngine):
    """An engine whose gradient pulls all parameters to zero."""

    name: ClassVar[str] = "fake"

    def gradient(self, parameters: Float32Array, examples: Examples) -> tuple[float, Float32Array]:
        return float(parameters @ parameters) / 2, parameters.copy()

    def logits(self, parameters: Float32Array, tokens_T: npt.NDArray[np.int64]) -> Float32Array:
        """Predict after each token the next number."""
        return np.eye(256, dtype=np.float32)[(tokens_T + 1) % 256] * 100


@pytest.fixture(autouse=True)
def implementations(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(engine_implementations._places, "fake", (f"{__name__}:IMPLEMENTED",))
    yield


def fake(spec: JobSpec) -> FakeEngine:
    return FakeEngine(spec, tokens_of(spec), ByteTokenizer())


def test_the_numpy_steps_are_those_of_torch() -> None:
    spec, draw = replace(spec_of("tied"), weight_decay=0.1), np.random.default_rng(1)
    parameters = initial_parameters(spec)
    gradient, decayed = np.zeros_like(parameters), weight_decay_mask(spec)
    ours = FlatAdamW(spec, mine := parameters.copy(), gradient, decayed, InnerState.fresh(spec))
    theirs = AdamW(other := torch.from_numpy(parameters.copy()), torch.from_numpy(gradient), torch.from_numpy(decayed), spec)
    for _ in range(20):
        gradient[:] = drawn = draw.standard_normal(len(parameters), dtype=np.float32)
        norm = ours.step(1e-2)
        gradient[:] = drawn
        assert theirs.step(1e-2) == pytest.approx(norm, rel=1e-5)
    np.testing.assert_allclose(mine, other.numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(ours.moments, theirs.moments.numpy(), rtol=1e-4, atol=1e-9)
    assert ours.steps == theirs.steps == 20 and np.abs(mine - parameters).max() > 0.1


def test_a_state_s_subnormal_numbers_are_zero_and_its_arrays_are_not_changed() -> None:
    spec = spec_of("tied")
    state = InnerState.fresh(spec)
    state.moments[:] = LEAST_NORMAL / 2
    zeros = np.zeros_like(initial_parameters(spec))
    assert not FlatAdamW(spec, zeros, zeros.copy(), zeros, state).moments.any() and state.moments.all()


def test_a_gradient_is_scaled_down_to_its_limit_only() -> None:
    gradient = np.full(4, 1.0, dtype=np.float32)
    assert clip_gradient(gradient, 5.0) == pytest.approx(2.0) and gradient.tolist() == [1.0] * 4
    clip_gradient(gradient, 1.0)
    assert np.linalg.norm(gradient) == pytest.approx(1.0)


def test_rows_of_padding_have_no_weight() -> None:
    arrays, weights = pad_examples([np.ones((2, 3)), np.ones(2, dtype=np.int64)], 3)
    assert weights.tolist() == [0.5, 0.5, 0.0] and [array.shape for array in arrays] == [(3, 3), (3,)]
    assert arrays[0][2].tolist() == [0, 0, 0]


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_rotary_positions_are_those_of_torch(model: str) -> None:
    spec = spec_of(model).model
    for ours, theirs in zip(rotary_tables(spec), layers.rotary_tables(spec), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy()[: spec.context], atol=1e-7)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"inner": InnerOptimizerKind.MUON}, "the engine 'fake' cannot compute the inner optimizer 'muon': it computes adamw"),
        (
            {"precision": Precision.BF16, "audit": AuditMode.OFF},
            "the engine 'fake' cannot compute the precision 'bf16': it computes fp32",
        ),
        ({"objective": "scratch"}, "the engine 'fake' cannot compute the objective 'scratch': it computes language"),
    ],
)
def test_a_job_that_the_engine_cannot_compute_is_refused_in_one_line(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError) as refused:
        fake(replace(SPEC, **changes))
    assert str(refused.value) == f"{text}; start this peer with engine pytorch for such jobs"


def test_the_way_out_of_pytorch_is_not_itself() -> None:
    with pytest.raises(UserError) as refused:
        require_implemented("layer", "pytorch", "squares", ["swiglu"])
    assert str(refused.value) == "the engine 'pytorch' cannot compute the layer 'squares': it computes swiglu"


@dataclass
class LaterSpec:
    name: str
    experts: int = added_field(0)


def test_fields_of_later_programs_are_refused_by_name() -> None:
    gradient_engine.require_known_fields("fake", LaterSpec("plain"), ())
    gradient_engine.require_known_fields("fake", LaterSpec("known", 8), {"experts"})
    with pytest.raises(UserError, match="the engine 'fake' cannot compute experts 8: start this peer with engine pytorch"):
        gradient_engine.require_known_fields("fake", LaterSpec("new", 8), ())


@pytest.mark.parametrize(
    ("resources", "what"),
    [
        (EngineResources(compile=True), "compile"),
        (EngineResources(recompute=True), "recompute"),
        (EngineResources(parallel=ParallelMode.DDP, gpus=2), "parallel ddp"),
        (EngineResources(memory_mb_max=500), "memory_mb_max 500"),
    ],
)
def test_settings_that_only_torch_supports_are_refused(resources: EngineResources, what: str) -> None:
    require_plain_resources("fake", EngineResources(threads=2))
    with pytest.raises(UserError, match=f"the engine 'fake' does not support {what}: turn it off"):
        require_plain_resources("fake", resources)


def test_a_step_goes_down_the_gradient_and_leaves_the_given_parameters() -> None:
    spec = replace(spec_of("tied"), local_steps=1)
    start = initial_parameters(spec)
    kept = start.copy()
    delta, losses = fake(spec).local_steps(start, JOB, 1, TRAINER)
    assert np.array_equal(start, kept) and losses == [pytest.approx(float(kept @ kept) / 2)]
    assert (np.sign(delta) == np.sign(start))[np.abs(start) > 1e-3].all()


def test_a_compilation_beats_and_survives_a_cancelled_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_engine, "HEARTBEAT_SECONDS", 0.0)
    beaten, engine = threading.Event(), fake(spec_of("tied"))

    def beat() -> None:
        if threading.current_thread() is not threading.main_thread():
            beaten.set()
            raise UserError("the request was cancelled")

    def slow(parameters: Float32Array, examples: Examples) -> tuple[float, Float32Array]:
        assert beaten.wait(60), "no other thread beats"
        return 0.0, parameters

    monkeypatch.setattr(engine, "gradient", slow)
    threads = threading.active_count()
    engine.compile_programs(beat)
    assert threading.active_count() == threads
    monkeypatch.delattr(gradient_engine, "heartbeats_during")  # The program exists, so nothing beats during the second execution.
    engine.compile_programs(lambda: None)


def test_texts_and_samples_follow_the_logits() -> None:
    engine = fake(spec_of("tied"))
    how = SamplingOptions(max_tokens=40, temperature=0.0)
    text = b"".join(engine.generate_text(initial_parameters(engine.spec), b"A", how))
    assert text == bytes(range(66, 106))
    assert b"".join(engine.generate_text(initial_parameters(engine.spec), b"A", how, stop=70)) == b"BCDE"
    with pytest.raises(UserError, match="beams 2: the engine 'fake' only draws texts, so leave beams out"):
        engine.generate_text(initial_parameters(engine.spec), b"A", replace(how, beams=2))
    found = [
        each
        for step in engine.generate_tokens(engine.read_parameters(), [1], 1, how, lambda made: made[-1] == 4)
        for each in step
    ]
    assert [each.token for each in found] == [2, 3, 4] and found[-1].end is not None
    assert engine.score_tokens(engine.read_parameters(), [5, 6, 7]).tolist() == [0.0, 0.0]


def test_a_full_context_loses_its_older_half() -> None:
    lengths = list[int]()

    def logits(tokens_T: npt.NDArray[np.int64]) -> Float32Array:
        lengths.append(len(tokens_T))
        return np.zeros((len(tokens_T), 4), dtype=np.float32)

    how = SamplingOptions(max_tokens=9, temperature=0.0)
    assert len(list(token_sampling.sample_tokens(logits, 8, [1, 2, 3], how, set(), lambda: None))) == 9
    assert lengths == [3, 4, 5, 6, 7, 8, 4, 5, 6]


def test_top_k_and_top_p_leave_out_unlikely_tokens() -> None:
    logits, generator = np.log(np.array([0.1, 0.5, 0.3, 0.1], dtype=np.float32)), np.random.default_rng(0)

    def drawn(**changes: Any) -> set[int]:
        how = replace(SamplingOptions(temperature=1.0), **changes)
        return {token_sampling.choose_token(logits, how, generator) for _ in range(400)}

    assert drawn() == {0, 1, 2, 3} and drawn(top_k=2) == {1, 2} and drawn(top_p=0.4) == {1} and drawn(top_k=3) == {0, 1, 2}
    assert drawn(temperature=0.0) == {1}
