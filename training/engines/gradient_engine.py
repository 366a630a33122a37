"""The base of engines that bring only a gradient and logits. Everything else is done here, in numpy on flat float32 vectors."""

from __future__ import annotations

import dataclasses
import threading
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, ClassVar, Final

import numpy as np
import numpy.typing as npt

from protocol.codec import is_added
from protocol.errors import UserError
from protocol.sampling import SamplingOptions
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_implementations import objective_functions, require_implemented
from training.engine_resources import EngineResources, ParallelMode
from training.engines import token_sampling
from training.engines.adamw import FlatAdamW, clip_gradient, weight_decay_mask
from training.engines.engine import OnProgress
from training.engines.held_out_evaluation import log_probabilities
from training.engines.local_training import Examples, LocalTraining
from training.job_spec import InnerOptimizerKind, JobSpec, Precision
from training.objectives.objective import Declaration
from training.replay.inner_state import InnerState
from training.replicated.tensor_layout import Float32Array, layout_of
from training.token_generation import SampledToken

# Added fields of a job that change only the outer step, which no engine computes.
OUTER_FIELDS: Final = frozenset({"grokfast", "grokfast_decay"})
HEARTBEAT_SECONDS: Final = 0.5  # seconds between two heartbeats of a compilation: the worker sends one a second


class GradientEngine(LocalTraining):
    """An engine for the objectives, layers and precision that are registered under its name, with AdamW.

    Its programs are compiled for fixed shapes, so the first pass of a size is long. The worker sends heartbeats meanwhile.
    """

    name: ClassVar[str]  # name of the engine

    def __init__(self, spec: JobSpec, tokens: TokenizedText, tokenizer: Tokenizer, first: Float32Array | None = None) -> None:
        require_implemented("inner optimizer", self.name, spec.inner.value, [InnerOptimizerKind.ADAMW.value])
        require_implemented("precision", self.name, spec.precision.value, [Precision.FP32.value])
        require_known_fields(self.name, spec.model, ())
        require_known_fields(self.name, spec, OUTER_FIELDS)
        super().__init__(spec, tokens, tokenizer, first)
        self._functions = objective_functions(self.name, spec.objective)
        size = layout_of(spec).size
        self._parameters, self._gradient = np.zeros(size, dtype=np.float32), np.zeros(size, dtype=np.float32)
        self._decayed = weight_decay_mask(spec)
        self._compiled = set[tuple[str, int]]()  # programs and numbers of sequences that were executed before

    # Methods of each engine ----------------------------------------------------------------------------------------------

    @abstractmethod
    def gradient(self, parameters: Float32Array, examples: Examples) -> tuple[float, Float32Array]:
        """Return the mean loss of at most `micro_batch` examples, and its gradient: shape (parameters,)."""

    @abstractmethod
    def logits(self, parameters: Float32Array, tokens_T: npt.NDArray[np.int64]) -> Float32Array:
        """Return the logits of each next token of one sequence, which has as many tokens as the context: (T, V).

        The array `parameters` does not change as long as it exists.
        """

    # Methods of `LocalTraining` and `Engine` in numpy --------------------------------------------------------------------

    def compile_programs(self, on_step: OnProgress) -> None:
        """Compile the program of the first round's gradient, if the job has a text."""
        if len(self.tokens.train) > self.spec.model.context:
            self.accumulate_gradient(np.zeros(self.micro_batch, dtype=np.int64), on_step)

    def load_parameters(self, parameters: Float32Array) -> None:
        self.require_layout(parameters)
        np.copyto(self._parameters, parameters)

    def read_parameters(self) -> Float32Array:
        return self._parameters

    def clear_gradient(self) -> None:
        self._gradient.fill(0)

    def add_gradient(self, examples: Examples, weight: float) -> float:
        loss, gradient = self.gradient(self._parameters, examples)
        assert gradient.shape == self._gradient.shape and gradient.dtype == np.float32
        self._gradient += np.float32(weight) * gradient
        return weight * loss

    def clipped_gradient(self) -> Float32Array:
        clip_gradient(self._gradient, self.spec.gradient_clip)
        return self._gradient.copy()

    def make_optimizer(self, inner: InnerState | None = None) -> FlatAdamW:
        state = InnerState.fresh(self.spec) if inner is None else inner
        return FlatAdamW(self.spec, self._parameters, self._gradient, self._decayed, state)

    def read_state(self, optimizer: FlatAdamW) -> InnerState:
        return InnerState(optimizer.steps, optimizer.moments)

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError)

    def accumulate_micro_batches(
        self, drawn: npt.NDArray[np.int64], on_step: OnProgress, declaration: Declaration | None
    ) -> float:
        with self._heartbeats("gradient", self.micro_batch, on_step):
            return super().accumulate_micro_batches(drawn, on_step, declaration)

    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> Mapping[str, float]:
        measure = self._functions.metrics
        # The caller may change the parameters later, so `logits` gets a copy.
        return measure(self._logits_of(parameters.copy(), on_step), self.spec, self.tokens, on_step) if measure else {}

    def generate_from_tokens(
        self,
        parameters: Float32Array,
        prompt: Sequence[int],
        how: SamplingOptions,
        last: set[int],
        ends: Callable[[Sequence[int]], bool],
        on_step: OnProgress,
    ) -> Iterator[Sequence[int]]:
        if how.beams:
            raise UserError(f"beams {how.beams}: the engine {self.name!r} only draws texts, so leave beams out")
        logits = self._logits_of(parameters, on_step)
        return token_sampling.sample_tokens(logits, self.spec.model.context, prompt, how, last, on_step)

    def generate_tokens(
        self,
        parameters: Float32Array,
        prompt: Sequence[int],
        samples: int,
        how: SamplingOptions,
        ends: Callable[[Sequence[int]], bool],
        on_step: OnProgress = lambda: None,
    ) -> Iterator[Sequence[SampledToken]]:
        logits = self._logits_of(parameters, on_step)
        return token_sampling.sample_sequences(logits, self.spec.model.context, prompt, samples, how, ends, on_step)

    def score_tokens(self, parameters: Float32Array, tokens: Sequence[int], on_step: OnProgress = lambda: None) -> Float32Array:
        if len(tokens) == 1:
            return np.zeros(0, dtype=np.float32)
        on_step()
        ids = np.array(tokens, dtype=np.int64)
        return log_probabilities(self._logits_of(parameters, on_step)(ids[:-1]), ids[1:])

    def _logits_of(self, parameters: Float32Array, on_step: OnProgress) -> Callable[[npt.NDArray[np.int64]], Float32Array]:
        def logits(tokens_T: npt.NDArray[np.int64]) -> Float32Array:
            # Attention is causal, so tokens after the sequence have no effect on its logits.
            padded_T = np.pad(tokens_T, (0, self.spec.model.context - len(tokens_T)))
            with self._heartbeats("logits", 1, on_step):
                return self.logits(parameters, padded_T)[: len(tokens_T)]

        return logits

    @contextmanager
    def _heartbeats(self, program: str, sequences: int, on_step: OnProgress) -> Iterator[None]:
        """Call `on_step` from a thread during the first execution of a program, which compiles it."""
        is_compiled = (program, sequences) in self._compiled
        with nullcontext() if is_compiled else heartbeats_during(on_step):
            yield
        self._compiled.add((program, sequences))


@contextmanager
def heartbeats_during(on_step: OnProgress) -> Iterator[None]:
    """Call `on_step` at regular times from a thread, during work that cannot call it."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(HEARTBEAT_SECONDS):
            try:
                on_step()
            except Exception:  # The request was cancelled: the next call after the work raises the same error.
                return

    thread = threading.Thread(target=beat, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def pad_examples(examples: Examples, rows: int) -> tuple[list[npt.NDArray[Any]], Float32Array]:
    """Return the arrays with zeros up to a number of rows, and the weight of each row in the mean loss.

    Rows of zeros have the weight 0.
    """
    count = len(examples[0])
    assert 0 < count <= rows, f"{count} examples for a program of {rows}"
    weights = np.zeros(rows, dtype=np.float32)
    weights[:count] = 1 / count
    return [np.pad(array, ((0, rows - count), *[(0, 0)] * (array.ndim - 1))) for array in examples], weights


def require_known_fields(engine: str, record: Any, known: Collection[str]) -> None:
    """Raise `UserError` if the specification sets a field of later programs, for which the engine has no code."""
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if is_added(field) and value != field.default and field.name not in known:
            raise UserError(
                f"the engine {engine!r} cannot compute {field.name} {value}: start this peer with engine pytorch for such jobs"
            )


def require_plain_resources(engine: str, resources: EngineResources) -> None:
    """Raise `UserError` for settings that only the engine `pytorch` supports."""
    for name, is_set in (
        ("compile", resources.compile),
        ("recompute", resources.recompute),
        (f"parallel {resources.parallel}", resources.parallel is not ParallelMode.OFF),
        (f"memory_mb_max {resources.memory_mb_max}", resources.memory_mb_max > 0),
    ):
        if is_set:
            raise UserError(f"the engine {engine!r} does not support {name}: turn it off, or start this peer with engine pytorch")
