from __future__ import annotations

import hashlib
import logging
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from tests.training.engines.stepping import inner_step
from tests.training.folders import shapes, tensors, written
from training.corpus import open_tokens
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import ByteTokenizer, load_tokenizer
from training.engine_resources import EngineResources
from training.engines.held_out_evaluation import EVALUATION_TOKENS_MAX, evaluation_windows
from training.engines.pytorch.device import CPU
from training.engines.pytorch.engine import (
    FLOAT_BYTES,
    KEPT,
    MB,
    TorchEngine,
    is_out_of_memory,
    sequence_bytes,
    sequences_that_fit,
)
from training.engines.pytorch.implementations import held_out_bits
from training.engines.pytorch.model import GPT
from training.engines.pytorch.model_evaluation import evaluate_model
from training.engines.pytorch.single_process_baseline import baseline_rate, train_baseline
from training.formats.huggingface_model import open_huggingface_model
from training.job_spec import PRESETS, TOLERANCE_MIN, AuditMode, InnerOptimizerKind, JobSpec, Precision
from training.objectives.objective import InnerStep
from training.replay.inner_state import InnerState
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.transformer import ModelSpec

MODEL = ModelSpec(context=32, width=32, layers=2, heads=4, kv_heads=2, hidden=48)
SPEC = JobSpec(name="t", data=bytes(32), model=MODEL, local_steps=4, batch=4, micro_batch=4, rounds=10)
PER_STEP = replace(SPEC, **PRESETS["per-step"])
JOB, TRAINER = hashlib.sha256(b"job").digest(), b"t" * 32


def engine_of(text: Path, spec: JobSpec = SPEC) -> TorchEngine:
    return TorchEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer())


def delta_of(engine: TorchEngine, round: int = 3, trainer: bytes = TRAINER) -> Float32Array:
    return engine.local_steps(initial_parameters(engine.spec), JOB, round, trainer)[0]


def difference(a: Float32Array, b: Float32Array) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


# Local steps


def test_local_steps_lower_the_held_out_loss(text: Path) -> None:
    engine, start = engine_of(text, replace(SPEC, local_steps=30)), initial_parameters(SPEC)
    delta, losses = engine.local_steps(start, JOB, 3, TRAINER)
    before, after = engine.compute_main_metric(start), engine.compute_main_metric(start - delta)
    assert before is not None and after is not None
    assert after < 6.0 < 8.0 < before  # an untrained model has a loss of 8 bits: 256 equally likely bytes
    assert 2.0 < np.mean(losses) < math.log(256) and np.linalg.norm(delta) > 0


def test_the_same_round_gives_the_same_bits_and_leaves_no_state_behind(text: Path) -> None:
    engine = engine_of(text)
    first = delta_of(engine)
    delta_of(engine, round=4)
    assert np.array_equal(delta_of(engine), first)


@pytest.mark.parametrize("other", [{"round": 4}, {"trainer": b"u" * 32}])
def test_another_round_or_trainer_gives_an_update_far_beyond_tolerance(text: Path, other: dict[str, object]) -> None:
    engine = engine_of(text)
    assert difference(delta_of(engine, **other), delta_of(engine)) > 100 * TOLERANCE_MIN  # type: ignore[arg-type]


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 5, 8])
def test_the_gradient_of_several_micro_batches_is_that_of_one_batch(text: Path, micro_batch: int) -> None:
    spec = replace(PER_STEP, batch=8, micro_batch=8)
    whole = delta_of(engine_of(text, spec))
    assert difference(delta_of(engine_of(text, replace(spec, micro_batch=micro_batch))), whole) < 1e-6


def test_a_job_that_sends_gradients_gives_the_clipped_gradient_at_the_models_parameters(text: Path) -> None:
    parameters = initial_parameters(PER_STEP)
    engine = engine_of(text, PER_STEP)
    sent, _ = engine.local_steps(parameters, JOB, 3, TRAINER)
    assert np.array_equal(engine.read_parameters(), parameters), "no step is taken"
    unclipped = delta_of(engine_of(text, replace(PER_STEP, gradient_clip=1e6)))
    norm = np.linalg.norm(unclipped)
    assert norm > PER_STEP.gradient_clip and np.linalg.norm(sent) == pytest.approx(PER_STEP.gradient_clip, rel=1e-5)
    assert difference(sent * norm, unclipped) < 1e-6
    delta_of(engine, round=4)
    assert np.linalg.norm(sent) == pytest.approx(PER_STEP.gradient_clip, rel=1e-5), "what was given is not written to again"


@pytest.mark.parametrize("inner", InnerOptimizerKind)
def test_kept_moments_continue_as_if_the_rounds_were_one(text: Path, inner: InnerOptimizerKind) -> None:
    spec = replace(SPEC, inner=inner, warmup_rounds=0, decay_rounds=0, local_steps=2)
    engine, states = engine_of(text, spec), []
    start = initial_parameters(spec)

    def take(parameters: Float32Array, state: InnerState) -> None:
        states.append((parameters.copy(), InnerState(state.steps, state.moments.copy())))

    engine.local_steps(start, JOB, 0, TRAINER, on_state=take)
    engine.local_steps(*states[-1][:1], JOB, 1, TRAINER, inner=states[-1][1], on_state=take)
    assert [state.steps for _, state in states] == [1, 2, 3, 4]
    by_steps: tuple[Float32Array, InnerState] = (start, InnerState.fresh(spec))
    for number, (parameters, state) in enumerate(states):
        by_steps = inner_step(engine, *by_steps, InnerStep(JOB, number // 2, TRAINER, number % 2))
        assert np.array_equal(by_steps[0], parameters) and np.array_equal(by_steps[1].moments, state.moments)


def test_the_micro_batch_changes_the_update_by_rounding_only(text: Path) -> None:
    whole = delta_of(engine_of(text))
    for micro_batch in (1, 3):
        assert 0 < difference(delta_of(engine_of(text, replace(SPEC, micro_batch=micro_batch))), whole) < 1e-4


SCRIPT = """
import sys
from pathlib import Path
import numpy as np, torch
from tests.training.engines.test_engine import SPEC, delta_of, engine_of
for threads in (1, 2):
    torch.set_num_threads(threads)
    np.save(f"{sys.argv[2]}/{threads}.npy", delta_of(engine_of(Path(sys.argv[1]), SPEC)))
"""


@pytest.mark.real("processes")
def test_a_replay_elsewhere_is_ten_times_closer_than_the_tolerance(tmp_path: Path, text: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": ".", "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", SCRIPT, str(text), str(tmp_path)], check=True, env=environment)
    here = delta_of(engine_of(text))
    for threads in (1, 2):
        assert difference(np.load(tmp_path / f"{threads}.npy"), here) < 1e-4 < TOLERANCE_MIN


def test_running_out_of_memory_halves_the_micro_batch_and_goes_on(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, expected = engine_of(text), delta_of(engine_of(text, replace(SPEC, micro_batch=1)))
    loss = engine.model.loss

    def scarce(x_BT: torch.Tensor, y_BT: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        if len(x_BT) > 1:
            raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 1 bytes")
        return loss(x_BT, y_BT, reduction)

    monkeypatch.setattr(engine.model, "loss", scarce)
    assert np.array_equal(delta_of(engine), expected)
    assert engine.micro_batch == 1


def test_what_torch_says_when_memory_runs_out_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert not is_out_of_memory(RuntimeError("shape mismatch"))


def test_other_errors_are_not_swallowed(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(text)
    monkeypatch.setattr(engine.model, "loss", lambda *_: (_ for _ in ()).throw(RuntimeError("shape mismatch")))
    with pytest.raises(RuntimeError, match="shape"):
        delta_of(engine)
    assert engine.micro_batch == 4


def test_work_can_be_stopped_between_micro_batches(text: Path) -> None:
    class Stop(Exception):
        pass

    def stop() -> None:
        raise Stop

    with pytest.raises(Stop):
        engine_of(text).local_steps(initial_parameters(SPEC), JOB, 0, TRAINER, stop)


# Evaluation and text


def test_a_uniform_model_needs_eight_bits_a_byte(text: Path) -> None:
    assert engine_of(text).compute_main_metric(np.zeros_like(initial_parameters(SPEC))) == pytest.approx(8.0, abs=1e-5)


def test_evaluation_covers_a_small_held_out_part_whole_and_a_large_one_evenly() -> None:
    small = evaluation_windows(1_000, 128)
    assert len(small) == 7 and small[0] == 0 and small[-1] == 1_000 - 129
    large = evaluation_windows(10**8, 128)
    assert len(large) == EVALUATION_TOKENS_MAX // 128 and large[-1] == 10**8 - 129
    assert evaluation_windows(129, 128).tolist() == [0]


def test_without_a_held_out_part_there_is_no_held_out_loss(text: Path) -> None:
    spec = replace(SPEC, held_out_permille=0)
    assert engine_of(text, spec).compute_main_metric(initial_parameters(spec)) is None


def test_text_follows_a_prompt_and_an_empty_prompt_too(text: Path) -> None:
    engine, parameters, how = engine_of(text), initial_parameters(SPEC), SamplingOptions(max_tokens=10, temperature=1.0)
    assert len(list(engine.generate_text(parameters, b"The", how))) == 10
    assert list(engine.generate_text(parameters, b"", how)) == list(engine.generate_text(parameters, b"\n", how))


@pytest.mark.parametrize("beams", [0, 3])
def test_what_an_engine_computes_between_two_tokens_changes_nothing_of_a_text(text: Path, beams: int) -> None:
    engine, parameters = engine_of(text), initial_parameters(SPEC)
    how = SamplingOptions(max_tokens=12, temperature=0.0 if beams else 1.0, beams=beams)
    alone, found = list(engine.generate_text(parameters, b"The", how)), list[bytes]()
    for piece in engine.generate_text(parameters, b"The", how):
        found.append(piece)
        engine.local_steps(initial_parameters(replace(SPEC, seed=9)), JOB, 0, TRAINER)
    assert found == alone and b"".join(found)


def test_a_read_only_map_can_be_loaded(text: Path) -> None:
    parameters = initial_parameters(SPEC)
    parameters.flags.writeable = False
    engine_of(text).load_parameters(parameters)


# Baseline


def test_the_baseline_learns_and_measures_as_often_as_asked(text: Path) -> None:
    measured = train_baseline(SPEC, text, steps=40, batch=8, rate=3e-3, evaluations=4)
    assert len(measured) == 5 and measured[-1] < 6.0 < measured[0]


def test_the_baseline_rate_warms_up_and_falls() -> None:
    rates = [baseline_rate(step, 100, 1.0) for step in range(100)]
    assert [rates[0], rates[4], max(rates), rates[-1]] == pytest.approx([0.2, 1.0, 1.0, 0.1])


# Precision ------------------------------------------------------------------------------------------------------------


HALF = replace(SPEC, precision=Precision.BF16, audit=AuditMode.OFF)


def test_bf16_moves_an_update_by_more_than_audits_tolerate_and_by_less_than_half_of_it(text: Path) -> None:
    engine, start = engine_of(text, HALF), initial_parameters(HALF)
    delta, losses = engine.local_steps(start, JOB, 3, TRAINER)
    assert 1e-3 < difference(delta, delta_of(engine_of(text))) < 0.5
    assert delta.dtype == np.float32 and engine.model.gradients.dtype == torch.float32
    assert losses[0] == pytest.approx(engine_of(text).local_steps(start, JOB, 3, TRAINER)[1][0], rel=1e-2)


def test_what_is_measured_is_computed_in_float32(text: Path) -> None:
    start = initial_parameters(SPEC)
    assert engine_of(text, HALF).compute_main_metric(start) == engine_of(text).compute_main_metric(start)


# Compiled losses ------------------------------------------------------------------------------------------------------


def test_where_a_compiler_fails_the_loss_is_computed_as_it_is_and_that_is_said_once(
    text: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(loss: Any) -> Any:
        def raises(*arguments: Any) -> Any:
            raise RuntimeError("no compiler was found\nmore of it")

        return raises

    monkeypatch.setattr(torch, "compile", fails)
    with caplog.at_level(logging.WARNING, "peer"):
        assert np.array_equal(delta_of(engine_with(text, SPEC, compile=True)), delta_of(engine_of(text)))
    assert [record.getMessage() for record in caplog.records] == [
        "job 't': cannot compile the loss, which is computed without compilation: no compiler was found"
    ]


def test_what_runs_out_of_memory_is_no_failure_of_the_compiler(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The micro-batch is halved as without a compiler, and the compiled loss stays in use."""
    sizes = list[int]()

    def scarce(loss: Any) -> Any:
        def lacks(model: Any, x_BT: torch.Tensor, y_BT: torch.Tensor) -> Any:
            sizes.append(len(x_BT))
            if len(x_BT) > 2:
                raise RuntimeError("not enough memory: you tried to allocate 1 bytes")
            return loss(model, x_BT, y_BT)

        return lacks

    monkeypatch.setattr(torch, "compile", scarce)
    delta_of(engine_with(text, SPEC, compile=True))
    assert sizes == [4] + [2] * 2 * SPEC.local_steps


@pytest.mark.real("processes")
@pytest.mark.large
@pytest.mark.filterwarnings("default")
def test_a_compiled_loss_gives_the_same_update_to_rounding(text: Path) -> None:
    assert difference(delta_of(engine_with(text, SPEC, compile=True)), delta_of(engine_of(text))) < 1e-4


# Memory ---------------------------------------------------------------------------------------------------------------


DEEP = ModelSpec(context=32, width=32, layers=6, heads=4, kv_heads=2, hidden=48)


def kept_bytes(model: ModelSpec, recompute: bool) -> int:
    """Return the bytes that a forward pass of one sequence keeps for the backward pass."""
    net, kept = GPT(replace(SPEC, model=model)), dict[int, int]()
    net.recompute = recompute
    own = net.parameters.untyped_storage().data_ptr()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = 0 if storage.data_ptr() == own else storage.nbytes()
        return tensor

    x_BT = torch.zeros(1, model.context, dtype=torch.int64)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net.loss(x_BT, x_BT)
    assert loss.requires_grad
    return sum(kept.values())


@pytest.mark.parametrize("model", [ModelSpec(), DEEP, ModelSpec(width=128, heads=4, kv_heads=4, hidden=96, layers=2)])
def test_the_estimate_is_what_a_pass_keeps_and_something_for_the_logits(model: ModelSpec) -> None:
    assert kept_bytes(model, False) < sequence_bytes(model, False) < 1.5 * kept_bytes(model, False)


def test_recompute_keeps_far_less_and_gives_the_same_update(text: Path) -> None:
    assert kept_bytes(DEEP, True) < 0.4 * kept_bytes(DEEP, False)
    assert kept_bytes(DEEP, True) < sequence_bytes(DEEP, True) < 0.6 * sequence_bytes(DEEP, False)
    deep = replace(SPEC, model=DEEP)
    assert np.array_equal(delta_of(engine_with(text, deep, recompute=True)), delta_of(engine_with(text, deep)))


def test_a_bound_on_memory_makes_micro_batches_smaller_says_so_once_and_changes_no_result(
    text: Path, caplog: pytest.LogCaptureFixture
) -> None:
    room = KEPT * FLOAT_BYTES * layout_of(SPEC).size + 2.5 * sequence_bytes(SPEC.model, False)
    wide = replace(SPEC, batch=40, micro_batch=40)
    with caplog.at_level(logging.WARNING, "peer"):
        bound = engine_with(text, wide, memory_mb_max=int(room / MB) + 1)
    assert bound.micro_batch < 40 and "instead of 40" in caplog.text and len(caplog.records) == 1
    assert difference(delta_of(bound), delta_of(engine_with(text, wide))) < 1e-5


def test_without_a_bound_nothing_is_counted_and_a_model_that_cannot_fit_is_tried_with_one_sequence() -> None:
    assert sequences_that_fit(SPEC, EngineResources()) is None
    large = replace(SPEC, model=ModelSpec(width=512, layers=8, heads=8, kv_heads=8, hidden=2048))
    assert sequences_that_fit(large, EngineResources(memory_mb_max=1)) == 1


def engine_with(text: Path, spec: JobSpec, **resources: int) -> TorchEngine:
    tokenizer = ByteTokenizer()
    return TorchEngine(spec, open_tokens(spec, text, tokenizer), tokenizer, None, CPU, EngineResources(**resources))  # type: ignore[arg-type]


# Measuring ------------------------------------------------------------------------------------------------------------


TEXT = "".join(f"line {number} of a text\n" for number in range(40))


def test_a_model_that_knows_nothing_takes_eight_bits_a_byte(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", {name: np.zeros(shape, "<f4") for name, shape in shapes().items()})
    (tmp_path / "text.txt").write_text(TEXT)
    found = evaluate_model(folder, tmp_path / "text.txt", 1 << 20)
    assert found["bits_per_byte"] == pytest.approx(8, rel=1e-5) and found["perplexity"] == pytest.approx(256, rel=1e-5)
    assert found["of_tokens"] == len(TEXT) - 1 and found["tokens"] == (len(TEXT) - 1) // 32 * 32
    assert evaluate_model(folder, tmp_path / "text.txt", 100)["tokens"] == 96


def test_it_is_the_figure_of_a_job(tmp_path: Path) -> None:
    folder = written(tmp_path / "model", tensors())
    (tmp_path / "text.txt").write_text(TEXT)
    own = open_huggingface_model(folder)
    spec = JobSpec(name="own", data=bytes(32), model=own.model)
    net = GPT(spec)
    flat = [
        np.concatenate([block.ravel() for block in own.tensors[tensor.name].iter_blocks()]) for tensor in layout_of(spec).tensors
    ]
    net.parameters.copy_(torch.from_numpy(np.concatenate(flat)))
    known = load_tokenizer(None, 256)
    held_out = known.encode(TEXT.encode())
    with torch.no_grad():
        figures = held_out_bits(net, spec, TokenizedText(held_out[:0], held_out, known.token_bytes), lambda: None)
    found = evaluate_model(folder, tmp_path / "text.txt", 16_384)
    assert figures == {"held_out_bits_per_byte": pytest.approx(found["bits_per_byte"])}
    assert found["bits_per_byte"] != pytest.approx(8, abs=1e-4)


def test_a_text_shorter_than_the_context_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("short")
    with pytest.raises(UserError, match="has 6 tokens, but the model's context is 32"):
        evaluate_model(written(tmp_path / "model", tensors()), tmp_path / "text.txt", 100)


def test_a_model_whose_loss_is_no_number_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    huge = {name: np.full_like(tensor, 3e38) if "norm" in name else tensor for name, tensor in tensors().items()}
    with pytest.raises(UserError, match="it predicts nothing"):
        evaluate_model(written(tmp_path / "model", huge), tmp_path / "text.txt", 100)
