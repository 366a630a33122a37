"""Objectives that learn from responses which are given: those of a file, or the better ones of pairs. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Final

from protocol.codec import Between
from rlhf.objectives.ppo import MODULE, ROLE, START_COMMAND, WEIGHT_MAX
from rlhf.pair_accuracy import ACCURACY, pair_metric_rows
from training.objectives.objective import Declaration, InnerStep, JobSpecProtocol, Objective, Shape
from training.transformer import BYTE_VOCABULARIES, VOCABULARY_MAX, tensor_shapes

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from training.data.token_sequences import TokenizedText

NATS: Final = "held_out_nats_per_response_token"
BETA: Final = 0.1  # Rafailov et al. 2023, section 6
NEWLINE: Final = 10  # of the bytes

Stop = Annotated[int, Between(0, VOCABULARY_MAX - 1)] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructTerms:
    """What an `instruct` job says beside what all jobs say."""

    stop_token: Stop = NEWLINE  # token that every response ends with; none: it ends as it is

    def settings_problem(self) -> str | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoTerms:
    """What a `dpo` job says beside what all jobs say."""

    beta: float = BETA  # of the implicit reward, in score a nat: the smaller, the further the policy may go
    stop_token: Stop = NEWLINE

    def settings_problem(self) -> str | None:
        return None if 0 < self.beta <= WEIGHT_MAX else f"beta must be positive and at most {WEIGHT_MAX:g}, is {self.beta}"


class SupervisedObjective(Objective):
    """What both have in common: a set as data, steps of records that are drawn by a hash, the tensors of a language model."""

    module, version = MODULE, 1
    reads_text = False  # a set, which all trainers share
    refers_to_first = True  # `rlhf compare` shows it
    data_reader = "rlhf.objectives.response_reader:open_responses"

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        if job.data is None:
            return f"a job of the objective {self.name!r} learns from a set of responses: name a file of JSONL"
        if not job.is_reexecuted:
            return f"audit {job.audit.value!r} would let everybody invent responses: take 'full' or 'sampled'"
        if job.tokenizer is None and job.model.vocabulary not in BYTE_VOCABULARIES:
            return f"model.vocabulary {job.model.vocabulary} needs a tokenizer: name a base that has one"
        if settings.stop_token is not None and settings.stop_token >= job.model.vocabulary:
            return f"stop_token {settings.stop_token} is no token of a vocabulary of {job.model.vocabulary}"
        found: str | None = settings.settings_problem()
        return found

    def stop_token(self, job: JobSpecProtocol) -> int | None:
        own: InstructTerms | DpoTerms = job.decoded_settings
        return own.stop_token

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        return tensor_shapes(job.model)

    def draw_examples(
        self, job: JobSpecProtocol, step: InnerStep, count: int, data: TokenizedText, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """The numbers of records."""
        from rlhf.data.tokenized_records import TokenizedResponses

        assert isinstance(data, TokenizedResponses)
        return self.draw_example_numbers(job, step, count, len(data.train_split))

    def draw_example_numbers(self, job: JobSpecProtocol, step: InnerStep, count: int, records: int) -> npt.NDArray[np.int64]:
        """`draw_examples`, of so many records."""
        from rlhf.data.tokenized_records import draw_pairs

        return draw_pairs(*step.place, count=count, pairs=records, seed=job.seed)


class InstructObjective(SupervisedObjective):
    name = "instruct"
    example_job_builder = "rlhf.api.supervised_jobs:build_instruct_spec"
    description = "the responses of a file, behind their prompts"
    starts_from_parameters = True
    settings_type = InstructTerms
    main_metric = NATS

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Also by what a response's nats are divided: the tokens of a response in the mean of all that are trained on. So all
        tokens count alike, in whatever parts a step is computed.
        """
        import numpy as np

        from rlhf.data.tokenized_records import TokenizedResponses, response_batch

        assert isinstance(data, TokenizedResponses)
        tokens = np.full(len(drawn), data.train_split.tokens_mean, dtype=np.float32)
        return (*response_batch(data.train, data.train_split, drawn), tokens)


class DpoObjective(SupervisedObjective):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): pairs teach the policy itself, without a reward
    model and without samples. The reference is the job's first model.
    """

    name = "dpo"
    start_command = START_COMMAND
    description = "the better responses of pairs, against a reference"
    role = ROLE
    settings_type = DpoTerms
    data_origin = "rlhf.ledger.rlhf_module:preference_set_origin"
    data_exported = "rlhf.ledger.rlhf_module:is_exported"
    loss_unit = "nats/pair"
    main_metric = ACCURACY

    def metric_rows(self, metrics: Mapping[str, float], missing: str) -> Iterator[tuple[str, str]]:
        return pair_metric_rows(metrics, missing)

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        from rlhf.data.tokenized_records import TokenizedResponses, dpo_batch

        assert isinstance(data, TokenizedResponses)
        return dpo_batch(data, drawn, is_held_out=False)


INSTRUCT: Final = InstructObjective()
DPO: Final = DpoObjective()
