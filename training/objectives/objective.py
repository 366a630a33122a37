"""The base class of objectives: tensors to train, requirements of a job, and the computation of an update."""

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

if TYPE_CHECKING:  # Voters read the rules of an objective, and need no numpy for them.
    import numpy as np
    import numpy.typing as npt

    from training.data.token_sequences import TokenizedText

STEERING_BYTES_MAX: Final = 64  # bytes of one or two numbers
NATS = "nats/token"
Shape = tuple[int, ...]


class JobSpecProtocol(Protocol):
    """The part of a job's specification that objectives read (`training.job_spec.JobSpec`)."""

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
    """A reason to reject a proposal, beside the reasons that all jobs have (`protocol.verdicts`)."""

    label: str
    meaning: str  # explanation for people, shown after the label


@dataclass(frozen=True, slots=True)
class Declaration:
    """The objective's own record in a proposal. The inner steps of its round depend on it."""

    record: Any  # record of the type `Objective.declaration_type`
    files: Mapping[bytes, Path]  # blobs of `Objective.declared_blobs` by digest
    steering: bytes = b""  # controller state in the round's model, see `Objective.next_controller_state`
    # Data that the engine derives from the record and the round's model before the first step:
    # `DeclaringEngine.derive_step_data`.
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
    """An objective: checks, tensors, steps and rejection reasons. All peers of a network must compute the same ones for a job.

    An objective without training has `deterministic_update`, which every voter computes. All others define the examples of a
    step; by default these are sequences of a text. Each engine that can train an objective registers its loss
    (`training.engine_implementations`).
    """

    name: ClassVar[str]
    description: ClassVar[str]  # one line for people
    # A network trains for this objective if it runs this module in this version or a later one, so that all its voters know it.
    module: ClassVar[str] = "jobs"
    version: ClassVar[int] = 1
    settings_type: ClassVar[type | None] = None  # record type of the settings that only such jobs have
    needs_worker: ClassVar[bool] = True  # Only members with a worker train and re-execute, and the model can be exported.
    role: ClassVar[str] = TRAINER  # role of those members in the ledger
    reads_text: ClassVar[bool] = True  # The job names a text, or each trainer has its own text.
    makes_text: ClassVar[bool] = True  # The model can generate text for people.
    score_head: ClassVar[str] = ""  # the tensor that computes a score of a text; empty: the model has no scores
    start_command: ClassVar[str] = "train"  # command that starts such a job
    # `module:function` that reads a job's data from its file, with the signature of this default. Only the worker imports it.
    data_reader: ClassVar[str] = "training.corpus:open_tokens"
    # `module:function` that describes the origin of a job's data for people. Arguments: the modules' states, the data's digest.
    data_origin: ClassVar[str] = ""
    # `module:function` that builds a job from a file with prompts and responses (`training.api.job_builder.build_example_job`).
    # Empty: this objective has no such jobs.
    example_job_builder: ClassVar[str] = ""
    # `module:function` with the arguments of `data_origin`. It returns true if exports contain the data. Empty: none does.
    data_exported: ClassVar[str] = ""
    main_metric: ClassVar[str] = "held_out_bits_per_byte"  # the metric that is shown first
    # Type of the objective's own record in a proposal. The engine makes it before the steps, and auditors check it.
    declaration_type: ClassVar[type | None] = None
    loss_unit: ClassVar[str] = NATS  # unit of the loss, for people
    refers_to_first: ClassVar[bool] = False  # The engine gets the parameters of the job's first round.
    starts_from_parameters: ClassVar[bool] = False  # A job may start from a foreign model, which has all its tensors.
    # Objectives of finished jobs that `required_model` may name.
    required_objectives: ClassVar[Sequence[str]] = ()
    rejection_reasons: ClassVar[tuple[RejectionReason, ...]] = ()  # at most `protocol.verdicts.OBJECTIVE_CODES_MAX` reasons

    def metric_rows(self, metrics: Mapping[str, float], missing: str) -> Iterator[tuple[str, str]]:
        """Yield names and texts of the metrics for a model card. `missing` replaces metrics that were not measured."""
        held_out = [
            f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4g}"
            for name, value in sorted(metrics.items())
            if name.startswith("held_out")
        ]
        yield "held out", ", ".join(held_out) or missing

    @property
    def reason_labels(self) -> tuple[str, ...]:
        """Labels of the objective's own reasons, in the order of their codes."""
        return tuple(reason.label for reason in self.rejection_reasons)

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        """Return why the job is invalid, with the name of the value; None if it is valid.

        `settings` is the objective's own record, or None.
        """
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        """Return names and shapes of the tensors, in the order of the flat vector."""
        raise NotImplementedError

    def freezes_layers(self, job: JobSpecProtocol) -> bool:
        """Return true if the layers stay unchanged, and only the tensors outside them learn."""
        return False

    def required_model(self, job: JobSpecProtocol) -> ModelReference | None:
        """Return the model of another finished job that trainers and auditors read; None if there is none."""
        return None

    def required_files(self, job: JobSpecProtocol) -> Mapping[bytes, int]:
        """Return digest → most bytes of each further blob that trainers and auditors read."""
        return {}

    def stop_token(self, job: JobSpecProtocol) -> int | None:
        """Return the token that ends an answer of the job's model; None if there is none."""
        return None

    def moderates_output(self, job: JobSpecProtocol) -> bool:
        """Return true if people may see a text only after `withholds_output` has judged all of it."""
        return False

    def withholds_output(self, job: JobSpecProtocol, files: Mapping[bytes, Path], prompt: bytes, text: bytes) -> bool:
        """Return true if people must not see this answer to a prompt. `files` are those of `required_files`."""
        return False

    def declaration_problem(self, job: JobSpecProtocol, record: Any) -> str | None:
        """Return why a record of type `declaration_type` is invalid; None if it is valid. Voters check it without an engine."""
        return None

    def declared_blobs(self, job: JobSpecProtocol, record: Any) -> Mapping[bytes, int]:
        """Return digest → most bytes of each blob that the record names. Peers that re-execute the proposal fetch them."""
        return {}

    def declared_bytes_max(self, job: JobSpecProtocol) -> int:
        """Return the most bytes of all blobs that a record may name. Auditors fetch them, and the trainer keeps them."""
        return 0

    def next_controller_state(self, job: JobSpecProtocol, before: bytes, accepted: Sequence[Any]) -> bytes:
        """Return the controller state of the next round, at most `STEERING_BYTES_MAX`. It is part of the replicated model.

        It depends on the previous state and on the declarations of the accepted proposals.
        """
        return before

    def draw_examples(
        self, job: JobSpecProtocol, step: InnerStep, count: int, data: TokenizedText, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of the `count` examples of a step. For text these are the offsets of sequences.

        They depend only on these arguments, since auditors must find the same ones and no trainer may choose them. `declaration`
        is the trainer's, where the objective has declarations.
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
        """Return the arrays that the loss takes after the model. Each array has one row for each number in `drawn`."""
        from training.data.token_sequences import sequence_batch

        return sequence_batch(data.train, drawn, job.model.context)

    def deterministic_update(self, job: bytes, round: int, trainer: bytes, size: int) -> npt.NDArray[np.float32]:
        """Return Δ of one trainer in one round. It is exact on any machine."""
        raise NotImplementedError
