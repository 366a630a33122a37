"""Synthetic preferences over excerpts of a text, for demos without preferences of real people.

The synthetic annotator prefers the response with more vowels (`rule:vowels`), and is wrong in 10 % of the pairs. The two
responses come from two places of the text. A fair coin chooses which of them follows the prompt in the text, so that models
cannot learn to prefer the continuation.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Final

from rlhf.data.preference_sets import PERMILLE
from rlhf.objectives.rule_rewards import vowel_share

PROMPT_CHARACTERS: Final = 16
RESPONSE_CHARACTERS: Final = 32
WRONG_PERMILLE: Final = 100


def synthetic_pairs(text: bytes, count: int) -> Iterator[dict[str, str]]:
    """Yield `count` pairs in the form of lines of `--preferences FILE`. `text` must be longer than a prompt with its response."""
    whole = text.decode("ascii", errors="ignore")
    places = len(whole) - PROMPT_CHARACTERS - RESPONSE_CHARACTERS
    number = found = 0
    while found < count:
        draw = hashlib.sha256(b"folkmoot/example-pairs/1" + number.to_bytes(8, "big")).digest()
        one, other, coin, wrong = (int.from_bytes(draw[at : at + 8], "big") for at in range(0, 32, 8))
        starts = [one % places + PROMPT_CHARACTERS, other % places + PROMPT_CHARACTERS]
        responses = [whole[start : start + RESPONSE_CHARACTERS] for start in starts]
        likes = [vowel_share((), response.encode()) for response in responses]
        number += 1
        if likes[0] == likes[1]:
            continue
        first = (likes[0] > likes[1]) != (wrong % PERMILLE < WRONG_PERMILLE)
        chosen, rejected = responses if first else responses[::-1]
        before = starts[coin % 2]
        yield {"prompt": whole[before - PROMPT_CHARACTERS : before], "chosen": chosen, "rejected": rejected}
        found += 1
