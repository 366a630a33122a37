from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional as F

from protocol.errors import UserError
from protocol.sampling import EndReason, SamplingOptions
from tests.training.engines.test_model import SPEC, model_of, tokens
from training.engines.pytorch import log_probabilities, sampling
from training.engines.pytorch.layers import ROWS, KVCache
from training.engines.pytorch.model import GPT
from training.engines.pytorch.sampling import (
    DecodingState,
    beam_search,
    choose_token,
    sample_sequences,
    sample_tokens,
    token_weights,
)
from training.token_generation import SampledToken

GREEDY = SamplingOptions(max_tokens=20, temperature=0.0)


def made(model: GPT, prompt: list[int], how: SamplingOptions, stop: int | None = None) -> list[int]:
    return list(itertools.chain.from_iterable(sample_tokens(model, prompt, how, () if stop is None else (stop,), lambda: None)))


def found(model: GPT, prompt: list[int], how: SamplingOptions, stop: int | None = None, end: tuple[int, ...] = ()) -> list[int]:
    def ends(tokens: Sequence[int]) -> bool:
        return bool(end) and tuple(tokens[-len(end) :]) == end

    *passes, last = beam_search(model, prompt, how, () if stop is None else (stop,), lambda: None, ends)
    assert not any(passes)
    return last


def lively() -> GPT:
    """Return a model that does not repeat one token for ever, as a fresh model with a tied head does."""
    model = model_of()
    with torch.no_grad():
        model.final_norm_C.copy_(4 * torch.randn(SPEC.model.width, generator=torch.Generator().manual_seed(3)))
    return model


def whole_logits(model: GPT, sequence: list[int]) -> torch.Tensor:
    """Return the logits of the token after each position, computed without a cache."""
    with torch.no_grad():
        return F.linear(model.features(torch.tensor([sequence])), model.embedding_VC)[0]


# The cache ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_what_a_cache_gives_is_what_the_whole_sequence_gives(kv_heads: int) -> None:
    model, sequence = model_of(replace(SPEC, model=replace(SPEC.model, kv_heads=kv_heads))), tokens(1, 25)[0].tolist()
    whole, course = whole_logits(model, sequence), DecodingState(model, sequence[:5])
    for place in range(5, len(sequence)):
        torch.testing.assert_close(course.logits()[0], whole[place - 1], atol=1e-5, rtol=0)
        course.append([0], [sequence[place]])
    assert made(model, sequence[:5], GREEDY) == made(model, sequence[:5], replace(GREEDY, top_k=3, top_p=0.1, seed=5))


@pytest.mark.skipif(not torch.backends.mkl.is_available(), reason="other libraries may add in other orders")
def test_logits_do_not_depend_on_how_the_tokens_before_were_read() -> None:
    """Planted bugs: without extra rows, or with only as many keys as tokens, some places differ."""
    model, sequence = model_of(replace(SPEC, model=replace(SPEC.model, context=160))), tokens(1, 160)[0].tolist()
    course = DecodingState(model, sequence[:1])
    for place in range(1, len(sequence)):
        logits, anew = course.logits(), DecodingState(model, sequence[:place])
        if place % 3 == 1:
            while anew.prefill_step():
                pass
            assert torch.equal(logits, anew.logits()), place
        course.append([0], [sequence[place]])


def test_rows_that_change_places_take_their_keys_and_values_along() -> None:
    model, prompt = model_of(), tokens(1, 5)[0].tolist()
    course = DecodingState(model, prompt)
    for rows, chosen in (([0, 0, 0], [7, 8, 9]), ([2, 0, 0], [1, 2, 3]), ([1, 2, 0], [4, 5, 6])):
        course.logits()
        course.append(rows, chosen)
    assert course.tokens_BT.tolist() == [[*prompt, 7, 2, 4], [*prompt, 7, 3, 5], [*prompt, 9, 1, 6]]
    for logits, row in zip(course.logits(), course.tokens_BT.tolist(), strict=True):
        torch.testing.assert_close(logits, whole_logits(model, row)[-1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_long_prompt_and_a_context_that_slides_are_read_in_passes_of_a_few_tokens(
    kv_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling, "PASS_TOKENS", 4)
    model, passes = model_of(replace(SPEC, model=replace(SPEC.model, kv_heads=kv_heads))), list[int]()
    features, context = model.features, SPEC.model.context

    def counted(x_BT: torch.Tensor, cache: KVCache | None = None, last: int | None = None) -> torch.Tensor:
        passes.append(x_BT.shape[1])
        return features(x_BT, cache, last)

    monkeypatch.setattr(model, "features", counted)
    course = DecodingState(model, tokens(1, context - 1)[0].tolist())
    for seen in (context - 1, context, context // 2):
        while course.prefill_step():
            pass
        logits = course.logits()[0]
        assert max(passes) <= 4 and sum(passes) == -(-(1 if seen == context else seen) // ROWS) * ROWS
        expected = whole_logits(model, course.tokens_BT[0, -seen:].tolist())[-1]
        passes.clear()
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
        course.append([0], [7])
    beats = list[int]()
    pieces = list(sample_tokens(model, tokens(1, 10)[0].tolist(), replace(GREEDY, max_tokens=2), (), lambda: beats.append(1)))
    assert [len(piece) for piece in pieces] == [0, 0, 1, 1] and len(beats) == 4, "others go first between two passes"


# Drawing ------------------------------------------------------------------------------------------------------------------


def reference(logits: npt.NDArray[np.float64], how: SamplingOptions) -> npt.NDArray[np.float64]:
    """Return probabilities by their definitions: tokens in order of likelihood, until there are enough."""
    p = np.exp(logits / how.temperature - (logits / how.temperature).max())
    order = sorted(range(len(p)), key=lambda token: (-p[token], token))[: how.top_k or len(p)]
    total, kept = sum(p[token] for token in order), np.zeros(len(p))
    for token in order:
        if kept.sum() >= how.top_p * total:
            break
        kept[token] = p[token]
    return kept / kept.sum()


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), list(itertools.product((0.1, 1.0, 3.0), (0, 1, 7, 40), (0.01, 0.5, 0.95, 1.0)))
)
def test_the_temperature_comes_first_then_top_k_then_the_nucleus(temperature: float, top_k: int, top_p: float) -> None:
    how = SamplingOptions(temperature=temperature, top_k=top_k, top_p=top_p)
    for seed in range(5):
        logits = np.random.default_rng(seed).normal(scale=2, size=30)
        logits[seed] = logits[seed + 7]  # a tie
        p = token_weights(torch.from_numpy(logits), how)
        np.testing.assert_allclose((p / p.sum()).numpy(), reference(logits, how), atol=1e-9)


def test_a_tie_at_the_edge_goes_to_the_smaller_token() -> None:
    p = token_weights(torch.tensor([0.0, 1.0, 1.0, 1.0]), SamplingOptions(temperature=1.0, top_k=2))
    assert p.nonzero().flatten().tolist() == [1, 2]


def test_tokens_are_drawn_as_often_as_they_are_likely() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 2.0, 3.0, -9.0]), torch.Generator().manual_seed(0)
    how = SamplingOptions(temperature=1.0, top_k=3)
    counts = np.bincount([choose_token(logits, how, generator) for _ in range(4_000)], minlength=5)
    np.testing.assert_allclose(counts / 4_000, reference(logits.numpy().astype(float), how), atol=0.03)
    assert not counts[[0, 4]].any()


def test_a_low_temperature_prefers_the_likeliest_token() -> None:
    logits, generator = torch.tensor([0.0, 1.0, 0.5]), torch.Generator().manual_seed(0)
    for large, temperature in ((1, 0.0), (1, 1e-320), (1e5, 2e-6)):
        assert choose_token(large * logits, SamplingOptions(temperature=temperature), generator) == 1
    often, seldom = (
        [choose_token(logits, SamplingOptions(temperature=temperature), generator) for _ in range(100)].count(1)
        for temperature in (0.05, 10.0)
    )
    assert often > 95 and seldom < 60


def test_text_goes_on_when_the_context_is_full_and_repeats_with_its_seed() -> None:
    model, long_prompt = model_of(), tokens(1, 100)[0].tolist()
    how = SamplingOptions(max_tokens=70, temperature=1.0, top_p=0.9, seed=3)
    first = made(model, long_prompt, how)
    assert len(first) == 70 and set(first) <= set(range(256))
    assert first == made(model, long_prompt, how) != made(model, long_prompt, replace(how, seed=4))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"temperature": -0.5}, "temperature -0.5 is negative"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0.0}, "top_p 0 is not a probability"),
        ({"top_p": 1.5}, "top_p 1.5 is not a probability"),
        ({"beams": 2}, "beams 2 cannot be combined with temperature 0.8: beam search draws no tokens"),
        ({"beams": 2, "temperature": 0.0, "top_k": 5, "top_p": 0.5}, "beams 2 cannot be combined with top_k 5, top_p 0.5: "),
    ],
)
def test_what_is_no_way_to_draw_is_named(fields: dict[str, float], told: str) -> None:
    with pytest.raises(UserError, match=told):
        SamplingOptions(**fields).validated()  # type: ignore[arg-type]


# Samples ------------------------------------------------------------------------------------------------------------------

DRAWS = SamplingOptions(max_tokens=12, temperature=1.0, seed=3)


def never(made: Sequence[int]) -> bool:
    return False


def sampled(
    model: GPT, prompt: list[int], samples: int, how: SamplingOptions, ends: Callable[[Sequence[int]], bool] = never
) -> list[list[SampledToken]]:
    """Return the tokens of each sample."""
    found: list[list[SampledToken]] = [[] for _ in range(samples)]
    for drawn in sample_sequences(model, prompt, samples, how, ends, lambda: None):
        for token in drawn:
            found[token.sample].append(token)
    return found


def ids(found: list[list[SampledToken]]) -> list[list[int]]:
    return [[token.token for token in sample] for sample in found]


def assert_log_probabilities(model: GPT, prompt: list[int], found: list[list[SampledToken]]) -> None:
    """Compare the log-probabilities with those of a plain pass over prompt and sample."""
    for sample in found:
        whole = [*prompt, *(token.token for token in sample)]
        logp_TV = torch.log_softmax(whole_logits(model, whole[:-1]), dim=-1)
        for place, token in enumerate(sample, len(prompt) - 1):
            assert token.logprob == pytest.approx(float(logp_TV[place, token.token]), abs=1e-5)


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("how", [{}, {"temperature": 0.3}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0.0}])
def test_a_log_probability_is_that_of_the_model_whatever_the_draw_was(kv_heads: int, how: dict[str, float]) -> None:
    model, prompt = model_of(replace(SPEC, model=replace(SPEC.model, kv_heads=kv_heads))), tokens(1, 7)[0].tolist()
    options = replace(DRAWS, **how)  # type: ignore[arg-type]
    # One sample ends early, so the others change their places.
    early = sampled(model, prompt, 5, options)[2][4].token
    found = sampled(model, prompt, 5, options, lambda made: len(made) > 4 and made[4] == early)
    assert_log_probabilities(model, prompt, found)
    assert [len(sample) for sample in found].count(5) >= 1


def test_a_seed_gives_the_same_samples_which_differ_from_each_other_and_from_those_of_the_next_seed() -> None:
    model, prompt = model_of(), tokens(1, 7)[0].tolist()
    first = ids(sampled(model, prompt, 6, DRAWS))
    assert first == ids(sampled(model, prompt, 6, DRAWS))
    others = [made for seed in (4, 5) for made in ids(sampled(model, prompt, 6, replace(DRAWS, seed=seed)))]
    assert len({tuple(made) for made in first + others}) == 18


def test_samples_do_not_depend_on_how_many_fit_into_memory_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, prompt = lively(), tokens(1, 7)[0].tolist()
    together = ids(sampled(model, prompt, 5, DRAWS))
    cache = KVCache(SPEC.model, is_steady=True)
    monkeypatch.setattr(sampling, "CACHE_BYTES_MAX", 2 * (cache.keys.nbytes + cache.values.nbytes))
    widths, features = set[int](), model.features

    def watched(x_BT: torch.Tensor, cache: KVCache | None = None, last: int | None = None) -> torch.Tensor:
        widths.add(len(x_BT))
        return features(x_BT, cache, last)

    monkeypatch.setattr(model, "features", watched)
    assert ids(sampled(model, prompt, 5, DRAWS)) == together and widths == {1, 2}


def test_samples_are_drawn_as_the_options_say() -> None:
    model, prompt = model_of(), tokens(1, 7)[0].tolist()
    p_V = torch.softmax(whole_logits(model, prompt)[-1], dim=-1)
    best = p_V.argsort(descending=True, stable=True).tolist()
    nucleus = int((p_V[best].cumsum(0) < 0.3).sum()) + 1
    for options, allowed in (
        ({"top_k": 2}, 2),
        ({"top_p": 0.3}, nucleus),
        ({"temperature": 0.0}, 1),
        ({"temperature": 20.0}, None),
    ):
        how = replace(DRAWS, max_tokens=1, **options)  # type: ignore[arg-type]
        drawn = {made[0] for made in ids(sampled(model, prompt, 64, how))}
        assert drawn <= set(best[:allowed]) and (len(drawn) == allowed if allowed in (1, 2) else len(drawn) > 2), options


def test_a_sample_ends_with_its_stop_and_the_others_go_on() -> None:
    model, prompt = lively(), tokens(1, 7)[0].tolist()
    alone = ids(sampled(model, prompt, 3, DRAWS))
    stop = alone[1][4]
    cut = [made[: made.index(stop) + 1] if stop in made else made for made in alone]
    found = sampled(model, prompt, 3, DRAWS, lambda made: made[-1] == stop)
    assert ids(found) == cut and len(cut[1]) <= 5
    for sample in found:
        *before, last = sample
        assert last.end is (EndReason.STOP if last.token == stop else EndReason.LENGTH)
        assert all(token.end is None for token in before)


@pytest.mark.parametrize(("prompt", "length"), [(1, 12), (25, 8), (31, 2), (32, 1)])
def test_a_sample_ends_when_the_context_is_full(prompt: int, length: int) -> None:
    """The model reads as many tokens as its context has, and predicts one more."""
    model, text = lively(), tokens(1, prompt)[0].tolist()
    found = sampled(model, text, 2, DRAWS)
    assert [len(sample) for sample in found] == [length] * 2 and found[0][-1].end is EndReason.LENGTH
    assert_log_probabilities(model, text, found)


def test_a_long_prompt_is_read_in_passes_between_which_others_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "PASS_TOKENS", 4)
    beats, prompt = list[int](), tokens(1, 10)[0].tolist()
    how = replace(DRAWS, max_tokens=2)
    passes = list(sample_sequences(lively(), prompt, 3, how, never, lambda: beats.append(1)))
    assert [len(drawn) for drawn in passes] == [0, 0, 3, 3] and len(beats) == 4


# Scores -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 9, 33])
def test_a_score_is_the_log_probability_of_each_token_but_the_first(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_probabilities, "LOGITS_TOKENS", 5)
    model, sequence = model_of(), tokens(1, length)[0].tolist()
    beats = list[int]()
    found = log_probabilities.sequence_log_probabilities(model, sequence, lambda: beats.append(1))
    logp_TV = torch.log_softmax(whole_logits(model, sequence[: SPEC.model.context]).double(), dim=-1)
    wanted = [float(logp_TV[place, token]) for place, token in enumerate(sequence[1:])]
    assert found.tolist() == pytest.approx(wanted, abs=1e-5)
    assert len(beats) == -(-(length - 1) // 5)


# Beams --------------------------------------------------------------------------------------------------------------------


def logp(model: GPT, prompt: list[int], response: list[int]) -> float:
    p_TV = torch.log_softmax(whole_logits(model, [*prompt, *response]).double(), dim=-1)
    return float(sum(p_TV[len(prompt) - 1 + t, token] for t, token in enumerate(response)))


@pytest.mark.parametrize("stop", [None, 0])
def test_one_beam_always_takes_the_likeliest_and_ends_where_that_does(stop: int | None) -> None:
    model, prompt = lively(), tokens(1, 5)[0].tolist()
    likeliest = made(model, prompt, GREEDY)
    stop = stop if stop is None else likeliest[7]
    assert found(model, prompt, replace(GREEDY, beams=1), stop) == made(model, prompt, GREEDY, stop)
    assert found(model, prompt, replace(GREEDY, beams=1), None, tuple(likeliest[4:6])) == likeliest[:6]


def test_beams_that_hold_everything_find_the_best_continuation_that_there_is() -> None:
    """The continuation has two tokens: 16 beams hold each first token with which the best one can begin."""
    model, prompt = lively(), tokens(1, 5)[0].tolist()
    first = torch.log_softmax(whole_logits(model, prompt)[-1].double(), dim=-1)
    best = max(
        ((first[a] + p, a, b) for a in first.topk(16).indices.tolist() for b, p in enumerate(_after(model, [*prompt, a]))),
    )
    assert found(model, prompt, SamplingOptions(max_tokens=2, temperature=0.0, beams=16)) == [best[1], best[2]]


def _after(model: GPT, sequence: list[int]) -> list[float]:
    return torch.log_softmax(whole_logits(model, sequence)[-1].double(), dim=-1).tolist()


def test_a_short_ending_and_a_long_one_are_compared_by_what_a_token_has_in_the_mean() -> None:
    model, prompt = lively(), tokens(1, 5)[0].tolist()
    greedy, how = replace(GREEDY, max_tokens=12), SamplingOptions(max_tokens=12, temperature=0.0, beams=4)
    lengths = set()
    for stop in found(model, prompt, how):
        response, likeliest = found(model, prompt, how, stop), made(model, prompt, greedy, stop)
        best, other = (
            logp(model, prompt, whole) / len(whole)
            for whole in (tokens if len(tokens) == how.max_tokens else [*tokens, stop] for tokens in (response, likeliest))
        )
        assert best >= other - 1e-6
        lengths.add(len(response))
    assert len(lengths) > 1


def test_beams_go_on_when_the_context_is_full() -> None:
    model, long_prompt = lively(), tokens(1, 100)[0].tolist()
    assert len(found(model, long_prompt, SamplingOptions(max_tokens=40, temperature=0.0, beams=3))) == 40
