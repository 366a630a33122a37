"""Rule rewards: functions of this program that score a response. A job names a rule as `rule:NAME`, and cannot bring code.

All peers must compute the same score of a response. So a rule counts bytes and adds exact fractions, and does not use Unicode
tables of the interpreter.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

# function of a response's tokens and its text without the stop token that returns the score
Reward = Callable[[Sequence[int], bytes], float]

VOWELS: Final = b"aeiouAEIOU"
LETTERS: Final = bytes(range(ord("A"), ord("Z") + 1)) + bytes(range(ord("a"), ord("z") + 1))

TOY_VOCABULARY: Final = 6
TOY_PROMPT: Final = 0  # token that is the only prompt of the toy
TOY_LENGTH: Final = 5  # tokens of every response of the toy, which has no stop token
TOY_BETA: Final = 0.1
TOY_RESPONSES: Final = TOY_VOCABULARY**TOY_LENGTH


@dataclass(frozen=True, slots=True)
class RewardRule:
    name: str
    about: str  # description for people in one line
    make: Callable[[int], Reward]  # function of the job's seed that returns the reward
    vocabulary: int | None = None  # required size of the model's vocabulary; None: any size


def vowel_share(tokens: Sequence[int], text: bytes) -> float:
    """Return the share of vowels among the Latin letters of the text, or 0 without letters."""
    letters = len(text) - len(text.translate(None, LETTERS))
    return (len(text) - len(text.translate(None, VOWELS))) / letters if letters else 0.0


def bigram_table(seed: int) -> tuple[tuple[float, ...], ...]:
    """Return the toy's table A[a][b] of scores of bigrams: 6 × 6 numbers in −1..1.

    They are multiples of 2⁻³¹, so that the mean of four is exact.
    """
    return tuple(tuple(_bigram(seed, a, b) for b in range(TOY_VOCABULARY)) for a in range(TOY_VOCABULARY))


def _bigram(seed: int, a: int, b: int) -> float:
    hashed = b"folkmoot/bigram/1" + seed.to_bytes(8, "big") + a.to_bytes(4, "big") + b.to_bytes(4, "big")
    return int.from_bytes(hashlib.sha256(hashed).digest()[:4], "big") / 2**31 - 1


def bigram_reward(seed: int) -> Reward:
    """Return the toy's reward: the mean of A over the bigrams of a response of five tokens."""
    table = bigram_table(seed)

    def reward(tokens: Sequence[int], text: bytes) -> float:
        pairs = list(itertools.pairwise(tokens))
        return sum(table[a][b] for a, b in pairs) / len(pairs) if pairs else 0.0

    return reward


RULES: Final[Mapping[str, RewardRule]] = {
    rule.name: rule
    for rule in (
        RewardRule("vowels", "the share of vowels among the letters of a response", lambda seed: vowel_share),
        RewardRule(
            "bigram", "the toy: each pair of neighbouring tokens has a reward that a hash gives", bigram_reward, TOY_VOCABULARY
        ),
    )
}
