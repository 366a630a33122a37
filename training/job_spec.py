"""What a job is: the values every peer must agree on before the first round."""

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
from protocol.codec import Between, Count, Digest, Length
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
from training.transformer import BYTES, ModelSpec, layer_names

ROUNDS_MAX = 1_000_000  # a job is to end some day: years at a round a minute
LOCAL_STEPS_MAX = 10_000  # one round is to end too, and to be re-executed
BATCH_MAX = 65_536  # sequences; their offsets are drawn one by one
DECODED_KEPT_MAX: Final = 256  # specifications: each is some kilobytes
SETTINGS_BYTES_MAX: Final = 4_096  # of an objective's own record: hashes and numbers; what is larger is a blob
BITS: Final = (1, 2, 4, 8)  # of a level; whole ones to a byte
LOCAL_STEPS: Final = 10  # unless said otherwise
# One bit gives all elements of a chunk one size; those of a new model's first updates are farthest from one (decision 95).
OPENING_BITS: Final = 4
OPENING_ROUNDS: Final = 3
ROUNDS: Final = 60  # unless said otherwise: a minute or two of the demo
CLOSING_ROUNDS: Final = 10  # a lie comes so many rounds before the end at least (decision 123); they cost as with audit 'full'
AUDIT_RATE: Final = 0.125  # of sampled audits, unless said otherwise: with two auditors a machine replays a quarter of a round
ANCHOR_ROUNDS: Final = 8  # from one durable model to the next: a rollback undoes seven rounds more than it has to at most
ANCHOR_ROUNDS_MAX: Final = 16  # of one step: a disk may take longer for a durable model than such a round takes
WARMUP_ROUNDS: Final = 2  # unless said otherwise, however short the job is
AUDIT_BYTES_MAX: Final = 64 << 30  # a volunteer's disk; a job must not fill it unasked
ESTIMATES_BYTES_MAX: Final = 4 << 30  # of one model, a byte a parameter and trainer; a voter's disk has two or three of them
SUSPENSION_ROUNDS_MAX: Final = 100_000
# Honest replays on other processors differ by 5e-6, some by 1e-4, at the least rates by 5e-4: less would suspend honest trainers.
TOLERANCE_MIN: Final = 1e-3
TOLERANCE_MAX: Final = 0.1  # doing nothing at all has relative error 1, half of the work less than that

# A job may rest on `challenge` alone; at less, whether anything at all can be drawn is decided by rounding.
AUDIT_RATE_MIN: Final = 1e-9
INNER_RATE: Final = 3e-3  # of AdamW
# Steps so small that float32 parameters hardly hold them: processors differ by half of what is tolerated with Muon at 1e-7.
INNER_RATE_MIN: Final = 1e-6
# Squares of gradients that are cut shorter are subnormal numbers, of which processors differ in what becomes zero.
CLIP_MIN: Final = 1e-6

NORM_START_MAX: Final = 1e9  # its square is computed exactly by every voter; no float may overflow on the way


# Far above anything useful; beyond them float32 parameters overflow, and what is decided would be no model.
FLOATS_MAX: Final = {
    "inner_rate": 10.0,
    "outer_rate": 10.0,
    "weight_decay": 100.0,
    "gradient_clip": 1e6,
    "initial_norm": NORM_START_MAX,
    "proposal_seconds": 86_400.0,
    "replay_tolerance": TOLERANCE_MAX,
}
# Below them honest work differs between processors by more than auditors may allow.
FLOATS_MIN: Final = {"inner_rate": INNER_RATE_MIN, "gradient_clip": CLIP_MIN, "replay_tolerance": TOLERANCE_MIN}


class AuditMode(enum.StrEnum):
    FULL = "full"  # some voters with a worker re-execute each proposal before the vote, and vouch for it
    SAMPLED = "sampled"  # some proposals are drawn after the round, and replayed whole
    OFF = "off"  # nobody re-executes: the aggregation rule alone stands against liars


class FeedbackMemory(enum.StrEnum):
    """What is remembered of a trainer's update that its payload could not say."""

    RESIDUAL = "residual"  # the trainer adds what was left unsaid to its next update: error feedback
    ESTIMATES = "estimates"  # every voter adds payloads to an estimate of what the trainer means, and aggregates the estimates


class Precision(enum.StrEnum):
    """Of matrix products in a trainer's own steps. Parameters, moments and sums are float32 in both."""

    FP32 = "fp32"
    BF16 = "bf16"  # on GPUs several times as fast; replays differ by more than a small lie, so nobody audits


class OuterOptimizerKind(enum.StrEnum):
    """How the aggregated update moves the model."""

    NESTEROV = "nesterov"  # SGD with Nesterov momentum (DiLoCo)
    SGD = "sgd"
    SIGN = "sign"  # by the sign of the momentum
    ADAMW = "adamw"  # on aggregated gradients: one step per round, and no inner optimizer


# Names of the vectors that it keeps beside the parameters.
OUTER_SLOTS: Final[dict[OuterOptimizerKind, tuple[str, ...]]] = {
    OuterOptimizerKind.NESTEROV: ("momentum",),
    OuterOptimizerKind.SGD: (),
    OuterOptimizerKind.SIGN: ("momentum",),
    OuterOptimizerKind.ADAMW: ("first", "second"),
}


class InnerOptimizerKind(enum.StrEnum):
    """What a trainer's own steps are made with."""

    ADAMW = "adamw"
    MUON = "muon"  # for matrices; AdamW for the embedding and the norms


class InnerStatePolicy(enum.StrEnum):
    RESET = "reset"  # moments start from zero in every round
    KEEP = "keep"  # they go on from the trainer's last accepted proposal, which commits to them


class AggregationRule(enum.StrEnum):
    """How a round's accepted updates become one."""

    ARC_NNM_TRIM = "arc-nnm-trim"  # adaptive robust clipping, nearest-neighbour mixing, trimmed sum
    CENTERED_CLIPPING = "centered-clipping"
    MEAN = "mean"  # where every update is re-executed before the vote: one liar that nobody replays moves it anywhere
    MEDIAN = "median"  # this one and those below only for comparison
    TRIMMED_MEAN = "trimmed-mean"
    KRUM = "krum"
    GEOMETRIC_MEDIAN = "geometric-median"


_ON_THE_WIRE: Final = re.compile(r"\b[A-Z]\w+: (?=\w+: )| at byte \d+")  # records and places: they mean nothing to a person


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparationCounts:
    """Counts of a person's file before it became the data of a job."""

    left_out: Count = 0  # lines
    shortened: Count = 0  # lines with a text that was longer than the context
    holding_stop: Count = 0  # responses that hold the stop text, where answers of the model are cut


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    name: Name
    objective: Name = "language"
    model: ModelSpec = field(default_factory=ModelSpec)
    tokenizer: Digest | None = None  # blob of a byte-level BPE in tokenizers' JSON; None: the 256 bytes
    base: ModelReference | None = None  # the finished job whose model this one starts from; None: it starts anew
    data: Digest | None = None  # blob of the data manifest (`training.corpus`); None: each trainer's own text
    held_out_permille: Annotated[int, Between(0, 500)] = 100  # the last part of the text, never trained on
    seed: Count = 0  # of the initialisation and of the sampler
    rounds: Annotated[int, Between(1, ROUNDS_MAX)] = ROUNDS
    local_steps: Annotated[int, Between(1, LOCAL_STEPS_MAX)] = LOCAL_STEPS  # H, inner steps per round
    batch: Annotated[int, Between(1, BATCH_MAX)] = 8  # sequences per inner step and trainer
    # Sequences per forward pass: bounds memory, not the result beyond rounding.
    micro_batch: Annotated[int, Between(1, BATCH_MAX)] = 8
    inner: InnerOptimizerKind = InnerOptimizerKind.ADAMW  # `complete_fields` makes it Muon in most jobs
    inner_state: InnerStatePolicy = InnerStatePolicy.RESET
    inner_rate: float = INNER_RATE  # peak learning rate of the inner optimizer, or of an outer AdamW
    inner_rate_floor: float = 0.1  # fraction of the peak at the last round
    warmup_rounds: Annotated[int, Between(0, 2**31)] = WARMUP_ROUNDS
    decay_rounds: Annotated[int, Between(0, ROUNDS_MAX)] | None = None  # the last ones, linearly; None: all after the warm-up
    beta1: float = 0.6  # an inner state that starts anew each round must not average over more than a few steps
    beta2: float = 0.95
    weight_decay: float = 0.1
    gradient_clip: float = 1.0  # largest gradient norm of an inner step
    bits: Annotated[int, Between(1, 8)] = 1  # of each element, in a payload after the opening rounds
    outer: OuterOptimizerKind = OuterOptimizerKind.NESTEROV
    outer_rate: float = 1.4  # not of AdamW, which follows `inner_rate`; of sign, by how much each parameter moves
    outer_momentum: float = 0.5  # of nesterov and sign
    feedback_decay: float = 0.95  # of the error feedback e; with estimates of the trainer's momentum v
    byzantine_max: Annotated[int, Between(0, 200)] = 1  # b: lying trainers the aggregation tolerates
    rule: AggregationRule = AggregationRule.ARC_NNM_TRIM
    accepted_min: Annotated[int, Between(1, TRAINERS_MAX)] = 1  # fewer accepted proposals: the round takes no step
    audit: AuditMode = AuditMode.FULL
    audit_rate: float = 1.0  # sampled: times `auditors` is how many replays each accepted proposal gets on average
    auditors: Annotated[int, Between(1, AUDITORS_MAX)] = 2
    audit_window: Annotated[int, Between(1, AUDIT_WINDOW_MAX)] = 3  # rounds that buffers are kept for, and volunteers may audit
    replay_tolerance: float = TOLERANCE_MIN  # of ‖Δ‖; wrong data differ by about 1
    suspension_rounds: Annotated[int, Between(1, SUSPENSION_ROUNDS_MAX)] = 20  # of a first lie, then doubled; also of records
    initial_norm: float = 32.0  # the median accepted norm before the first round; decides between two later
    proposal_seconds: float = 60.0  # longest wait for a round's proposals; peers adapt below it
    # Encoding of the objective's own record, if it has one.
    objective_settings: Annotated[bytes, Length(0, SETTINGS_BYTES_MAX)] = b""
    memory: FeedbackMemory = FeedbackMemory.RESIDUAL
    # Mbit/s: with sampled audits, a trainer with a slower uplink may be suspended as if it withheld its buffers.
    uplink_mbit_min: Annotated[int, Between(1, UPLINK_MBIT_MAX)] = UPLINK_MBIT_MIN
    precision: Precision = Precision.FP32
    # Blob of the initial parameters (`training.parameter_blob`), if these are no job's model.
    initial_model: Digest | None = None
    licence: Name | None = None  # under which the model may be used; None: not named
    # Sampled: the last rounds, whose proposals are re-executed before the vote: a dispute of theirs would end too late to help.
    final_full_audit_rounds: Annotated[int, Between(0, ROUNDS_MAX)] = 0
    # The first rounds, whose payloads say `OPENING_BITS` of every element.
    compression_warmup_rounds: Annotated[int, Between(0, ROUNDS_MAX)] = 0
    preparation: PreparationCounts | None = None  # of a set from a file; None: no file was changed

    @property
    def resolved_objective(self) -> Objective:
        """The objective of a valid job."""
        found = registry.find_objective(self.objective)
        assert found is not None, self.objective
        return found

    @property
    def decoded_settings(self) -> Any:
        """The objective's own record; None if it has none. Raises `RemoteProtocolError` for other bytes."""
        kind = self.resolved_objective.settings_type
        if kind is None and self.objective_settings:
            what = f"objective {self.objective!r} has no settings"
            raise RemoteProtocolError("bad-job", f"{what}, {len(self.objective_settings)} bytes were given")
        return None if kind is None else codec.decode(kind, self.objective_settings)

    def decode_declaration(self, encoded: bytes) -> Any:
        """The objective's own record in a proposal; None if it has none. Raises `RemoteProtocolError` for one that is unsound."""
        kind = self.resolved_objective.declaration_type
        if kind is None and encoded:
            raise RemoteProtocolError(
                "bad-declaration", f"objective {self.objective!r} has none, {len(encoded)} bytes were given"
            )
        record = None if kind is None else codec.decode(kind, encoded)
        problem = None if kind is None else self.resolved_objective.declaration_problem(self, record)
        if problem:
            raise RemoteProtocolError("bad-declaration", problem)
        return record

    def declared_blobs(self, encoded: bytes) -> Mapping[bytes, int]:
        """Digest -> size at most, in bytes, of each blob that a proposal's declaration names. Raises as `decode_declaration`."""
        record = self.decode_declaration(encoded)
        return {} if record is None else self.resolved_objective.declared_blobs(self, record)

    @property
    def has_text(self) -> bool:
        """Whether people can ask its model for text: its tokens say every byte."""
        return self.resolved_objective.makes_text and (self.tokenizer is not None or self.model.vocabulary >= BYTES)

    @property
    def is_reexecuted(self) -> bool:
        return self.audit is not AuditMode.OFF

    @property
    def has_estimates(self) -> bool:
        """Whether voters hold an estimate of each trainer's momentum, and aggregate those."""
        return self.memory is FeedbackMemory.ESTIMATES

    def payload_bits(self, taken: int) -> int:
        """Of each level in every payload of the round after so many."""
        return OPENING_BITS if taken < self.compression_warmup_rounds else self.bits

    @property
    def commits_to_buffer(self) -> bool:
        """Whether something of an update goes on in later rounds, so that a proposal commits to more than its payload."""
        return self.feedback_decay > 0

    @property
    def update_weight(self) -> float:
        """By what an update counts in the buffer that a trainer commits to: a part of its momentum, or one."""
        return 1 - self.feedback_decay if self.has_estimates else 1.0

    @property
    def sends_gradients(self) -> bool:
        """Whether the update is a clipped gradient, and not what inner steps have changed."""
        return self.outer is OuterOptimizerKind.ADAMW

    @property
    def rounds_audited(self) -> int:
        """For how many rounds after its own a proposal may still be replayed: a challenge comes, and then its dispute ends."""
        return 2 * self.audit_window if self.audit is AuditMode.SAMPLED else 0

    @property
    def anchor_rounds(self) -> int:
        """From one model that a rollback may go to, and that is durable, to the next."""
        return ANCHOR_ROUNDS_MAX if self.local_steps == 1 else ANCHOR_ROUNDS

    @property
    def usual_final_full_audit_rounds(self) -> int:
        """How many `train` sets, unless a person does."""
        is_sampled = self.audit is AuditMode.SAMPLED and self.resolved_objective.needs_worker
        return min(CLOSING_ROUNDS, self.rounds // 3) if is_sampled else 0

    @property
    def usual_compression_warmup_rounds(self) -> int:
        """How many `train` sets in a job that starts anew, unless a person does: one bit, several local steps were measured."""
        is_one_bit = self.bits == 1 and self.memory is FeedbackMemory.RESIDUAL
        is_measured = is_one_bit and self.outer is OuterOptimizerKind.NESTEROV and self.local_steps > 1
        return min(OPENING_ROUNDS, self.rounds) if is_measured else 0

    @property
    def keeps_inner_state(self) -> bool:
        return self.inner_state is InnerStatePolicy.KEEP and self.resolved_objective.needs_worker

    def problem(self) -> str | None:
        """What is wrong with it, naming the value; None if nothing is."""
        name = name_problem(self.name)
        if name:
            return f"its name {name}"
        licence = name_problem(self.licence) if self.licence is not None else None
        if licence:
            return f"its licence {licence}"
        if registry.find_objective(self.objective) is None:
            return f"objective {self.objective!r} is none that this program knows: {', '.join(registry.objective_names())}"
        layers = self.model.layers_problem()
        if layers:
            return layers
        return self._number_problem() or self._own_problem() or self._combination_problem() or self.model.problem()

    def _own_problem(self) -> str | None:
        try:
            return self.resolved_objective.spec_problem(self, self.decoded_settings)
        except RemoteProtocolError as error:
            return error.detail

    def _number_problem(self) -> str | None:
        for name, value in FLOATS_MAX.items():
            if not getattr(self, name) <= value:  # also if it is not a number
                return f"{name} must be at most {value:g}, is {getattr(self, name)}"
        for name in ("inner_rate", "gradient_clip", "outer_rate", "initial_norm", "proposal_seconds", "replay_tolerance"):
            if not (math.isfinite(getattr(self, name)) and getattr(self, name) > 0):
                return f"{name} must be positive, not {getattr(self, name)}"
        for name, value in FLOATS_MIN.items():
            if getattr(self, name) < value:
                return f"{name} {getattr(self, name):g} would call honest work of other processors false: take {value:g} at least"
        for name in ("inner_rate_floor", "outer_momentum", "feedback_decay", "audit_rate"):
            if not 0 <= getattr(self, name) <= 1:
                return f"{name} must lie in 0..1, not {getattr(self, name)}"
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                return f"{name} must be at least 0 and below 1, is {getattr(self, name)}"
        if not self.weight_decay >= 0:
            return f"weight_decay must not be negative, is {self.weight_decay}"
        return None

    def _combination_problem(self) -> str | None:
        if self.initial_model is not None and self.base is not None:
            return "both base and start name a model to start from: say one"
        if self.initial_model is not None and not self.resolved_objective.starts_from_parameters:
            way_out = "train a language job on them, or learn responses, and start from that job"
            return f"objective {self.objective!r} starts from no parameters of its own: {way_out}"
        if self.bits not in BITS:
            return f"bits must be 1, 2, 4 or 8, not {self.bits}"
        if self.compression_warmup_rounds > self.rounds:
            return (
                f"compression_warmup_rounds {self.compression_warmup_rounds} is more than rounds "
                f"{self.rounds}: take bits {OPENING_BITS} for all"
            )
        if self.compression_warmup_rounds and self.bits >= OPENING_BITS:
            whole = f"{OPENING_BITS} bits an element"
            return (
                f"compression_warmup_rounds {self.compression_warmup_rounds} gains nothing where all "
                f"rounds say {whole} or more: leave it out"
            )
        if self.bits == 8 and self.commits_to_buffer:
            both = f"bits 8 with feedback_decay {self.feedback_decay:g}"
            return f"{both} would commit to a buffer that repeats the payload: take feedback_decay 0, or fewer bits"
        # A job of one round keeps the usual warm-up: nobody has to say that it needs none.
        if self.warmup_rounds > max(self.rounds, WARMUP_ROUNDS):
            return f"warmup_rounds {self.warmup_rounds} are more than the {self.rounds} rounds: shorten the warm-up"
        if self.decay_rounds is not None and self.warmup_rounds + self.decay_rounds > self.rounds:
            both = f"warmup_rounds {self.warmup_rounds} and decay_rounds {self.decay_rounds}"
            return f"{both} do not fit into {self.rounds} rounds: shorten one of them"
        if self.outer is OuterOptimizerKind.SIGN and self.outer_rate > SIGN_RATE_MAX:
            moves = f"outer 'sign' would move every parameter by outer_rate {self.outer_rate:g} in each round"
            return f"{moves}: take {SIGN_RATE_MAX:g} at most, {SIGN_RATE:g} is usual"
        if self.sends_gradients and self.local_steps != 1:
            return f"outer 'adamw' needs local_steps 1, not {self.local_steps}: take outer 'nesterov' for more"
        if self.sends_gradients and self.inner is not InnerOptimizerKind.ADAMW:
            return f"inner {self.inner.value!r} would do nothing: outer 'adamw' sends gradients; take outer 'nesterov'"
        if self.sends_gradients and self.inner_state is InnerStatePolicy.KEEP:
            return "inner_state 'keep' would keep nothing: outer 'adamw' sends gradients; take inner_state 'reset'"
        return self._audit_problem() or self._memory_problem()

    def _audit_problem(self) -> str | None:
        is_sampled = self.audit is AuditMode.SAMPLED
        if self.precision is Precision.BF16 and self.is_reexecuted:
            differ = "honest replays in bf16 differ by .13 of an update, and small lies by .011"
            return f"precision 'bf16' with audit {self.audit.value!r}: {differ}; take audit 'off', or precision 'fp32'"
        if not is_sampled and self.uplink_mbit_min != UPLINK_MBIT_MIN:
            return f"uplink_mbit_min {self.uplink_mbit_min} says nothing with audit {self.audit.value!r}: leave it out"
        if not is_sampled and self.final_full_audit_rounds:
            return (
                f"final_full_audit_rounds {self.final_full_audit_rounds} says nothing with audit "
                f"{self.audit.value!r}: leave it out"
            )
        if self.final_full_audit_rounds > self.rounds:
            return (
                f"final_full_audit_rounds {self.final_full_audit_rounds} is more than rounds "
                f"{self.rounds}: take audit 'full' to re-execute all"
            )
        if is_sampled and self.keeps_inner_state:
            return "audit 'sampled' with inner_state 'keep' would show all moments: take inner_state 'reset', or audit 'full'"
        if is_sampled and self.has_estimates:
            return "audit 'sampled' with memory 'estimates' was not measured: take memory 'residual', or audit 'full' or 'off'"
        if is_sampled and self.audit_rate < AUDIT_RATE_MIN:
            nothing = f"audit 'sampled' with audit_rate {self.audit_rate:g} would audit nothing"
            return f"{nothing}: take {AUDIT_RATE_MIN:g} at least, or audit 'off', which says so"
        if is_sampled and self.audit_bytes > AUDIT_BYTES_MAX:
            kept = f"audit 'sampled' would keep {self.audit_bytes / 2**30:.0f} GiB on each trainer's disk"
            return f"{kept}, more than {AUDIT_BYTES_MAX >> 30}: take a shorter audit_window or a smaller model"
        if self.object_bytes_max > BLOB_BYTES_MAX:
            size = f"its largest object has {self.object_bytes_max} bytes, and others can get {BLOB_BYTES_MAX} at most"
            return f"{size}: take a smaller model, or inner_state 'reset'"
        return None

    def _memory_problem(self) -> str | None:
        if not self.has_estimates:
            return None
        if self.feedback_decay == 1:
            return "memory 'estimates' with feedback_decay 1 would never learn of an update: take 0.8, or less"
        least = 2 * self.byzantine_max + 1
        if least > self.estimates_max:
            fit = f"{self.estimates_max} estimates of {self.model.parameters} bytes are within {ESTIMATES_BYTES_MAX >> 30} GiB"
            what = f"memory 'estimates' with byzantine_max {self.byzantine_max}"
            return f"{what} needs {least} trainers, and {fit}: take a smaller model"
        return None

    @property
    def object_bytes_max(self) -> int:
        """Of the largest object that others fetch: float32 parameters that the job may start from, or moments.

        Buffers and payloads have fewer bytes.
        """
        parameters, inner = 4 * self.model.parameters, 8 + 8 * self.model.parameters
        return inner if self.keeps_inner_state else parameters

    @property
    def estimates_max(self) -> int:
        """Of how many trainers the voters hold estimates at most."""
        return min(TRAINERS_MAX, ESTIMATES_BYTES_MAX // self.model.parameters)

    @property
    def audit_bytes(self) -> int:
        """What a trainer keeps on its disk at most where audits are sampled: of every round that may be asked for the model, its
        buffer and what its declaration names. Others keep the models.
        """
        buffer = self.model.parameters * self.commits_to_buffer
        return (self.model_bytes + buffer + self.resolved_objective.declared_bytes_max(self)) * (self.rounds_audited + 1)

    @property
    def model_bytes(self) -> int:
        """The parameters, with the outer optimizer's state and as many estimates as there may be beside them."""
        held = self.estimates_max if self.has_estimates else 0
        return self.model.parameters * (4 * (1 + len(OUTER_SLOTS[self.outer])) + held)

    def encode(self) -> bytes:
        return codec.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> JobSpec:
        """A valid specification, or `RemoteProtocolError`."""
        return _decoded(data, (*registry.objective_names(), *layer_names()))

    def validated(self) -> JobSpec:
        """Itself, or `UserError`."""
        problem = self.problem()
        if not problem:
            try:
                return self.decode(self.encode())
            except RemoteProtocolError as error:
                problem = error.detail
        raise UserError(f"job {self.name[:NAME_CHARACTERS_MAX]!r}: {_ON_THE_WIRE.sub('', problem)}")


# Every block asks for the terms of the jobs that the state has, 164 at most. Features may add objectives and layers between two
# calls.
@lru_cache(maxsize=DECODED_KEPT_MAX)
def _decoded(data: bytes, known: tuple[str, ...]) -> JobSpec:
    spec = codec.decode(JobSpec, data)
    problem = spec.problem()
    if problem:
        raise RemoteProtocolError("bad-job", problem)
    return spec


MUON_RATE: Final = 3e-2  # of .003, .01, .02, .03 and .04 the best for the default job: decision 45
SIGN_RATE: Final = 3e-3  # of .001, .003 and .01 the best for the default job
SIGN_RATE_MAX: Final = 0.1  # no parameter of a model is much larger


# Settings that go together. What a person sets beside one comes after it.
PRESETS: Final[dict[str, dict[str, Any]]] = {
    # Few bytes: one bit of everything, after ten steps of one's own. At an outer rate of .7 one trainer alone learns more.
    "local": {
        "local_steps": 10,
        "bits": 1,
        "outer": OuterOptimizerKind.NESTEROV,
        "outer_rate": 1.4,
        "outer_momentum": 0.5,
        "inner_state": InnerStatePolicy.RESET,
        "beta1": 0.6,
    },
    # Most progress per sample: every gradient of every trainer counts at once. Re-executing all of them would halve the speed.
    # Error feedback would say the rest of a gradient of an older model, and trimming drops too much of a few: decision 44.
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
        "initial_norm": 1.0,  # no gradient is longer than `gradient_clip`
        "audit": AuditMode.SAMPLED,
        "audit_rate": AUDIT_RATE,
        "auditors": 2,
        "audit_window": 10,  # rounds of half a second: what is drawn has to be fetched and replayed in them
    },
}

# Of a gradient's momentum everybody holds an estimate, which one bit an element moves. The momentum is the trainers' own, so that
# AdamW has none. No preset: liars that read the loss raise a language model's by .14 of it, so jobs like this need audits, with
# which `local` learns more.
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
    "initial_norm": 1.0,  # no gradient is longer than `gradient_clip`
    "audit": AuditMode.OFF,
    "memory": FeedbackMemory.ESTIMATES,
}


def fields_set_by_estimates(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """The fields that follow from memory `estimates`. A job that sends gradients has momentum and rate that were measured."""
    of_gradients = ("beta1", "inner_rate") if fields.get("outer") == OuterOptimizerKind.ADAMW else ()
    return ("bits", "feedback_decay", "rule", *of_gradients)


def complete_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that a person has set, with what follows from them for those that were left unset.

    One bit gives all elements of a chunk one size, of which AdamW's second moment learns nothing (1-bit Adam, arXiv:2102.02888);
    an estimate has levels of eight bits, and its momentum takes the place of AdamW's first moment.
    Payloads of eight bits leave nothing for error feedback.
    The warm-up of gradients is that of `per-step`, of fewer rounds the same share. `sign` and Muon have rates of their own.
    Jobs with usual steps have Muon, which learns more in the same time (`benchmarks.value`). With kept moments it was not tried.

    Where every proposal is re-executed before the vote, the rule is the plain mean: what is accepted was computed, and a robust
    rule would leave a part of it out.
    """
    usual, unset = PRESETS["per-step"], JobSpec(name="usual")
    steps = ("outer", "memory", "inner_state")  # Nesterov's outer step of updates without estimates, inner moments begin anew
    if all(fields.get(name, getattr(unset, name)) == getattr(unset, name) for name in steps):
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
    return said[0] | said[1] | said[2] | rule | sampled | decay | dict(fields)
