"""The objective of reward models: a score for responses, which people's preferences teach. No torch."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from rlhf.objective import MODULE, PPO, ROLE
from rlhf.pairs import Pairs, rows
from rlhf.preferences import pairs_in_turn, pairs_of_step
from training.objectives.objective import Declaration, Job, Objective, Shape, Step
from training.sequences import Tokens
from training.transformer import BYTE_VOCABULARIES, HEAD, PARAMETERS_TUNED_MAX, shapes

SCORE: Final = f"{HEAD}reward"
ACCURACY: Final = "held_out_accuracy"
CALIBRATION: Final = "calibration_error"
# While the head is zero no gradient passes it. A first round of one step would be so small that all later ones were too large
# beside it (`training.replicated.model.NORM_RATIO`).
STEPS_MIN: Final = 2


class RewardModel(Objective):
    """A response's score is a head's, at the response's last token, behind its prompt (Ouyang et al. 2022, arXiv:2203.02155)."""

    name = "reward"
    about = "a score for responses, from people's preferences"
    module, version = MODULE, 1
    role = ROLE
    reads_text = False  # a set of preferences, which all trainers share
    makes_text = False
    reader = "rlhf.pairs:open_pairs"
    origin = "rlhf.module:origin"
    exported = "rlhf.module:is_exported"
    losses: ClassVar[Mapping[str, str]] = {"pytorch": "rlhf.pytorch.reward:loss"}
    measures: ClassVar[Mapping[str, str]] = {"pytorch": "rlhf.pytorch.reward:figures"}
    loss_unit = "nats/pair"
    figure = ACCURACY

    def problem(self, job: Job, settings: Any) -> str | None:
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

    def tensors(self, job: Job, settings: Any) -> Sequence[tuple[str, Shape]]:
        return [*shapes(job.model), (SCORE, (job.model.width,))]

    def draw(
        self, job: Job, step: Step, count: int, data: Tokens, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """The numbers of pairs."""
        assert isinstance(data, Pairs)
        return self.drawn(job, step, count, len(data.trained))

    def drawn(self, job: Job, step: Step, count: int, pairs: int) -> npt.NDArray[np.int64]:
        """`draw`, of so many pairs."""
        return pairs_of_step(*step.place, count=count, pairs=pairs, seed=job.seed)

    def examples(
        self, job: Job, drawn: npt.NDArray[np.int64], data: Tokens, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        assert isinstance(data, Pairs)
        return rows(data.train, data.trained, drawn)


class Learns(enum.StrEnum):
    WORDS = "words"  # the embedding, the last norm and the head; layers stay as the base has them
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanTerms:
    """What a `reward-mean` job says beside what all jobs say."""

    # Some thousands of pairs teach the layers of a small model their noise: of reviews .67 are foretold, and .71 where they stay.
    learns: Learns = Learns.WORDS


class MeanRewardModel(RewardModel):
    """A response's score is the mean of what the head says at each token, its prompt's too.

    The prompt is the same for both responses. A score that is read at the last token alone teaches a policy how to end a text,
    and foretells fewer pairs (docs/log.md).
    """

    name = "reward-mean"
    about = "a score for responses, the mean over their tokens, from people's preferences"
    version = 2
    settings = MeanTerms

    def problem(self, job: Job, settings: Any) -> str | None:
        if settings.learns is Learns.WORDS and job.weight_decay:
            return f"weight_decay {job.weight_decay:g} would shrink layers that are to stay: take 0, or learns all"
        return super().problem(job, settings)

    def drawn(self, job: Job, step: Step, count: int, pairs: int) -> npt.NDArray[np.int64]:
        """A pair that comes twice while others have not come teaches its noise (docs/log.md)."""
        return pairs_in_turn(*step.place, steps=job.local_steps, count=count, pairs=pairs, seed=job.seed)

    def keeps_layers(self, job: Job) -> bool:
        own: MeanTerms = job.own
        return own.learns is Learns.WORDS


REWARD: Final = RewardModel()
MEAN_REWARD: Final = MeanRewardModel()
LAST, MEAN = "last", "mean"
REWARDS: Final = {LAST: REWARD, MEAN: MEAN_REWARD}  # by where a score is read
REWARD_NAMES: Final = tuple(kind.name for kind in REWARDS.values())
assert PPO.reads == REWARD_NAMES
