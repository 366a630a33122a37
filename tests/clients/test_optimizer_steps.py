"""The steps of a run are those of torch's own optimizer, with the client's terms."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from clients.pytorch.engine import clip_gradient
from clients.records import OptimizerStep, StepBrief, StepDeclaration
from protocol import codec
from protocol.messages import Proposal
from tests.clients.runs import client_spec
from training.replicated.codec import read_payload
from training.replicated.replicated_model import AcceptedProposal, ReplicatedModel
from training.replicated.tensor_layout import Float32Array

JOB, TRAINER = b"j" * 32, b"t" * 32
DECLARATION = codec.encode(StepDeclaration(1, 0))
STEPS, CLIP = 50, 30.0
DIFFERENCE_MAX = 1e-6
RATES = (3e-3, 1e-2, 1e-4, 0.0, 2e-3)  # in turn


def gradients(model: ReplicatedModel, number: int) -> Float32Array:
    """Return gradients whose size differs from tensor to tensor. In some steps all are small, and their norm is below `CLIP`."""
    draw = np.random.default_rng(number)
    made = draw.normal(size=model.layout.size)
    for slot in model.layout.slots_by_name.values():
        made[slot.elements] *= 10.0 ** draw.uniform(-6, 1)
    return (made * (1e-6 if number % 3 == 2 else 1.0)).astype(np.float32)


def difference(found: Float32Array, wanted: torch.Tensor) -> float:
    """Return the largest difference, divided by the largest absolute value of `wanted`."""
    exact = wanted.detach().double().numpy()
    return float(np.abs(found - exact).max() / np.abs(exact).max())


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_fifty_steps_are_those_of_torch_s_adamw(weight_decay: float) -> None:
    """Both get the same float32 gradients, which a payload carries. Differences are relative to the largest parameter."""
    model = ReplicatedModel.initial(JOB, client_spec())
    own, were_clipped = torch.tensor(np.array(model.parameters), requires_grad=True), set[bool]()
    optimizer = torch.optim.AdamW([own], lr=0.0)
    for number in range(STEPS):
        step = OptimizerStep(RATES[number % len(RATES)], 0.8, 0.99, 1e-12, weight_decay, CLIP)
        gradient = gradients(model, number)
        own.grad = torch.tensor(gradient)
        were_clipped.add(bool(torch.nn.utils.clip_grad_norm_([own], CLIP) > CLIP))
        clipped = clip_gradient(gradient, step.clip)
        assert difference(clipped, own.grad) <= DIFFERENCE_MAX

        payload = model.encode_payload(TRAINER, clipped)
        own.grad = torch.tensor(read_payload(payload, model.layout).dequantize())
        optimizer.param_groups[0].update(
            lr=step.rate, betas=(step.beta1, step.beta2), eps=step.epsilon, weight_decay=step.weight_decay
        )
        optimizer.step()
        brief = codec.encode(StepBrief(number, bytes(32), 1, step))
        digest = hashlib.sha256(payload).digest()
        proposal = Proposal(JOB, number, model.root, digest, len(payload), None, None, declaration=DECLARATION)
        model = model.apply_round([AcceptedProposal(TRAINER, proposal, payload)], {}, brief=brief)
        assert difference(model.parameters, own) <= DIFFERENCE_MAX
    assert were_clipped == {True, False}
    assert difference(model.parameters, torch.tensor(ReplicatedModel.initial(JOB, client_spec()).parameters)) > 0.01
