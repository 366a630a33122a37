"""The computations of a worker for one job: updates, metrics and text. Its arguments and results are numpy arrays.

An update is the result of inner steps, or one gradient. Replays on one machine with one thread count are bit-equal. Another
thread count or vector unit moves Δ by about 1e-5 of its norm, far below the tolerance of audits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.errors import UserError
from protocol.sampling import Activations, SamplingOptions
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_implementations import layer_implementation, objective_functions
from training.engine_resources import EngineResources, ParallelMode
from training.engines.engine import OnProgress, RequiredModel
from training.engines.pytorch import sampling
from training.engines.pytorch.device import CPU, deterministic_algorithms, subtract_device_vector, to_device, to_numpy
from training.engines.pytorch.inner_optimizers import AdamW, Muon, clip_gradients, make_inner_optimizer, weight_decay_mask
from training.engines.pytorch.layers import TorchBlock
from training.engines.pytorch.model import GPT, NAME
from training.engines.pytorch.token_engine import TokenEngine
from training.job_spec import JobSpec, Precision
from training.objectives.objective import Declaration, InnerStep
from training.replay.inner_state import InnerState, OnState
from training.replicated.outer_optimizer import inner_rate
from training.replicated.tensor_layout import Float32Array, layout_of
from training.transformer import ModelSpec, TernaryLinear

log = logging.getLogger("peer")
DEFAULT_RESOURCES = EngineResources()
PARALLEL_ELEMENTS = 1 << 20  # elements of a tensor that is large enough for torch to use all threads
FLOAT_BYTES = 4
MB = 1_000_000
# Float32 numbers in memory for each parameter: its value, its gradient, its weight decay mask, and two moments.
KEPT = 5
OF_VOCABULARY = 3  # float32 numbers in memory for each logit: its value, its logarithm, and its gradient


@contextmanager
def no_subnormal_numbers() -> Iterator[None]:
    """Treat numbers below 2^-126 as zero, in this thread and in threads that torch starts here (`start_torch_threads`).

    A processor takes twenty times as long with such numbers, and a liar could choose an initial state of a replay that has them.
    This context must not enclose exact arithmetic, which needs subnormal numbers.
    """
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def start_torch_threads(count: int | None) -> None:
    """Let torch start this many threads (None: its default).

    It must be called once in a process, before torch first uses threads. A torch thread keeps its treatment of subnormal numbers
    from its start. A later `no_subnormal_numbers` in the calling thread does not change it.
    """
    if count is not None:
        torch.set_num_threads(count)
    with no_subnormal_numbers():
        torch.ones(PARALLEL_ELEMENTS).mul_(2)


class TorchEngine(TokenEngine):
    def __init__(
        self,
        spec: JobSpec,
        tokens: TokenizedText,
        tokenizer: Tokenizer,
        first: Float32Array | None = None,
        device: torch.device = CPU,
        resources: EngineResources = DEFAULT_RESOURCES,
    ) -> None:
        self.spec = spec
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.micro_batch, most = min(spec.micro_batch, spec.batch), sequences_that_fit(spec, resources)
        if most is not None and most < self.micro_batch:
            what = "job %r: micro-batches of %d sequences instead of %d, because of memory_mb_max %d"
            log.warning(what, spec.name, most, self.micro_batch, resources.memory_mb_max)
            self.micro_batch = most  # `accumulate_gradient` halves this number when memory runs out.
        self.first_parameters = first
        self.required_model: RequiredModel | None = None
        self.required_files: Mapping[bytes, Path] = {}
        self.device = device
        self._resources = resources
        self._is_strict = True  # True until an operation of the job has no deterministic algorithm.
        functions = objective_functions(NAME, spec.objective)
        assert functions.loss is not None, f"objective {spec.objective!r} has an engine of its own"
        self._loss = compile_loss(functions.loss, spec.name) if resources.compile else functions.loss
        self._measure, self._refer = functions.metrics, functions.reference
        self._prepare()

    def _prepare(self) -> None:
        self.model = GPT(self.spec, self.device)
        self.model.recompute = self._resources.recompute
        self._decayed = to_device(weight_decay_mask(self.spec), self.device)
        self._loaded: Float32Array | None = None  # parameters that `model_with` has loaded; None: other ones

    def load_parameters(self, parameters: Float32Array) -> None:
        assert parameters.shape == (layout_of(self.spec).size,) and parameters.dtype == np.float32
        self.model.load_parameters(parameters)
        self._loaded = None  # The caller may change the parameters.

    def model_with(self, parameters: Float32Array) -> GPT:
        if self._loaded is not parameters:
            self.load_parameters(parameters)
            self._loaded = parameters
        return self.model

    def read_parameters(self) -> Float32Array:
        """Return the model's current parameters. The array is a view if the model is on the CPU."""
        return to_numpy(self.model.parameters)

    def _moved_from(self, parameters: Float32Array) -> Float32Array:
        """Return Δ: the given parameters minus the current ones."""
        return (
            parameters - self.read_parameters()
            if self.device.type == "cpu"
            else subtract_device_vector(parameters, self.model.parameters)
        )

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
            with no_subnormal_numbers():
                drawn = self.draw_batch(job, round, trainer, 0, self.spec.batch, declaration)
                loss = self.accumulate_gradient(drawn, on_step, declaration)
                return self._clipped_gradient(), (loss,)
        optimizer, losses, rate = self.make_optimizer(inner), [], inner_rate(self.spec, round if taken is None else taken)
        with self._local_steps_of_model():
            for step in range(self.spec.local_steps):
                with no_subnormal_numbers():
                    drawn = self.draw_batch(job, round, trainer, step, self.spec.batch, declaration)
                    losses.append(self.accumulate_gradient(drawn, on_step, declaration))
                    optimizer.step(rate)
                if on_state is not None:
                    on_state(self.read_parameters(), InnerState(optimizer.steps, to_numpy(optimizer.moments)))
        return self._moved_from(parameters), losses

    def _local_steps_of_model(self) -> AbstractContextManager[None]:
        return self.model.local_steps()

    def _clipped_gradient(self) -> Float32Array:
        clip_gradients(self.model.gradients, self.spec.gradient_clip)
        return to_numpy(self.model.gradients).copy()

    def make_optimizer(self, inner: InnerState | None = None) -> AdamW | Muon:
        """Return the job's optimizer, with its own copy of the moments in `inner`; without `inner` all moments are zero."""
        moments = to_device(inner.moments.copy(), self.device) if inner else None
        return make_inner_optimizer(self.spec, self.model, self._decayed, moments, inner.steps if inner else 0)

    def draw_batch(
        self, job: bytes, round: int, trainer: bytes, step: int, size: int, declaration: Declaration | None = None
    ) -> npt.NDArray[np.int64]:
        """Return the numbers of the examples that the objective draws for one inner step."""
        return self.spec.resolved_objective.draw_examples(
            self.spec, InnerStep(job, round, trainer, step), size, self.tokens, declaration
        )

    def accumulate_gradient(
        self, drawn: npt.NDArray[np.int64], on_step: OnProgress = lambda: None, declaration: Declaration | None = None
    ) -> float:
        """Accumulate the mean gradient over the drawn examples, and return their mean loss (for text in nats per token)."""
        while True:
            try:
                with deterministic_algorithms(self.device) if self._is_strict else nullcontext():
                    return self._accumulate(drawn, on_step, declaration)
            except (MemoryError, RuntimeError) as error:
                # Torch reports that an operation has no deterministic algorithm.
                if self._is_strict and "deterministic" in str(error):
                    log.warning("job %r: results of this device may differ between executions: %s", self.spec.name, error)
                    self._is_strict = False
                    continue
                if not is_out_of_memory(error) or self.micro_batch == 1:
                    raise
            self.micro_batch //= 2
            log.warning("job %r: out of memory; micro-batches of %d sequences from now on", self.spec.name, self.micro_batch)
            if self.device.type == "cuda":
                # Cached free memory consists of pieces of the former sizes, which the smaller micro-batches cannot use.
                torch.cuda.empty_cache()

    def _accumulate(self, drawn: npt.NDArray[np.int64], on_step: OnProgress, declaration: Declaration | None) -> float:
        if self._refer:
            self._refer(self, drawn, on_step)
        self.model.gradients.zero_()
        # The sum is on the device and is read once, since each read waits for the accelerator.
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for start in range(0, len(drawn), self.micro_batch):
            part = drawn[start : start + self.micro_batch]
            examples = self.spec.resolved_objective.batch_arrays(self.spec, part, self.tokens, declaration)
            with autocast_context(self.spec, self.device):
                loss = self._loss(self.model, *(to_device(array, self.device) for array in examples)) * (len(part) / len(drawn))
            loss.backward()
            total += loss.detach().double()
            on_step()
        return float(total)

    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> Mapping[str, float]:
        self.load_parameters(parameters)
        if self._refer:
            self._refer(self, None, on_step)
        with torch.no_grad():
            return self._measure(self.model, self.spec, self.tokens, on_step) if self._measure else {}

    def compute_main_metric(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> float | None:
        """Return the objective's main metric; None if there are no data for it."""
        return self.compute_metrics(parameters, on_step).get(self.spec.resolved_objective.main_metric)

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
        model = self.model.with_int8_activations() if how.activations is Activations.INT8 else self.model
        ids = [int(token) for token in self.tokenizer.encode(prompt or b"\n")]
        last = {token for token in (stop, self.tokenizer.end_of_text) if token is not None}

        def before_pass() -> None:
            on_step()
            self.model_with(parameters)  # Another computation may have replaced the model's parameters since the last token.

        if not how.beams:
            return map(self.tokenizer.decode, sampling.sample_tokens(model, ids, how, last, before_pass))
        stops = [text.encode() for text in how.stop]
        longest = max(map(len, stops), default=0)

        def ends(made: Sequence[int]) -> bool:
            """Return true if the last token completes a stop text.

            Every token has at least one byte, so a bounded number of tokens is checked.
            """
            tail = self.tokenizer.decode(made[-longest:])
            return any(text in tail for text in stops)

        found = sampling.beam_search(model, ids, how, last, before_pass, ends)
        return map(self.tokenizer.decode, found)


def sequence_bytes(model: ModelSpec, recompute: bool) -> int:
    """Return the bytes of one sequence of a micro-batch: all that a pass keeps for the gradient.

    With `recompute`, all layers keep their inputs, and only one layer at a time keeps its other results.
    """
    blocks: list[type[TorchBlock]] = [layer_implementation(NAME, name) for name in (model.attention, model.feed_forward)]
    layer = sum(block.saved_floats(model) for block in blocks)
    layers = layer + model.layers * model.width if recompute else model.layers * layer
    return FLOAT_BYTES * model.context * (layers + OF_VOCABULARY * model.vocabulary + 2 * model.width)


def sequences_that_fit(spec: JobSpec, resources: EngineResources) -> int | None:
    """Return how many sequences of a micro-batch fit into the memory of `resources`, at least 1. None: there is no bound."""
    if not resources.memory_mb_max:
        return None
    parts = resources.gpus if resources.parallel is ParallelMode.FSDP else 1
    kept = KEPT + (spec.model.linear == TernaryLinear.name)  # A pass keeps the ternary weights for the gradient.
    left = resources.memory_mb_max * MB - kept * FLOAT_BYTES * layout_of(spec).size // parts
    return max(1, left // sequence_bytes(spec.model, resources.recompute))


def is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or ("alloc" in str(error) and "memory" in str(error))


def compile_loss(loss: Callable[..., Tensor], job: str) -> Callable[..., Tensor]:
    """Return the loss function, compiled at its first use.

    If the compiler fails for any reason, the uncompiled function is used.
    """
    known: list[Callable[..., Tensor]] = [torch.compile(loss)]

    def tried(*arguments: Any) -> Tensor:
        try:
            return known[-1](*arguments)
        except Exception as error:
            if known[-1] is loss or is_out_of_memory(error):
                raise
            log.warning(
                "job %r: cannot compile the loss, which is computed without compilation: %s",
                job,
                str(error).strip().partition("\n")[0],
            )
            known.append(loss)
            return loss(*arguments)

    return tried


def autocast_context(spec: JobSpec, device: torch.device) -> AbstractContextManager[None]:
    """Return a context manager that sets the job's precision of matrix products in a loss.

    Metrics are computed in float32 on all peers.
    """
    is_half = spec.precision is Precision.BF16
    return torch.autocast(device.type, torch.bfloat16, enabled=is_half)
