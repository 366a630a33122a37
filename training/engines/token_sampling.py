"""Sampling of tokens in numpy, for engines without a cache of attention: each token takes a pass over the whole context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from protocol.sampling import EndReason, SamplingOptions
from training.engines.held_out_evaluation import Logits, log_probabilities
from training.random_stream import random_bytes
from training.replicated.tensor_layout import Float32Array
from training.token_generation import SampledToken

TEMPERATURE_MIN = 1e-6  # temperature at which the likeliest token is nearly certain: at lower ones quotients overflow


def sample_tokens(
    logits: Logits, context: int, prompt: Sequence[int], how: SamplingOptions, last: set[int], before_pass: Callable[[], None]
) -> Iterator[list[int]]:
    """Yield the tokens that each pass adds to a text, one or none. A token in `last` ends the text.

    If the context is full, its older half is dropped, as by engines with a cache.
    """
    generator, tokens, seen = np.random.default_rng(how.seed), list(prompt), min(len(prompt), context)
    for _ in range(how.max_tokens):
        before_pass()
        logits_V = logits(np.array(tokens[-seen:], dtype=np.int64))[-1]
        token = choose_token(logits_V, how, generator)
        if token in last:
            yield []
            return
        yield [token]
        tokens.append(token)
        seen = seen + 1 if seen < context else max(1, context // 2)


def sample_sequences(
    logits: Logits,
    context: int,
    prompt: Sequence[int],
    samples: int,
    how: SamplingOptions,
    ends: Callable[[Sequence[int]], bool],
    before_pass: Callable[[], None],
) -> Iterator[list[SampledToken]]:
    """Yield the token that each pass adds to a sample, one sample after another. A sample ends when the context is full."""
    length_max = min(how.max_tokens, context + 1 - len(prompt))
    for number in range(samples):
        # Samples of adjacent seeds differ, since each sample's own seed is a hash of the request's seed.
        seed = int.from_bytes(random_bytes(8, "folkmoot/sample/1", how.seed, number), "little")
        generator, made = np.random.default_rng(seed), list[int]()
        for length in range(1, length_max + 1):
            before_pass()
            logits_1V = logits(np.array([*prompt, *made], dtype=np.int64))[-1:]
            made.append(choose_token(logits_1V[0], how, generator))
            end = EndReason.STOP if ends(made) else EndReason.LENGTH if length == length_max else None
            yield [SampledToken(number, made[-1], float(log_probabilities(logits_1V, np.array(made[-1:]))[0]), end)]
            if end is not None:
                break


def choose_token(logits_V: Float32Array, how: SamplingOptions, generator: np.random.Generator) -> int:
    """Draw a token. Among equally likely tokens, `top_k` and `top_p` prefer the smaller id."""
    if how.temperature < TEMPERATURE_MIN:
        return int(logits_V.argmax())
    weights_V = np.exp((logits_V - logits_V.max()).astype(np.float64) / how.temperature)
    order_V = np.argsort(-weights_V, kind="stable")
    sum_V = np.cumsum(weights_V[order_V][: how.top_k or None])
    likelier_V = sum_V - weights_V[order_V][: len(sum_V)]  # for each token, the sum over all likelier tokens
    sum_V = sum_V[likelier_V < how.top_p * sum_V[-1]]
    drawn = int(np.searchsorted(sum_V, generator.random() * sum_V[-1], side="right"))
    return int(order_V[min(drawn, len(sum_V) - 1)])
