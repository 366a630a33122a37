"""The objective `ppo`: its settings, the declaration of a proposal, the data of a step, and the KL controller. No torch."""

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
START_COMMAND: Final = "rlhf start"  # the command that starts a plan
VALUE_HEAD: Final = f"{HEAD}value"
RULE_PREFIX: Final = "rule:"  # prefix of rewards that are functions of this program
MODEL_REWARD: Final = "model"  # name of the reward by a reward model, which is the last model of a finished job
TOKEN_BYTES: Final = 2
LENGTH_MAX: Final = 2 ** (8 * TOKEN_BYTES) - 1  # tokens of a response: its length is written in `TOKEN_BYTES`
EPOCHS_MAX: Final = 64
GAE_LAMBDA: Final = 0.95  # default λ of GAE
CLIP_RANGE: Final = 0.2  # default clip range of the ratio of probabilities, and of the value in the value's own units
GROUP_MAX: Final = 1_024  # most responses to one prompt: more would hardly improve the estimate of their mean score
# Most tokens per trainer and round, including prompts: a worker needs 48 bytes per token, 400 MB in all.
ROLLOUT_TOKENS_MAX: Final = 8 << 20
# Most responses times epochs: a worker needs 20 bytes for each of these places, and computes a loss for it.
PLACES_MAX: Final = 4 << 20
MILLIONTHS: Final = 1_000_000
FIGURE_MAX: Final = 2**53 - 1
WEIGHT_MAX: Final = 1e3  # largest weight or bound in the settings: far above useful values
WEIGHTS: Final = ("beta", "unfinished_penalty", "score_clip", "clip_range", "clip_ramp", "value_weight")
DISTANCES: Final = ("kl_target", "kl_stop")
NATS_MIN: Final = 1e-3  # least bound of a distance in nats per response: below it a policy equals its reference

Figure = Annotated[int, Between(-FIGURE_MAX, FIGURE_MAX)]  # in millionths; may be negative
Share = Annotated[int, Between(0, MILLIONTHS)]  # in millionths


# The KL controller ------------------------------------------------------------------------------------------------------
#
# The controller bounds the distance of a policy from its reference. Its arithmetic is exact, so all peers compute the same bits.
# After a round, d is the median of k1 over the accepted proposals, in nats per response.
#
# | setting | effect |
# |---|---|
# | `kl_target` | β of the next round is β · (1 + e), where e = K · (d / target − 1), within ±1/5 |
# | `kl_stop` | the job ends if d ≥ `kl_stop` |
#
# The controller follows Ziegler et al. 2019 (arXiv:1909.08593, section 2.2), where the bound ±1/5 applies to d / target − 1.

BILLIONTHS: Final = 10**9  # unit of β: billionths of score per nat
# K of the table above. Ziegler et al. use 1/10 for thousands of iterations, but a job here has tens of rounds. With K = 1 the
# distance oscillates by half the target.
GAIN: Final = Fraction(1, 4)
CHANGE_MAX: Final = Fraction(1, 5)  # largest relative change of β per round, since the responses of one round are a small sample
# Bounds of β in billionths. At the minimum, a change by a fifth still survives rounding down. The maximum is `WEIGHT_MAX`.
BETA_MIN, BETA_MAX = 1_000, 1_000 * BILLIONTHS


@dataclass(frozen=True, slots=True)
class KlControllerState:
    """The state of the KL controller of a job with `kl_target`. It exists after the first round with an accepted proposal."""

    beta: Annotated[int, Between(BETA_MIN, BETA_MAX)]  # β in billionths of score per nat


def nats_per_response(k1: int, responses: int) -> Fraction:
    """Convert a sum of k1 in millionths to nats per response."""
    return Fraction(k1, MILLIONTHS * responses)


def next_beta(beta: int, of_round: Fraction, target: float) -> int:
    """Return β of the next round in billionths.

    `of_round` is the measured distance and `target` the wanted one, in nats per response.
    """
    change = GAIN * (of_round / Fraction(target) - 1)
    return _bounded(math.floor(beta * (1 + max(-CHANGE_MAX, min(CHANGE_MAX, change)))))


def first_beta(said: float) -> int:
    return _bounded(round(Fraction(said) * BILLIONTHS))


def current_beta(steering: bytes, said: float) -> float:
    """Return β in score per nat.

    `steering` is the encoded state of the controller. Before the first one exists, β is `said`, the job's setting.
    """
    return codec.decode(KlControllerState, steering).beta / BILLIONTHS if steering else said


def exceeds_kl_stop(of_round: Fraction, stop: float | None) -> bool:
    return stop is not None and of_round >= Fraction(stop)


def lower_median(values: Sequence[int]) -> int:
    """Return the median of an odd number of values, or the lower of the two middle values."""
    return sorted(values)[(len(values) - 1) // 2]


def _bounded(beta: int) -> int:
    return max(BETA_MIN, min(BETA_MAX, beta))


# Settings ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RolloutLimits:
    """Limits of a trainer's responses in a round."""

    responses: int
    tokens_max: int  # tokens per response
    vocabulary: int
    stop: int | None

    @property
    def bytes_max(self) -> int:
        return TOKEN_BYTES * self.responses * (1 + self.tokens_max)


class PolicyAlgorithm(enum.StrEnum):
    PPO = "ppo"  # A value head estimates the return at each token.
    GRPO = "grpo"  # The advantage of a response is relative to other responses to its prompt. There is no value head.


class PromptSourceKind(enum.StrEnum):
    TEXT = "text"  # Prompts are windows of the base job's text.
    SET = "set"  # Prompts are those of the reward model's training set.


class AdvantageScale(enum.StrEnum):
    NONE = "none"
    DEVIATION = "deviation"  # Advantages are divided by their group's deviation, so prompts with similar scores weigh more.


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoSettings:
    """Settings of a `ppo` job.

    A round is one iteration. Its `local_steps` are `epochs` passes over the round's responses, with `batch` responses per step.
    """

    reward: Annotated[str, Length(1, 64)]
    """Name of a rule (`rule:NAME`), or `model`."""
    prompt_tokens: Annotated[int, Between(1, VOCABULARY_MAX)] = 16
    """Tokens of a prompt: the length of a window of text, or the most tokens of a set's prompt, which loses its beginning."""
    response_tokens: Annotated[int, Between(1, LENGTH_MAX)] = 32
    """Most tokens of a response."""
    stop_token: Annotated[int, Between(0, VOCABULARY_MAX - 1)] | None = 10
    """Token that ends a response; 10 is a newline. None: each response has its full length."""
    epochs: Annotated[int, Between(1, EPOCHS_MAX)] = 4
    """Passes over a round's responses. `local_steps` is a multiple of it."""
    beta: float = 0.05
    """Weight of the KL penalty, in score per nat."""
    unfinished_penalty: float = 0.1
    """Score that a response without the stop token loses. At 1 a policy learns little else than to stop."""
    score_clip: float = 10.0
    """Largest absolute score that counts."""
    gae_lambda: float = GAE_LAMBDA
    """λ of generalized advantage estimation."""
    clip_range: float = CLIP_RANGE
    """Clip range of the ratio, and of the value in its own units."""
    clip_ramp: float = 0.4
    """Width beyond the clip range in which gradients fall to zero. 0 is the original PPO; narrow ramps amplify rounding."""
    value_weight: float = 0.1
    """Weight of the value's loss."""
    reward_model: ModelReference | None = None
    """Reward model, if `reward` is `model`."""
    algorithm: PolicyAlgorithm = PolicyAlgorithm.PPO
    """`ppo` with a value head, or `grpo` with advantages relative to other responses to the same prompt."""
    group_size: Annotated[int, Between(2, GROUP_MAX)] = 8
    """GRPO: responses to each prompt."""
    group_scale: AdvantageScale = AdvantageScale.NONE
    """GRPO: divisor of a group's advantages. `deviation` gives more weight to prompts with similar scores."""
    kl_target: float | None = None
    """Distance from the reference, in nats per response, to which the controller steers β. None: β is constant."""
    kl_stop: float | None = None
    """Distance from the reference, in nats per response, that ends the job. None: the job has all its rounds."""
    prompts: PromptSourceKind = PromptSourceKind.TEXT
    """`text`: windows of the base's text. `set`: prompts of the reward model's preference set."""
    blocklist: Digest | None = None
    """Blob of a blocklist (`rlhf.moderation.blocklist`). Blocked responses get the lowest score and are not shown."""

    def settings_problem(self) -> str | None:
        if (self.reward == MODEL_REWARD) != (self.reward_model is not None):
            return f"reward {self.reward!r} {'needs' if self.reward == MODEL_REWARD else 'reads no'} reward_model"
        if self.reward != MODEL_REWARD and self.reward_rule is None:
            return f"unknown reward {self.reward!r}: choose one of {', '.join(RULE_PREFIX + known for known in RULES)}"
        if self.prompts is PromptSourceKind.SET and self.reward_model is None:
            return f"prompts 'set' needs a reward model, whose pairs have the prompts, and reward {self.reward!r} has none"
        for field in WEIGHTS:
            if not 0 <= getattr(self, field) <= WEIGHT_MAX:
                return f"{field} must be in 0..{WEIGHT_MAX:g}, not {getattr(self, field)}"
        for field in DISTANCES:
            nats = getattr(self, field)
            if nats is not None and not NATS_MIN <= nats <= WEIGHT_MAX:
                return f"{field} must be in {NATS_MIN:g}..{WEIGHT_MAX:g}, not {nats}"
        if self.kl_target is not None and not self.beta:
            return "beta 0 cannot be adapted to kl_target: use a larger beta, or leave kl_target out"
        return None if 0 <= self.gae_lambda <= 1 else f"gae_lambda must be in 0..1, not {self.gae_lambda}"

    @property
    def reward_rule(self) -> RewardRule | None:
        """The rule that `reward` names, or None if it names no known rule."""
        return RULES.get(self.reward.removeprefix(RULE_PREFIX)) if self.reward.startswith(RULE_PREFIX) else None


@dataclass(frozen=True, slots=True)
class RolloutDeclaration:
    """The declaration of a `ppo` proposal: its responses and their figures."""

    blob: Digest  # digest of the responses, encoded as in `rlhf.objectives.rollouts`
    tokens: Count  # number of tokens in all responses
    unfinished: Count  # number of responses without the stop token
    k1: Figure  # sum of log π − log π_ref over all tokens
    score: Figure  # sum of the rewards of all responses, without penalties
    distinct: Share  # distinct-2 of the responses (`rlhf.objectives.rollouts.distinct_2`)
    # Correlation of length and score (`rlhf.objectives.rollouts.length_score_correlation`).
    correlation: Annotated[int, Between(-MILLIONTHS, MILLIONTHS)]
    blocked: Count = 0  # responses that the blocklist blocks


@dataclass(frozen=True, slots=True)
class RolloutBatches:
    """Data of all inner steps of a round. A row is a response. A place is one use of a row in an inner step."""

    order: npt.NDArray[np.int64]  # (places,): row at each place
    share: npt.NDArray[np.float32]  # (places,): mean number of tokens per response in the inner step that has the place
    x: npt.NDArray[np.int64]  # (rows, S): prompt and response, padded at the end, without the last column
    begin: npt.NDArray[np.int64]  # (rows,): length of each prompt
    tokens: npt.NDArray[np.int64]  # (rows, T): tokens of each response; the next arrays have this shape, too
    mask: npt.NDArray[np.bool_]
    old: npt.NDArray[np.float32]  # log-probability of each token under the round's first model
    advantages: npt.NDArray[np.float32]
    values: npt.NDArray[np.float32]
    returns: npt.NDArray[np.float32]


ROLLOUT: Final = RejectionReason("rollout", "it trained on responses that the model did not generate")
FIGURES: Final = RejectionReason("figures", "its declared statistics do not match its responses")


class PpoObjective(Objective):
    """Proximal policy optimization (Schulman et al. 2017, arXiv:1707.06347) with a KL penalty against a reference."""

    name = "ppo"
    start_command = START_COMMAND
    description = "a reward for a model's own responses, within reach of the model it began as"
    module, version = MODULE, 1
    role = ROLE
    settings_type = PpoSettings
    reads_text = False  # Trainers have no local texts. Prompts may come from a text that all share.
    refers_to_first = True
    declaration_type = RolloutDeclaration
    rejection_reasons = (ROLLOUT, FIGURES)
    # Objectives of the reward model, in `rlhf.objectives.supervised_objectives`, which imports this module.
    required_objectives = ("reward", "reward-mean")
    loss_unit = "(clipped surrogate)"  # The loss also contains the weighted value loss, and has no unit.

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        problem = settings.settings_problem()
        if problem:
            return str(problem)
        if not job.is_reexecuted:
            return f"audit {job.audit.value!r} would let trainers invent responses: use 'full' or 'sampled'"
        if settings.blocklist is not None and job.tokenizer is None and job.model.vocabulary < BYTES:
            return f"a model with a vocabulary of {job.model.vocabulary} tokens generates no text: leave blocklist out"
        if settings.prompts is PromptSourceKind.SET and job.data is not None:
            return "its prompts come from a preference set: leave data out"
        vocabulary, context = job.model.vocabulary, job.model.context
        wanted = settings.reward_rule.vocabulary if settings.reward_rule else None
        if wanted not in (None, vocabulary):
            return f"reward {settings.reward!r} needs a vocabulary of {wanted} tokens, but the model has {vocabulary}"
        if job.tokenizer is None and vocabulary > BYTES_WITH_END:
            return f"model.vocabulary {vocabulary} needs a tokenizer: use a base that has one"
        both = f"prompt_tokens {settings.prompt_tokens} and response_tokens {settings.response_tokens}"
        if settings.prompt_tokens + settings.response_tokens > context:
            return f"{both} are more than the model's context of {context} tokens: shorten one of them"
        if settings.stop_token is not None and settings.stop_token >= vocabulary:
            return f"stop_token {settings.stop_token} is not in the vocabulary of {vocabulary} tokens"
        if job.local_steps % settings.epochs:
            return f"local_steps {job.local_steps} must be a multiple of epochs {settings.epochs}"
        responses = self.responses_per_round(job, settings)
        if settings.algorithm is PolicyAlgorithm.GRPO and responses % settings.group_size:
            return f"{responses} responses per round are not divisible by group_size {settings.group_size}: change one of them"
        tokens = responses * (settings.prompt_tokens + settings.response_tokens)
        if tokens > ROLLOUT_TOKENS_MAX:
            return f"{tokens} tokens in prompts and responses are more than {ROLLOUT_TOKENS_MAX}: use fewer or shorter responses"
        if responses * settings.epochs > PLACES_MAX:
            return f"{responses} responses in {settings.epochs} epochs are more than {PLACES_MAX}: use fewer responses or epochs"
        if job.model.parameters + 2 * job.model.width > PARAMETERS_TUNED_MAX:
            return f"{job.model.parameters} parameters and two vectors beside them are more than {PARAMETERS_TUNED_MAX}"
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        # Attention gives the same result for any number of equal tokens. In the toy model, token 0 is the prompt and also a token
        # of responses. Without a vector for the first token, the model could not distinguish `0` from `0 0`, nor learn some
        # optimal policies.
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
        """Return the number of responses of one trainer in a round."""
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
        """Return the indices of the step's places in `RolloutBatches.order`. A place is one use of a response in a step."""
        import numpy as np

        return np.arange(step.number * count, (step.number + 1) * count, dtype=np.int64)

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return the arguments of `rlhf.pytorch.ppo.ppo_loss` for the places with the indices `drawn` (`draw_examples`)."""
        assert declaration is not None and isinstance(declaration.step_data, RolloutBatches)
        known = declaration.step_data
        of_rows = (known.x, known.begin, known.tokens, known.mask, known.old, known.advantages, known.values, known.returns)
        return (known.share[drawn], *(array[known.order[drawn]] for array in of_rows))


def in_millionths(value: float) -> int:
    """Convert a sum to clamped millionths. NaN and infinities become `FIGURE_MAX`."""
    if not math.isfinite(value):
        return FIGURE_MAX
    return max(-FIGURE_MAX, min(FIGURE_MAX, round(value * MILLIONTHS)))


PPO: Final = PpoObjective()
