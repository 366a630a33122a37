"""Samples from adapters, and scores by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from clients.pytorch.engine import ClientEngine
from protocol.sampling import SamplingOptions
from tests.clients.runs import BASE, MODEL, base_model, body, client_spec
from tests.clients.test_adapted_model import CHOICES, random_adapters
from training.data.tokenizer import load_tokenizer
from training.engine_resources import EngineResources
from training.engines.engine import Engine
from training.engines.pytorch.device import CPU
from training.engines.pytorch.engine import TorchEngine
from training.replicated.replicated_model import ReplicatedModel
from training.replicated.tensor_layout import Float32Array
from training.token_generation import SampledToken

HOW = SamplingOptions(max_tokens=15, temperature=1.0, seed=4)
PROMPT = [5, 256, 7, 8]
TOKENIZER = load_tokenizer(None, MODEL.vocabulary)


def client_engine(**settings: object) -> ClientEngine:
    known = base_model()
    engine = ClientEngine(client_spec(**settings), known.data, TOKENIZER, None, CPU, EngineResources())
    engine.required_model = known
    return engine


def sampled(engine: Engine, parameters: Float32Array) -> list[SampledToken]:
    passes = engine.generate_tokens(parameters, PROMPT, 3, HOW, lambda made: made[-1] % 8 == 0)
    return [token for drawn in passes for token in drawn]


@pytest.mark.parametrize("settings", CHOICES)
def test_the_first_adapters_give_the_samples_and_scores_of_the_base_bit_for_bit(settings: dict[str, object]) -> None:
    known, engine = base_model(), client_engine(**settings)
    base: Engine = TorchEngine(BASE, known.data, TOKENIZER)
    first = ReplicatedModel.initial(b"c" * 32, engine.spec).parameters
    assert sampled(engine, first) == sampled(base, known.parameters)
    tokens = [*PROMPT, *range(21)]
    assert np.array_equal(engine.score_tokens(first, tokens), base.score_tokens(known.parameters, tokens))


def test_samples_and_scores_are_those_of_the_adapters() -> None:
    engine = client_engine()
    adapters = 10 * random_adapters(engine.spec)
    found = sampled(engine, adapters)
    assert found != sampled(engine, ReplicatedModel.initial(b"c" * 32, engine.spec).parameters)
    made = [token for token in found if token.sample == 1]
    whole = [*PROMPT, *(token.token for token in made)]
    gpt = engine.model_with(adapters)
    with torch.no_grad():
        logp_TV = torch.log_softmax(gpt.logits(gpt.features(torch.tensor([whole[:-1]])))[0], dim=-1)
    wanted = [float(logp_TV[place, token]) for place, token in enumerate(whole[1:])]
    assert engine.score_tokens(adapters, whole).tolist() == pytest.approx(wanted, abs=1e-5)
    assert [token.logprob for token in made] == pytest.approx(wanted[len(PROMPT) - 1 :], abs=1e-5)


def test_a_pass_of_other_adapters_between_two_tokens_changes_nothing_of_samples() -> None:
    engine = client_engine()
    adapters, other = random_adapters(engine.spec), 10 * random_adapters(engine.spec, 1)
    alone, found = sampled(engine, adapters), list[SampledToken]()
    for drawn in engine.generate_tokens(adapters, PROMPT, 3, HOW, lambda made: made[-1] % 8 == 0):
        found += drawn
        model = engine.adapted_model()
        model.load_adapters(other)
        model.run_pass(body(), backward=True)
    assert found == alone
