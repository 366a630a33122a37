"""What a job is: the values every peer must agree on before the first round."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, field
from typing import Annotated, Final

from protocol import codec
from protocol.codec import Between, Count, Digest
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import BLOB_BYTES_MAX
from protocol.messages import Name

ROUNDS_MAX = 1_000_000  # a job is to end some day: years at a round a minute
LOCAL_STEPS_MAX = 10_000  # one round is to end too, and to be re-executed by everybody
BATCH_MAX = 65_536  # sequences; their offsets are drawn one by one

Positive = Annotated[int, Between(1, 2**31)]

PARAMETERS_MAX: Final = BLOB_BYTES_MAX // 4  # a committed buffer of float32 must fit a blob
NORM_START_MAX: Final = 1e9  # its square is computed exactly by every voter; no float may overflow on the way
LAYERS_MAX: Final = 1_024  # bounds the number of tensors, whatever their size


# Far above anything useful; beyond them float32 parameters overflow, and what is decided would be no model.
FLOATS_MAX: Final = {
    "inner_rate": 10.0,
    "outer_rate": 10.0,
    "weight_decay": 100.0,
    "clip": 1e6,
    "norm_start": NORM_START_MAX,
    "proposal_seconds": 86_400.0,
}


class Objective(enum.StrEnum):
    LANGUAGE = "language"  # next-token prediction on text
    SCRATCH = "scratch"  # a known update on one small tensor: tests a live network


class Audit(enum.StrEnum):
    FULL = "full"  # every voter with a worker re-executes every proposal before its ballot
    OFF = "off"  # data is local to each trainer, so nobody can re-execute


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder-only transformer; the output layer is the transposed token embedding."""

    vocabulary: Positive = 256
    context: Positive = 128  # tokens per training sequence
    width: Positive = 64  # features of the residual stream
    layers: Positive = 3
    heads: Positive = 4  # query heads
    kv_heads: Positive = 2  # key/value heads, shared by heads // kv_heads query heads each
    hidden: Positive = 192  # features inside the SwiGLU

    def problem(self) -> str | None:
        if self.width % self.heads or (self.width // self.heads) % 2:
            return f"width {self.width} must be an even multiple of heads {self.heads}"
        if self.heads % self.kv_heads:
            return f"heads {self.heads} must be a multiple of kv_heads {self.kv_heads}"
        if self.layers > LAYERS_MAX:
            return f"layers {self.layers} are more than {LAYERS_MAX}"
        if self.parameters > PARAMETERS_MAX:
            return f"{self.parameters} parameters are more than {PARAMETERS_MAX}"
        return None

    @property
    def parameters(self) -> int:
        """How many the model has; `replicated.layout` lists them."""
        kv_width = self.kv_heads * (self.width // self.heads)
        layer = 2 * self.width + 2 * self.width * (self.width + kv_width) + 3 * self.width * self.hidden
        return self.vocabulary * self.width + self.layers * layer + self.width


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: Name
    objective: Objective = Objective.LANGUAGE
    model: ModelSpec = field(default_factory=ModelSpec)
    tokenizer: Digest | None = None  # blob of a byte-level BPE in tokenizers' JSON; None: the 256 bytes
    data: Digest | None = None  # blob of the data manifest (`training.data`); None: each trainer's own text
    held_out_permille: Annotated[int, Between(0, 500)] = 100  # the last part of the text, never trained on
    seed: Count = 0  # of the initialisation and of the sampler
    rounds: Annotated[int, Between(1, ROUNDS_MAX)] = 60
    local_steps: Annotated[int, Between(1, LOCAL_STEPS_MAX)] = 10  # H, inner steps per round
    batch: Annotated[int, Between(1, BATCH_MAX)] = 8  # sequences per inner step and trainer
    micro_batch: Annotated[int, Between(1, BATCH_MAX)] = (
        8  # sequences per forward pass: bounds memory, not the result beyond rounding
    )
    inner_rate: float = 3e-3  # peak learning rate of the inner AdamW
    inner_rate_floor: float = 0.1  # fraction of the peak at the last round; linear decay
    warmup_rounds: Annotated[int, Between(0, 2**31)] = 2
    beta1: float = 0.6  # the inner state starts anew each round, so it must not average over more than a few steps
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0  # largest gradient norm of an inner step
    outer_rate: float = 0.7
    outer_momentum: float = 0.5  # Nesterov
    feedback_decay: float = 0.95  # of the error-feedback buffer e
    liars: Annotated[int, Between(0, 200)] = 1  # b: lying trainers the aggregation tolerates
    accepted_min: Positive = 1  # fewer accepted proposals: the round takes no step
    audit: Audit = Audit.FULL
    norm_start: float = 32.0  # stands for the median accepted norm until a round has been accepted
    proposal_seconds: float = 60.0  # longest wait for a round's proposals; peers adapt below it

    def problem(self) -> str | None:
        """What is wrong with it, naming the value; None if nothing is."""
        positive = ("inner_rate", "clip", "outer_rate", "norm_start", "proposal_seconds")
        for name, value in FLOATS_MAX.items():
            if not getattr(self, name) <= value:  # also if it is not a number
                return f"{name} must be at most {value:g}, is {getattr(self, name)}"
        fractions = ("inner_rate_floor", "outer_momentum", "feedback_decay")
        for name in positive:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                return f"{name} must be positive, not {getattr(self, name)}"
        for name in fractions:
            if not 0 <= getattr(self, name) <= 1:
                return f"{name} must lie in 0..1, not {getattr(self, name)}"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                return f"{name} must be at least 0 and below 1, is {getattr(self, name)}"
        if not self.weight_decay >= 0:
            return f"weight_decay must not be negative, is {self.weight_decay}"
        if self.objective is Objective.LANGUAGE and (self.data is None) != (self.audit is Audit.OFF):
            return "audit 'full' needs shared data, and local data needs audit 'off'"
        return self.model.problem()

    def encode(self) -> bytes:
        return codec.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> JobSpec:
        """A valid specification, or `RemoteProtocolError`."""
        spec = codec.decode(cls, data)
        problem = spec.problem()
        if problem:
            raise RemoteProtocolError("bad-job", problem)
        return spec

    def checked(self) -> JobSpec:
        """Itself, or `UserError`."""
        problem = self.problem()
        if problem:
            raise UserError(f"job {self.name!r}: {problem}")
        return self
