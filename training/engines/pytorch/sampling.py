"""Text out of a model: tokens that are drawn one by one, or the best of some beams. Every pass uses what the passes before left.

Suffixes as in `model`; a row B is one continuation of the prompt.
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

TEMPERATURE_MIN = 1e-6  # below it the likeliest token is as good as sure, and quotients overflow
PASS_TOKENS = 64  # of a prompt, or of a context that slides, in one pass: a proposal may have to wait for the end of a pass

BeforePass = Callable[[], None]  # called before every pass


class DecodingState:
    """Continuations of one prompt, all of the same length. Tokens and logits are a processor's, wherever the model is.

    Computed by a processor, the same tokens have the same logits, bit for bit, whether they were a prompt or were made here.
    """

    def __init__(self, model: GPT, prompt: Sequence[int]) -> None:
        self._model, self._cache = model, KVCache(model.spec, device=model.device, is_steady=True)
        self._pending = min(len(prompt), model.spec.context)  # tokens that the cache does not have yet
        self.tokens_BT = torch.tensor([prompt])

    def prefill_step(self) -> bool:
        """Makes one pass over older tokens, if the cache lacks more than `logits` should take; whether it did."""
        self._slide()
        if self._pending <= PASS_TOKENS:
            return False
        self._pass(PASS_TOKENS)
        return True

    def logits(self) -> Tensor:
        """Of the next token: (B, V), by one pass over all tokens that the cache lacks. The context slides when it is full."""
        self._slide()
        with torch.no_grad():
            return self._model.logits(self._pass(self._pending))[:, -1 - self._cache.beyond].cpu()

    def _slide(self) -> None:
        context = self._model.spec.context
        if self._cache.length + self._pending > context:
            # Positions are absolute inside the cache: start it again from the younger half of the context.
            self._cache = KVCache(self._model.spec, len(self.tokens_BT), self._model.device, is_steady=True)
            self._pending = max(1, context // 2)

    @torch.no_grad()
    def _pass(self, count: int) -> Tensor:
        """Over the oldest tokens that the cache lacks; the features of the last of them, and of what the cache has beyond."""
        first = self.tokens_BT.shape[1] - self._pending
        self._pending -= count
        self._cache.beyond = -count % ROWS
        part_BT = F.pad(self.tokens_BT[:, first : first + count], (0, self._cache.beyond)).to(self._model.device)
        return self._model.features(part_BT, self._cache, last=ROWS)

    def append(self, rows: list[int], tokens: list[int]) -> None:
        """From now on there are these rows, each with one token more. Needs `logits` before."""
        if rows != list(range(len(self.tokens_BT))):
            self._cache.keep_sequences(rows)
        self.tokens_BT = torch.cat((self.tokens_BT[rows], torch.tensor(tokens)[:, None]), dim=1)
        self._pending = 1


# Drawing --------------------------------------------------------------------------------------------------------------


def sample_tokens(
    model: GPT, prompt: Sequence[int], how: SamplingOptions, last: Container[int], before_pass: BeforePass
) -> Iterator[list[int]]:
    """Yields the tokens that each pass adds to the text, one or none. A token in `last` ends it."""
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
    """How likely each token is drawn, up to a common factor. Of equally likely ones the smaller goes first."""
    p_V = torch.softmax((logits_V - logits_V.max()) / how.temperature, dim=-1)
    if not how.top_k and how.top_p == 1:
        return p_V
    sorted_V, order_V = p_V.sort(descending=True, stable=True)
    if how.top_k:
        sorted_V[how.top_k :] = 0
    sum_V = sorted_V.double().cumsum(dim=-1)
    likelier_V = sum_V - sorted_V  # what all that are likelier have together
    sorted_V[likelier_V >= how.top_p * sum_V[-1]] = 0
    return torch.zeros_like(p_V).scatter_(0, order_V, sorted_V)


# Beams ----------------------------------------------------------------------------------------------------------------


@dataclass(order=True, frozen=True, slots=True)
class FinishedBeam:
    mean: float  # log-probability of a token, with the one that ended it
    tokens: list[int] = field(compare=False)


def beam_search(
    model: GPT,
    prompt: Sequence[int],
    how: SamplingOptions,
    last: Container[int],
    before_pass: BeforePass,
    ends: Callable[[Sequence[int]], bool],
) -> Iterator[list[int]]:
    """The best continuation that a beam search finds, after an empty list for each pass.

    The best one has the largest s(y) = (1/|y|) Σ_t log p(y_t | prompt, y_<t), the log-probability normalised by the length
    (Jean et al. 2015, Montreal Neural Machine Translation Systems for WMT'15; `length_penalty` 1 of transformers). A token in
    `last` ends the text and counts as a token of y. A continuation of which `ends` is true is over; it sees the tokens after the
    prompt. The search is over when as many have ended as there are beams, and the mean of no other one is above theirs. One beam
    always takes the likeliest.
    """
    course, sums_B, ended = DecodingState(model, prompt), torch.zeros(1, dtype=torch.float64), list[FinishedBeam]()
    for length in range(1, how.max_tokens + 1):
        before_pass()
        while course.prefill_step():
            yield []
            before_pass()
        sums_BV = sums_B[:, None] + torch.log_softmax(course.logits().double(), dim=-1)
        # So many that enough go on whatever happens, unless several tokens end one row.
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
