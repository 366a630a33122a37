"""What an objective is: the tensors it trains, what it asks of a job, and how an update is computed."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Final, Protocol

from ledger.core.genesis import TRAINER
from ledger.jobs import ModelReference
from protocol.codec import Digest
from training.transformer import ModelSpec

if TYPE_CHECKING:  # the rules of an objective are read by voters, which need no numpy for them
    import numpy as np
    import numpy.typing as npt

    from training.data.token_sequences import TokenizedText

STEERING_BYTES_MAX: Final = 64  # a number or two
NATS = "nats/token"
Shape = tuple[int, ...]


class JobSpecProtocol(Protocol):
    """What an objective reads of a job's specification (`training.job_spec.JobSpec`)."""

    @property
    def model(self) -> ModelSpec: ...

    @property
    def tokenizer(self) -> Digest | None: ...

    @property
    def data(self) -> Digest | None: ...

    @property
    def audit(self) -> enum.StrEnum: ...

    @property
    def is_reexecuted(self) -> bool: ...

    @property
    def local_steps(self) -> int: ...

    @property
    def batch(self) -> int: ...

    @property
    def weight_decay(self) -> float: ...

    @property
    def decoded_settings(self) -> Any: ...

    @property
    def seed(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RejectionReason:
    """Why a proposal is refused, beside the reasons that every job has (`protocol.verdicts`)."""

    label: str
    meaning: str  # for people, after the label


@dataclass(frozen=True, slots=True)
class Declaration:
    """What a proposal says in the objective's own terms, which the inner steps of its round go by."""

    record: Any  # of the type `Objective.declaration_type`
    files: Mapping[bytes, Path]  # by digest: what `Objective.declared_blobs` names
    steering: bytes = b""  # of the round's model: `Objective.next_controller_state`
    # What the engine makes of it and of the round's model before the first step: `DeclaringEngine.derive_step_data`.
    step_data: Any = None


@dataclass(frozen=True, slots=True)
class InnerStep:
    """One inner step of one trainer's round."""

    job: bytes
    round: int
    trainer: bytes
    number: int

    @property
    def place(self) -> tuple[bytes, int, bytes, int]:
        return self.job, self.round, self.trainer, self.number


class Objective:
    """Everybody who runs a network must find the same here for the same job: whether it is sound, its tensors, its steps, what it
    asks of a declaration, and the order of its reasons.

    An objective whose update takes no training has `deterministic_update`, and every voter computes it. All others say what a
    step is made of, which is text unless they say otherwise. Each engine that can train them registers how it computes the loss
    (`training.engine_implementations`).
    """

    name: ClassVar[str]
    description: ClassVar[str]  # for people, in one line
    # A network trains for this objective if it runs this module, in this version or a later one: so all its voters know it.
    module: ClassVar[str] = "jobs"
    version: ClassVar[int] = 1
    settings_type: ClassVar[type | None] = None  # record of what such a job says beside what all jobs have
    needs_worker: ClassVar[bool] = True  # only members with a worker train, and re-execute; people can take its model home
    role: ClassVar[str] = TRAINER  # in the ledger, of those members
    reads_text: ClassVar[bool] = True  # the job names a text, or each trainer has its own
    makes_text: ClassVar[bool] = True  # people can ask its model for text
    score_head: ClassVar[str] = ""  # the tensor that makes a score of a text; empty: its model gives none
    start_command: ClassVar[str] = "train"  # what a person types to start such a job
    # `module:function` that makes a job's data of its file, imported by the worker alone: it takes and raises what this one does.
    data_reader: ClassVar[str] = "training.corpus:open_tokens"
    # `module:function` that says where a job's data comes from, of the states of all modules and the data's digest, for people.
    data_origin: ClassVar[str] = ""
    # `module:function` that makes the job of a file with prompts and responses (`training.api.job_builder.build_example_job`).
    # Empty: jobs of this objective are made in another way.
    example_job_builder: ClassVar[str] = ""
    # The same arguments as `data_origin`: whether an export holds the data. Empty: none does.
    data_exported: ClassVar[str] = ""
    main_metric: ClassVar[str] = "held_out_bits_per_byte"  # the first figure of a model
    # Record that a proposal has beside what all proposals have. The engine makes it before the steps, and auditors check it.
    declaration_type: ClassVar[type | None] = None
    loss_unit: ClassVar[str] = NATS  # of what the loss gives, for people
    refers_to_first: ClassVar[bool] = False  # the engine is given the parameters of the job's first round
    starts_from_parameters: ClassVar[bool] = False  # a job may start from a model of people's own: all its tensors are a model's
    # objectives of the finished job whose model the engine is given, where `required_model` names one
    required_objectives: ClassVar[Sequence[str]] = ()
    rejection_reasons: ClassVar[tuple[RejectionReason, ...]] = ()  # of its own, at most `protocol.verdicts.OBJECTIVE_CODES_MAX`

    def metric_rows(self, metrics: Mapping[str, float], missing: str) -> Iterator[tuple[str, str]]:
        """What the card of a model says of its metrics: names and texts. `missing` is said where it was not measured."""
        held_out = [
            f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4g}"
            for name, value in sorted(metrics.items())
            if name.startswith("held_out")
        ]
        yield "held out", ", ".join(held_out) or missing

    @property
    def reason_labels(self) -> tuple[str, ...]:
        """Of its own reasons, in the order of their codes."""
        return tuple(reason.label for reason in self.rejection_reasons)

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        """Names the value that makes the job unsound; None for a sound job. `settings` is the objective's own record, or None."""
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        """Names and shapes, in the order of the flat vector."""
        raise NotImplementedError

    def freezes_layers(self, job: JobSpecProtocol) -> bool:
        """Whether the layers stay as they are, and only what stands before and behind them learns."""
        return False

    def required_model(self, job: JobSpecProtocol) -> ModelReference | None:
        """The model of another finished job that trainers and auditors read beside the job's own."""
        return None

    def required_files(self, job: JobSpecProtocol) -> Mapping[bytes, int]:
        """Digest -> size at most, in bytes, of each other blob that trainers and auditors read."""
        return {}

    def stop_token(self, job: JobSpecProtocol) -> int | None:
        """The token that ends what the job's model says, if one does."""
        return None

    def moderates_output(self, job: JobSpecProtocol) -> bool:
        """Whether people see nothing of a text before `withholds_output` has seen all of it."""
        return False

    def withholds_output(self, job: JobSpecProtocol, files: Mapping[bytes, Path], prompt: bytes, text: bytes) -> bool:
        """Whether people do not see what the job's model says after a prompt. `files` are those of these names."""
        return False

    def declaration_problem(self, job: JobSpecProtocol, record: Any) -> str | None:
        """What every voter, without an engine, finds wrong in a record of type `declaration`."""
        return None

    def declared_blobs(self, job: JobSpecProtocol, record: Any) -> Mapping[bytes, int]:
        """Digest -> size at most, in bytes, of each blob that the record names. Whoever re-executes the proposal gets them."""
        return {}

    def declared_bytes_max(self, job: JobSpecProtocol) -> int:
        """Of all blobs that a record may name: what of them auditors fetch of a proposal, and its trainer keeps."""
        return 0

    def next_controller_state(self, job: JobSpecProtocol, before: bytes, accepted: Sequence[Any]) -> bytes:
        """What the next round goes by beside the job's terms, of at most `STEERING_BYTES_MAX`: a part of the replicated model.

        It follows from what the round before went by, and from the records that its accepted proposals declared.
        """
        return before

    def draw_examples(
        self, job: JobSpecProtocol, step: InnerStep, count: int, data: TokenizedText, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """The numbers of `count` examples of which a step is made; of text, where the sequences begin.

        They follow from these arguments alone: auditors must find the same ones, and no trainer may choose. `declaration` is the
        trainer's, where the objective has declarations.
        """
        from training.data.token_sequences import batch_offsets

        tokens, context = len(data.train), job.model.context
        drawn = batch_offsets(
            step.job, step.round, step.trainer, step.number, batch=count, tokens=tokens, context=context, seed=job.seed
        )
        assert drawn.shape == (count,)
        return drawn

    def batch_arrays(
        self, job: JobSpecProtocol, drawn: npt.NDArray[np.int64], data: TokenizedText, declaration: Declaration | None = None
    ) -> tuple[npt.NDArray[Any], ...]:
        """Arrays that the loss takes after the model. Each array has one row for each number in `drawn`."""
        from training.data.token_sequences import sequence_batch

        return sequence_batch(data.train, drawn, job.model.context)

    def deterministic_update(self, job: bytes, round: int, trainer: bytes, size: int) -> npt.NDArray[np.float32]:
        """Δ of one trainer in one round, exact on any machine."""
        raise NotImplementedError
