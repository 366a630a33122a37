"""Prompts: what the responses of a trainer's round go on from. numpy only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np

from rlhf.data import rollouts
from rlhf.data.rollouts import RolloutId, TokenIds
from rlhf.data.tokenized_records import TokenizedPairs
from training.data.token_sequences import TokenArray

DRAWS_MAX: Final = 16  # for one response: only where nearly every prompt is blocked, none is found in as many
NO_PROMPT: Final = np.zeros(1, dtype=np.int64)


class PromptSource(Protocol):
    """What prompts are drawn from, each by its number. Of one with more than `length` tokens the last ones are taken."""

    @property
    def length(self) -> int: ...

    def __len__(self) -> int: ...

    def prompt_at(self, number: int) -> TokenArray: ...


@dataclass(frozen=True, slots=True)
class TextWindows:
    """Of a text: a prompt begins at each token behind which `length` tokens stand."""

    text: TokenArray
    length: int

    def __len__(self) -> int:
        return len(self.text) - self.length + 1

    def prompt_at(self, number: int) -> TokenArray:
        return self.text[number : number + self.length]


@dataclass(frozen=True, slots=True)
class PreferenceSetPrompts:
    """Those that pairs have which are not held out, each once. They differ in length."""

    pairs: TokenizedPairs
    length: int

    def __len__(self) -> int:
        return len(self.pairs.prompts) - 1

    def prompt_at(self, number: int) -> TokenArray:
        start, end = self.pairs.prompts[number : number + 2]
        return self.pairs.train[start:end]


def draw_prompts(
    place: RolloutId, count: int, source: PromptSource, blocks: Callable[[TokenIds], bool] = lambda tokens: False
) -> list[TokenIds]:
    """The prompts of `count` responses. Nobody chooses them, and everybody can check.

    Each is that of the first draw whose prompt is blocked neither whole nor as it is taken; where there is none it is token 0.
    """
    found: dict[int, TokenIds] = {}
    for draw in range(DRAWS_MAX if len(source) else 0):
        numbers = rollouts.prompt_numbers(place, draw, count, len(source))
        for response in range(count):
            if response not in found:
                whole = source.prompt_at(int(numbers[response])).astype(np.int64)
                taken = whole[-source.length :]
                if not blocks(taken) and (len(taken) == len(whole) or not blocks(whole)):
                    found[response] = taken
        if len(found) == count:
            break
    return [found.get(response, NO_PROMPT) for response in range(count)]
