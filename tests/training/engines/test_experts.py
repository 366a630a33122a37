"""Sparse experts: the layer is the network that its page describes, honest replays agree, and experts stay busy."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.training.engines.test_engine import JOB, SPEC, TRAINER, delta_of, difference, engine_of, engine_with, kept_bytes
from tests.training.engines.test_model import model_of, tokens
from tests.training.engines.test_sampling import whole_logits
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import load_tokenizer
from training.engines.pytorch import layers
from training.engines.pytorch.engine import TorchEngine, sequence_bytes
from training.engines.pytorch.implementations import held_out_bits, next_token_loss
from training.engines.pytorch.inner_optimizers import ADAMW_RMS, Muon, orthogonalize
from training.engines.pytorch.layers import ForwardPass, TorchExperts, balance_loss
from training.engines.pytorch.model import GPT
from training.engines.pytorch.sampling import DecodingState
from training.job_spec import PRESETS, InnerOptimizerKind, JobSpec, complete_fields
from training.replay.inner_state import InnerState, hidden_matrices, update_directions
from training.replicated.tensor_layout import Float32Array, initial_parameters, layout_of
from training.transformer import ModelSpec, complete_model_fields

MODEL = replace(SPEC.model, feed_forward="experts", experts=5, experts_per_token=2)
EXPERTS = replace(SPEC, model=MODEL)


def with_experts(count: int, of_token: int) -> JobSpec:
    return replace(EXPERTS, model=replace(MODEL, experts=count, experts_per_token=of_token))


def block_of(model: GPT) -> TorchExperts:
    block = model.blocks[-1]
    assert isinstance(block, TorchExperts)
    return block


def output(model: GPT, x_BTC: torch.Tensor) -> torch.Tensor:
    """Return the output of the first layer's experts, without the residual stream."""
    with torch.no_grad():
        return block_of(model).forward(x_BTC, model.layers[0], ForwardPass()) - x_BTC


def stream(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def reference_output(model: GPT, x_C: torch.Tensor) -> torch.Tensor:
    """Compute the experts' output for one token in float64, one expert at a time."""
    spec, weights = model.spec, {name: tensor.detach().double() for name, tensor in model.layers[0].items()}
    x_C = x_C.double()
    y_C = x_C / torch.sqrt(x_C.square().mean() + spec.norm_epsilon) * weights["mlp_norm"]
    p_E = torch.softmax(weights["router"] @ y_C, dim=0)
    ranked = sorted(range(spec.experts), key=lambda expert: -float(p_E[expert]))
    threshold = 0.0 if spec.experts_per_token == spec.experts else p_E[ranked[spec.experts_per_token]]
    found = torch.zeros_like(x_C)
    for expert in ranked[: spec.experts_per_token]:
        gate, up, down = (weights[name][expert] for name in ("gate", "up", "down"))
        margin = float((p_E[expert] - threshold) / p_E[expert])
        found += p_E[expert] * 1.1 * margin**2 / (margin**2 + 0.1) * (down @ (F.silu(gate @ y_C) * (up @ y_C)))
    return found


# The layer -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "of_token"), [(5, 1), (5, 2), (5, 4), (5, 5), (2, 2), (64, 8)])
def test_the_layer_is_the_described_mixture_and_a_dense_one_with_all_experts(count: int, of_token: int) -> None:
    model, x_BTC = model_of(with_experts(count, of_token)), stream(2, 7, MODEL.width)
    expected = torch.stack([torch.stack([reference_output(model, x_C) for x_C in x_TC]) for x_TC in x_BTC])
    found = output(model, x_BTC).double()
    assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_no_token_is_dropped_when_all_choose_the_same_expert() -> None:
    model, x_BTC = model_of(EXPERTS), stream(1, 40, MODEL.width).abs() + 0.5
    with torch.no_grad():
        model.layers[0]["mlp_norm"].fill_(1)
        model.layers[0]["router"].zero_()
        model.layers[0]["router"][3] = 1.0
    found = output(model, x_BTC)[0]
    for place, x_C in enumerate(x_BTC[0]):
        expected = reference_output(model, x_C)
        assert (found[place] - expected).norm() <= 1e-5 * expected.norm() and expected.norm() > 0


@pytest.mark.parametrize(("is_textbook", "least", "most"), [(False, 0.0, 1e-3), (True, 0.1, math.inf)])
def test_a_step_across_a_tie_of_the_router_moves_the_output_by_nearly_nothing(
    is_textbook: bool, least: float, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The textbook's weights, shares of the chosen experts' sum, are the control."""

    def textbook(p_BTE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        best = p_BTE.topk(2)
        return best.indices, 1 / best.values.sum(dim=-1, keepdim=True).expand_as(best.values)

    model, x_BTC = model_of(EXPERTS), stream(1, 1, MODEL.width)
    if is_textbook:
        monkeypatch.setattr(block_of(model), "choose_experts", textbook)
    y_C = block_of(model).normalise(x_BTC, model.layers[0]["mlp_norm"]).detach()[0, 0]
    found = list[torch.Tensor]()
    for moved in (-1e-6, 1e-6):
        logits_E = torch.tensor([0.5, 0.3 + moved, 0.3, -1.0, -1.0])  # the second and the third expert tie for the second place
        with torch.no_grad():
            model.layers[0]["router"].copy_(logits_E[:, None] * y_C / y_C.square().sum())
        found.append(output(model, x_BTC))
    moved = float((found[0] - found[1]).norm() / found[1].norm())
    assert least <= moved <= most, moved


@pytest.mark.parametrize("logits", [(0.5, 0.3, 0.3, -1.0, -1.0), (0.5, 0.4, 0.1, 0.1, -1.0)])
def test_no_gradient_jumps_at_a_tie_for_the_last_place_or_the_next_one(logits: tuple[float, ...]) -> None:
    model, x_BTC = model_of(EXPERTS), stream(1, 1, MODEL.width)
    y_C = block_of(model).normalise(x_BTC, model.layers[0]["mlp_norm"]).detach()[0, 0]
    found = list[torch.Tensor]()
    for moved in (-1e-6, 1e-6):
        logits_E = torch.tensor(logits) + moved * torch.tensor([0.0, 0.0, 1.0, 0.0, 0.0])
        weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.layers[0].items()}
        with torch.no_grad():
            weights["router"].copy_(logits_E[:, None] * y_C / y_C.square().sum())
        at = ForwardPass(penalties=[])
        loss = block_of(model).forward(x_BTC, weights, at).square().sum() + sum(at.penalties or [])
        used = [weights[name] for name in TorchExperts.leaves]
        found.append(torch.cat([gradient.flatten() for gradient in torch.autograd.grad(loss, used)]))
    assert (found[0] - found[1]).norm() <= 1e-4 * found[1].norm()


# Training ------------------------------------------------------------------------------------------------------------


def test_experts_of_honest_replays_agree_with_other_micro_batches_and_recompute(text: Path) -> None:
    update = delta_of(engine_of(text, EXPERTS))
    assert difference(delta_of(engine_of(text, replace(EXPERTS, micro_batch=1))), update) < 1e-4
    assert np.array_equal(delta_of(engine_with(text, EXPERTS, recompute=True)), update)


def test_the_gradient_with_the_balance_loss_does_not_depend_on_the_micro_batch(text: Path) -> None:
    gradients = list[torch.Tensor]()
    for micro_batch in (4, 1):
        engine = engine_of(text, replace(EXPERTS, micro_batch=micro_batch))
        engine.load_parameters(initial_parameters(EXPERTS))
        engine.accumulate_gradient(engine.draw_batch(JOB, 0, TRAINER, 0, 4))
        gradients.append(engine.model.layers[0]["router"].grad.clone())  # type: ignore[union-attr]
    assert (gradients[0] - gradients[1]).norm() < 1e-5 * gradients[0].norm()


def test_the_balance_loss_is_the_formula_and_part_of_the_training_loss_alone(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    p_BTE = torch.tensor([[[0.7, 0.2, 0.1], [0.6, 0.1, 0.3]]])
    chosen_BTK, degree_BTK = torch.tensor([[[0, 1], [0, 2]]]), torch.tensor([[[1.0, 0.5], [0.8, 0.4]]])
    expected = 0.01 * 3 * (1.8 / 2 * 0.65 + 0.5 / 2 * 0.15 + 0.4 / 2 * 0.2)  # two tokens, each with two of three experts
    assert float(balance_loss(p_BTE, chosen_BTK, degree_BTK)) == pytest.approx(expected)
    model, x_BT = model_of(EXPERTS), tokens(3, 9)
    x_BT, y_BT = x_BT[:, :-1], x_BT[:, 1:]
    penalty = (next_token_loss(model, x_BT, y_BT) - model.loss(x_BT, y_BT)).item()
    assert 0.03 < penalty < 0.08, "two layers, each with 0.02 if all experts are equally busy"
    with torch.no_grad():
        model.features(x_BT)
    assert model.penalties == []
    known = load_tokenizer(None, 256)
    held_out = TokenizedText(known.encode(b""), known.encode(text.read_bytes()[:500]), known.token_bytes)
    with torch.no_grad():
        before = held_out_bits(model, EXPERTS, held_out, lambda: None)
        monkeypatch.setattr(layers, "BALANCE_WEIGHT", 1.0)
        assert held_out_bits(model, EXPERTS, held_out, lambda: None) == before


def busiest(engine: TorchEngine, parameters: Float32Array) -> float:
    """Return the share of the busiest expert of any layer in held-out tokens, in units of the mean over experts."""
    found, model, counted = list[torch.Tensor](), engine.model_with(parameters), layers._count_tokens

    def record(chosen_BTK: torch.Tensor, experts: int) -> torch.Tensor:
        found.append(counted(chosen_BTK, experts))
        return found[-1]

    held_out, context = engine.tokens.held_out, engine.spec.model.context
    x_BT = torch.from_numpy(held_out[: len(held_out) // context * context].astype(np.int64)).view(-1, context)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(layers, "_count_tokens", record)
        model.features(x_BT)
    return max(float(tokens_E.max() / tokens_E.mean()) for tokens_E in (tokens_BE.sum(dim=0).float() for tokens_BE in found))


@pytest.mark.parametrize(("weight", "is_balanced"), [(0.01, True), (0.0, False)])
def test_with_the_balance_loss_no_expert_has_more_than_twice_the_mean_after_thirty_rounds(
    text: Path, weight: float, is_balanced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "BALANCE_WEIGHT", weight)
    model = ModelSpec(**complete_model_fields({"experts": 8}))
    fields = complete_fields(PRESETS["local"]) | {"local_steps": 3, "rounds": 30}
    spec = JobSpec(name="t", data=bytes(32), model=model, **fields)
    engine, parameters = engine_of(text, spec), initial_parameters(spec)
    for round in range(30):
        parameters = parameters - engine.local_steps(parameters, JOB, round, TRAINER)[0]
    assert (busiest(engine, parameters) <= 2) is is_balanced


def test_muon_makes_the_matrix_of_each_expert_orthogonal() -> None:
    spec = replace(EXPERTS, inner=InnerOptimizerKind.MUON, weight_decay=0.0)
    layout, name = layout_of(spec), "layers.1.experts.down.weight"
    assert {name, "layers.1.router.weight"} <= {tensor.name for tensor in hidden_matrices(layout)}
    parameters, gradients = torch.zeros(layout.size), stream(layout.size)
    optimizer = Muon(parameters, gradients, spec)
    optimizer.step(rate=1.0)
    momentum = optimizer.moments[: layout.size]
    directions = torch.from_numpy(update_directions(InnerState(1, optimizer.moments.numpy()), spec))
    vectors = (parameters, gradients.lerp(momentum, spec.beta1), momentum, directions)
    for moved, nesterov, of_state, direction in zip(*(layout.tensor_views(each.numpy())[name] for each in vectors), strict=True):
        step = -ADAMW_RMS * max(moved.shape) ** 0.5 * orthogonalize(torch.from_numpy(nesterov)).numpy()
        assert difference(moved, step) < 1e-4
        assert difference(direction, orthogonalize(torch.from_numpy(of_state)).numpy()) < 1e-4


@pytest.mark.parametrize("spec", [EXPERTS, with_experts(8, 8)])
def test_the_estimate_of_memory_counts_the_experts_of_a_token(spec: JobSpec) -> None:
    assert kept_bytes(spec.model, False) < sequence_bytes(spec.model, False) < 1.5 * kept_bytes(spec.model, False)


# Generation ----------------------------------------------------------------------------------------------------------


def test_experts_give_a_generated_token_the_logits_that_it_has_inside_a_text() -> None:
    model, sequence = model_of(EXPERTS), tokens(1, 25)[0].tolist()
    whole, course = whole_logits(model, sequence), DecodingState(model, sequence[:5])
    for place in range(5, len(sequence)):
        torch.testing.assert_close(course.logits()[0], whole[place - 1], atol=1e-5, rtol=0)
        course.append([0], [sequence[place]])


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="other libraries may add in other orders")
def test_logits_of_experts_do_not_depend_on_how_the_tokens_before_were_read() -> None:
    """Planted bug: without extra rows of an expert, some places differ."""
    model, sequence = model_of(EXPERTS), tokens(1, 30)[0].tolist()
    course = DecodingState(model, sequence[:1])
    for place in range(1, len(sequence)):
        assert torch.equal(course.logits(), DecodingState(model, sequence[:place]).logits()), place
        course.append([0], [sequence[place]])
