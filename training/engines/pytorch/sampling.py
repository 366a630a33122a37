"""Generation of texts and samples token after token, or by a beam search. A cache stores the results of earlier passes.

Suffixes of names are those of `model`; B counts the continuations of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from protocol.sampling import EndReason, SamplingOptions
from training.engines.pytorch.layers import ROWS, KVCache
from training.engines.pytorch.model import GPT
from training.random_stream import random_bytes
from training.token_generation import SampledToken

TEMPERATURE_MIN = 1e-6  # temperature at which the likeliest token is nearly certain: at lower ones quotients overflow
PASS_TOKENS = 64  # tokens of a prompt that one pass processes: training may have to wait for a pass
# Most bytes of keys and values of samples that are drawn at the same time. Other samples of the request are drawn afterwards.
CACHE_BYTES_MAX = 128 << 20

BeforePass = Callable[[], None]  # a function that is called before every pass


class DecodingState:
    """Continuations of one prompt, all of the same length, with the model's cache.

    Tokens and logits are on the CPU, for a model on any device. On a CPU, the same tokens have the same logits, bit for bit, for
    tokens of a prompt and for generated ones.
    """

    def __init__(self, model: GPT, prompt: Sequence[int]) -> None:
        self._model, self._cache = model, KVCache(model.spec, device=model.device, is_steady=True)
        self._pending = min(len(prompt), model.spec.context)  # tokens that are not in the cache yet
        self.tokens_BT = torch.tensor([prompt])

    def prefill_step(self) -> bool:
        """Process a part of the prompt if `logits` would otherwise have to process too many tokens. Return true if a pass ran."""
        self._slide()
        if self._pending <= PASS_TOKENS:
            return False
        self._pass(PASS_TOKENS)
        return True

    def logits(self) -> Tensor:
        """Return the logits of the next token, (B, V), by one pass over all tokens that the cache lacks.

        If the context is full, the older half of it is dropped.
        """
        self._slide()
        with torch.no_grad():
            return self._model.logits(self._pass(self._pending))[:, -1 - self._cache.beyond].cpu()

    def _slide(self) -> None:
        context = self._model.spec.context
        if self._cache.length + self._pending > context:
            # Positions in the cache are absolute, so a new cache begins with the newer half of the context.
            self._cache = KVCache(self._model.spec, len(self.tokens_BT), self._model.device, is_steady=True)
            self._pending = max(1, context // 2)

    @torch.no_grad()
    def _pass(self, count: int) -> Tensor:
        """Process the oldest `count` tokens that the cache lacks.

        Return the features of the last of these tokens, and of the padding that a steady cache needs.
        """
        first = self.tokens_BT.shape[1] - self._pending
        self._pending -= count
        self._cache.beyond = -count % ROWS
        part_BT = F.pad(self.tokens_BT[:, first : first + count], (0, self._cache.beyond)).to(self._model.device)
        return self._model.features(part_BT, self._cache, last=ROWS)

    def append(self, rows: list[int], tokens: list[int]) -> None:
        """Replace the continuations by those with the numbers `rows`, each with one more token.

        `logits` must have been called before.
        """
        if rows != list(range(len(self.tokens_BT))):
            self._cache.keep_sequences(rows)
        self.tokens_BT = torch.cat((self.tokens_BT[rows], torch.tensor(tokens)[:, None]), dim=1)
        self._pending = 1


# Sampling --------------------------------------------------------------------------------------------------------------


def sample_tokens(
    model: GPT, prompt: Sequence[int], how: SamplingOptions, last: Container[int], before_pass: BeforePass
) -> Iterator[list[int]]:
    """Yield the tokens that each pass adds to the text, one or none. A token in `last` ends the text."""
    generators = {0: torch.Generator().manual_seed(how.seed)}

    def ends(made: Sequence[int]) -> bool:
        return made[-1] in last

    for drawn in draw_samples(model, prompt, generators, how, how.max_tokens, ends, before_pass):
        yield [each.token for each in drawn if each.end is not EndReason.STOP]


def sample_sequences(
    model: GPT,
    prompt: Sequence[int],
    samples: int,
    how: SamplingOptions,
    ends: Callable[[Sequence[int]], bool],
    before_pass: BeforePass,
) -> Iterator[list[SampledToken]]:
    """Yield the tokens that each pass adds to the samples. The context never slides: a sample ends when it is full."""
    # Samples of adjacent seeds differ, since each sample's own seed is a hash of the request's seed.
    seeds = [int.from_bytes(random_bytes(8, "folkmoot/sample/1", how.seed, number), "little") for number in range(samples)]
    generators = {number: torch.Generator().manual_seed(seed) for number, seed in enumerate(seeds)}
    keys = KVCache(model.spec, device=torch.device("meta"), is_steady=True).keys
    together = max(1, CACHE_BYTES_MAX // (2 * keys.nbytes))
    length_max = min(how.max_tokens, model.spec.context + 1 - len(prompt))
    for first in range(0, samples, together):
        part = {number: generators[number] for number in range(first, min(first + together, samples))}
        yield from draw_samples(model, prompt, part, how, length_max, ends, before_pass)


def draw_samples(
    model: GPT,
    prompt: Sequence[int],
    generators: Mapping[int, torch.Generator],
    how: SamplingOptions,
    length_max: int,
    ends: Callable[[Sequence[int]], bool],
    before_pass: BeforePass,
) -> Iterator[list[SampledToken]]:
    """Yield the tokens that each pass adds to the samples with these numbers and generators, at most one for each sample.

    A sample ends if `ends` is true for its tokens after the prompt, or if it has `length_max` tokens.
    """
    course, made = DecodingState(model, prompt), {number: list[int]() for number in generators}
    going = [(0, number) for number in generators]  # continuation in `course`, and number, of each unfinished sample
    for length in range(1, length_max + 1):
        before_pass()
        while course.prefill_step():
            yield []
            before_pass()
        logits_BV, drawn = course.logits(), list[SampledToken]()
        logp_BV = torch.log_softmax(logits_BV, dim=-1)
        for row, number in going:
            token = choose_token(logits_BV[row], how, generators[number])
            made[number].append(token)
            end = EndReason.STOP if ends(made[number]) else EndReason.LENGTH if length == length_max else None
            drawn.append(SampledToken(number, token, float(logp_BV[row, token]), end))
        kept = [(row, each) for (row, _), each in zip(going, drawn, strict=True) if each.end is None]
        if kept:
            course.append([row for row, _ in kept], [each.token for _, each in kept])
        going = [(row, each.sample) for row, (_, each) in enumerate(kept)]
        yield drawn
        if not going:
            return


def choose_token(logits_V: Tensor, how: SamplingOptions, generator: torch.Generator) -> int:
    if how.temperature < TEMPERATURE_MIN:
        return int(logits_V.argmax())
    return int(torch.multinomial(token_weights(logits_V, how), 1, generator=generator))


def token_weights(logits_V: Tensor, how: SamplingOptions) -> Tensor:
    """Return the weight of each token for sampling. Among equally likely tokens, `top_k` and `top_p` prefer the smaller id."""
    p_V = torch.softmax((logits_V - logits_V.max()) / how.temperature, dim=-1)
    if not how.top_k and how.top_p == 1:
        return p_V
    sorted_V, order_V = p_V.sort(descending=True, stable=True)
    if how.top_k:
        sorted_V[how.top_k :] = 0
    sum_V = sorted_V.double().cumsum(dim=-1)
    likelier_V = sum_V - sorted_V  # for each token, the sum over all likelier tokens
    sorted_V[likelier_V >= how.top_p * sum_V[-1]] = 0
    return torch.zeros_like(p_V).scatter_(0, order_V, sorted_V)


# Beams ----------------------------------------------------------------------------------------------------------------


@dataclass(order=True, frozen=True, slots=True)
class FinishedBeam:
    mean: float  # mean log-probability of the continuation's tokens, including the token that ended it
    tokens: list[int] = field(compare=False)


def beam_search(
    model: GPT,
    prompt: Sequence[int],
    how: SamplingOptions,
    last: Container[int],
    before_pass: BeforePass,
    ends: Callable[[Sequence[int]], bool],
) -> Iterator[list[int]]:
    """Yield an empty list for each pass, then the best continuation that a beam search finds.

    The best one has the largest s(y) = (1/|y|) Σ_t log p(y_t | prompt, y_<t), the log-probability normalised by the length (Jean
    et al. 2015, Montreal Neural Machine Translation Systems for WMT'15; `length_penalty` 1 of transformers).

    A token in `last` ends a continuation and counts as a token of y. A continuation also ends if `ends` is true for its tokens
    after the prompt. The search ends when as many continuations have ended as there are beams, and no other one has a higher
    mean. A search with one beam always takes the likeliest token.
    """
    course, sums_B, ended = DecodingState(model, prompt), torch.zeros(1, dtype=torch.float64), list[FinishedBeam]()
    for length in range(1, how.max_tokens + 1):
        before_pass()
        while course.prefill_step():
            yield []
            before_pass()
        sums_BV = sums_B[:, None] + torch.log_softmax(course.logits().double(), dim=-1)
        # Twice the number of beams: enough continuations remain that have not ended, unless several tokens end the same
        # continuation.
        best, places = sums_BV.flatten().topk(min(2 * how.beams, sums_BV.numel()))
        going: list[tuple[float, int, int]] = []
        for rank, (total, place) in enumerate(zip(best.tolist(), places.tolist(), strict=True)):
            row, token = divmod(place, sums_BV.shape[1])
            made = [*course.tokens_BT[row, len(prompt) :].tolist(), token]
            if token not in last and not ends(made):
                going.append((total, row, token))
            elif rank < how.beams:
                ended.append(FinishedBeam(total / length, made[:-1] if token in last else made))
        going, ended = going[: how.beams], sorted(ended, reverse=True)[: how.beams]
        if not going or (len(ended) == how.beams and ended[-1].mean >= going[0][0] / length):
            break
        totals, rows, tokens = zip(*going, strict=True)
        sums_B = torch.tensor(totals, dtype=torch.float64)
        course.append(list(rows), list(tokens))
        yield []
    else:
        live = zip(sums_B.tolist(), course.tokens_BT[:, len(prompt) :].tolist(), strict=True)
        ended += [FinishedBeam(total / how.max_tokens, made) for total, made in live]
    yield max(ended).tokens
