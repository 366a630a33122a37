"""Options of text generation, named as in other programs, and their bounds."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Annotated, Final

from protocol.codec import Between, Count, Length
from protocol.errors import UserError

TOKENS_MAX: Final = 4_096  # maximum number of tokens of one text
TOP_K_MAX: Final = 1 << 16  # maximum of top-k: no vocabulary is larger
STOPS_MAX: Final = 8
STOP_CHARACTERS_MAX: Final = 256
BEAMS_MAX: Final = 16  # maximum number of beams: each has its own keys and values in memory
TURNS_MAX: Final = 64  # maximum number of earlier turns of a chat in one request
SAMPLES_MAX: Final = 64  # maximum number of samples of one prompt in one request
STOP_SEQUENCES_MAX: Final = 64  # maximum number of token sequences that end a sample

WITHHELD_TEXT: Final = "withheld: the text contains a word on the job's blocklist"  # text that replaces a withheld text

Stop = Annotated[str, Length(1, STOP_CHARACTERS_MAX)]


class EndReason(enum.StrEnum):
    """The reason why a sample has no further token."""

    STOP = "stop"  # Its last tokens are a stop sequence, or complete a stop text.
    LENGTH = "length"  # It has the maximum number of tokens, or the context is full.


class Activations(enum.StrEnum):
    """The numbers that linear layers read while they generate text."""

    FLOAT32 = "float32"
    INT8 = "int8"  # Eight bits, with one scale for each token. Only ternary layers have them.


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options of generating one text.

    They apply in this order: temperature, top-k, top-p (nucleus; Holtzman et al. 2020, arXiv:1904.09751).
    """

    max_tokens: Annotated[int, Between(1, TOKENS_MAX)] = 200
    temperature: float = 0.8  # divisor of the logits; 0: always the most likely token
    top_k: Annotated[int, Between(0, TOP_K_MAX)] = 0  # number of the most likely tokens to draw from; 0: all
    top_p: float = 1.0  # draw from the most likely tokens whose probabilities together reach this value; 1: from all tokens
    # Texts of which the first that occurs ends the generated text, and is not included.
    stop: Annotated[tuple[Stop, ...], Length(0, STOPS_MAX)] = ()
    seed: Count = 0  # seed of the draws: on the same machine, the same seed gives the same text
    beams: Annotated[int, Between(0, BEAMS_MAX)] = 0  # number of beams of a beam search, which draws no tokens; 0: no beam search
    activations: Activations = Activations.FLOAT32

    def validated(self) -> SamplingOptions:
        """Return the options unchanged. Raises `UserError` for the first invalid value."""
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
