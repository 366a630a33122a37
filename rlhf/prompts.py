"""Prompts: what the responses of a trainer's round go on from. numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rlhf import rollouts
from rlhf.pairs import Pairs
from rlhf.rollouts import Place, TokenIds
from training.sequences import TokenArray


class Source(Protocol):
    """What prompts are drawn from, each by its number."""

    def __len__(self) -> int: ...

    def prompt(self, number: int) -> TokenArray: ...


@dataclass(frozen=True, slots=True)
class Windows:
    """Of a text: a prompt begins at each token behind which `length` tokens stand."""

    text: TokenArray
    length: int

    def __len__(self) -> int:
        return len(self.text) - self.length + 1

    def prompt(self, number: int) -> TokenArray:
        return self.text[number : number + self.length]


@dataclass(frozen=True, slots=True)
class OfSet:
    """Those that pairs have which are not held out, each once. They differ in length; of a longer one its end is taken."""

    pairs: Pairs
    length: int

    def __len__(self) -> int:
        return len(self.pairs.prompts) - 1

    def prompt(self, number: int) -> TokenArray:
        start, end = self.pairs.prompts[number : number + 2]
        return self.pairs.train[max(start, end - self.length) : end]


def drawn(place: Place, count: int, source: Source) -> list[TokenIds]:
    """The prompts of `count` responses. Nobody chooses them, and everybody can check."""
    return [source.prompt(int(number)).astype(np.int64) for number in rollouts.prompt_numbers(place, count, len(source))]
