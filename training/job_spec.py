"""The specification of a job: the values that all peers agree on before the first round."""

from __future__ import annotations

import enum
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, Final

from ledger.jobs import ModelReference
from protocol import codec
from protocol.codec import Between, Count, Digest, Length, added_field
from protocol.errors import RemoteProtocolError, UserError
from protocol.limits import (
    AUDIT_WINDOW_MAX,
    AUDITORS_MAX,
    BLOB_BYTES_MAX,
    NAME_CHARACTERS_MAX,
    TRAINERS_MAX,
    UPLINK_MBIT_MAX,
    UPLINK_MBIT_MIN,
)
from protocol.messages import Name
from protocol.name_validation import name_problem
from training.objectives import registry
from training.objectives.objective import Objective
from training.transformer import BYTES, TENSORS_MAX, Experts, ModelSpec, TernaryLinear, layer_names

ROUNDS_MAX = 1_000_000  # most rounds of a job: at one round a minute it ends after two years
LOCAL_STEPS_MAX = 10_000  # most local steps of a round: the round and its re-execution must end
BATCH_MAX = 65_536  # most sequences of a batch: their offsets are drawn one by one
DECODED_KEPT_MAX: Final = 512  # number of decoded specifications in memory, of some kilobytes each
# Most bytes of an objective's own settings: they are hashes and numbers, and larger data are blobs.
SETTINGS_BYTES_MAX: Final = 4_096
BITS: Final = (1, 2, 4, 8, 16)  # possible numbers of bits of a level
BITS_ROBUST_MAX: Final = 8  # most bits of a level for rules that compare updates, whose exact products would need wider integers
LOCAL_STEPS: Final = 10  # default number of local steps in a round
# Opening rounds have more bits. One bit gives all elements of a chunk the same size, and the first updates of a new model fit
# worst to that (decision 95).
OPENING_BITS: Final = 4
OPENING_ROUNDS: Final = 3
ROUNDS: Final = 60  # default number of rounds of a job: the demo takes a minute or two
# Default number of last rounds with full audits (decision 123): each costs as much as with audit 'full'.
CLOSING_ROUNDS: Final = 10
# Default rate of sampled audits: with two auditors, each machine replays a quarter of its own work.
AUDIT_RATE: Final = 0.125
ANCHOR_ROUNDS: Final = 8  # rounds between durable models: a rollback undoes at most seven rounds more than necessary
ANCHOR_ROUNDS_MAX: Final = 16  # rounds between durable models with one local step, since a disk may be slower than such a round
WARMUP_ROUNDS: Final = 2  # default number of warm-up rounds, also in short jobs
# Most bytes that sampled audits of a job may need on a trainer's disk: a job must not fill it without consent.
AUDIT_BYTES_MAX: Final = 64 << 30
# Most bytes of all estimates of one model, one byte for each parameter and trainer: voters keep two or three models.
ESTIMATES_BYTES_MAX: Final = 4 << 30
SUSPENSION_ROUNDS_MAX: Final = 100_000
# Least tolerance of a replay. Honest replays on other processors have relative errors of 5e-6, some of 1e-4, and at the smallest
# rates of 5e-4. A smaller tolerance would suspend honest trainers.
TOLERANCE_MIN: Final = 1e-3
# Largest tolerance of a replay: an update without any work has error 1, one with half of the work less.
TOLERANCE_MAX: Final = 0.1
# Least and default tolerance of a replay in bf16. Replays of one gradient with other instruction sets and micro-batches have
# errors of at most 0.021 while a model learns, and false ones of at least 0.28 (decision 152).
BF16_TOLERANCE: Final = 0.05
BF16_BITS: Final = 4  # bits of a level with which replays in bf16 were measured: errors are relative to the width of a level
# Least number of tokens in a batch of jobs with sampled audits in bf16. Auditors also compare mean losses, which may differ by
# 0.001. Those of 1,024 tokens differ by 0.0005 between processors, and those of 128 by up to 0.0013.
BF16_TOKENS_MIN: Final = 1_024

# Least audit rate, with which a job relies on volunteers alone. At smaller rates, rounding decides if any proposal can be drawn.
AUDIT_RATE_MIN: Final = 1e-9
INNER_RATE: Final = 3e-3  # default rate of AdamW
# Least learning rate of the inner optimizer. At smaller rates a step is lost in the rounding of parameters: with Muon at 1e-7,
# replays on other processors have an error of half the tolerance.
INNER_RATE_MIN: Final = 1e-6
# Least norm to which gradients are clipped. With a smaller one, squares of gradients are subnormal numbers, and processors differ
# in which of these become zero.
CLIP_MIN: Final = 1e-6

# Largest radius of SAM; 0.05 is usual. Honest replays of 30 local steps then differ by 1e-6. A larger radius enlarges rounding:
# such replays differ by up to 0.0024 with radius 0.5, and replays of ten local steps by 0.39 with radius 2.
SAM_RADIUS_MAX: Final = 0.2
GROKFAST_MAX: Final = 100.0  # largest factor of Grokfast; about 2 is useful
# Least factor and decay of Grokfast beside 0. Smaller numbers may be subnormal in float32, which some processors flush to zero:
# times a large slow gradient, their models would differ.
GROKFAST_MIN: Final = 1e-6
GROKFAST_DECAY: Final = 0.98  # default decay of Grokfast's slow gradient, that of its paper for modular arithmetic

NORM_START_MAX: Final = 1e9  # largest initial median norm: every voter squares it exactly, and no float may overflow


# Largest values of fields, far above useful values. With larger values float32 parameters overflow, and the decided model would
# be useless.
FLOATS_MAX: Final = {
    "inner_rate": 10.0,
    "outer_rate": 10.0,
    "weight_decay": 100.0,
    "gradient_clip": 1e6,
    "initial_norm": NORM_START_MAX,
    "proposal_seconds": 86_400.0,
    "replay_tolerance": TOLERANCE_MAX,
    "sam_radius": SAM_RADIUS_MAX,
    "grokfast": GROKFAST_MAX,
}
# Least values of fields. With smaller values honest updates differ between processors by more than auditors may tolerate.
FLOATS_MIN: Final = {"inner_rate": INNER_RATE_MIN, "gradient_clip": CLIP_MIN, "replay_tolerance": TOLERANCE_MIN}

POSITIVE: Final = ("inner_rate", "gradient_clip", "outer_rate", "initial_norm", "proposal_seconds", "replay_tolerance")
SHARES: Final = ("inner_rate_floor", "outer_momentum", "feedback_decay", "audit_rate")  # fields with values from 0 to 1
DECAYS: Final = ("beta1", "beta2", "grokfast_decay")  # fields with values from 0 to less than 1
NOT_NEGATIVE: Final = ("weight_decay", "sam_radius", "grokfast")  # fields with values from 0


class AuditMode(enum.StrEnum):
    FULL = "full"  # Some voters with a worker re-execute each proposal before the vote, and vouch for it.
    SAMPLED = "sampled"  # Some proposals are drawn after the round and re-executed completely.
    OFF = "off"  # Without re-execution, only the aggregation rule protects the model from liars.


class FeedbackMemory(enum.StrEnum):
    """The treatment of the part of an update that compression dropped."""

    RESIDUAL = "residual"  # The trainer adds the dropped part to its next update, which is error feedback.
    ESTIMATES = "estimates"  # Every voter adds payloads to an estimate of the trainer's momentum, and aggregates the estimates.


class Precision(enum.StrEnum):
    """Precision of matrix products in local steps. Parameters, moments and sums are always float32."""

    FP32 = "fp32"
    # BF16 is several times faster on GPUs. Only single gradients can be audited: replays of several local steps differ by more
    # than a small attack.
    BF16 = "bf16"


class OuterOptimizerKind(enum.StrEnum):
    """The outer optimizer, which applies the aggregate of a round's updates to the model."""

    NESTEROV = "nesterov"  # SGD with Nesterov momentum (DiLoCo)
    SGD = "sgd"
    SIGN = "sign"  # Signum: each parameter moves by the sign of its momentum
    ADAMW = "adamw"  # AdamW on aggregated gradients: one step per round, and no inner optimizer


# Names of the vectors that an outer optimizer stores beside the parameters.
OUTER_SLOTS: Final[dict[OuterOptimizerKind, tuple[str, ...]]] = {
    OuterOptimizerKind.NESTEROV: ("momentum",),
    OuterOptimizerKind.SGD: (),
    OuterOptimizerKind.SIGN: ("momentum",),
    OuterOptimizerKind.ADAMW: ("first", "second"),
}
SLOW_GRADIENT: Final = "slow"  # name of Grokfast's vector, the last one of a job that has it


class InnerOptimizerKind(enum.StrEnum):
    """The inner optimizer, which computes local steps."""

    ADAMW = "adamw"
    MUON = "muon"  # Muon for matrices, and AdamW for the embedding and the norms


class InnerStatePolicy(enum.StrEnum):
    RESET = "reset"  # Moments start from zero in every round.
    KEEP = "keep"  # Moments continue from the trainer's last accepted proposal, which commits to them.


class AggregationRule(enum.StrEnum):
    """The rule that combines a round's accepted updates."""

    ARC_NNM_TRIM = "arc-nnm-trim"  # adaptive robust clipping, then nearest-neighbour mixing, then a trimmed sum
    CENTERED_CLIPPING = "centered-clipping"
    MEAN = "mean"  # MEAN is for audit 'full', since a single false update can move the mean anywhere.
    MEDIAN = "median"  # MEDIAN and all later rules are for comparison.
    TRIMMED_MEAN = "trimmed-mean"
    KRUM = "krum"
    GEOMETRIC_MEDIAN = "geometric-median"


# Parts of a codec's error that are useless to people: record names and byte positions.
_ON_THE_WIRE: Final = re.compile(r"\b[A-Z]\w+: (?=\w+: )| at byte \d+")


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationCounts:
    """Counts of changes that were made to a person's file to use it as the data of a job."""

    left_out: Count = 0  # lines of the file that the data omit
    shortened: Count = 0  # lines with a text longer than the context
    holding_stop: Count = 0  # responses that contain the stop text before their end: the model's answers will end there


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: Name
    """Name of the job for people."""
    objective: Name = "language"
    """Name of the loss that the job minimizes."""
    model: ModelSpec = field(default_factory=ModelSpec)
    """Sizes and kinds of layers of the model."""
    tokenizer: Digest | None = None
    """Blob of a byte-level BPE in the JSON of `tokenizers`. None: tokens are the 256 bytes."""
    base: ModelReference | None = None
    """Finished job whose model this one starts from. None: no base."""
    data: Digest | None = None
    """Blob of the data manifest (`training.corpus`). None: each trainer has its own text."""
    held_out_permille: Annotated[int, Between(0, 500)] = 100
    """Permille of the text, at its end, that is never used in training."""
    seed: Count = 0
    """Seed of the initial parameters and of the data order."""
    rounds: Annotated[int, Between(1, ROUNDS_MAX)] = ROUNDS
    """Rounds of the job. `--rounds N` sets it, too."""
    local_steps: Annotated[int, Between(1, LOCAL_STEPS_MAX)] = LOCAL_STEPS
    """Optimizer steps of a trainer in a round."""
    batch: Annotated[int, Between(1, BATCH_MAX)] = 8
    """Sequences in each local step of a trainer."""
    micro_batch: Annotated[int, Between(1, BATCH_MAX)] = 8
    """Sequences in a forward pass. It bounds memory, and changes the result by rounding only."""
    inner: InnerOptimizerKind = InnerOptimizerKind.ADAMW  # In most jobs `complete_fields` sets Muon.
    """Optimizer of local steps. Muon is for matrices between embedding and loss; AdamW computes the rest."""
    inner_state: InnerStatePolicy = InnerStatePolicy.RESET
    """`reset`: moments start from zero in each round. `keep`: they continue from the trainer's last accepted proposal."""
    inner_rate: float = INNER_RATE
    """Peak learning rate of the inner optimizer, or of an outer AdamW."""
    inner_rate_floor: float = 0.1
    """Share of `inner_rate` that is left in the last round."""
    warmup_rounds: Annotated[int, Between(0, 2**31)] = WARMUP_ROUNDS
    """First rounds, in which the learning rate grows linearly to `inner_rate`."""
    decay_rounds: Annotated[int, Between(0, ROUNDS_MAX)] | None = None
    """Last rounds, in which the learning rate falls linearly to its floor. None: all rounds after the warm-up."""
    beta1: float = 0.6
    """Decay of the inner optimizer's first moment. With `inner_state=reset` it must average over few steps only."""
    beta2: float = 0.95
    """Decay of the inner optimizer's second moment."""
    weight_decay: float = 0.1
    """Weight decay of the inner optimizer."""
    gradient_clip: float = 1.0
    """Largest norm of a gradient in a local step."""
    bits: Annotated[int, Between(1, 16)] = 1
    """Bits of each element in a payload after the opening rounds."""
    outer: OuterOptimizerKind = OuterOptimizerKind.NESTEROV
    """Optimizer that applies the aggregate: `nesterov` (DiLoCo), `sgd`, `sign`, or `adamw` for gradients."""
    outer_rate: float = 1.4
    """Learning rate of the outer optimizer. `sign` moves each parameter by it; AdamW uses `inner_rate` instead."""
    outer_momentum: float = 0.5
    """Momentum of `nesterov` and `sign`."""
    feedback_decay: float = 0.95
    """Decay of the error feedback in a round, or of the trainer's momentum with `memory=estimates`. 0: no error feedback."""
    byzantine_max: Annotated[int, Between(0, 200)] = 1
    """Faulty trainers that the aggregation rule tolerates; `mean` tolerates none. 0 declares that all trainers are honest."""
    rule: AggregationRule = AggregationRule.ARC_NNM_TRIM
    """Aggregation rule. `median`, `trimmed-mean`, `krum` and `geometric-median` are for comparison."""
    accepted_min: Annotated[int, Between(1, TRAINERS_MAX)] = 1
    """A round with fewer accepted proposals takes no step."""
    audit: AuditMode = AuditMode.FULL
    """Re-execution of proposals: `full` before the vote, `sampled` after the round, or `off`."""
    audit_rate: float = 1.0
    """Sampled audits: `audit_rate` · `auditors` is the mean number of replays of an accepted proposal."""
    auditors: Annotated[int, Between(1, AUDITORS_MAX)] = 2
    """Sampled audits: auditors of a drawn proposal."""
    audit_window: Annotated[int, Between(1, AUDIT_WINDOW_MAX)] = 3
    """Sampled audits: rounds in which a trainer keeps its buffers, and volunteers may audit a proposal."""
    replay_tolerance: float = TOLERANCE_MIN
    """Largest relative error of a replay. An update from other data has an error of about 1."""
    suspension_rounds: Annotated[int, Between(1, SUSPENSION_ROUNDS_MAX)] = 20
    """Rounds of a trainer's first suspension. Each later one is twice as long."""
    initial_norm: float = 32.0  # In later rounds it also selects one of two middle norms.
    """Median norm of updates before the first round. An update of 16 times the median is rejected."""
    proposal_seconds: float = 60.0
    """Longest wait for a round's proposals, in seconds. Peers adapt to less."""
    objective_settings: Annotated[bytes, Length(0, SETTINGS_BYTES_MAX)] = b""
    """The objective's own settings, encoded, if it has any."""
    memory: FeedbackMemory = FeedbackMemory.RESIDUAL
    """`residual`: trainers keep the dropped part of an update. `estimates`: all peers aggregate estimates of momenta."""
    uplink_mbit_min: Annotated[int, Between(1, UPLINK_MBIT_MAX)] = UPLINK_MBIT_MIN
    """Sampled audits: uplink that a trainer needs, in Mbit/s. With a slower one it may be suspended for withheld buffers."""
    precision: Precision = Precision.FP32
    """Precision of matrix products in local steps. Several local steps in `bf16` need `audit=off`."""
    initial_model: Digest | None = None
    """Blob of the initial parameters (`training.parameter_blob`), for a model that no job of this network trained."""
    licence: Name | None = None
    """Licence of the model, shown in its card. None: not named."""
    final_full_audit_rounds: Annotated[int, Between(0, ROUNDS_MAX)] = 0
    """Sampled audits: last rounds, whose proposals are re-executed before the vote. A later dispute would end too late."""
    compression_warmup_rounds: Annotated[int, Between(0, ROUNDS_MAX)] = 0
    """First rounds, whose payloads have 4 bits for each element."""
    preparation: PreparationCounts | None = None
    """Counts from the preparation of the data's file. None: the file was used unchanged."""
    sam_radius: float = added_field(0.0)  # after 0.3.0
    """Sharpness-aware steps (SAM): a second pass takes the gradient at a point this far along the first gradient. 0: no SAM."""
    grokfast: float = added_field(0.0)  # after 0.3.0
    """Grokfast: before the outer step, the slow gradient times this factor is added to the aggregate. 0: no Grokfast."""
    grokfast_decay: float = added_field(GROKFAST_DECAY)  # after 0.3.0
    """Decay of the slow gradient, a moving average of aggregates, with `grokfast` above 0."""

    @property
    def resolved_objective(self) -> Objective:
        """Return the objective of a valid job."""
        found = registry.find_objective(self.objective)
        assert found is not None, self.objective
        return found

    @property
    def decoded_settings(self) -> Any:
        """Return the objective's own settings; None if it has none. Raises `RemoteProtocolError` for malformed bytes."""
        kind = self.resolved_objective.settings_type
        if kind is None and self.objective_settings:
            what = f"objective {self.objective!r} has no settings"
            raise RemoteProtocolError("bad-job", f"{what}, but {len(self.objective_settings)} bytes were given")
        return None if kind is None else codec.decode(kind, self.objective_settings)

    def decode_declaration(self, encoded: bytes) -> Any:
        """Return the objective's own record in a proposal; None if it has none. Raises `RemoteProtocolError` if it is invalid."""
        kind = self.resolved_objective.declaration_type
        if kind is None and encoded:
            raise RemoteProtocolError(
                "bad-declaration", f"objective {self.objective!r} has no declarations, but {len(encoded)} bytes were given"
            )
        record = None if kind is None else codec.decode(kind, encoded)
        problem = None if kind is None else self.resolved_objective.declaration_problem(self, record)
        if problem:
            raise RemoteProtocolError("bad-declaration", problem)
        return record

    def declared_blobs(self, encoded: bytes) -> Mapping[bytes, int]:
        """Return the digests of the blobs that a proposal's declaration names, each with its most bytes.

        Raises as `decode_declaration`.
        """
        record = self.decode_declaration(encoded)
        return {} if record is None else self.resolved_objective.declared_blobs(self, record)

    @property
    def has_text(self) -> bool:
        """True if people can ask the job's model for text. This needs tokens for all bytes."""
        return self.resolved_objective.makes_text and (self.tokenizer is not None or self.model.vocabulary >= BYTES)

    @property
    def is_reexecuted(self) -> bool:
        return self.audit is not AuditMode.OFF

    @property
    def is_reexecuted_in_bf16(self) -> bool:
        """True if replays are in bf16. Programs of 0.3.0 refuse such a job."""
        return self.precision is Precision.BF16 and self.is_reexecuted

    @property
    def has_estimates(self) -> bool:
        """True if voters store an estimate of each trainer's momentum, and aggregate the estimates instead of updates."""
        return self.memory is FeedbackMemory.ESTIMATES

    def payload_bits(self, taken: int) -> int:
        """Return how many bits a level has in payloads of the round after `taken` applied rounds."""
        return OPENING_BITS if taken < self.compression_warmup_rounds else self.bits

    @property
    def commits_to_buffer(self) -> bool:
        """True if part of an update carries over to later rounds, so that a proposal commits to more than its payload."""
        return self.feedback_decay > 0

    @property
    def update_weight(self) -> float:
        """Weight of an update in the buffer that a trainer commits to. It is below one if the buffer is a momentum."""
        return 1 - self.feedback_decay if self.has_estimates else 1.0

    @property
    def sends_gradients(self) -> bool:
        """True if the update is a clipped gradient, and not the change by inner steps."""
        return self.outer is OuterOptimizerKind.ADAMW

    @property
    def rounds_audited(self) -> int:
        """Number of later rounds in which a proposal may be replayed: the audit window, and as many for a dispute."""
        return 2 * self.audit_window if self.audit is AuditMode.SAMPLED else 0

    @property
    def anchor_rounds(self) -> int:
        """Number of rounds from one anchor to the next. An anchor is a durable model to which a rollback may return."""
        return ANCHOR_ROUNDS_MAX if self.local_steps == 1 else ANCHOR_ROUNDS

    @property
    def usual_final_full_audit_rounds(self) -> int:
        """The value of `final_full_audit_rounds` that `train` sets, unless a person sets the field."""
        is_sampled = self.audit is AuditMode.SAMPLED and self.resolved_objective.needs_worker
        return min(CLOSING_ROUNDS, self.rounds // 3) if is_sampled else 0

    @property
    def usual_compression_warmup_rounds(self) -> int:
        """The value of `compression_warmup_rounds` that `train` sets in a job without base, unless a person sets the field.

        It is positive only with the measured settings: one bit with error feedback, Nesterov, and several local steps.
        """
        is_one_bit = self.bits == 1 and self.memory is FeedbackMemory.RESIDUAL
        is_measured = is_one_bit and self.outer is OuterOptimizerKind.NESTEROV and self.local_steps > 1
        return min(OPENING_ROUNDS, self.rounds) if is_measured else 0

    @property
    def keeps_inner_state(self) -> bool:
        return self.inner_state is InnerStatePolicy.KEEP and self.resolved_objective.needs_worker

    def problem(self) -> str | None:
        """Return why the specification is invalid, with the name of the invalid field; None if it is valid."""
        name = name_problem(self.name)
        if name:
            return f"its name {name}"
        licence = name_problem(self.licence) if self.licence is not None else None
        if licence:
            return f"its licence {licence}"
        if registry.find_objective(self.objective) is None:
            return f"unknown objective {self.objective!r}: choose one of {', '.join(registry.objective_names())}"
        # The sizes of the model come first: the other checks may list its tensors, and would not end for 2^31 layers.
        return self.model.problem() or self._number_problem() or self._own_problem() or self._combination_problem()

    def _own_problem(self) -> str | None:
        kind = self.resolved_objective
        try:
            problem = kind.spec_problem(self, self.decoded_settings)
        except RemoteProtocolError as error:
            return error.detail
        if problem:
            return problem
        tensors = len(kind.tensor_shapes(self, self.decoded_settings))
        if tensors > TENSORS_MAX:
            most = f"its {tensors} trained tensors are more than {TENSORS_MAX}"
            return f"{most}: use fewer layers, or train fewer of their matrices"
        return None

    def _number_problem(self) -> str | None:
        for name, value in FLOATS_MAX.items():
            if math.isnan(getattr(self, name)):
                return f"{name} must be a number up to {value:g}, not nan"
            if getattr(self, name) > value:
                return f"{name} must be at most {value:g}, not {getattr(self, name)}"
        for name in POSITIVE:
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                return f"{name} must be positive, not {getattr(self, name)}"
        for name, value in FLOATS_MIN.items():
            if getattr(self, name) < value:
                return f"{name} {getattr(self, name):g} would reject honest updates of other processors: use at least {value:g}"
        for name in SHARES:
            if not 0 <= getattr(self, name) <= 1:
                return f"{name} must be in 0..1, not {getattr(self, name)}"
        for name in DECAYS:
            if not 0 <= getattr(self, name) < 1:
                return f"{name} must be at least 0 and below 1, not {getattr(self, name)}"
        for name in NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                return f"{name} must be at least 0, not {getattr(self, name)}"
        for name in ("grokfast", "grokfast_decay"):
            if 0 < getattr(self, name) < GROKFAST_MIN:
                return f"{name} must be 0 or at least {GROKFAST_MIN:g}, not {getattr(self, name)}"
        return None

    def _combination_problem(self) -> str | None:
        if self.initial_model is not None and self.base is not None:
            return "both base and initial_model name a model to start from: give only one"
        if self.initial_model is not None and not self.resolved_objective.starts_from_parameters:
            way_out = "first train a language job or a job on responses from it, and start from that job"
            return f"objective {self.objective!r} cannot start from a folder with parameters: {way_out}"
        if self.bits not in BITS:
            return f"bits must be 1, 2, 4, 8 or 16, not {self.bits}"
        if self.bits > BITS_ROBUST_MAX and not self.resolved_objective.on_request:
            return f"bits {self.bits} is for jobs whose rounds have one trainer: use at most {BITS_ROBUST_MAX}"
        if self.compression_warmup_rounds > self.rounds:
            return (
                f"compression_warmup_rounds {self.compression_warmup_rounds} is more than rounds "
                f"{self.rounds}: use bits {OPENING_BITS} for all rounds"
            )
        if self.compression_warmup_rounds and self.bits >= OPENING_BITS:
            warmup = f"compression_warmup_rounds {self.compression_warmup_rounds}"
            return f"{warmup} has no effect with bits {self.bits}: leave it out"
        if self.bits >= 8 and self.commits_to_buffer:
            both = f"bits {self.bits} with feedback_decay {self.feedback_decay:g}"
            return f"{both} would commit to a buffer that repeats the payload: use feedback_decay 0, or fewer bits"
        # The default warm-up is valid in any job, so that a job of one round need not change it.
        if self.warmup_rounds > max(self.rounds, WARMUP_ROUNDS):
            return f"warmup_rounds {self.warmup_rounds} are more than the {self.rounds} rounds: shorten the warm-up"
        if self.decay_rounds is not None and self.warmup_rounds + self.decay_rounds > self.rounds:
            both = f"warmup_rounds {self.warmup_rounds} and decay_rounds {self.decay_rounds}"
            return f"{both} do not fit into {self.rounds} rounds: shorten one of them"
        if self.outer is OuterOptimizerKind.SIGN and self.outer_rate > SIGN_RATE_MAX:
            moves = f"outer 'sign' would move every parameter by outer_rate {self.outer_rate:g} in each round"
            return f"{moves}: use at most {SIGN_RATE_MAX:g}; {SIGN_RATE:g} is usual"
        if self.sends_gradients and self.local_steps != 1:
            return f"outer 'adamw' needs local_steps 1, not {self.local_steps}: use outer 'nesterov' for more"
        if self.sends_gradients and self.inner is not InnerOptimizerKind.ADAMW:
            return f"inner {self.inner.value!r} has no effect with outer 'adamw', which sends gradients: use outer 'nesterov'"
        if self.sends_gradients and self.inner_state is InnerStatePolicy.KEEP:
            return "inner_state 'keep' has no effect with outer 'adamw', which sends gradients: use inner_state 'reset'"
        return self._option_problem() or self._audit_problem() or self._memory_problem()

    def _option_problem(self) -> str | None:
        kind = self.resolved_objective
        if self.sam_radius and (kind.on_request or not kind.needs_worker):
            useless = f"sam_radius {self.sam_radius:g} has no effect in a job of the objective {self.objective!r}"
            return f"{useless}, which has no local steps: leave it out"
        if self.inner is InnerOptimizerKind.MUON and self.is_reexecuted and self.model.feed_forward == Experts.name:
            # The gradient jumps where a router changes its choice, and Muon enlarges the jump.
            pair = f"inner 'muon' with model.feed_forward {self.model.feed_forward!r} and audit {self.audit.value!r}"
            return f"{pair}: some honest re-executions differ by 0.005 and more; use inner 'adamw', or audit 'off'"
        if self.sam_radius and self.model.linear == TernaryLinear.name:
            # The second pass would compute the levels again, and honest replays would differ where a weight is beside an edge.
            pair = f"sam_radius {self.sam_radius:g} with model.linear {self.model.linear!r}"
            return f"{pair}: replays of this pair were not measured; leave one of them out"
        if self.grokfast and kind.on_request:
            of_client = f"grokfast {self.grokfast:g} in a job of the objective {self.objective!r}"
            return f"{of_client}, whose programs choose each outer step: leave it out"
        if self.grokfast_decay != GROKFAST_DECAY and not self.grokfast:
            return f"grokfast_decay {self.grokfast_decay:g} has no effect without grokfast: set grokfast above 0, or leave it out"
        return None

    def _audit_problem(self) -> str | None:
        is_sampled = self.audit is AuditMode.SAMPLED
        if self.is_reexecuted_in_bf16 and (problem := self._bf16_problem()):
            return f"precision 'bf16' with audit {self.audit.value!r} and {problem}, or audit 'off', or precision 'fp32'"
        if not is_sampled and self.uplink_mbit_min != UPLINK_MBIT_MIN:
            return f"uplink_mbit_min {self.uplink_mbit_min} has no effect with audit {self.audit.value!r}: leave it out"
        if not is_sampled and self.final_full_audit_rounds:
            return (
                f"final_full_audit_rounds {self.final_full_audit_rounds} has no effect with audit "
                f"{self.audit.value!r}: leave it out"
            )
        if self.final_full_audit_rounds > self.rounds:
            return (
                f"final_full_audit_rounds {self.final_full_audit_rounds} is more than rounds "
                f"{self.rounds}: use audit 'full' to re-execute all"
            )
        if is_sampled and self.keeps_inner_state:
            sent = "audit 'sampled' with inner_state 'keep' would send all moments to auditors"
            return f"{sent}: use inner_state 'reset', or audit 'full'"
        if is_sampled and self.has_estimates:
            return "audit 'sampled' with memory 'estimates' was not measured: use memory 'residual', or audit 'full' or 'off'"
        if is_sampled and self.audit_rate < AUDIT_RATE_MIN:
            nothing = f"audit 'sampled' with audit_rate {self.audit_rate:g} would audit nothing"
            return f"{nothing}: use at least {AUDIT_RATE_MIN:g}, or audit 'off'"
        if is_sampled and self.audit_bytes > AUDIT_BYTES_MAX:
            kept = f"audit 'sampled' would keep {self.audit_bytes / 2**30:.0f} GiB on each trainer's disk"
            return f"{kept}, more than {AUDIT_BYTES_MAX >> 30}: use a shorter audit_window or a smaller model"
        if self.object_bytes_max > BLOB_BYTES_MAX:
            size = f"its largest object has {self.object_bytes_max} bytes, and peers can download at most {BLOB_BYTES_MAX}"
            return f"{size}: use a smaller model, or inner_state 'reset'"
        return None

    def _bf16_problem(self) -> str | None:
        """Return the value with which replays in bf16 are impossible, and another value."""
        if not self.sends_gradients:
            steps = f"outer {self.outer.value!r}, local_steps {self.local_steps}"
            return f"{steps}: honest re-executions of such steps differ by 0.13, and small attacks by 0.011; use outer 'adamw'"
        if not self.resolved_objective.is_replayable_in_bf16:
            return f"objective {self.objective!r}: its gradients were not measured in bf16; use objective 'language'"
        for kind in self.model.layer_kinds:
            if not kind.is_replayable_in_bf16:
                usual = getattr(ModelSpec(), kind.place.value)
                return f"model.{kind.place.value} {kind.name!r}: its gradients were not measured in bf16; use {usual!r}"
        if self.sam_radius:
            return f"sam_radius {self.sam_radius:g}: its gradients were not measured in bf16; use sam_radius 0"
        if self.has_estimates:
            return "memory 'estimates': its buffers were not measured in bf16; use memory 'residual'"
        if self.commits_to_buffer:
            return f"feedback_decay {self.feedback_decay:g}: its buffers were not measured in bf16; use feedback_decay 0"
        if self.bits != BF16_BITS:
            return f"bits {self.bits}: payloads of as many bits were not measured in bf16; use bits {BF16_BITS}"
        if self.replay_tolerance < BF16_TOLERANCE:
            refused = f"replay_tolerance {self.replay_tolerance:g}: it would reject honest updates of other processors"
            return f"{refused}; use at least {BF16_TOLERANCE:g}"
        if self.audit is AuditMode.SAMPLED and self.batch * self.model.context < BF16_TOKENS_MIN:
            differ = f"batch {self.batch}: mean losses of few tokens differ between processors"
            return f"{differ}; use at least {-(-BF16_TOKENS_MIN // self.model.context)}"
        return None

    def _memory_problem(self) -> str | None:
        if not self.has_estimates:
            return None
        if self.feedback_decay == 1:
            return "memory 'estimates' with feedback_decay 1 would never learn from an update: use 0.8 or less"
        least = 2 * self.byzantine_max + 1
        if least > self.estimates_max:
            fit = f"only {self.estimates_max} estimates of {self.model.parameters} bytes fit into {ESTIMATES_BYTES_MAX >> 30} GiB"
            what = f"memory 'estimates' with byzantine_max {self.byzantine_max}"
            return f"{what} needs {least} trainers, but {fit}: use a smaller model"
        return None

    @property
    def trained_parameters(self) -> int:
        """Number of elements that limits count: of a job on request its own tensors, of other jobs the model's parameters.

        Other jobs may have a head beside the model, but release 0.3.0 does not count it.
        """
        if not self.resolved_objective.on_request:
            return self.model.parameters
        shapes = self.resolved_objective.tensor_shapes(self, self.decoded_settings)
        return sum(math.prod(shape) for _, shape in shapes)

    @property
    def object_bytes_max(self) -> int:
        """Bytes of the largest object that peers fetch: float32 parameters of a first model, or moments.

        Buffers and payloads have fewer bytes.
        """
        parameters, inner = 4 * self.trained_parameters, 8 + 8 * self.trained_parameters
        return inner if self.keeps_inner_state else parameters

    @property
    def estimates_max(self) -> int:
        """Largest number of trainers whose estimates voters can store."""
        return min(TRAINERS_MAX, ESTIMATES_BYTES_MAX // self.model.parameters)

    @property
    def audit_bytes(self) -> int:
        """Most bytes that a trainer keeps on its disk for sampled audits, over all rounds in reach of an audit.

        For each such round the trainer keeps the model, its buffer and the blobs of its declaration. Other peers keep only the
        models.
        """
        buffer = self.trained_parameters * self.commits_to_buffer
        return (self.model_bytes + buffer + self.resolved_objective.declared_bytes_max(self)) * (self.rounds_audited + 1)

    @property
    def outer_slots(self) -> tuple[str, ...]:
        """Names of the vectors that the model has beside its parameters."""
        return (*OUTER_SLOTS[self.outer], *((SLOW_GRADIENT,) if self.grokfast else ()))

    @property
    def model_bytes(self) -> int:
        """Bytes of the parameters, the outer optimizer's state, and the largest number of estimates."""
        held = self.estimates_max if self.has_estimates else 0
        return self.trained_parameters * (4 * (1 + len(self.outer_slots)) + held)

    def encode(self) -> bytes:
        return codec.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> JobSpec:
        """Return the specification in `data`. Raises `RemoteProtocolError` if it is invalid."""
        return _decoded(data, (*registry.objective_names(), *layer_names()))

    def validated(self) -> JobSpec:
        """Return this specification if it is valid. Raises `UserError` if it is invalid."""
        problem = self.problem()
        if not problem:
            try:
                return self.decode(self.encode())
            except RemoteProtocolError as error:
                problem = error.detail
        raise UserError(f"job {self.name[:NAME_CHARACTERS_MAX]!r}: {_ON_THE_WIRE.sub('', problem)}")


# The cache holds all specifications in the ledger, at most 364, because every block needs their terms. `known` are the registered
# objectives and layers. They are part of the cache's key, because features may register further ones between two calls.
@lru_cache(maxsize=DECODED_KEPT_MAX)
def _decoded(data: bytes, known: tuple[str, ...]) -> JobSpec:
    spec = codec.decode(JobSpec, data)
    problem = spec.problem()
    if problem:
        raise RemoteProtocolError("bad-job", problem)
    return spec


MUON_RATE: Final = 3e-2  # default rate of Muon: best of 0.003, 0.01, 0.02, 0.03 and 0.04 for the default job (decision 45)
SIGN_RATE: Final = 3e-3  # default rate of `sign`: best of 0.001, 0.003 and 0.01 for the default job
SIGN_RATE_MAX: Final = 0.1  # largest rate of `sign`: a larger step would exceed nearly all parameters of a model


# Values of fields for each preset. Fields that a person sets take precedence.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    # This preset sends few bytes: one bit for each element, after ten local steps. A job with a single trainer learns more with
    # outer rate 0.7.
    "local": {
        "local_steps": 10,
        "bits": 1,
        "outer": OuterOptimizerKind.NESTEROV,
        "outer_rate": 1.4,
        "outer_momentum": 0.5,
        "inner_state": InnerStatePolicy.RESET,
        "beta1": 0.6,
    },
    # This preset learns most per sample, since every gradient counts at once. Re-execution of every proposal would halve the
    # speed. Error feedback would add a part of an older model's gradient, and trimming drops too much of a few updates (decision
    # 44).
    "per-step": {
        "local_steps": 1,
        "rounds": 600,
        "warmup_rounds": 30,
        "bits": 4,
        "outer": OuterOptimizerKind.ADAMW,
        "inner_state": InnerStatePolicy.RESET,
        "beta1": 0.9,
        "feedback_decay": 0.0,
        "rule": AggregationRule.CENTERED_CLIPPING,
        "initial_norm": 1.0,  # `gradient_clip` bounds every gradient
        "audit": AuditMode.SAMPLED,
        "audit_rate": AUDIT_RATE,
        "auditors": 2,
        "audit_window": 10,  # ten rounds of half a second: time to fetch and replay the drawn proposals
    },
}

# Settings for `memory=estimates`: every voter stores an estimate of each trainer's momentum, and a payload changes the estimate
# with one bit for each element. AdamW has no momentum of its own, since trainers compute it. These settings are no preset: liars
# that know the loss can raise a language model's loss by 14 %. Such jobs need audits, and with audits `local` learns more.
ESTIMATES: Final[dict[str, Any]] = {
    "local_steps": 1,
    "rounds": 600,
    "warmup_rounds": 30,
    "bits": 1,
    "outer": OuterOptimizerKind.ADAMW,
    "inner_state": InnerStatePolicy.RESET,
    "inner_rate": 4e-3,
    "beta1": 0.0,
    "feedback_decay": 0.8,
    "rule": AggregationRule.ARC_NNM_TRIM,
    "initial_norm": 1.0,  # `gradient_clip` bounds every gradient
    "audit": AuditMode.OFF,
    "memory": FeedbackMemory.ESTIMATES,
}


def fields_set_by_estimates(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of the fields that memory `estimates` determines, with momentum and rate in jobs that send gradients."""
    of_gradients = ("beta1", "inner_rate") if fields.get("outer") == OuterOptimizerKind.ADAMW else ()
    return ("bits", "feedback_decay", "rule", *of_gradients)


def complete_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields that a person set, with derived values for fields that were left unset.

    - Gradients (outer `adamw`) have the bits, the rule and the share of warm-up rounds of `per-step`, and no error feedback.
      One bit gives all elements of a chunk the same size: AdamW's second moment would learn nothing (1-bit Adam,
      arXiv:2102.02888).
    - Estimates have levels of eight bits. Their momentum replaces AdamW's first moment.
    - `sign` and Muon have their own default rates.
    - Muon is the default if outer optimizer, memory and inner state have their defaults, for models without experts. It learns
      more in the same time (`benchmarks.value`). Muon with kept moments was not measured.
    - With payloads of eight bits there is no error feedback.
    - Audits of steps in bf16 have a larger tolerance.
    - With audit 'full' the rule is the mean. Every accepted update was verified, and a robust rule would drop some of them.
    """
    usual, unset = PRESETS["per-step"], JobSpec(name="usual")
    # Muon is the default if these fields have their defaults: Nesterov, no estimates, and new moments in each round.
    steps = ("outer", "memory", "inner_state")
    has_experts = fields.get("model", unset.model).feed_forward == Experts.name
    if not has_experts and all(fields.get(name, getattr(unset, name)) == getattr(unset, name) for name in steps):
        fields = {"inner": InnerOptimizerKind.MUON, **fields}
    rule = {"rule": AggregationRule.MEAN} if fields.get("audit", AuditMode.FULL) == AuditMode.FULL else {}
    rounds = min(usual["rounds"], fields.get("rounds", ROUNDS))
    follows: dict[tuple[str, Any], dict[str, Any]] = {
        ("outer", OuterOptimizerKind.ADAMW): {name: usual[name] for name in ("bits", "feedback_decay", "rule")}
        | {"warmup_rounds": usual["warmup_rounds"] * rounds // usual["rounds"]},
        ("outer", OuterOptimizerKind.SIGN): {"outer_rate": SIGN_RATE},
        ("inner", InnerOptimizerKind.MUON): {"inner_rate": MUON_RATE},
        ("memory", FeedbackMemory.ESTIMATES): {name: ESTIMATES[name] for name in fields_set_by_estimates(fields)},
    }
    said = [follows.get((name, fields.get(name)), {}) for name in ("outer", "inner", "memory")]
    is_exact = fields.get("bits") == 8 and fields.get("memory") != FeedbackMemory.ESTIMATES
    decay = {"feedback_decay": 0.0} if is_exact else {}
    sampled = {"audit_rate": AUDIT_RATE} if fields.get("audit") == AuditMode.SAMPLED else {}
    is_bf16_audited = fields.get("precision") == Precision.BF16 and fields.get("audit") != AuditMode.OFF
    tolerance = {"replay_tolerance": BF16_TOLERANCE} if is_bf16_audited else {}
    return said[0] | said[1] | said[2] | rule | sampled | decay | tolerance | dict(fields)
