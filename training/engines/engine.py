"""The interface between a worker and the library that computes gradients. All arguments and results are numpy arrays."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from training.token_generation import SampledToken
from training.worker_protocol import WorkerInfo


@dataclass(frozen=True, slots=True)
class RequiredModel:
    """The finished job whose model `Objective.required_model` names, with this model."""

    spec: JobSpec
    parameters: Float32Array
    data: TokenizedText  # data that the job's `Objective.data_reader` made


class Engine(Protocol):
    """An object that computes updates, metrics, texts, and samples for one job.

    Vectors have the job's layout: float32, shape (parameters,).
    """

    spec: JobSpec
    tokenizer: Tokenizer
    micro_batch: int  # most sequences of one forward pass; the worker may lower it
    first_parameters: Float32Array | None  # parameters of the job's first round, if its objective refers to these
    required_model: RequiredModel | None  # model of another job, if the objective requires one; set before the engine's first use
    required_files: Mapping[bytes, Path]  # files of `Objective.required_files` by digest; set before the engine's first use

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
        """Return the trainer's Δ of the round, and the mean loss of each inner step (for text in nats per token).

        `on_state` receives the state after each inner step. Where the objective has declarations, the steps follow the
        declaration. The learning rate follows from `taken`, the number of applied rounds. None: no round was undone, so this
        number is `round`.
        """

    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = ...) -> Mapping[str, float]:
        """Return the objective's metrics of a model by name, except those that the job has no data for."""

    def generate_text(
        self,
        parameters: Float32Array,
        prompt: bytes,
        how: SamplingOptions,
        on_step: OnProgress = ...,
        stop: int | None = None,
    ) -> Iterator[bytes]:
        """Yield the bytes after the prompt (after a newline, if it is empty), one token at a time, up to the first token `stop`.

        A beam search yields empty bytes at each step, and the whole text at the end. The bytes may contain the stop texts of
        `how`: the caller cuts the text there. The engine may do other computations between two tokens, without effect on the
        text. `parameters` must not change before the last token. Raises `UserError` at once if the job's tokens are not text.
        """

    def generate_tokens(
        self,
        parameters: Float32Array,
        prompt: Sequence[int],
        samples: int,
        how: SamplingOptions,
        ends: Callable[[Sequence[int]], bool],
        on_step: OnProgress = ...,
    ) -> Iterator[Sequence[SampledToken]]:
        """Yield the tokens that each pass over the model adds to samples of a prompt, until all samples have ended.

        The prompt has at least one token, and at most as many as the context. `ends` is true for the tokens of a complete sample.
        `parameters` and other computations between two passes are as for `generate_text`. Beams and stop texts of `how` are
        ignored.
        """

    def score_tokens(self, parameters: Float32Array, tokens: Sequence[int], on_step: OnProgress = ...) -> Float32Array:
        """Return the log-probability of each token but the first, given those before it: shape (tokens - 1,).

        The sequence has at most one token more than the context. `parameters` must not change as long as the array exists.
        """


@runtime_checkable
class DeclaringEngine(Engine, Declarer, Protocol):
    """An engine for objectives that have declarations."""


@runtime_checkable
class CompilingEngine(Engine, Protocol):
    """An engine whose programs are compiled before the first round of a job, which would otherwise wait for them."""

    def compile_programs(self, on_step: OnProgress) -> None:
        """Compile the programs of a round. `on_step` is called meanwhile, also from another thread."""


class EngineBackend(Protocol):
    """A library that implements engines. `start_backend` is called first, once in a process."""

    @property
    def name(self) -> str:
        """The engine's name, under which features register implementations."""

    def start_backend(self, resources: EngineResources, command: Sequence[str]) -> None:
        """Set up the library, and start its helper processes if `resources` request any.

        `command` is the command line of this process. Helper processes start with the same command line. Raises `UserError` for a
        device that this machine lacks.
        """

    def run_rank(self, resources: EngineResources, rank: int, store: Path, orders: BinaryIO) -> None:
        """Serve as a helper process, which another process started with the same resources. The call never returns.

        The processes find each other by the file `store`. The first process sends its commands over `orders`.
        """

    def describe_worker(self) -> WorkerInfo:
        """Return a description of the worker for people."""

    def open_engine(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None) -> Engine:
        """Return an engine for a job. `first` becomes its `Engine.first_parameters`."""

    def is_out_of_memory(self, error: BaseException) -> bool: ...
