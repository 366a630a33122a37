"""The objective of reward models: a score for responses, which people's preferences teach. No torch."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from rlhf.objectives.ppo import MODULE, PPO, ROLE, START_COMMAND
from rlhf.pair_accuracy import ACCURACY, pair_metric_rows
from training.objectives.objective import Declaration, InnerStep, JobSpecProtocol, Objective, Shape
from training.transformer import BYTE_VOCABULARIES, HEAD, PARAMETERS_TUNED_MAX, tensor_shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from training.data.token_sequences import TokenizedText

SCORE_HEAD: Final = f"{HEAD}reward"
# While the head is zero no gradient passes it. A first round of one step would be so small that all later ones were too large
# beside it (`training.replicated.replicated_model.NORM_RATIO`).
STEPS_MIN: Final = 2


class RewardModelObjective(Objective):
    """A response's score is a head's, at the response's last token, behind its prompt (Ouyang et al. 2022, arXiv:2203.02155)."""

    name = "reward"
    score_head = SCORE_HEAD
    start_command = START_COMMAND
    description = "a score for responses, from people's preferences"
    module, version = MODULE, 1
    role = ROLE
    reads_text = False  # a set of preferences, which all trainers share
    makes_text = False
    data_reader = "rlhf.data.tokenized_records:open_pairs"
    data_origin = "rlhf.ledger.rlhf_module:preference_set_origin"
    data_exported = "rlhf.ledger.rlhf_module:is_exported"
    loss_unit = "nats/pair"
    main_metric = ACCURACY

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if job.data is None:
            return "a reward model learns from a set of preferences: name one with `rlhf start --preferences FILE`"
        if not job.is_reexecuted:
            return f"audit {job.audit.value!r} would let everybody invent preferences: take 'full' or 'sampled'"
        if job.tokenizer is None and job.model.vocabulary not in BYTE_VOCABULARIES:
            return f"model.vocabulary {job.model.vocabulary} needs a tokenizer: name a base that has one"
        if job.local_steps < STEPS_MIN:
            return f"local_steps {job.local_steps} would move the head alone in the first round: take {STEPS_MIN} at least"
        if job.model.parameters + job.model.width > PARAMETERS_TUNED_MAX:
            return f"{job.model.parameters} parameters and a head for scores are more than {PARAMETERS_TUNED_MAX}"
        return None

    def metric_rows(self, metrics: Mapping[str, float], missing: str) -> Iterator[tuple[str, str]]:
        return pair_metric_rows(metrics, missing)

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [*tensor_shapes(job.model), (SCORE_HEAD, (job.model.width,))]

    def draw_examples(
        self, job: JobSpecProtocol, step: InnerStep, count: int, data: TokenizedText, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """The numbers of pairs."""
        from rlhf.data.tokenized_records import TokenizedPairs

        assert isinstance(data, TokenizedPairs)
        return self.draw_example_numbers(job, step, count, len(data.train_split))

    def draw_example_numbers(self, job: JobSpecProtocol, step: InnerStep, count: int, pairs: int) -> npt.NDArray[np.int64]:
        """`draw_examples`, of so many pairs."""
        from rlhf.data.tokenized_records import draw_pairs

        return draw_pairs(*step.place, count=count, pairs=pairs, seed=job.seed)

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        from rlhf.data.tokenized_records import TokenizedPairs, pair_batch

        assert isinstance(data, TokenizedPairs)
        return pair_batch(data.train, data.train_split, drawn)


class TrainableParameters(enum.StrEnum):
    WORDS = "words"  # the embedding, the last norm and the head; layers stay as the base has them
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanRewardSettings:
    """What a `reward-mean` job says beside what all jobs say."""

    # Some thousands of pairs teach the layers of a small model their noise: of reviews .67 are foretold, and .71 where they stay.
    learns: TrainableParameters = TrainableParameters.WORDS


class MeanRewardObjective(RewardModelObjective):
    """A response's score is the mean of what the head says at each token, its prompt's too.

    The prompt is the same for both responses. A score that is read at the last token alone teaches a policy how to end a text,
    and foretells fewer pairs (docs/log.md).
    """

    name = "reward-mean"
    description = "a score for responses, the mean over their tokens, from people's preferences"
    settings_type = MeanRewardSettings

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if settings.learns is TrainableParameters.WORDS and job.weight_decay:
            return f"weight_decay {job.weight_decay:g} would shrink layers that are to stay: take 0, or learns all"
        return super().spec_problem(job, settings)

    def draw_example_numbers(self, job: JobSpecProtocol, step: InnerStep, count: int, pairs: int) -> npt.NDArray[np.int64]:
        """A pair that comes twice while others have not come teaches its noise (docs/log.md)."""
        from rlhf.data.tokenized_records import draw_pairs_by_epoch

        return draw_pairs_by_epoch(*step.place, steps=job.local_steps, count=count, pairs=pairs, seed=job.seed)

    def freezes_layers(self, job: JobSpecProtocol) -> bool:
        own: MeanRewardSettings = job.decoded_settings
        return own.learns is TrainableParameters.WORDS


REWARD: Final = RewardModelObjective()
MEAN_REWARD: Final = MeanRewardObjective()
LAST, MEAN = "last", "mean"
REWARDS: Final = {LAST: REWARD, MEAN: MEAN_REWARD}  # by where a score is read
REWARD_NAMES: Final = tuple(kind.name for kind in REWARDS.values())
assert PPO.required_objectives == REWARD_NAMES
