"""Objectives that learn from a preference set or a set of responses: reward models, instruction tuning and DPO.

This module does not import torch.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

from protocol.codec import Between
from rlhf.objectives.ppo import MODULE, PPO, ROLE, START_COMMAND, WEIGHT_MAX
from rlhf.pair_accuracy import ACCURACY, CALIBRATION, CONTRADICTORY, IDENTICAL, PAIRS, WORD_COUNT, PairAccuracy
from training.objectives.objective import Declaration, InnerStep, JobSpecProtocol, Objective, Shape
from training.transformer import BYTE_VOCABULARIES, HEAD, PARAMETERS_TUNED_MAX, VOCABULARY_MAX, tensor_shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from training.data.token_sequences import TokenizedText

SCORE_HEAD: Final = f"{HEAD}reward"
# Smallest number of local steps of a reward model. The score head begins as zero, and no gradient passes a zero head. So a first
# round of one step would have a small update, and later updates would exceed the bound on the ratio of updates
# (`training.replicated.replicated_model.NORM_RATIO`).
STEPS_MIN: Final = 2
NATS: Final = "held_out_nats_per_response_token"
BETA: Final = 0.1  # default β of DPO: Rafailov et al. 2023, section 6
NEWLINE: Final = 10  # default stop token: the byte of a newline

Stop = Annotated[int, Between(0, VOCABULARY_MAX - 1)] | None


class RecordObjective(Objective):
    """Base of objectives whose data is a set of records, and whose steps draw records by a hash."""

    module, version = MODULE, 1
    reads_text = False  # all trainers share the set, and read no texts of their own
    contents: ClassVar[str] = "responses"  # name of the set's records in messages

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if job.data is None:
            return f"a job of the objective {self.name!r} learns from responses: give a JSONL file"
        if not job.is_reexecuted:
            return f"audit {job.audit.value!r} would let trainers invent {self.contents}: use 'full' or 'sampled'"
        if job.tokenizer is None and job.model.vocabulary not in BYTE_VOCABULARIES:
            return f"model.vocabulary {job.model.vocabulary} needs a tokenizer: use a base that has one"
        return None

    def draw_examples(
        self, job: JobSpecProtocol, step: InnerStep, count: int, data: TokenizedText, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of the records that an inner step draws."""
        from rlhf.data.tokenized_records import TokenizedPairs, TokenizedResponses

        assert isinstance(data, TokenizedPairs | TokenizedResponses)
        return self.draw_example_numbers(job, step, count, len(data.train_split))

    def draw_example_numbers(self, job: JobSpecProtocol, step: InnerStep, count: int, records: int) -> npt.NDArray[np.int64]:
        """Return the numbers that an inner step draws from 0 .. records − 1."""
        from rlhf.data.tokenized_records import draw_pairs

        return draw_pairs(*step.place, count=count, pairs=records, seed=job.seed)


class PairObjective(RecordObjective):
    """Base of objectives that learn from a preference set."""

    start_command = START_COMMAND
    role = ROLE
    data_origin = "rlhf.ledger.rlhf_module:preference_set_origin"
    data_exported = "rlhf.ledger.rlhf_module:is_exported"
    loss_unit = "nats/pair"
    main_metric = ACCURACY

    def metric_rows(self, metrics: Mapping[str, float], missing: str) -> Iterator[tuple[str, str]]:
        is_measured = ACCURACY in metrics and PAIRS in metrics
        accuracy = PairAccuracy.from_share(metrics[ACCURACY], int(metrics[PAIRS])) if is_measured else None
        held_out = [] if accuracy is None else [f"accuracy {accuracy}"]
        for name, value in sorted(metrics.items()):
            if name not in (ACCURACY, PAIRS) and (name.startswith("held_out") or name == CALIBRATION):
                held_out.append(f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4g}")
        yield "held out", ", ".join(held_out) or missing
        words = metrics.get(WORD_COUNT)
        if accuracy is not None and words is not None:
            warning = ": more than this model, which is worse than counting words" if words > accuracy.share else ""
            yield "word-count model", f"{words:.2f} of the same pairs{warning}"
        identical, contradictory = (int(metrics.get(name, 0)) for name in (IDENTICAL, CONTRADICTORY))
        if identical or contradictory:
            yield "odd pairs", f"{identical} of identical responses, {contradictory} that contradict one another"


# Reward models -----------------------------------------------------------------------------------------------------------


class RewardModelObjective(PairObjective):
    """Objective of a reward model that scores a response at its last token with a head (Ouyang et al. 2022, arXiv:2203.02155)."""

    name = "reward"
    score_head = SCORE_HEAD
    description = "a score for responses, from people's preferences"
    makes_text = False
    data_reader = "rlhf.data.tokenized_records:open_pairs"
    contents = "preferences"

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if job.data is None:
            return "a reward model learns from preferences: give them with `rlhf start --preferences FILE`"
        if problem := super().spec_problem(job, settings):
            return problem
        if job.local_steps < STEPS_MIN:
            return f"local_steps {job.local_steps} would train only the head in the first round: use at least {STEPS_MIN}"
        if job.model.parameters + job.model.width > PARAMETERS_TUNED_MAX:
            return f"{job.model.parameters} parameters and a head for scores are more than {PARAMETERS_TUNED_MAX}"
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [*tensor_shapes(job.model), (SCORE_HEAD, (job.model.width,))]

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        from rlhf.data.tokenized_records import TokenizedPairs, pair_batch

        assert isinstance(data, TokenizedPairs)
        return pair_batch(data.train, data.train_split, drawn)


class TrainableParameters(enum.StrEnum):
    WORDS = "words"  # trains the embedding, the last norm and the head; layers stay as in the base
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRewardSettings:
    """Settings of a `reward-mean` job."""

    # The layers of a small model memorize the noise of some thousands of pairs. On pairs of reviews the accuracy is 0.67 with
    # `all`, and 0.71 with `words`.
    learns: TrainableParameters = TrainableParameters.WORDS
    """`words`: embedding, last norm and head are trained, and layers stay as in the base. `all`: layers are trained, too."""


class MeanRewardObjective(RewardModelObjective):
    """Objective of a reward model whose score is the mean output of a head over all tokens of prompt and response.

    The prompt is the same for both responses. A score at the last token alone teaches a policy how to end a text, and is less
    accurate (docs/experiments.md).
    """

    name = "reward-mean"
    description = "a score for responses, the mean over their tokens, from people's preferences"
    settings_type = MeanRewardSettings

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if settings.learns is TrainableParameters.WORDS and job.weight_decay:
            return f"weight_decay {job.weight_decay:g} would change the frozen layers: use weight_decay 0, or --set learns=all"
        return super().spec_problem(job, settings)

    def draw_example_numbers(self, job: JobSpecProtocol, step: InnerStep, count: int, records: int) -> npt.NDArray[np.int64]:
        """Return pair numbers, drawn by epoch. A model memorizes pairs that repeat before others appear (docs/experiments.md)."""
        from rlhf.data.tokenized_records import draw_pairs_by_epoch

        return draw_pairs_by_epoch(*step.place, steps=job.local_steps, count=count, pairs=records, seed=job.seed)

    def freezes_layers(self, job: JobSpecProtocol) -> bool:
        own: MeanRewardSettings = job.decoded_settings
        return own.learns is TrainableParameters.WORDS


# Responses ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructTerms:
    """Settings of an `instruct` job."""

    stop_token: Stop = NEWLINE
    """Token that ends every response, appended if missing. None: nothing is appended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoTerms:
    """Settings of a `dpo` job."""

    beta: float = BETA
    """Weight of the implicit reward, in score per nat. With a smaller one the policy moves further."""
    stop_token: Stop = NEWLINE
    """Token that ends every response, appended if missing. None: nothing is appended."""


class SupervisedObjective(RecordObjective):
    """Base of the objectives `instruct` and `dpo`: their model is a language model, and their responses end with a stop token."""

    refers_to_first = True  # the job's first model is the reference of `rlhf compare`

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if problem := super().spec_problem(job, settings):
            return problem
        if settings.stop_token is not None and settings.stop_token >= job.model.vocabulary:
            return f"stop_token {settings.stop_token} is not in the vocabulary of {job.model.vocabulary} tokens"
        return None

    def stop_token(self, job: JobSpecProtocol) -> int | None:
        own: InstructTerms | DpoTerms = job.decoded_settings
        return own.stop_token

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return tensor_shapes(job.model)


class InstructObjective(SupervisedObjective):
    name = "instruct"
    example_job_builder = "rlhf.api.supervised_jobs:build_instruct_spec"
    description = "the responses of a file, behind their prompts"
    starts_from_parameters = True
    settings_type = InstructTerms
    data_reader = "rlhf.data.tokenized_records:open_examples"
    main_metric = NATS

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Return the arrays of `response_batch` for the drawn responses, and the divisor of each response's nats.

        The divisor is the mean number of tokens of all training responses, so all tokens have the same weight in any micro-batch.
        """
        import numpy as np

        from rlhf.data.tokenized_records import TokenizedResponses, response_batch

        assert isinstance(data, TokenizedResponses)
        tokens = np.full(len(drawn), data.train_split.tokens_mean, dtype=np.float32)
        return (*response_batch(data.train, data.train_split, drawn), tokens)


class DpoObjective(SupervisedObjective, PairObjective):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290).

    The policy learns from pairs, without a reward model and without samples. The reference is the job's first model.
    """

    name = "dpo"
    description = "the better responses of pairs, against a reference"
    settings_type = DpoTerms
    data_reader = "rlhf.data.tokenized_records:open_preferred_responses"

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if problem := super().spec_problem(job, settings):
            return problem
        return (
            None if 0 < settings.beta <= WEIGHT_MAX else f"beta must be positive and at most {WEIGHT_MAX:g}, is {settings.beta}"
        )

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        from rlhf.data.tokenized_records import TokenizedResponses, dpo_batch

        assert isinstance(data, TokenizedResponses)
        return dpo_batch(data, drawn, is_held_out=False)


REWARD: Final = RewardModelObjective()
MEAN_REWARD: Final = MeanRewardObjective()
INSTRUCT: Final = InstructObjective()
DPO: Final = DpoObjective()
MEAN: Final = "mean"
REWARDS: Final = {"last": REWARD, MEAN: MEAN_REWARD}  # objectives of reward models, by the tokens at which a text is scored
REWARD_NAMES: Final = tuple(kind.name for kind in REWARDS.values())
assert PPO.required_objectives == REWARD_NAMES
PAIR_OBJECTIVES: Final = (*REWARD_NAMES, DPO.name)  # names of objectives that learn from a preference set
OBJECTIVES: Final = (PPO, REWARD, MEAN_REWARD, INSTRUCT, DPO)  # all objectives of the feature RLHF
