"""The computations of a worker for one job, with PyTorch. Its arguments and results are numpy arrays."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from protocol.sampling import Activations, SamplingOptions
from training.data.token_sequences import TokenizedText
from training.data.tokenizer import Tokenizer
from training.engine_implementations import layer_implementation, objective_functions
from training.engine_resources import EngineResources, ParallelMode
from training.engines.adamw import weight_decay_mask
from training.engines.engine import OnProgress
from training.engines.local_training import Examples, LocalTraining
from training.engines.pytorch import sampling
from training.engines.pytorch.device import CPU, deterministic_algorithms, subtract_device_vector, to_device, to_numpy
from training.engines.pytorch.inner_optimizers import (
    AdamW,
    Muon,
    clip_gradients,
    make_inner_optimizer,
    sam_perturbation,
)
from training.engines.pytorch.layers import TorchBlock
from training.engines.pytorch.model import GPT, NAME
from training.engines.pytorch.token_engine import TokenEngine
from training.job_spec import JobSpec, Precision
from training.objectives.objective import Declaration
from training.replay.inner_state import InnerState
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


class TorchEngine(LocalTraining, TokenEngine):
    """An engine whose parameters and gradient are vectors on one device."""

    def __init__(
        self,
        spec: JobSpec,
        tokens: TokenizedText,
        tokenizer: Tokenizer,
        first: Float32Array | None = None,
        device: torch.device = CPU,
        resources: EngineResources = DEFAULT_RESOURCES,
    ) -> None:
        super().__init__(spec, tokens, tokenizer, first)
        most = sequences_that_fit(spec, resources)
        if most is not None and most < self.micro_batch:
            what = "job %r: micro-batches of %d sequences instead of %d, because of memory_mb_max %d"
            log.warning(what, spec.name, most, self.micro_batch, resources.memory_mb_max)
            self.micro_batch = most
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
        self.require_layout(parameters)
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

    def moved_from(self, parameters: Float32Array) -> Float32Array:
        return (
            super().moved_from(parameters)
            if self.device.type == "cpu"
            else subtract_device_vector(parameters, self.model.parameters)
        )

    def local_steps_context(self) -> AbstractContextManager[None]:
        return self.model.local_steps()

    def clipped_gradient(self) -> Float32Array:
        clip_gradients(self.model.gradients, self.spec.gradient_clip)
        return to_numpy(self.model.gradients).copy()

    def make_optimizer(self, inner: InnerState | None = None) -> AdamW | Muon:
        moments = to_device(inner.moments.copy(), self.device) if inner else None
        return make_inner_optimizer(self.spec, self.model, self._decayed, moments, inner.steps if inner else 0)

    def read_state(self, optimizer: AdamW | Muon) -> InnerState:
        return InnerState(optimizer.steps, to_numpy(optimizer.moments))

    def step_gradient(self, drawn: npt.NDArray[np.int64], on_step: OnProgress, declaration: Declaration | None) -> float:
        loss = super().step_gradient(drawn, on_step, declaration)
        if self.spec.sam_radius:
            with sam_perturbation(self.model.parameters, self.model.gradients, self.spec.sam_radius):
                self.accumulate_gradient(drawn, on_step, declaration)
        return loss

    def step_context(self) -> AbstractContextManager[None]:
        return no_subnormal_numbers()

    def accumulate_micro_batches(
        self, drawn: npt.NDArray[np.int64], on_step: OnProgress, declaration: Declaration | None
    ) -> float:
        try:
            with deterministic_algorithms(self.device) if self._is_strict else nullcontext():
                if self._refer:
                    self._refer(self, drawn, on_step)
                return super().accumulate_micro_batches(drawn, on_step, declaration)
        except RuntimeError as error:
            # Torch reports that an operation has no deterministic algorithm.
            if not self._is_strict or "deterministic" not in str(error):
                raise
            log.warning("job %r: results of this device may differ between executions: %s", self.spec.name, error)
        self._is_strict = False
        return self.accumulate_micro_batches(drawn, on_step, declaration)

    def clear_gradient(self) -> None:
        self.model.gradients.zero_()

    def add_gradient(self, examples: Examples, weight: float) -> Tensor:
        with autocast_context(self.spec, self.device):
            loss = self._loss(self.model, *(to_device(array, self.device) for array in examples)) * weight
        loss.backward()
        return loss.detach().double()  # The loss stays on the device, since each read waits for the accelerator.

    def is_out_of_memory(self, error: BaseException) -> bool:
        return isinstance(error, MemoryError | RuntimeError) and is_out_of_memory(error)

    def release_memory(self) -> None:
        if self.device.type == "cuda":
            # Cached free memory consists of pieces of the former sizes, which the smaller micro-batches cannot use.
            torch.cuda.empty_cache()

    def compute_metrics(self, parameters: Float32Array, on_step: OnProgress = lambda: None) -> Mapping[str, float]:
        self.load_parameters(parameters)
        if self._refer:
            self._refer(self, None, on_step)
        with torch.no_grad():
            return self._measure(self.model, self.spec, self.tokens, on_step) if self._measure else {}

    def generate_from_tokens(
        self,
        parameters: Float32Array,
        prompt: Sequence[int],
        how: SamplingOptions,
        last: set[int],
        ends: Callable[[Sequence[int]], bool],
        on_step: OnProgress,
    ) -> Iterator[Sequence[int]]:
        model = self.model.with_int8_activations() if how.activations is Activations.INT8 else self.model

        def before_pass() -> None:
            on_step()
            self.model_with(parameters)  # Another computation may have replaced the model's parameters since the last token.

        if not how.beams:
            return sampling.sample_tokens(model, prompt, how, last, before_pass)
        return sampling.beam_search(model, prompt, how, last, before_pass, ends)


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
    kept = KEPT
    kept += bool(spec.sam_radius)  # The second pass of SAM needs a copy of the parameters.
    if spec.model.linear == TernaryLinear.name:
        # A pass keeps the ternary weights for the gradient. During local steps `MovingWeights` keeps two vectors more.
        kept += 1 if spec.sends_gradients else 3
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
