from __future__ import annotations

import pytest
import torch

from training.engines.pytorch.inner_optimizers import AdamW, adamw_step, decay_ranges, fused_adamw_step
from training.job_spec import JobSpec


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
    optimizer = AdamW(ours, gradients, torch.ones(50), settings(weight_decay, clip))
    trajectory(optimizer, ours, gradients, 30, 1e-2)

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
