from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from training.engines.pytorch.layers import ROWS, rotary_tables
from training.engines.pytorch.model import GPT, _CrossEntropy
from training.job_spec import JobSpec
from training.replicated.tensor_layout import initial_parameters, layout_of
from training.transformer import ModelSpec

SPEC = JobSpec(name="t", data=bytes(32), model=ModelSpec(context=32, width=32, layers=2, heads=4, kv_heads=2, hidden=48))


OTHER = replace(SPEC, model=replace(SPEC.model, tied=False, rope_base=100.0, norm_epsilon=1e-2))


def model_of(spec: JobSpec = SPEC) -> GPT:
    model = GPT(spec)
    with torch.no_grad():
        model.parameters.copy_(torch.from_numpy(initial_parameters(spec)))
        model.parameters.mul_(1.5)  # larger than at the start, so that attention is far from uniform
    return model


def tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (batch, length), generator=torch.Generator().manual_seed(seed))


def reference_logits(model: GPT, x_T: torch.Tensor) -> torch.Tensor:
    """Compute logits with a slow reference network: one sequence, one head and one position at a time."""
    spec, layout = model.spec, layout_of(model.job)
    weights = {name: torch.from_numpy(view) for name, view in layout.tensor_views(model.parameters.numpy()).items()}
    head = spec.width // spec.heads

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + spec.norm_epsilon) * weights[name]

    def turn(x_D: torch.Tensor, position: int) -> torch.Tensor:
        turned = x_D.clone()
        for d in range(head // 2):
            angle = torch.tensor(position * spec.rope_base ** (-2 * d / head), dtype=torch.float64)
            a, b = x_D[d], x_D[d + head // 2]
            turned[d], turned[d + head // 2] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
        return turned

    x_TC = weights["embedding.weight"][x_T]
    for i in range(spec.layers):
        at = f"layers.{i}."
        y_TC = norm(x_TC, at + "attention_norm.weight")
        out_TC = torch.zeros_like(x_TC)
        for h in range(spec.heads):
            g = h // (spec.heads // spec.kv_heads)
            heads = (("query", h), ("key", g), ("value", g))
            q, k, v = (y_TC @ weights[f"{at}{part}.weight"][n * head : (n + 1) * head].T for part, n in heads)
            for t in range(len(x_T)):
                scores = torch.stack([turn(q[t], t) @ turn(k[s], s) for s in range(t + 1)]) / head**0.5
                out_TC[t, h * head : (h + 1) * head] = torch.softmax(scores, 0) @ v[: t + 1]
        x_TC = x_TC + out_TC @ weights[at + "output.weight"].T
        y_TC = norm(x_TC, at + "mlp_norm.weight")
        gated_TF = F.silu(y_TC @ weights[at + "gate.weight"].T) * (y_TC @ weights[at + "up.weight"].T)
        x_TC = x_TC + gated_TF @ weights[at + "down.weight"].T
    return norm(x_TC, "final_norm.weight") @ weights["embedding.weight" if spec.tied else "lm_head.weight"].T


@pytest.mark.parametrize("spec", [SPEC, OTHER])
def test_the_model_is_the_network_it_says_it_is(spec: JobSpec) -> None:
    model, x_BT = model_of(spec), tokens(2, 7)
    with torch.no_grad():
        logits = model.logits(model.features(x_BT))
        for row in range(2):
            torch.testing.assert_close(logits[row], reference_logits(model, x_BT[row]), rtol=1e-4, atol=1e-4)


def test_a_position_sees_only_its_own_past() -> None:
    model, x_BT = model_of(), tokens(1, 20)
    changed = x_BT.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 256
    with torch.no_grad():
        before, after = model.features(x_BT), model.features(changed)
    assert torch.equal(before[:, :10], after[:, :10])
    assert not torch.allclose(before[:, 10:], after[:, 10:])


@torch.no_grad()
@pytest.mark.parametrize("last", [1, 5, 12])
def test_the_last_positions_alone_are_what_they_are_among_all(last: int) -> None:
    model, x_BT = model_of(), tokens(2, 12)
    assert torch.allclose(model.features(x_BT, last=last), model.features(x_BT)[:, -last:], atol=1e-6)


def test_the_gradient_is_the_slope_of_the_loss() -> None:
    model, x_BT = model_of(), tokens(2, 17)
    model.gradients.zero_()
    model.loss(x_BT[:, :-1], x_BT[:, 1:]).backward()
    direction = torch.randn(len(model.parameters), generator=torch.Generator().manual_seed(1))
    step = 3e-5  # larger steps are not linear, smaller ones are lost in float32
    losses = []
    with torch.no_grad():
        for sign in (1, -2):
            model.parameters.add_(direction, alpha=sign * step)
            losses.append(model.loss(x_BT[:, :-1], x_BT[:, 1:], "sum").item() / x_BT[:, 1:].numel())
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(float(model.gradients @ direction), rel=3e-2)


@pytest.mark.parametrize("lead", [0.0, 5.0, 15.0, 40.0])
def test_the_gradient_of_the_loss_is_exact_however_sure_the_model_is(lead: float) -> None:
    logits_NV = torch.randn(6, 9, generator=torch.Generator().manual_seed(2))
    logits_NV[range(6), range(6)] += lead
    found, exact = logits_NV.clone().requires_grad_(), logits_NV.double().requires_grad_()
    loss = _CrossEntropy.apply(found, torch.arange(6))
    loss.backward()
    F.cross_entropy(exact, torch.arange(6), reduction="sum").backward()
    assert found.grad is not None and exact.grad is not None
    assert loss.item() == pytest.approx(F.cross_entropy(exact, torch.arange(6), reduction="sum").item(), rel=1e-5, abs=1e-5)
    others = ~torch.eye(6, 9, dtype=torch.bool)
    torch.testing.assert_close(found.grad.double()[others], exact.grad[others], rtol=1e-5, atol=0)
    right = -(exact.grad * others).sum(dim=1)  # at a lead of 40, p − 1 is a rounding error even in float64
    torch.testing.assert_close(found.grad.diagonal().double(), right, rtol=1e-5, atol=0)


def test_every_parameter_gets_a_gradient() -> None:
    model, x_BT = model_of(), tokens(8, 33)
    model.loss(x_BT[:, :-1], x_BT[:, 1:]).backward()
    for tensor in layout_of(SPEC).tensors:
        assert model.gradients[tensor.elements].count_nonzero() > tensor.size // 3, tensor.name


def test_rotary_tables_turn_by_the_position() -> None:
    cos_TD, sin_TD = rotary_tables(ModelSpec(context=4, width=6, heads=1, kv_heads=1))
    assert cos_TD.shape == sin_TD.shape == (4 + ROWS - 1, 6)
    torch.testing.assert_close(cos_TD[3, :1], torch.tensor([3.0]).cos())
    torch.testing.assert_close(-sin_TD[:, :3], sin_TD[:, 3:])
