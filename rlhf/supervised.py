"""Objectives that learn from responses which are given: those of a file, or the better ones of pairs. No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from protocol.codec import Between
from rlhf.objective import MODULE, ROLE, WEIGHT_MAX
from rlhf.pairs import opened
from rlhf.preferences import Pair, pairs_of_step
from rlhf.responses import Example, Responses, encoded, rows
from rlhf.reward import ACCURACY
from training.data.tokenizer import VOCABULARY_MAX, Tokenizer
from training.objectives.objective import Declaration, Job, Objective, Shape, Step
from training.sequences import Tokens
from training.spec import JobSpec
from training.transformer import BYTE_VOCABULARIES, shapes

NATS: Final = "held_out_nats_per_response_token"
BETA: Final = 0.1  # Rafailov et al. 2023, section 6
NEWLINE: Final = 10  # of the bytes

Stop = Annotated[int, Between(0, VOCABULARY_MAX - 1)] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class InstructTerms:
    """What an `instruct` job says beside what all jobs say."""

    stop: Stop = NEWLINE  # token that every response ends with; none: it ends as it is

    def problem(self) -> str | None:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DpoTerms:
    """What a `dpo` job says beside what all jobs say."""

    beta: float = BETA  # of the implicit reward, in score a nat: the smaller, the further the policy may go
    stop: Stop = NEWLINE

    def problem(self) -> str | None:
        return None if 0 < self.beta <= WEIGHT_MAX else f"beta must be positive and at most {WEIGHT_MAX:g}, is {self.beta}"


class Supervised(Objective):
    """What both have in common: a set as data, steps of records that are drawn by a hash, the tensors of a language model."""

    module, version = MODULE, 1
    reads_text = False  # a set, which all trainers share
    refers_to_first = True  # `rlhf compare` shows it
    reader = "rlhf.supervised:open_responses"
    record: ClassVar[type]

    def problem(self, job: Job, settings: Any) -> str | None:
        if job.data is None:
            return f"a job of the objective {self.name!r} learns from a set of responses: name a file of JSONL"
        if not job.is_reexecuted:
            return f"audit {job.audit.value!r} would let everybody invent responses: take 'full' or 'sampled'"
        if job.tokenizer is None and job.model.vocabulary not in BYTE_VOCABULARIES:
            return f"model.vocabulary {job.model.vocabulary} needs a tokenizer: name a base that has one"
        if settings.stop is not None and settings.stop >= job.model.vocabulary:
            return f"stop {settings.stop} is no token of a vocabulary of {job.model.vocabulary}"
        found: str | None = settings.problem()
        return found

    def ends_text(self, job: Job) -> int | None:
        own: InstructTerms | DpoTerms = job.own
        return own.stop

    def tensors(self, job: Job, settings: Any) -> Sequence[tuple[str, Shape]]:
        return shapes(job.model)

    def draw(
        self, job: Job, step: Step, count: int, data: Tokens, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """The numbers of records."""
        assert isinstance(data, Responses)
        return self.drawn(job, step, count, len(data.trained))

    def drawn(self, job: Job, step: Step, count: int, records: int) -> npt.NDArray[np.int64]:
        """`draw`, of so many records."""
        return pairs_of_step(*step.place, count=count, pairs=records, seed=job.seed)


class Instruct(Supervised):
    name = "instruct"
    about = "the responses of a file, behind their prompts"
    starts_from_parameters = True
    settings = InstructTerms
    record = Example
    losses: ClassVar[Mapping[str, str]] = {"pytorch": "rlhf.pytorch.supervised:instruct_loss"}
    measures: ClassVar[Mapping[str, str]] = {"pytorch": "rlhf.pytorch.supervised:held_out_nats"}
    figure = NATS

    def examples(
        self, job: Job, drawn: npt.NDArray[np.int64], data: Tokens, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Also by what a response's nats are divided: the tokens of a response in the mean of all that are trained on. So all
        tokens count alike, in whatever parts a step is computed.
        """
        assert isinstance(data, Responses)
        tokens = np.full(len(drawn), data.trained.tokens_mean, dtype=np.float32)
        return (*rows(data.train, data.trained, drawn), tokens)


class Dpo(Supervised):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290): pairs teach the policy itself, without a reward
    model and without samples. The reference is the job's first model.
    """

    name = "dpo"
    about = "the better responses of pairs, against a reference"
    role = ROLE
    settings = DpoTerms
    record = Pair
    origin = "rlhf.module:origin"
    exported = "rlhf.module:is_exported"
    loss_unit = "nats/pair"
    losses: ClassVar[Mapping[str, str]] = {"pytorch": "rlhf.pytorch.supervised:dpo_loss"}
    measures: ClassVar[Mapping[str, str]] = {"pytorch": "rlhf.pytorch.supervised:dpo_figures"}
    references: ClassVar[Mapping[str, str]] = {"pytorch": "rlhf.pytorch.supervised:refer"}
    figure = ACCURACY

    def examples(
        self, job: Job, drawn: npt.NDArray[np.int64], data: Tokens, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        assert isinstance(data, Responses)
        return of_pairs(data, drawn, is_held_out=False)


def of_pairs(data: Responses, drawn: npt.NDArray[np.int64], *, is_held_out: bool) -> tuple[npt.NDArray[Any], ...]:
    """Of N pairs: `rows` of both texts of each, (N, 2, S); what the reference gives them, (N, 2); p, (N,)."""
    tokens, side = (data.held_out, data.measured) if is_held_out else (data.train, data.trained)
    texts = texts_of(drawn)
    shaped = (array.reshape(len(drawn), 2, -1) for array in rows(tokens, side, texts))
    return (*shaped, side.reference[texts].reshape(-1, 2), side.p[drawn])


def texts_of(pairs: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    texts: npt.NDArray[np.int64] = (2 * pairs[:, None] + np.arange(2)).ravel()
    return texts


def open_responses(
    spec: JobSpec,
    path: Path,
    tokenizer: Tokenizer,
    on_block: Callable[[], None] = lambda: None,
    tokenized: bool = False,
    named: bytes | None = None,
) -> Responses:
    """As `training.data.corpus.open_tokens`, of a file with a set."""
    assert isinstance(spec.kind, Supervised)
    return opened(path, spec.kind.record, lambda records: encoded(spec, records, tokenizer, on_block), tokenized, named)


INSTRUCT: Final = Instruct()
DPO: Final = Dpo()
