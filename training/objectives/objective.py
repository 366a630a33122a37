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
from training.transformer import LayerParameter, ModelSpec, linear_deviation

if TYPE_CHECKING:  # numpy is imported only for types, since voters check the rules of an objective without it.
    import numpy as np
    import numpy.typing as npt

    from training.data.token_sequences import TokenizedText

STEERING_BYTES_MAX: Final = 64  # bytes of a controller state: one or two numbers
NATS = "nats/token"
Shape = tuple[int, ...]
Tensors = Mapping[str, "npt.NDArray[np.float32]"]  # by name


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

    @property
    def proposal_seconds(self) -> float: ...


@dataclass(frozen=True, slots=True)
class AdamWTerms:
    """The terms of one step of AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101, algorithm 2)."""

    rate: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class FirstModel:
    """The saved model of another job with which a job begins."""

    model: ModelReference
    with_moments: bool  # True: the optimizer's moments are kept; False: they are zero


@dataclass(frozen=True, slots=True)
class MergedModel:
    """A transformer that a job's parameters and the model of another job make together."""

    model: ModelSpec
    tensors: Tensors  # by name, as in `training.transformer.tensor_shapes`


@dataclass(frozen=True, slots=True)
class RejectionReason:
    """An objective's own reason to reject a proposal, beside the reasons that all jobs have (`protocol.verdicts`)."""

    label: str
    meaning: str  # explanation for people, which follows the label


@dataclass(frozen=True, slots=True)
class Brief:
    """What a round of a job on request computes (`ledger.jobs.JobBrief`)."""

    encoded: bytes
    files: Mapping[bytes, Path]  # files with the blobs of `Objective.round_files`, by digest


@dataclass(frozen=True, slots=True)
class Declaration:
    """The objective's own record in a proposal, with its blobs and derived data. The inner steps of the round depend on it."""

    record: Any  # object of the type `Objective.declaration_type`
    files: Mapping[bytes, Path]  # files with the blobs of `Objective.declared_blobs`, by digest
    steering: bytes = b""  # controller state in the round's model (`Objective.next_controller_state`)
    brief: Brief | None = None  # brief of the round, in a job on request
    # Data that the engine derives from the record and the round's model before the first step:
    # `DeclaringEngine.derive_step_data`.
    step_data: Any = None


@dataclass(frozen=True, slots=True)
class InnerStep:
    """The identity of one inner step: job, round, trainer and number of the step."""

    job: bytes
    round: int
    trainer: bytes
    number: int

    @property
    def place(self) -> tuple[bytes, int, bytes, int]:
        return self.job, self.round, self.trainer, self.number


class Objective:
    """An objective: checks, tensors, steps and rejection reasons. All peers of a network must get the same results for a job.

    An objective without training has `deterministic_update`, which every voter computes. All other objectives define the examples
    of a step; by default these are sequences of a text. Each engine that can train an objective registers its loss
    (`training.engine_implementations`).
    """

    name: ClassVar[str]
    description: ClassVar[str]  # description of the objective for people, in one line
    # Module of the ledger, and its least version, that a network must run to train for this objective: all voters then know the
    # objective.
    module: ClassVar[str] = "jobs"
    version: ClassVar[int] = 1
    settings_type: ClassVar[type | None] = None  # type of the settings that only jobs with this objective have
    # True: only members with a worker can train and re-execute, and the model can be exported.
    needs_worker: ClassVar[bool] = True
    # True: rounds open only when a module of the ledger requests one, with one trainer and a brief (`ledger.jobs.JobBrief`).
    on_request: ClassVar[bool] = False
    # True: its gradients were measured in bf16, and replays tell false ones from honest ones (`benchmarks.replay`).
    is_replayable_in_bf16: ClassVar[bool] = False
    limits_norm: ClassVar[bool] = True  # True: an update with an unusual norm is rejected
    role: ClassVar[str] = TRAINER  # role in the ledger of the members that train for this objective
    data_without_text: ClassVar[str] = "only the prompts"  # what the job learned from, for people, if it reads no text
    reads_text: ClassVar[bool] = True  # True: the job names a text, or each trainer has its own text.
    makes_text: ClassVar[bool] = True  # True: the model can generate text for people.
    score_head: ClassVar[str] = ""  # name of the tensor that computes the score of a text; empty: the model computes no score
    start_command: ClassVar[str] = "train"  # command that starts a job with this objective
    # `module:function` of a function that reads a job's data from its file. It has the signature of `open_tokens`, and only the
    # worker imports it.
    data_reader: ClassVar[str] = "training.corpus:open_tokens"
    # `module:function` of a function that describes the origin of a job's data for people. Its arguments are the states of the
    # ledger's modules and the digest of the data.
    data_origin: ClassVar[str] = ""
    # `module:function` of a function that builds a job from a file with prompts and responses
    # (`training.api.job_builder.build_example_job`). Empty: this objective has no such jobs.
    example_job_builder: ClassVar[str] = ""
    # `module:function` of a function with the arguments of `data_origin`. It returns true if an export of the model contains the
    # data. Empty: no export does.
    data_exported: ClassVar[str] = ""
    main_metric: ClassVar[str] = "held_out_bits_per_byte"  # name of the metric that people see first
    # Type of the objective's own record in a proposal. The engine makes it before the steps, and auditors check it.
    declaration_type: ClassVar[type | None] = None
    loss_unit: ClassVar[str] = NATS  # unit of the loss, for people
    refers_to_first: ClassVar[bool] = False  # True: the engine gets the parameters of the job's first round, too.
    # True: a job may start from a foreign model, which has all tensors that the objective needs.
    starts_from_parameters: ClassVar[bool] = False
    changes_required_model: ClassVar[bool] = False  # True: the job's parameters change the model that `required_model` names.
    reads_required_data: ClassVar[bool] = True  # True: the engine gets the data of the job that `required_model` names, too.
    # Names of the objectives that a job named by `required_model` may have.
    required_objectives: ClassVar[Sequence[str]] = ()
    # The objective's own reasons, at most `protocol.verdicts.OBJECTIVE_CODES_MAX`.
    rejection_reasons: ClassVar[tuple[RejectionReason, ...]] = ()

    def metric_rows(self, metrics: Mapping[str, float], missing: str) -> Iterator[tuple[str, str]]:
        """Yield (name, text) of the metrics for a model card. `missing` is the text for metrics that were not measured."""
        held_out = [
            f"{name.removeprefix('held_out_').replace('_', ' ')} {value:.4g}"
            for name, value in sorted(metrics.items())
            if name.startswith("held_out")
        ]
        yield "held out", ", ".join(held_out) or missing

    @property
    def reason_labels(self) -> tuple[str, ...]:
        """Labels of the objective's own rejection reasons, in the order of their codes."""
        return tuple(reason.label for reason in self.rejection_reasons)

    def spec_problem(self, job: JobSpecProtocol, settings: Any) -> str | None:
        """Return why the job is invalid, with the name of the invalid field; None if it is valid.

        `settings` are the objective's own settings, or None.
        """
        return None

    def tensor_shapes(self, job: JobSpecProtocol, settings: Any) -> Sequence[tuple[str, Shape]]:
        """Return names and shapes of the tensors, in the order of the flat vector."""
        raise NotImplementedError

    def initial_parameter(self, name: str, shape: Shape) -> LayerParameter:
        """Return the initial values of a tensor that the objective adds to those of the model."""
        return LayerParameter(name, shape, deviation=linear_deviation(shape[1]) if len(shape) > 1 else 0.0)

    def pass_parameters(self, job: JobSpecProtocol) -> int:
        """Return the number of parameters of the transformer that a pass computes with for each token."""
        return job.model.pass_parameters

    def freezes_layers(self, job: JobSpecProtocol) -> bool:
        """Return true if the layers stay unchanged, and only the tensors outside them learn."""
        return False

    def required_model(self, job: JobSpecProtocol) -> ModelReference | None:
        """Return a reference to the model of another finished job that trainers and auditors need; None if they need none."""
        return None

    def first_model(self, job: JobSpecProtocol) -> FirstModel | None:
        """Return the saved model with which the job begins; None: its first model follows from the specification."""
        return None

    def merge_into_required(
        self, job: JobSpecProtocol, tensors: Tensors, required: ModelSpec, of_required: Tensors
    ) -> MergedModel:
        """Return the transformer that this job's tensors and those of its `required_model` make together.

        Only objectives with `changes_required_model` have this method.
        """
        raise NotImplementedError

    def required_files(self, job: JobSpecProtocol) -> Mapping[bytes, int]:
        """Return the digests of further blobs that trainers and auditors need, each with its most bytes."""
        return {}

    def stop_token(self, job: JobSpecProtocol) -> int | None:
        """Return the token that ends an answer of the job's model; None if there is none."""
        return None

    def moderates_output(self, job: JobSpecProtocol) -> bool:
        """Return true if people may see a text only after `withholds_output` has judged all of it."""
        return False

    def withholds_output(self, job: JobSpecProtocol, files: Mapping[bytes, Path], prompt: bytes, text: bytes) -> bool:
        """Return true if people must not see this answer to a prompt. `files` are the files of `required_files`, by digest."""
        return False

    def declaration_problem(self, job: JobSpecProtocol, record: Any) -> str | None:
        """Return why a record of type `declaration_type` is invalid; None if it is valid. Voters check it without an engine."""
        return None

    def declared_blobs(self, job: JobSpecProtocol, record: Any) -> Mapping[bytes, int]:
        """Return the digests of the blobs that the record names, each with its most bytes.

        Peers that re-execute the proposal fetch these blobs.
        """
        return {}

    def round_files(self, job: JobSpecProtocol, brief: bytes, files: Mapping[bytes, Path]) -> Mapping[bytes, int]:
        """Return the digests of the blobs that a round's brief names, each with its most bytes.

        A blob may name further blobs: `files` are those that have been fetched. The trainer and all re-executors fetch these
        blobs for one round. Raises `RemoteProtocolError` for a malformed brief or file.
        """
        return {}

    def declared_bytes_max(self, job: JobSpecProtocol) -> int:
        """Return the largest sum of the bytes of all blobs that a record may name.

        Auditors fetch these blobs, and the trainer keeps them.
        """
        return 0

    def outer_terms(self, job: JobSpecProtocol, brief: bytes) -> AdamWTerms | None:
        """Return the terms of the outer AdamW step that a round's brief names. None: they follow from the specification."""
        return None

    def next_controller_state(self, job: JobSpecProtocol, before: bytes, accepted: Sequence[Any]) -> bytes:
        """Return the controller state of the next round, at most `STEERING_BYTES_MAX`. It is part of the replicated model.

        It depends on the previous state and on the declarations of the accepted proposals.
        """
        return before

    def draw_examples(
        self, job: JobSpecProtocol, step: InnerStep, count: int, data: TokenizedText, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of the `count` examples of a step. For text these are the offsets of sequences.

        The examples depend only on the arguments, since auditors must get the same examples and no trainer may choose them.
        `declaration` is the trainer's declaration, if the objective has declarations.
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
        """Return the arrays that the loss function takes after the model. Each array has one row for each example in `drawn`."""
        from training.data.token_sequences import sequence_batch

        return sequence_batch(data.train, drawn, job.model.context)

    def deterministic_update(self, job: bytes, round: int, trainer: bytes, size: int) -> npt.NDArray[np.float32]:
        """Return the Δ of one trainer in one round, for an objective without training. The result is exact on any machine."""
        raise NotImplementedError
