"""Options of text generation, named as in other programs, and their bounds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

from protocol.codec import Between, Count, Length
from protocol.errors import UserError

TOKENS_MAX: Final = 4_096  # tokens of one text
TOP_K_MAX: Final = 1 << 16  # no vocabulary is larger
STOPS_MAX: Final = 8
STOP_CHARACTERS_MAX: Final = 256
BEAMS_MAX: Final = 16  # each beam has its own keys and values in memory
TURNS_MAX: Final = 64  # earlier turns of a chat that a request may carry

WITHHELD_TEXT: Final = "withheld: the text contains a word on the job's blocklist"  # replaces a withheld text

Stop = Annotated[str, Length(1, STOP_CHARACTERS_MAX)]


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of one text. Applied in this order: temperature, top-k, top-p (nucleus; Holtzman et al. 2020, arXiv:1904.09751)."""

    max_tokens: Annotated[int, Between(1, TOKENS_MAX)] = 200
    temperature: float = 0.8  # 0: always the most likely token
    top_k: Annotated[int, Between(0, TOP_K_MAX)] = 0  # number of the most likely tokens to draw from; 0: all
    top_p: float = 1.0  # draw from the fewest tokens that reach this probability together; 1: all
    stop: Annotated[tuple[Stop, ...], Length(0, STOPS_MAX)] = ()  # the first of them ends the text, which does not include it
    seed: Count = 0  # on the same machine, the same seed gives the same text
    beams: Annotated[int, Between(0, BEAMS_MAX)] = 0  # beams of a beam search, which draws nothing; 0: no beam search

    def validated(self) -> SamplingOptions:
        """Return the options. Raises `UserError` for the first invalid value."""
        if not self.temperature >= 0:
            raise UserError(
                f"temperature {self.temperature:g} is negative: use 0 for the most likely token, or a positive number"
            )
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p {self.top_p:g} is not a probability: use a number above 0 and at most 1")
        if self.beams and (self.temperature or self.top_k or self.top_p < 1):
            drawing = {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}
            said = ", ".join(f"{name} {value:g}" for name, value in drawing.items() if value != (name == "top_p"))
            raise UserError(
                f"beams {self.beams} cannot be combined with {said}: beam search draws no tokens, so leave one of them out"
            )
        return self
