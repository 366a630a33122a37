"""Many responses at once are what each would be alone."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from torch.nn import functional as F

from peer import features
from rlhf.objectives import rollouts
from rlhf.objectives.ppo import VALUE_HEAD, RolloutLimits
from rlhf.objectives.rollouts import RolloutId
from rlhf.pytorch import rollout_passes
from rlhf.pytorch.ppo import EPSILON
from tests.rlhf.test_ppo import SPEC
from training.engines.pytorch.model import GPT

FEW = replace(SPEC, model=replace(SPEC.model, vocabulary=8, layers=2))  # so that many responses end early
BOUNDS = RolloutLimits(responses=rollout_passes.SAMPLED_AT_ONCE + 6, tokens_max=9, vocabulary=8, stop=0)


def test_responses_of_many_lengths_are_what_each_would_be_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    features.register_features()
    monkeypatch.setattr(rollout_passes, "NUMBERS_AT_ONCE", 600)  # a few of them at a time, and of some the noise in parts
    model, random = GPT(FEW), torch.Generator().manual_seed(0)
    with torch.no_grad():
        model.parameters.normal_(0, 0.3, generator=random)
    noise = partial(rollouts.gumbel_noise, RolloutId(bytes(32), 0, bytes(32)), vocabulary=BOUNDS.vocabulary)
    prompts = [torch.randint(0, 8, (2 + row % 3,), generator=random).numpy() for row in range(BOUNDS.responses)]
    responses = rollout_passes.sample_responses(model, prompts, noise, BOUNDS, lambda: None)
    lengths, begins = [len(response) for response in responses], [len(prompt) for prompt in prompts]
    assert set(lengths) == set(range(1, BOUNDS.tokens_max + 1)), "all there are"
    rows = [torch.tensor([*prompt, *response]) for prompt, response in zip(prompts, responses, strict=True)]
    padded_BT = torch.stack([F.pad(torch.tensor(response), (0, 9 - len(response))) for response in responses])
    x_BS = torch.stack([F.pad(row, (0, 13 - len(row))) for row in rows])[:, :-1]
    passed = rollout_passes.forward_pass(model, x_BS, padded_BT, lengths, VALUE_HEAD, lambda: None, noise, torch.tensor(begins))
    assert passed.excess_BT is not None
    for row, response in enumerate(responses):
        length = lengths[row]
        with torch.no_grad():
            features_TC = model.features(rows[row][None, :-1])[0, -length:]
        logits_TV = model.logits(features_TC)
        sums_TV = logits_TV + torch.from_numpy(noise((row, t) for t in range(length)))
        excess_T = sums_TV.amax(1) - sums_TV[range(length), response]
        assert excess_T.max() <= EPSILON, "each token is the one that its noise chooses"
        assert torch.allclose(passed.excess_BT[row, :length], excess_T, atol=1e-4)
        assert torch.allclose(passed.logp_BT[row, :length], logits_TV.log_softmax(1)[range(length), response], atol=1e-5)
        assert torch.allclose(passed.value_BT[row, :length], features_TC @ model.heads[VALUE_HEAD], atol=1e-5)
