from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from training.engines.pytorch.inner_optimizers import (
    ADAMW_RMS,
    AdamW,
    Muon,
    adamw_step,
    decay_ranges,
    fused_adamw_step,
    orthogonalize,
    vector_norm,
)
from training.job_spec import InnerOptimizerKind, JobSpec
from training.replay.inner_state import adamw_tensors, hidden_matrices, inner_size, moment_slots
from training.replicated.tensor_layout import layout_of
from training.transformer import ModelSpec

SPEC = JobSpec(
    name="t", data=bytes(32), model=ModelSpec(width=32, layers=1, heads=4, kv_heads=2, hidden=48), inner=InnerOptimizerKind.MUON
)
LAYOUT = layout_of(SPEC)
SETTINGS = replace(SPEC, beta1=0.9, beta2=0.99, weight_decay=0.1, gradient_clip=1e9)


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 16), (16, 40), (40, 16), (1, 8)])
def test_five_steps_bring_every_singular_value_near_one_and_turn_nothing(shape: tuple[int, int]) -> None:
    matrix = noise(*shape)
    u, _, vh = torch.linalg.svd(matrix, full_matrices=False)
    turned_back = u.T @ orthogonalize(matrix) @ vh.T
    torch.testing.assert_close(turned_back, torch.diag(turned_back.diagonal()), rtol=0, atol=1e-3)
    assert (turned_back.diagonal() > 0.6).all() and (turned_back.diagonal() < 1.3).all()


def test_a_gradient_of_nothing_moves_nothing() -> None:
    assert orthogonalize(torch.zeros(4, 6)).count_nonzero() == 0


def test_matrices_between_embedding_and_loss_are_its_own_and_adamw_has_the_rest() -> None:
    names = [tensor.name for tensor in hidden_matrices(LAYOUT)]
    assert names == [f"layers.0.{part}.weight" for part in ("query", "key", "value", "output", "gate", "up", "down")]
    assert {tensor.name for tensor in adamw_tensors(LAYOUT)} | set(names) == {tensor.name for tensor in LAYOUT.tensors}
    rest = sum(tensor.size for tensor in adamw_tensors(LAYOUT))
    assert moment_slots(SPEC) == {"momentum": slice(0, LAYOUT.size), "second": slice(LAYOUT.size, LAYOUT.size + rest)}
    assert inner_size(SPEC) == LAYOUT.size + rest


def test_an_output_layer_of_its_own_is_left_to_adamw() -> None:
    untied = layout_of(replace(SPEC, model=replace(SPEC.model, tied=False)))
    assert hidden_matrices(untied) == hidden_matrices(LAYOUT)
    assert [tensor.name for tensor in adamw_tensors(untied)][-1] == "lm_head.weight"


def test_it_walks_as_written_down_for_each_tensor_alone() -> None:
    """The reference: momentum, Nesterov, orthogonalization, scale and decay of each matrix, and AdamW for other tensors."""
    parameters = noise(LAYOUT.size) * 0.1
    expected, gradients = parameters.clone(), torch.zeros(LAYOUT.size)
    optimizer = Muon(parameters, gradients, SETTINGS)
    momentum = torch.zeros(LAYOUT.size)
    walkers = {}
    for tensor in adamw_tensors(LAYOUT):
        part = tensor.elements
        decayed = torch.full((tensor.size,), float(len(tensor.shape) > 1))
        walkers[tensor.name] = (AdamW(expected[part], slot := torch.zeros(tensor.size), decayed, SETTINGS), slot)
    for step in range(3):
        gradients.copy_(noise(LAYOUT.size, seed=step + 1))
        for tensor in LAYOUT.tensors:
            part, gradient = tensor.elements, gradients[tensor.elements].clone()
            if tensor.name in walkers:
                walker, slot = walkers[tensor.name]
                slot.copy_(gradient)
                walker.step(0.01)
                continue
            momentum[part] = 0.9 * momentum[part] + 0.1 * gradient
            direction = orthogonalize((0.1 * gradient + 0.9 * momentum[part]).view(tensor.shape))
            scale = ADAMW_RMS * max(tensor.shape) ** 0.5
            expected[part] = expected[part] * (1 - 0.01 * 0.1) - 0.01 * scale * direction.flatten()
        optimizer.step(0.01)
    torch.testing.assert_close(parameters, expected, rtol=1e-4, atol=1e-5)


def test_a_matrix_step_is_as_large_as_adamw_makes_it() -> None:
    parameters, gradients = torch.zeros(LAYOUT.size), noise(LAYOUT.size)
    Muon(parameters, gradients, replace(SPEC, beta1=0.9, beta2=0.99, weight_decay=0, gradient_clip=1e9)).step(1.0)
    for tensor in hidden_matrices(LAYOUT):
        rms = float(parameters[tensor.elements].square().mean().sqrt())
        assert rms == pytest.approx(ADAMW_RMS, rel=0.35), tensor.name


def test_gradients_are_clipped_before_anything_else() -> None:
    parameters, gradients = torch.zeros(LAYOUT.size), noise(LAYOUT.size)
    norm = float(gradients.norm())
    optimizer = Muon(parameters, gradients, replace(SPEC, beta1=0.0, beta2=0.99, weight_decay=0, gradient_clip=1.0))
    assert optimizer.step(0.1) == pytest.approx(norm)
    assert float(optimizer.moments[: LAYOUT.size].norm()) == pytest.approx(1.0, rel=1e-5), "without momentum: the gradient itself"


@pytest.mark.parametrize("size", [1, 100, 1 << 16, (1 << 22) + 5])
def test_the_norm_of_a_long_gradient_is_exact_to_rounding(size: int) -> None:
    """All engines clip by this norm, so an error in it is an error of the whole update."""
    vector = noise(size)
    assert vector_norm(vector) == pytest.approx(float(vector.double().norm()), rel=1e-6)


# AdamW ----------------------------------------------------------------------------------------------------------------


def settings(weight_decay: float, gradient_clip: float) -> JobSpec:
    return JobSpec(name="t", beta1=0.9, beta2=0.99, weight_decay=weight_decay, gradient_clip=gradient_clip)


def trajectory(optimizer: AdamW, parameters: torch.Tensor, gradients: torch.Tensor, steps: int, rate: float) -> None:
    target = torch.linspace(-2, 2, len(parameters))
    for _ in range(steps):
        gradients.copy_(parameters - target)
        optimizer.step(rate)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("clip", [0.3, 1e9])
def test_it_walks_as_the_reference_optimizer(weight_decay: float, clip: float) -> None:
    ours, gradients = torch.linspace(1, 3, 50), torch.zeros(50)
    trajectory(AdamW(ours, gradients, torch.ones(50), settings(weight_decay, clip)), ours, gradients, 30, 1e-2)

    theirs = torch.linspace(1, 3, 50).requires_grad_()
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.99), weight_decay=weight_decay, eps=1e-8)
    for _ in range(30):
        theirs.grad = theirs.detach() - torch.linspace(-2, 2, 50)
        torch.nn.utils.clip_grad_norm_([theirs], clip)
        reference.step()
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-6)


def test_decay_pulls_only_where_it_applies() -> None:
    parameters, gradients = torch.ones(2), torch.zeros(2)
    AdamW(parameters, gradients, torch.tensor([1.0, 0.0]), settings(0.5, 1.0)).step(0.1)
    torch.testing.assert_close(parameters, torch.tensor([0.95, 1.0]))


def test_the_norm_it_returns_is_the_one_before_clipping() -> None:
    gradients = torch.tensor([3.0, 4.0])
    assert AdamW(torch.zeros(2), gradients, torch.ones(2), settings(0, 1.0)).step(0.1) == 5.0
    torch.testing.assert_close(gradients, torch.tensor([0.6, 0.8]))


@pytest.mark.parametrize("decayed", [[1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 1], [1] * 6, [0] * 6])
def test_what_an_accelerator_does_at_once_is_the_same_step(decayed: list[int]) -> None:
    spec, ours, theirs = settings(0.5, 1.0), torch.linspace(1, 3, 6), torch.linspace(1, 3, 6)
    moments = torch.zeros(2, 2, 6)
    mask = torch.tensor(decayed, dtype=torch.float32)
    for steps in range(1, 20):
        gradients = torch.sin(ours * steps)
        adamw_step(ours, gradients, *moments[0], mask, spec, 0.05, steps)
        fused_adamw_step(theirs, gradients.clone(), *moments[1], decay_ranges(mask), spec, 0.05, steps)
    torch.testing.assert_close(theirs, ours, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(moments[1], moments[0], rtol=1e-5, atol=1e-6)
