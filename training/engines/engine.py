"""What computes gradients, seen from the worker: numpy arrays go in and come out, whatever library works in between."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol, runtime_checkable

from protocol.sampling import SamplingOptions
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_resources import EngineResources
from training.job_spec import JobSpec
from training.objectives.objective import Declaration
from training.replay.inner_state import InnerState, OnState
from training.replay.proposal_replay import Declarer, OnProgress
from training.replicated.tensor_layout import Float32Array
from training.worker_protocol import WorkerInfo


@dataclass(frozen=True, slots=True)
class RequiredModel:
    """The finished job that `Objective.read` names."""

    spec: JobSpec
    parameters: Float32Array
    data: TokenizedText  # as its objective's reader made it


class Engine(Protocol):
    """For one job. Vectors have the job's layout: float32, shape (parameters,)."""

    spec: JobSpec
    tokenizer: Tokenizer
    micro_batch: int  # sequences in one forward pass at most; it may be lowered
    first_parameters: Float32Array | None  # the parameters of the job's first round, where its objective refers to them
    required_model: RequiredModel | None  # set before the first use, where the job reads another's model
    required_files: Mapping[bytes, Path]  # as `other`, those that `Objective.files` names

    def local_steps(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        on_step: OnProgress = ...,
        inner: InnerState | None = None,
        on_state: OnState | None = None,
        declaration: Declaration | None = None,
        taken: int | None = None,
    ) -> tuple[Float32Array, Sequence[float]]:
        """Δ of the trainer in the round, and the mean loss of each inner step, of text in nats per token. `on_state` sees the
        state after each inner step.

        The steps go by the declaration, where the objective has declarations. Their rate is that of the round after `taken`
        others; None: no round was undone, so it is the round's number.
        """

    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = ...) -> Mapping[str, float]:
        """The objective's figures of a model by name, but for those that the job has nothing to measure with."""

    def generate_text(
        self,
        parameters: Float32Array,
        prompt: bytes,
        how: SamplingOptions,
        on_step: OnProgress = ...,
        stop: int | None = None,
    ) -> Iterator[bytes]:
        """The bytes after the prompt (after a newline, if it is empty), as tokens have them, up to the first token `stop`.

        They come one token at a time, or, of a beam search, nothing for each step and all at last. The stop texts of `how` may be
        in them: whoever reads ends there. What the engine computes in between changes nothing of them. `parameters` must not
        change meanwhile. Raises `UserError` at once where tokens are no text.
        """


@runtime_checkable
class DeclaringEngine(Engine, Declarer, Protocol):
    """For objectives that have declarations."""


class EngineBackend(Protocol):
    """A library that engines are made with. `start_backend` comes first, once in a process."""

    @property
    def name(self) -> str:
        """As features and the losses of objectives call it."""

    def start_backend(self, resources: EngineResources, command: Sequence[str]) -> None:
        """`command` started this process, and starts others that assist it. `UserError` for a device that is not here."""

    def run_rank(self, resources: EngineResources, rank: int, store: Path, orders: BinaryIO) -> None:
        """In a process that another one has started with the same resources: never returns. They meet at the file `store`."""

    def describe_worker(self) -> WorkerInfo:
        """For people."""

    def open_engine(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None) -> Engine:
        """`first` as `Engine.first_parameters`."""

    def is_out_of_memory(self, error: BaseException) -> bool: ...
