"""Ternary matrices in PyTorch."""

from __future__ import annotations

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F

from protocol.errors import UserError
from protocol.sampling import Activations, SamplingOptions
from tests.training.formats.test_packed_model import written
from training import ternary
from training.corpus import open_tokens
from training.data.tokenizer import ByteTokenizer
from training.engine_resources import EngineResources, ParallelMode
from training.engines.pytorch.engine import FLOAT_BYTES, KEPT, MB, TorchEngine, sequences_that_fit
from training.engines.pytorch.model import GPT
from training.engines.pytorch.parallel_engine import ParallelEngine
from training.engines.pytorch.ternary import MovingWeights, linear_int8, ternary_scale, ternary_weights
from training.formats.huggingface_model import open_huggingface_model
from training.job_spec import InnerOptimizerKind, JobSpec
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.transformer import ModelSpec, model_tensors

MODEL = ModelSpec(context=32, width=32, layers=2, heads=4, kv_heads=2, hidden=48, linear="ternary")
SPEC = JobSpec(name="t", data=bytes(32), model=MODEL, local_steps=4, batch=4, micro_batch=4, rounds=10)
DENSE = replace(SPEC, model=replace(MODEL, linear="dense"))
JOB, TRAINER = bytes(range(32)), b"t" * 32
X_BT = torch.randint(0, 256, (3, 32), generator=torch.Generator().manual_seed(0))


def loaded(spec: JobSpec, parameters: Float32Array) -> GPT:
    model = GPT(spec)
    model.load_parameters(parameters)
    return model


def weights_of(parameters: Float32Array) -> Float32Array:
    """Return the vector with the ternary weights in the place of latent ones, matrix by matrix."""
    found = parameters.copy()
    for name, view in layout_of(SPEC).tensor_views(found).items():
        if model_tensors(MODEL)[name].parameter.is_ternary:
            view[:] = ternary.ternary_weights(view.copy())
    return found


def engine_of(text: Path, spec: JobSpec = SPEC) -> TorchEngine:
    return TorchEngine(spec, open_tokens(spec, text, ByteTokenizer()), ByteTokenizer())


@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (300, 257)])
@pytest.mark.parametrize("size", [0.0, 1e-30, 1e-5, 0.02, 1e20])
def test_the_scale_has_the_bits_of_numpy_s(shape: tuple[int, int], size: float) -> None:
    latent = (np.random.default_rng(0).standard_normal(shape) * size).astype(np.float32)
    assert ternary_scale(torch.from_numpy(latent)).numpy().tobytes() == ternary.ternary_scale(latent).tobytes()


def test_loss_and_gradient_are_those_of_a_dense_model_with_ternary_weights_bit_for_bit() -> None:
    latent = initial_parameters(SPEC)
    model, dense = loaded(SPEC, latent), loaded(DENSE, weights_of(latent))
    for net in (model, dense):
        net.loss(X_BT[:, :-1], X_BT[:, 1:]).backward()
    with torch.no_grad():
        assert torch.equal(model.features(X_BT), dense.features(X_BT))
    assert torch.equal(model.gradients, dense.gradients) and model.gradients.count_nonzero() > 0.9 * len(latent)
    assert not torch.equal(model.parameters, dense.parameters)


def test_joined_matrices_have_scales_of_their_own() -> None:
    latent = initial_parameters(SPEC)
    layout_of(SPEC).tensor_views(latent)["layers.0.key.weight"][:] *= 100
    layout_of(SPEC).tensor_views(latent)["layers.1.up.weight"][:] *= 100
    with torch.no_grad():
        assert torch.equal(loaded(SPEC, latent).features(X_BT), loaded(DENSE, weights_of(latent)).features(X_BT))


def test_a_gradient_is_the_same_for_all_micro_batches(text: Path) -> None:
    deltas = []
    for micro_batch in (4, 1):
        engine = engine_of(text, replace(SPEC, micro_batch=micro_batch))
        deltas.append(engine.local_steps(initial_parameters(SPEC), JOB, 3, TRAINER)[0])
    assert np.linalg.norm(deltas[0] - deltas[1]) < 1e-4 * np.linalg.norm(deltas[0])


def test_training_lowers_the_held_out_loss_and_changes_levels(text: Path) -> None:
    engine, start = engine_of(text, replace(SPEC, local_steps=30)), initial_parameters(SPEC)
    after = start - engine.local_steps(start, JOB, 3, TRAINER)[0]
    first, last = engine.compute_main_metric(start), engine.compute_main_metric(after)
    assert first is not None and last is not None and last < first - 1
    name = "layers.0.gate.weight"
    levels = [np.sign(layout_of(SPEC).tensor_views(weights_of(vector))[name]) for vector in (start, after)]
    assert 0.01 < (levels[0] != levels[1]).mean() < 0.9


def test_activations_of_eight_bits_are_rounded_for_each_token() -> None:
    x_TC = torch.tensor([[127.0, -3.4, 0.6, 0.0], [0.0, 0.0, 0.0, 0.0], [1.0, 0.5, -1.0, 0.004]])
    levels_TC = torch.tensor([[127.0, -3, 1, 0], [0, 0, 0, 0], [127.0, 64, -127, 1]])
    scales_T1 = torch.tensor([[1.0], [0.0], [1 / 127]])
    weights = torch.eye(4)
    assert torch.allclose(linear_int8(x_TC, weights), levels_TC * scales_T1, rtol=1e-6, atol=0)
    assert torch.equal(linear_int8(x_TC[2:], weights)[0], linear_int8(x_TC, weights)[2]), "a token does not depend on others"


def test_a_model_with_activations_of_eight_bits_is_near_and_shares_the_parameters() -> None:
    model = loaded(SPEC, initial_parameters(SPEC))
    quantised = model.with_int8_activations()
    model.load_parameters(initial_parameters(replace(SPEC, seed=1)))
    with torch.no_grad():
        exact, near = model.features(X_BT), quantised.features(X_BT)
        assert torch.equal(model.features(X_BT), exact), "the model itself is as before"
    assert 0 < (near - exact).norm() < 0.05 * exact.norm()
    assert quantised.parameters is model.parameters


@pytest.mark.parametrize("beams", [0, 2])
def test_text_is_generated_with_activations_of_eight_bits_on_request(text: Path, beams: int) -> None:
    engine, start = engine_of(text), initial_parameters(SPEC)
    how = SamplingOptions(max_tokens=12, temperature=0.0, beams=beams)
    asked = replace(how, activations=Activations.INT8)
    plain, quantised = (b"".join(engine.generate_text(start, b"The ", each)) for each in (how, asked))
    assert len(quantised) == len(plain) == 12
    model = loaded(SPEC, start).with_int8_activations()
    if not beams:
        tokens = list(b"The ")
        for _ in range(12):
            with torch.no_grad():
                tokens.append(int(F.linear(model.features(torch.tensor([tokens])), model.output_VC)[0, -1].argmax()))
        assert bytes(tokens[4:]) == quantised
    with pytest.raises(UserError, match="quantise int8 needs ternary matrices, and this model has linear 'dense'"):
        engine_of(text, DENSE).generate_text(start, b"The ", asked)


def test_a_file_gives_a_model_with_the_same_logits(tmp_path: Path) -> None:
    folder = written(tmp_path / "out")
    own, stream = open_huggingface_model(folder), io.BytesIO()
    spec = JobSpec(name="own", data=bytes(32), model=own.model)
    own.write_parameters(spec, stream)
    with torch.no_grad():
        read = loaded(spec, np.frombuffer(stream.getvalue(), "<f4")).features(X_BT[:, :16])
        assert torch.equal(read, loaded(spec, initial_parameters(spec)).features(X_BT[:, :16]))


# Local steps: levels must not jump between them -------------------------------------------------------------------------


def test_a_weight_moves_along_a_ramp_from_its_value_at_the_start_of_a_round() -> None:
    latent = torch.tensor([[1.0, 0.45, -0.55, 0.0, -2.0, 1.0, 1.0, 1.0]])
    scale = float(ternary_scale(latent))
    assert 0.8 < scale < 0.9
    start = ternary_weights(latent, (1,))
    moving = MovingWeights(latent, (1,))
    assert torch.equal(moving(latent), start), "the first step computes with the ternary weights"
    far = latent.clone()
    far[0, :4] = torch.tensor([0.0, 0.5 * scale, -9.0, 0.7])
    for share in torch.linspace(0, 1, 101):
        now = moving(latent + share * (far - latent))
        after = moving(latent + (share + 1e-4) * (far - latent))
        assert (after - now).norm() <= 2.001e-4 * (far - latent).norm(), "no jump: the ramp has slope 2"
    end = moving(far)
    assert end[0, 0] == pytest.approx(0.0, abs=1e-6) and (end - start)[0, 3] == pytest.approx(scale)
    assert torch.equal(end[0, 4:], start[0, 4:])


def beside_edges(parameters: Float32Array) -> Float32Array:
    """Return parameters of which some ternary matrices have many latent weights within rounding errors of an edge."""
    found = parameters.copy()
    for name, view in layout_of(SPEC).tensor_views(found).items():
        if model_tensors(MODEL)[name].parameter.is_ternary:
            for _ in range(30):  # The scale depends on the changed weights, too.
                view[:, ::8] = np.copysign(ternary.ternary_scale(view) / 2, view[:, ::8])
    return found


@pytest.mark.parametrize("inner", ["muon", "adamw"])
def test_a_latent_weight_beside_an_edge_does_not_split_honest_replays(text: Path, inner: str) -> None:
    """After the first step, weights differ between machines by rounding errors: here by a bit or two from the beginning."""
    spec = replace(SPEC, local_steps=4, inner=InnerOptimizerKind(inner), inner_rate=0.01)
    engine, start, deltas = engine_of(text, spec), beside_edges(initial_parameters(spec)), []
    of_model, signs = engine.model.local_steps, np.random.default_rng(0).choice([-1, 1], len(start))
    for size in (0.0, 2**-22):
        moved = (start * (1 + size * signs)).astype(np.float32)

        @contextmanager
        def errors(moved: Float32Array = moved) -> Iterator[None]:
            with of_model():
                engine.model.load_parameters(moved)
                yield

        engine.local_steps_context = errors  # type: ignore[method-assign]
        deltas.append(engine.local_steps(start, JOB, 3, TRAINER)[0])
    assert 0 < np.linalg.norm(deltas[1] - deltas[0]) < 1e-4 * np.linalg.norm(deltas[0])


def test_passes_without_gradients_and_other_rounds_compute_with_ternary_weights(text: Path) -> None:
    model = loaded(SPEC, initial_parameters(SPEC))
    other = initial_parameters(replace(SPEC, seed=1))
    with torch.no_grad():
        expected = loaded(SPEC, other).features(X_BT)
    with model.local_steps():
        model.load_parameters(other)
        with torch.no_grad():
            assert torch.equal(model.features(X_BT), expected)
        assert not torch.equal(model.features(X_BT), expected), "a later step of the round"
    assert torch.equal(model.features(X_BT), expected)


def test_the_estimate_of_memory_counts_the_weights_that_move() -> None:
    spec = replace(SPEC, model=ModelSpec(context=8, width=128, layers=2, hidden=512, linear="ternary"))
    model, kept, most = loaded(spec, initial_parameters(spec)), dict[int, int](), EngineResources(memory_mb_max=20)
    kept[model.parameters.untyped_storage().data_ptr()] = 0

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept.setdefault(storage.data_ptr(), storage.nbytes())
        return tensor

    sequences = sequences_that_fit(spec, most)
    with model.local_steps(), saved_tensors_hooks(keep, lambda tensor: tensor):
        for layer in model._moving:
            for moving in layer.values():
                for tensor in vars(moving).values():
                    keep(tensor)
        tokens_BT = torch.zeros(sequences or 0, spec.model.context, dtype=torch.int64)
        loss = model.loss(tokens_BT, tokens_BT)
        assert loss.requires_grad
    assert KEPT * FLOAT_BYTES * layout_of(spec).size + sum(kept.values()) <= most.memory_mb_max * MB


def test_processes_that_share_a_model_refuse_local_steps_of_it(text: Path) -> None:
    resources = EngineResources(parallel=ParallelMode.DDP)
    with pytest.raises(UserError, match="parallel 'ddp' does not support local steps of ternary matrices: start this peer with"):
        tokens = open_tokens(SPEC, text, ByteTokenizer())
        ParallelEngine(SPEC, tokens, ByteTokenizer(), None, cast(Any, None), resources)
