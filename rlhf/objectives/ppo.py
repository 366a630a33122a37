"""The objective `ppo`: what a job says, what a proposal declares, what a step is made of, how far a policy may go. No torch."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

from ledger.jobs import ModelReference
from protocol import codec
from protocol.codec import Between, Count, Digest, Length
from rlhf.moderation import blocklist
from rlhf.objectives.rule_rewards import RULES, RewardRule
from training.objectives.objective import Declaration, InnerStep, JobSpecProtocol, Objective, RejectionReason, Shape
from training.transformer import (
    BYTES,
    BYTES_WITH_END,
    FIRST_TOKEN_VECTOR,
    HEAD,
    PARAMETERS_TUNED_MAX,
    VOCABULARY_MAX,
    tensor_shapes,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from training.data.token_sequences import TokenizedText

MODULE: Final = "rlhf"
ROLE: Final = "rlhf"
START_COMMAND: Final = "rlhf start"  # what a person types to start a plan
VALUE_HEAD: Final = f"{HEAD}value"
RULE_PREFIX: Final = "rule:"  # begins a reward that is a function of the program
MODEL_REWARD: Final = "model"  # the reward that a finished job of the objective `reward` has learned
TOKEN_BYTES: Final = 2
LENGTH_MAX: Final = 2 ** (8 * TOKEN_BYTES) - 1  # of a response, which is written in as many bytes
EPOCHS_MAX: Final = 64
GAE_LAMBDA: Final = 0.95  # λ of GAE, unless a job says another
CLIP_RANGE: Final = 0.2  # of the ratio, and of the value in its own units, unless a job says another
GROUP_MAX: Final = 1_024  # responses to one prompt: a mean of more is hardly a better one
ROLLOUT_TOKENS_MAX: Final = 8 << 20  # of one trainer and round, prompts too: a worker holds 48 bytes for each, 400 MB
PLACES_MAX: Final = 4 << 20  # responses, once for each epoch: a worker holds 20 bytes for each, and a loss is made of each
MILLIONTHS: Final = 1_000_000
FIGURE_MAX: Final = 2**53 - 1
WEIGHT_MAX: Final = 1e3  # of any figure of a job: far above anything useful
NATS_MIN: Final = 1e-3  # of a bound in nats a response: below it a policy is its reference

Figure = Annotated[int, Between(-FIGURE_MAX, FIGURE_MAX)]  # in millionths
Share = Annotated[int, Between(0, MILLIONTHS)]  # in millionths


# The KL controller ------------------------------------------------------------------------------------------------------
#
# How far a policy may go from its reference. Exact: every peer finds the same bits.
#
# | a job's term | after a round, with the median k1 of its accepted proposals as nats a response |
# |---|---|
# | `kl_target` | β of the next round is β · (1 + e), where e = K · (nats / target − 1), within ±1/5 |
# | `kl_stop` | at so many nats or more the job ends |
#
# This is the controller of Ziegler et al. 2019 (arXiv:1909.08593, section 2.2), whose bound of 1/5 is on nats / target − 1.

BILLIONTHS: Final = 10**9  # of one β, in score a nat
# K. They have 1/10, for thousands of iterations, where a job here has tens. With 1 the distance swings by half of the target.
GAIN: Final = Fraction(1, 4)
CHANGE_MAX: Final = Fraction(1, 5)  # of β, in a round: one round's sample of responses says little
# The least β is so large that a fifth of it is not lost where it is rounded down; the largest is the largest that a job may say.
BETA_MIN, BETA_MAX = 1_000, 1_000 * BILLIONTHS


@dataclass(frozen=True, slots=True)
class KlControllerState:
    """What the rounds of a job with `kl_target` go by, once one has accepted something."""

    beta: Annotated[int, Between(BETA_MIN, BETA_MAX)]  # in billionths


def nats_per_response(k1: int, responses: int) -> Fraction:
    """A response's, of a sum in millionths."""
    return Fraction(k1, MILLIONTHS * responses)


def next_beta(beta: int, of_round: Fraction, target: float) -> int:
    """In billionths, as `beta`. `of_round` is in nats, as the target."""
    change = GAIN * (of_round / Fraction(target) - 1)
    return _bounded(math.floor(beta * (1 + max(-CHANGE_MAX, min(CHANGE_MAX, change)))))


def first_beta(said: float) -> int:
    return _bounded(round(Fraction(said) * BILLIONTHS))


def current_beta(steering: bytes, said: float) -> float:
    """In score a nat; `said` is what the job says, for rounds before the first that accepted something."""
    return codec.decode(KlControllerState, steering).beta / BILLIONTHS if steering else said


def exceeds_kl_stop(of_round: Fraction, stop: float | None) -> bool:
    return stop is not None and of_round >= Fraction(stop)


def lower_median(values: Sequence[int]) -> int:
    """Of an even number the lower one."""
    return sorted(values)[(len(values) - 1) // 2]


def _bounded(beta: int) -> int:
    return max(BETA_MIN, min(BETA_MAX, beta))


# What a job says --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """What responses a job has."""

    responses: int
    tokens_max: int  # of one response
    vocabulary: int
    stop: int | None

    @property
    def bytes_max(self) -> int:
        return TOKEN_BYTES * self.responses * (1 + self.tokens_max)


class PolicyAlgorithm(enum.StrEnum):
    PPO = "ppo"  # a value head says how good each token is
    GRPO = "grpo"  # several responses to one prompt are compared with one another; no value head


class PromptSourceKind(enum.StrEnum):
    TEXT = "text"  # windows of the job's text
    SET = "set"  # those of the preferences from which the reward model has learned


class AdvantageScale(enum.StrEnum):
    NONE = "none"
    DEVIATION = "deviation"  # prompts count more whose responses score alike


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoSettings:
    """What a `ppo` job says beside what all jobs say.

    A round is one iteration. `local_steps` are `epochs` passes over the round's responses, `batch` of them in each inner step.
    """

    reward: Annotated[str, Length(1, 64)]  # rule:NAME, or model
    # Of windows of the job's text; of a set's prompts at most, where longer ones lose their beginnings; without both of token 0.
    prompt_tokens: Annotated[int, Between(1, VOCABULARY_MAX)] = 16
    response_tokens: Annotated[int, Between(1, LENGTH_MAX)] = 32  # at most
    stop_token: Annotated[int, Between(0, VOCABULARY_MAX - 1)] | None = 10  # token that ends a response: a newline
    epochs: Annotated[int, Between(1, EPOCHS_MAX)] = 4
    beta: float = 0.05  # of the KL penalty, in score a nat
    # Off the score of a response without the stop token. At 1 a policy learns to stop, and little else.
    unfinished_penalty: float = 0.1
    score_clip: float = 10.0
    gae_lambda: float = GAE_LAMBDA  # λ of GAE
    clip_range: float = CLIP_RANGE  # of the ratio, and of the value in its own units
    # Within which gradients fall to zero at these edges; 0 is the textbook, and in a narrow one rounding grows.
    clip_ramp: float = 0.4
    value_weight: float = 0.1
    reward_model: ModelReference | None = None  # where `reward` is model
    algorithm: PolicyAlgorithm = PolicyAlgorithm.PPO
    group_size: Annotated[int, Between(2, GROUP_MAX)] = 8  # grpo: responses to each prompt
    group_scale: AdvantageScale = AdvantageScale.NONE  # grpo: by what a group's advantages are divided
    # In nats a response. The controller steers beta to it (`rlhf.objectives.ppo`); without it beta stays.
    kl_target: float | None = None
    kl_stop: float | None = None  # nats a response, at which the job ends; none: it has all its rounds
    prompts: PromptSourceKind = PromptSourceKind.TEXT
    # Blob of a blocklist (`rlhf.moderation.blocklist`). Prompts with a listed word are left out, responses with one are not
    # shown.
    blocklist: Digest | None = None

    def settings_problem(self) -> str | None:
        if (self.reward == MODEL_REWARD) != (self.reward_model is not None):
            return f"reward {self.reward!r} {'needs' if self.reward == MODEL_REWARD else 'reads no'} reward_model"
        if self.reward != MODEL_REWARD and self.reward_rule is None:
            return f"reward {self.reward!r} is none of {', '.join(RULE_PREFIX + known for known in RULES)}"
        if self.prompts is PromptSourceKind.SET and self.reward_model is None:
            return f"prompts 'set' are those that a reward model's pairs have, and reward {self.reward!r} has none"
        for field in ("beta", "unfinished_penalty", "score_clip", "clip_range", "clip_ramp", "value_weight"):
            if not 0 <= getattr(self, field) <= WEIGHT_MAX:
                return f"{field} must lie in 0..{WEIGHT_MAX:g}, is {getattr(self, field)}"
        for field in ("kl_target", "kl_stop"):
            nats = getattr(self, field)
            if nats is not None and not NATS_MIN <= nats <= WEIGHT_MAX:
                return f"{field} must lie in {NATS_MIN:g}..{WEIGHT_MAX:g}, is {nats}"
        if self.kl_target is not None and not self.beta:
            return "beta 0 cannot be steered to kl_target: take a larger beta, or leave kl_target out"
        return None if 0 <= self.gae_lambda <= 1 else f"gae_lambda must lie in 0..1, is {self.gae_lambda}"

    @property
    def reward_rule(self) -> RewardRule | None:
        """None: the reward is no rule of the program."""
        return RULES.get(self.reward.removeprefix(RULE_PREFIX)) if self.reward.startswith(RULE_PREFIX) else None


@dataclass(frozen=True, slots=True)
class RolloutDeclaration:
    """The declaration of a `ppo` proposal: its responses, and what they sum up to."""

    blob: Digest  # `rlhf.objectives.rollouts`
    tokens: Count  # of all responses
    unfinished: Count  # responses without the stop token
    k1: Figure  # Σ log π − log π_ref over all tokens
    score: Figure  # Σ of the rewards of all responses, without penalties
    distinct: Share  # `rlhf.objectives.rollouts.distinct_2`
    # of length and score: `rlhf.objectives.rollouts.length_score_correlation`
    correlation: Annotated[int, Between(-MILLIONTHS, MILLIONTHS)]
    blocked: Count = 0  # responses that hold a listed word


@dataclass(frozen=True, slots=True)
class RolloutBatches:
    """What all inner steps of a round are made of. A row is a response; a place is one turn of a row in an inner step."""

    order: npt.NDArray[np.int64]  # (places,): the row
    share: npt.NDArray[np.float32]  # (places,): tokens that a response has on average in the inner step of the place
    x: npt.NDArray[np.int64]  # (rows, S): prompt and response, padded behind; the last column is left out
    begin: npt.NDArray[np.int64]  # (rows,): how long the prompt is
    tokens: npt.NDArray[np.int64]  # (rows, T): the response; all that follow have this shape
    mask: npt.NDArray[np.bool_]
    old: npt.NDArray[np.float32]  # log-probability
    advantages: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    returns: npt.NDArray[np.float32]


ROLLOUT: Final = RejectionReason("rollout", "it trained on responses that the model has not given")
FIGURES: Final = RejectionReason("figures", "its figures are not those of its responses")


class PpoObjective(Objective):
    """Proximal policy optimization: responses that the policy gives, scored, against a reference."""

    name = "ppo"
    start_command = START_COMMAND
    description = "a reward for a model's own responses, within reach of the model it began as"
    module, version = MODULE, 1
    role = ROLE
    settings_type = PpoSettings
    reads_text = False  # prompts may come from a text, but no trainer has one of its own
    refers_to_first = True
    declaration_type = RolloutDeclaration
    rejection_reasons = (ROLLOUT, FIGURES)
    required_objectives = ("reward", "reward-mean")  # `rlhf.objectives.supervised_objectives`, which knows this module
    loss_unit = "(clipped surrogate)"  # and a part of the value's loss: it has no unit

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        problem = settings.settings_problem()
        if problem:
            return str(problem)
        if not job.is_reexecuted:
            return f"audit {job.audit.value!r} would let everybody invent responses: take 'full' or 'sampled'"
        if settings.blocklist is not None and job.tokenizer is None and job.model.vocabulary < BYTES:
            return f"a vocabulary of {job.model.vocabulary} tokens says no text, in which words could be: leave blocklist out"
        if settings.prompts is PromptSourceKind.SET and job.data is not None:
            return "its prompts are of a set, so it reads no text: leave out data"
        vocabulary, context = job.model.vocabulary, job.model.context
        wanted = settings.reward_rule.vocabulary if settings.reward_rule else None
        if wanted not in (None, vocabulary):
            return f"reward {settings.reward!r} is for a vocabulary of {wanted} tokens, the model has {vocabulary}"
        if job.tokenizer is None and vocabulary > BYTES_WITH_END:
            return f"model.vocabulary {vocabulary} needs a tokenizer: name a base that has one"
        both = f"prompt_tokens {settings.prompt_tokens} and response_tokens {settings.response_tokens}"
        if settings.prompt_tokens + settings.response_tokens > context:
            return f"{both} are more than the model's context of {context} tokens: shorten one of them"
        if settings.stop_token is not None and settings.stop_token >= vocabulary:
            return f"stop_token {settings.stop_token} is no token of a vocabulary of {vocabulary}"
        if job.local_steps % settings.epochs:
            return f"local_steps {job.local_steps} must be a multiple of epochs {settings.epochs}"
        responses = self.responses_per_round(job, settings)
        if settings.algorithm is PolicyAlgorithm.GRPO and responses % settings.group_size:
            return f"{responses} responses a round are no groups of {settings.group_size}: take another group_size"
        tokens = responses * (settings.prompt_tokens + settings.response_tokens)
        if tokens > ROLLOUT_TOKENS_MAX:
            return f"{tokens} tokens in prompts and responses are more than {ROLLOUT_TOKENS_MAX}: take fewer or shorter ones"
        if responses * settings.epochs > PLACES_MAX:
            return f"{responses} responses in {settings.epochs} epochs are more than {PLACES_MAX}: take fewer of one of them"
        if job.model.parameters + 2 * job.model.width > PARAMETERS_TUNED_MAX:
            return f"{job.model.parameters} parameters and two vectors beside them are more than {PARAMETERS_TUNED_MAX}"
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        # Attention over equal tokens gives the same for any number of them. Where the prompt is a token that responses have, too,
        # the model would take `0` for `0 0`: of the toy's best policies some are then out of reach.
        has_prompts = job.data is not None or settings.prompts is PromptSourceKind.SET
        heads = [VALUE_HEAD] * (settings.algorithm is PolicyAlgorithm.PPO) + [FIRST_TOKEN_VECTOR] * (not has_prompts)
        return [*tensor_shapes(job.model), *((name, (job.model.width,)) for name in heads)]

    def required_model(self, job: JobSpecProtocol) -> ModelReference | None:
        own: PpoSettings = job.decoded_settings
        return own.reward_model

    def required_files(self, job: JobSpecProtocol) -> Mapping[bytes, int]:
        own: PpoSettings = job.decoded_settings
        return {} if own.blocklist is None else {own.blocklist: blocklist.BYTES_MAX}

    def stop_token(self, job: JobSpecProtocol) -> int | None:
        own: PpoSettings = job.decoded_settings
        return own.stop_token

    def moderates_output(self, job: JobSpecProtocol) -> bool:
        own: PpoSettings = job.decoded_settings
        return own.blocklist is not None

    def withholds_output(self, job: JobSpecProtocol, files: Mapping[bytes, Path], prompt: bytes, text: bytes) -> bool:
        own: PpoSettings = job.decoded_settings
        return own.blocklist is not None and blocklist.read_blocklist(files[own.blocklist]).blocks_response(prompt, text)

    def responses_per_round(self, job: JobSpecProtocol, settings: PpoSettings) -> int:
        """Of one trainer in a round."""
        return job.local_steps // settings.epochs * job.batch

    def rollout_limits(self, job: JobSpecProtocol, settings: PpoSettings) -> RolloutLimits:
        return RolloutLimits(
            self.responses_per_round(job, settings), settings.response_tokens, job.model.vocabulary, settings.stop_token
        )

    def declaration_problem(self, job: JobSpecProtocol, record: Any) -> str | None:
        bounds = self.rollout_limits(job, job.decoded_settings)
        if not bounds.responses <= record.tokens <= bounds.responses * bounds.tokens_max:
            return f"{record.tokens} tokens in {bounds.responses} responses"
        for name in ("unfinished", "blocked"):
            if getattr(record, name) > bounds.responses:
                return f"{getattr(record, name)} of {bounds.responses} {name}"
        return None

    def declared_blobs(self, job: JobSpecProtocol, record: Any) -> Mapping[bytes, int]:
        bounds = self.rollout_limits(job, job.decoded_settings)
        return {record.blob: TOKEN_BYTES * (bounds.responses + record.tokens)}

    def declared_bytes_max(self, job: JobSpecProtocol) -> int:
        return self.rollout_limits(job, job.decoded_settings).bytes_max

    def next_controller_state(self, job: JobSpecProtocol, before: bytes, accepted: Sequence[RolloutDeclaration]) -> bytes:
        own: PpoSettings = job.decoded_settings
        if own.kl_target is None or not accepted:
            return before
        beta = codec.decode(KlControllerState, before).beta if before else first_beta(own.beta)
        of_round = nats_per_response(lower_median([record.k1 for record in accepted]), self.responses_per_round(job, own))
        return codec.encode(KlControllerState(next_beta(beta, of_round, own.kl_target)))

    def draw_examples(
        self, job: JobSpecProtocol, step: InnerStep, count: int, data: TokenizedText, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """The places of the step."""
        import numpy as np

        return np.arange(step.number * count, (step.number + 1) * count, dtype=np.int64)

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Responses and what is known of them, as `rlhf.pytorch.ppo.ppo_loss` takes them."""
        assert declaration is not None and isinstance(declaration.step_data, RolloutBatches)
        known = declaration.step_data
        of_rows = (known.x, known.begin, known.tokens, known.mask, known.old, known.advantages, known.values, known.returns)
        return (known.share[drawn], *(array[known.order[drawn]] for array in of_rows))


def in_millionths(value: float) -> int:
    """Of a sum; what is no number is the largest."""
    if not math.isfinite(value):
        return FIGURE_MAX
    return max(-FIGURE_MAX, min(FIGURE_MAX, round(value * MILLIONTHS)))


PPO: Final = PpoObjective()
