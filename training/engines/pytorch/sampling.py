"""Generation of text by sampling token after token, or by a beam search. A cache stores the results of earlier passes.

Suffixes of names are those of `model`; B counts the continuations of the prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from protocol.sampling import SamplingOptions
from training.engines.pytorch.layers import ROWS, KVCache
from training.engines.pytorch.model import GPT

TEMPERATURE_MIN = 1e-6  # temperature at which the likeliest token is nearly certain: at lower ones quotients overflow
PASS_TOKENS = 64  # tokens of a prompt that one pass processes: training may have to wait for a pass

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
    generator, course = torch.Generator().manual_seed(how.seed), DecodingState(model, prompt)
    for _ in range(how.max_tokens):
        before_pass()
        while course.prefill_step():
            yield []
            before_pass()
        token = choose_token(course.logits()[0], how, generator)
        if token in last:
            return
        course.append([0], [token])
        yield [token]


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
