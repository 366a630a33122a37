"""The part of training that is the same in every engine: drawing, micro-batches, local steps, and Δ.

An update is the result of inner steps, or one gradient. Replays by one engine on one machine with one thread count are bit-equal.
Another engine, thread count or vector unit moves Δ by about 1e-5 of its norm, far below the tolerance of audits.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engines.engine import OnProgress, RequiredModel
from training.job_spec import JobSpec
from training.objectives.objective import Declaration, InnerStep
from training.replay.inner_state import InnerState, OnState
from training.replicated.outer_optimizer import inner_rate
from training.replicated.tensor_layout import Float32Array, layout_of

log = logging.getLogger("peer")
Examples = Sequence[npt.NDArray[Any]]  # arrays of `Objective.batch_arrays`, with one row for each example


class InnerOptimizer(Protocol):
    steps: int  # number of steps that were taken

    def step(self, rate: float) -> float:
        """Clip the gradient and take a step. Return the gradient's norm before clipping."""


class LocalTraining(ABC):
    """An engine that holds a copy of the parameters, and a gradient that micro-batches accumulate."""

    def __init__(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None = None) -> None:
        self.spec, self.tokens, self.tokenizer = spec, tokens, tokenizer
        self.micro_batch = min(spec.micro_batch, spec.batch)  # `accumulate_gradient` halves this number when memory runs out.
        self.first_parameters = first
        self.required_model: RequiredModel | None = None
        self.required_files: Mapping[bytes, Path] = {}

    # Methods of each engine ----------------------------------------------------------------------------------------------

    @abstractmethod
    def load_parameters(self, parameters: Float32Array) -> None:
        """Copy the vector into the engine."""

    @abstractmethod
    def read_parameters(self) -> Float32Array:
        """Return the current parameters. The array may be a view, which the next step changes."""

    @abstractmethod
    def clear_gradient(self) -> None: ...

    @abstractmethod
    def add_gradient(self, examples: Examples, weight: float) -> Any:
        """Add the gradient of the examples' mean loss times `weight`. Return this weighted loss.

        The loss may be a number on a device: it is added to others, and read once for a batch.
        """

    @abstractmethod
    def clipped_gradient(self) -> Float32Array:
        """Return a copy of the accumulated gradient, with a norm of at most `gradient_clip`."""

    @abstractmethod
    def make_optimizer(self, inner: InnerState | None = None) -> InnerOptimizer:
        """Return the job's optimizer, with its own copy of the moments in `inner`. Without `inner` all moments are zero."""

    @abstractmethod
    def read_state(self, optimizer: Any) -> InnerState:
        """Return the state of an optimizer. Its array may be a view, which the next step changes."""

    @abstractmethod
    def is_out_of_memory(self, error: BaseException) -> bool: ...

    @abstractmethod
    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> Mapping[str, float]: ...

    @abstractmethod
    def generate_from_tokens(
        self,
        parameters: Float32Array,
        prompt: Sequence[int],
        how: SamplingOptions,
        last: set[int],
        ends: Callable[[Sequence[int]], bool],
        on_step: OnProgress,
    ) -> Iterator[Sequence[int]]:
        """Yield the tokens after the prompt for `generate_text`. A token in `last` ends the text.

        In a beam search, a text also ends if `ends` is true for its tokens after the prompt.
        """

    def release_memory(self) -> None:  # noqa: B027 - most libraries keep no such memory
        """Free memory that only micro-batches of the former size needed."""

    def local_steps_context(self) -> AbstractContextManager[None]:
        """Return a context manager that encloses all local steps of a round."""
        return nullcontext()

    def step_context(self) -> AbstractContextManager[None]:
        """Return a context manager that encloses the arithmetic of each step."""
        return nullcontext()

    # Local steps, by these methods ---------------------------------------------------------------------------------------

    def local_steps(
        self,
        parameters: Float32Array,
        job: bytes,
        round: int,
        trainer: bytes,
        on_step: OnProgress = lambda: None,
        inner: InnerState | None = None,
        on_state: OnState | None = None,
        declaration: Declaration | None = None,
        taken: int | None = None,
    ) -> tuple[Float32Array, Sequence[float]]:
        """Return the Δ that `trainer` has to compute in `round`, and the mean loss of each step.

        Δ is θ_before − θ_after of the inner steps, or the clipped gradient where the job sends gradients. Without `inner` the
        steps start from a fresh inner state.
        """
        self.load_parameters(parameters)
        if self.spec.sends_gradients:
            with self.step_context():
                drawn = self.draw_batch(job, round, trainer, 0, self.spec.batch, declaration)
                loss = self.step_gradient(drawn, on_step, declaration)
                return self.clipped_gradient(), (loss,)
        optimizer, losses, rate = self.make_optimizer(inner), [], inner_rate(self.spec, round if taken is None else taken)
        with self.local_steps_context():
            for step in range(self.spec.local_steps):
                with self.step_context():
                    drawn = self.draw_batch(job, round, trainer, step, self.spec.batch, declaration)
                    losses.append(self.step_gradient(drawn, on_step, declaration))
                    optimizer.step(rate)
                if on_state is not None:
                    on_state(self.read_parameters(), self.read_state(optimizer))
        return self.moved_from(parameters), losses

    def moved_from(self, parameters: Float32Array) -> Float32Array:
        """Return Δ: the given parameters minus the current ones."""
        return parameters - self.read_parameters()

    def draw_batch(
        self, job: bytes, round: int, trainer: bytes, step: int, size: int, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of the examples that the objective draws for one inner step."""
        return self.spec.resolved_objective.draw_examples(
            self.spec, InnerStep(job, round, trainer, step), size, self.tokens, declaration
        )

    def step_gradient(self, drawn: npt.NDArray[np.int64], on_step: OnProgress, declaration: Declaration | None) -> float:
        """Compute the gradient of a step, and return the mean loss of its first pass. An engine with SAM takes a second pass."""
        return self.accumulate_gradient(drawn, on_step, declaration)

    def accumulate_gradient(
        self, drawn: npt.NDArray[np.int64], on_step: OnProgress = lambda: None, declaration: Declaration | None = None
    ) -> float:
        """Accumulate the mean gradient over the drawn examples, and return their mean loss (for text in nats per token)."""
        while True:
            try:
                return self.accumulate_micro_batches(drawn, on_step, declaration)
            except Exception as error:
                if not self.is_out_of_memory(error) or self.micro_batch == 1:
                    raise
            self.micro_batch //= 2
            log.warning("job %r: out of memory; micro-batches of %d sequences from now on", self.spec.name, self.micro_batch)
            self.release_memory()

    def accumulate_micro_batches(
        self, drawn: npt.NDArray[np.int64], on_step: OnProgress, declaration: Declaration | None
    ) -> float:
        """Do the work of `accumulate_gradient` with micro-batches of the current size."""
        self.clear_gradient()
        total: Any = 0.0
        for start in range(0, len(drawn), self.micro_batch):
            part = drawn[start : start + self.micro_batch]
            examples = self.spec.resolved_objective.batch_arrays(self.spec, part, self.tokens, declaration)
            total += self.add_gradient(examples, len(part) / len(drawn))
            on_step()
        return float(total)

    def compute_main_metric(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> float | None:
        """Return the objective's main metric; None if there are no data for it."""
        return self.compute_metrics(parameters, on_step).get(self.spec.resolved_objective.main_metric)

    def require_layout(self, parameters: Float32Array) -> None:
        assert parameters.shape == (layout_of(self.spec).size,) and parameters.dtype == np.float32

    def generate_text(
        self,
        parameters: Float32Array,
        prompt: bytes,
        how: SamplingOptions,
        on_step: OnProgress = lambda: None,
        stop: int | None = None,
    ) -> Iterator[bytes]:
        if not self.spec.has_text:
            raise UserError(
                f"the model of {self.spec.name!r} cannot generate text: its {self.spec.model.vocabulary} tokens have no text"
            )
        ids = [int(token) for token in self.tokenizer.encode(prompt or b"\n")]
        last = {token for token in (stop, self.tokenizer.end_of_text) if token is not None}
        stops = [text.encode() for text in how.stop]
        longest = max(map(len, stops), default=0)

        def ends(made: Sequence[int]) -> bool:
            """Return true if the last token completes a stop text.

            Every token has at least one byte, so a bounded number of tokens is checked.
            """
            tail = self.tokenizer.decode(made[-longest:])
            return any(text in tail for text in stops)

        return map(self.tokenizer.decode, self.generate_from_tokens(parameters, ids, how, last, ends, on_step))
