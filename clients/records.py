"""The records of client runs: briefs of rounds, request bodies, manifests and declarations.

A step is a list of request bodies, whose gradients are added up. The manifest of a step lists the digests of its bodies, and the
brief of a round names the manifest. All three are canonical encodings, so equal requests are equal blobs.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Annotated, Final

from ledger.jobs import ModelReference
from protocol.codec import Between, Count, Digest, Length
from protocol.messages import Name
from training.transformer import VOCABULARY_MAX

EXAMPLES_MAX: Final = 1_024  # examples of one request: the SDK divides a larger batch into several requests
# Tokens of one example. A model's context is the usual bound, and it is shorter.
EXAMPLE_TOKENS_MAX: Final = 1 << 16
BODIES_MAX: Final = 256  # request bodies of one step
BODY_BYTES_MAX: Final = 8 << 20  # bytes of one encoded body: HTTP requests have 6 MB at most, and an encoding is not larger
MANIFEST_BYTES_MAX: Final = 64 * BODIES_MAX
# Bytes of a body for each of its tokens: an example of one token with three inputs has some 70. So the voted limit of a step's
# operations, which bounds its tokens, also bounds what re-executors fetch.
BYTES_OF_TOKEN_MAX: Final = 128
BYTES_OF_SETTINGS_MAX: Final = 256  # bytes of a body beside its examples: the loss and its settings
TOKEN_BYTES: Final = 2  # bytes of a token id, little-endian: a vocabulary has at most 65,536 tokens
FLOAT_BYTES: Final = 4  # bytes of a number of an example's inputs, float32, little-endian
EPSILON_MIN: Final = 1e-15  # least epsilon of AdamW: a smaller one would let zero gradients divide by zero
RANK_MAX: Final = 1_024  # largest rank of an adapter; a model's width is the usual bound, and it is smaller
TERM_MIN: Final = 1e-12  # least rate and beta above 0: subnormal numbers are zero on some processors (decision 29)
RATE_MAX: Final = 10.0
WEIGHT_DECAY_MAX: Final = 100.0
CLIP_MAX: Final = 1e9
CONFIG_MAX: Final = 8  # settings of a loss

assert VOCABULARY_MAX <= 1 << 8 * TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class OptimizerStep:
    """The optimizer's terms of one step, for AdamW as in Loshchilov and Hutter 2019 (arXiv:1711.05101), algorithm 2."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float
    clip: float  # largest norm of the gradient sum; 0: no limit

    def problem(self) -> str | None:
        """Return why the terms are invalid, with the name and the value of the invalid one; None if they are valid."""
        bounds = {
            "rate": (0.0, RATE_MAX),
            "epsilon": (EPSILON_MIN, 1.0),
            "weight_decay": (0.0, WEIGHT_DECAY_MAX),
            "clip": (0.0, CLIP_MAX),
        }
        for name, (least, most) in bounds.items():
            if not least <= (value := getattr(self, name)) <= most:  # The comparison also fails for NaN.
                return f"{name} must be in {least:g}..{most:g}, not {value:g}"
        for name in ("rate", "beta1", "beta2"):
            if 0 < (value := getattr(self, name)) < TERM_MIN:
                return f"{name} must be 0 or at least {TERM_MIN:g}, not {value:g}"
        for name in ("beta1", "beta2"):
            if not 0 <= (value := getattr(self, name)) < 1:
                return f"{name} must be at least 0 and below 1, not {value:g}"
        return None


@dataclass(frozen=True, slots=True)
class StepBrief:
    """The brief of a round of a client run: what the round computes."""

    step: Count  # number of the step, from 0
    manifest: Digest
    tokens: Count  # number of target tokens in all bodies of the step
    optimizer: OptimizerStep


class ClientLoss(enum.StrEnum):
    """A loss of a request: a sum over its tokens."""

    CROSS_ENTROPY = "cross_entropy"
    IMPORTANCE_SAMPLING = "importance_sampling"
    PPO = "ppo"  # Schulman et al. 2017 (arXiv:1707.06347), equation 7
    CISPO = "cispo"  # MiniMax 2025 (arXiv:2506.13585), equation 4
    DRO = "dro"  # Richemond et al. 2024 (arXiv:2405.19107), equation 10
    GSPO = "gspo"  # Zheng et al. 2025 (arXiv:2507.18071), equation 13


RATIO_MASK: Final = "sequence_ratio_mask"  # not zero: the token belongs to the response, whose mean ratio GSPO uses
# Inputs of each loss beside the tokens. Each has one number for each token.
LOSS_INPUTS: Final[dict[ClientLoss, tuple[str, ...]]] = {
    ClientLoss.CROSS_ENTROPY: ("weights",),
    **dict.fromkeys(
        (ClientLoss.IMPORTANCE_SAMPLING, ClientLoss.PPO, ClientLoss.CISPO, ClientLoss.DRO),
        ("logprobs", "advantages"),
    ),
    ClientLoss.GSPO: ("logprobs", "advantages", RATIO_MASK),
}
LOW, HIGH, BETA = "clip_low_threshold", "clip_high_threshold", "beta"
# Settings of each loss with their default values. A ratio of probabilities is clipped to the range from `LOW` to `HIGH`.
LOSS_DEFAULTS: Final[dict[ClientLoss, dict[str, float]]] = {
    ClientLoss.CROSS_ENTROPY: {},
    ClientLoss.IMPORTANCE_SAMPLING: {},
    ClientLoss.PPO: {LOW: 0.8, HIGH: 1.2},
    ClientLoss.CISPO: {LOW: 0.0, HIGH: 4.0},
    ClientLoss.DRO: {BETA: 0.05},
    ClientLoss.GSPO: {LOW: 1 - 3e-4, HIGH: 1 + 4e-4},
}

Tokens = Annotated[bytes, Length(TOKEN_BYTES, TOKEN_BYTES * EXAMPLE_TOKENS_MAX)]
Numbers = Annotated[bytes, Length(FLOAT_BYTES, FLOAT_BYTES * EXAMPLE_TOKENS_MAX)]


@dataclass(frozen=True, slots=True)
class Example:
    """A sequence: the tokens that the model reads, the token that it has to predict at each of them, and the loss's inputs."""

    tokens: Tokens
    targets: Tokens
    inputs: Annotated[dict[Name, Numbers], Length(0, CONFIG_MAX)]

    @property
    def length(self) -> int:
        return len(self.targets) // TOKEN_BYTES


@dataclass(frozen=True, slots=True)
class RequestBody:
    """The content of one request for a gradient."""

    loss: ClientLoss
    config: Annotated[dict[Name, float], Length(0, CONFIG_MAX)]  # settings of the loss that differ from `LOSS_DEFAULTS`
    examples: Annotated[tuple[Example, ...], Length(1, EXAMPLES_MAX)]

    @property
    def tokens(self) -> int:
        return sum(example.length for example in self.examples)

    def problem(self, context: int, vocabulary: int) -> str | None:
        """Return why a model with these sizes cannot compute the request, with the name and the value; None if it can."""
        unknown = self.config.keys() - LOSS_DEFAULTS[self.loss].keys()
        if unknown:
            known = ", ".join(LOSS_DEFAULTS[self.loss]) or "none"
            return f"loss {self.loss.value!r} has no setting {min(unknown)!r}: its settings are {known}"
        settings = LOSS_DEFAULTS[self.loss] | self.config
        if LOW in settings and not 0 <= settings[LOW] <= settings[HIGH]:
            return f"{LOW} {settings[LOW]:g} is not in 0..{HIGH}, which is {settings[HIGH]:g}"
        for number, example in enumerate(self.examples):
            problem = _example_problem(self.loss, example, context, vocabulary)
            if problem:
                return f"example {number}: {problem}"
        return None


def _example_problem(loss: ClientLoss, example: Example, context: int, vocabulary: int) -> str | None:
    import numpy as np

    length, expected = example.length, set(LOSS_INPUTS[loss])
    if len(example.tokens) != len(example.targets) or len(example.tokens) % TOKEN_BYTES:
        return f"{len(example.tokens) // TOKEN_BYTES} tokens and {length} targets: there must be a target for each token"
    if length > context:
        return f"{length} tokens are more than the model's context of {context}"
    if example.inputs.keys() != expected:
        return f"loss {loss.value!r} needs {' and '.join(sorted(expected))}, not {', '.join(example.inputs) or 'nothing'}"
    for name, data in (("tokens", example.tokens), ("targets", example.targets)):
        largest = int(np.frombuffer(data, dtype="<u2").max())
        if largest >= vocabulary:
            return f"{name} contain {largest}, but the vocabulary has {vocabulary} tokens"
    for name, numbers in example.inputs.items():
        if len(numbers) != FLOAT_BYTES * length:
            return f"{len(numbers) // FLOAT_BYTES} {name} for {length} tokens"
        values = np.frombuffer(numbers, dtype="<f4")
        if not np.isfinite(values).all():
            at = int(np.flatnonzero(~np.isfinite(values))[0])
            return f"{name} contain {values[at]} at token {at}"
    return None


@dataclass(frozen=True, slots=True)
class ListedBody:
    digest: Digest
    bytes: Annotated[int, Between(1, BODY_BYTES_MAX)]


@dataclass(frozen=True, slots=True)
class Manifest:
    """The request bodies of one step, in the order of their requests."""

    bodies: Annotated[tuple[ListedBody, ...], Length(1, BODIES_MAX)]


@dataclass(frozen=True, slots=True)
class StepDeclaration:
    """What the trainer of a step declares beside its update: the facts that the client is told."""

    tokens: Count  # number of target tokens
    # Sum of the losses of all bodies, in millionths.
    loss: Annotated[int, Between(-(2**53), 2**53)]


def loss_millionths(loss: float) -> int | None:
    """Return a sum of losses in millionths; None if it is not finite or out of range."""
    if not math.isfinite(loss) or abs(loss) > 2**53 / 1e6:
        return None
    return round(loss * 1e6)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSettings:
    """Settings of a run's trained tensors."""

    rank: Annotated[int, Between(1, RANK_MAX)] = 32
    """Rank of each adapter."""
    train_attn: bool = True
    """True if the matrices of attention have adapters."""
    train_mlp: bool = True
    """True if the matrices of the feed-forward network have adapters."""
    train_unembed: bool = True
    """True if the output matrix has an adapter. A tied output matrix is a copy of the embedding then."""
    base: ModelReference
    """Final model of the finished job that the adapters change."""
    start: ModelReference | None = None
    """Saved model of another run with which the run begins. None: it begins with the base."""
    start_moments: bool = False
    """True if the run begins with the optimizer's moments of that model, too."""
